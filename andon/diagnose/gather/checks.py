"""What checks found: restores, replicas, twin steps, checkpoints, preflight."""

from typing import Any

from andon.diagnose.fact import Fact, step_words
from andon.diagnose.record import Posted, Record

_PASS = {"pass", "passed", "ok", "equal", "same", "true"}
_FAIL = {"fail", "failed", "differs", "different", "false", "rejected", "reject"}
_KEYS = ("equal", "passed", "ok", "verdict", "result", "status", "outcome")


def facts(record: Record) -> list[Fact]:
    """Return what was checked, whichever way it came out."""
    found: list[Fact] = []
    for event in record.of_type("restore.report"):
        found += _restore(event)
    for event in record.of_type("checksum.report"):
        found += _said(
            event, "replicas_equal", "replicas_differ", f"replica checksum at {step_words(event.step)}"
        )
    for event in record.of_type("twin.report"):
        found += _said(event, "twin_equal", "twin_differs", f"twin step at {step_words(event.step)}")
    here = set(record.bad_nodes)
    for event in record.of_type("preflight.report"):
        if event.node and (event.node in here or not here):
            found += _said(event, "preflight_passed", "preflight_failed", f"preflight of {event.node}")
    return _newest(found) + _checkpoints(record)


def _restore(event: Posted) -> list[Fact]:
    parts = [part for part in event.data.get("parts") or [] if isinstance(part, dict)]
    judged = [(str(part.get("part", "?")), verdict(part)) for part in parts]
    differ = [name for name, equal in judged if equal is False]
    if differ:
        text = f"restored {', '.join(differ)} differ from what was saved"
        return [Fact(id=event.id, kind="restore_differs", text=text)]
    if judged and all(equal for _, equal in judged):
        text = f"restored {', '.join(name for name, _ in judged)} are what was saved"
        return [Fact(id=event.id, kind="restore_equal", text=text)]
    return []


def _said(event: Posted, good: str, bad: str, what: str) -> list[Fact]:
    passed = verdict(event.data)
    if passed is None:
        return []
    said = "" if passed else str(event.data.get("detail") or "")[:160]
    text = f"{what}: {'passed' if passed else 'failed'}{f' ({said})' if said else ''}"
    return [Fact(id=event.id, kind=good if passed else bad, text=text)]


def verdict(data: dict[str, Any]) -> bool | None:
    """Return whether a report says that a check passed, None where it says neither."""
    for name in _KEYS:
        value = data.get(name)
        if isinstance(value, bool):
            return value
        word = str(value).lower()
        if word in _PASS | _FAIL:
            return word in _PASS
    saved, restored = data.get("saved"), data.get("restored")
    return saved == restored if isinstance(saved, str) and isinstance(restored, str) else None


def _newest(found: list[Fact]) -> list[Fact]:
    """Return one fact of each kind, the newest, with how many more say the same."""
    last: dict[str, Fact] = {}
    for fact in found:
        more = last[fact.kind].more + 1 if fact.kind in last else 0
        last[fact.kind] = Fact(id=fact.id, kind=fact.kind, text=fact.text, more=more)
    return list(last.values())


def _checkpoints(record: Record) -> list[Fact]:
    step = record.step
    before = [one for one in record.checkpoints if step is not None and one.step < step]
    if not before:
        return []
    newest = max(before, key=lambda one: (one.step, one.id))
    if newest.state == "bad":
        text = f"the checkpoint of {step_words(newest.step)} failed its verification"
        return [Fact(id=newest.id, kind="checkpoint_bad", text=text)]
    sound = [one for one in before if one.state == "verified"]
    if not sound:
        return []
    last = max(sound, key=lambda one: (one.step, one.id))
    text = f"the checkpoint of {step_words(last.step)} was verified: finite, norms in range"
    return [Fact(id=last.id, kind="checkpoint_sound", text=text)]
