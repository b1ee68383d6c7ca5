"""URIs of evidence in one spelling, so that a hold covers an object however it is named.

Everything here errs on the side of matching too much: a deletion that is wrongly refused costs
space, one that is wrongly allowed costs the evidence.
"""

import os
import re
from pathlib import Path
from urllib.parse import unquote

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.\-]*):")
_SAME_SCHEME = {"s3a": "s3", "s3n": "s3"}
MAX_LENGTH = 4096


class UnusableUri(ValueError):
    """The text names no object that could be matched: relative, empty, or not valid text."""


def normalise(uri: str) -> str:
    """Return `scheme://host/path` in one spelling; a bare absolute path is `file:///path`.

    Scheme and host are lower case, `%xx` is decoded, `//`, `/./`, `/../` and a trailing slash are
    resolved, and a query (`?versionId=…`) or fragment is dropped: a hold protects every version.
    Normalising twice changes nothing.

    Raises:
        UnusableUri: relative, empty, too long, or with a NUL or a lone surrogate.
    """
    if not uri or len(uri) > MAX_LENGTH:
        raise UnusableUri(f"must be 1 to {MAX_LENGTH} characters")
    text = _decoded(uri)
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise UnusableUri("holds a character that no path can hold")
    text = re.split(r"[?#]", text, maxsplit=1)[0]
    if text.startswith("/"):
        return f"file://{_resolved(text)}"
    found = _SCHEME.match(text)
    if found is None:
        raise UnusableUri("must be absolute: scheme://host/path or /path")
    scheme = _SAME_SCHEME.get(found[1].lower(), found[1].lower())
    rest = text[found.end() :]
    host, path = "", rest
    if rest.startswith("//"):
        host, slash, path = rest[2:].partition("/")
        path = slash + path
    if scheme == "file" and host.lower() == "localhost":
        host = ""
    if path and not path.startswith("/"):
        raise UnusableUri("must be absolute: scheme://host/path or /path")
    if not host and not path:
        raise UnusableUri("names nothing")
    # A trailing slash goes also where it is the whole path: s3://bucket/ is the bucket.
    return f"{scheme}://{host.lower()}{_resolved(path)}"


def _decoded(text: str) -> str:
    # Until nothing changes: otherwise %252e%252e would hide a `..` from the second reader.
    for _ in range(MAX_LENGTH):
        decoded = unquote(text, errors="surrogateescape")
        if decoded == text:
            return text
        text = decoded
    raise UnusableUri("is encoded too many times")


def _resolved(path: str) -> str:
    parts: list[str] = []
    for part in path.split("/"):
        if part == "..":
            if parts:
                parts.pop()
        elif part not in {"", "."}:
            parts.append(part)
    return "".join(f"/{part}" for part in parts)


def covers(held: str, asked: str) -> bool:
    """Return whether two normalised URIs touch: equal, or one lies below the other at a path boundary.

    Deleting a directory takes what is held inside it, and deleting a file takes part of a held
    directory; `step-100` and `step-1000` do not touch.
    """
    return held == asked or _below(asked, held) or _below(held, asked)


def _below(inner: str, outer: str) -> bool:
    return inner.startswith(f"{outer}/")


def ancestors(uri: str) -> list[str]:
    """Return the normalised URI itself and everything above it, down to `scheme://host`."""
    scheme, _, rest = uri.partition("://")
    parts = rest.split("/")
    return [f"{scheme}://{'/'.join(parts[:count])}" for count in range(len(parts), 0, -1)]


def spellings(uri: str) -> list[str]:
    """Return the URI normalised and, where it names something on this machine, what it really is.

    A symbolic link (`latest`) names the same bytes as the directory it points to.

    Raises:
        UnusableUri: as `normalise`.
    """
    plain = normalise(uri)
    if not plain.startswith("file:///"):
        return [plain]
    real = normalise(os.path.realpath(plain.removeprefix("file://")))
    return [plain] if real == plain else [plain, real]


def local_path(uri: str) -> Path:
    """Return the path of a `file://` URI, as written (only `%xx` decoded).

    Raises:
        UnusableUri: not a file on this machine.
    """
    if uri.startswith("/"):
        return Path(uri)
    if not uri.lower().startswith("file:"):
        raise UnusableUri(f"{uri}: is no file:// URI")
    rest = uri[len("file:") :]
    if rest.startswith("//"):
        host, slash, path = rest[2:].partition("/")
        if host.lower() not in {"", "localhost"}:
            raise UnusableUri(f"{uri}: is on another machine ({host})")
        rest = slash + path
    if not rest.startswith("/"):
        raise UnusableUri(f"{uri}: must be absolute")
    return Path(unquote(rest))


def s3_place(uri: str) -> tuple[str, str]:
    """Return bucket and key (or prefix) of an `s3://` URI.

    Raises:
        UnusableUri: not an S3 URI, or without a bucket.
    """
    scheme, _, rest = uri.partition("://")
    bucket, _, key = rest.partition("/")
    if _SAME_SCHEME.get(scheme.lower(), scheme.lower()) != "s3" or not bucket:
        raise UnusableUri(f"{uri}: is no s3://bucket/key URI")
    return bucket, key
