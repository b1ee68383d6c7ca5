"""Runs, their attempts and their checkpoints."""

from django.db import models
from django.db.models import Q

from runs.models.people import Project


class Run(models.Model):
    """One training effort; outlives restarts.

    The row is the lock of everything that decides about the run (directive, incident, plan,
    approval, holds), so it holds nothing that a post updates: see `RunProgress`.
    """

    project = models.ForeignKey(Project, models.PROTECT, related_name="runs")
    slug = models.SlugField(max_length=100, unique=True)
    created_at = models.DateTimeField(auto_now_add=True)
    finished_at = models.DateTimeField(null=True)

    def __str__(self) -> str:
        return self.slug


class RunSecret(models.Model):
    """A webhook secret; several are valid while one replaces another."""

    run = models.ForeignKey(Run, models.CASCADE, related_name="secrets")
    secret = models.CharField(max_length=120)
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField(null=True)
    last_used_at = models.DateTimeField(null=True)

    def __str__(self) -> str:
        return f"secret {self.pk} of {self.run}"


class RunProgress(models.Model):
    """What posts move, written at most once a second per run."""

    run = models.OneToOneField(Run, models.CASCADE, primary_key=True, related_name="progress")
    attempt = models.PositiveIntegerField(null=True)
    step = models.BigIntegerField(null=True)
    step_at = models.DateTimeField(null=True)  # received time of the newest step: the progress clock
    last_post_at = models.DateTimeField(null=True)  # the alive clock
    last = models.JSONField(default=dict)  # newest loss, grad_norm, lr, tokens, ... with their step
    nodes = models.JSONField(default=dict)  # node -> RFC 3339 time of its newest post
    not_watched_since = models.DateTimeField(null=True)  # detection raised: data is stored, unseen
    not_watched_why = models.TextField(blank=True)
    unread_bodies = models.PositiveIntegerField(default=0)
    unread_bytes = models.BigIntegerField(default=0)

    def __str__(self) -> str:
        return f"progress of {self.run_id}"


class Attempt(models.Model):
    """One launch or in-place rollback of a run."""

    run = models.ForeignKey(Run, models.CASCADE, related_name="attempts", db_index=False)
    number = models.PositiveIntegerField()
    launched_at = models.DateTimeField()
    launch_reported = models.BooleanField(default=True)  # False: opened implicitly by a post
    world_size = models.PositiveIntegerField(null=True)
    nodes = models.JSONField(default=list)  # [{"node", "ranks", "gpu_uuids"}]
    groups = models.JSONField(default=dict)  # {"dp": [[ranks...], ...], "tp": ..., "pp": ...}
    precision = models.CharField(max_length=32, blank=True)
    began_from = models.JSONField(default=dict)  # checkpoint it began from
    config_sha256 = models.CharField(max_length=64, blank=True)
    environment_sha256 = models.CharField(max_length=64, blank=True)
    permit_id = models.CharField(max_length=64, blank=True)
    data = models.JSONField(default=dict)  # the whole launch event, extra keys kept
    first_step = models.BigIntegerField(null=True)
    exited_at = models.DateTimeField(null=True)
    exit = models.JSONField(default=dict)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["run", "number"], name="one_attempt_number")]

    def __str__(self) -> str:
        return f"{self.run} attempt {self.number}"


class Checkpoint(models.Model):
    """A committed checkpoint of step c: it holds W(c)."""

    class State(models.TextChoices):
        COMMITTED = "committed"
        VERIFIED = "verified"
        BAD = "bad"
        DELETED = "deleted"

    run = models.ForeignKey(Run, models.CASCADE, related_name="checkpoints", db_index=False)
    attempt = models.PositiveIntegerField()
    step = models.BigIntegerField()
    uri = models.TextField()
    state = models.CharField(max_length=12, choices=State.choices, default=State.COMMITTED)
    digest = models.CharField(max_length=64, blank=True)  # SHA-256 of the commit manifest's file table
    files = models.JSONField(default=list)  # [{"path", "bytes", "sha256"}]
    bytes_total = models.BigIntegerField(default=0)
    # The four positions are different numbers and are all kept.
    loader_position = models.BigIntegerField(null=True)
    consumed_samples = models.BigIntegerField(null=True)
    optimizer_step = models.BigIntegerField(null=True)
    schedule_position = models.BigIntegerField(null=True)
    committed_at = models.DateTimeField()
    verified_at = models.DateTimeField(null=True)
    verification = models.JSONField(default=dict)  # what was checked, and what failed

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["run", "attempt", "step", "uri"], name="one_checkpoint_row"),
            models.CheckConstraint(condition=Q(step__gte=0), name="checkpoint_step_not_negative"),
        ]
        indexes = [models.Index(fields=["run", "state", "-step"], name="checkpoint_newest")]

    def __str__(self) -> str:
        return f"{self.run} step {self.step} ({self.state})"

    def positions(self) -> dict[str, int | None]:
        """Return the four positions by name."""
        return {
            "loader_position": self.loader_position,
            "consumed_samples": self.consumed_samples,
            "optimizer_step": self.optimizer_step,
            "schedule_position": self.schedule_position,
        }
