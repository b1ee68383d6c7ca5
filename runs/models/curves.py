"""The curves of an attempt, compacted for the pages (see `runs.curve_store`)."""

from django.db import models

from runs.models.runs import Run


class CurveBlock(models.Model):
    """One block of columns of one series, on one level."""

    run = models.ForeignKey(Run, models.CASCADE, related_name="+", db_constraint=False, db_index=False)
    attempt = models.PositiveIntegerField()
    series = models.CharField(max_length=100)
    level = models.SmallIntegerField()
    number = models.BigIntegerField()  # first step // (256 × 4^level)
    columns = models.BinaryField()  # see runs.curve_columns

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["run", "attempt", "level", "series", "number"], name="one_curve_block"
            )
        ]

    def __str__(self) -> str:
        return f"{self.series} {self.level}/{self.number} of {self.run_id} attempt {self.attempt}"
