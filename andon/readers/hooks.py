"""What fleets post: Alertmanager, nvrx-watch, NVSentinel, gpud, trackio, or any JSON object.

Each body becomes reports: what, how bad, which node or run, since when, and an identity by which the same
trouble told again is the same report. Nothing is trusted: every field is narrowed before it is used, and a
body in another shape than its tool's is read as a general one rather than refused.

Sources: prometheus/alertmanager notify/webhook/webhook.go (version 4); nvrx-watch sinks.py; NVSentinel
data-models/protobufs/health_event.proto (as JSON); gpud api/v1/types.go; trackio docs/source/alerts.md.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from andon.wire_times import parse_time
from andon.wire_values import Cleaner, load_json, unprocessable

MOST_REPORTS = 1_000
_TITLE, _TEXT, _NAME = 200, 2_000, 100
_NODE = ("node", "nodename", "nodeName", "node_name", "kubernetes_node", "hostname", "Hostname", "host")
_RUN = ("andon_run", "run", "run_id", "training_run")
_CRITICAL = frozenset({"critical", "fatal", "page", "error", "emergency", "unhealthy", "halt"})
_WARN = frozenset({"warning", "warn", "degraded", "high", "major"})


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One thing a fleet said. Times are nanoseconds since 1970; `state` is firing | resolved."""

    identity: str  # SHA-256 of what makes it the same trouble
    title: str
    text: str = ""
    severity: str = "info"  # info | warn | critical
    state: str = "firing"
    node: str = ""
    run: str = ""
    started_ns: int | None = None
    ended_ns: int | None = None
    raw: dict[str, Any] = {}


def read(source: str, body: bytes) -> list[Report]:
    """Return the reports of one body.

    Args:
        source: one of `SOURCES`.
        body: the bytes as received.

    Raises:
        WireError: 400 not JSON; 422 nested too deep, neither object nor list of objects, too many.
        KeyError: there is no such source.
    """
    reader = SOURCES[source]
    document = Cleaner().clean(load_json(body), "body")
    documents = document if isinstance(document, list) else [document]
    if not documents or not all(isinstance(one, dict) for one in documents):
        raise unprocessable("a hook takes an object or a list of objects", "body")
    reports = [report for one in documents for report in reader(one)]
    if len(reports) > MOST_REPORTS:
        raise unprocessable(f"a body of {len(reports)} reports: at most {MOST_REPORTS}", "body")
    return reports


def _alertmanager(document: dict[str, Any]) -> list[Report]:
    alerts = document.get("alerts")
    if not isinstance(alerts, list):
        return _general(document)  # a custom `payload` replaces the whole body
    reports = []
    for alert in alerts:
        if not isinstance(alert, dict):
            continue
        labels, notes = _object(alert, "labels"), _object(alert, "annotations")
        if labels.get("service") == "andon" and "page" in labels:
            continue  # our own page, routed back to us
        started, ended = _time(alert.get("startsAt")), _time(alert.get("endsAt"))
        state = "resolved" if alert.get("status") == "resolved" else "firing"
        identity = _text(alert, _NAME, "fingerprint") or json.dumps(labels, sort_keys=True)
        reports.append(
            Report(
                # The same labels firing again later are another trouble: its start is part of it.
                identity=_identity("alertmanager", identity, alert.get("startsAt")),
                title=_text(notes, _TITLE, "summary") or _text(labels, _TITLE, "alertname") or "alert",
                text=_text(notes, _TEXT, "description", "message"),
                severity=_severity(_text(labels, _NAME, "severity")),
                state=state,
                node=_text(labels, _NAME, *_NODE) or _host(_text(labels, _NAME, "instance")),
                run=_text(labels, _NAME, *_RUN),
                started_ns=started,
                ended_ns=ended if state == "resolved" else None,
                raw=alert,
            )
        )
    return reports


def _nvrx(document: dict[str, Any]) -> list[Report]:
    if not {"key", "detector"} <= document.keys():
        return _general(document)
    return [
        Report(
            identity=_identity("nvrx", document.get("key")),
            title=_text(document, _TITLE, "summary", "detector"),
            text=_text(document, _TEXT, "detail", "text"),
            severity=_severity(_text(document, _NAME, "severity")),
            node=_text(document, _NAME, *_NODE),
            run=_text(document, _NAME, *_RUN),
            raw=document,
        )
    ]


