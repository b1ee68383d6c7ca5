"""Policies as versioned rows."""

from django.db import models

from runs.models.people import Person, Project


class PolicyVersion(models.Model):
    """One immutable version of a policy, of a project (run null) or of one run.

    The newest version of the run wins over the newest of its project, which wins over the defaults
    in `andon.policy`.
    """

    project = models.ForeignKey(Project, models.CASCADE, related_name="policies", db_index=False)
    run = models.ForeignKey("runs.Run", models.CASCADE, null=True, related_name="policies")
    number = models.PositiveIntegerField()
    document = models.JSONField()
    digest = models.CharField(max_length=64)
    why = models.TextField(blank=True)
    created_by = models.ForeignKey(Person, models.SET_NULL, null=True)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["project", "run", "number"], nulls_distinct=False, name="one_policy_number"
            )
        ]

    def __str__(self) -> str:
        return f"policy {self.number} of {self.run or self.project}"
