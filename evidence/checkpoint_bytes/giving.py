"""How checkpoint bytes leave the vault: one file from an offset, or all of them as one archive.

From the vault where they are sealed, from what is held at the source where they are only held. Each time is a
row of custody, written before the first byte, and a reader who begins with a checkpoint is told to people.
"""

import contextlib
import hashlib
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import IO

from django.db import transaction
from django.utils import timezone

from evidence import custody
from evidence.alarms import alarm
from evidence.checkpoint_bytes.allowing import permit
from evidence.collecting.gathering import held_pieces
from evidence.hashing import chunks
from evidence.models import Item, StoredObject, VaultRequest
from evidence.refused import Refused
from evidence.vault import BytesDiffer, vault
from runs import formatting
from runs.models import Person

READ = "checkpoint read"  # the custody row
# A reader who takes a checkpoint's files one by one is told of once.
TOLD_FOR = timedelta(hours=24)
_BLOCK = tarfile.BLOCKSIZE
_END = bytes(2 * _BLOCK)


@dataclass(frozen=True, slots=True)
class Piece:
    """One file of a checkpoint. `sha256` is "" when nobody knows it: it was saved without one and is held."""

    path: str
    bytes_total: int
    sha256: str
    open: Callable[[int], IO[bytes]]


@dataclass(frozen=True, slots=True)
class Given:
    """What leaves: its name, its exact length, and the digest of the whole file ("" of an archive)."""

    name: str
    bytes_total: int
    sha256: str
    data: Iterator[bytes]


def pieces_of(item: Item) -> list[Piece]:
    """Return an item's files in order of their paths.

    Raises:
        SourceError: a held file is gone or does not answer.
    """
    if item.state == Item.State.SEALED:
        return [_stored(one) for one in StoredObject.objects.filter(item=item).order_by("path")]
    held = sorted(held_pieces(item), key=lambda one: one.path)
    return [Piece(one.path, one.source.bytes_total, one.sha256, one.source.open) for one in held]


def _stored(one: StoredObject) -> Piece:
    return Piece(
        one.path,
        one.bytes_total,
        one.sha256,
        lambda start: vault().open(one.key, one.version_id, start),
    )


def give_file(*, item: Item, person: Person, why: str, path: str, start: int = 0) -> Given:
    """Return one file of a checkpoint from offset `start`.

    Only a whole file can be checked against its digest, and is before its last bytes leave; what is taken up
    where it broke, its reader checks.

    Raises:
        Refused: a code of `allowing.permit`, or no-such-file, no-such-offset.
        SourceError, VaultError: it is not given now; then nothing was taken.
        BytesDiffer: while reading: these are not the bytes that were recorded.
    """
    grant = permit(item, person, why)
    piece = next((one for one in pieces_of(item) if one.path == path), None)
    if piece is None:
        raise Refused("no-such-file", f"{item.name} has no file {path!r}.")
    if not 0 <= start <= piece.bytes_total:
        raise Refused("no-such-offset", f"{path} has {piece.bytes_total} bytes.")
    file = piece.open(start)
    about = {"path": path, "bytes": piece.bytes_total - start} | ({"from": start} if start else {})
    _note(item, person, why, about, grant, piece.sha256, file)
    data = _checked(file, piece) if not start else _all_of(file)
    return Given(path.rsplit("/", 1)[-1] or "object", piece.bytes_total - start, piece.sha256, data)


def give_all(*, item: Item, person: Person, why: str) -> Given:
    """Return all files of a checkpoint as a tar archive, made while it is sent.

    Raises:
        Refused: a code of `allowing.permit`.
        SourceError, VaultError: the first file is not given; then nothing was taken.
        BytesDiffer, SourceError, VaultError: while reading; the archive then ends without its end.
    """
    grant = permit(item, person, why)
    pieces = pieces_of(item)
    first = pieces[0].open(0)  # a store that is away is told before the custody says that something left
    headers = [_header(piece) for piece in pieces]
    total = sum(len(head) + _padded(one.bytes_total) for head, one in zip(headers, pieces, strict=True))
    about = {"files": len(pieces), "bytes": sum(one.bytes_total for one in pieces)}
    _note(item, person, why, about, grant, item.digest, first)

    def data() -> Iterator[bytes]:
        for number, (header, piece) in enumerate(zip(headers, pieces, strict=True)):
            yield header
            yield from _checked(first if number == 0 else piece.open(0), piece)
            yield bytes(_padded(piece.bytes_total) - piece.bytes_total)
        yield _END

    return Given(f"{item.name}.tar", total + len(_END), "", data())


def _header(piece: Piece) -> bytes:
    about = tarfile.TarInfo(piece.path)
    about.size, about.mode = piece.bytes_total, 0o440
    return about.tobuf(tarfile.PAX_FORMAT)


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _checked(file: IO[bytes], piece: Piece) -> Iterator[bytes]:
    """Yield a file one chunk late: the last is held back until all of it is what was recorded."""
    digest, held, total = hashlib.sha256(), b"", 0
    with contextlib.closing(file):
        for data in chunks(file, piece.bytes_total + 1):
            digest.update(data)
            total += len(data)
            if held:
                yield held
            held = data
    if total != piece.bytes_total or (piece.sha256 and digest.hexdigest() != piece.sha256):
        raise BytesDiffer(f"{piece.path}: what was read is not what was recorded")
    yield held


def _all_of(file: IO[bytes]) -> Iterator[bytes]:
    with contextlib.closing(file):
        yield from chunks(file)


def _note(
    item: Item,
    person: Person,
    why: str,
    about: Mapping[str, object],
    grant: VaultRequest | None,
    sha256: str,
    file: IO[bytes],
) -> None:
    """Write that somebody reads it; should that fail, nothing leaves."""
    who = str(person.opaque_id)
    try:
        with transaction.atomic():
            since = timezone.now() - TOLD_FOR
            rows = item.dossier.custody.filter(what=READ, who=who, item_name=item.name, at__gt=since)
            is_told = rows.exists()
            custody.append(
                item.dossier,
                READ,
                who=who,
                item_name=item.name,
                object_sha256=sha256,
                data={"why": why.strip(), **about} | ({"agreed_by": grant.decided_by} if grant else {}),
            )
    except BaseException:
        file.close()
        raise
    if not is_told:
        size = formatting.size(int(str(about["bytes"])))
        says = f"{person.username} reads {item.name} ({size}): {why.strip()}"
        alarm(item.dossier, READ, says)
