"""Is Andon itself healthy, and the search of the frame."""

from dataclasses import dataclass
from typing import Any

from celery import current_app
from django.conf import settings
from django.contrib.auth.decorators import login_required
from django.db import connection
from django.db.models import Count, Min, QuerySet
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.views.decorators.http import require_GET

from evidence.models import Dossier, StoredObject
from evidence.pages import overview
from evidence.proof import fixity, lost_locks
from evidence.queries import visible_dossiers
from evidence.vault import vault
from incidents import health, queries
from incidents.paging import health as paging_health
from runs import formatting, live
from runs.access import visible_runs
from runs.models import GridWaiting, NodeStay, Pending, Run, RunProgress, UnreadBody, Work
from runs.views import person_of

FOUND = 20
MAX_SKEW_S = 2.0
NAMED = 20  # dossiers and objects that lost a lock; the rest is counted


@dataclass(frozen=True, slots=True)
class Part:
    """One part of Andon: `word` is done | running | missing | unknown, as the glyphs are named."""

    name: str
    glyph: str
    says: str
    number: str = ""


@require_GET
@login_required
def system(request: HttpRequest) -> HttpResponse:
    """Show every part of Andon with its own line; a part that can not be asked is unknown, never ok."""
    context = _context(request)
    fragment = live.render(request, "incidents/_system.html", context)
    return render(request, "incidents/system.html", {**context, "parts_fragment": fragment})


@require_GET
@login_required
def probe_json(request: HttpRequest) -> HttpResponse:
    """Answer what the store enforces as JSON: the newest probe row by row, and whether it still counts.

    Beside it what the sweeps found since: damaged objects, and such as lost their lock; only those of the
    person's own projects by name.
    """
    store, seen = overview.store(), fixity.health()
    lost = lost_locks.summary()
    mine = visible_dossiers(person_of(request))
    document = {
        "store": store.name,
        "says": store.says,
        "known": store.known,
        "probed_at": store.probe.probed_at.isoformat() if store.probe else None,
        "result": store.probe.result if store.probe else None,
        "fixity": {
            "objects": seen.objects,
            "unchecked": seen.unchecked,
            "mismatches": seen.mismatches,
            "swept_at": seen.swept_at.isoformat() if seen.swept_at else None,
        },
        "lost_locks": {
            "objects": lost.objects,
            "dossiers": lost.dossiers,
            "since": lost.since.isoformat() if lost.since else None,
            "what_to_do": lost_locks.WHAT_TO_DO if lost.objects else "",
            "first": [_lost(one) for one in lost_locks.found_in(mine)[:NAMED]],
        },
    }
    return JsonResponse(document)


def _lost(one: StoredObject) -> dict[str, object]:
    return {
        "dossier": str(one.item.dossier_id),
        "item": one.item.name,
        "path": one.path,
        "key": one.key,
        "version_id": one.version_id,
        "since": one.lock_lost_at.isoformat() if one.lock_lost_at else None,
        "now": str(one.protected_by.get("says", "")),
    }


@require_GET
@login_required
def system_parts(request: HttpRequest) -> HttpResponse:
    """Answer the poll of the parts."""
    return live.answer(request, "incidents/_system.html", _context(request))


def _context(request: HttpRequest) -> dict[str, object]:
    runs = visible_runs(person_of(request))
    unwatched = RunProgress.objects.filter(run__in=runs, not_watched_since__isnull=False).select_related(
        "run"
    )
    store = overview.store()
    vault_parts = [_vault(), _fixity(), _locks(store, visible_dossiers(person_of(request)))]
    return {
        "parts": [
            *(_web(), _database(), _clock(), _broker(), _worker(), _queue(), _detection(), _drawing()),
            *(*vault_parts, _bodies(runs), _watched(unwatched.count())),
            *paging_health.lines(person_of(request)),
        ],
        "unwatched": unwatched,
        "failed": Work.objects.filter(state=Work.State.FAILED).order_by("-id")[:FOUND],
        "store": store,
        "version": settings.VERSION,
    }


def _web() -> Part:
    return Part("Web", "done", "answers: this page is from it")


def _database() -> Part:
    with connection.cursor() as cursor:
        cursor.execute("SHOW server_version")
        version = cursor.fetchone()[0]
    return Part("PostgreSQL", "done", "answers", formatting.inert(version, 24))


