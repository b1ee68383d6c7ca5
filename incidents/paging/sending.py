"""Sends what `escalating` wrote down: one delivery is one unit of work, tried until it is out or over.

Nothing is sent for what is over or acknowledged. A channel that fails is tried again, longer apart each
time; meanwhile the next channel of the ladder is used. How channels do is kept for the System page.
"""

import logging
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import F
from django.utils import timezone

from incidents.paging import channels, escalating
from incidents.paging.ladder import Channel, paging
from incidents.paging.models import ChannelState, Delivery, Page
from runs import formatting as words
from runs.work import Lease, Payload, Retry, handler

log = logging.getLogger(__name__)

FIRST_RETRY_S, LAST_RETRY_S = 5.0, 300.0
GIVE_UP_AFTER = timedelta(hours=24)
# An alert is sent again while it fires, since Alertmanager forgets all when it restarts, and a resolved
# one for some minutes more (Alertmanager, alerts API).
ALERT_EVERY_S = 60.0
RESOLVED_FOR = timedelta(minutes=5)
S, What = Delivery.State, Delivery.What


@handler(escalating.DELIVER)
def deliver(payload: Payload, lease: Lease) -> None:
    """Try one delivery; safe to run twice."""
    one = (
        Delivery.objects.select_related("page__incident__run", "page__project")
        .filter(pk=int(str(payload["delivery"])))
        .first()
    )
    if one is None:
        return
    channel = paging().channels.get(one.channel)
    fires = channel is not None and channel.kind == "alertmanager"
    if one.state == S.DROPPED or (one.state == S.SENT and not fires):
        return
    over = why_over(one)
    if over and one.state == S.DUE:
        _drop(one, over)
        return
    if channel is None:
        _drop(one, "the channel is no longer in the file")
        return
    now = timezone.now()
    try:
        channels.send(channel, channels.of_delivery(one))
    except channels.NotSent as error:
        _failed(one, channel, error, now)
    else:
        with transaction.atomic():
            lease.guard()
            _sent(one, timezone.now())
        if fires:
            _keep_firing(one, now)


def why_over(one: Delivery) -> str:
    """Return why nobody needs this message any more, "" when somebody does."""
    page = one.page
    if one.what != What.RAISED:
        return ""
    if page.ended_at is not None:
        return "over before it went out"
    taken = page.acknowledged_at is not None
    if page.incident is not None and page.kind == Page.Kind.INCIDENT:
        # The incident itself is newer than what the page's row knows of it.
        taken = page.incident.acknowledged_at is not None
    return "acknowledged before it went out" if taken else ""


def _sent(one: Delivery, now: datetime) -> None:
    Delivery.objects.filter(pk=one.pk).update(state=S.SENT, sent_at=now, error="", tries=F("tries") + 1)
    ChannelState.objects.update_or_create(
        name=one.channel, defaults={"last_sent_at": now, "failing_since": None, "error": ""}
    )


def _failed(one: Delivery, channel: Channel, error: channels.NotSent, now: datetime) -> None:
    says = words.inert(error, 300)
    log.warning("page %s over %s: %s", one.page.key, channel.name, says)
    tries = one.tries + 1
    Delivery.objects.filter(pk=one.pk).update(tries=tries, error=says)
    ChannelState.objects.get_or_create(name=channel.name)
    state = ChannelState.objects.filter(name=channel.name)
    state.update(error=says)
    state.filter(failing_since=None).update(failing_since=now)
    if one.what == What.RAISED and one.state == S.DUE:
        escalating.use_next(one.page_id, channel.name, now)
    # An alert that fires is never given up: silence would resolve it.
    if one.state == S.DUE and (error.permanent or now - one.created_at > GIVE_UP_AFTER):
        _drop(one, says)
        return
    raise Retry(max(error.after_s, min(LAST_RETRY_S, FIRST_RETRY_S * 2 ** min(tries - 1, 10))), says)


def _drop(one: Delivery, why: str) -> None:
    Delivery.objects.filter(pk=one.pk, state=S.DUE).update(state=S.DROPPED, error=why[:300])


def _keep_firing(one: Delivery, now: datetime) -> None:
    ended = one.page.ended_at
    if ended is None:
        raise Retry(ALERT_EVERY_S, "sent again while it fires")
    if now < ended + RESOLVED_FOR:
        raise Retry(ALERT_EVERY_S, "sent again as resolved")
