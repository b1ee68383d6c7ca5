"""A zip with one possible spelling: stored, one date, no extras. Standard library only.

Written so that a reader can render the whole archive again from names, sizes and CRCs and compare
every byte that is not content. Bags that do not fit plain zip (4 GiB, 65,535 files) are refused: a
directory takes any size.
"""

import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO

_LIMIT = 0xFFFFFFFF
_MOST = 0xFFFF
_VERSION = 20
_UTF8 = 0x0800
_DATE = (1 << 5) | 1  # 1980-01-01, the earliest a zip can say: no clock in the bytes
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")


class ZipLimit(Exception):
    """The bag does not fit a plain zip."""


@dataclass
class Entry:
    """One file of the archive. `offset` is of its local header."""

    name: str
    crc: int
    bytes_total: int
    offset: int


def local_header(entry: Entry) -> bytes:
    """Return the header before a file's bytes."""
    name = entry.name.encode("utf-8")
    size = entry.bytes_total
    return _LOCAL.pack(b"PK\3\4", _VERSION, _UTF8, 0, 0, _DATE, entry.crc, size, size, len(name), 0) + name


def central_directory(entries: Iterable[Entry], offset: int) -> bytes:
    """Return everything after the last file's bytes; `offset` is where that begins.

    Raises:
        ZipLimit: too many files or too large.
    """
    rows = []
    for entry in entries:
        name = entry.name.encode("utf-8")
        size = entry.bytes_total
        rows.append(
            _CENTRAL.pack(
                *(b"PK\1\2", (3 << 8) | _VERSION, _VERSION, _UTF8, 0, 0, _DATE, entry.crc, size, size),
                *(len(name), 0, 0, 0, 0, 0o100644 << 16, entry.offset),
            )
            + name
        )
    body = b"".join(rows)
    if len(rows) > _MOST or offset + len(body) > _LIMIT:
        raise ZipLimit("the bag is too large for a zip (4 GiB, 65,535 files): export a directory")
    return body + _END.pack(b"PK\5\6", 0, 0, len(rows), len(rows), len(body), offset, 0)


def read(file: IO[bytes], size: int) -> list[Entry]:
    """Read an archive of exactly this form and check everything that is not content.

    Raises:
        ValueError: not such an archive, or a byte outside the contents differs.
    """
    if size < _END.size:
        raise ValueError("is no zip archive")
    file.seek(size - _END.size)
    end = _END.unpack(file.read(_END.size))
    if end[0] != b"PK\5\6" or end[6] + end[5] + _END.size != size:
        raise ValueError("is no zip archive of the form that Andon writes")
    file.seek(end[6])
    tail = file.read(size - end[6])
    entries = list(_entries(tail[: end[5]]))
    if central_directory(entries, end[6]) != tail:
        raise ValueError("its directory is not spelled as Andon spells it")
    at = 0
    for entry in entries:
        header = local_header(entry)
        file.seek(at)
        if entry.offset != at or file.read(len(header)) != header:
            raise ValueError(f"{entry.name}: its header in the archive was changed")
        at += len(header) + entry.bytes_total
    if at != end[6]:
        raise ValueError("bytes between the files belong to none")
    return entries


def _entries(raw: bytes) -> Iterable[Entry]:
    at = 0
    while at < len(raw):
        if at + _CENTRAL.size > len(raw):
            raise ValueError("its directory is cut")
        row = _CENTRAL.unpack_from(raw, at)
        name = raw[at + _CENTRAL.size : at + _CENTRAL.size + row[10]]
        if row[0] != b"PK\1\2":
            raise ValueError("its directory is damaged")
        at += _CENTRAL.size + row[10] + row[11] + row[12]
        try:
            text = name.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError("a name in its directory is not UTF-8") from error
        yield Entry(text, row[7], row[9], row[16])


class ZipWriter:
    """Writes files one after the other into a seekable stream."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._entries: list[Entry] = []

    def add(self, name: str, chunks: Iterable[bytes]) -> None:
        """Write one file.

        Raises:
            ZipLimit: it does not fit.
        """
        entry = Entry(name, 0, 0, self._file.tell())
        if entry.offset > _LIMIT:
            raise ZipLimit("the bag is too large for a zip (4 GiB): export a directory")
        self._file.write(local_header(entry))
        for data in chunks:
            entry.crc = zlib.crc32(data, entry.crc)
            entry.bytes_total += len(data)
            if entry.bytes_total > _LIMIT:
                raise ZipLimit(f"{name}: is too large for a zip (4 GiB): export a directory")
            self._file.write(data)
        after = self._file.tell()
        self._file.seek(entry.offset)
        self._file.write(local_header(entry))
        self._file.seek(after)
        self._entries.append(entry)

    def close(self) -> None:
        """Write the directory. Raises ZipLimit."""
        self._file.write(central_directory(self._entries, self._file.tell()))
