"""Signals by which evidence lets the apps above it add to what it does."""

from django.dispatch import Signal

# Sent while a bag is written, with `dossier: Dossier` and `bag: andon.bag_writing.BagWriter`. Receivers
# add what belongs to the dossier and lies in their tables: `bag.add_payload("postmortem.md", [raw])`,
# `bag.add_tag("andon/ledger.ndjson", raw)`. Everything added is named by the signed statement.
bag_exporting = Signal()

# Sent after the commit that recorded it, when a sweep finds stored evidence damaged, gone or no longer
# protected, with `dossier: Dossier`, `what` ("fixity mismatch", "protection lost", "covered") and `says`.
vault_alarm = Signal()
