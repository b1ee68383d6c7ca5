"""Events: from the bytes of one post to typed events and a list of what was refused, and back."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import msgspec

from andon.wire_event_data import check_data
from andon.wire_times import parse_time
from andon.wire_values import (
    INT64_MAX,
    Cleaner,
    WireError,
    load_json,
    media_type,
    parse_ranks,
    unprocessable,
)

BITS: dict[str, int] = {
    "input": 1,
    "forward": 2,
    "local_grad": 4,
    "reduced_grad": 8,
    "optimizer": 16,
    "weight": 32,
    "skipped": 64,
}
ORIGIN_BITS = BITS["input"] | BITS["forward"] | BITS["local_grad"]

EVENT_TYPES = frozenset(
    {
        "run.started",
        "run.finished",
        "attempt.launched",
        "attempt.exited",
        "stop.requested",
        "schedule.boundary",
        "directive.ack",
        "step",
        "heartbeat",
        "skip",
        "checkpoint.committed",
        "checkpoint.deleted",
        "loader.position",
        "batch.seen",
        "preflight.report",
        "hardware.xid",
        "hardware.ecc",
        "hardware.thermal",
        "hardware.link",
        "flight_recorder.dump",
        "process.error",
        "artifact.available",
        "action",
        "node.state",
        "verdict",
        "gap",
        "checksum.report",
        "twin.report",
        "restore.report",
    }
)

MAX_EVENTS = 100_000  # per post; 16 MiB of "{}," would otherwise be five million refusals
MAX_EXPANDED_RANKS = 2**20  # per post, over all rank sets that are spelled differently

View = Literal["local", "reduced"]


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One event as it is stored.

    `occurred_ns` is when it occurred by the sender's clock, None when it did not say. `rank` is the
    one rank that speaks, `ranks` the set spoken of. `flags` maps the path of a changed value to
    what it was: "nan", "+inf", "-inf" (the value is None now), "not_measured" (a logger's
    sentinel), "no_offset", "replaced", "rounded". `view` is that of `loss` and `nonfinite`; ask
    `view_of` for any metric. `extra` keeps unknown top-level keys (of a CloudEvent: its own
    attributes). `known` is false for a type this version does not know.
    """

    type: str
    step: int | None = None
    ranks: tuple[int, ...] | None = None
    rank: int | None = None
    node: str | None = None
    attempt: int | None = None
    occurred_ns: int | None = None
    flags: dict[str, str] = {}
    data: dict[str, Any] = {}
    view: View = "reduced"
    extra: dict[str, Any] = {}

    @property
    def known(self) -> bool:
        """Whether this version knows the type."""
        return self.type in EVENT_TYPES

    def view_of(self, metric: str) -> View:
        """Return whether `metric` was computed on one rank or is the same on all.

        `data.view` decides for every metric when given. Otherwise `grad_norm` is reduced and the
        rest follows `view`. A `nonfinite` set with none of the bits 1, 2 and 4 is reduced whatever
        was said: it names no rank.
        """
        if metric == "nonfinite":
            bits = self.data.get("nonfinite")
            if isinstance(bits, int) and bits and not bits & ORIGIN_BITS:
                return "reduced"
        if metric == "grad_norm" and "view" not in self.data:
            return "reduced"
        return self.view


class Refusal(msgspec.Struct, frozen=True):
    """Why event `index` of a post (0-based; NDJSON: among the lines that are not blank) was not taken."""

    index: int
    field: str
    detail: str


class DecodedEvents(msgspec.Struct, frozen=True):
    """What one post held: (index, event) pairs, refusals, and how many characters became U+FFFD."""

    events: list[tuple[int, Event]]
    refused: list[Refusal]
    replaced: int = 0


class _Refused(Exception):
    def __init__(self, field: str, detail: str) -> None:
        super().__init__(detail)
        self.field = field
        self.detail = detail


JSON_TYPES = ("application/json",)
NDJSON_TYPES = ("application/x-ndjson", "application/ndjson")
CLOUDEVENT_TYPE = "application/cloudevents+json"
CLOUDEVENTS_BATCH_TYPE = "application/cloudevents-batch+json"


