"""What is really sent to the store of the vault."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from evidence.stores import s3_client


@contextlib.contextmanager
def calls_of(*operations: str) -> Iterator[list[tuple[str, str]]]:
    """Collect name and URL of every call of these operations, as it is made."""
    sent: list[tuple[str, str]] = []
    with before(lambda name, url: sent.append((name, url)), *operations):
        yield sent


@contextlib.contextmanager
def before(call: Callable[[str, str], object], *operations: str) -> Iterator[None]:
    """Have `call` told name and URL before each call of these operations; what it raises ends the call."""

    def handler(model: Any, params: dict[str, Any], **_: Any) -> None:
        call(model.name, params["url"])

    events = s3_client.source_client().meta.events
    for name in operations:
        events.register(f"before-call.s3.{name}", handler, unique_id=f"test-{name}")
    try:
        yield
    finally:
        for name in operations:
            events.unregister(f"before-call.s3.{name}", unique_id=f"test-{name}")
