"""The exact bytes of an evidence bag's own files (BagIt 1.0, RFC 8493). Standard library only.

A bag holds, beside BagIt's files: `andon/statement.json` (a signed list of every other file),
`andon/keys.json`, `andon/custody.ndjson`, `andon/seals/NNNN.json`, and what other parts added. There
is one spelling of everything, so a reader can render each file again and compare bytes.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

BAGIT = b"BagIt-Version: 1.0\nTag-File-Character-Encoding: UTF-8\n"
MANIFEST = "manifest-sha256.txt"
TAG_MANIFEST = "tagmanifest-sha256.txt"
FETCH = "fetch.txt"
INFO = "bag-info.txt"
STATEMENT = "andon/statement.json"
KEYS = "andon/keys.json"
CUSTODY = "andon/custody.ndjson"
SEALS = "andon/seals/"
PAYLOAD = "data/"
# Not named by the statement: the one cannot hold its own digest, the other holds the statement's.
UNNAMED = frozenset({STATEMENT, TAG_MANIFEST})

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
BAG_PREDICATE = "urn:andon:evidence-bag:1"
SEAL_PREDICATE = "urn:andon:evidence-seal:1"
BAG_SCHEMA = "andon.bag/1"
KEYS_SCHEMA = "andon.bag-keys/1"

INFO_LABELS = (
    "Bag-Software-Agent",
    "Bagging-Date",
    "External-Identifier",
    "Bag-Group-Identifier",
    "Payload-Oxum",
)
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Fetch:
    """A payload file that lies elsewhere: `url` names one version of one object."""

    url: str
    bytes_total: int
    sha256: str


def check_name(name: str) -> str:
    """Return a file's name in the bag, if it is a safe relative path.

    Raises:
        ValueError: absolute, with `..`, `.`, `//`, a leading `~`, a backslash, a NUL or a lone surrogate.
    """
    parts = name.split("/")
    if not name or name.startswith(("/", "~")) or any(part in {"", ".", ".."} for part in parts):
        raise ValueError(f"{name!r} is no safe path in a bag")
    if "\0" in name or "\\" in name or any("\ud800" <= character <= "\udfff" for character in name):
        raise ValueError(f"{name!r} holds a character that a bag's path may not hold")
    return name


def encode_path(name: str) -> str:
    """Return a path as manifests write it: CR, LF and % are percent-encoded, nothing else."""
    return name.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def decode_path(text: str) -> str:
    """Return the path behind `encode_path`'s spelling.

    Raises:
        ValueError: another spelling.
    """
    name = text.replace("%0A", "\n").replace("%0D", "\r").replace("%25", "%")
    if encode_path(name) != text:
        raise ValueError(f"{text!r} is not spelled as Andon spells paths")
    return check_name(name)


def render_manifest(digests: Mapping[str, str]) -> bytes:
    """Return a manifest: `digest, two spaces, path` sorted by path, each line ended."""
    lines = [f"{digests[name]}  {encode_path(name)}\n" for name in sorted(digests)]
    return "".join(lines).encode("utf-8")


def read_manifest(raw: bytes, where: str) -> dict[str, str]:
    """Read a manifest in exactly the form of `render_manifest`: path → SHA-256.

    Raises:
        ValueError: anything differs from that form.
    """
    digests: dict[str, str] = {}
    for line in _lines(raw, where):
        digest, separator, path = line[:64], line[64:66], line[66:]
        if not _SHA256.fullmatch(digest) or separator != "  ":
            raise ValueError(f"{where}: a line is not 'SHA-256, two spaces, path'")
        digests[decode_path(path)] = digest
    if render_manifest(digests) != raw:
        raise ValueError(f"{where}: is not sorted, or names a file twice")
    return digests


def render_fetch(entries: Mapping[str, Fetch]) -> bytes:
    """Return fetch.txt: `url length path` sorted by path."""
    lines = [
        f"{entries[name].url} {entries[name].bytes_total} {encode_path(name)}\n" for name in sorted(entries)
    ]
    return "".join(lines).encode("utf-8")


def read_fetch(raw: bytes, digests: Mapping[str, str]) -> dict[str, Fetch]:
    """Read fetch.txt; the digests come from the payload manifest.

    Raises:
        ValueError: another form, or a path that the manifest does not list.
    """
    entries: dict[str, Fetch] = {}
    for line in _lines(raw, FETCH):
        words = line.split(" ", 2)
        if len(words) != 3 or "://" not in words[0] or not words[1].isascii() or not words[1].isdigit():
            raise ValueError(f"{FETCH}: a line is not 'URL length path'")
        name = decode_path(words[2])
        if name not in digests:
            raise ValueError(f"{FETCH}: {name} is not in the manifest")
        entries[name] = Fetch(words[0], int(words[1]), digests[name])
    if render_fetch(entries) != raw:
        raise ValueError(f"{FETCH}: is not spelled as Andon spells it")
    return entries


def render_info(values: Mapping[str, str]) -> bytes:
    """Return bag-info.txt, the labels in their fixed order.

    Raises:
        ValueError: a value holds a line break, or a label is missing.
    """
    if set(values) != set(INFO_LABELS) or any(re.search(r"[\r\n]", value) for value in values.values()):
        raise ValueError(f"{INFO}: needs exactly {', '.join(INFO_LABELS)}, each on one line")
    return "".join(f"{label}: {values[label]}\n" for label in INFO_LABELS).encode("utf-8")


def read_info(raw: bytes) -> dict[str, str]:
    """Read bag-info.txt in exactly the form of `render_info`.

    Raises:
        ValueError: another form.
    """
    values: dict[str, str] = {}
    for line in _lines(raw, INFO):
        label, separator, value = line.partition(": ")
        if not separator:
            raise ValueError(f"{INFO}: a line is not 'Label: value'")
        values[label] = value
    if render_info(values) != raw:
        raise ValueError(f"{INFO}: is not spelled as Andon spells it")
    return values


def oxum(sizes: Iterable[int]) -> str:
    """Return Payload-Oxum: octets and number of payload files."""
    known = list(sizes)
    return f"{sum(known)}.{len(known)}"


def _lines(raw: bytes, where: str) -> list[str]:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: is not UTF-8") from error
    if text and not text.endswith("\n"):
        raise ValueError(f"{where}: the last line has no end")
    return text.split("\n")[:-1]
