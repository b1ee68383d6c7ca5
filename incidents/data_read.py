"""Which data the first bad ranks read, and which learning rate was in force, at the two ends of a span.

Only the two ends are read: a fleet posts a `batch.seen` per rank and step.
"""

from collections.abc import Mapping
from typing import Any, Literal

from incidents import told
from incidents.models import Incident
from runs import formatting as words
from runs.models import Event
from runs.reading import kept

State = Literal["changed", "unchanged", "not known"]

# Keys under which data pipelines tell where a batch came from.
SHARD_KEYS = ("shard", "shards", "file", "files", "dataset_version", "dataset")
MIX_KEYS = ("mixture", "mixture_state", "mixture_weights", "domain_weights", "domain", "domains")
_TYPES = ("batch.seen", "loader.position")
_RANKS = 8
_ROWS = 64
_SHOWN = 4


def shards(run_id: int, attempt: int, step: int | None, ranks: list[int]) -> list[str]:
    """Return the data shards that `ranks` (any rank, where none is known) read for a step, as told."""
    return _told(run_id, attempt, step, ranks, SHARD_KEYS)


def _told(run_id: int, attempt: int, step: int | None, ranks: list[int], keys: tuple[str, ...]) -> list[str]:
    if step is None:
        return []
    found: dict[str, None] = {}
    for data in kept(("batches", run_id, attempt, step, *ranks), lambda: _rows(run_id, attempt, step, ranks)):
        for value in _values(data, keys):
            found.setdefault(value)
    return list(found)


def _rows(run_id: int, attempt: int, step: int, ranks: list[int]) -> list[dict[str, Any]]:
    """Return what was told of the mix and the shards of a step."""
    rows = Event.objects.filter(run_id=run_id, attempt=attempt, type__in=_TYPES, step=step)
    rows = rows.filter(data__has_any_keys=[*MIX_KEYS, *SHARD_KEYS])
    if ranks:
        rows = rows.filter(rank__in=ranks[:_RANKS])
    return list(rows.order_by("rank", "id").values_list("data", flat=True)[:_ROWS])


def _values(data: Mapping[str, Any], keys: tuple[str, ...]) -> list[str]:
    for key in keys:
        value = data.get(key)
        if isinstance(value, dict):
            return [", ".join(f"{name} {share}" for name, share in sorted(value.items())[:_SHOWN])]
        if isinstance(value, list):
            return [str(one) for one in value[:_ROWS] if isinstance(one, str | int)]
        if isinstance(value, str | int) and not isinstance(value, bool):
            return [str(value)]
    return []


def compared(
    incident: Incident,
    good_step: int | None,
    bad_step: int | None,
    launch: Mapping[str, Any],
    *,
    attempt_before: int,
) -> list[tuple[str, State, str, int | None]]:
    """Return name, state, words and step of data mix and data shard: the first bad step against the good one.

    Args:
        launch: what the launch told; a mix it names holds where no batch says otherwise.
        attempt_before: the attempt of the good step.
    """
    ranks = list(incident.first_bad.get("ranks") or [])
    made: list[tuple[str, State, str, int | None]] = []
    for name, keys in (("data mix", MIX_KEYS), ("data shard", SHARD_KEYS)):
        now = _told(incident.run_id, incident.attempt, bad_step, ranks, keys)
        was = _told(incident.run_id, attempt_before, good_step, ranks, keys)
        mix = told.value_of(told.DATA_MIX, launch) if name == "data mix" else None
        if not now and mix is not None:
            made.append((name, "unchanged", f"{told.text(mix)}, as launched", None))
        elif not now:
            made.append((name, "not known", "no batch.seen or loader.position of the step told it", None))
        elif not was:
            made.append((name, "not known", f"{_shown(now)}; the last good step told none", bad_step))
        elif set(now) == set(was):
            made.append((name, "unchanged", _shown(now), None))
        else:
            made.append((name, "changed", f"{_shown(was)} → {_shown(now)}", bad_step))
    return made


def _shown(values: list[str]) -> str:
    text = ", ".join(words.inert(value, 60) for value in values[:_SHOWN])
    more = len(values) - _SHOWN
    return f"{text} and {words.count(more)} more" if more > 0 else text


def learning_rates(
    incident: Incident, good_step: int | None, bad_step: int | None, before: int
) -> tuple[Any, Any] | None:
    """Return the learning rate at the last good and at the first bad step, None when neither was reported."""
    new = _rate(incident.run_id, incident.attempt, bad_step)
    old = _rate(incident.run_id, before, good_step)
    if new is None and old is None:
        return None
    return (old if old is not None else new, new if new is not None else old)


def _rate(run_id: int, attempt: int, step: int | None) -> Any:
    if step is None:
        return None
    rows = Event.objects.filter(
        run_id=run_id, attempt=attempt, type="step", step__lte=step, step__gt=step - 10
    )
    data = rows.filter(data__has_key="lr").order_by("-step", "id").values_list("data", flat=True).first()
    return None if data is None else data.get("lr")
