"""Incidents and what lets a held run go on."""

from django.db import models
from django.db.models import F, Q

from evidence.models import Dossier
from incidents.paging import models as _paging  # noqa: F401 - its tables belong to this app
from incidents.rulebook import models as _rulebook  # noqa: F401 - likewise
from incidents.standing_approvals.models import StandingApproval
from runs.models import Person, Run


class Incident(models.Model):
    """One failure of one run; a run has at most one that is not resolved."""

    class State(models.TextChoices):
        OPEN = "open"
        APPROVED = "approved"
        RESUMING = "resuming"
        WATCHING = "watching"
        RESOLVED = "resolved"
        FALSE_ALARM = "false_alarm"

    UNRESOLVED = (State.OPEN, State.APPROVED, State.RESUMING, State.WATCHING)

    run = models.ForeignKey(Run, models.PROTECT, related_name="incidents")
    attempt = models.PositiveIntegerField()
    state = models.CharField(max_length=12, choices=State.choices, default=State.OPEN)
    severity = models.CharField(max_length=5)  # warn | halt
    holds = models.BooleanField(default=False)  # does it hold the run
    kind = models.CharField(max_length=64)
    title = models.CharField(max_length=200)
    symptom = models.CharField(max_length=64)
    family = models.CharField(max_length=32, blank=True)  # leading failure family
    family_why = models.TextField(blank=True)
    # How it came back in its watch window: "" or a kind of `andon.recurrence`
    recurrence = models.CharField(max_length=12, blank=True)
    opened_at = models.DateTimeField()
    first_bad = models.JSONField(default=dict)  # step, micro_batch, phase, ranks, tie, certainty, layer
    dossier = models.OneToOneField(Dossier, models.PROTECT, related_name="+")
    # After a recurrence new evidence is frozen; what was frozen before stays, by dossier id.
    earlier_dossiers = models.JSONField(default=list)
    policy_digest = models.CharField(max_length=64)
    acknowledged_at = models.DateTimeField(null=True)
    acknowledged_by = models.ForeignKey(Person, models.SET_NULL, null=True, related_name="+")
    lead = models.ForeignKey(Person, models.SET_NULL, null=True, related_name="+")
    evidence_owner = models.ForeignKey(Person, models.SET_NULL, null=True, related_name="+")
    communications = models.ForeignKey(Person, models.SET_NULL, null=True, related_name="+")
    next_update_at = models.DateTimeField(null=True)  # when the channel was promised the next status
    # What later incidents are compared by beside the columns above; null until the sweep has looked.
    traits = models.JSONField(null=True)  # {"nodes": [...], "shards": [...]}
    resolved_at = models.DateTimeField(null=True)
    watch_until_step = models.BigIntegerField(null=True)
    watch_attempt = models.PositiveIntegerField(null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["run"],
                condition=Q(state__in=["open", "approved", "resuming", "watching"]),
                name="one_unresolved_incident",
            )
        ]
        indexes = [models.Index(fields=["-opened_at", "-id"], name="incident_newest")]

    def __str__(self) -> str:
        return f"incident {self.pk} of {self.run}"


class StateChange(models.Model):
    """One transition of an incident. A null person means the system did it."""

    incident = models.ForeignKey(Incident, models.CASCADE, related_name="changes")
    before = models.CharField(max_length=12, blank=True)
    after = models.CharField(max_length=12)
    at = models.DateTimeField()
    person = models.ForeignKey(Person, models.SET_NULL, null=True, related_name="+")
    why = models.TextField(blank=True)

    def __str__(self) -> str:
        return f"{self.before} to {self.after}"


class TimelineEntry(models.Model):
    """What happened, when, and who says so."""

    class Source(models.TextChoices):
        PEOPLE = "people"
        TRAINER = "trainer"
        ANDON = "andon"

    incident = models.ForeignKey(Incident, models.CASCADE, related_name="timeline", db_index=False)
    occurred_at = models.DateTimeField()
    received_at = models.DateTimeField()
    source = models.CharField(max_length=8, choices=Source.choices)
    person = models.ForeignKey(Person, models.SET_NULL, null=True, related_name="+")
    by = models.CharField(max_length=100, blank=True)  # "rank 3", "nonfinite v1", "supervisor"
    kind = models.CharField(max_length=40)
    text = models.TextField()
    data = models.JSONField(default=dict)

    class Meta:
        indexes = [models.Index(fields=["incident", "-occurred_at"], name="timeline_newest")]

    def __str__(self) -> str:
        return self.text[:60]