def _nvsentinel(document: dict[str, Any]) -> list[Report]:
    events = document.get("events")
    if isinstance(events, list):
        return [report for one in events if isinstance(one, dict) for report in _nvsentinel(one)]
    if "checkName" not in document and "nodeName" not in document:
        return _general(document)
    codes = document.get("errorCode")
    named = ", ".join(str(code)[:40] for code in codes[:8]) if isinstance(codes, list) else ""
    node, check = _text(document, _NAME, "nodeName"), _text(document, _NAME, "checkName")
    said = _text(document, _TEXT, "message")
    healthy = document.get("isHealthy") is True
    return [
        Report(
            identity=_identity("nvsentinel", node, check, document.get("entitiesImpacted")),
            title=f"{check or 'health event'}{f' {named}' if named else ''}"[:_TITLE],
            text="; ".join(one for one in (said, _text(document, _NAME, "recommendedAction")) if one),
            severity="critical" if document.get("isFatal") is True else "info" if healthy else "warn",
            state="resolved" if healthy else "firing",
            node=node,
            started_ns=_time(document.get("generatedTimestamp")),
            raw=document,
        )
    ]


def _gpud(document: dict[str, Any]) -> list[Report]:
    node = _text(document, _NAME, *_NODE, "machine_id", "machineID")
    reports: list[Report] = []
    for name in ("states", "events"):
        for one in document.get(name) or [] if isinstance(document.get(name), list) else []:
            if isinstance(one, dict):
                # The list stands beside the component it is of.
                inner = {"component": document.get("component"), **({"node": node} if node else {}), **one}
                reports += _gpud(inner)
    if reports:
        return reports
    if "component" not in document:
        return _general(document)
    component, health = _text(document, _NAME, "component"), _text(document, _NAME, "health")
    kind = health or _text(document, _NAME, "type")
    healthy = health in {"Healthy", "Initializing"}
    # An event happened at a time; a state stands until it is another.
    when = None if health else document.get("time")
    return [
        Report(
            identity=_identity("gpud", node, component, _text(document, _NAME, "name"), when),
            title=f"{component} {_text(document, _NAME, 'name')} {kind}".replace("  ", " ").strip()[:_TITLE],
            text=_text(document, _TEXT, "reason", "message", "error"),
            severity="info" if healthy else _severity(kind),
            state="resolved" if healthy else "firing",
            node=node,
            started_ns=_time(document.get("time")),
            raw=document,
        )
    ]


def _trackio(document: dict[str, Any]) -> list[Report]:
    if "title" not in document or "level" not in document:
        return _general(document)
    return [
        Report(
            identity=_identity(
                "trackio", *(document.get(one) for one in ("project", "run", "title", "step"))
            ),
            title=_text(document, _TITLE, "title"),
            text=_text(document, _TEXT, "text"),
            severity=_severity(_text(document, _NAME, "level")),
            run=_text(document, _NAME, *_RUN),
            started_ns=_time(document.get("timestamp")),
            raw=document,
        )
    ]


def _general(document: dict[str, Any]) -> list[Report]:
    labels = _object(document, "labels")
    state = _text(document, _NAME, "state", "status").lower()
    told = _text(document, _NAME, "id", "key", "fingerprint", "incident_key")
    return [
        Report(
            identity=_identity("general", told or json.dumps(document, sort_keys=True)),
            title=_text(document, _TITLE, "title", "summary", "name", "message", "text", "event") or "report",
            text=_text(document, _TEXT, "description", "detail", "message", "text"),
            severity=_severity(_text(document, _NAME, "severity", "level", "priority")),
            state="resolved" if state in {"resolved", "ok", "closed", "cleared", "recovered"} else "firing",
            node=_text(document, _NAME, *_NODE)
            or _text(labels, _NAME, *_NODE)
            or _host(_text(document, _NAME, "instance")),
            run=_text(document, _NAME, *_RUN) or _text(labels, _NAME, *_RUN),
            started_ns=_time(document.get("time") or document.get("timestamp") or document.get("started_at")),
            raw=document,
        )
    ]


SOURCES: Mapping[str, Callable[[dict[str, Any]], list[Report]]] = {
    "alertmanager": _alertmanager,
    "nvrx-watch": _nvrx,
    "nvsentinel": _nvsentinel,
    "gpud": _gpud,
    "trackio": _trackio,
    "generic": _general,
}


def _identity(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _object(value: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = value.get(name)
    return found if isinstance(found, dict) else {}


def _text(value: Mapping[str, Any], most: int, *names: str) -> str:
    """Return the first of some fields that holds text (or a number), cut to `most` characters."""
    for name in names:
        found = value.get(name)
        if isinstance(found, bool) or not isinstance(found, str | int | float):
            continue
        text = str(found).strip()
        if text:
            return text[:most]
    return ""


def _host(instance: str) -> str:
    """Return the host of "node-07:9100"."""
    host, colon, port = instance.rpartition(":")
    return host if colon and port.isdigit() else instance


def _severity(word: str) -> str:
    lowered = word.lower()
    return "critical" if lowered in _CRITICAL else "warn" if lowered in _WARN else "info"


def _time(value: object) -> int | None:
    """Return a time in nanoseconds, None for none; Go's zero time means none."""
    if not isinstance(value, str | int | float) or isinstance(value, bool) or str(value).startswith("0001-"):
        return None
    try:
        return parse_time(value)[0]
    except (ValueError, OverflowError):
        return None
