"""The first hour: seven steps that fill themselves from facts, and the words for the channel.

The steps and their order are the playbook's. Nobody ticks anything: a step is done when the rows say so.
"""

from dataclasses import dataclass
from datetime import datetime

from django.conf import settings

from andon.diagnose.families import Family
from incidents.incident_page import IncidentPage
from incidents.models import BoardChange, Incident, Probe, ResumeRequest
from incidents.page import Glyph
from runs import formatting as words
from runs.models import DirectiveAck

_FAMILIES = len(Family) - 1  # "cause unknown" is none that a probe closes


@dataclass(frozen=True, slots=True)
class Step:
    """One step: done, running or not yet, by what is known."""

    label: str
    glyph: Glyph
    says: str


@dataclass(frozen=True, slots=True)
class FirstHour:
    """The steps, and how much of the hour is gone; None once the incident is over."""

    steps: list[Step]
    since: datetime
    minutes: int
    over: bool

    @property
    def done(self) -> int:
        """How many steps are done."""
        return sum(step.glyph == "done" for step in self.steps)


def of(page: IncidentPage) -> FirstHour:
    """Return the checklist of one incident."""
    until = page.incident.resolved_at or page.now
    return FirstHour(
        steps=[
            _stopped(page),
            _preserved(page),
            _classified(page),
            _divergence(page),
            *_probes(page),
            _recovered(page),
        ],
        since=page.opened_at,
        minutes=int((until - page.opened_at).total_seconds() // 60),
        over=page.state not in Incident.UNRESOLVED,
    )


def _stopped(page: IncidentPage) -> Step:
    label = "Stop the run"
    line = next(line for line in page.gate if line.code == "contained")
    if not page.incident.holds:
        return Step(label, "done", "nothing to stop: the run goes on")
    if line.glyph == "done":
        at = _contained_at(page)
        return Step(label, "done", f"all ranks held {words.clock(at, page.now)}" if at else line.says)
    obeys = page.situation.obedience
    return Step(label, "running", f"{words.count(obeys['obeyed'])} of {words.count(obeys['of'])} ranks obey")


def _contained_at(page: IncidentPage) -> datetime | None:
    directive = page.situation.directive
    if directive is None or directive.kind != "hold":
        return None
    acks = DirectiveAck.objects.filter(
        run_id=page.incident.run_id, seq=directive.seq, state__in=["held", "exited"]
    )
    return acks.order_by("-received_at").values_list("received_at", flat=True).first()


def _preserved(page: IncidentPage) -> Step:
    label, evidence = "Preserve the state", page.evidence
    if page.situation.gate.open:
        waived = sum(line.waived for line in page.situation.gate.lines)
        more = f", {words.count(waived)} waived" if waived else ""
        return Step(label, "done", f"{evidence.sealed} of {evidence.required} sealed{more}")
    if evidence.missing:
        return Step(label, "missing", f"{words.count(evidence.missing)} of {evidence.required} missing")
    return Step(label, "running", f"{evidence.sealed} of {evidence.required} sealed")


def _classified(page: IncidentPage) -> Step:
    label, symptom = "Classify", page.first_bad.symptom
    if page.incident.symptom in ("", "unknown"):
        return Step(label, "not_yet", "symptom not known yet")
    return Step(label, "done", words.inert(symptom))


def _divergence(page: IncidentPage) -> Step:
    label, first = "Find the first divergence", page.first_bad
    if first.step is None:
        return Step(label, "not_yet", "no first bad step is known")
    where = f"{words.inert(first.layer, 48)}, step {words.count(first.step)}" if first.layer else ""
    where = where or f"step {words.count(first.step)}"
    if not first.ranks:
        return Step(label, "running", f"{where}, rank not known")
    return Step(label, "done", where)


def _probes(page: IncidentPage) -> list[Step]:
    """Return steps 5 and 6 from the probes of the diagnosis board."""
    probes = list(page.incident.probes.select_related("owner"))
    results = [probe for probe in probes if probe.state == Probe.State.DONE]
    running = next((probe for probe in probes if probe.state == Probe.State.RUNNING), None)
    reproduce, families = "Reproduce on fewer devices", "Test one family at a time"
    if running is not None:
        lasting = words.duration((page.now - running.started_at).total_seconds())
        first = Step(reproduce, "running", f"{words.inert(running.owner.username, 40)}, running {lasting}")
    elif results:
        first = Step(reproduce, "done", f"{words.plural(len(results), 'probe')} with a result")
    else:
        first = Step(reproduce, "not_yet", "no probe was started")
    cause = page.incident.board_changes.filter(kind=BoardChange.Kind.CAUSE).last()
    if cause is not None:
        said = f"cause {cause.data.get('certainty', 'known')}" + (f": {cause.family}" if cause.family else "")
        return [first, Step(families, "done", said)]
    tested = len({probe.family for probe in results})
    glyph: Glyph = "running" if tested or running else "not_yet"
    return [first, Step(families, glyph, f"{tested} of {_FAMILIES} closed by a probe")]


def _recovered(page: IncidentPage) -> Step:
    label, state = "Recover from a known good state", page.state
    if state == Incident.State.RESOLVED:
        return Step(label, "done", "resolved")
    if state == Incident.State.FALSE_ALARM:
        return Step(label, "done", "false alarm")
    if state in (Incident.State.RESUMING, Incident.State.WATCHING):
        return Step(label, "running", state)
    if page.request is not None:
        asked = page.request.state == ResumeRequest.State.OPEN
        return Step(label, "running", "resume requested" if asked else "resume approved")
    if page.plan is None:
        return Step(label, "not_yet", "no plan yet")
    return Step(label, "not_yet", "plan drafted" if not page.plan.missing else "plan not complete")


def status_text(page: IncidentPage) -> str:
    """Return what the channel is told, from facts: it names nobody's guess and no cause that is not known."""
    first = page.first_bad
    pieces = [f"{words.inert(page.run.slug)}: {words.inert(page.title, 200)}."]
    if page.waiting is not None:
        waiting = page.waiting
        held = f"Held {words.duration(waiting.held_s)}"
        if waiting.gpu_hours is not None and waiting.money is not None:
            held += f", {words.gpu_hours(waiting.gpu_hours)}, {words.money(waiting.money)} so far"
        pieces.append(f"{held}.")
    else:
        pieces.append(f"{page.running.headline}.")
    pieces.append(f"First bad: {words.inert(first.headline, 200)}.")
    pieces.append(f"Evidence: {page.evidence.headline}.")
    pieces.append(f"Lead: {words.inert(page.lead) if page.lead else 'nobody yet'}.")
    pieces.append(f"Next: {_next_words(page)}.")
    pieces.append(f"{settings.PUBLIC_URL}/incidents/{page.incident.pk}")
    return " ".join(pieces)


def _next_words(page: IncidentPage) -> str:
    main = page.next.main.label
    return main[:1].lower() + main[1:] if page.state in Incident.UNRESOLVED else page.state.replace("_", " ")


def handover_text(page: IncidentPage) -> str:
    """Return what the next lead must know, as a start: state, cost, what is missing, what is next."""
    lines = [
        f"State: {page.state.replace('_', ' ')}; {page.running.headline}; {page.running.obedience}",
        f"First bad: {words.inert(page.first_bad.headline, 200)} ({page.first_bad.sure or 'not known'})",
        f"Evidence: {page.evidence.headline}. {words.inert(page.evidence.says, 300)}",
        f"Plan: {page.plan.label if page.plan else 'none yet'}",
        f"Next: {page.next.main.label}. {words.inert(page.next.says, 300)}",
    ]
    return "\n".join(f"- {line}" for line in lines)
