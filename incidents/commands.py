"""Ready commands and links out, with the names of the first bad cell filled in.

Names come from trainers and end up in somebody's shell: every one is quoted, also for the shell on the other
end of ssh, and one that no terminal should be given makes no command at all.
"""

import re
import shlex
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from django.conf import settings

from incidents import launched
from incidents.launched import Place
from incidents.models import Incident
from runs.formatting import inert
from runs.models import FirstBad

BEFORE, AFTER = timedelta(minutes=30), timedelta(minutes=10)  # around the first bad moment
_KERNEL = timedelta(minutes=10)
_MOST_CHARS = 255
# A name with any of these could hide, reorder or run something where it is pasted.
_UNSAFE = re.compile(r"[^\x20-\x7e]")


@dataclass(frozen=True, slots=True)
class Command:
    """One line for a shell, and what it shows."""

    says: str
    text: str


@dataclass(frozen=True, slots=True)
class Ready:
    """Commands and links of one incident; `left_out` says why one is not there."""

    commands: list[Command]
    links: list[tuple[str, str]]
    left_out: str


def of_incident(incident: Incident) -> Ready:
    """Return what can be run, and where to look, for an incident."""
    ranks = list(incident.first_bad.get("ranks") or [])
    places = launched.places(incident.run_id, incident.attempt, ranks[:1])
    place = places[0] if places else None
    at = _moment(incident, ranks)
    safe = place is not None and is_safe(place.node)
    commands = _of_andon(incident)
    if place is not None and safe:
        commands += _of_node(place, at)
    commands += _of_megatron(incident)
    left_out = ""
    if place is not None and not safe:
        left_out = f"No command names the node “{inert(place.node, 48)}”: its name is not plain text."
    elif place is None:
        left_out = "No command names a node: it is not known."
    return Ready(commands, _links(incident, ranks, place, at), left_out)


def is_safe(name: str) -> bool:
    """Return whether a name may stand in a command: plain text that no program takes for an option."""
    return 0 < len(name) <= _MOST_CHARS and not name.startswith("-") and _UNSAFE.search(name) is None


def _moment(incident: Incident, ranks: list[int]) -> datetime:
    cells = FirstBad.objects.filter(
        run_id=incident.run_id,
        attempt=incident.attempt,
        stream="rank",
        step=incident.first_bad.get("step") or -1,
    )
    if ranks:
        cells = cells.filter(lane=str(ranks[0]))
    at: datetime | None = cells.exclude(occurred_at=None).values_list("occurred_at", flat=True).first()
    return at or incident.opened_at


def _of_andon(incident: Incident) -> list[Command]:
    number = incident.pk
    bag = f"incident-{number}.zip"
    api = f"{settings.PUBLIC_URL}/api/v1/incidents/{number}"
    return [
        Command("the evidence as a bag", shlex.join(["python", "manage.py", "export_bag", str(number), bag])),
        Command("check the bag offline", shlex.join(["andon", "verify", bag])),
        # The token stays in the environment: a command line is seen by everybody on the machine.
        Command("this incident as JSON", f'curl -sS -H "Authorization: Bearer $TOKEN" {shlex.quote(api)}'),
    ]


def _of_megatron(incident: Incident) -> list[Command]:
    """A skip window is a list of iterations on Megatron's command line; the permit names the window."""
    plan = incident.plans.order_by("-number").first()
    if plan is None or plan.skip is None:
        return []
    told = launched.facts(incident.run_id, {incident.attempt}).get(incident.attempt)
    # A launch that tells its wrapper has the monitor in its own loop, whose loader skips by itself.
    if told is None or "parallelism" in told:
        return []
    batch = plan.numbers.get("batch_samples")
    if not isinstance(batch, int) or batch < 1:
        return []
    words = ["andon", "megatron", "args", "permit.json", "--global-batch-size", str(batch)]
    return [Command("the plan as arguments of Megatron's next launch", shlex.join(words))]


def _of_node(place: Place, at: datetime) -> list[Command]:
    since, until = (f"{one.astimezone(UTC):%Y-%m-%d %H:%M:%S}" for one in (at - _KERNEL, at + _KERNEL))
    journal = ["sudo", "journalctl", "-k", "--utc", f"--since={since}", f"--until={until}", "--no-pager"]
    commands = [Command("kernel log of the node", _ssh(place.node, journal))]
    uuid = next((one for one in place.gpu_uuids if is_safe(one)), "")
    gpu = uuid or (str(place.gpus[0]) if place.gpus else "")
    if gpu:
        commands.append(Command("its GPU now", _ssh(place.node, ["nvidia-smi", "-q", "-i", gpu])))
    if place.gpus:
        diag = ["dcgmi", "diag", "-r", "3", "-i", str(place.gpus[0]), "-j"]
        commands.append(
            Command("long diagnostic of its GPU (15 min, the GPU must be idle)", _ssh(place.node, diag))
        )
    return commands


def _ssh(node: str, command: list[str]) -> str:
    # ssh joins its words and gives them to the other shell: quoted once for each of the two.
    return shlex.join(["ssh", "--", node, shlex.join(command)])


def _links(incident: Incident, ranks: list[int], place: Place | None, at: datetime) -> list[tuple[str, str]]:
    since, until = (at - BEFORE).astimezone(UTC), (at + AFTER).astimezone(UTC)
    values: dict[str, object] = {
        "run": incident.run.slug,
        "attempt": incident.attempt,
        "incident": incident.pk,
        "node": place.node if place else None,
        "rank": ranks[0] if ranks else None,
        "step": incident.first_bad.get("step"),
        "gpu_uuid": place.gpu_uuids[0] if place and place.gpu_uuids else None,
        "from": f"{since:%Y-%m-%dT%H:%M:%SZ}",
        "to": f"{until:%Y-%m-%dT%H:%M:%SZ}",
        "from_ms": int(since.timestamp() * 1000),
        "to_ms": int(until.timestamp() * 1000),
    }
    filled = ((link.name, link.fill(values)) for link in settings.LINKS)
    return [(name, url) for name, url in filled if url is not None]
