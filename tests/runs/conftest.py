"""A trainer that posts through the whole stack, signed as a real one signs."""

import json
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from django.test import Client

from andon import wire
from andon.signing import sign_get, sign_webhook
from runs import identity, limits, progress
from runs.actions import create_run
from runs.models import Run


@dataclass
class Trainer:
    """Posts for one run. Every method returns Django's response; `.json()` reads it."""

    run: Run
    secret: str
    client: Client = field(default_factory=lambda: Client(headers={"host": "localhost"}))

    def headers(self, body: bytes, webhook_id: str | None = None, at_s: int | None = None) -> dict[str, str]:
        webhook_id = webhook_id or f"msg_{secrets.token_hex(8)}"
        at_s = int(time.time()) if at_s is None else at_s
        return {
            "webhook-id": webhook_id,
            "webhook-timestamp": str(at_s),
            "webhook-signature": sign_webhook(self.secret, webhook_id, at_s, body),
        }

    def post(
        self,
        body: bytes,
        *,
        path: str = "events",
        content_type: str = "application/json",
        webhook_id: str | None = None,
        at_s: int | None = None,
        **headers: str,
    ) -> Any:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.client.post(
            f"/api/v1/runs/{self.run.slug}/{path}",
            data=body,
            content_type=content_type,
            headers={**self.headers(body, webhook_id, at_s), **named},
        )

    def events(self, *events: dict[str, Any], **how: Any) -> Any:
        """Post events as JSON, NaN as the bare token trainers write."""
        return self.post(json.dumps(events[0] if len(events) == 1 else list(events)).encode(), **how)

    def step(self, step: int, *, rank: int | None = None, attempt: int | None = None, **data: Any) -> Any:
        event: dict[str, Any] = {"type": "step", "step": step, "data": data}
        if rank is not None:
            event["rank"] = rank
        if attempt is not None:
            event["attempt"] = attempt
        return self.events(event)

    def frame(self, frame: wire.Frame, **how: Any) -> Any:
        body, content_type = wire.encode_frame(frame)
        return self.post(body, path="frames", content_type=content_type, **how)

    def get(self, path: str, *, at_s: int | None = None, secret: str | None = None) -> Any:
        full = f"/api/v1/runs/{self.run.slug}/{path}"
        at_s = int(time.time()) if at_s is None else at_s
        webhook_id = f"get_{secrets.token_hex(8)}"
        return self.client.get(
            full,
            headers={
                "webhook-id": webhook_id,
                "webhook-timestamp": str(at_s),
                "webhook-signature": sign_get(secret or self.secret, webhook_id, at_s, "GET", full),
            },
        )


def new_trainer() -> Trainer:
    """Return a trainer with a fresh run."""
    made = create_run(name=f"run-{secrets.token_hex(5)}")
    return Trainer(made.run, made.secret)


@pytest.fixture(autouse=True)
def _nothing_remembered() -> Iterator[None]:
    """What a process remembers between posts must not reach from one test into the next."""
    identity.forget()
    limits._buckets = None
    progress.board.__init__()  # type: ignore[misc]
    yield
    timer = progress.board._timer
    if timer is not None:
        timer.cancel()
        timer.join()


@pytest.fixture
def trainer(project: object) -> Trainer:
    """A trainer of a fresh run, inside the test's transaction."""
    return new_trainer()


@pytest.fixture
def committing_trainer(transactional_db: None) -> Iterator[Trainer]:
    """A trainer whose posts really commit, for races and servers that fail."""
    yield new_trainer()
    progress.board.flush()


def rank_frame(
    *, steps: range, ranks: range, attempt: int = 1, node: str | None = None, **metrics: Any
) -> wire.Frame:
    """Return a rank frame over a rectangle; metrics default to a healthy loss and gradient norm."""
    shape = (len(steps), len(ranks))
    columns: dict[str, Any] = {
        "loss": np.full(shape, 2.25, dtype=np.float32),
        "grad_norm": np.full(shape, 0.4, dtype=np.float32),
    }
    columns.update({name: np.asarray(values) for name, values in metrics.items()})
    return wire.Frame(
        stream="rank",
        attempt=attempt,
        node=node,
        step=np.repeat(np.arange(steps.start, steps.stop, dtype=np.int64), len(ranks)),
        lane=np.tile(np.arange(ranks.start, ranks.stop, dtype=np.int32), len(steps)),
        metrics={name: values.reshape(-1) for name, values in columns.items()},
    )
