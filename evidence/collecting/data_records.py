"""Evidence of what was read: batch statistics, data shards, tokenizer, mixture; and of hangs.

Written from what trainers told in events, as `records` does; nobody has to tell any of it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from evidence.collecting import records
from evidence.models import Dossier, Item
from runs.models import Event

# Keys under which data pipelines tell these things in `batch.seen` and `loader.position`.
_STATISTICS = (
    *("lengths", "seq_lens", "seq_len", "seq_len_max", "batch_size", "tokens", "token_count", "token_counts"),
    *("mask_density", "loss_mask_density", "domain", "domains", "fingerprint", "fingerprints"),
)
_SHARDS = (
    *("dataset", "dataset_version", "shard", "shards", "file", "files", "offset", "offsets"),
    *("shard_sha256", "shard_digest", "digest"),
)
_MIXTURE = ("mixture", "mixture_state", "mixture_weights", "domain_weights")
_TOKENIZER = (
    *("tokenizer", "tokenizer_version", "tokenizer_sha256", "vocab_size"),
    *("packing", "packing_version", "sequence_packing"),
)


def _picked(
    dossier: Dossier, item: Item, spool: Path, *, types: tuple[str, ...], keys: tuple[str, ...], name: str
) -> list[str]:
    """Write of each event of the window only what is told under `keys`, with its step and rank."""
    rows = records.events(records.window_of(dossier, item), *types).filter(data__has_any_keys=list(keys))

    def line(event: Event) -> dict[str, Any]:
        whole = records.event_document(event)
        told = {key: value for key, value in whole["data"].items() if key in keys}
        return {key: whole[key] for key in ("step", "rank", "run_attempt", "post", "index")} | {"told": told}

    return [name] if records.write_lines(spool / name, map(line, records.paged(rows))) else []


def batch_statistics(dossier: Dossier, item: Item, spool: Path) -> list[str]:
    """Lengths, token counts, mask density, domains and fingerprints of the batches of the window."""
    return _picked(
        dossier, item, spool, types=("batch.seen",), keys=_STATISTICS, name="batch_statistics.ndjson"
    )


def data_shards(dossier: Dossier, item: Item, spool: Path) -> list[str]:
    """Dataset version, file, offset and digest behind the batches of the window."""
    types = ("batch.seen", "loader.position")
    return _picked(dossier, item, spool, types=types, keys=_SHARDS, name="data_shards.ndjson")


def mixture(dossier: Dossier, item: Item, spool: Path) -> list[str]:
    """The mixture as launch and start told it, and its state in the window."""
    types = ("batch.seen", "loader.position", "schedule.boundary")
    written = _picked(dossier, item, spool, types=types, keys=_MIXTURE, name="mixture.ndjson")
    return written + records.facts(dossier, spool, "mixture.json", _MIXTURE)


def tokenizer(dossier: Dossier, item: Item, spool: Path) -> list[str]:
    """Tokenizer and packing, as launch and start told them."""
    return records.facts(dossier, spool, "tokenizer.json", _TOKENIZER)


def flight_recorder(dossier: Dossier, item: Item, spool: Path) -> list[str]:
    """What ranks told of their collectives and errors; dumps and stacks are offered as files."""
    rows = Event.objects.filter(run_id=dossier.run_id, type__in=("flight_recorder.dump", "process.error"))
    if dossier.attempt is not None:
        rows = rows.filter(attempt=dossier.attempt)
    name = "flight_recorder.ndjson"
    lines = map(records.event_document, records.paged(rows))
    return [name] if records.write_lines(spool / name, lines) else []


GATHERERS: dict[str, Callable[[Dossier, Item, Path], list[str]]] = {
    "batch_statistics": batch_statistics,
    "data_shards": data_shards,
    "mixture": mixture,
    "tokenizer": tokenizer,
    "flight_recorder": flight_recorder,
}

NOTHING: dict[str, str] = {
    "batch_statistics": "no batch.seen event of the window told lengths, counts, domains or fingerprints",
    "data_shards": "no batch.seen or loader.position event of the window told dataset, file or offset",
    "mixture": "neither the launch nor any event of the window told a mixture",
    "tokenizer": "neither run.started nor attempt.launched told tokenizer or packing",
    "flight_recorder": "no flight_recorder.dump or process.error was posted and no dump or stack offered",
    "raw_samples": "no raw samples were offered (artifact.available, kind raw_samples)",
}
