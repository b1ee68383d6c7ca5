"""From an item to the files that make it: what to wait for, what to copy, what to mask."""

from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from django.utils import timezone

from andon.masking import mask_lines, read_lines
from evidence import sources
from evidence.agents import node_work
from evidence.collecting import artifacts, checkpoint_views, data_records, records, samples
from evidence.collecting.outcomes import DoesNotApply, Nothing, NotYet
from evidence.freezing.containment import contained, containment_of, skipped_update
from evidence.kinds import CHECKPOINT_KINDS, KINDS, OFFERED_KINDS, VIEW_KINDS
from evidence.models import Dossier, Item
from evidence.sources import FileSource, NodeSource, Source, SourceError, child
from runs.models import Attempt, Checkpoint
from runs.queries import first_bad

GATHERERS = records.GATHERERS | data_records.GATHERERS | dict.fromkeys(VIEW_KINDS, checkpoint_views.view)
NOTHING = records.NOTHING | data_records.NOTHING  # what to say when nobody posted such a thing
# Other ranks' last posts are under way when the first one opens the dossier.
SETTLE = timedelta(seconds=3)
# Ranks that are still writing their logs get this long, unless the run is contained sooner.
LOG_PATIENCE = timedelta(seconds=20)
# After the run is contained nothing more is offered, but the offer may still be on its way.
OFFER_PATIENCE = timedelta(seconds=10)
# Whole logs of suspects, their node and groups; of the others the end.
LOG_TAIL_BYTES = 200 * 1024


@dataclass(frozen=True)
class Piece:
    """One file of an item. `sha256` is empty when it is not known before reading; a `NodeSource` comes by
    upload."""

    path: str
    source: Source
    sha256: str = ""


def is_held_first(item: Item) -> bool:
    """Return whether the item is a stored checkpoint, which is held where it lies before it is copied."""
    return item.kind in CHECKPOINT_KINDS and "checkpoint" in item.source


