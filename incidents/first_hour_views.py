"""Pages and buttons of the first hour: duties, status text, hand-over, and the link of a page."""

from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from incidents import ack_links, actions, answers, duties, first_hour, queries
from incidents.decisions import act
from incidents.models import Incident
from incidents.refused import Refused
from incidents.views import page_or_404
from runs.models import Person

SECTION = "first-hour"


@require_POST
@login_required
def give_duty(request: HttpRequest, incident_id: int) -> HttpResponse:
    """Take a duty, or give it to somebody by name."""

    def give(incident: Incident, person: Person) -> None:
        to = request.POST.get("to", "")
        duties.give(incident=incident, duty=request.POST.get("duty", ""), person=person, to=to)

    return act(request, incident_id, give, anchor=SECTION)


def _minutes(request: HttpRequest) -> int:
    text = request.POST.get("next", "30")
    return int(text) if text.isdecimal() and len(text) < 4 else -1


@require_http_methods(["GET", "POST"])
@login_required
def status(request: HttpRequest, incident_id: int) -> HttpResponse:
    """Show the status text, to be changed before it is told; on POST keep what was told.

    Without a text of its own a POST keeps the text made from facts at that moment: one tap.
    """
    page = page_or_404(request, incident_id)
    made = first_hour.status_text(page)
    if request.method != "POST":
        context = {"page": page, "text": made, "minutes": duties.NEXT_UPDATE_MIN}
        return render(request, "incidents/status.html", context)
    text = request.POST.get("text", "").strip() or made

    def say(incident: Incident, person: Person) -> None:
        duties.say_status(incident=incident, person=person, text=text, next_min=_minutes(request))

    return act(request, incident_id, say, anchor=SECTION)


@never_cache
@require_GET
@login_required
def status_txt(request: HttpRequest, incident_id: int) -> HttpResponse:
    """Answer the status text alone: what the page's button copies."""
    text = first_hour.status_text(page_or_404(request, incident_id))
    return HttpResponse(text, content_type="text/plain; charset=utf-8")


@require_http_methods(["GET", "POST"])
@login_required
def hand_over(request: HttpRequest, incident_id: int) -> HttpResponse:
    """Show the start of a hand-over note; on POST keep it and give the lead on."""
    page = page_or_404(request, incident_id)
    if request.method != "POST":
        people = [one.username for one in duties.holders(page.incident)]
        context = {"page": page, "text": first_hour.handover_text(page), "people": people}
        return render(request, "incidents/hand_over.html", context)

    def give(incident: Incident, person: Person) -> None:
        to, text = request.POST.get("to", ""), request.POST.get("text", "")
        duties.hand_over(incident=incident, person=person, to=to, text=text)

    return act(request, incident_id, give, anchor="notes")


@never_cache
@require_http_methods(["GET", "POST"])
def acknowledge_by_link(request: HttpRequest, token: str) -> HttpResponse:
    """Show what a paged person acknowledges; on POST acknowledge it as them, and do nothing else.

    Nobody is signed in by it. A link of a chat is opened by previews, so a GET changes nothing.
    """
    link = ack_links.read(token)
    if link is None:
        raise Http404
    says, code = "", 200
    if request.method == "POST":
        if link.expired:
            says, code = "Not acknowledged: this link is over. Sign in to acknowledge.", 410
        else:
            try:
                actions.acknowledge(incident=link.incident, person=link.person)
            except Refused as refused:
                says, code = refused.says, refused.status
    page = queries.incident_page(link.person, link.incident.pk)
    first = answers.headline(page.incident, page.first_bad_document, page.only_node)
    context = {"page": page, "link": link, "says": says, "first": first, "token": token}
    return render(request, "incidents/acknowledge.html", context, status=code)
