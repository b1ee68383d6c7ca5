"""Every kind of row as the appendix shows it: all that matters of it, as text."""

import json
from typing import Any

from django.db.models import Model

from andon.canonical import exact
from andon.postmortem.document import Cited
from evidence.models import Item, Seal
from incidents import holding, ledger
from incidents.models import (
    Approval,
    BoardChange,
    Incident,
    LedgerRow,
    Permit,
    Plan,
    Probe,
    ResumeRequest,
    TimelineEntry,
)
from incidents.postmortem.words import plain, stamp, who, who_by_id
from runs.formatting import fold
from runs.models import Attempt, Checkpoint, DirectiveAck, Event, Finding
from runs.queries import BadGroup

_MOST = 2_000  # characters of one value: a batch's fingerprints or a fleet's nodes fill pages

Fields = list[tuple[str, object]]


def cited(name: str, row: Model | BadGroup) -> Cited:
    """Return a row for the appendix; what it has no value for is left out."""
    match row:
        case Finding():
            what, fields = f"finding: {row.kind.replace('_', ' ')}", _finding(row)
        case TimelineEntry():
            what, fields = f"timeline: {row.kind.replace('_', ' ')}", _timeline(row)
        case Item():
            what, fields = f"evidence: {row.name}", _item(row)
        case Seal():
            what, fields = "seal", [("made", stamp(row.made_at)), ("digest", row.digest), ("key", row.key_id)]
        case LedgerRow():
            what, fields = f"ledger: {row.action.replace('_', ' ')}", _ledger(row)
        case Approval():
            what, fields = "approval", _approval(row)
        case ResumeRequest():
            what, fields = f"request: {row.kind.replace('_', ' ')}", _request(row)
        case Plan():
            what, fields = f"plan: {row.get_kind_display()}", _plan(row)
        case Permit():
            what, fields = "permit", _permit(row)
        case Incident():
            what, fields = f"incident: {row.title}", _incident(row)
        case Attempt():
            what, fields = f"attempt {row.number}", _attempt(row)
        case Checkpoint():
            what, fields = f"checkpoint of step {row.step:,}", _checkpoint(row)
        case DirectiveAck():
            what, fields = f"acknowledgement: {row.state}", _ack(row)
        case Probe():
            what, fields = "probe", _probe(row)
        case BoardChange():
            what, fields = f"diagnosis: {row.kind}", _board(row)
        case Event():
            what, fields = f"event: {row.type}", _event(row)
        case BadGroup():
            what, fields = "bad cells", _group(row)
        case _:
            raise TypeError(f"{type(row).__name__} has no place in the appendix")
    kept = [(field, plain(text, _MOST)) for field, value in fields if (text := _text(value))]
    return Cited(name, plain(what, 200), tuple(kept))


def _text(value: object) -> str:
    if value is None or value in ("", {}, []):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict | list):
        return json.dumps(exact(value), sort_keys=True, ensure_ascii=False)
    return str(exact(value)) if isinstance(value, int | float) else str(value)


def _lanes(lanes: list[Any]) -> str:
    ranks = [lane for lane in lanes if isinstance(lane, int)]
    names = [str(lane) for lane in lanes if not isinstance(lane, int)]
    return ", ".join([*fold(ranks), *names])


def _finding(row: Finding) -> Fields:
    return [
        ("severity", row.severity),
        ("attempt", row.attempt),
        ("step", row.step),
        ("lanes", _lanes(row.lanes)),
        ("series", row.series),
        ("view", row.view),
        ("score", row.score),
        ("numbers", row.numbers),
        ("says", row.detail),
        ("detector", holding.rule_name(row)),
        ("mode", row.mode),
        ("policy", row.policy_digest),
        ("occurred", stamp(row.occurred_at)),
        ("received", stamp(row.received_at)),
        ("backfill", row.backfill or None),
    ]


def _timeline(row: TimelineEntry) -> Fields:
    return [
        ("occurred", stamp(row.occurred_at)),
        ("received", stamp(row.received_at)),
        ("source", row.source),
        ("by", who(row.person) if row.person else row.by or "Andon"),
        ("says", row.text),
    ]


def _item(row: Item) -> Fields:
    return [
        ("kind", row.kind),
        ("required", row.required),
        ("state", row.state.replace("_", " ")),
        ("why", row.why),
        ("digest", row.digest),
        ("bytes", row.bytes_total),
        ("held", stamp(row.held_at) if row.held_at else ""),
        ("sealed", stamp(row.sealed_at) if row.sealed_at else ""),
        ("lock", row.lock),
        ("locked until", stamp(row.retain_until) if row.retain_until else ""),
        ("waived by", who_by_id(row.waived_by) if row.waived_by else ""),
        ("waived because", row.waived_why),
    ]


def _ledger(row: LedgerRow) -> Fields:
    told: dict[str, Any] = ledger.document(row, row.run.slug)
    told["decided_by"] = who_by_id(row.decided_by)
    hidden = ("schema", "seq")
    return [(name.replace("_", " "), value) for name, value in told.items() if name not in hidden]


