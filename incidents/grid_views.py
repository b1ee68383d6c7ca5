"""The first-failure grid of an incident: its tiles, its figure, its exact cells."""

from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.http import require_GET, require_safe

from incidents import cells, figures, layer_figure, queries
from incidents.layer_view import layer_view
from incidents.models import Incident
from runs import grid, grid_png, grid_tiles
from runs.figures import plot_width
from runs.policies import policy_for
from runs.views import person_of, theme_of

YEAR_S = 365 * 86_400


def view_of(request: HttpRequest, found: Incident) -> tuple[grid.View, grid.Window]:
    """Return what the address asks to see of the grid, and what it opens on."""
    extent = grid.extent(found.run, found.attempt)
    opening = grid.opening_window(extent, figures.first_bad_step(found))
    query = request.GET
    if "x0" in query:
        steps, ranks = f"{query['x0']}-{query.get('x1', '')}", f"{query.get('y0', '')}-{query.get('y1', '')}"
    else:
        steps, ranks = query.get("steps", ""), query.get("ranks", "")
    rows = grid.rows(found.run, found.attempt, extent, query.get("rows", ""), query.get("sort", ""))
    window = grid.read_window(steps, ranks, opening, extent)
    by_time = query.get("x") == "time"
    return grid.View(found.run, found.attempt, window, rows, extent, by_time), opening


def _incident_or_404(request: HttpRequest, incident_id: int) -> Incident:
    try:
        return queries.incident_for(person_of(request), incident_id)
    except Incident.DoesNotExist:
        raise Http404 from None


def _pixels(request: HttpRequest, name: str, default: int) -> int:
    text = request.GET.get(name, "")
    known = text.isdecimal() and len(text) < 6
    return max(1, min(grid_tiles.MAX_TILE_PX, int(text))) if known else default


def _png(request: HttpRequest, body: bytes, version: str) -> HttpResponse:
    response = HttpResponse(body, content_type="image/png")
    if request.GET.get("v") == version:
        response["Cache-Control"] = f"private, max-age={YEAR_S}, immutable"
    else:
        response["Cache-Control"] = "private, no-cache"
    return response


@require_GET
@login_required
def incident_grid(request: HttpRequest, incident_id: int) -> HttpResponse:
    """Answer a tile of the first-failure grid."""
    view, _ = view_of(request, _incident_or_404(request, incident_id))
    width, height = _pixels(request, "w", 856), _pixels(request, "h", 240)
    body = grid_tiles.tile(view, width=width, height=height, theme=theme_of(request))
    return _png(request, body, view.extent.version)


@require_GET
@login_required
def incident_layers(request: HttpRequest, incident_id: int) -> HttpResponse:
    """Answer the tile of layers; a window without layers answers an empty pixel."""
    found = _incident_or_404(request, incident_id)
    view, _ = view_of(request, found)
    policy = policy_for(found.run_id)
    layers = layer_figure.layer_plane(found, view.window, policy, layer_view(request.GET))
    if layers is None:
        raise Http404
    width, height = _pixels(request, "w", 856), _pixels(request, "h", 100)
    plane = layer_figure.layer_tile(layers.codes, width, height, view.clock(width))
    return _png(request, grid_png.encode(plane, theme_of(request)), view.extent.version)


@require_safe
@login_required
def incident_figure(request: HttpRequest, incident_id: int) -> HttpResponse:
    """Answer the Plotly figure of the window asked for; a HEAD only tells whether it changed."""
    found = _incident_or_404(request, incident_id)
    view, _ = view_of(request, found)
    etag = f'"{view.extent.version}-{found.first_bad.get("digest") or found.first_bad.get("step")}"'
    if request.headers.get("If-None-Match") == etag:
        return HttpResponse(status=304, headers={"ETag": etag})
    if request.method == "HEAD":
        return HttpResponse(headers={"ETag": etag})
    figure = figures.incident_figure(
        found,
        view,
        policy=policy_for(found.run_id),
        width=plot_width(request.GET.get("width", "")),
        theme=theme_of(request),
        layers=layer_view(request.GET),
    )
    return JsonResponse(figure, headers={"ETag": etag, "Cache-Control": "private, no-cache"})


@require_GET
@login_required
def incident_cells(request: HttpRequest, incident_id: int) -> HttpResponse:
    """Answer exact cells of the window as rectangles, with what the readout needs to name them."""
    found = _incident_or_404(request, incident_id)
    view, _ = view_of(request, found)
    return JsonResponse({**grid_tiles.exact(view), "words": grid.WORDS, **cells.rank_names(found)})


@require_GET
@login_required
def incident_cell(request: HttpRequest, incident_id: int) -> HttpResponse:
    """Answer the values of one cell for the readout."""
    found = _incident_or_404(request, incident_id)
    step, rank = request.GET.get("step", ""), request.GET.get("rank", "")
    if not (step.isdecimal() and rank.isdecimal() and len(step) < 19 and len(rank) < 9):
        return JsonResponse({"says": "step and rank must be whole numbers"}, status=400)
    return JsonResponse({"says": cells.cell_words(found, int(step), int(rank))})
