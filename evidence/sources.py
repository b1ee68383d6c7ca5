"""Where evidence comes from: files under the configured roots, and objects in S3.

A source is opened as often as needed and always names the same bytes: a path whose size is fixed
when it is first looked at, or one version of one key.
"""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol
from urllib.parse import urlsplit

from botocore.exceptions import BotoCoreError, ClientError
from django.conf import settings

from evidence.stores import s3_client
from evidence.uris import UnusableUri, local_path, normalise, s3_place

CHUNK_BYTES = 1 << 20


class SourceError(Exception):
    """A source did not give its bytes. `permanent`: asking again will not help."""

    def __init__(self, says: str, *, permanent: bool = False) -> None:
        super().__init__(says)
        self.says = says
        self.permanent = permanent


class Source(Protocol):
    """Bytes that can be read more than once."""

    @property
    def bytes_total(self) -> int:
        """Return how many bytes there are."""
        ...

    def open(self, start: int = 0) -> IO[bytes]:
        """Return a stream of the bytes from offset `start`.

        Raises:
            SourceError: gone, changed, or not answering.
        """
        ...


@dataclass(frozen=True)
class FileSource:
    """The first `bytes_total` bytes of a local file."""

    path: Path
    bytes_total: int

    def open(self, start: int = 0) -> IO[bytes]:
        try:
            file = self.path.open("rb")
            file.seek(start)
        except OSError as error:
            raise SourceError(f"{self.path}: {error.strerror}", permanent=is_gone(error)) from error
        return file


@dataclass(frozen=True)
class S3Source:
    """One version of one object; without versions, what has the ETag seen when it was looked at."""

    client: Any = field(repr=False)
    bucket: str
    key: str
    version_id: str
    bytes_total: int
    etag: str = ""

    def open(self, start: int = 0) -> IO[bytes]:
        wanted: dict[str, Any] = {"Bucket": self.bucket, "Key": self.key}
        if self.version_id:
            wanted["VersionId"] = self.version_id
        elif self.etag:
            wanted["IfMatch"] = self.etag
        if start:
            wanted["Range"] = f"bytes={start}-"
        try:
            body: IO[bytes] = self.client.get_object(**wanted)["Body"]
        except (BotoCoreError, ClientError) as error:
            raise s3_error(f"s3://{self.bucket}/{self.key}", error) from error
        return body


@dataclass(frozen=True)
class NodeSource:
    """A file that only the agent of a node can read: its bytes come by upload, never through here.

    `tail_bytes` is how much of its end is wanted (None: all), `masked` whether secrets must be taken out.
    """

    uri: str
    node: str  # "" = whichever has it
    bytes_total: int = 0
    tail_bytes: int | None = None
    masked: bool = False

    def open(self, start: int = 0) -> IO[bytes]:
        raise SourceError(f"{self.uri}: lies on node {self.node}, this server may not read it")


def is_gone(error: OSError) -> bool:
    """Return whether the error says that the file is not there (rather than not answering)."""
    return isinstance(error, FileNotFoundError | NotADirectoryError)


def s3_error(where: str, error: Exception) -> SourceError:
    """Return an S3 failure as a source failure; only "gone" and "overwritten" are permanent."""
    code = error.response.get("Error", {}).get("Code", "") if isinstance(error, ClientError) else ""
    if code in {"PreconditionFailed", "412"}:
        return SourceError(f"{where}: was overwritten since it was looked at", permanent=True)
    gone = code in {"NoSuchKey", "NoSuchVersion", "404", "NoSuchBucket"}
    return SourceError(f"{where}: {code or type(error).__name__}", permanent=gone)


def root_of(path: Path) -> Path | None:
    """Return the configured root that really holds `path` (symbolic links resolved), None for none."""
    real = Path(os.path.realpath(path))
    for root in settings.SOURCE_ROOTS:
        base = Path(os.path.realpath(root))
        if real == base or base in real.parents:
            return base
    return None


def allowed_path(uri: str) -> Path:
    """Return the real local path of a `file://` URI that this server may read.

    Raises:
        SourceError: on another machine, outside every root, or not a file URI.
    """
    try:
        path = local_path(uri)
    except UnusableUri as error:
        raise SourceError(str(error), permanent=True) from error
    if root_of(path) is None:
        raise SourceError(
            f"{uri}: is under none of ANDON_SOURCE_ROOTS, this server may not read it", permanent=True
        )
    return Path(os.path.realpath(path))


