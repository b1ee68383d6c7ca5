"""The breaker: a rule that holds too much at once, or falsely too often, goes back to observe and says so.

A bad rule version must not stop every run of a company. One that held several runs within minutes, and
more than a quarter of all that train, observes from then on every run that is not held yet; what it held
stays held until a person says otherwise, and a false alarm resumes it in place.
"""

from datetime import datetime, timedelta

from django.conf import settings
from django.db import connection, transaction
from django.db.models import Q
from django.utils import timezone

from incidents import states
from incidents.models import Incident, LedgerRow, ResumeRequest
from incidents.paging import raising
from incidents.paging.models import Page
from incidents.rulebook import modes
from incidents.rulebook.models import BreakerTrip
from runs.formatting import count, plural
from runs.models import PolicyVersion, Project, Run, RunProgress
from runs.policies import policy_for, project_policy, set_policy, set_project_policy
from runs.work import Lease, Payload, enqueue, handler

KIND = "incidents.breaker"
_LOCK = 0x0A12  # advisory, beside those of `runs.locks`: who decides whether a breaker trips
WITHIN = timedelta(minutes=10)
SHARE = 0.25  # of the active runs
FALSE_HOLDS = 2  # on one run, within FALSE_WITHIN, and more than half of those that are over
FALSE_WITHIN = timedelta(days=7)


def ask(incident: Incident) -> None:
    """Have a worker look whether the rule that holds `incident` must be stopped, after this commits."""
    enqueue(kind=KIND, key=str(incident.pk), payload={"incident": incident.pk})


@handler(KIND)
def do(payload: Payload, lease: Lease) -> None:
    """Look once; safe to run twice, also after it died half way."""
    incident = Incident.objects.select_related("run__project").get(pk=int(str(payload["incident"])))
    row = LedgerRow.objects.filter(incident=incident, action="hold").order_by("-seq").first()
    if row is None or not row.detector:
        return  # held by a person
    rule, version = str(row.detector["rule"]), f"{row.detector['name']} v{row.detector['version']}"
    if incident.requests.filter(kind=ResumeRequest.Kind.FALSE_ALARM).exists():
        _false_too_often(incident, rule, version)
        return
    with transaction.atomic():
        trip = _too_many(rule, version, timezone.now())
    if trip is not None:
        # A transaction for each run: no post may wait for the locks of all.
        for project in _projects(trip):
            _observe_in(project, rule, f"breaker: {trip.why}")


def doubts(incident: Incident) -> list[BreakerTrip]:
    """Return the trips that this incident's hold was part of: Andon itself may be wrong."""
    return list(BreakerTrip.objects.filter(held__contains=[incident.pk]))


def _too_many(rule: str, version: str, now: datetime) -> BreakerTrip | None:
    """Return the trip of a rule version that holds too many runs now; the first to see it makes it."""
    with connection.cursor() as cursor:
        # Every run that is held at once asks: one of them decides, the others find that it did.
        cursor.execute("SELECT pg_advisory_xact_lock(%s, 0)", [_LOCK])
    known = BreakerTrip.objects.filter(version=version, run=None, at__gte=now - WITHIN).first()
    if known is not None:
        return known
    name, _, number = version.rpartition(" v")
    rows = LedgerRow.objects.filter(
        action="hold", at__gte=now - WITHIN, detector__name=name, detector__version=number
    ).exclude(incident=None)
    held = dict(rows.order_by("at", "id").values_list("run_id", "incident_id"))
    active = RunProgress.objects.filter(last_post_at__gte=now - WITHIN, run__finished_at=None)
    runs = {*active.values_list("run_id", flat=True), *held}
    if len(held) < settings.BREAKER_RUNS or len(held) <= SHARE * len(runs):
        return None
    trip = BreakerTrip.objects.create(
        rule=rule,
        version=version,
        at=now,
        held=sorted(incident for incident in held.values() if incident is not None),
        active_runs=len(runs),
        why=f"{version} held {count(len(held))} of {plural(len(runs), 'active run')} within "
        f"{count(WITHIN.seconds // 60)} minutes",
    )
    _say(trip)
    return trip


