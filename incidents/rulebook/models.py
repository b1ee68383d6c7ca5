"""What people said of what rules saw, and when a rule was taken off its duty because it held too much."""

from django.db import models

from runs.models import Finding, Person, Run


class RuleJudgement(models.Model):
    """A person's word on what a rule would have held for. Append-only: the newest of a finding counts."""

    run = models.ForeignKey(Run, models.CASCADE, related_name="rule_judgements")
    rule = models.CharField(max_length=32)
    finding = models.ForeignKey(Finding, models.CASCADE, related_name="judgements")  # first of its episode
    right = models.BooleanField()
    person = models.ForeignKey(Person, models.PROTECT, related_name="+")
    at = models.DateTimeField()
    why = models.TextField(blank=True)

    class Meta:
        ordering = ["id"]

    def __str__(self) -> str:
        return f"{self.rule} was {'right' if self.right else 'wrong'}"


class BreakerTrip(models.Model):
    """One rule version was dropped to observe because it held too many runs, or held falsely too often."""

    rule = models.CharField(max_length=32)
    version = models.CharField(max_length=100)  # "spike v2": detector and its version
    run = models.ForeignKey(
        Run, models.CASCADE, null=True, related_name="breaker_trips"
    )  # null: all not held
    at = models.DateTimeField()
    held = models.JSONField(default=list)  # incidents by id that made it trip
    active_runs = models.PositiveIntegerField(default=0)
    why = models.TextField()

    class Meta:
        ordering = ["-id"]

    def __str__(self) -> str:
        return f"breaker of {self.version}"
