"""The cells of an attempt, compacted for the first-failure grid (see `runs.blocks`)."""

from django.db import models

from runs.models.runs import Run


class Grid(models.Model):
    """What is known of the grid of one attempt as a whole; written by compaction only."""

    run = models.ForeignKey(Run, models.CASCADE, related_name="grids", db_index=False)
    attempt = models.PositiveIntegerField()
    step_first = models.BigIntegerField()
    step_last = models.BigIntegerField()
    ranks = models.PositiveIntegerField(default=0)  # the highest rank that posted, plus one
    seen = models.BinaryField(default=b"")  # first and last step of each rank, see runs.seen
    version = models.BigIntegerField(default=0)  # one more for every time that anything was taken in
    # Cells up to `settled` that did not come are missing: `newest` was reached at `newest_at`.
    settled = models.BigIntegerField(default=-1)
    newest = models.BigIntegerField(default=-1)
    newest_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["run", "attempt"], name="one_grid_per_attempt")]

    def __str__(self) -> str:
        return f"grid of {self.run_id} attempt {self.attempt}"


class GridBlock(models.Model):
    """One block of one level, in three forms: a row per rank, per 8 and per 64 ranks."""

    run = models.ForeignKey(Run, models.CASCADE, related_name="+", db_constraint=False, db_index=False)
    attempt = models.PositiveIntegerField()
    level = models.SmallIntegerField()
    number = models.BigIntegerField()  # first step // (256 × 4^level)
    band = models.SmallIntegerField()  # first rank // 4,096
    cells = models.BinaryField()
    by_8 = models.BinaryField()
    by_64 = models.BinaryField()
    columns = models.BinaryField()

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["run", "attempt", "level", "number", "band"], name="one_grid_block"
            )
        ]

    def __str__(self) -> str:
        return f"block {self.level}/{self.number} of {self.run_id} attempt {self.attempt}"


class GridWaiting(models.Model):
    """What a worker has looked at and is not in the blocks yet: a frame, or what events said.

    Deleted in the transaction that takes them into the blocks.
    """

    run = models.ForeignKey(Run, models.CASCADE, related_name="+", db_constraint=False, db_index=False)
    attempt = models.PositiveIntegerField()
    frame = models.BigIntegerField(null=True)
    points = models.BinaryField(null=True)  # cells of events, see runs.points
    curves = models.BinaryField(null=True)  # values of events, see runs.curve_values
    received_at = models.DateTimeField()

    class Meta:
        indexes = [models.Index(fields=["run", "id"], name="grid_waiting_by_run")]

    def __str__(self) -> str:
        return f"cells of {self.run_id} attempt {self.attempt}"
