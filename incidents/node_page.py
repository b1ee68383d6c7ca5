"""One node: what state it is in, which runs it is or was in, what happened on it, what it last reported."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from andon.diagnose.devices import xid
from andon.diagnose.gather.checks import verdict
from incidents import node_lines
from incidents.models import Incident
from incidents.node_lines import NodeLine
from runs import formatting
from runs.access import visible_runs
from runs.models import Attempt, FleetReport, Membership, NodeEvent, NodeReading, NodeStay, Person

EVENTS, STAYS, REPORTS = 200, 100, 50
_SAID = {
    "xid": "Xid",
    "ecc": "ECC",
    "thermal": "heat",
    "link": "link",
    "state": "state",
    "preflight": "preflight",
}
_MEASURED = 6  # values shown of what a preflight measured
SHOWN = (
    ("gpu_temp_c", "°C"),
    ("power_w", "W"),
    ("sm_clock_mhz", "MHz"),
)


@dataclass(frozen=True, slots=True)
class Stay:
    """One attempt that the node was in."""

    run: str
    attempt: int
    ranks: str
    since: datetime | None
    until: datetime | None
    swapped: str  # "in", "out after it", "in, and out after it"
    switch: str


@dataclass(frozen=True, slots=True)
class Happening:
    """One thing that happened on the node."""

    at: datetime
    what: str
    says: str
    run: str = ""
    attempt: int | None = None
    step: int | None = None
    incident: int | None = None


@dataclass(frozen=True, slots=True)
class Device:
    """What one device of the node reported last, and its worst."""

    name: str
    uuid: str
    values: list[str]
    counters: str
    at: datetime
    run: str


@dataclass(frozen=True, slots=True)
class NodePage:
    """All of one node."""

    line: NodeLine
    stays: list[Stay]
    happenings: list[Happening]
    devices: list[Device]

    @property
    def preflight(self) -> Happening | None:
        """The newest preflight that was told of it."""
        return next((one for one in self.happenings if one.what == _SAID["preflight"]), None)


def of_node(person: Person, name: str) -> NodePage | None:
    """Return what a person's runs say of a node, None when none of them names it."""
    runs = dict(visible_runs(person).order_by().values_list("pk", "slug"))
    line = next((one for one in node_lines.lines(person) if one.name == name), None)
    stays = _stays(runs, name)
    devices = _devices(runs, name)
    happenings = _happenings(person, runs, name, stays, line)
    if line is None:
        if not stays and not devices and not happenings:
            return None
        line = NodeLine(name)
    return NodePage(line, stays, happenings, devices)


def _stays(runs: dict[int, str], name: str) -> list[Stay]:
    rows = NodeStay.objects.filter(run__in=runs, node=name).order_by("-pk")[:STAYS]
    attempts = {
        (run, number): (launched, exited)
        for run, number, launched, exited in Attempt.objects.filter(run__in={row.run_id for row in rows})
        .order_by("run_id", "number")
        .values_list("run_id", "number", "launched_at", "exited_at")
    }
    named = set(
        NodeStay.objects.filter(run__in={row.run_id for row in rows})
        .order_by()
        .values_list("run_id", "attempt")
        .distinct()
    )
    mine = {(row.run_id, row.attempt) for row in rows}
    found = []
    for row in rows:
        launched, exited = attempts.get((row.run_id, row.attempt), (None, None))
        before, after = ((row.run_id, row.attempt + by) for by in (-1, 1))
        # Only between two launches that named their nodes is anything known to be swapped.
        words = ["in"] if before in named and before not in mine else []
        words += ["out after it"] if after in named and after not in mine else []
        ranks = [rank for rank in row.ranks if isinstance(rank, int)]
        found.append(
            Stay(
                runs[row.run_id],
                row.attempt,
                formatting.ranks(ranks) if ranks else "not told",
                launched,
                exited,
                ", and ".join(words),
                row.switch,
            )
        )
    return found


