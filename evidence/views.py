"""Pages of the vault."""

from django.contrib.auth.decorators import login_required
from django.db.models import Count, Q, Sum
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from evidence import custody, listing
from evidence.models import CustodyRow, Dossier, Hold, Item, Seal, StoredObject, StoreProbe
from evidence.queries import visible_dossiers
from runs import live
from runs.views import person_of

PAGE_ROWS = 100


@require_GET
@login_required
def vault(request: HttpRequest) -> HttpResponse:
    """Show what is kept and what the store enforces: is it safe, until when."""
    dossiers = (
        visible_dossiers(person_of(request))
        .select_related("run")
        .annotate(
            required=Count("items", filter=Q(items__required=True) & ~Q(items__state="not_applicable")),
            sealed=Count("items", filter=Q(items__required=True, items__state="sealed")),
            missing=Count("items", filter=Q(items__required=True, items__state="missing")),
        )
        .order_by("-opened_at")[:PAGE_ROWS]
    )
    rows = list(dossiers)
    sizes = dict(
        StoredObject.objects.filter(item__dossier__in=rows)
        .values_list("item__dossier")
        .annotate(total=Sum("bytes_total"))
    )
    damaged = StoredObject.objects.filter(item__dossier__in=visible_dossiers(person_of(request))).exclude(
        mismatch=""
    )
    holds = dict(
        Hold.objects.filter(dossier__in=rows, released_at=None)
        .values_list("dossier")
        .annotate(total=Count("id"))
    )
    return render(
        request,
        "evidence/vault.html",
        {
            "rows": [(row, sizes.get(row.pk, 0), holds.get(row.pk, 0)) for row in rows],
            "total": sum(sizes.values()),
            "damaged": damaged.count(),
            "damaged_in": Dossier.objects.filter(items__objects__in=damaged).distinct()[:PAGE_ROWS],
            "probe": StoreProbe.objects.order_by("-probed_at").first(),
        },
    )


def _dossier_or_404(request: HttpRequest, dossier_id: int) -> Dossier:
    try:
        return visible_dossiers(person_of(request)).select_related("run").get(pk=dossier_id)
    except Dossier.DoesNotExist:
        raise Http404 from None


@require_GET
@login_required
def dossier(request: HttpRequest, dossier_id: int) -> HttpResponse:
    """Show a dossier: items, objects, custody and how to check it offline."""
    found = _dossier_or_404(request, dossier_id)
    rows = list(CustodyRow.objects.filter(dossier=found).order_by("-seq")[:PAGE_ROWS])
    people = listing.names([row.who for row in rows] + [found.opened_by])
    objects = (
        StoredObject.objects.filter(item__dossier=found)
        .select_related("item")
        .order_by("item__order", "path")
    )
    held_by = dict(
        Hold.objects.filter(dossier=found, released_at=None).values_list("item").annotate(n=Count("id"))
    )
    return render(
        request,
        "evidence/dossier.html",
        {
            "dossier": found,
            "opened_by": people.get(found.opened_by, "Andon" if not found.opened_by else "somebody"),
            "evidence": live.render(request, "evidence/_items.html", items_context(found)),
            "items": Item.objects.filter(dossier=found).defer("files", "source"),
            "held_by": held_by,
            "objects": objects[:PAGE_ROWS],
            "objects_total": objects.count(),
            "custody": [
                (row, "Andon" if row.who == custody.ANDON else people.get(row.who, "somebody"))
                for row in rows
            ],
            "custody_total": CustodyRow.objects.filter(dossier=found).count(),
            "holds": Hold.objects.filter(dossier=found)
            .select_related("item")
            .order_by("placed_at", "id")[:PAGE_ROWS],
            "seals": Seal.objects.filter(dossier=found).order_by("-number"),
        },
    )


@require_GET
@login_required
def dossier_items(request: HttpRequest, dossier_id: int) -> HttpResponse:
    """Answer the poll of a dossier's items."""
    found = _dossier_or_404(request, dossier_id)
    return live.answer(request, "evidence/_items.html", items_context(found))


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
