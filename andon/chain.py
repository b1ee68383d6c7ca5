"""A chain of custody: rows that each hold the digest of the one before.

Only the standard library, because the offline verifier runs this too. A row's digest covers its
fields in a fixed order, each with its length in front, so that no byte can move from one field to
the next; ids that a database gives are not part of it.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

SCHEMA = "andon.custody/1"
# In the order in which they are hashed; a row holds exactly these, `data` as an object, and `digest`.
FIELDS = ("dossier", "seq", "at", "who", "what", "item", "object_sha256", "data", "previous")
_WHOLE_LIMIT = 2**53  # beyond it JSON readers disagree about an integer


def canonical(value: object) -> bytes:
    """Return the one JSON form of `value`: sorted keys, no blanks, UTF-8.

    Equal to RFC 8785 for what is allowed here: null, booleans, whole numbers within 2^53, strings
    without lone surrogates, lists, and objects whose keys are ASCII.

    Raises:
        ValueError: something else is inside.
    """
    _check(value, "value")
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8")


def _check(value: object, where: str) -> None:
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, int):
        if abs(value) >= _WHOLE_LIMIT:
            raise ValueError(f"{where}: {value} is beyond 2^53")
    elif isinstance(value, str):
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise ValueError(f"{where}: holds a lone surrogate")
    elif isinstance(value, list | tuple):
        for index, one in enumerate(value):
            _check(one, f"{where}[{index}]")
    elif isinstance(value, Mapping):
        for key, one in value.items():
            if not isinstance(key, str) or not key.isascii():
                raise ValueError(f"{where}: key {key!r} is not ASCII text")
            _check(one, f"{where}.{key}")
    else:
        raise ValueError(f"{where}: {type(value).__name__} has no canonical form here")


def parse_canonical(raw: bytes, where: str) -> Any:
    """Read JSON that must be in its canonical form, byte for byte.

    Raises:
        ValueError: not JSON, or spelled in another way.
    """
    try:
        value = json.loads(raw.decode("utf-8"))
        same = canonical(value) == raw
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: is not canonical JSON ({error})") from error
    if not same:
        raise ValueError(f"{where}: is not in its canonical form")
    return value


def file_table_digest(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the SHA-256 that names a set of files: over their paths, sizes and digests, sorted by path."""
    table = sorted(
        (
            {"path": str(row["path"]), "bytes": int(row["bytes"]), "sha256": str(row["sha256"])}
            for row in rows
        ),
        key=lambda row: str(row["path"]),
    )
    return hashlib.sha256(canonical(table)).hexdigest()


def row_digest(row: Mapping[str, Any]) -> str:
    """Return the digest of a row's fields (its own `digest` is not read).

    Raises:
        ValueError: `data` holds something without a canonical form.
        KeyError: a field is missing.
    """
    running = hashlib.sha256()
    for part in (SCHEMA.encode(), *(_encoded(row[field]) for field in FIELDS)):
        running.update(b"%d:" % len(part))
        running.update(part)
    return running.hexdigest()


def _encoded(value: object) -> bytes:
    return value.encode("utf-8") if isinstance(value, str) else canonical(value)


def verify_rows(rows: Sequence[Mapping[str, Any]], dossier: str | None = None) -> list[str]:
    """Check a whole chain in order; return what is wrong, an empty list when nothing is.

    Args:
        rows: each with `FIELDS` and `digest`, in the order of their `seq`.
        dossier: the dossier they must all belong to; None: the first row's.
    """
    wrong: list[str] = []
    previous = ""
    for number, row in enumerate(rows, start=1):
        where = f"custody row {number}"
        if set(row) != {*FIELDS, "digest"}:
            wrong.append(f"{where}: has not exactly the fields of a row")
            return wrong
        dossier = row["dossier"] if dossier is None else dossier
        if row["seq"] != number:
            wrong.append(f"{where}: its number is {row['seq']}, a row is missing or moved")
        if row["dossier"] != dossier:
            wrong.append(f"{where}: belongs to another dossier")
        if row["previous"] != previous:
            wrong.append(f"{where}: does not name the row before it")
        try:
            digest = row_digest(row)
        except (ValueError, KeyError, AttributeError) as error:
            wrong.append(f"{where}: {error}")
            return wrong
        if digest != row["digest"]:
            wrong.append(f"{where}: its content does not fit its digest")
        previous = str(row["digest"])
    return wrong