def _approval(row: Approval) -> Fields:
    return [
        ("request", f"Q-{row.request_id}"),
        ("approver", who(row.approver)),
        ("at", stamp(row.at)),
        ("digest signed", row.digest),
    ]


def _request(row: ResumeRequest) -> Fields:
    return [
        ("state", row.state),
        ("plan", f"R-{row.plan.number}"),
        ("asked by", who(row.requested_by)),
        ("at", stamp(row.requested_at)),
        ("note", row.note),
        ("digest", row.digest),
        ("approvers needed", row.approvers_needed),
        ("ended", stamp(row.ended_at) if row.ended_at else ""),
        ("ended because", row.ended_why),
    ]


def _plan(row: Plan) -> Fields:
    return [
        ("why", row.why),
        ("checkpoint", row.checkpoint),
        ("positions", row.positions),
        ("skip", row.skip),
        ("exclusions", row.exclusions),
        ("changes", row.changes),
        ("numbers", row.numbers),
        ("made by", who(row.made_by)),
        ("made", stamp(row.made_at)),
    ]


def _permit(row: Permit) -> Fields:
    return [
        ("public id", row.public_id),
        ("state", row.state),
        ("attempt", row.attempt),
        ("issued", stamp(row.issued_at)),
        ("expires", stamp(row.expires_at)),
        ("taken", stamp(row.exchanged_at) if row.exchanged_at else ""),
        ("launches", row.launches),
        ("ended because", row.ended_why),
    ]


def _incident(row: Incident) -> Fields:
    return [
        ("run", row.run.slug),
        ("attempt", row.attempt),
        ("state", row.state.replace("_", " ")),
        ("severity", row.severity),
        ("kind", row.kind.replace("_", " ")),
        ("symptom", row.symptom.replace("_", " ")),
        ("family at opening", row.family),
        ("because", row.family_why),
        ("opened", stamp(row.opened_at)),
        ("resolved", stamp(row.resolved_at) if row.resolved_at else ""),
        ("first bad", row.first_bad),
        ("policy", row.policy_digest),
    ]


def _attempt(row: Attempt) -> Fields:
    return [
        ("launched", stamp(row.launched_at)),
        ("launch reported", row.launch_reported),
        ("world size", row.world_size),
        ("precision", row.precision),
        ("first step", row.first_step),
        ("began from", row.began_from),
        ("configuration", row.config_sha256),
        ("environment", row.environment_sha256),
        ("nodes", [str(node.get("node", "")) for node in row.nodes if isinstance(node, dict)]),
        ("exited", stamp(row.exited_at) if row.exited_at else ""),
        ("exit", row.exit),
    ]


def _checkpoint(row: Checkpoint) -> Fields:
    return [
        ("attempt", row.attempt),
        ("uri", row.uri),
        ("state", row.state),
        ("digest", row.digest),
        ("bytes", row.bytes_total),
        *((name.replace("_", " "), value) for name, value in row.positions().items()),
        ("committed", stamp(row.committed_at)),
        ("verified", stamp(row.verified_at) if row.verified_at else ""),
    ]


def _ack(row: DirectiveAck) -> Fields:
    return [
        ("directive", row.seq),
        ("step", row.step),
        ("ranks", _lanes(row.ranks)),
        ("occurred", stamp(row.occurred_at)),
        ("received", stamp(row.received_at)),
    ]


def _probe(row: Probe) -> Fields:
    return [
        ("family", row.family),
        ("what", row.name),
        ("condition that differs", row.condition or "none, it only reads"),
        ("command", row.command),
        ("owner", who(row.owner)),
        ("state", row.state),
        ("started", stamp(row.started_at)),
        ("ended", stamp(row.ended_at) if row.ended_at else ""),
        ("result", row.result),
        ("note", row.note),
        ("recorded by", who(row.recorded_by) if row.recorded_by else ""),
    ]


def _board(row: BoardChange) -> Fields:
    return [
        ("family", row.family),
        ("says", row.text),
        ("carried by", row.data.get("ids")),
        ("certainty", row.data.get("certainty")),
        ("by", who(row.person)),
        ("at", stamp(row.at)),
    ]


def _event(row: Event) -> Fields:
    return [
        ("attempt", row.attempt),
        ("step", row.step),
        ("rank", row.rank),
        ("node", row.node),
        ("occurred", stamp(row.occurred_at)),
        ("received", stamp(row.received_at)),
        ("data", row.data),
        ("flags", row.flags),
    ]


def _group(row: BadGroup) -> Fields:
    return [
        ("step", row.step),
        ("phase", row.phase),
        ("layers" if row.stream == "layer" else "ranks", row.ranks),
        ("series", row.series),
        ("value", row.value),
        ("view", row.view),
        ("update skipped", row.skipped or None),
        ("received", stamp(row.received_at)),
    ]