def is_readable_here(uri: str) -> bool:
    """Return whether this server is allowed to read the URI at all; says nothing about its being there."""
    if uri.lower().startswith(("s3:", "s3a:", "s3n:")):
        return True
    try:
        allowed_path(uri)
    except SourceError:
        return False
    return True


def lies_on_a_node(uri: str) -> bool:
    """Return whether the URI names a file of some machine that this server may not read itself."""
    return uri.lower().startswith(("/", "file:")) and not is_readable_here(uri)


def host_of(uri: str) -> str:
    """Return the machine that a `file://HOST/…` URI names, "" when it names none."""
    try:
        parts = urlsplit(uri)
        host = parts.hostname or ""
    except ValueError:
        return ""
    return "" if parts.scheme != "file" or host == "localhost" else host


def open_uri(uri: str, *, version_id: str = "", expected_bytes: int | None = None) -> Source:
    """Return the source behind a URI of one file or object, its size read now.

    Raises:
        SourceError: it may not be read here, is not there, or has another size than expected.
    """
    source = _s3_source(uri, version_id) if normalise(uri).startswith("s3://") else _file_source(uri)
    if expected_bytes is not None and source.bytes_total != expected_bytes:
        raise SourceError(
            f"{uri}: {source.bytes_total} bytes, committed with {expected_bytes}", permanent=True
        )
    return source


def held_version(uri: str, version_id: str, bytes_total: int) -> S3Source:
    """Return a version that was looked at and held: it is what it was, nobody needs to be asked again."""
    bucket, key = s3_place(uri)
    return S3Source(s3_client.source_client(), bucket, key, version_id, bytes_total)


def _file_source(uri: str) -> FileSource:
    path = allowed_path(uri)
    try:
        about = path.stat()
    except OSError as error:
        raise SourceError(f"{uri}: {error.strerror}", permanent=is_gone(error)) from error
    if not stat.S_ISREG(about.st_mode):
        raise SourceError(f"{uri}: is not a file", permanent=True)
    return FileSource(path, about.st_size)


def _s3_source(uri: str, version_id: str) -> S3Source:
    bucket, key = s3_place(uri)
    client: Any = s3_client.source_client()
    wanted = {"Bucket": bucket, "Key": key} | ({"VersionId": version_id} if version_id else {})
    try:
        head = client.head_object(**wanted)
    except (BotoCoreError, ClientError) as error:
        raise s3_error(uri, error) from error
    found = str(head.get("VersionId") or version_id)
    version = "" if found == "null" else found
    return S3Source(client, bucket, key, version, int(head["ContentLength"]), str(head.get("ETag", "")))


def list_files(uri: str) -> list[str]:
    """Return the paths below a directory or prefix, sorted; [] when the URI is one file.

    Raises:
        SourceError: it may not be read, or is not there.
    """
    if normalise(uri).startswith("s3://"):
        return sorted(_s3_paths(uri))
    path = allowed_path(uri)
    if path.is_dir():
        return sorted(
            str(file.relative_to(path))
            for file in path.rglob("*")
            if file.is_file() and not file.is_symlink()
        )
    if not path.exists():
        raise SourceError(f"{uri}: is not there", permanent=True)
    return []


def _s3_paths(uri: str) -> Iterator[str]:
    bucket, prefix = s3_place(uri)
    prefix = prefix.rstrip("/") + "/"
    try:
        for page in (
            s3_client.source_client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        ):
            for row in page.get("Contents", []):
                yield row["Key"].removeprefix(prefix)
    except (BotoCoreError, ClientError) as error:
        raise s3_error(uri, error) from error


def child(uri: str, path: str) -> str:
    """Return the URI of `path` below `uri`; an empty path is the URI itself.

    Raises:
        SourceError: the path leaves the directory.
    """
    if not path:
        return uri
    if path.startswith("/") or ".." in path.split("/") or "\0" in path:
        raise SourceError(f"{path!r}: a checkpoint's file must lie inside it", permanent=True)
    return f"{uri.rstrip('/')}/{path}"
