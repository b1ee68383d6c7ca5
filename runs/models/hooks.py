"""What fleets may post to a project, and what they said."""

from django.db import models
from django.db.models import Q

from runs.models.people import Person, Project
from runs.models.runs import Run


class HookToken(models.Model):
    """A project's token for `/api/v1/hooks/`; only its SHA-256 is kept."""

    project = models.ForeignKey(Project, models.CASCADE, related_name="hook_tokens")
    name = models.CharField(max_length=100)
    source = models.CharField(max_length=24)  # the one kind of body it may post
    sha256 = models.CharField(max_length=64, unique=True)
    created_by = models.ForeignKey(Person, models.SET_NULL, null=True, related_name="+")
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField(null=True)
    revoked_at = models.DateTimeField(null=True)
    last_used_at = models.DateTimeField(null=True)
    refused = models.PositiveIntegerField(default=0)  # bodies that could not be read
    refused_why = models.CharField(max_length=300, blank=True)

    def __str__(self) -> str:
        return f"{self.name} ({self.source}) of {self.project}"


class FleetReport(models.Model):
    """One thing a fleet's own tools said, told again or resolved later. It holds nothing by itself."""

    project = models.ForeignKey(Project, models.CASCADE, related_name="fleet_reports", db_index=False)
    source = models.CharField(max_length=24)
    identity = models.CharField(max_length=64)
    token = models.ForeignKey(HookToken, models.SET_NULL, null=True, related_name="+")
    run = models.ForeignKey(Run, models.SET_NULL, null=True, related_name="fleet_reports")
    state = models.CharField(max_length=8)  # firing | resolved
    severity = models.CharField(max_length=8)  # info | warn | critical
    title = models.CharField(max_length=200)
    text = models.TextField(blank=True)
    node = models.CharField(max_length=100, blank=True)
    started_at = models.DateTimeField(null=True)
    ended_at = models.DateTimeField(null=True)
    received_at = models.DateTimeField()
    last_at = models.DateTimeField()
    times = models.PositiveIntegerField(default=1)
    raw = models.JSONField(default=dict)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["project", "source", "identity"], name="one_report_per_identity")
        ]
        indexes = [
            models.Index(fields=["project", "-last_at"], name="report_newest"),
            models.Index(fields=["project", "node"], condition=~Q(node=""), name="report_by_node"),
        ]

    def __str__(self) -> str:
        return f"{self.source}: {self.title[:60]}"
