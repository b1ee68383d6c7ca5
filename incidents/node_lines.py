"""The nodes of a person's runs in one list: what is wrong with each, and the most troubled first.

Read in a handful of statements whatever the fleet's size: a node has no row of its own (see
`runs.models.nodes`), so that what is told of it is what the person's own runs say.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from django.utils import timezone

from runs import formatting
from runs.access import visible_runs
from runs.models import FleetReport, Membership, Person
from runs.overview import FRESH
from runs.rows import raw_cursor

SINCE = timedelta(days=7)  # what happened longer ago does not make a node troubled today
HOT_C = 85.0  # an H100 or H200 slows its clocks near 87 °C (NVIDIA H100 product brief, thermal limits)
IN_SERVICE = {"", "ok", "healthy", "ready", "in service", "released"}


@dataclass(slots=True)
class NodeLine:
    """One node, as seen from afar."""

    name: str
    state: str = ""  # as node.state told it last
    state_at: datetime | None = None
    reason: str = ""
    runs: list[str] = field(default_factory=list)  # slugs of the unfinished runs on it now
    ranks: str = ""
    incidents: list[int] = field(default_factory=list)  # that began on it, newest first
    open_incident: bool = False
    kinds: dict[str, int] = field(default_factory=dict)  # xid | ecc | thermal | link -> how often
    links: int = 0  # how far link errors rose in the attempts that run
    hottest: float | None = None
    slowest: float | None = None
    reports: int = 0  # of the fleet's own tools, not over yet
    swapped: str = ""  # in | out, between the two newest attempts of a run
    silent_since: datetime | None = None
    newest: datetime | None = None

    @property
    def out_of_service(self) -> bool:
        """Whether somebody took it out of service, or suspects it."""
        return self.state.lower() not in IN_SERVICE

    @property
    def xids(self) -> int:
        """How many Xid errors were told."""
        return self.kinds.get("xid", 0)

    @property
    def eccs(self) -> int:
        """How many ECC errors were told."""
        return self.kinds.get("ecc", 0)

    @property
    def link_errors(self) -> int:
        """How far its counters of link errors rose; where it has none, how many were told as events."""
        return self.links or self.kinds.get("link", 0)

    @property
    def trouble(self) -> tuple[int, ...]:
        """What nodes are sorted by: the greater, the sooner a person should look."""
        hot = self.hottest is not None and self.hottest >= HOT_C
        return (
            int(self.open_incident) + int(self.out_of_service),
            len(self.incidents) + self.xids + self.eccs,
            self.reports + int(self.silent_since is not None),
            self.links + self.kinds.get("link", 0) + self.kinds.get("thermal", 0) + int(hot),
            int(bool(self.swapped)),
        )

    @property
    def troubled(self) -> bool:
        """Whether anything but a swap is known against it."""
        return any(self.trouble[:-1])


# The two newest attempts of each run: the newest says where it is, both say what was swapped.
_STAYS = """
WITH launched AS (
    SELECT run_id, number, exited_at, launched_at,
           row_number() OVER (PARTITION BY run_id ORDER BY number DESC) AS place
    FROM runs_attempt a WHERE run_id = ANY(%(runs)s)
    AND EXISTS (SELECT FROM runs_nodestay s WHERE s.run_id = a.run_id AND s.attempt = a.number)
)
SELECT s.node, r.slug, l.place, r.finished_at IS NULL AND l.exited_at IS NULL, s.rank_first, s.rank_last,
       p.nodes ->> s.node, p.last_post_at, r.id
FROM launched l JOIN runs_nodestay s ON s.run_id = l.run_id AND s.attempt = l.number
JOIN runs_run r ON r.id = l.run_id LEFT JOIN runs_runprogress p ON p.run_id = l.run_id
WHERE l.place <= 2 ORDER BY r.id, l.place, s.rank_first, s.node
"""
_EVENTS = """
SELECT node, kind, count(*), max(occurred_at) FROM runs_nodeevent
WHERE run_id = ANY(%(runs)s) AND occurred_at >= %(since)s AND kind <> 'state' GROUP BY node, kind
"""
_STATES = """
SELECT DISTINCT ON (node) node, coalesce(data ->> 'state', ''), coalesce(data ->> 'reason', ''), occurred_at
FROM runs_nodeevent WHERE run_id = ANY(%(runs)s) AND kind = 'state' ORDER BY node, occurred_at DESC, id DESC
"""
_READINGS = """
SELECT n.node, max((n.worst -> 'gpu_temp_c' ->> 0)::float8), min((n.worst -> 'sm_clock_mhz' ->> 0)::float8),
       sum(coalesce((n.grown ->> 'nvlink_errors')::float8, 0)
           + coalesce((n.grown ->> 'ib_symbol_errors')::float8, 0)
           + coalesce((n.grown ->> 'pcie_replays')::float8, 0)),
       sum(coalesce((n.grown ->> 'xid_count')::float8, 0)), sum(coalesce((n.grown ->> 'ecc_dbe')::float8, 0)),
       max(n.at)
