"""One event of a post on its way into the store."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from andon.policy import Policy
from andon.wire import Event, format_time
from runs import reports
from runs.rows import Post


@dataclass(slots=True)
class Taken:
    """One event on its way into the store."""

    index: int
    event: Event
    occurred_at: datetime
    late_s: float
    attempt: int | None
    backfill: bool = False

    @classmethod
    def of(cls, index: int, event: Event, post: Post) -> "Taken":
        if event.occurred_ns is None:
            return cls(index, event, post.received_at, 0.0, event.attempt)
        occurred = datetime.fromtimestamp(event.occurred_ns / 1e9, UTC)
        late_s = post.received_at.timestamp() - (event.occurred_ns / 1e9 + post.offset_s)
        return cls(index, event, occurred, late_s, event.attempt)

    def needs_care(self, policy: Policy) -> bool:
        return self.event.type in reports.REPORTS or self.late_s > policy.nonfinite.backfill_after_s

    @property
    def needs_look(self) -> bool:
        return bool(self.event.flags) or bool(self.event.data.get("nonfinite"))

    def row(self) -> dict[str, Any]:
        event = self.event
        row: dict[str, Any] = {"t": event.type, "i": self.index, "d": event.data, "v": event.view}
        if event.step is not None:
            row["s"] = event.step
        if event.rank is not None:
            row["r"] = event.rank
        if event.node is not None:
            row["n"] = event.node
        if self.attempt is not None:
            row["a"] = self.attempt
        if event.occurred_ns is not None:
            row["o"] = format_time(event.occurred_ns)
        if self.backfill:
            row["b"] = True
        if event.ranks is not None:
            row["k"] = event.ranks
        if event.flags:
            row["f"] = event.flags
        if event.extra:
            row["d"] = {**event.data, "$extra": event.extra}
        return row