def decode_events(body: bytes, content_type: str) -> DecodedEvents:
    """Read one post of events.

    A batch is taken event by event: what is wrong with one does not cost the others.

    Raises:
        WireError: 400 the body (or every NDJSON line) is not JSON; 415 another content type;
            422 nested too deep, too many events, or nothing in it could be taken (then `refused`
            lists why, and `field` is that of the first).
    """
    kind = media_type(content_type)
    if kind in NDJSON_TYPES:
        items: Iterable[tuple[int, Any]] = _lines(body)
        read: Callable[[Any, _Post], Event] = _plain
    elif kind in JSON_TYPES:
        value = load_json(body)
        items, read = enumerate(value if isinstance(value, list) else [value]), _plain
    elif kind == CLOUDEVENT_TYPE:
        items, read = [(0, load_json(body))], _cloudevent
    elif kind == CLOUDEVENTS_BATCH_TYPE:
        value = load_json(body)
        if not isinstance(value, list):
            raise unprocessable("a CloudEvents batch must be an array", "body")
        items, read = enumerate(value), _cloudevent
    else:
        raise WireError(
            415,
            "unsupported-media-type",
            "events are application/json, application/x-ndjson, application/cloudevents+json or "
            "application/cloudevents-batch+json",
            "content-type",
        )
    return _take(items, read)


def _take(items: Iterable[tuple[int, Any]], read: "Callable[[Any, _Post], Event]") -> DecodedEvents:
    post = _Post()
    events: list[tuple[int, Event]] = []
    refused: list[Refusal] = []
    unreadable = 0
    for index, value in items:
        if index >= MAX_EVENTS:
            raise unprocessable(f"one post may hold {MAX_EVENTS} events; send several", "body")
        try:
            if isinstance(value, WireError):
                raise value
            events.append((index, read(value, post)))
        except _Refused as error:
            refused.append(Refusal(index, error.field, error.detail))
        except WireError as error:
            unreadable += error.status == 400
            refused.append(Refusal(index, error.field or "body", error.detail))
            if error.problem_type == "nested-too-deep" and len(refused) == 1 and not events:
                post.deep = True
    if events:
        return DecodedEvents(events, refused, post.replaced)
    if not refused:
        raise unprocessable("the post holds no event", "body")
    first = refused[0]
    detail = first.detail if len(refused) == 1 else f"none of {len(refused)} events: {first.detail}"
    if unreadable == len(refused):
        raise WireError(400, "undecodable", detail, first.field, refused)
    slug = "nested-too-deep" if post.deep else "unprocessable"
    raise WireError(422, slug, detail, first.field, refused)


class _Post:
    """What is shared by the events of one post: the ranks already expanded, and counts."""

    __slots__ = ("deep", "expanded", "rank_sets", "replaced")

    def __init__(self) -> None:
        self.replaced = 0
        self.deep = False
        self.expanded = 0
        self.rank_sets: dict[str, tuple[int, ...]] = {}

    def ranks(self, value: object, field: str) -> tuple[int, ...]:
        text = value if isinstance(value, str) else None
        if text is not None and text in self.rank_sets:
            return self.rank_sets[text]
        try:
            ranks = parse_ranks(value)
        except ValueError as error:
            raise _Refused(field, str(error)) from None
        if text is not None or isinstance(value, list):
            self.expanded += len(ranks)
            if self.expanded > MAX_EXPANDED_RANKS:
                raise _Refused(field, f"one post may name {MAX_EXPANDED_RANKS} ranks in different sets")
        if text is not None:
            self.rank_sets[text] = ranks
        return ranks


_LINE = re.compile(rb"[^\r\n]*[^\s][^\r\n]*")


def _lines(body: bytes) -> Iterator[tuple[int, Any]]:
    for index, match in enumerate(_LINE.finditer(body)):
        try:
            yield index, load_json(match[0])
        except WireError as error:
            yield index, error


_ENVELOPE = frozenset({"type", "step", "rank", "ranks", "node", "attempt", "time", "data"})
_CLOUDEVENT_ENVELOPE = frozenset({"type", "time", "data"})


