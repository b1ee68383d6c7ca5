"""A rule's record on one run: what it would have held, what it held, and what people said of both.

A dead run repeats itself: halts of one attempt that lie within `GAP_STEPS` of each other are one episode.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.utils import timezone

from andon.canonical import sha256
from incidents.models import Incident, LedgerRow
from incidents.rulebook.models import RuleJudgement
from runs.models import Finding, Run

GAP_STEPS = 50
DAYS = 90
_FINDINGS = 2_000

S = Incident.State


@dataclass(frozen=True, slots=True)
class Episode:
    """One time a rule would have held the run. `verdict`: right | false | "" (nobody has said)."""

    finding: int
    attempt: int
    step: int | None
    last_step: int | None
    at: datetime
    kind: str
    detail: str
    count: int
    detector: str
    verdict: str
    by: str
    why: str


@dataclass(frozen=True, slots=True)
class Held:
    """One time a rule held the run."""

    incident: int
    title: str
    step: int | None
    at: datetime
    detector: str
    verdict: str


@dataclass(frozen=True, slots=True)
class Record:
    """Both, newest first, and the count of what people said."""

    rule: str
    run: str
    would: list[Episode]
    held: list[Held]

    @property
    def right(self) -> int:
        """How often people, or a resolved incident, said that it was right."""
        return self._count("right")

    @property
    def false(self) -> int:
        """How often people said that nothing was wrong."""
        return self._count("false")

    def _count(self, verdict: str) -> int:
        said = [one.verdict for one in self.would] + [one.verdict for one in self.held]
        return said.count(verdict)

    @property
    def judged(self) -> int:
        """How many were judged: the false-hold rate is the false ones of these."""
        return self.right + self.false

    @property
    def digest(self) -> str:
        """Name what a person saw: who turns a rule to act has read exactly this."""
        said = [[one.finding, one.count, one.verdict] for one in self.would]
        return sha256([self.rule, self.run, said, [[one.incident, one.verdict] for one in self.held]])


def of(run: Run, rule: str, *, now: datetime | None = None) -> Record:
    """Return the record of one rule on one run over the last `DAYS` days."""
    since = (now or timezone.now()) - timedelta(days=DAYS)
    rows = Finding.objects.filter(
        run=run, rule=rule, mode="observe", severity="halt", backfill=False, received_at__gte=since
    )
    # The newest are read; they are told oldest first, as they came.
    found = sorted(rows.order_by("-id")[:_FINDINGS], key=lambda row: (row.attempt, row.step or 0, row.pk))
    said = {
        one.finding_id: one
        for one in RuleJudgement.objects.filter(run=run, rule=rule).select_related("person").order_by("id")
    }
    would = [_episode(group, said) for group in _groups(found)]
    return Record(
        rule,
        run.slug,
        sorted(would, key=lambda one: (one.at, one.finding), reverse=True),
        _held(run, rule, since),
    )


def _groups(found: Iterable[Finding]) -> list[list[Finding]]:
    groups: list[list[Finding]] = []
    for row in found:
        last = groups[-1][-1] if groups else None
        near = last is not None and last.attempt == row.attempt and _near(last.step, row.step)
        if near:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _near(before: int | None, after: int | None) -> bool:
    return before is not None and after is not None and after - before <= GAP_STEPS


def _episode(group: list[Finding], said: dict[int, RuleJudgement]) -> Episode:
    first = group[0]
    # Whoever judged it may have done so when a later finding was the first to be known.
    word = next((said[row.pk] for row in group if row.pk in said), None)
    return Episode(
        finding=first.pk,
        attempt=first.attempt,
        step=first.step,
        last_step=group[-1].step,
        at=first.received_at,
        kind=first.kind.replace("_", " "),
        detail=first.detail,
        count=len(group),
        detector=f"{first.detector} v{first.detector_version}",
        verdict="" if word is None else "right" if word.right else "false",
        by=word.person.username if word else "",
        why=word.why if word else "",
    )


def _held(run: Run, rule: str, since: datetime) -> list[Held]:
    rows = (
        LedgerRow.objects.filter(run=run, action="hold", at__gte=since, detector__rule=rule)
        .exclude(incident=None)
        .select_related("incident")
        .order_by("-seq")[:_FINDINGS]
    )
    return [
        Held(
            incident=row.incident.pk,
            title=row.incident.title,
            step=row.step,
            at=row.at,
            detector=f"{row.detector['name']} v{row.detector['version']}",
            verdict=_outcome(row.incident),
        )
        for row in rows
        if row.incident is not None and row.detector is not None
    ]


def _outcome(incident: Incident) -> str:
    """Return what came of a hold: declared a false alarm, or worked through to its end."""
    if incident.state == S.FALSE_ALARM or incident.requests.filter(kind="false_alarm").exists():
        return "false"
    return "right" if incident.state == S.RESOLVED else ""
