"""Pages, what was sent of them, and the channels they went over."""

from django.db import models
from django.db.models import Q

from runs.models import Person, Project


class Page(models.Model):
    """One thing that somebody must take; everything about one incident shares its `group`.

    `round` counts how often it was raised anew (the run failed again, a launch without permit): each
    round escalates from the first step. Keys never hold a step or a time, so the same trouble is the
    same alert in every tool behind us.
    """

    class Kind(models.TextChoices):
        INCIDENT = "incident"
        APPROVAL = "approval"
        BREAK_GLASS = "break_glass"
        PERSON = "person"
        VAULT = "vault"
        NOT_WATCHED = "not_watched"
        SWEEP = "sweep"
        ANDON = "andon"  # Andon itself may be wrong

    key = models.CharField(max_length=160, unique=True)
    group = models.CharField(max_length=64)
    kind = models.CharField(max_length=12, choices=Kind.choices)
    project = models.ForeignKey(Project, models.CASCADE, null=True, related_name="+")
    incident = models.ForeignKey("incidents.Incident", models.CASCADE, null=True, related_name="pages")
    about = models.CharField(max_length=100, blank=True)  # opaque: id of a request, a run, a dossier
    title = models.CharField(max_length=200)
    says = models.TextField()
    link = models.CharField(max_length=200)  # path on this server
    urgent = models.BooleanField(default=True)  # escalates; else it is told once, quietly
    to_people = models.JSONField(default=list)  # user names: who is paged by hand, or may approve
    round = models.PositiveIntegerField(default=1)
    raised_at = models.DateTimeField()
    escalating_since = models.DateTimeField()
    acknowledged_at = models.DateTimeField(null=True)
    acknowledged_by = models.CharField(max_length=150, blank=True)
    ended_at = models.DateTimeField(null=True)
    ended_why = models.CharField(max_length=200, blank=True)

    class Meta:
        indexes = [models.Index(fields=["kind"], condition=Q(ended_at=None), name="page_live")]

    def __str__(self) -> str:
        return self.key


class Delivery(models.Model):
    """One message over one channel. Its key and its words are fixed before it is first tried.

    So a worker that dies between sending and writing down that it sent repeats exactly the same message
    under the same key, which receivers know to be one.
    """

    class State(models.TextChoices):
        DUE = "due"
        SENT = "sent"
        DROPPED = "dropped"  # over before it went out, or refused for good: `error` says which

    class What(models.TextChoices):
        RAISED = "raised"
        ACKNOWLEDGED = "acknowledged"
        RESOLVED = "resolved"

    page = models.ForeignKey(Page, models.CASCADE, related_name="deliveries", db_index=False)
    what = models.CharField(max_length=12, choices=What.choices, default=What.RAISED)
    round = models.PositiveIntegerField()
    turn = models.PositiveIntegerField()  # step of the ladder; beyond the last: its repetitions
    channel = models.CharField(max_length=64)
    key = models.CharField(max_length=250, unique=True)
    title = models.CharField(max_length=250)
    text = models.TextField()
    state = models.CharField(max_length=8, choices=State.choices, default=State.DUE)
    tries = models.PositiveIntegerField(default=0)
    error = models.CharField(max_length=300, blank=True)
    created_at = models.DateTimeField()
    sent_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["page", "what", "round", "turn", "channel"], name="one_delivery_per_turn"
            )
        ]

    def __str__(self) -> str:
        return self.key


class ChannelState(models.Model):
    """What is known of a channel of the file: when it last took a message, since when it fails."""

    name = models.CharField(max_length=64, primary_key=True)
    last_sent_at = models.DateTimeField(null=True)
    failing_since = models.DateTimeField(null=True)
    error = models.CharField(max_length=300, blank=True)

    def __str__(self) -> str:
        return self.name


class OnCallTurn(models.Model):
    """Somebody took the pager for a while, before the list's own turn. The newest covering row counts."""

    project = models.ForeignKey(Project, models.CASCADE, related_name="+", db_index=False)
    person = models.ForeignKey(Person, models.CASCADE, related_name="+")
    starts_at = models.DateTimeField()
    ends_at = models.DateTimeField()
    made_by = models.ForeignKey(Person, models.SET_NULL, null=True, related_name="+")
    made_at = models.DateTimeField()

    class Meta:
        constraints = [
            models.CheckConstraint(condition=Q(ends_at__gt=models.F("starts_at")), name="turn_has_length")
        ]
        indexes = [models.Index(fields=["project", "ends_at"], name="turn_by_end")]

    def __str__(self) -> str:
        return f"{self.person} until {self.ends_at:%d %b %H:%M}"


class OnCallAnswer(models.Model):
    """What the external on-call address last said; one row. Pages read this and never ask themselves."""

    name = models.CharField(max_length=150, blank=True)  # "" = nobody
    following = models.CharField(max_length=150, blank=True)
    until = models.DateTimeField(null=True)
    answered_at = models.DateTimeField(null=True)
    asked_at = models.DateTimeField()
    error = models.CharField(max_length=300, blank=True)  # of the newest try, "" = it answered

    def __str__(self) -> str:
        return self.name


class Beat(models.Model):
    """When a sweep was last seen at work: what the dead-man's page goes by."""

    name = models.CharField(max_length=32, primary_key=True)
    at = models.DateTimeField()

    def __str__(self) -> str:
        return f"{self.name} at {self.at}"
