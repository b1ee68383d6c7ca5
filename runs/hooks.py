"""`POST /api/v1/hooks/{source}`: what a fleet's own tools say, by a project's hook token.

The order of checks is the receiver's: size, token, rate, decode. A hook holds nothing: its reports are
kept, shown, and stand on the timeline of the run's open incident.
"""

import base64
import binascii
import logging
import secrets as random_secrets
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from django.db import transaction
from django.db.models import F, Q
from django.http import HttpRequest
from django.utils import timezone

from andon.readers import hooks as readers
from andon.wire_encoding import decompress
from andon.wire_values import WireError
from runs.access import token_sha256
from runs.bodies import read_body
from runs.formatting import inert
from runs.limits import SMALL_BYTES, buckets
from runs.models import Attempt, FleetReport, HookToken, Person, Project, Run
from runs.problems import Problem
from runs.signals import fleet_reported

log = logging.getLogger(__name__)

CAP_BYTES = 4 << 20  # as for events
MOST_RAW_BYTES = 64 << 10
PER_S, BURST = 50.0, 500  # a fleet's Alertmanager groups; this is far above what one sends
PREFIX = "andonhook_"
USE_NOTED_EVERY = timedelta(minutes=1)
FIRING = "firing"


@dataclass(frozen=True, slots=True)
class Taken:
    """What one body brought: how many reports, and how many of them said something new."""

    reports: int
    new: int


def create_token(
    *,
    project: Project,
    source: str,
    name: str,
    person: Person | None = None,
    expires_in: timedelta | None = None,
) -> tuple[HookToken, str]:
    """Make a hook token for one source; returns its row and the token, which is shown this once.

    Raises:
        ValueError: there is no such source.
    """
    if source not in readers.SOURCES:
        raise ValueError(f"source {source!r}: expected one of {', '.join(readers.SOURCES)}")
    # Letters and digits only: it may stand in an address.
    token = PREFIX + random_secrets.token_hex(24)
    row = HookToken.objects.create(
        project=project,
        source=source,
        name=name[:100],
        sha256=token_sha256(token),
        created_by=person,
        expires_at=None if expires_in is None else timezone.now() + expires_in,
    )
    return row, token


def revoke(token: HookToken) -> bool:
    """Make a token worthless at once; False when it was already."""
    return bool(HookToken.objects.filter(pk=token.pk, revoked_at=None).update(revoked_at=timezone.now()))


def receive(request: HttpRequest, source: str, in_path: str = "") -> Taken:
    """Take one body.

    Raises:
        Problem: 401, 404, 413, 429, and 400 or 422 for what cannot be read.
    """
    body = read_body(request, CAP_BYTES)
    token = _authorised(request, source, in_path)
    # Runs count upwards from 1 and tokens downwards: one limiter serves both.
    wait_s = buckets().take(-token.pk, large=len(body) > SMALL_BYTES, per_s=PER_S, burst=BURST)
    if wait_s:
        raise Problem(
            429,
            "too-many-posts",
            f"This token posts more than {PER_S:g} bodies a second: wait {wait_s} s, or group them.",
            headers={"Retry-After": str(wait_s)},
        )
    try:
        raw = decompress(body, request.META.get("HTTP_CONTENT_ENCODING"), CAP_BYTES)
        reports = readers.read(source, raw)
    except WireError as error:
        HookToken.objects.filter(pk=token.pk).update(
            refused=F("refused") + 1, refused_why=inert(error.detail, 300)
        )
        raise Problem(error.status, error.problem_type, error.detail, field=error.field or "body") from error
    return store(token, reports)


