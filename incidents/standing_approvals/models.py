"""Standing approvals: what an approver signed in advance that automation may do by itself."""

from django.db import models
from django.db.models import F, Q

from runs.models import Person, Project, Run


class StandingApproval(models.Model):
    """Signed in advance: which incidents, how often a day, how far back, how much is skipped, until when.

    Written by one person and signed by another. Nothing runs under it before it is signed, after it
    was revoked, or after it expired; what it says is never changed, only revoked.
    """

    project = models.ForeignKey(Project, models.PROTECT, related_name="standing_approvals")
    run = models.ForeignKey(Run, models.PROTECT, null=True, related_name="standing_approvals")  # null: all
    kinds = models.JSONField()  # of incidents: ["loss_spike", …]
    per_day = models.PositiveSmallIntegerField(default=0)  # permits per UTC day, all its runs together
    furthest_steps = models.PositiveIntegerField(default=0)  # the most steps a rollback may run again
    widest_skip = models.PositiveBigIntegerField(default=0)  # the most samples it may leave out
    why = models.TextField()
    made_by = models.ForeignKey(Person, models.PROTECT, related_name="+")
    made_at = models.DateTimeField()
    signed_by = models.ForeignKey(Person, models.PROTECT, null=True, related_name="+")
    signed_at = models.DateTimeField(null=True)
    expires_at = models.DateTimeField()
    digest = models.CharField(max_length=64)  # SHA-256 of RFC 8785 of what was signed
    document = models.JSONField(null=True)  # signed by the server's key, once a person has signed
    revoked_by = models.ForeignKey(Person, models.PROTECT, null=True, related_name="+")
    revoked_at = models.DateTimeField(null=True)
    revoked_why = models.TextField(blank=True)

    class Meta:
        constraints = [
            models.CheckConstraint(condition=~Q(signed_by=F("made_by")), name="signer_is_not_writer"),
            models.CheckConstraint(
                condition=Q(signed_by__isnull=True, signed_at__isnull=True, document__isnull=True)
                | Q(signed_by__isnull=False, signed_at__isnull=False, document__isnull=False),
                name="standing_signature_whole",
            ),
        ]
        ordering = ["-id"]

    def __str__(self) -> str:
        return f"standing approval {self.pk}"