class Plan(models.Model):
    """How to go on. A change makes a new version; the highest number is the plan."""

    class Kind(models.TextChoices):
        RESUME_IN_PLACE = "resume_in_place", "resume in place"
        SKIP_AND_CONTINUE = "skip_and_continue", "skip and continue"
        ROLLBACK_AND_REPLAY = "rollback_and_replay", "rollback and replay"
        ROLLBACK_AND_SKIP = "rollback_and_skip", "rollback and skip"
        ROLLBACK_ONE_FURTHER = "rollback_one_further", "rollback one further"

    incident = models.ForeignKey(Incident, models.CASCADE, related_name="plans", db_index=False)
    number = models.PositiveIntegerField()
    kind = models.CharField(max_length=24, choices=Kind.choices)
    # {"step", "uri", "digest", "attempt"} and the four positions, or {} (resume in place)
    checkpoint = models.JSONField(default=dict)
    positions = models.JSONField(default=dict)
    skip = models.JSONField(null=True)  # {"from", "to"} absolute samples, half open
    exclusions = models.JSONField(default=dict)  # minimum: {"nodes", "ranks", "gpus"}
    changes = models.JSONField(default=list)  # [{"what", "was", "to", "changes_regime"}]
    why = models.TextField(blank=True)
    # What it was computed from: {"first_bad_step", "last_bad_step", "halt_step", "steps_lost", ...}
    numbers = models.JSONField(default=dict)
    made_by = models.ForeignKey(Person, models.SET_NULL, null=True, related_name="+")  # null: Andon
    made_at = models.DateTimeField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["incident", "number"], name="one_plan_number")]
        ordering = ["number"]

    def __str__(self) -> str:
        return f"plan {self.number}: {self.kind}"


class ResumeRequest(models.Model):
    """A person asks to resume by exactly this plan and evidence."""

    class State(models.TextChoices):
        OPEN = "open"
        APPROVED = "approved"
        REJECTED = "rejected"
        VOIDED = "voided"
        EXPIRED = "expired"
        USED = "used"

    class Kind(models.TextChoices):
        RESUME = "resume", "resume"
        # Declared by one approver with a reason: it has no requester, so nobody approves their own.
        FALSE_ALARM = "false_alarm", "false alarm"
        # One person alone, in an emergency: a role the policy names, a reason, everybody told.
        BREAK_GLASS = "break_glass", "break-glass"
        # The sole approver on duty, after a delay in which any approver can veto.
        SOLO = "solo", "sole approver on duty"
        # Within what an approver signed in advance; it has no requester.
        STANDING = "standing", "standing approval"

    ALONE = ("false_alarm", "break_glass", "solo")  # one person's word, so no requester stands beside it

    incident = models.ForeignKey(Incident, models.CASCADE, related_name="requests")
    kind = models.CharField(max_length=12, choices=Kind.choices, default=Kind.RESUME)
    plan = models.ForeignKey(Plan, models.PROTECT, related_name="requests")
    requested_by = models.ForeignKey(Person, models.PROTECT, null=True, related_name="+")
    requested_at = models.DateTimeField()
    digest = models.CharField(max_length=64)  # SHA-256 of RFC 8785 of `subject`
    subject = models.JSONField()  # what an approver signs
    note = models.TextField(blank=True)
    approvers_needed = models.PositiveSmallIntegerField(default=1)
    state = models.CharField(max_length=10, choices=State.choices, default=State.OPEN)
    ended_at = models.DateTimeField(null=True)
    ended_why = models.JSONField(default=list)  # what changed, or the reason of a rejection
    expires_at = models.DateTimeField()
    grants_at = models.DateTimeField(null=True)  # of a sole approver: when the time to veto is over
    standing = models.ForeignKey(StandingApproval, models.PROTECT, null=True, related_name="requests")

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["incident"], condition=Q(state__in=["open", "approved"]), name="one_live_request"
            ),
            models.CheckConstraint(
                condition=Q(kind__in=["false_alarm", "standing"]) | Q(requested_by__isnull=False),
                name="resume_has_requester",
            ),
            models.CheckConstraint(
                condition=Q(kind="standing", standing__isnull=False)
                | (~Q(kind="standing") & Q(standing__isnull=True)),
                name="standing_request_names_its_approval",
            ),
        ]

    def __str__(self) -> str:
        return f"request {self.pk} ({self.state})"


