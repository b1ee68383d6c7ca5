"""One message over one channel: people's services by Apprise, Alertmanager v2, our own signed webhook.

Sources: apprise wiki (addresses); Alertmanager api/v2/openapi.yaml (postAlerts); Standard Webhooks 1.0
(signature); CloudEvents 1.0 HTTP binding, structured mode.
"""

import json
import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import Any

import apprise
from django.conf import settings

from andon.masking import mask_text
from andon.signing import sign_webhook
from incidents.paging import texts
from incidents.paging.ladder import Channel
from incidents.paging.models import Delivery, Page
from runs import formatting as words
from runs import outgoing

TIMEOUT_S = 15.0  # Standard Webhooks asks a sender to wait 15 to 30 s
# Alertmanager takes an alert for resolved when nobody repeats it by then. An hour outlives a restart of
# Andon: while the run is held nobody may be told that all is well because we were silent for a minute.
ALERT_LASTS = timedelta(hours=1)
_NAMES = {
    Page.Kind.INCIDENT: "AndonIncident",
    Page.Kind.APPROVAL: "AndonApprovalWaiting",
    Page.Kind.BREAK_GLASS: "AndonBreakGlass",
    Page.Kind.PERSON: "AndonPersonPaged",
    Page.Kind.VAULT: "AndonVault",
    Page.Kind.NOT_WATCHED: "AndonRunNotWatched",
    Page.Kind.SWEEP: "AndonSweepMissed",
    Page.Kind.ANDON: "AndonItself",
}


class NotSent(Exception):
    """A channel did not take a message. `permanent`: nor will it ever take this one.

    `after_s`: it asked not to be tried again before.
    """

    def __init__(self, says: str, *, permanent: bool = False, after_s: float = 0.0) -> None:
        super().__init__(says)
        self.permanent = permanent
        self.after_s = after_s


@dataclass(frozen=True, slots=True)
class Message:
    """What is sent: of a delivery's row, or made up where there is no database (dead-man's page)."""

    key: str
    page_key: str
    group: str
    kind: str
    what: str  # raised | acknowledged | resolved
    title: str
    text: str
    link: str
    urgent: bool
    at: datetime  # when it was made up: the same at every try
    raised_at: datetime
    ended_at: datetime | None = None
    run: str = ""
    project: str = ""
    incident: str = ""
    acknowledged_by: str = ""


def of_delivery(delivery: Delivery) -> Message:
    """Return the message of a stored delivery."""
    page = delivery.page
    return Message(
        key=delivery.key,
        page_key=page.key,
        group=page.group,
        kind=page.kind,
        what=delivery.what,
        title=delivery.title,
        text=delivery.text,
        link=texts.link(page),
        urgent=page.urgent,
        at=delivery.created_at,
        raised_at=page.raised_at,
        ended_at=page.ended_at,
        run=page.incident.run.slug if page.incident is not None else "",
        project=page.project.slug if page.project is not None else "",
        incident=str(page.incident_id or ""),
        acknowledged_by=page.acknowledged_by,
    )


def send(channel: Channel, message: Message) -> None:
    """Send one message.

    Raises:
        NotSent: the channel did not take it.
    """
    _SENDERS[channel.kind](channel, message)


# --- people's services


class _Heard(logging.Handler):
    """What Apprise says of this thread's message; it tells why only by its log, which all threads share."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.thread = threading.get_ident()
        self.last = ""

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self.thread:
            self.last = record.getMessage()


def _apprise(channel: Channel, message: Message) -> None:
    # The one service itself, not Apprise's list of them: that sends from a thread pool of its own.
    service = apprise.Apprise.instantiate(channel.address)
    if service is None:
        raise NotSent("the address is none that Apprise knows", permanent=True)
    heard, logger = _Heard(), logging.getLogger("apprise")
    logger.addHandler(heard)
    try:
        done = service.notify(body=message.text, title=message.title, notify_type=_apprise_type(message))
    except Exception as error:
        # A library of a hundred services; whatever it raises, the channel did not take the message.
        raise NotSent(_without_address(f"{type(error).__name__}: {error}", channel)) from None
    finally:
        logger.removeHandler(heard)
    if not done:
        raise NotSent(_without_address(heard.last, channel) or "the service did not take it")


def _without_address(said: str, channel: Channel) -> str:
    """Return a library's words without the address: those of services hold their secrets."""
    for part in {channel.address, *re.split(r"[/:@?&=]+", channel.address)}:
        said = said.replace(part, "[masked]") if len(part) >= 8 else said
    return words.inert(mask_text(said), 250)