FROM (SELECT run_id, max(number) AS number FROM runs_attempt WHERE run_id = ANY(%(runs)s) GROUP BY run_id) a
JOIN runs_nodereading n ON n.run_id = a.run_id AND n.attempt = a.number
GROUP BY n.node
"""
# Only a first-bad cell of a few ranks names a machine.
_INCIDENTS = """
SELECT DISTINCT s.node, i.id, i.state IN ('open', 'approved', 'resuming', 'watching')
FROM incidents_incident i
CROSS JOIN LATERAL jsonb_array_elements(
    CASE jsonb_typeof(i.first_bad -> 'ranks') WHEN 'array' THEN i.first_bad -> 'ranks' ELSE '[]' END) e (rank)
CROSS JOIN LATERAL (
    SELECT CASE jsonb_typeof(e.rank) WHEN 'number' THEN (e.rank #>> '{}')::numeric END AS number) r
JOIN runs_nodestay s ON s.run_id = i.run_id AND s.attempt = i.attempt AND s.rank_first <= r.number
     AND s.rank_last >= r.number AND s.ranks @> e.rank
WHERE i.run_id = ANY(%(runs)s) AND i.opened_at >= %(since)s
      AND CASE jsonb_typeof(i.first_bad -> 'ranks') WHEN 'array'
          THEN jsonb_array_length(i.first_bad -> 'ranks') ELSE 0 END BETWEEN 1 AND 16
ORDER BY i.id DESC
"""


def lines(person: Person, *, now: datetime | None = None) -> list[NodeLine]:
    """Return every node a person's runs name, the most troubled first, then by name."""
    now = now or timezone.now()
    runs = list(visible_runs(person).order_by().values_list("pk", flat=True))
    found: dict[str, NodeLine] = {}

    def line(name: str) -> NodeLine:
        return found.setdefault(name, NodeLine(name))

    values = {"runs": runs, "since": now - SINCE}
    with raw_cursor() as cursor:
        cursor.execute(_STAYS, values)
        _stays(cursor.fetchall(), line, now)
        cursor.execute(_EVENTS, values)
        for node, kind, number, newest in cursor:
            one = line(node)
            one.kinds[kind], one.newest = int(number), max(newest, one.newest or newest)
        cursor.execute(_STATES, values)
        for node, state, reason, at in cursor:
            one = line(node)
            one.state, one.reason, one.state_at = state, reason, at
        cursor.execute(_READINGS, values)
        for node, hottest, slowest, links, xids, double_bits, at in cursor:
            one = line(node)
            one.hottest, one.slowest, one.links = hottest, slowest, int(links or 0)
            for kind, counted in (("xid", xids), ("ecc", double_bits)):
                if counted:
                    one.kinds[kind] = max(one.kinds.get(kind, 0), int(counted))
            one.newest = max(at, one.newest or at)
        cursor.execute(_INCIDENTS, values)
        for node, incident, is_open in cursor:
            one = line(node)
            one.incidents.append(int(incident))
            one.open_incident = one.open_incident or bool(is_open)
    for node, number in _reports(person):
        line(node).reports = number
    return sorted(found.values(), key=lambda one: ([-part for part in one.trouble], one.name))


def _stays(rows: Iterable[Sequence[object]], line: Callable[[str], NodeLine], now: datetime) -> None:
    """Take in where the runs are, what left and came with the newest launch, and who is not heard."""
    by_run: dict[int, list[dict[str, Sequence[object]]]] = defaultdict(lambda: [{}, {}])
    for row in rows:
        by_run[int(str(row[8]))][int(str(row[2])) - 1][str(row[0])] = row
    for newest, before in by_run.values():
        for name, row in newest.items():
            one = line(name)
            if row[3]:
                one.runs.append(str(row[1]))
                if len(one.runs) > 1:
                    one.ranks = ""  # of which of them, a line has no room to say
                elif row[4] is not None:
                    one.ranks = f"{row[4]}{formatting.RANGE}{row[5]}" if row[4] != row[5] else f"{row[4]}"
                _heard(one, row, now)
            if before and name not in before:
                one.swapped = "in"
        for name in before.keys() - newest.keys():
            one = line(name)
            one.swapped = one.swapped or "out"


def _heard(one: NodeLine, row: Sequence[object], now: datetime) -> None:
    """A node is silent when others of its run were heard within a minute and it was not."""
    heard, post_at = row[6], row[7]
    if not isinstance(post_at, datetime) or now - post_at > FRESH or not isinstance(heard, str):
        return
    moment = datetime.fromisoformat(heard)
    if now - moment > FRESH:
        one.silent_since = moment


def _reports(person: Person) -> list[tuple[str, int]]:
    projects = Membership.objects.filter(person=person).values_list("project_id", flat=True)
    counted: dict[str, int] = defaultdict(int)
    firing = FleetReport.objects.filter(project__in=projects, state="firing").exclude(node="")
    for node in firing.order_by("pk").values_list("node", flat=True)[:20_000]:
        counted[node] += 1
    return sorted(counted.items())
