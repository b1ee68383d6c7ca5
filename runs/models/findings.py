"""What detectors said, and where each lane first went bad."""

import uuid

from django.db import models
from django.db.models import Q

from runs.models.runs import Run


def uuid4_hex() -> str:
    """Return a key that no other finding has."""
    return uuid.uuid4().hex


class Finding(models.Model):
    """What a detector says, with the numbers it used."""

    class Severity(models.TextChoices):
        INFO = "info"
        WARN = "warn"
        HALT = "halt"

    run = models.ForeignKey(Run, models.CASCADE, related_name="findings", db_index=False)
    attempt = models.PositiveIntegerField()
    kind = models.CharField(max_length=64)
    rule = models.CharField(max_length=32)
    mode = models.CharField(max_length=8)  # off | observe | act, as it was when judged
    severity = models.CharField(max_length=5, choices=Severity.choices)
    step = models.BigIntegerField(null=True)
    lanes = models.JSONField(default=list)
    series = models.CharField(max_length=100, blank=True)
    view = models.CharField(max_length=8, blank=True)
    score = models.FloatField(null=True)
    numbers = models.JSONField(default=dict)
    detail = models.TextField(blank=True)
    detector = models.CharField(max_length=64)
    detector_version = models.CharField(max_length=16)
    policy_digest = models.CharField(max_length=64)
    backfill = models.BooleanField(default=False)
    occurred_at = models.DateTimeField()
    received_at = models.DateTimeField()
    created_at = models.DateTimeField(auto_now_add=True)
    # Says the same as an earlier finding when equal to its key: a dead run repeats itself.
    says = models.CharField(max_length=64, default=uuid4_hex)
    # Acting findings wait here until an incident took them; the sweep looks for those it missed.
    needs_incident = models.BooleanField(default=False)
    incident = models.CharField(max_length=64, blank=True)  # opaque: the incident that took it

    class Meta:
        constraints = [models.UniqueConstraint(fields=["run", "says"], name="one_finding_says_it")]
        indexes = [
            models.Index(fields=["run", "attempt", "step"], name="finding_by_step"),
            models.Index(
                fields=["created_at"],
                condition=models.Q(needs_incident=True, incident=""),
                name="finding_unhandled",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.kind} at step {self.step}"


class FirstBad(models.Model):
    """The earliest bad cell of one lane of one attempt; moved only to an earlier cell.

    One row per lane, never one per cell: a dead run makes 11.8 million bad cells an hour and the
    first-bad cell is the minimum over these rows.
    """

    run = models.ForeignKey(
        Run, models.CASCADE, related_name="first_bad", db_constraint=False, db_index=False
    )
    attempt = models.PositiveIntegerField()
    stream = models.CharField(max_length=8)  # rank | layer
    lane = models.CharField(max_length=200)  # rank number or layer name
    rank = models.IntegerField(default=-1)  # of a layer lane: whose layer; -1 = not said
    step = models.BigIntegerField()
    micro_batch = models.IntegerField(default=-1)
    phase = models.SmallIntegerField()  # andon.detect.cells.Phase
    bits = models.IntegerField(default=0)
    skipped = models.BooleanField(default=False)  # the update was not applied: orders after all applied
    view = models.CharField(max_length=8)  # local | shard | reduced
    series = models.CharField(max_length=100, blank=True)  # the column it was seen in
    value = models.CharField(max_length=8, blank=True)  # nan | +inf | -inf
    occurred_at = models.DateTimeField(null=True)
    received_at = models.DateTimeField()

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["run", "attempt", "stream", "view", "lane", "rank"], name="one_first_bad_per_lane"
            )
        ]
        indexes = [
            # Only the cells of an attempt's earliest bad step are read, those of applied updates first.
            # Partial, so that the look-up of one lane cannot take them: by a small table's statistics the
            # planner prefers the narrower index, and then reads every lane of the run.
            models.Index(
                fields=["run", "attempt", "step"], condition=Q(skipped=False), name="first_bad_applied"
            ),
            models.Index(
                fields=["run", "attempt", "step"], condition=Q(skipped=True), name="first_bad_skipped"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.stream} {self.lane} at step {self.step}"


class DetectorState(models.Model):
    """Where a stateful detector stands for one series of one attempt."""

    run = models.ForeignKey(Run, models.CASCADE, related_name="detector_states", db_index=False)
    attempt = models.PositiveIntegerField()
    detector = models.CharField(max_length=64)
    series = models.CharField(max_length=200)
    state = models.JSONField()
    updated_at = models.DateTimeField(auto_now=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["run", "attempt", "detector", "series"], name="one_detector_state"
            )
        ]

    def __str__(self) -> str:
        return f"{self.detector} on {self.series}"
