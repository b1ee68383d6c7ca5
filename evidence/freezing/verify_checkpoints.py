"""Whether a committed checkpoint may be called verified: a claim with evidence, never assumed.

Verified: every file of the commit manifest is present with its size and digest, weights and moments
are finite, and their norms lie inside the run's band. Bytes are read here where this server may read
them; that values are finite, and their norms, are the trainer's word, given when it read the files back
at the commit.
"""

from typing import Any

from botocore.exceptions import BotoCoreError
from django.db import transaction
from django.utils import timezone

from andon import chain
from evidence import sources
from evidence.hashing import digest_of
from evidence.sources import SourceError, child
from runs.locks import lock_run
from runs.models import Checkpoint, Event, Run
from runs.signals import checkpoint_changed
from runs.work import Lease, Payload, Retry, enqueue, handler

VERIFY = "evidence.verify_checkpoint"
# A run's band: the norms of its last verified checkpoints, ten times either way. Between neighbours the
# norm of the weights moves by percents and that of the moments by a few times; a flipped exponent bit or
# a part that was not restored moves them by orders of magnitude.
BAND_OF = 5
BAND_FROM = 3
BAND_FACTOR = 10.0


class _Bad(Exception):
    """The checkpoint is damaged or holds nonfinite values."""


class _Undecidable(Exception):
    """It cannot be said whether it is good; it is then never used as last good."""


def ask(checkpoint: Checkpoint) -> None:
    """Have a committed checkpoint verified, after the caller's transaction."""
    enqueue(kind=VERIFY, key=str(checkpoint.pk), payload={"checkpoint": checkpoint.pk})


@handler(VERIFY)
def verify(payload: Payload, lease: Lease) -> None:
    """Verify one checkpoint and record what was checked and what failed."""
    checkpoint = Checkpoint.objects.filter(pk=int(str(payload["checkpoint"]))).first()
    if checkpoint is None or checkpoint.state != Checkpoint.State.COMMITTED:
        return
    told = told_of(checkpoint)
    seen: dict[str, Any] = {"manifest": str(told.get("manifest") or "")}
    try:
        seen |= _finite(told)
        seen |= _norms(checkpoint, told)
        seen |= _files(checkpoint, told)
    except _Bad as reason:
        _set(checkpoint, lease, Checkpoint.State.BAD, seen | {"failed": str(reason)})
    except _Undecidable as reason:
        _set(checkpoint, lease, Checkpoint.State.COMMITTED, seen | {"cannot": str(reason)})
    except SourceError as error:
        if not error.permanent:
            raise Retry(None, error.says) from error
        _set(checkpoint, lease, Checkpoint.State.BAD, seen | {"failed": error.says})
    except BotoCoreError as error:
        raise Retry(None, f"{checkpoint.uri}: {type(error).__name__}") from error
    else:
        _set(checkpoint, lease, Checkpoint.State.VERIFIED, seen)


