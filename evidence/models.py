"""Dossiers, what they hold, and the proof of it."""

import uuid

from django.db import models
from django.db.models import F, Q

from runs.models import Run


class Dossier(models.Model):
    """The evidence frozen together. `label` and `url` are opaque: a higher app sets them."""

    run = models.ForeignKey(Run, models.PROTECT, related_name="dossiers")
    # The name in chains, seals, bags and keys of the store: a database id means nothing to a stranger
    # and may be given twice after a restore.
    uid = models.UUIDField(default=uuid.uuid4, unique=True, editable=False)
    label = models.CharField(max_length=200, blank=True)
    url = models.CharField(max_length=200, blank=True)
    opened_at = models.DateTimeField()
    opened_by = models.CharField(max_length=64, blank=True)  # opaque person id, "" = Andon
    why = models.TextField(blank=True)
    attempt = models.PositiveIntegerField(null=True)
    first_bad_step = models.BigIntegerField(null=True)  # b; null when nothing is known to be bad
    margin_steps = models.PositiveIntegerField(default=0)  # last good is at or before b - max(1, margin)
    plan = models.JSONField(default=dict)  # the freeze plan as made, with its policy digest
    closed_at = models.DateTimeField(null=True)  # locks were extended to the policy's days then
    released_at = models.DateTimeField(null=True)  # two people let its holds go
    deleted_at = models.DateTimeField(null=True)  # two people had its stored objects deleted; rows stay

    def __str__(self) -> str:
        return self.label or f"dossier {self.pk}"


class Item(models.Model):
    """A thing to preserve. One checkpoint of 16,384 files is one item with a file table."""

    class State(models.TextChoices):
        PLANNED = "planned"
        HELD = "held"
        COLLECTING = "collecting"
        SEALED = "sealed"
        NOT_APPLICABLE = "not_applicable"
        MISSING = "missing"

    dossier = models.ForeignKey(Dossier, models.PROTECT, related_name="items", db_index=False)
    kind = models.CharField(max_length=40)
    name = models.CharField(max_length=200)  # unique in its dossier: "last good checkpoint, step 900"
    required = models.BooleanField(default=True)
    order = models.PositiveSmallIntegerField()  # of volatility, 1 vanishes first
    state = models.CharField(max_length=16, choices=State.choices, default=State.PLANNED)
    why = models.TextField(blank=True)  # of `not applicable` and `missing`
    source = models.JSONField(default=dict)  # where the bytes come from (uris, queries)
    files = models.JSONField(default=list)  # [{"path", "bytes", "sha256", "version_id"?}] as known
    digest = models.CharField(max_length=64, blank=True)  # of the file table, once known
    # What keeps the source's bytes from being lost until they are copied: {"how", "says", ...}
    protected_by = models.JSONField(default=dict)
    # "none", "governance", "legal_hold" (until two people confirm compliance) or "compliance"
    lock = models.CharField(max_length=12, default="governance")
    retain_days = models.PositiveIntegerField(default=30)  # after close-out, as the policy said
    retain_until = models.DateTimeField(null=True)  # only ever later: a trigger refuses an earlier one
    deadline = models.DateTimeField(null=True)
    silent_since = models.DateTimeField(null=True)  # the source has not answered since
    trouble_since = models.DateTimeField(null=True)  # our own vault or disk has not taken it since
    bytes_total = models.BigIntegerField(null=True)
    bytes_done = models.BigIntegerField(default=0)
    held_at = models.DateTimeField(null=True)
    sealed_at = models.DateTimeField(null=True)
    waived_at = models.DateTimeField(null=True)
    waived_by = models.CharField(max_length=64, blank=True)
    waived_why = models.TextField(blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["dossier", "kind", "name"], name="one_item_per_name"),
            models.CheckConstraint(
                condition=~Q(state="sealed") | (Q(sealed_at__isnull=False) & ~Q(digest="")),
                name="sealed_item_has_digest",
            ),
        ]
        ordering = ["order", "id"]

    def __str__(self) -> str:
        return f"{self.name} ({self.state})"