class Approval(models.Model):
    """One approver's word on one request. Kept forever; a void request makes it worthless."""

    request = models.ForeignKey(ResumeRequest, models.PROTECT, related_name="approvals", db_index=False)
    approver = models.ForeignKey(Person, models.PROTECT, related_name="+")
    requester = models.ForeignKey(Person, models.PROTECT, null=True, related_name="+")
    digest = models.CharField(max_length=64)
    at = models.DateTimeField()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["request", "approver"], name="one_approval_per_person"),
            models.CheckConstraint(condition=~Q(approver=F("requester")), name="approver_is_not_requester"),
        ]

    def __str__(self) -> str:
        return f"approval {self.pk}"


class Permit(models.Model):
    """A signed permission for one resume of one run."""

    class State(models.TextChoices):
        ISSUED = "issued"  # approved, waiting for a supervisor
        EXCHANGED = "exchanged"
        SPENT = "spent"
        VOIDED = "voided"
        EXPIRED = "expired"

    public_id = models.UUIDField(unique=True)
    run = models.ForeignKey(Run, models.PROTECT, related_name="permits")
    incident = models.ForeignKey(Incident, models.PROTECT, related_name="permits")
    request = models.OneToOneField(ResumeRequest, models.PROTECT, related_name="permit")
    attempt = models.PositiveIntegerField()  # the attempt it lets start
    state = models.CharField(max_length=10, choices=State.choices, default=State.ISSUED)
    document = models.JSONField(default=dict)  # signed, exactly as handed out
    issued_at = models.DateTimeField()
    expires_at = models.DateTimeField()
    exchanged_at = models.DateTimeField(null=True)
    exchanged_by = models.CharField(max_length=200, blank=True)  # webhook-id of the newest exchange
    supervisor = models.CharField(max_length=100, blank=True)  # who took it, as it named itself: it may again
    # Each exchange: {"webhook_id", "attempt", "at", "document"}; every one lets one launch happen.
    exchanges = models.JSONField(default=list)
    launches = models.PositiveSmallIntegerField(default=0)
    ended_at = models.DateTimeField(null=True)
    ended_why = models.TextField(blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["run"], condition=Q(state__in=["issued", "exchanged"]), name="one_live_permit"
            )
        ]

    def __str__(self) -> str:
        return f"permit {self.public_id} ({self.state})"


class LedgerRow(models.Model):
    """One automatic action or decision, chained per run. Append-only."""

    run = models.ForeignKey(Run, models.PROTECT, related_name="ledger", db_index=False)
    seq = models.PositiveIntegerField()
    at = models.DateTimeField()
    attempt = models.PositiveIntegerField(null=True)
    action = models.CharField(max_length=32)  # hold | rollback | skip | resume | ...
    step = models.BigIntegerField(null=True)
    ranks = models.JSONField(null=True)
    before = models.JSONField(null=True)  # the four positions
    after = models.JSONField(null=True)
    checkpoint = models.JSONField(null=True)
    detector = models.JSONField(null=True)  # name, version, policy digest, numbers
    samples_skipped = models.BigIntegerField(null=True)
    steps_lost = models.BigIntegerField(null=True)
    gpu_hours_lost = models.FloatField(null=True)
    decided_by = models.CharField(max_length=64)  # opaque person id, or rule and version
    why = models.TextField()
    none_because = models.JSONField(default=dict)  # field -> why this action has none
    budget = models.JSONField(null=True)  # {"used", "of"} of this action on this day, if it is capped
    incident = models.ForeignKey(Incident, models.PROTECT, null=True, related_name="ledger")
    previous = models.CharField(max_length=64, blank=True)
    digest = models.CharField(max_length=64)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["run", "seq"], name="one_ledger_seq")]
        ordering = ["seq"]

    def __str__(self) -> str:
        return f"{self.seq} {self.action}"


class Note(models.Model):
    """A person's note on an incident (Markdown). Edits are new rows that name the one they replace."""

    incident = models.ForeignKey(Incident, models.CASCADE, related_name="notes")
    person = models.ForeignKey(Person, models.PROTECT, related_name="+")
    at = models.DateTimeField()
    text = models.TextField()
    replaces = models.ForeignKey("self", models.PROTECT, null=True, related_name="+")

    def __str__(self) -> str:
        return self.text[:60]