def _authorised(request: HttpRequest, source: str, in_path: str) -> HookToken:
    given = in_path or _from_header(request.META.get("HTTP_AUTHORIZATION", ""))
    now = timezone.now()
    token = (
        HookToken.objects.select_related("project")
        .filter(Q(expires_at=None) | Q(expires_at__gt=now), sha256=token_sha256(given), revoked_at=None)
        .first()
        if given
        else None
    )
    # A stranger learns nothing: an unknown source without a token is 401 as well.
    if token is None:
        raise Problem(
            401,
            "unauthorised",
            "A hook needs a live token of its project: Bearer, basic (as the password), or last in the path.",
            headers={"WWW-Authenticate": 'Bearer realm="andon", Basic realm="andon"'},
        )
    if source not in readers.SOURCES:
        raise Problem(
            404,
            "unknown-source",
            f"There is no hook for that source: {', '.join(readers.SOURCES)}.",
            field="source",
        )
    if token.source != source:
        raise Problem(
            403, "other-source", f"This token is for {token.source}, not for {source}.", field="source"
        )
    if token.last_used_at is None or token.last_used_at < now - USE_NOTED_EVERY:
        HookToken.objects.filter(pk=token.pk).update(last_used_at=now)
    return token


def _from_header(header: str) -> str:
    scheme, _, rest = header.partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip()
    if scheme.lower() != "basic":
        return ""
    try:
        pair = base64.b64decode(rest.strip(), validate=True).decode("utf-8")
    except (binascii.Error, ValueError):
        return ""
    return pair.partition(":")[2]


def store(token: HookToken, reports: list[readers.Report]) -> Taken:
    """Keep reports, and tell of those that say something new: first told, or another state.

    Told again, a report is counted: Alertmanager repeats a group whenever one of its alerts changes.
    """
    now, new = timezone.now(), 0
    told: dict[int, list[FleetReport]] = {}
    for report in sorted(
        reports, key=lambda one: one.identity
    ):  # one order: two posts at once never deadlock
        with transaction.atomic():
            row, changed = _keep(token, report, now)
        new += changed
        if changed and row.run_id is not None:
            told.setdefault(row.run_id, []).append(row)
    for rows in told.values():
        run = rows[0].run
        for _, error in fleet_reported.send_robust(sender=FleetReport, run=run, reports=rows):
            if isinstance(error, Exception):
                # The report is kept and shown whatever the apps above make of it.
                log.error("run %s: a fleet report could not be passed on", run, exc_info=error)
    return Taken(len(reports), new)


def _keep(token: HookToken, report: readers.Report, now: datetime) -> tuple[FleetReport, bool]:
    values = {
        "token": token,
        "state": report.state,
        "severity": report.severity,
        "title": report.title,
        "text": report.text,
        "node": report.node,
        "started_at": _moment(report.started_ns),
        "ended_at": _moment(report.ended_ns) or (now if report.state != FIRING else None),
        "last_at": now,
        "raw": _raw(report),
    }
    row, made = FleetReport.objects.select_for_update().get_or_create(
        project=token.project,
        source=token.source,
        identity=report.identity,
        defaults={**values, "received_at": now, "run": run_of(token.project, report.run, report.node)},
    )
    if made:
        return row, True
    changed = (row.state, row.severity) != (report.state, report.severity)
    values["started_at"] = row.started_at or values["started_at"]
    for name, value in values.items():
        setattr(row, name, value)
    row.times += 1
    row.run = row.run or run_of(token.project, report.run, report.node)
    row.save()
    return row, changed


def _raw(report: readers.Report) -> dict[str, object]:
    raw = report.raw
    return raw if len(str(raw)) <= MOST_RAW_BYTES else {"cut": f"{len(str(raw))} characters"}


def _moment(ns: int | None) -> datetime | None:
    return None if ns is None else datetime.fromtimestamp(ns / 1e9, UTC)


def run_of(project: Project, slug: str, node: str) -> Run | None:
    """Return the run a report is about: the one it names, else the newest that has the node now."""
    runs = Run.objects.filter(project=project)
    if slug and (named := runs.filter(slug=slug).first()) is not None:
        return named
    if not node:
        return None
    newest = (
        Attempt.objects.filter(run__in=runs.filter(finished_at=None), nodes__contains=[{"node": node}])
        .order_by("-launched_at")
        .select_related("run")
        .first()
    )
    if newest is None or Attempt.objects.filter(run=newest.run, number__gt=newest.number).exists():
        return None  # its run has gone on without this node
    return newest.run
