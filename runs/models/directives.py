"""What a run is told, and who obeyed."""

from django.db import models
from django.db.models import Q

from runs.models.runs import Run


class Directive(models.Model):
    """One directive of a run; the highest `seq` is in force. Rows are never changed.

    `incident`, `permit` and `plan` belong to a higher app: here they are opaque.
    """

    class Kind(models.TextChoices):
        CONTINUE = "continue"
        HOLD = "hold"
        ROLLBACK = "rollback"
        RESUME = "resume"

    run = models.ForeignKey(Run, models.CASCADE, related_name="directives", db_index=False)
    seq = models.BigIntegerField()
    kind = models.CharField(max_length=10, choices=Kind.choices)
    attempt = models.PositiveIntegerField(null=True)
    incident = models.CharField(max_length=64, blank=True)  # "" = none (yet)
    document = models.JSONField()  # the signed document exactly as sent
    since = models.DateTimeField()
    set_by = models.CharField(max_length=64, blank=True)  # opaque person id, "" = Andon
    why = models.TextField(blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["run", "seq"], name="one_directive_seq"),
            models.CheckConstraint(condition=Q(seq__gte=1), name="directive_seq_positive"),
        ]

    def __str__(self) -> str:
        return f"{self.run_id} #{self.seq} {self.kind}"


class DirectiveAck(models.Model):
    """What some ranks answered to a directive."""

    run = models.ForeignKey(Run, models.CASCADE, related_name="acks", db_index=False)
    attempt = models.PositiveIntegerField()
    seq = models.BigIntegerField()
    state = models.CharField(
        max_length=10, choices=[(s, s) for s in ("received", "held", "exited", "refused")]
    )
    step = models.BigIntegerField(null=True)
    ranks = models.JSONField(default=list)
    occurred_at = models.DateTimeField()
    received_at = models.DateTimeField()

    class Meta:
        indexes = [models.Index(fields=["run", "seq"], name="ack_by_seq")]

    def __str__(self) -> str:
        return f"{self.run_id} #{self.seq} {self.state}"
