"""From what a detector says to finding rows, and from an acting finding to a held run.

A dead run repeats itself at every step on every rank. A finding is stored when it says something
new: `says` is the digest of what it says, and a second row with the same digest is not inserted.
"""

import hashlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

import msgspec
from django.db import IntegrityError, connection, transaction
from django.utils import timezone

from andon.detect.finding import Finding as Said
from andon.policy import Policy
from runs import directives, turns
from runs.models import Directive, Finding, Pending, Run
from runs.rows import directive_text, raw_cursor
from runs.signals import findings_stored

log = logging.getLogger(__name__)

OPENING_WAIT = "2s"  # for locks, while an incident is opened: the reply must go out
SAME_STEPS = 100  # findings that hold nothing are told once per so many steps
MAX_PER_POST = 200


@dataclass(frozen=True, slots=True)
class Judged:
    """What a detector said about one value, and of which attempt and time that value was."""

    said: Said
    attempt: int
    backfill: bool
    occurred_at: datetime


@dataclass(frozen=True, slots=True)
class Standing:
    """The directive in force, as far as a finding must know it."""

    seq: int = 0
    kind: str = ""
    incident: str = ""
    attempt: int = 0

    @classmethod
    def of(cls, document: str | None) -> "Standing":
        """Read it from the signed document; a run without one stands at nothing."""
        if document is None:
            return cls()
        read = msgspec.json.decode(document)
        return cls(read["seq"], read["kind"], read["incident"] or "", read["attempt"])

    @property
    def holding(self) -> bool:
        """Whether the run is held."""
        return self.kind == Directive.Kind.HOLD


def coalesce(judged: Iterable[Judged]) -> list[Judged]:
    """Join findings of one post that differ only in step: the earliest stands, with the last step."""
    kept: dict[tuple[object, ...], Judged] = {}
    for one in judged:
        said = one.said
        key = (
            one.attempt,
            one.backfill,
            said.kind,
            said.severity,
            said.rule,
            said.series,
            said.view,
            said.lanes,
        )
        first = kept.get(key)
        if first is None:
            kept[key] = one
            continue
        early, late = (one, first) if (said.step or 0) < (first.said.step or 0) else (first, one)
        times = int(first.said.numbers.get("times") or 1) + 1
        last = max(late.said.step or 0, int(first.said.numbers.get("last_step") or 0))
        numbers = {**early.said.numbers, "times": times, "last_step": last}
        kept[key] = replace(early, said=msgspec.structs.replace(early.said, numbers=numbers))
    return list(kept.values())


def store(
    *,
    run_id: int,
    policy: Policy,
    judged: Sequence[Judged],
    received_at: datetime,
    standing: Standing | None = None,
) -> list[Finding]:
    """Insert what is new among `judged` and return those rows, attached to the incident that holds.

    Runs in the transaction that stores the data. Rules that are off say nothing. A finding that must
    act has `needs_incident` set, unless the run is held by an incident already: then it joins that, and
    a worker shows it to the incident. Only the post that opens an incident locks the run.

    Args:
        standing: the directive in force, where the caller has just read it.
    """
    if not judged:
        return []
    if standing is None:
        standing = Standing.of(directive_text(run_id))
    rows = rows_of(policy=policy, judged=judged, standing=standing)
    if not rows:
        return []
    new = []
    with raw_cursor() as cursor:
        cursor.execute(_STORE, (run_id, received_at, encoded(rows.values(), standing)))
        for says, pk in cursor.fetchall():
            row = Finding(pk=pk, run_id=run_id, received_at=received_at, **rows[says])
            row._state.adding = False
            new.append(row)
    return sorted(new, key=lambda row: row.pk)


_STORE = "SELECT new_says, new_id FROM andon_store_findings(%s, %s, %s)"


def rows_of(*, policy: Policy, judged: Sequence[Judged], standing: Standing) -> dict[str, dict[str, Any]]:
    """Return the fields of the rows that may be inserted, by what they say.

    Not as rows of the model: thousands of posts of a storm make some each, and few are looked at again.
    """
    spoken = [one for one in coalesce(judged) if policy.mode(one.said.rule) != "off"][:MAX_PER_POST]
    digest = policy.digest()
    rows: dict[str, dict[str, Any]] = {}
    for one in spoken:
        row = _row(one, policy, digest)
        if standing.holding and row["needs_incident"]:
            row |= {"incident": standing.incident, "needs_incident": not standing.incident}
        row["says"] = _says(one, standing)
        rows.setdefault(row["says"], row)
    return rows


def encoded(rows: Iterable[dict[str, Any]], standing: Standing) -> str:
    """Return rows as the JSON that `andon_store_findings` takes."""
    return msgspec.json.encode(with_joined(rows, standing)).decode()


def with_joined(rows: Iterable[dict[str, Any]], standing: Standing) -> list[dict[str, Any]]:
    """Return rows that also say whether a worker must show them to the incident in force."""
    return [row | {"joined": _joins(row, standing)} for row in rows]


def _joins(row: dict[str, Any], standing: Standing) -> bool:
    """Return whether the incident in force must hear of a finding that does not open one."""
    if not standing.holding or not standing.incident:
        return False
    late = row["backfill"] and row["mode"] == "act" and row["attempt"] == standing.attempt
    return bool(row["incident"]) or late