class StoredObject(models.Model):
    """One stored version of one key in the vault."""

    item = models.ForeignKey(
        Item, models.PROTECT, related_name="stored_objects", related_query_name="objects", db_index=False
    )
    path = models.TextField()  # path inside the item
    key = models.TextField()  # key in the store; holds item id and SHA-256
    version_id = models.CharField(max_length=200, blank=True)
    bytes_total = models.BigIntegerField()
    sha256 = models.CharField(max_length=64)
    part_bytes = models.BigIntegerField(null=True)
    part_sha256 = models.JSONField(default=list)
    protected_by = models.JSONField(default=dict)  # {"mode", "until", "legal_hold"} as read back
    stored_at = models.DateTimeField()
    checked_at = models.DateTimeField(null=True)  # last fixity check
    mismatch = models.TextField(blank=True)  # what that check found; "" = the bytes are as stored
    lock_lost_at = models.DateTimeField(null=True)  # found without the lock it had; null once it has one
    deleted_at = models.DateTimeField(null=True)  # the bytes are gone, after release and two people

    class Meta:
        constraints = [models.UniqueConstraint(fields=["item", "path"], name="one_object_per_path")]
        indexes = [
            models.Index(F("checked_at").asc(nulls_first=True), "id", name="object_oldest_check"),
            models.Index(fields=["item"], condition=~Q(mismatch=""), name="object_mismatch"),
            models.Index(fields=["item"], condition=Q(lock_lost_at__isnull=False), name="object_lock_lost"),
        ]

    def __str__(self) -> str:
        return f"{self.path} {self.sha256[:8]}"


class Leftover(models.Model):
    """A stored version that no item counts on: a try that was cut or gathered anew left it.

    It keeps the lock it was stored with, goes with its dossier's release and deletion, and is in no
    seal. Found by `evidence.proof.leftovers`, which compares the store with the rows.
    """

    item = models.ForeignKey(Item, models.PROTECT, related_name="leftovers")
    key = models.TextField()
    version_id = models.CharField(max_length=200, blank=True)
    bytes_total = models.BigIntegerField()
    why = models.TextField()  # it is there, for people
    protected_by = models.JSONField(default=dict)  # as of a stored object
    stored_at = models.DateTimeField()  # by the store's clock
    found_at = models.DateTimeField()
    deleted_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["key", "version_id"], name="one_row_per_leftover")]
        ordering = ["id"]

    def __str__(self) -> str:
        return self.key


class Hold(models.Model):
    """A counted lock on a source object: while any is unreleased, nobody may delete the uri."""

    dossier = models.ForeignKey(Dossier, models.PROTECT, related_name="holds", db_index=False)
    run = models.ForeignKey(Run, models.PROTECT, related_name="holds")
    uri = models.TextField()  # normalised; matches itself and everything below it
    item = models.ForeignKey(Item, models.PROTECT, null=True, related_name="holds")
    placed_at = models.DateTimeField()
    enforced_by = models.JSONField(default=dict)  # what the store itself enforces, beside the gate
    released_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["dossier", "uri"], name="one_hold_per_dossier")]
        indexes = [
            # For "itself and everything below it", in any collation, whichever run holds it.
            models.Index(
                fields=["uri"],
                opclasses=["text_pattern_ops"],
                condition=Q(released_at=None),
                name="hold_live",
            )
        ]

    def __str__(self) -> str:
        return self.uri


class DeletionAllow(models.Model):
    """An answer "yes, delete it", valid for 10 minutes: a freeze plan treats the uri as gone."""

    run = models.ForeignKey(Run, models.CASCADE, related_name="deletion_allows", db_index=False)
    uri = models.TextField()
    allowed_at = models.DateTimeField()
    expires_at = models.DateTimeField()

    class Meta:
        indexes = [models.Index(fields=["run", "expires_at"], name="allow_by_expiry")]

    def __str__(self) -> str:
        return self.uri


class GateUse(models.Model):
    """When a run's checkpoint manager last asked the deletion gate: a run that never did may delete
    without asking."""

    run = models.OneToOneField(Run, models.CASCADE, primary_key=True, related_name="gate_use")
    asked_at = models.DateTimeField()

    def __str__(self) -> str:
        return f"{self.run_id} asked at {self.asked_at}"


class SampleKey(models.Model):
    """The key that a dossier's raw samples are encrypted with. Erasing it erases them, wherever they lie."""

    dossier = models.OneToOneField(Dossier, models.PROTECT, primary_key=True, related_name="sample_key")
    key = models.BinaryField(null=True)  # X25519, the private half; null once erased
    made_at = models.DateTimeField()
    erased_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=Q(key__isnull=True, erased_at__isnull=False)
                | Q(key__isnull=False, erased_at__isnull=True),
                name="sample_key_or_erased",
            )
        ]

    def __str__(self) -> str:
        return f"sample key of dossier {self.dossier_id}"


