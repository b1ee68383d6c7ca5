"""Whether a held run has really stopped: two attempts that write at once would spoil each other.

Contained is every rank that said it holds or left, or the launcher's word that the attempt is gone, or
no step for three median steps and a supervisor that says so by asking for the permit.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

from django.utils import timezone

from incidents import costs
from incidents.models import Incident
from runs import formatting as words
from runs.attempts import launches
from runs.models import Attempt, Directive, DirectiveAck, RunProgress
from runs.reading import kept

_STEPS = 3
_AT_LEAST_S = 10.0  # a step of a small run is a blink: a post may be on its way for longer
_UNKNOWN_STEP_S = 60.0


@dataclass(frozen=True, slots=True)
class Contained:
    """`whole`: nothing of the held attempt runs. `still`: no step arrives; a supervisor must say the rest."""

    whole: bool
    still: bool
    says: str


def of(incident: Incident, now: datetime | None = None) -> Contained:
    """Return whether the newest attempt of a held run has stopped."""
    now = now or timezone.now()
    attempt = next(iter(launches(incident.run_id)), None)
    if attempt is None:
        return Contained(True, True, "nothing was launched")
    if attempt.exited_at is not None:
        at = f"{words.clock(attempt.exited_at, now)} UTC"
        return Contained(True, True, f"attempt {attempt.number} is gone since {at}")
    stopped, heard = _stopped(incident, attempt.number)
    everyone = set(range(attempt.world_size)) if attempt.world_size else heard
    if everyone and everyone <= stopped:
        return Contained(True, True, f"all {words.count(len(everyone))} ranks stopped")
    silent = sorted(everyone - stopped)
    lacks = f"{words.rank_words(silent)} did not say that they stopped" if silent else "no rank has answered"
    since = _still_since(incident, attempt)
    limit = _limit(incident, attempt.number)
    if now - since >= limit:
        return Contained(False, True, f"{lacks}; no step since {words.clock(since, now)} UTC")
    return Contained(False, False, f"{lacks}, and steps still arrive")


def _stopped(incident: Incident, attempt: int) -> tuple[set[int], set[int]]:
    """Return the ranks that hold or left since the hold began, and all that were heard.

    Under any directive since then: an approval gives the directive another number, and a rank that
    waits in place has said so once.
    """
    began = (
        Directive.objects.filter(run_id=incident.run_id, kind=Directive.Kind.CONTINUE)
        .order_by("-seq")
        .values_list("seq", flat=True)
        .first()
    ) or 0
    stopped: set[int] = set()
    heard: set[int] = set()
    acks = DirectiveAck.objects.filter(run_id=incident.run_id, attempt=attempt, seq__gt=began)
    for ranks, state in acks.order_by("id").values_list("ranks", "state"):
        heard.update(ranks)
        if state in ("held", "exited"):
            stopped.update(ranks)
        elif state == "refused":
            stopped.difference_update(ranks)
    return stopped, heard


def _still_since(incident: Incident, attempt: Attempt) -> datetime:
    run_id = incident.run_id
    progress = kept(("progress", run_id), RunProgress.objects.filter(run_id=run_id).first)
    if progress is None or progress.attempt != attempt.number or progress.step_at is None:
        return attempt.launched_at
    return max(progress.step_at, attempt.launched_at)


def _limit(incident: Incident, attempt: int) -> timedelta:
    step_s = costs.step_time_s(incident.run, attempt)
    return timedelta(seconds=_UNKNOWN_STEP_S if step_s is None else max(_AT_LEAST_S, _STEPS * step_s))