def manifest(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Return the files of a checkpoint to keep: those of its commit manifest, and the manifest itself.

    Raises:
        SourceError: no manifest was reported and the place cannot be listed.
    """
    files = [
        {name: entry[name] for name in ("path", "bytes", "sha256", "version_id") if name in entry}
        for entry in checkpoint.files
        if entry.get("path")
    ]
    if not files:
        listed = sources.list_files(checkpoint.uri)
        return [{"path": path} for path in listed] or [{"path": "", "sha256": checkpoint.digest}]
    name = str(checkpoint.verification.get("manifest") or "")
    if name and all(entry["path"] != name for entry in files):
        files.append({"path": name})
    return files


def committed_files(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Return the files that the commit named, [] when it named none: whoever can list the place does.

    That is what an agent is asked to hold.
    """
    return manifest(checkpoint) if checkpoint.files else []


def wait_for_checkpoint(item: Item, dossier: Dossier) -> None:
    """Raise what is known about a checkpoint item that names no checkpoint.

    Raises:
        NotYet, Nothing, DoesNotApply: always one of them.
    """
    if item.kind == "first_bad_checkpoint":
        step = dossier.first_bad_step
        skipped = skipped_update(dossier)
        if skipped is not None:
            raise DoesNotApply(f"contained before the update of step {step}: the update was skipped", skipped)
        how = containment_of(dossier)
        if how is not None:
            never = how.step is not None and step is not None and how.step < step
            before = f"the update of step {step}"
            if not never:
                before = f"a checkpoint of step {step} or later was committed"
            raise DoesNotApply(f"contained before {before}: {how.says}", how.shown_by)
        raise NotYet(item.why or f"no checkpoint of step {step} or later is committed yet")
    if item.source.get("undecided"):
        raise NotYet(item.why or "its checkpoint is being verified")
    raise Nothing(item.why or "there is no such checkpoint")


def _wait_for_offer(item: Item, dossier: Dossier) -> None:
    """Raise NotYet while the trainer may still offer files, Nothing afterwards."""
    if item.source.get("artifacts"):
        return
    how = contained(dossier)
    if how is not None and timezone.now() > dossier.opened_at + OFFER_PATIENCE:
        raise Nothing(f"{NOTHING[item.kind]}; {how}")
    raise NotYet(NOTHING[item.kind], after_s=3)


def newly_offered(item: Item, dossier: Dossier) -> bool:
    """Take what was offered since the item was last looked at; returns whether there was anything."""
    artifacts.refresh(dossier)
    if not artifacts.attach(item, dossier):
        return False
    Item.objects.filter(pk=item.pk).update(source=item.source)
    return True


def gather(item: Item, dossier: Dossier, spool: Path) -> list[Piece]:
    """Return the files of an item that is not a stored checkpoint, written to `spool` where need be.

    Raises:
        NotYet, Nothing, DoesNotApply: instead of files.
        SourceError: an offered file does not give its bytes.
    """
    now = timezone.now()
    if now < dossier.opened_at + SETTLE:
        raise NotYet("waiting for the last posts to arrive", after_s=1)
    newly_offered(item, dossier)
    if item.kind in OFFERED_KINDS:
        _wait_for_offer(item, dossier)
    if item.kind == "rank_logs" and contained(dossier) is None and now < dossier.opened_at + LOG_PATIENCE:
        raise NotYet("ranks are still writing their logs")
    write = GATHERERS.get(item.kind)
    pieces = []
    if write is not None:
        pieces = [_spooled(spool, path) for path in write(dossier, item, spool)]
    pieces += _offered(item, dossier, spool)
    if pieces:
        return pieces
    if item.kind == "hardware_records" and _has_no_gpu(dossier):
        raise DoesNotApply("the launch reported nodes without GPUs")
    if item.kind not in KINDS:
        raise Nothing(f"this server does not know how to collect {item.kind!r}")
    raise Nothing(NOTHING[item.kind])


def _sample(entry: dict[str, Any], number: int, dossier: Dossier, spool: Path) -> Piece:
    path = f"{number:05d}-{Path(entry['uri']).name or 'file'}.encrypted"
    if sources.lies_on_a_node(entry["uri"]):
        samples.public_key(dossier)  # erased meanwhile: said before a node is asked for anything
        return Piece(path, NodeSource(entry["uri"], str(entry.get("node") or sources.host_of(entry["uri"]))))
    samples.encrypt_offer(entry["uri"], spool / path, dossier)
    return _spooled(spool, path)


def _spooled(spool: Path, path: str) -> Piece:
    file = spool / path
    return Piece(path, FileSource(file, file.stat().st_size))


def _offered(item: Item, dossier: Dossier, spool: Path) -> list[Piece]:
    entries = item.source.get("artifacts", [])
    if item.kind == "halt_snapshot":
        return [
            piece
            for number, entry in enumerate(entries)
            for piece in _whole(item, entry, number, len(entries))
        ]
    if item.kind == "raw_samples":
        return [_sample(entry, number, dossier, spool) for number, entry in enumerate(entries)]
    suspects = suspect_ranks(dossier) if item.kind == "rank_logs" else None
    pieces: list[Piece] = []
    taken: set[str] = set()
    for number, entry in enumerate(entries):
        rank = entry.get("rank")
        tail = suspects is not None and rank is not None and rank not in suspects
        path = f"{number:05d}-{Path(entry['uri']).name or 'file'}"
        if rank is not None:
            path = f"rank-{rank:05d}/{Path(entry['uri']).name or 'log'}"
        while path in taken or (spool / path).exists():
            path = f"{path}.again"
        taken.add(path)
        tail_bytes = LOG_TAIL_BYTES if tail else None
        if sources.lies_on_a_node(entry["uri"]):
            pieces.append(_on_its_node(entry, path, tail_bytes))
        else:
            pieces.append(_masked(entry, spool, path, tail_bytes))
    return pieces


def _on_its_node(entry: dict[str, Any], path: str, tail_bytes: int | None) -> Piece:
    node = str(entry.get("node") or sources.host_of(entry["uri"]))
    size = int(entry.get("bytes") or 0)
    size = size if tail_bytes is None else min(size, tail_bytes)
    return Piece(path, NodeSource(entry["uri"], node, bytes_total=size, tail_bytes=tail_bytes, masked=True))


def _whole(item: Item, entry: dict[str, Any], number: int, of: int) -> list[Piece]:
    """Return a snapshot's files as they are: tensors, which hold no text to mask."""
    uri, prefix = entry["uri"], f"{number:05d}/" if of > 1 else ""
    name = Path(uri).name
    if sources.lies_on_a_node(uri):
        held = node_work.hold(item, uri, node=str(entry.get("node") or ""), prefix=prefix)
        return [
            Piece(
                prefix + (str(one["path"]) or name), node_work.source_of(one, uri, name), str(one["sha256"])
            )
            for one in held.files
        ]
    return [
        Piece(prefix + (path or name), sources.open_uri(child(uri, path)))
        for path in sources.list_files(uri) or [""]
    ]


def _masked(entry: dict[str, Any], spool: Path, path: str, tail_bytes: int | None) -> Piece:
    """Write an offered file to the spool, masked where it is text; only its end when `tail_bytes` is given.

    The size is fixed when it is opened: a log that grows meanwhile is kept up to there.
    """
    source = sources.open_uri(entry["uri"])
    skip = 0 if tail_bytes is None else max(0, source.bytes_total - tail_bytes)
    target = spool / path
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open(skip) as file, target.open("wb") as out:
        if skip:
            out.write(b"[the last %d of %d bytes]\n" % (source.bytes_total - skip, source.bytes_total))
        for line in mask_lines(read_lines(file, source.bytes_total - skip, is_cut=skip > 0)):
            out.write(line)
    return _spooled(spool, path)


def suspect_ranks(dossier: Dossier) -> set[int]:
    """Return the ranks whose logs are kept whole: the first bad ones, and those on their nodes and in
    their groups."""
    if dossier.attempt is None:
        return set()
    found = first_bad(dossier.run, dossier.attempt)
    suspects = set(found.ranks) if found is not None else set()
    attempt = Attempt.objects.filter(run_id=dossier.run_id, number=dossier.attempt).first()
    if attempt is None or not suspects:
        return suspects
    related = deque(node.get("ranks") for node in attempt.nodes if isinstance(node, dict))
    for name, groups in attempt.groups.items() if isinstance(attempt.groups, dict) else ():
        # Data-parallel groups reach through the whole fleet: being in one makes nobody a suspect.
        if name != "dp" and isinstance(groups, list):
            related += [groups] if all(isinstance(rank, int) for rank in groups) else groups
    for ranks in related:
        members = {rank for rank in ranks if isinstance(rank, int)} if isinstance(ranks, list) else set()
        if members & set(found.ranks if found is not None else ()):
            suspects |= members
    return suspects


def _has_no_gpu(dossier: Dossier) -> bool:
    if dossier.attempt is None:
        return False
    attempt = Attempt.objects.filter(run_id=dossier.run_id, number=dossier.attempt).first()
    if attempt is None or not attempt.nodes:
        return False
    return all(isinstance(node, dict) and node.get("gpu_uuids") == [] for node in attempt.nodes)


def held_pieces(item: Item) -> list[Piece]:
    """Return the files of a checkpoint that was looked at: from its held links where there are any.

    Raises:
        SourceError: a file is gone or does not answer.
    """
    tree = item.protected_by.get("tree")
    uri = str(item.source["uri"])
    pieces = []
    for entry in item.files:
        path = str(entry["path"])
        name = path or Path(uri).name
        source: Source
        if tree:
            file = Path(tree) / name
            if not file.is_file():
                raise SourceError(f"{file}: the held link is gone", permanent=True)
            source = FileSource(file, int(entry["bytes"]))
        elif entry.get("node"):
            source = node_work.source_of(entry, uri, Path(uri).name)
        elif entry.get("version_id"):
            source = sources.held_version(child(uri, path), str(entry["version_id"]), int(entry["bytes"]))
        else:
            source = sources.open_uri(child(uri, path), expected_bytes=int(entry["bytes"]))
        pieces.append(Piece(name, source, str(entry.get("sha256") or "")))
    return pieces
