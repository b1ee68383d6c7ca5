"""Writes an evidence bag as a stream: nothing is held in memory but names and digests."""

import base64
import contextlib
import hashlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from andon import bag_format as form
from andon.bag_zip import ZipWriter
from andon.chain import canonical

Sign = Callable[[str, bytes], dict[str, Any]]  # payload type, payload → DSSE envelope


class Sink(Protocol):
    """Where the files of a bag go."""

    def add(self, name: str, chunks: Iterable[bytes]) -> None:
        """Write one file, in full, once."""
        ...


class DirectorySink:
    """Files below a directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(self, name: str, chunks: Iterable[bytes]) -> None:
        """See `Sink.add`."""
        target = self.root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as file:
            for data in chunks:
                file.write(data)


class ZipSink:
    """Files of one archive, below one directory in it."""

    def __init__(self, writer: ZipWriter, top: str) -> None:
        self.writer = writer
        self.top = top

    def add(self, name: str, chunks: Iterable[bytes]) -> None:
        """See `Sink.add`."""
        self.writer.add(f"{self.top}/{name}", chunks)


@contextlib.contextmanager
def open_sink(path: Path) -> Iterator[Sink]:
    """Yield a sink for `path`: an archive when it ends in .zip, else a directory.

    The bag appears under its name only when it is whole.

    Raises:
        FileExistsError: something is there already.
    """
    if path.exists():
        raise FileExistsError(f"{path}: exists already")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        if path.suffix == ".zip":
            with temporary.open("xb") as file:
                writer = ZipWriter(file)
                yield ZipSink(writer, path.stem)
                writer.close()
                file.flush()
                os.fsync(file.fileno())
        else:
            temporary.mkdir()
            yield DirectorySink(temporary)
        temporary.rename(path)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


class BagWriter:
    """Adds files in any order, then `finish` signs the list of all of them."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._payload: dict[str, str] = {}
        self._sizes: dict[str, int] = {}
        self._tags: dict[str, str] = {}
        self._fetch: dict[str, form.Fetch] = {}

    def add_payload(self, path: str, chunks: Iterable[bytes], sha256: str = "") -> None:
        """Write `data/path`.

        Raises:
            ValueError: an unsafe or used path, or bytes that do not have the digest they must have.
        """
        name = self._new(form.PAYLOAD + path)
        digest, size = self._write(name, chunks)
        if sha256 and digest != sha256:
            raise ValueError(f"{path}: read with SHA-256 {digest}, stored with {sha256}")
        self._payload[name], self._sizes[name] = digest, size

    def add_fetch(self, path: str, *, url: str, bytes_total: int, sha256: str) -> None:
        """List `data/path` as an object that lies elsewhere."""
        name = self._new(form.PAYLOAD + path)
        if any(character.isspace() for character in url):
            raise ValueError(f"{path}: its URL holds white space")
        self._payload[name], self._sizes[name] = sha256, bytes_total
        self._fetch[name] = form.Fetch(url, bytes_total, sha256)

    def add_tag(self, path: str, raw: bytes) -> None:
        """Write a file beside the payload, below `andon/`."""
        name = self._new(path)
        if not name.startswith("andon/") or name in form.UNNAMED:
            raise ValueError(f"{path}: tag files lie below andon/, and {form.STATEMENT} is written last")
        self._tags[name] = self._write(name, [raw])[0]

    def _new(self, name: str) -> str:
        form.check_name(name)
        if name in self._payload or name in self._tags:
            raise ValueError(f"{name}: is in the bag already")
        return name

    def _write(self, name: str, chunks: Iterable[bytes]) -> tuple[str, int]:
        digest, size = hashlib.sha256(), 0

        def counted() -> Iterator[bytes]:
            nonlocal size
            for data in chunks:
                digest.update(data)
                size += len(data)
                yield data

        self._sink.add(name, counted())
        return digest.hexdigest(), size

    def finish(self, *, info: Mapping[str, str], facts: Mapping[str, Any], sign: Sign) -> dict[str, Any]:
        """Write BagIt's own files and the signed statement; returns the statement's envelope.

        Args:
            info: bag-info.txt without Payload-Oxum.
            facts: the statement's predicate, canonical JSON values only.
            sign: makes a DSSE envelope.
        """
        sizes = form.oxum(self._sizes.values())
        own = {
            "bagit.txt": form.BAGIT,
            form.INFO: form.render_info({**info, "Payload-Oxum": sizes}),
            form.MANIFEST: form.render_manifest(self._payload),
        }
        if self._fetch:
            own[form.FETCH] = form.render_fetch(self._fetch)
        for name, raw in own.items():
            self._tags[name] = self._write(name, [raw])[0]
        named = self._payload | self._tags
        predicate: dict[str, Any] = {"schema": form.BAG_SCHEMA, "payload_oxum": sizes, **facts}
        statement = canonical(
            {
                "_type": form.STATEMENT_TYPE,
                "subject": [{"name": name, "digest": {"sha256": named[name]}} for name in sorted(named)],
                "predicateType": form.BAG_PREDICATE,
                "predicate": predicate,
            }
        )
        envelope = sign(form.PAYLOAD_TYPE, statement)
        self._tags[form.STATEMENT] = self._write(form.STATEMENT, [canonical(envelope) + b"\n"])[0]
        self._write(form.TAG_MANIFEST, [form.render_manifest(self._tags)])
        return envelope


def keys_file(public_keys: Sequence[bytes], handovers: Sequence[Sequence[Mapping[str, Any]]] = ()) -> bytes:
    """Return `andon/keys.json`: the raw public keys by fingerprint, and how one followed another.

    Args:
        handovers: as the keys signed them (`andon.keys.handover`), so that whoever pinned an old key can
            follow it to the one that signs this bag.
    """
    rows = sorted(
        (hashlib.sha256(raw).hexdigest(), base64.b64encode(raw).decode("ascii")) for raw in public_keys
    )
    document: dict[str, Any] = {
        "schema": form.KEYS_SCHEMA,
        "keys": [{"key_id": name, "public_key": text} for name, text in rows],
    }
    if handovers:
        document["handovers"] = handovers
    return canonical(document) + b"\n"
