"""Pages of the vault: what is kept, one dossier, one item, one object, one chain of custody."""

import re

from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from evidence.agents import node_trees
from evidence.kinds import CHECKPOINT_KINDS
from evidence.models import CustodyRow, Dossier, Hold, Item, Seal, StoredObject, VaultRequest
from evidence.pages import downloads, listing, overview, reading
from evidence.pages.steps import LINKS
from evidence.proof import leftovers
from evidence.proof.restored import RESTORED
from evidence.queries import visible_dossiers
from evidence.retention import two_people
from runs import live
from runs.access import project_member
from runs.keys import server_key
from runs.models import Role
from runs.views import person_of

PAGE_ROWS = 100
DOSSIERS = 50
FIRST_OBJECTS = 20  # on the dossier's page; each item's page lists its own
OPENERS = (Role.RESPONDER, Role.APPROVER, Role.ADMIN)
_SHA256 = re.compile(r"[0-9a-f]{64}")


def _cursor(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 18 else None


@require_GET
@login_required
def vault(request: HttpRequest) -> HttpResponse:
    """Show what is kept, until when, at what cost, and what the store enforces."""
    person = person_of(request)
    text, only = request.GET.get("q", "").strip()[:100], request.GET.get("only", "")
    before = _cursor(request.GET.get("before", ""))
    lines = overview.lines(person, text=text, only=only, before=before, limit=DOSSIERS + 1)
    damaged = StoredObject.objects.filter(item__dossier__in=visible_dossiers(person)).exclude(mismatch="")
    totals = overview.totals(person)
    return render(
        request,
        "evidence/vault.html",
        {
            "lines": lines[:DOSSIERS],
            "older": lines[DOSSIERS - 1].dossier.pk if len(lines) > DOSSIERS else None,
            "totals": totals,
            "store": overview.store(),
            "damaged_in": Dossier.objects.filter(items__objects__in=damaged).distinct()[:PAGE_ROWS],
            "restored": overview.last_restore() if totals.dossiers else None,
            "filters": overview.FILTERS,
            "text": text,
            "only": only,
        },
    )


def dossier_or_404(request: HttpRequest, dossier_id: int) -> Dossier:
    """Return a dossier the person may see; any other answers 404, like one that does not exist."""
    try:
        return visible_dossiers(person_of(request)).select_related("run__project").get(pk=dossier_id)
    except Dossier.DoesNotExist:
        raise Http404 from None


@require_GET
@login_required
def dossier(request: HttpRequest, dossier_id: int) -> HttpResponse:
    """Show a dossier: items, objects, cost, custody, who took what out, and how to check it offline."""
    found, person = dossier_or_404(request, dossier_id), person_of(request)
    objects = list(
        StoredObject.objects.filter(item__dossier=found)
        .select_related("item")
        .order_by("item__order", "item_id", "path")[:FIRST_OBJECTS]
    )
    reading.as_enforced(objects)
    others = reading.others_holding(objects, found, person)
    items = items_context(found)
    no_bag = downloads.why_no_bag(found, listing.chain_of(found).wrong)
    opened_by = listing.names([found.opened_by]).get(found.opened_by, "somebody")
    return render(
        request,
        "evidence/dossier.html",
        {
            "dossier": found,
            "opened_by": opened_by if found.opened_by else "Andon",
            "evidence": live.render(request, "evidence/_items.html", items),
            "steps": LINKS,
            "restored": found.custody.filter(what=RESTORED).order_by("-seq").first(),
            "keeping": reading.keeping(found),
            "objects": [(one, others.get(one.sha256, []), "") for one in objects],
            "objects_total": StoredObject.objects.filter(item__dossier=found).count(),
            "custody": reading.custody_lines(found, limit=20),
            "custody_total": CustodyRow.objects.filter(dossier=found).count(),
            "access": reading.access_lines(found),
            "holds": reading.holds_of(found),
            "trees": node_trees.trees_of(found),
            "also_kept": leftovers.also_kept(found),
            "holds_total": Hold.objects.filter(dossier=found).count(),
            "seals": Seal.objects.filter(dossier=found).order_by("-number")[:5],
            "key_id": server_key().key_id,
            "bag": downloads.bag_size(found),
            "bag_name": downloads.bag_name(found),
            "no_bag": no_bag[1] if no_bag else "",
            "may_take": project_member(person, found.run.project, *downloads.TAKERS),
            "who_takes": downloads.WHO,
            "requests": VaultRequest.objects.filter(dossier=found, state__in=two_people.LIVE),
            "may_open": project_member(person, found.run.project, *OPENERS),
        },
    )


@require_GET
@login_required
def dossier_items(request: HttpRequest, dossier_id: int) -> HttpResponse:
    """Answer the poll of a dossier's items."""
    found = dossier_or_404(request, dossier_id)
    return live.answer(request, "evidence/_items.html", items_context(found))


@require_GET
@login_required
def item(request: HttpRequest, dossier_id: int, item_id: int) -> HttpResponse:
    """Show one item: its state, progress, files and stored objects."""
    found = dossier_or_404(request, dossier_id)
    one = Item.objects.filter(dossier=found, pk=item_id).first()
    if one is None:
        raise Http404
    # By number: a path may be longer than an address.
    after = downloads.object_of(found, _cursor(request.GET.get("after", "")) or 0)
    objects = reading.objects_of(one, after=after, limit=PAGE_ROWS + 1)
    shown, person = objects[:PAGE_ROWS], person_of(request)
    others = reading.others_holding(shown, found, person)
    may_take = project_member(person, found.run.project, *downloads.TAKERS)
    no_download = downloads.why_not_kind(one.kind) if may_take else downloads.WHO
    return render(
        request,
        "evidence/item.html",
        {
            "dossier": found,
            "item": one,
            "line": next(line for line in listing.item_lines(found, grouped=False) if line.id == one.pk),
            "parts": reading.parts(one),
            "objects": [(row, others.get(row.sha256, []), downloads.why_not_bytes(row)) for row in shown],
            "no_download": no_download,
            "offer": not no_download,
            "is_checkpoint": one.kind in CHECKPOINT_KINDS,
            "after": after,
            "next": shown[-1].pk if len(objects) > PAGE_ROWS else None,
            # What is known of the source before it is stored: a checkpoint of thousands of files.
            "files": one.files[:PAGE_ROWS] if not shown and after is None else [],
            "files_total": len(one.files),
            "tries": reading.tries(one),
        },
    )


@require_GET
@login_required
def custody(request: HttpRequest, dossier_id: int) -> HttpResponse:
    """Show the chain of custody, newest first, each row with its own check."""
    found = dossier_or_404(request, dossier_id)
    before = _cursor(request.GET.get("before", ""))
    lines = reading.custody_lines(found, before=before, limit=PAGE_ROWS + 1)
    return render(
        request,
        "evidence/custody.html",
        {
            "dossier": found,
            "lines": lines[:PAGE_ROWS],
            "older": lines[PAGE_ROWS - 1].row.seq if len(lines) > PAGE_ROWS else None,
            "chain": listing.chain_of(found),
        },
    )


@require_GET
@login_required
def stored_object(request: HttpRequest, sha256: str) -> HttpResponse:
    """Show everything known of one object by its digest: where it is kept, and by which dossiers."""
    if not _SHA256.fullmatch(sha256):
        raise Http404
    person = person_of(request)
    objects = reading.as_enforced(list(reading.objects_with(sha256, person)[:PAGE_ROWS]))
    if not objects:
        raise Http404
    projects = {row.item.dossier.run.project for row in objects}
    takes = {project for project in projects if project_member(person, project, *downloads.TAKERS)}
    offered = [
        (row, downloads.why_not_object(row) if row.item.dossier.run.project in takes else downloads.WHO)
        for row in objects
    ]
    return render(request, "evidence/object.html", {"sha256": sha256, "objects": offered})


def items_context(found: Dossier) -> dict[str, object]:
    """Return what the list of evidence shows, for the vault's and the incident's page alike."""
    lines = listing.item_lines(found)
    says, locked = listing.lock_sentences(found)
    return {
        "dossier": found,
        "item_lines": lines,
        "ticks": listing.ticks(lines),
        "lock_says": says,
        "locked": locked,
        "chain": listing.chain_of(found),
        "bytes": listing.bytes_words(found),
        "collecting": any(not line.satisfied for line in lines),
    }