def told_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what the commit of a checkpoint told: the data of its event, what it says of itself on top."""
    rows = Event.objects.filter(
        run_id=checkpoint.run_id,
        attempt=checkpoint.attempt,
        type="checkpoint.committed",
        data__uri=checkpoint.uri,
    )
    event = rows.filter(step=checkpoint.step).order_by("-id").first() or rows.order_by("-id").first()
    told: dict[str, Any] = dict(event.data) if event is not None else {}
    inner = told.get("verification")
    return told | inner if isinstance(inner, dict) else told


def _finite(told: dict[str, Any]) -> dict[str, Any]:
    if told.get("quarantined") is True:
        raise _Bad("a forced save in quarantine")
    parts = [told[name] for name in ("weights_finite", "moments_finite") if name in told]
    says = told["finite"] if "finite" in told else (all(parts) if len(parts) == 2 else None)
    if says is False or False in parts:
        names = ", ".join(str(name) for name in told.get("nonfinite") or []) or "weights or moments"
        raise _Bad(f"nonfinite values in {names}")
    if says is not True:
        raise _Undecidable("the trainer did not say whether weights and moments are finite")
    return {"finite": True, "finite_by": "trainer"}


def _norms(checkpoint: Checkpoint, told: dict[str, Any]) -> dict[str, Any]:
    """Compare the norms told at the commit with those of the run's last verified checkpoints.

    Too few of these, or no norms told: no band, and nothing is claimed.
    """
    told_norms = told.get("norms")
    norms = {part: float(value) for part, value in _numbers(told_norms)}
    if not norms:
        return {}
    before = Checkpoint.objects.filter(
        run_id=checkpoint.run_id,
        state=Checkpoint.State.VERIFIED,
        step__lt=checkpoint.step,
        verification__has_key="norms",
    )
    history = list(before.order_by("-step", "-id").values_list("verification__norms", flat=True)[:BAND_OF])
    for part, value in norms.items():
        known = [float(one) for row in history for name, one in _numbers(row) if name == part]
        if len(known) < BAND_FROM:
            continue
        low, high = min(known) / BAND_FACTOR, max(known) * BAND_FACTOR
        if not low <= value <= high:
            raise _Undecidable(
                f"the norm of its {part} is {value:.4g}, outside the run's band of {low:.4g} to {high:.4g}"
            )
    return {"norms": norms, "norms_in_band": len(history) >= BAND_FROM}


def _numbers(norms: object) -> list[tuple[str, float]]:
    if not isinstance(norms, dict):
        return []
    return [
        (str(part), value)
        for part, value in norms.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]


def _files(checkpoint: Checkpoint, told: dict[str, Any]) -> dict[str, Any]:
    files = checkpoint.files or [{"path": "", "bytes": None, "sha256": checkpoint.digest}]
    if not all(isinstance(entry.get("sha256"), str) and len(entry["sha256"]) == 64 for entry in files):
        raise _Undecidable("its commit names no SHA-256 for every file")
    if checkpoint.files and checkpoint.digest and chain.file_table_digest(files) != checkpoint.digest:
        raise _Bad("its file list does not fit its digest")
    if not sources.is_readable_here(checkpoint.uri):
        if told.get("read_back") is True:
            return {"files": len(files), "digests_by": "trainer, who read the files back"}
        raise _Undecidable("this server may not read it and the trainer did not say that it read it back")
    total = 0
    for entry in files:
        where = child(checkpoint.uri, str(entry["path"]))
        size = entry.get("bytes")
        source = sources.open_uri(
            where,
            version_id=str(entry.get("version_id") or ""),
            expected_bytes=size if isinstance(size, int) else None,
        )
        if digest_of(source).sha256 != entry["sha256"].lower():
            raise _Bad(f"{where}: its SHA-256 differs from the committed one")
        total += source.bytes_total
    return {"files": len(files), "bytes": total, "digests_by": "andon, who read every byte"}


def _set(checkpoint: Checkpoint, lease: Lease, state: str, seen: dict[str, Any]) -> None:
    now = timezone.now()
    with transaction.atomic():
        # A freeze plan that is being made right now has read the old state; once it has committed, its
        # dossier is there to be told. Without this lock neither would hear of the other.
        run = lock_run(checkpoint.run_id)
        lease.guard()
        fresh = Checkpoint.objects.select_for_update(no_key=True).get(pk=checkpoint.pk)
        if fresh.state != Checkpoint.State.COMMITTED:
            return
        fresh.state, fresh.verification = state, seen | {"at": now.isoformat(timespec="seconds")}
        if state == Checkpoint.State.VERIFIED:
            fresh.verified_at = now
            if not fresh.digest and fresh.files:
                fresh.digest = chain.file_table_digest(fresh.files)
        fresh.save(update_fields=["state", "verification", "verified_at", "digest"])
        checkpoint_changed.send(sender=Run, run=run, checkpoint=fresh)