def _row(one: Judged, policy: Policy, digest: str) -> dict[str, Any]:
    said = one.said
    document = said.to_document()
    score = said.score
    numbers = document["numbers"]
    if said.phase is not None:
        numbers = {**numbers, "phase": said.phase}
    if said.micro_batch is not None:
        numbers = {**numbers, "micro_batch": said.micro_batch}
    mode = policy.mode(said.rule)
    return {
        "incident": "",
        "attempt": one.attempt,
        "kind": said.kind[:64],
        "rule": said.rule[:32],
        "mode": mode,
        "severity": said.severity,
        "step": said.step,
        "lanes": document["lanes"],
        "series": said.series[:100],
        "view": said.view,
        "score": score if score is not None and score - score == 0 else None,
        "numbers": numbers,
        "detail": said.detail,
        "detector": said.detector,
        "detector_version": str(said.detector_version),
        "policy_digest": digest,
        "backfill": one.backfill,
        "occurred_at": one.occurred_at,
        "needs_incident": mode == "act" and said.severity in ("warn", "halt") and not one.backfill,
    }


def _says(one: Judged, standing: Standing) -> str:
    said = one.said
    # While held, a lane speaks once. Otherwise every halt speaks, since it must hold the run, and
    # what holds nothing speaks again after a while.
    if standing.holding:
        when: object = "held"
    elif said.severity == "halt":
        when = said.step
    else:
        when = None if said.step is None else said.step // SAME_STEPS
    parts = [
        one.attempt,
        one.backfill,
        said.kind,
        said.rule,
        said.series,
        said.view,
        said.severity,
        standing.seq,
        when,
    ]
    text = msgspec.json.encode([*parts, list(said.lanes)])
    return hashlib.sha256(text).hexdigest()


def act(
    *,
    run_id: int,
    policy: Policy,
    findings: Sequence[Finding],
    standing: Standing | None = None,
    turn: turns.Turn | None = None,
) -> bool:
    """Let acting findings open an incident, in a savepoint of the transaction that stored them.

    If that fails for any reason the data and the findings stay, and a halt holds the run without an
    incident; the findings keep `needs_incident` and the sweep opens the incident later. Returns
    whether there was anything to act on, so that the directive may be another one now.

    Args:
        standing: the directive in force, where this transaction has read it.

    Raises:
        turns.Elsewhere: `turn` was given, and another thread has it: the transaction must be given up.
    """
    waiting = [row for row in findings if row.needs_incident and not row.incident]
    if not waiting:
        return False
    if standing is None:
        standing = Standing.of(directive_text(run_id))
    if standing.holding and not standing.incident:
        return True  # opening failed before: the sweep has it, and trying at every post would lock the run
    if turn is not None:
        turn.begin()
    halted = [row.attempt for row in waiting if row.severity == Finding.Severity.HALT]
    try:
        with transaction.atomic():
            _tell(run_id, waiting)
    except Exception:
        log.exception("run %s: no incident could be opened; data and findings are kept", run_id)
    if halted:
        _hold_anyway(run_id, policy, max(halted))
    return True


_RUN = [field.attname for field in Run._meta.concrete_fields]
_LOCK = f"SELECT {', '.join(f'(locked).{name}' for name in _RUN)}, directive FROM andon_lock_run(%s, %s)"  # noqa: S608 (columns of our own)


def _tell(run_id: int, waiting: list[Finding]) -> None:
    with raw_cursor() as cursor:
        cursor.execute(_LOCK, (run_id, OPENING_WAIT))
        *values, directive = cursor.fetchone() or (None,)
    run, standing = Run.from_db(connection.alias, _RUN, values), Standing.of(directive)
    if standing.holding and standing.incident:
        # Another post opened it while this one waited for the lock: join it as a latecomer does.
        ids = [row.pk for row in waiting]
        Finding.objects.filter(pk__in=ids).update(incident=standing.incident, needs_incident=False)
        for row in waiting:
            row.incident, row.needs_incident = standing.incident, False
        Pending.objects.bulk_create(
            Pending(run_id=run_id, what="finding", ref=row.pk, received_at=row.received_at) for row in waiting
        )
    else:
        findings_stored.send(sender=Finding, run=run, findings=waiting, locked=True)
    with raw_cursor() as cursor:
        cursor.execute("SELECT set_config('lock_timeout', '0', true)")


def _hold_anyway(run_id: int, policy: Policy, attempt: int) -> None:
    """Hold the run if nothing holds it. A number taken by another is that other's newer directive.

    `attempt` is the newest that has a halt.
    """
    for _ in range(5):
        standing = Standing.of(directive_text(run_id))
        if standing.holding:
            return
        # `rollback` and `resume` hold their attempt too, until the permit is used: a late value of it
        # must not end an approval. What the next attempt shows is another matter.
        if standing.kind in {Directive.Kind.ROLLBACK, Directive.Kind.RESUME} and attempt <= standing.attempt:
            return
        try:
            with transaction.atomic():
                directives.set_directive(
                    run=Run.objects.get(pk=run_id),
                    kind="hold",
                    mode=policy.hold.mode,
                    deadline=timezone.now() + timedelta(seconds=policy.hold.deadline_s),
                    why="nonfinite or halted, and no incident could be opened",
                )
        except IntegrityError:
            continue
        log.error("run %s: held without an incident", run_id)
        return