def _projects(trip: BreakerTrip) -> list[Project]:
    posting = RunProgress.objects.filter(last_post_at__gte=trip.at - WITHIN).values("run__project")
    holding = Incident.objects.filter(pk__in=trip.held).values("run__project")
    return list(Project.objects.filter(Q(pk__in=posting) | Q(pk__in=holding)).order_by("pk"))


def _say(trip: BreakerTrip) -> None:
    for project in _projects(trip):
        raising.raise_page(
            key=f"breaker-{trip.rule}-{project.slug}",
            kind=Page.Kind.ANDON,
            title=f"Andon itself may be wrong: {trip.version}",
            says=f"{trip.why}. It only observes now, on every run that is not held yet. Where nothing is "
            "wrong, a false alarm resumes a held run in place.",
            link=f"/rules/{trip.rule}",
            project=project,
        )
    for incident in Incident.objects.filter(pk__in=trip.held, state__in=Incident.UNRESOLVED):
        states.record(
            incident,
            kind="breaker",
            text=f"Andon itself may be wrong: {trip.why}. A false alarm resumes in place.",
            by="breaker",
        )


def _observe_in(project: Project, rule: str, why: str) -> None:
    """Let a rule observe on every run of a project that is not held, now and later.

    A held run keeps exactly the policy it has: an approval that is under way names it.
    """
    for run in Run.objects.filter(project=project, finished_at=None).order_by("pk"):
        own = PolicyVersion.objects.filter(run=run).exists()
        if modes.is_held(run):
            if not own:
                document = policy_for(run.pk).document()
                set_policy(run=run, document=document, person=None, why=f"kept while held; {why}")
        elif own and policy_for(run.pk).mode(rule) == "act":
            _observe_on(run, rule, why)
    policy = project_policy(project)
    if policy.mode(rule) == "act":
        document = policy.document() | {"modes": {**policy.modes, rule: "observe"}}
        set_project_policy(project=project, document=document, person=None, why=why)


def _observe_on(run: Run, rule: str, why: str) -> None:
    policy = policy_for(run.pk)
    document = policy.document() | {"modes": {**policy.modes, rule: "observe"}}
    set_policy(run=run, document=document, person=None, why=why)


def _false_too_often(incident: Incident, rule: str, version: str) -> None:
    """After a false alarm went on: a rule that is mostly wrong on this run observes it from now on."""
    run, now = incident.run, timezone.now()
    if policy_for(run.pk).mode(rule) != "act" or modes.is_held(run):
        return
    rows = LedgerRow.objects.filter(
        run=run, action="hold", at__gte=now - FALSE_WITHIN, detector__rule=rule
    ).exclude(incident=None)
    over = {row.incident.pk: row.incident for row in rows.select_related("incident") if row.incident}
    false = sorted(pk for pk, one in over.items() if one.state == Incident.State.FALSE_ALARM)
    right = [pk for pk, one in over.items() if one.state == Incident.State.RESOLVED]
    if len(false) < FALSE_HOLDS or len(false) <= len(right):
        return
    days = FALSE_WITHIN.days
    why = f"{version} held {run.slug} falsely {plural(len(false), 'time')} in {count(days)} days"
    BreakerTrip.objects.create(
        rule=rule, version=version, run=run, at=now, held=false, active_runs=1, why=why
    )
    _observe_on(run, rule, f"breaker: {why}")
    states.record(incident, kind="breaker", text=f"{why}: it only observes from now on", by="breaker")
    raising.raise_page(
        key=f"breaker-{rule}-run-{run.pk}",
        kind=Page.Kind.ANDON,
        title=f"{run.slug}: {rule} only observes now",
        says=f"{why}. Look at its record and at its numbers before it acts again.",
        link=f"/rules/{rule}/{run.slug}",
        project=run.project,
        incident=None,
    )