class VaultRequest(models.Model):
    """A step that needs two people: one asks, another agrees. Made by `evidence.retention.release`,
    `evidence.retention.compliance`, `evidence.collecting.samples` and `evidence.checkpoint_bytes`; every
    turn is a custody row."""

    class Kind(models.TextChoices):
        RELEASE = "release"
        DELETION = "deletion"
        COMPLIANCE = "compliance"
        ERASURE = "erasure"
        READING = "reading"  # of one checkpoint's bytes

    class State(models.TextChoices):
        OPEN = "open"
        APPROVED = "approved"  # the work it allows is under way
        DONE = "done"
        DECLINED = "declined"  # by another person, or withdrawn

    dossier = models.ForeignKey(Dossier, models.PROTECT, related_name="vault_requests", db_index=False)
    kind = models.CharField(max_length=12, choices=Kind.choices)
    item = models.ForeignKey(
        Item, models.PROTECT, null=True, related_name="vault_requests"
    )  # of a reading; else all
    state = models.CharField(max_length=10, choices=State.choices, default=State.OPEN)
    why = models.TextField()
    subject = models.JSONField(default=dict)  # what was asked for: items, bytes, dates, cost
    requested_by = models.CharField(max_length=64)  # opaque person id, as `decided_by`
    requested_at = models.DateTimeField()
    decided_by = models.CharField(max_length=64, blank=True)
    decided_at = models.DateTimeField(null=True)
    decided_why = models.TextField(blank=True)
    done_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["dossier", "kind", "item"],
                condition=Q(state__in=["open", "approved"]),
                nulls_distinct=False,
                name="one_live_vault_request",
            ),
            models.CheckConstraint(
                condition=Q(state__in=["open", "declined"])
                | (~Q(decided_by="") & ~Q(decided_by=F("requested_by"))),
                name="vault_request_by_two_people",
            ),
        ]
        ordering = ["id"]

    def __str__(self) -> str:
        return f"{self.kind} of dossier {self.dossier_id} ({self.state})"


class CustodyRow(models.Model):
    """One link of a dossier's chain of custody. Append-only; made by `evidence.custody.append`."""

    dossier = models.ForeignKey(Dossier, models.PROTECT, related_name="custody", db_index=False)
    seq = models.PositiveIntegerField()
    at = models.DateTimeField()
    who = models.CharField(max_length=64)  # opaque person id or "andon"
    what = models.CharField(max_length=64)
    item_name = models.CharField(max_length=240, blank=True)
    object_sha256 = models.CharField(max_length=64, blank=True)
    data = models.JSONField(default=dict)
    previous = models.CharField(max_length=64, blank=True)
    digest = models.CharField(max_length=64)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["dossier", "seq"], name="one_custody_seq")]
        ordering = ["seq"]

    def __str__(self) -> str:
        return f"{self.seq} {self.what}"


class Seal(models.Model):
    """A signed manifest of a dossier; each names the one before it. Append-only."""

    dossier = models.ForeignKey(Dossier, models.PROTECT, related_name="seals", db_index=False)
    number = models.PositiveIntegerField()
    made_at = models.DateTimeField()
    envelope = models.JSONField()  # DSSE, in-toto Statement v1
    digest = models.CharField(max_length=64)  # SHA-256 of the payload bytes
    previous = models.CharField(max_length=64, blank=True)
    key_id = models.CharField(max_length=64)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["dossier", "number"], name="one_seal_number")]
        ordering = ["number"]

    def __str__(self) -> str:
        return f"seal {self.number} of {self.dossier_id}"


class Reconciliation(models.Model):
    """The vault compared with the rows, after the database came back from a backup. Made by
    `evidence.proof.restored`."""

    store = models.CharField(max_length=300)
    began_at = models.DateTimeField()
    done_at = models.DateTimeField(null=True)  # null: it was cut, and has to be run again
    result = models.JSONField(default=dict)  # what was found, in numbers

    def __str__(self) -> str:
        return f"{self.store} at {self.began_at}"


