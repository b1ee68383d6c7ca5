"""What trainers post. Events and frames are partitioned by received day.

`Event` and `Frame` are created by SQL (`runs.sql`), because Django cannot declare partitions; no
table has a foreign key to them, so that retention can drop whole partitions.
"""

from django.db import models

from runs.models.runs import Run


class Receipt(models.Model):
    """One accepted post: `(run, webhook_id)` is the only idempotency key. Inserted first."""

    run = models.ForeignKey(Run, models.CASCADE, related_name="receipts", db_constraint=False, db_index=False)
    webhook_id = models.CharField(max_length=200)
    body_sha256 = models.BinaryField(max_length=32)
    answer = models.JSONField(default=dict)  # {"accepted", "refused"} as first answered
    received_at = models.DateTimeField(db_index=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["run", "webhook_id"], name="one_receipt_per_id")]

    def __str__(self) -> str:
        return f"{self.run_id} {self.webhook_id}"


class Event(models.Model):
    """One event. Times: when it occurred, was received and was processed (looked at)."""

    id = models.BigAutoField(primary_key=True)
    received_at = models.DateTimeField()
    run_id = models.BigIntegerField()
    attempt = models.IntegerField()
    type = models.TextField()
    step = models.BigIntegerField(null=True)
    rank = models.IntegerField(null=True)
    node = models.TextField(blank=True)
    occurred_at = models.DateTimeField()
    backfill = models.BooleanField(default=False)
    view = models.CharField(max_length=8, blank=True)  # local | reduced
    ranks = models.JSONField(null=True)
    flags = models.JSONField(default=dict)  # path -> nan | +inf | -inf | no_offset | ...
    data = models.JSONField(default=dict)
    webhook_id = models.TextField()
    index = models.IntegerField(default=0)  # position in its body

    class Meta:
        managed = False
        db_table = "runs_event"

    def __str__(self) -> str:
        return f"{self.type} {self.id}"


class Frame(models.Model):
    """One frame as received, with a summary that answers most questions without the body."""

    id = models.BigAutoField(primary_key=True)
    received_at = models.DateTimeField()
    run_id = models.BigIntegerField()
    attempt = models.IntegerField()
    stream = models.TextField()  # rank | layer | node
    node = models.TextField(blank=True)
    content_type = models.TextField()
    body = models.BinaryField()  # decompressed, as posted; STORAGE EXTERNAL
    step_first = models.BigIntegerField()
    step_last = models.BigIntegerField()
    lane_first = models.IntegerField(null=True)  # null when lanes are names
    lane_last = models.IntegerField(null=True)
    lanes = models.JSONField(null=True)  # names of text lanes
    rows = models.IntegerField()
    metrics = models.JSONField(default=list)
    state_plane = models.BinaryField(null=True)  # see runs.planes: one state code per cell
    bad_cells = models.IntegerField(default=0)
    skips = models.BooleanField(default=False)  # some step of it says that its update was not applied
    backfill = models.BooleanField(default=False)
    webhook_id = models.TextField()

    class Meta:
        managed = False
        db_table = "runs_frame"

    def __str__(self) -> str:
        return f"{self.stream} frame {self.id}"


class Pending(models.Model):
    """Something stored that no worker has looked at yet; deleted with the result's transaction."""

    run = models.ForeignKey(Run, models.CASCADE, related_name="pending", db_constraint=False, db_index=False)
    what = models.CharField(max_length=8, choices=[(w, w) for w in ("event", "frame", "finding")])
    ref = models.BigIntegerField()  # id of the event, frame or finding
    received_at = models.DateTimeField()

    class Meta:
        indexes = [models.Index(fields=["run", "id"], name="pending_by_run")]

    def __str__(self) -> str:
        return f"{self.what} {self.ref}"


class UnreadBody(models.Model):
    """A body with a valid signature that could not be read, kept raw with what the sender was told."""

    run = models.ForeignKey(Run, models.CASCADE, related_name="unread")
    webhook_id = models.CharField(max_length=200)
    received_at = models.DateTimeField()
    content_type = models.CharField(max_length=200, blank=True)
    encoding = models.CharField(max_length=40, blank=True)
    status = models.PositiveSmallIntegerField()
    problem = models.JSONField()
    body = models.BinaryField()
    bytes_total = models.BigIntegerField()

    def __str__(self) -> str:
        return f"unread {self.webhook_id}"
