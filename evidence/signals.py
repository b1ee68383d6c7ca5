"""Signals by which evidence lets the apps above it add to what it does."""

from django.dispatch import Signal

# Sent while a bag is written, with `dossier: Dossier` and `bag: andon.bag_writing.BagWriter`. Receivers
# add what belongs to the dossier and lies in their tables: `bag.add_payload("postmortem.md", [raw])`,
# `bag.add_tag("andon/ledger.ndjson", raw)`. Everything added is named by the signed statement.
bag_exporting = Signal()

# Sent after the commit that recorded it, when stored evidence is in danger, with `dossier: Dossier | None`
# (None: the store, and so every dossier), `says`, and `what`:
#   "fixity mismatch"       bytes are damaged or gone
#   "protection lost"       objects have less of a lock than they had
#   "covered"               a delete marker or a newer version lies over an object
#   "store does not lock"   a probe saw the store let go of what it locks, and an earlier one did not
#   "deadline passed"       a required item's source stayed silent, so the item is missing
#   "checkpoint read"       a vault officer began to read a checkpoint's bytes
#   "sealing overdue"       a required item is not sealed a day after its run went on
vault_alarm = Signal()