class UnknownVersion(models.Model):
    """A stored version of a dossier or an item that no row knows: it was stored after the backup was made.

    Nobody deletes it: whoever reads the list decides. Its key names dossier and item, its bytes are what
    their digest in the key says, and it keeps the lock it was stored with.
    """

    reconciliation = models.ForeignKey(Reconciliation, models.CASCADE, related_name="unknown")
    key = models.TextField()
    version_id = models.CharField(max_length=200, blank=True)
    bytes_total = models.BigIntegerField()
    stored_at = models.DateTimeField()  # by the store's clock
    protected_by = models.JSONField(default=dict)  # as of a stored object

    class Meta:
        ordering = ["key", "id"]

    def __str__(self) -> str:
        return self.key


class StoreProbe(models.Model):
    """What the store truly enforced when it was last tried."""

    store = models.CharField(max_length=300)  # ANDON_VAULT_URL without credentials
    probed_at = models.DateTimeField()
    result = models.JSONField()

    class Meta:
        indexes = [models.Index(fields=["store", "-probed_at"], name="probe_newest")]

    def __str__(self) -> str:
        return f"{self.store} at {self.probed_at}"


class Agent(models.Model):
    """A node's agent, as far as a run knows it: when it last asked what is wanted."""

    run = models.ForeignKey(Run, models.CASCADE, related_name="agents", db_index=False)
    node = models.CharField(max_length=200)
    seen_at = models.DateTimeField()  # written every 15 s at most

    class Meta:
        constraints = [models.UniqueConstraint(fields=["run", "node"], name="one_agent_per_node")]

    def __str__(self) -> str:
        return f"agent of {self.node}"


class AgentTask(models.Model):
    """What only a node's agent can do for an item: hold a place in its file system, upload one file, or
    remove a tree that it made.

    The worker writes what is wanted and takes the outcome into the item; the agent's posts change
    nothing but this row. See `evidence.agents.node_work` and `evidence.agents.node_trees`.
    """

    class Act(models.TextChoices):
        HOLD = "hold"
        UPLOAD = "upload"
        RELEASE = "release"

    run = models.ForeignKey(Run, models.CASCADE, related_name="agent_tasks", db_index=False)
    item = models.ForeignKey(Item, models.CASCADE, related_name="agent_tasks", db_index=False)
    act = models.CharField(max_length=8, choices=Act.choices)
    # Inside the item; of a hold: what its files' paths begin with; of a release: the name of the tree.
    path = models.TextField(blank=True)
    uri = models.TextField()  # where it lies on the node
    node = models.CharField(max_length=200, blank=True)  # "" = whichever node has it
    tail_bytes = models.BigIntegerField(null=True)  # only so much of the end; null = whole
    masked = models.BooleanField(default=False)  # secrets are taken out on the node
    bytes_total = models.BigIntegerField(null=True)  # as committed, or as the agent announced
    sha256 = models.CharField(max_length=64, blank=True)
    known = models.BooleanField(default=False)  # the two above were known before the agent was asked
    files = models.JSONField(default=list)  # of a hold, so far: [{"path", …, "node", "tree", "how"}]
    # Of a hold: what was changed in place since; of a release: what lies in the tree and is not the agent's.
    changed = models.JSONField(default=list)
    parts = models.JSONField(default=list)  # of an upload: [[sha256, md5]] of each part, as announced
    part_bytes = models.BigIntegerField(null=True)
    bytes_done = models.BigIntegerField(default=0)
    store_upload = models.TextField(blank=True)  # the store's own name of the upload
    cannot = models.JSONField(default=dict)  # node -> why it cannot
    trouble = models.TextField(blank=True)  # what went wrong last, for people
    says = models.TextField(blank=True)  # of a hold: what protects it; of a release: why it is asked for
    given_to = models.CharField(max_length=200, blank=True)  # the node that was told first, and when
    given_at = models.DateTimeField(null=True)
    made_at = models.DateTimeField()
    seen_at = models.DateTimeField(null=True)  # the agent last posted about it
    arrived_at = models.DateTimeField(null=True)  # announced as done; the worker has the last word
    done_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["item", "act", "path"], condition=~Q(act="release"), name="one_agent_task"
            ),
            models.UniqueConstraint(
                fields=["item", "path", "node"], condition=Q(act="release"), name="one_release_of_a_tree"
            ),
        ]
        indexes = [
            models.Index(fields=["run", "node"], condition=Q(done_at=None), name="agent_task_open"),
        ]

    def __str__(self) -> str:
        return f"{self.act} {self.uri}"
