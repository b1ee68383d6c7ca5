"""Pages of nodes: is it the machine?"""

from collections.abc import Callable

from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from incidents import node_lines, node_page
from incidents.node_lines import NodeLine
from runs import live
from runs.views import person_of

PAGE_NODES = 100
FILTERS: dict[str, Callable[[NodeLine], bool]] = {
    "trouble": lambda one: one.troubled,
    "silent": lambda one: one.silent_since is not None,
    "swapped": lambda one: bool(one.swapped),
    "in use": lambda one: bool(one.runs),
}


@require_GET
@login_required
def nodes(request: HttpRequest) -> HttpResponse:
    """Show every node a person's runs name, the most troubled first."""
    context = _context(request)
    fragment = live.render(request, "incidents/_nodes.html", context)
    return render(request, "incidents/nodes.html", {**context, "table": fragment})


@require_GET
@login_required
def nodes_table(request: HttpRequest) -> HttpResponse:
    """Answer the poll of the list of nodes."""
    return live.answer(request, "incidents/_nodes.html", _context(request))


def _context(request: HttpRequest) -> dict[str, object]:
    chosen, text = request.GET.get("show", ""), request.GET.get("q", "").strip()[:200]
    asked = request.GET.get("page", "")
    everything = node_lines.lines(person_of(request))
    fits = FILTERS.get(chosen)
    shown = [one for one in everything if (fits is None or fits(one)) and text.lower() in one.name.lower()]
    pages = max(1, -(-len(shown) // PAGE_NODES))
    page = min(max(1, int(asked)), pages) if asked.isdecimal() and len(asked) < 6 else 1
    return {
        "lines": shown[(page - 1) * PAGE_NODES : page * PAGE_NODES],
        "total": len(everything),
        "found": len(shown),
        "page": page,
        "pages": pages,
        "chips": [(word, sum(map(fit, everything))) for word, fit in FILTERS.items()],
        "show": chosen,
        "q": text,
        "hot": node_lines.HOT_C,
        "days": node_lines.SINCE.days,
        "query": request.GET.urlencode(),
    }


@require_GET
@login_required
def node(request: HttpRequest, node: str) -> HttpResponse:
    """Show one node."""
    page = node_page.of_node(person_of(request), node)
    if page is None:
        raise Http404
    return render(
        request, "incidents/node.html", {"page": page, "line": page.line, "days": node_lines.SINCE.days}
    )
