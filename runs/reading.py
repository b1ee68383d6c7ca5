"""What many parts of one page need is read once while that page is made.

Only inside `once()`: a page is one look at the rows, and its parts must not disagree. Whatever decides or
writes reads for itself.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")
_kept: ContextVar[dict[Hashable, Any] | None] = ContextVar("kept", default=None)


@contextmanager
def once() -> Iterator[None]:
    """Keep what is read inside, until the page is made."""
    token = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(token)


def read_before(key: Hashable) -> Any:
    """Return what was read under `key` while this page is made, None where nothing was."""
    known = _kept.get()
    return None if known is None else known.get(key)


def kept(key: Hashable, read: Callable[[], T]) -> T:
    """Return what was read under `key` while this page is made, else read it."""
    known = _kept.get()
    if known is None:
        return read()
    if key not in known:
        known[key] = read()
    found: T = known[key]
    return found
