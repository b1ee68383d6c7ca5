"""Views of the last good checkpoint: which of its files are the optimizer, the RNG, the loader, …

A view names keys of the checkpoint's metadata and the digests of their files. The bytes are the
checkpoint item's; they are not copied again.
"""

import json
import re
from pathlib import Path
from typing import Any

from evidence.collecting.outcomes import DoesNotApply, Nothing, NotYet
from evidence.freezing.verify_checkpoints import told_of
from evidence.kinds import words
from evidence.models import Dossier, Item
from runs.models import Checkpoint

SCHEMA = "andon.checkpoint-view/1"
# How frameworks name these parts of a checkpoint; one word of the name begins with one of these.
_NAMED = {
    "optimizer_state": ("optim", "moment", "exp_avg"),
    "scaler_state": ("scaler", "fp8", "amax"),
    "rng_state": ("rng", "random"),
    "loader_state": ("loader", "dataloader", "sampler", "data"),
    "ema_state": ("ema",),
    "router_state": ("router", "moe"),
}


def view(dossier: Dossier, item: Item, spool: Path) -> list[str]:
    """Write one view as a document.

    Raises:
        NotYet: last good is still being chosen.
        Nothing: there is no last good checkpoint, or its commit names no parts.
        DoesNotApply: its commit names its parts, and none is this one.
    """
    kept = Item.objects.filter(dossier=dossier, kind="last_good_checkpoint").order_by("-id").first()
    if kept is None:
        raise Nothing("the policy keeps no last good checkpoint to view")
    if kept.source.get("undecided"):
        raise NotYet(kept.why or "the last good checkpoint is being verified")
    if "checkpoint" not in kept.source:
        raise Nothing(f"there is no last good checkpoint to view: {kept.why}")
    checkpoint = Checkpoint.objects.get(pk=kept.source["checkpoint"])
    parts = told_of(checkpoint).get("parts")
    where = f"the commit of step {checkpoint.step}"
    if not isinstance(parts, dict) or not parts:
        raise Nothing(f"{where} names no parts (checkpoint.committed, data.parts)")
    mine = {name: keys for name, keys in parts.items() if _is_part(item.kind, name)}
    if not mine:
        named = ", ".join(sorted(parts)[:12])
        raise DoesNotApply(f"{where} has no such part; it names {named}", {"parts": sorted(parts)[:100]})
    name = f"{item.kind}.json"
    document = {
        "schema": SCHEMA,
        "view": words(item.kind),
        "of": {
            "item": kept.name,
            "run_attempt": checkpoint.attempt,
            "step": checkpoint.step,
            "uri": checkpoint.uri,
            "digest": checkpoint.digest,
        },
        "parts": mine,
        "files": _files(checkpoint, mine),
        "positions": checkpoint.positions() if item.kind == "loader_state" else {},
    }
    (spool / name).write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    return [name]


def _is_part(kind: str, name: str) -> bool:
    tokens = re.split(r"[^a-z0-9]+", name.lower())
    return any(token.startswith(_NAMED[kind]) for token in tokens) or name.lower().startswith(_NAMED[kind])


def _files(checkpoint: Checkpoint, parts: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the checkpoint's file table that the parts name; keys that are no path have none."""
    named = {key for keys in parts.values() for key in (keys if isinstance(keys, list | dict) else [keys])}
    return [
        {name: row[name] for name in ("path", "bytes", "sha256") if name in row}
        for row in checkpoint.files
        if row.get("path") in named
    ]