def _plain(value: Any, post: _Post) -> Event:
    if type(value) is not dict:
        raise _Refused("body", "an event must be a JSON object")
    extra = {name: value[name] for name in value if name not in _ENVELOPE}
    return _event(value.get("type"), value.get("time"), value, extra, post)


def _cloudevent(value: Any, post: _Post) -> Event:
    if type(value) is not dict:
        raise _Refused("body", "a CloudEvent must be a JSON object")
    if value.get("specversion") != "1.0":
        raise _Refused("specversion", 'must be "1.0"')
    for name in ("id", "source"):
        if not isinstance(value.get(name), str) or not value[name]:
            raise _Refused(name, "must be a non-empty string")
    inner = value.get("data")
    if "data_base64" in value:
        raise _Refused("data_base64", "send the event as JSON under data")
    if inner is None:
        inner = {}
    if type(inner) is not dict:
        raise _Refused("data", "must be an object holding step, rank, node, attempt and data")
    extra = {name: value[name] for name in value if name not in _CLOUDEVENT_ENVELOPE}
    unknown = {name: inner[name] for name in inner if name not in _ENVELOPE}
    if unknown:
        extra["data"] = unknown
    kind = value.get("type")
    if isinstance(kind, str):
        kind = kind.removeprefix("andon.")
    moment = value.get("time")
    return _event(kind, inner.get("time") if moment is None else moment, inner, extra, post)


def _event(kind: Any, moment: Any, fields: dict[str, Any], extra: dict[str, Any], post: _Post) -> Event:
    cleaner = Cleaner()
    if not isinstance(kind, str) or not 1 <= len(kind) <= 100:
        raise _Refused("type", "must be a string of 1 to 100 characters")
    kind = cleaner.text(kind, "type")
    step = _whole(fields.get("step"), "step", 0, INT64_MAX, "2^63−1")
    rank = _whole(fields.get("rank"), "rank", 0, 2**31 - 1, "2^31−1")
    attempt = _whole(fields.get("attempt"), "attempt", 1, 2**31 - 1, "2^31−1")
    ranks = fields.get("ranks")
    if ranks is not None:
        ranks = post.ranks(ranks, "ranks")
    node = fields.get("node")
    if node is not None:
        if not isinstance(node, str) or not 1 <= len(node) <= 255:
            raise _Refused("node", "must be a string of 1 to 255 characters")
        node = cleaner.text(node, "node")
    occurred_ns = None
    if moment is not None:
        try:
            occurred_ns, no_offset = parse_time(moment)
        except ValueError as error:
            raise _Refused("time", str(error)) from None
        if no_offset:
            cleaner.flag("time", "no_offset")
    data = fields.get("data")
    if data is None:
        data = {}
    elif type(data) is not dict:
        raise _Refused("data", "must be an object")
    data = cleaner.clean(data, "data", 2)
    if extra:
        extra = cleaner.clean(extra, "", 1)
    if kind == "step" and step is None:
        raise _Refused("step", "a step event must name its step")
    check_data(
        kind,
        data,
        cleaner,
        refuse=_Refused,
        ranks=post.ranks,
        step=step,
        has_ranks=(ranks or rank) is not None,
    )
    post.replaced += cleaner.replaced
    said = data.get("view")
    view: View
    if kind == "step" and said is not None:
        view = said
    else:
        view = "local" if rank is not None and ranks is None else "reduced"
    return Event(
        type=kind,
        step=step,
        ranks=ranks,
        rank=rank,
        node=node,
        attempt=attempt,
        occurred_ns=occurred_ns,
        flags=cleaner.flags,
        data=data,
        view=view,
        extra=extra,
    )


def _whole(value: Any, field: str, least: int, most: int, most_text: str) -> int | None:
    if value is None:
        return None
    if type(value) is float and value.is_integer() and abs(value) <= 2**53:
        value = int(value)  # loggers that keep every number as a float write 12.0
    if type(value) is not int:
        raise _Refused(field, f"must be a whole number from {least} to {most_text}")
    if not least <= value <= most:
        shown = value if abs(value) < 10**20 else "the number"
        raise _Refused(field, f"{shown} is refused: {field} must be {least} to {most_text}")
    return value
