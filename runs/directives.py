"""Directives: what a run is told, and who obeys."""

from datetime import datetime
from typing import TypedDict

from django.db import connection
from django.utils import timezone

from andon.directive import Directive as Message
from andon.directive import HoldMode, Kind
from runs.inserting import insert
from runs.keys import server_key
from runs.models import Attempt, Directive, DirectiveAck, Run
from runs.reading import kept, read_before


class Obedience(TypedDict):
    """Who obeyed the directive in force: ranks that acknowledged it, of how many, and who is silent."""

    obeyed: int
    of: int
    silent: list[int]
    step: int | None


def current(run_id: int) -> Directive | None:
    """Return the directive in force, None for a run that never had one."""
    return kept(
        ("directive", run_id), lambda: Directive.objects.filter(run_id=run_id).order_by("-seq").first()
    )


def current_document(run_id: int) -> dict[str, object]:
    """Return the signed document of the directive in force, as sent.

    Raises:
        Directive.DoesNotExist: the run has none (`create_run` writes seq 1).
    """
    directive = current(run_id)
    if directive is None:
        raise Directive.DoesNotExist(f"run {run_id} has no directive: it was not made by create_run")
    document: dict[str, object] = directive.document
    return document


def set_directive(
    *,
    run: Run,
    kind: Kind,
    attempt: int | None = None,
    incident: str = "",
    mode: HoldMode | None = None,
    deadline: datetime | None = None,
    plan: dict[str, object] | None = None,
    permit: str = "",
    set_by: str = "",
    why: str = "",
) -> Directive:
    """Write the next directive of `run`, signed, and return it. The caller holds the run lock.

    Args:
        kind: continue, hold, rollback or resume.
        attempt: the attempt it is meant for; None: the newest one (1 before any launch).
        mode: in_place (default) or exit: how ranks wait under a hold.
        deadline: when held ranks leave.
        plan: what a rollback or resume does; no authority in itself.
        set_by: opaque id of a person, "" = Andon.

    Raises:
        django.db.IntegrityError: another directive took the number, so the lock was not held.
    """
    newest_seq, newest_attempt = _newest(run.pk)
    since = timezone.now()
    if attempt is None:
        attempt = newest_attempt or 1
    message = Message(
        kind=kind,
        seq=(newest_seq or 0) + 1,
        run=run.slug,
        attempt=attempt,
        mode=mode or "in_place",
        deadline=None if deadline is None else _rfc3339(deadline),
        incident=incident or None,
        since=_rfc3339(since),
        plan=plan,
        permit=permit or None,
    )
    row = Directive(
        run=run,
        seq=message.seq,
        kind=kind,
        attempt=attempt,
        incident=incident,
        document=message.sign(server_key()),
        since=since,
        set_by=set_by,
        why=why,
    )
    insert(row)
    return row


def _newest(run_id: int) -> tuple[int | None, int | None]:
    """Return the newest directive's seq and the newest attempt's number."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT (SELECT max(seq) FROM runs_directive WHERE run_id = %s),"
            " (SELECT max(number) FROM runs_attempt WHERE run_id = %s)",
            [run_id, run_id],
        )
        seq, attempt = cursor.fetchone()
    return seq, attempt


def newest_attempt(run_id: int) -> Attempt | None:
    """Return number and world size of a run's newest attempt, None before any launch."""
    if (known := read_before(("launches", run_id))) is not None:
        return next(iter(known), None)
    rows = Attempt.objects.filter(run_id=run_id).order_by("-number").only("number", "world_size")
    return kept(("newest attempt", run_id), rows.first)


def obedience(run_id: int) -> Obedience:
    """Return who obeys the directive in force.

    A rank obeys a hold once it acknowledged `held` or `exited`, any other directive once it
    acknowledged at all. `of` is the world size of the newest attempt, or the ranks heard of when
    the launch reported none; `step` is the highest step an obeying rank named.
    """
    directive = current(run_id)
    # Not the whole row: the nodes and groups of a fleet are hundreds of kilobytes.
    attempt = newest_attempt(run_id)
    if directive is None or attempt is None:
        return {"obeyed": 0, "of": 0, "silent": [], "step": None}
    enough = {"held", "exited"} if directive.kind == "hold" else {"received", "held", "exited"}
    obeying: set[int] = set()
    heard: set[int] = set()
    step: int | None = None
    for ack in DirectiveAck.objects.filter(run_id=run_id, seq=directive.seq, attempt=attempt.number):
        heard.update(ack.ranks)
        if ack.state in enough:
            obeying.update(ack.ranks)
            step = ack.step if step is None else max(step, ack.step or step)
    everyone = set(range(attempt.world_size)) if attempt.world_size else heard
    return {
        "obeyed": len(obeying & everyone) if everyone else len(obeying),
        "of": len(everyone),
        "silent": sorted(everyone - obeying),
        "step": step,
    }


def _rfc3339(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")