def _happenings(
    person: Person, runs: dict[int, str], name: str, stays: Iterable[Stay], line: NodeLine | None
) -> list[Happening]:
    found = [
        Happening(row.occurred_at, _SAID[row.kind], _says(row), runs[row.run_id], row.attempt, row.step)
        for row in NodeEvent.objects.filter(run__in=runs, node=name).order_by("-occurred_at", "-pk")[:EVENTS]
    ]
    projects = Membership.objects.filter(person=person).values_list("project_id", flat=True)
    reports = FleetReport.objects.filter(project__in=projects, node=name).order_by("-last_at", "-pk")
    for report in reports[:REPORTS]:
        over = ", over" if report.state == "resolved" else ""
        times = f", told {formatting.count(report.times)} times" if report.times > 1 else ""
        found.append(
            Happening(
                report.started_at or report.received_at,
                "report",
                f"{report.source}: {report.title}{times}{over}",
                runs.get(report.run_id or 0, ""),
            )
        )
    found += [
        Happening(
            incident.opened_at,
            "incident",
            incident.title,
            runs.get(incident.run_id, ""),
            incident.attempt,
            incident.first_bad.get("step") if isinstance(incident.first_bad, dict) else None,
            incident.pk,
        )
        for incident in Incident.objects.filter(pk__in=line.incidents if line else []).order_by("-pk")
    ]
    for stay in stays:
        if "in" in stay.swapped.split(",")[0].split() and stay.since:
            found.append(Happening(stay.since, "swapped in", "", stay.run, stay.attempt))
        if "out" in stay.swapped and stay.until:
            found.append(Happening(stay.until, "swapped out", "", stay.run, stay.attempt))
    return sorted(found, key=lambda one: one.at, reverse=True)[:EVENTS]


def _says(row: NodeEvent) -> str:
    """Return what an event told, its known words first."""
    data: dict[str, Any] = row.data
    pieces = [] if row.rank is None else [f"rank {row.rank}"]
    if row.kind == "xid":
        code, kind, words = xid(data)
        if code is not None:
            return ", ".join([*pieces, f"Xid {code}, {words} ({kind})"])
    if row.kind == "preflight":
        return _preflight(data)
    for key in ("xid", "state", "reason", "message", "detail", "gpu", "gpu_uuid", "port", "temp_c", "ticket"):
        value = data.get(key)
        if isinstance(value, str | int | float) and not isinstance(value, bool) and value != "":
            pieces.append(
                f"{key.replace('_', ' ')} {value}" if key not in {"message", "detail"} else str(value)
            )
    rest = len(data.keys() - {"xid", "state", "reason", "message", "detail", "gpu", "gpu_uuid", "port"})
    return ", ".join(pieces) or (
        f"{formatting.plural(rest, 'value')} told" if rest else "nothing more was told"
    )


def _preflight(data: dict[str, Any]) -> str:
    """Return "passed, busbw gbps 412, min ratio 0.9, ratio 0.97": the verdict, then what was measured."""
    passed = verdict(data)
    measured = [
        f"{key.replace('_', ' ')} {value}"
        for key, value in sorted(data.items())
        if isinstance(value, str | int | float)
        and not isinstance(value, bool)
        and verdict({key: value}) is None
    ]
    said = "no verdict told" if passed is None else "passed" if passed else "failed"
    return ", ".join([said, *measured[:_MEASURED]])


def _devices(runs: dict[int, str], name: str) -> list[Device]:
    """Return the newest reading of each device, in the order of its name."""
    rows = NodeReading.objects.filter(run__in=runs, node=name).order_by("device", "-at").distinct("device")
    uuids = _uuids(runs, name)
    found = []
    for row in sorted(rows, key=lambda row: (len(row.device), row.device)):
        values = [_value(row, metric, unit) for metric, unit in SHOWN]
        rose = [f"{key.replace('_', ' ')} +{value:,.0f}" for key, value in sorted(row.grown.items()) if value]
        found.append(
            Device(
                row.device or "node",
                uuids.get(row.device, ""),
                values,
                ", ".join(rose) or ("none rose" if row.grown else "not measured"),
                row.at,
                runs[row.run_id],
            )
        )
    return found


def _value(row: NodeReading, metric: str, unit: str) -> str:
    last, worst = row.last.get(metric), row.worst.get(metric)
    if last is None:
        return "not measured"
    text = f"{formatting.significant(last, 4)}{formatting.NBSP}{unit}"
    if worst:
        word = "lowest" if metric == "sm_clock_mhz" else "highest"
        text += f", {word} {formatting.significant(worst[0], 4)} at step {formatting.count(int(worst[1]))}"
    return text


def _uuids(runs: dict[int, str], name: str) -> dict[str, str]:
    newest = NodeStay.objects.filter(run__in=runs, node=name).order_by("-pk").first()
    told = newest.gpu_uuids if newest is not None else []
    return {f"GPU {index}": str(uuid)[:80] for index, uuid in enumerate(told)}