def _apprise_type(message: Message) -> apprise.NotifyType:
    if message.what == Delivery.What.RESOLVED:
        return apprise.NotifyType.SUCCESS
    return apprise.NotifyType.FAILURE if message.urgent else apprise.NotifyType.WARNING


# --- Alertmanager


def alert(message: Message, now: datetime) -> dict[str, Any]:
    """Return one alert. Labels are its identity, so nothing that changes is one: no step, no time."""
    labels = {
        "alertname": _NAMES.get(Page.Kind(message.kind), "Andon"),
        "severity": "critical" if message.urgent else "warning",
        "page": message.page_key,
        "group": message.group,
        "service": "andon",
        "run": message.run,
        "project": message.project,
        "incident": message.incident,
    }
    ended = message.ended_at if message.ended_at is not None and message.ended_at <= now else None
    return {
        "labels": {name: value for name, value in labels.items() if value},
        "annotations": {"summary": message.title, "description": message.text},
        "startsAt": _rfc3339(message.raised_at),
        "endsAt": _rfc3339(ended or now + ALERT_LASTS),
        "generatorURL": message.link,
    }


def _alertmanager(channel: Channel, message: Message) -> None:
    body = json.dumps([alert(message, datetime.now(UTC))]).encode()
    _post(f"{channel.address.rstrip('/')}/api/v2/alerts", body, {"content-type": "application/json"})


# --- our own webhook


def event(message: Message) -> dict[str, Any]:
    """Return the CloudEvent of a message."""
    return {
        "specversion": "1.0",
        "id": message.key,
        "source": settings.PUBLIC_URL,
        "type": f"andon.page.{message.what}",
        "subject": message.page_key,
        "time": _rfc3339(message.at),
        "datacontenttype": "application/json",
        "data": {
            "page": message.page_key,
            "group": message.group,
            "kind": message.kind,
            "title": message.title,
            "text": message.text,
            "link": message.link,
            "urgent": message.urgent,
            "run": message.run or None,
            "project": message.project or None,
            "incident": message.incident or None,
            "acknowledged_by": message.acknowledged_by or None,
        },
    }


def _webhook(channel: Channel, message: Message) -> None:
    body = json.dumps(event(message), ensure_ascii=False).encode()
    now_s = int(time.time())
    headers = {
        "content-type": "application/cloudevents+json",
        "webhook-id": message.key,
        "webhook-timestamp": str(now_s),
        "webhook-signature": sign_webhook(channel.secret, message.key, now_s, body),
    }
    _post(channel.address, body, headers)


def _post(url: str, body: bytes, headers: dict[str, str]) -> None:
    try:
        answer = outgoing.send("POST", url, body=body, headers=headers, timeout_s=TIMEOUT_S)
    except outgoing.NotSent as error:
        raise NotSent(str(error)) from error
    if 200 <= answer.status < 300:
        return
    said = words.inert(answer.body[:200].decode("utf-8", "replace"), 160)
    says = f"answered {answer.status}" + (f": {said}" if said else "")
    # 410: the receiver is gone for good (Standard Webhooks). Any other refusal may be a proxy's mood.
    wait = answer.headers.get("retry-after", "")
    raise NotSent(
        says,
        permanent=answer.status == HTTPStatus.GONE,
        after_s=min(float(wait), 3600.0) if wait.isascii() and wait.isdigit() and len(wait) < 6 else 0.0,
    )


def _rfc3339(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


_SENDERS: dict[str, Callable[[Channel, Message], None]] = {
    "apprise": _apprise,
    "alertmanager": _alertmanager,
    "webhook": _webhook,
}
