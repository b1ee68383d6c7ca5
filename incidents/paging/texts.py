"""What a page says: who is told what, in words that are read half asleep, and the key it goes under."""

from datetime import datetime

from django.conf import settings

from incidents import ack_links, answers, costs, firstbad
from incidents.holding import held_since
from incidents.models import Incident
from incidents.paging.ladder import Channel
from incidents.paging.models import Delivery, Page
from incidents.standing_approvals import granting as standing
from runs import formatting as words
from runs.models import Person, RunProgress
from runs.policies import policy_for

What = Delivery.What
_TITLE_CHARS = 200


def key(page: Page, channel: str, what: str, round_: int, turn: int) -> str:
    """Return the id of one message: the same for every try, another for every new thing to say."""
    return f"{page.key}_{what}_{round_}_{turn}_{channel}"


def message(page: Page, channel: Channel, what: str, now: datetime) -> tuple[str, str]:
    """Return title and text of what is sent now over a channel."""
    if what == What.RESOLVED:
        title = f"Over: {page.title}"
        return title[:_TITLE_CHARS], f"{page.ended_why or 'It is over.'}\n{link(page)}"
    if what == What.ACKNOWLEDGED:
        return (
            f"Acknowledged: {page.title}"[:_TITLE_CHARS],
            f"{page.acknowledged_by or 'Somebody'} has it.\n{link(page)}",
        )
    pieces = [page.says]
    waited = (now - page.escalating_since).total_seconds()
    if page.kind == Page.Kind.APPROVAL and waited >= 60:
        pieces.append(f"Nobody has answered for {words.duration(waited)}.")
    elif page.urgent and waited >= 60:
        pieces.append(f"Nobody has acknowledged it for {words.duration(waited)}.")
    if page.incident is not None:
        cost = cost_so_far(page.incident, now)
        pieces += [cost] if cost else []
        pieces.append(link(page))
        own = _own_link(page.incident, channel, page)
        pieces += [own] if own else []
    else:
        pieces.append(link(page))
    return page.title[:_TITLE_CHARS], "\n".join(pieces)


def link(page: Page) -> str:
    """Return where the page leads, absolute."""
    return f"{settings.PUBLIC_URL}{page.link}"


def _own_link(incident: Incident, channel: Channel, page: Page) -> str:
    """Return the link by which the channel's owner acknowledges; only where nobody else reads along."""
    if not channel.person or page.kind == Page.Kind.APPROVAL or incident.acknowledged_at is not None:
        return ""
    person = Person.objects.filter(username=channel.person, is_active=True).first()
    return f"Acknowledge: {ack_links.address(incident, person)}" if person is not None else ""


def cost_so_far(incident: Incident, now: datetime) -> str:
    """Return "Held 24 min, 25.6 GPU-hours, $64.00 so far.", "" for a run that is not held."""
    since = held_since(incident.run_id)
    if since is None:
        return ""
    said = f"Held {words.duration((now - since).total_seconds())}"
    cost = costs.waiting(incident, since, now, policy_for(incident.run_id))
    if cost.gpu_hours is not None and cost.money is not None:
        said += f", {words.gpu_hours(cost.gpu_hours)}, {words.money(cost.money)} so far"
    return f"{said}."


def of_incident(incident: Incident) -> tuple[str, str]:
    """Return title and first sentence of an incident's page: run, what happened, where it began."""
    title = f"{words.inert(incident.run.slug, 60)}: {words.inert(incident.title, 120)}"
    document = {**firstbad.UNKNOWN, **incident.first_bad}
    cell = answers.headline(incident, document, firstbad.only_node([incident]).get(incident.pk, ""))
    says = f"Incident {incident.pk}, {words.inert(cell, 200)}."
    return title, f"{says} {_what_is_new(incident)}".strip()


def _what_is_new(incident: Incident) -> str:
    """Return why the page is raised again, for who has seen the first one."""
    launched = incident.timeline.filter(kind="launch").order_by("-id").values_list("text", flat=True).first()
    if launched:
        return f"{words.inert(launched[:1].upper() + launched[1:], 200)}."
    if incident.recurrence:
        return "It came back in its watch window."
    if incident.holds and standing.waits(incident):
        return "A standing approval lets it go on by itself once its evidence is safe."
    return "" if incident.holds else "The run goes on."


def of_not_watched(progress: RunProgress) -> tuple[str, str]:
    """Return title and text for a run whose posts nobody looks at."""
    slug = words.inert(progress.run.slug, 60)
    return f"{slug} is not watched", words.inert(progress.not_watched_why, 300) or "Detection failed."
