"""Legal holds on the versions that a commit manifest names.

The hold comes first and everything else after it: where the objects lie is one listing, not a question
for each, and digests and read-backs follow once every version is held.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from andon.held_tree import HASH_AT_ONCE_BYTES
from evidence import sources
from evidence.hashing import digest_of
from evidence.holding import held_before
from evidence.sources import S3Source, child, s3_error
from evidence.stores import s3_client
from evidence.stores.s3_legal_hold import AT_ONCE, LegalHolds
from evidence.stores.s3_lock import UNSUPPORTED, Locks, error_code
from evidence.uris import s3_place

# Fewer files than this are asked for one by one; more are looked up in a listing of their prefix, unless
# so much else lies there that the listing would be longer than the questions.
FEW = 8
PAGES_PER_THOUSAND = 4
# How many holds are read back: enough to find out a store that takes holds and does not keep them. The
# nightly sweep looks at every one.
READ_BACK = 16
# Small files without a save-time digest (the manifest itself) are read at once, as on a file system.
HASHED_AT_ONCE = 64
_MAY_NOT = {"AccessDenied", "Forbidden", "403"} | UNSUPPORTED


class _NoHolds(Exception):
    """The bucket takes no legal holds from us; the text says why."""


def hold_versions(
    uri: str,
    files: Sequence[dict[str, Any]],
    known: dict[str, Any] | None = None,
    keep: Callable[[dict[str, Any]], dict[str, Any]] = lambda seen: seen,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Put a legal hold on every file's version; returns the file table and what protects it (see `Held`).

    A file without a version in the manifest is the newest version of the committed size: rotation may
    have put a delete marker over it meanwhile, its bytes are still there.

    Args:
        known: which versions had a hold before ours, as an earlier try noted it.
        keep: writes down what `held_before` saw, before the first hold is put on, and returns what
            counts.

    Raises:
        SourceError: a version is gone or has another size (permanent), or the store does not answer.
    """
    bucket, _ = s3_place(uri)
    client = s3_client.source_client()
    locks = Locks(client, bucket, f"s3://{bucket}")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            found = _look(client, bucket, uri, files, pool)

            def before(holds: LegalHolds) -> dict[str, Any]:
                paths = [str(entry["path"]) for entry in files]
                return known or keep(held_before.look(holds, uri, paths, found, pool))

            by = _hold(locks, found, pool, before)
            digests = dict(pool.map(_small_digest, _without_digest(found, files)))
        except (BotoCoreError, ClientError) as error:
            raise s3_error(uri, error) from error
    table = [
        {
            "path": entry["path"],
            "bytes": source.bytes_total,
            "sha256": str(entry.get("sha256") or "") or digests.get(source.key, ""),
            "version_id": source.version_id,
        }
        for entry, source in zip(files, found, strict=True)
    ]
    return table, by


# --- holding


def _hold(
    locks: Locks,
    found: list[S3Source],
    pool: ThreadPoolExecutor,
    before: Callable[[LegalHolds], dict[str, Any]],
) -> dict[str, Any]:
    holds = LegalHolds(locks)

    def one(source: S3Source) -> None:
        try:
            holds.hold(source.key, source.version_id)
        except ClientError as error:
            if error_code(error) in _MAY_NOT:
                raise _NoHolds(f"no legal hold could be put on it ({error_code(error)})") from error
            raise s3_error(f"s3://{source.bucket}/{source.key}", error) from error

    try:
        if locks.are_off:
            raise _NoHolds("the bucket it lies in has no Object Lock")
        if not all(source.version_id for source in found):
            raise _NoHolds("some of its objects have no version")
        noted = before(holds)
        list(pool.map(one, found))
        by = _read_back(locks, found, pool)
        return by | {"says": by["says"] + held_before.says(noted), "held_before": noted}
    except _NoHolds as why:
        return {"how": "none", "says": f"not safe until copied: {why}"}
    finally:
        holds.close()


def _read_back(locks: Locks, found: list[S3Source], pool: ThreadPoolExecutor) -> dict[str, Any]:
    some = found[:: max(1, len(found) // READ_BACK)]
    seen = list(pool.map(lambda source: locks.read(source.key, source.version_id)["legal_hold"], some))
    if any(hold is False for hold in seen):
        raise _NoHolds("the store takes legal holds and does not keep them")
    says = "held by a legal hold on each version"
    if None in seen:
        says += "; this server may not read it back"
    return {"how": "legal_hold", "says": says, "read_back": sum(hold is True for hold in seen)}


# --- finding the versions


def _look(
    client: Any, bucket: str, uri: str, files: Sequence[dict[str, Any]], pool: ThreadPoolExecutor
) -> list[S3Source]:
    """Return each file's version, in the order of `files`."""
    places = [child(uri, str(entry["path"])) for entry in files]
    keys = [s3_place(place)[1] for place in places]
    listed = _list_versions(client, bucket, keys) if len(keys) >= FEW else None
    if listed is None:
        return list(pool.map(_ask, places, files))
    picked = [
        _pick(client, bucket, key, listed.get(key, []), entry) for key, entry in zip(keys, files, strict=True)
    ]
    # What a listing does not show as committed is asked for by name before anybody calls it lost.
    return [source or _ask(place, entry) for source, place, entry in zip(picked, places, files, strict=True)]


def _ask(place: str, entry: dict[str, Any]) -> S3Source:
    source = sources.open_uri(
        place, version_id=str(entry.get("version_id") or ""), expected_bytes=entry.get("bytes")
    )
    assert isinstance(source, S3Source)
    return source


def _list_versions(client: Any, bucket: str, keys: list[str]) -> dict[str, list[dict[str, Any]]] | None:
    """Return the versions of these keys; None when we may not list, or too much else lies there."""
    rows: dict[str, list[dict[str, Any]]] = {key: [] for key in keys}
    left = PAGES_PER_THOUSAND * (1 + len(keys) // 1000)
    pages = client.get_paginator("list_object_versions").paginate(
        Bucket=bucket,
        Prefix=os.path.commonprefix(keys),  # noqa: RUF071  (of characters, as S3 means it)
    )
    try:
        for page in pages:
            if left == 0:
                return None
            left -= 1
            for row in page.get("Versions", []):
                if row["Key"] in rows:
                    rows[row["Key"]].append(row)
    except ClientError as error:
        if error_code(error) in _MAY_NOT:
            return None
        raise
    return rows


def _pick(
    client: Any, bucket: str, key: str, rows: list[dict[str, Any]], entry: dict[str, Any]
) -> S3Source | None:
    wanted, size = str(entry.get("version_id") or ""), entry.get("bytes")
    if wanted:
        rows = [row for row in rows if row["VersionId"] == wanted]
    right = [row for row in rows if size is None or row["Size"] == size]
    if not right:
        return None
    row = max(right, key=lambda row: (row["LastModified"], row["IsLatest"]))
    version_id = "" if row["VersionId"] == "null" else str(row["VersionId"])
    return S3Source(client, bucket, key, version_id, int(row["Size"]), str(row.get("ETag", "")))


# --- digests


def _without_digest(found: list[S3Source], files: Sequence[dict[str, Any]]) -> list[S3Source]:
    small = [
        source
        for source, entry in zip(found, files, strict=True)
        if not entry.get("sha256") and source.bytes_total <= HASH_AT_ONCE_BYTES
    ]
    return small if len(small) <= HASHED_AT_ONCE else []


def _small_digest(source: S3Source) -> tuple[str, str]:
    return source.key, digest_of(source).sha256
