"""The server's signing keys over time."""

from django.db import models


class ServerKey(models.Model):
    """One public key this server signs or signed with. Append-only; made by `runs.keys.rotate`.

    The rows prove nothing by themselves: a key counts only where handovers, each signed by both its
    keys, lead from it to the key in the key file (see `andon.keys`).
    """

    key_id = models.CharField(max_length=64, unique=True)
    public_key = models.BinaryField()  # 32 raw bytes
    since = models.DateTimeField()
    handover = models.JSONField(null=True)  # from the key before it; null for the first

    class Meta:
        ordering = ["since", "id"]

    def __str__(self) -> str:
        return self.key_id[:16]