class Probe(models.Model):
    """One probe of an incident's diagnosis: one condition, one owner, one result."""

    class State(models.TextChoices):
        RUNNING = "running"
        DONE = "done"
        STOPPED = "stopped"

    incident = models.ForeignKey(Incident, models.CASCADE, related_name="probes", db_index=False)
    number = models.PositiveIntegerField()  # H-1, H-2, … of this incident
    family = models.CharField(max_length=32)  # the family it was started for
    key = models.CharField(max_length=32)  # of `andon.diagnose.probes`, or "own"
    name = models.CharField(max_length=300)
    condition = models.CharField(max_length=120, blank=True)  # the one that differs; "" = it only reads
    command = models.TextField(blank=True)  # as it was offered
    owner = models.ForeignKey(Person, models.PROTECT, related_name="+")
    state = models.CharField(max_length=8, choices=State.choices, default=State.RUNNING)
    started_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True)
    result = models.CharField(max_length=32, blank=True)  # key of its result
    note = models.TextField(blank=True)
    recorded_by = models.ForeignKey(Person, models.PROTECT, null=True, related_name="+")

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["incident", "number"], name="one_probe_number"),
            # Two conditions changed at once tell nothing about either.
            models.UniqueConstraint(
                fields=["incident"], condition=Q(state="running"), name="one_running_probe"
            ),
            models.CheckConstraint(
                condition=~Q(state="done") | (~Q(result="") & Q(recorded_by__isnull=False)),
                name="done_probe_has_result",
            ),
        ]
        ordering = ["number"]

    def __str__(self) -> str:
        return f"probe {self.number}: {self.name[:60]}"


class BoardChange(models.Model):
    """One change of a diagnosis board. Append-only: owners and the cause are what was said last."""

    class Kind(models.TextChoices):
        TAKE = "take"
        RELEASE = "release"
        START = "start"
        RESULT = "result"
        STOP = "stop"
        CAUSE = "cause"

    incident = models.ForeignKey(Incident, models.CASCADE, related_name="board_changes")
    at = models.DateTimeField()
    person = models.ForeignKey(Person, models.PROTECT, related_name="+")
    kind = models.CharField(max_length=8, choices=Kind.choices)
    family = models.CharField(max_length=32, blank=True)
    probe = models.ForeignKey(Probe, models.PROTECT, null=True, related_name="+")
    text = models.TextField(blank=True)  # the person's own words
    # of a cause: {"certainty": "known | probable | unknown", "ids": ["H-1", "F-117"]}
    data = models.JSONField(default=dict)

    class Meta:
        ordering = ["id"]

    def __str__(self) -> str:
        return f"{self.kind} {self.family}"


class PostmortemEdit(models.Model):
    """One edit of one part that people write. Append-only: the newest of a part is in force."""

    incident = models.ForeignKey(Incident, models.CASCADE, related_name="postmortem_edits", db_index=False)
    part = models.CharField(max_length=16)  # summary | impact | cause | learned | actions | review
    at = models.DateTimeField()
    person = models.ForeignKey(Person, models.PROTECT, related_name="+")
    text = models.TextField(blank=True)
    # of actions: [{"what", "owner", "due", "ticket"}]; of a review: the digest that was read
    data = models.JSONField(default=list)

    class Meta:
        indexes = [models.Index(fields=["incident", "part", "-id"], name="postmortem_part")]
        ordering = ["id"]

    def __str__(self) -> str:
        return f"{self.part} of incident {self.incident_id}"


class PostmortemVersion(models.Model):
    """A postmortem that was made final: everything it says, frozen. Append-only; the highest number is it.

    A version without a document opens it again, with a reason.
    """

    incident = models.ForeignKey(Incident, models.CASCADE, related_name="postmortem_versions", db_index=False)
    number = models.PositiveIntegerField()
    at = models.DateTimeField()
    person = models.ForeignKey(Person, models.PROTECT, related_name="+")
    document = models.JSONField(null=True)
    digest = models.CharField(max_length=64, blank=True)  # SHA-256 of RFC 8785 of the document
    why = models.TextField(blank=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["incident", "number"], name="one_postmortem_version")]
        ordering = ["number"]

    def __str__(self) -> str:
        return f"postmortem {self.number} of incident {self.incident_id}"
