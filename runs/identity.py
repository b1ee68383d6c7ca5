"""Which run signed a request: secrets cached for seconds, checked before anything else is read."""

import logging
import threading
import time
from dataclasses import dataclass, field

from django.db import transaction
from django.db.models import Q
from django.db.models.signals import post_save
from django.http import HttpRequest
from django.utils import timezone

from andon.policy import Policy
from andon.signing import SignatureError, verify_get, verify_webhook
from runs.models import PolicyVersion, Run, RunSecret
from runs.policies import policy_for
from runs.problems import Problem

log = logging.getLogger(__name__)

CACHE_S = 5.0  # how long a withdrawn secret may still be taken
RELOAD_S = 1.0  # a wrong signature asks the database again at most this often per run
USE_NOTED_EVERY_S = 60.0
CACHED_RUNS = 10_000


@dataclass(slots=True)
class KnownRun:
    """What the receiver knows of a run without asking the database at every post."""

    run_id: int
    slug: str
    secrets: list[str]
    policy: Policy
    loaded_at: float = field(default_factory=time.monotonic)


_known: dict[str, KnownRun] = {}
_used: dict[int, float] = {}
_lock = threading.Lock()


def known_run(slug: str, *, max_age_s: float = CACHE_S) -> KnownRun:
    """Return a run's secrets and limits.

    Raises:
        Problem: 404, there is no such run.
    """
    cached = _known.get(slug)
    if cached is not None and time.monotonic() - cached.loaded_at < max_age_s:
        return cached
    run = Run.objects.filter(slug=slug).first() if "\0" not in slug else None
    if run is None:
        _known.pop(slug, None)
        raise Problem(
            404, "unknown-run", f"There is no run {slug!r}: create it with create_run.", field="run"
        )
    secrets = RunSecret.objects.filter(
        Q(expires_at__isnull=True) | Q(expires_at__gt=timezone.now()), run=run
    ).order_by("-created_at")
    try:
        policy = policy_for(run.pk)
    except ValueError:
        # A policy that cannot be read must neither shut the door on data nor leave the run unwatched.
        log.exception("run %s: its policy cannot be read, the defaults are in force", slug)
        policy = Policy()
    known = KnownRun(
        run.pk,
        slug,
        list(secrets.values_list("secret", flat=True)),
        policy,
    )
    with _lock:
        if len(_known) >= CACHED_RUNS:
            _known.clear()
        _known[slug] = known
    return known


def forget() -> None:
    """Empty the cache of this process (after a rotation, and between tests)."""
    _known.clear()
    _used.clear()


def verified_run(request: HttpRequest, slug: str, body: bytes | None) -> KnownRun:
    """Return the run whose secret signed the request.

    Raises:
        Problem: 404 unknown run; 401 `bad-signature`; 401 `timestamp-out-of-tolerance` with
            `server_time` when only the clock is off.
    """
    known = known_run(slug)
    try:
        _verify(request, known, body)
    except SignatureError as first:
        # The secret may be newer than the cache.
        known = known_run(slug, max_age_s=RELOAD_S)
        try:
            _verify(request, known, body)
        except SignatureError as error:
            raise _refusal(error) from first
    _note_use(known)
    return known


def _verify(request: HttpRequest, known: KnownRun, body: bytes | None) -> None:
    meta = request.META
    webhook_id = meta.get("HTTP_WEBHOOK_ID")
    timestamp = meta.get("HTTP_WEBHOOK_TIMESTAMP")
    signature = meta.get("HTTP_WEBHOOK_SIGNATURE")
    if body is None:
        # As sent: the path of the request line, not what Django decoded from it.
        path = request.get_full_path()
        verify_get(known.secrets, webhook_id, timestamp, signature, request.method or "", path, time.time())
    else:
        verify_webhook(known.secrets, webhook_id, timestamp, signature, body, time.time())


def _refusal(error: SignatureError) -> Problem:
    if error.timestamp_only:
        return Problem(
            401,
            "timestamp-out-of-tolerance",
            f"{error.detail}. Sign with the server's time; leave the times of events alone.",
            field="webhook-timestamp",
            extra={"server_time": int(time.time())},
        )
    header = error.detail.partition(":")[0]
    return Problem(
        401,
        "bad-signature",
        error.detail,
        field=header if header.startswith("webhook-") else "webhook-signature",
    )


def _note_use(known: KnownRun) -> None:
    """Keep `last_used_at` of a run's secrets fresh to a minute, without a write per post."""
    now = time.monotonic()
    if now - _used.get(known.run_id, -USE_NOTED_EVERY_S) < USE_NOTED_EVERY_S:
        return
    _used[known.run_id] = now
    RunSecret.objects.filter(run_id=known.run_id, secret__in=known.secrets).filter(
        Q(expires_at__isnull=True) | Q(expires_at__gt=timezone.now())
    ).update(last_used_at=timezone.now())


def _changed(sender: object, **_: object) -> None:
    transaction.on_commit(forget, robust=True)


# A process knows at once what it wrote itself; the others within CACHE_S.
post_save.connect(_changed, sender=PolicyVersion, dispatch_uid="runs.identity.policy")
post_save.connect(_changed, sender=RunSecret, dispatch_uid="runs.identity.secret")