def _clock() -> Part:
    """Times of posts are judged by this process's clock and kept by the database's: they must agree."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT clock_timestamp()")
        skew_s = (cursor.fetchone()[0] - timezone.now()).total_seconds()
    # No number while they agree: it is another one each time, and the part would never be unchanged.
    if abs(skew_s) <= MAX_SKEW_S:
        return Part("Clocks", "done", "web and database agree")
    return Part("Clocks", "missing", "web and database differ: set both by NTP", f"{skew_s:+.1f} s")


def _broker() -> Part:
    try:
        with current_app.connection_for_write(connect_timeout=0.3) as link:
            link.ensure_connection(max_retries=1, timeout=1)
    except Exception:
        return Part("Broker", "missing", "does not answer; nothing is lost, the sweep takes the work")
    return Part("Broker", "done", "answers")


def _worker() -> Part:
    newest = Work.objects.filter(finished_at__isnull=False).order_by("-finished_at").first()
    now = timezone.now()
    due = health.oldest_due(now)
    if due is not None and now - due > health.NOBODY_WORKS_AFTER:
        return Part(
            "Worker", "missing", f"no worker took work for {formatting.duration((now - due).total_seconds())}"
        )
    if newest is None or newest.finished_at is None:
        return Part("Worker", "unknown", "unknown: no work was done yet")
    return Part("Worker", "done", f"finished work {formatting.ago(newest.finished_at, now)}", "")


def _queue() -> Part:
    waiting = Work.objects.filter(state__in=[Work.State.DUE, Work.State.CLAIMED]).count()
    now = timezone.now()
    oldest = health.oldest_due(now)
    late = oldest is not None and now - oldest > health.NOBODY_WORKS_AFTER
    says = f"oldest due {formatting.ago(oldest, now)}" if oldest is not None else "nothing is due"
    return Part("Queue", "missing" if late else "done", says, f"{waiting:,} waiting")


def _detection() -> Part:
    """What was posted and no detector has looked at yet."""
    waiting = Pending.objects.aggregate(number=Count("pk"), oldest=Min("received_at"))
    return _waits("Detection", waiting, "every post was looked at", "not looked at yet")


def _drawing() -> Part:
    """What was looked at and is not in the blocks of grid and curves yet; pages draw it over them."""
    waiting = GridWaiting.objects.aggregate(number=Count("pk"), oldest=Min("received_at"))
    return _waits("Grid and curves", waiting, "all is taken in", "to be taken in")


def _waits(name: str, waiting: dict[str, Any], none: str, some: str) -> Part:
    if not waiting["number"]:
        return Part(name, "done", none)
    now = timezone.now()
    late = now - waiting["oldest"] > health.NOBODY_WORKS_AFTER
    says = f"oldest received {formatting.ago(waiting['oldest'], now)}"
    return Part(name, "missing" if late else "done", says, f"{waiting['number']:,} {some}")


def _watched(number: int) -> Part:
    if not number:
        return Part("Runs not watched", "done", "none: detection looks at every run")
    return Part(
        "Runs not watched", "missing", "data is stored, nothing looks at it; named below", f"{number:,}"
    )


def _vault() -> Part:
    try:
        store = vault()
        store.check()
    except Exception as error:
        return Part("Vault", "missing", f"does not answer: {formatting.inert(error, 160)}")
    return Part("Vault", "done", "answers and can be written", formatting.inert(store.name, 60))


def _fixity() -> Part:
    known = fixity.health()
    if known.mismatches:
        return Part("Fixity", "missing", f"mismatch in {formatting.plural(known.mismatches, 'object')}")
    if not known.objects:
        return Part("Fixity", "done", "nothing is stored yet")
    number = f"{known.objects - known.unchecked:,} of {known.objects:,} read back"
    if known.swept_at is None:
        return Part("Fixity", "unknown", "no nightly sweep has ended yet", number)
    return Part("Fixity", "done", f"swept {formatting.ago(known.swept_at, timezone.now())}", number)


def _locks(store: overview.Store, mine: QuerySet[Dossier]) -> Part:
    lost = lost_locks.summary()
    if lost.since is not None:
        where = lost_locks.found_in(mine).values_list("item__dossier", flat=True)
        named = ", ".join(str(one) for one in where.order_by("item__dossier").distinct()[:NAMED])
        says = f"lost since {formatting.clock(lost.since, timezone.now())} UTC"
        says += f", dossier {named}" if named else ""
        return Part("Locks", "missing", f"{says}. {lost_locks.WHAT_TO_DO}", _objects(lost.objects))
    held = lost_locks.said_to_be_locked()
    if store.known and not store.locks and held:
        return Part("Locks", "missing", f"{store.says}: copy what matters to another", _objects(held))
    if not store.known or not store.locks:
        return Part("Locks", "unknown", store.says)
    return Part("Locks", "done", "none was lost", _objects(held))


def _objects(number: int) -> str:
    return formatting.plural(number, "object")


def _bodies(runs: QuerySet[Run]) -> Part:
    number = UnreadBody.objects.filter(run__in=runs).count()
    if not number:
        return Part("Bodies that could not be read", "done", "none")
    return Part(
        "Bodies that could not be read", "running", "kept raw, shown on their run's page", f"{number:,}"
    )


@require_GET
@login_required
def search(request: HttpRequest) -> HttpResponse:
    """Find runs, incidents, nodes and digests; an exact id opens at once."""
    person, text = person_of(request), request.GET.get("q", "").strip()[:200]
    runs, incidents = visible_runs(person), queries.visible_incidents(person)
    if text.isdecimal() and len(text) < 18 and incidents.filter(pk=int(text)).exists():
        return redirect("incident", int(text))
    if runs.filter(slug=text).exists():
        return redirect("run", text)
    objects = StoredObject.objects.none()
    if len(text) >= 6:
        objects = StoredObject.objects.filter(
            item__dossier__in=visible_dossiers(person), sha256__startswith=text.lower()
        ).select_related("item")
    stays = NodeStay.objects.filter(run__in=runs)
    if text and stays.filter(node=text).exists():
        return redirect("node", text)
    found: dict[str, object] = {
        "q": text,
        "nodes": stays.filter(node__icontains=text)
        .order_by("node")
        .values_list("node", flat=True)
        .distinct()[:FOUND]
        if text
        else [],
        "runs": runs.filter(slug__icontains=text).order_by("slug")[:FOUND] if text else Run.objects.none(),
        "incidents": incidents.filter(title__icontains=text).order_by("-opened_at")[:FOUND] if text else [],
        "objects": objects[:FOUND],
    }
    return render(request, "incidents/search.html", found)
