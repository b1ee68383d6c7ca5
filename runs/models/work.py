"""Units of work: the row is the work, Celery only rings the bell."""

from django.db import models
from django.db.models import Q


class Work(models.Model):
    """One unit of work, claimed by compare-and-set and kept by a lease (see `runs.work`)."""

    class State(models.TextChoices):
        DUE = "due"
        CLAIMED = "claimed"
        DONE = "done"
        FAILED = "failed"  # gave up: `error` says why

    kind = models.CharField(max_length=64)  # names the handler
    key = models.CharField(max_length=200)  # what it is about; unique per kind while unfinished
    payload = models.JSONField(default=dict)
    state = models.CharField(max_length=8, choices=State.choices, default=State.DUE)
    not_before = models.DateTimeField()
    attempts = models.PositiveIntegerField(default=0)
    lease_until = models.DateTimeField(null=True)
    lease_token = models.UUIDField(null=True)
    again = models.BooleanField(default=False)  # asked for while claimed: run once more
    error = models.TextField(blank=True)
    created_at = models.DateTimeField(auto_now_add=True)
    finished_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["kind", "key"], condition=Q(state__in=["due", "claimed"]), name="one_unfinished_work"
            )
        ]
        indexes = [
            models.Index(fields=["not_before"], condition=Q(state__in=["due", "claimed"]), name="work_due")
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.key} ({self.state})"
