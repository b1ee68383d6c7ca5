"""Earlier incidents that look like this one: what recurs, and how those that are alike ended."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db.models import OuterRef, Subquery

from incidents import diagnosis, traits
from incidents.models import BoardChange, Incident, Plan, StateChange
from incidents.traits import NAMES, Traits
from runs import formatting as words
from runs.access import visible_runs
from runs.models import Person

_LOOKED_AT = 1_000  # newest earlier incidents of the project
_SHOWN = 5
_LEAST_SHARED = 2  # one trait in common is chance
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")


@dataclass(frozen=True, slots=True)
class Alike:
    """One earlier incident with what it has in common."""

    id: int
    run: str
    opened_at: datetime
    shared: list[str]  # "symptom instant NaN, one rank", "data shard cc-0418"
    ended: str

    @property
    def of(self) -> int:
        """How many traits are compared."""
        return len(NAMES)


@dataclass(frozen=True, slots=True)
class Similar:
    """What recurs, in one line ("" = nothing), and the incidents that are most alike."""

    recurs: str
    recurs_in: list[int]  # ids of the earlier ones, newest first
    alike: list[Alike]


def of_incident(incident: Incident, person: Person) -> Similar:
    """Return what recurs, and which earlier incidents of the project that a person may see are alike."""
    kept = traits.looked_up(incident) if incident.traits is None else incident.traits
    mine = traits.of(incident.symptom, incident.first_bad, kept)
    rows = _earlier(incident, person)
    theirs = [(row, traits.of(row["symptom"], row["first_bad"], row["traits"])) for row in rows]
    recurs, ids = _recurrence(incident, mine, theirs)
    best = sorted(
        (
            (len(shared), row, shared)
            for row, other in theirs
            if len(shared := _shared(mine, other)) >= _LEAST_SHARED
        ),
        key=lambda one: (-one[0], -one[1]["pk"]),
    )
    return Similar(recurs, ids, [_alike(row, shared) for _, row, shared in best[:_SHOWN]])


def _earlier(incident: Incident, person: Person) -> list[dict[str, Any]]:
    of_this = {"incident": OuterRef("pk")}
    last = StateChange.objects.filter(**of_this, after=OuterRef("state")).order_by("-id")
    plan = Plan.objects.filter(**of_this).order_by("-number")
    cause = BoardChange.objects.filter(**of_this, kind=BoardChange.Kind.CAUSE).order_by("-id")
    found = Incident.objects.filter(run__in=visible_runs(person), run__project=incident.run.project_id)
    found = found.filter(pk__lt=incident.pk)
    return list(
        found.order_by("-pk")
        .annotate(
            ended_why=Subquery(last.values("why")[:1]),
            plan_kind=Subquery(plan.values("kind")[:1]),
            cause=Subquery(cause.values("family")[:1]),
            cause_says=Subquery(cause.values("text")[:1]),
        )
        .values(
            *("pk", "run_id", "run__slug", "attempt", "opened_at", "state", "symptom", "first_bad", "traits"),
            *("family", "ended_why", "plan_kind", "cause", "cause_says"),
        )[:_LOOKED_AT]
    )


def _shared(mine: Traits, other: Traits) -> list[str]:
    found = []
    for name, values in mine.by_name().items():
        common = sorted(values & other.by_name()[name])
        if common:
            shown = diagnosis.words(common[0]).name if name == "symptom" else common[0]
            found.append(f"{name} {words.inert(shown, 60)}")
    return found


def _recurrence(
    incident: Incident, mine: Traits, theirs: list[tuple[dict[str, Any], Traits]]
) -> tuple[str, list[int]]:
    """Return the most telling thing that came back: the same step, shard or node, then the same tensor."""
    step = incident.first_bad.get("step")
    real = [(row, other) for row, other in theirs if row["state"] != Incident.State.FALSE_ALARM]
    again = [
        row["pk"]
        for row, _ in real
        if row["run_id"] == incident.run_id and step is not None and row["first_bad"].get("step") == step
    ]
    if again:
        return f"{_time(len(again))} at step {words.count(step)} of this run", again
    for label, name in (("with shard", "data shard"), ("on", "node"), ("in", "tensor")):
        counted = {
            value: [row["pk"] for row, other in real if value in other.by_name()[name]]
            for value in sorted(mine.by_name()[name])
        }
        value = max(counted, key=lambda one: len(counted[one]), default="")
        if value and counted[value]:
            return f"{_time(len(counted[value]))} {label} {words.inert(value, 80)}", counted[value]
    return "", []


def _time(earlier: int) -> str:
    number = earlier + 1
    return f"{_ORDINALS[earlier]} time" if earlier < len(_ORDINALS) else f"{words.count(number)} times"


def _alike(row: dict[str, Any], shared: list[str]) -> Alike:
    return Alike(row["pk"], row["run__slug"], row["opened_at"], shared, _ended(row))


def _ended(row: dict[str, Any]) -> str:
    state = row["state"]
    if state in Incident.UNRESOLVED:
        return f"{state}, not over"
    if state == Incident.State.FALSE_ALARM:
        why = f": {words.inert(row['ended_why'], 160)}" if row["ended_why"] else ""
        return f"false alarm{why}"
    if row["cause"] is not None:  # what people closed the board with
        pieces = [row["cause"] or "cause unknown", words.inert(row["cause_says"], 160)]
    else:
        pieces = ["cause not closed", f"{row['family']} led" if row["family"] else ""]
    pieces += [(row["plan_kind"] or "").replace("_", " "), words.inert(row["ended_why"] or "", 160)]
    return "; ".join(piece for piece in pieces if piece)
