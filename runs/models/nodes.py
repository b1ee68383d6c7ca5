"""Nodes as runs make them known: where a run was, what a node reported, what happened on it.

A node has no row of its own. It is named by launches, by the node of a post and by its own frames, and what
is shown of it is what the runs say that a person may see.
"""

from django.db import models

from runs.models.runs import Run


class NodeStay(models.Model):
    """One node of one attempt, as its launch named it."""

    run = models.ForeignKey(Run, models.CASCADE, related_name="stays", db_index=False)
    attempt = models.PositiveIntegerField()
    node = models.CharField(max_length=200)
    ranks = models.JSONField(default=list)
    rank_first = models.BigIntegerField(null=True)
    rank_last = models.BigIntegerField(null=True)
    gpu_uuids = models.JSONField(default=list)
    switch = models.CharField(max_length=100, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["run", "attempt", "node"], name="one_stay_per_attempt")
        ]
        indexes = [
            models.Index(fields=["node"], name="stay_by_node"),
            models.Index(fields=["run", "attempt", "rank_first"], name="stay_by_rank"),
        ]

    def __str__(self) -> str:
        return f"{self.node[:60]} in {self.run_id} attempt {self.attempt}"


class NodeReading(models.Model):
    """What one node, or one device of it, reported in an attempt: newest values, extremes, counters.

    Counters of a node count up from its boot: `grown` is how far each rose since its first report here.
    """

    run = models.ForeignKey(Run, models.CASCADE, related_name="readings", db_index=False)
    attempt = models.PositiveIntegerField()
    node = models.CharField(max_length=200)
    device = models.CharField(max_length=60, blank=True)  # "" for the node as a whole
    step = models.BigIntegerField()
    at = models.DateTimeField()
    last = models.JSONField(default=dict)  # metric -> newest value
    worst = models.JSONField(default=dict)  # metric -> [value, step]
    grown = models.JSONField(default=dict)  # counter -> how far it rose

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["run", "attempt", "node", "device"], name="one_reading_per_device"
            )
        ]
        indexes = [models.Index(fields=["node"], name="reading_by_node")]

    def __str__(self) -> str:
        return f"{self.node[:60]} {self.device} in {self.run_id} attempt {self.attempt}"


class NodeEvent(models.Model):
    """One thing that happened on a node: an Xid, an ECC error, heat, a link, another state."""

    run = models.ForeignKey(Run, models.CASCADE, related_name="node_events")
    attempt = models.PositiveIntegerField()
    node = models.CharField(max_length=200)
    kind = models.CharField(max_length=24)  # xid | ecc | thermal | link | state | preflight
    step = models.BigIntegerField(null=True)
    rank = models.IntegerField(null=True)
    occurred_at = models.DateTimeField()
    received_at = models.DateTimeField()
    data = models.JSONField(default=dict)

    class Meta:
        indexes = [models.Index(fields=["node", "-occurred_at"], name="node_event_newest")]

    def __str__(self) -> str:
        return f"{self.kind} on {self.node[:60]}"
