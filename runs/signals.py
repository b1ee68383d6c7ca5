"""Signals by which `runs` tells the apps above it what happened.

Each is sent inside the transaction that stored the facts, so a receiver that writes rows commits
or rolls back with them. A receiver that fails must not take the data down with it: senders that
matter wrap the call in a savepoint (see `runs.ingest`).
"""

from django.dispatch import Signal

# Sent by runs.ingest and runs.watching with `run: Run` and `findings: list[Finding]` (rows, severity
# warn or halt, rule mode act, not backfill first), and `locked=True` where the sender has just locked the
# run. Receivers open or extend an incident.
findings_stored = Signal()

# Sent with `run: Run`, `attempt: Attempt`, `permit_id: str` ("" when the launch named none).
attempt_launched = Signal()

# Sent with `run: Run` and `ack: DirectiveAck`.
directive_acked = Signal()

# Sent with `run: Run`, `checkpoint: Checkpoint` when one is committed, verified or found bad.
checkpoint_changed = Signal()

# Sent with `run: Run` and `reports: list[FleetReport]` (new, or in another state than before) when a fleet's
# own tools said something of a run through a hook. After the commit that stored them.
fleet_reported = Signal()

# Sent with `run: Run` and `event: andon.wire.Event` for each `action` event (an automatic action a
# trainer or supervisor took, which belongs in the ledger).
action_reported = Signal()

# Sent with `run: Run`, `attempt: int`, `kind: str` and `uri: str` when files are offered as evidence: with
# the first of each kind of a post.
artifact_offered = Signal()

# Sent with `run: Run`, `event: andon.wire.Event` and `attempt: int` when whoever ends an attempt says so
# (`stop.requested`): with what it waited for, and what it did not get.
stop_requested = Signal()

# Asked, not told: sent with `run: Run`, `attempts: Sequence[int]`, `first: int` and `last: int` when the
# curves of a run are drawn. Receivers return a list of `runs.marks.Mark`.
marks_wanted = Signal()

# Asked, not told: sent with `runs: Sequence[int]`, the ids of all runs of a list. Receivers return
# {id: "open incident" | "watching"}, for those of them that have an incident which is not resolved.
incidents_wanted = Signal()

# Asked, not told: sent with `runs: Sequence[int]`, the ids of the runs that are shown. Receivers return
# {id: share}, what part of today's GPU time was kept, 0 to 1; a run without any is not in it.
goodput_wanted = Signal()
