"""What the product says of one case: its detectors over what the ranks posted, as the server runs them."""

from typing import Any

import msgspec

from andon.detect.cells import BadCells, concat, first_bad
from andon.detect.finding import Finding
from andon.detect.grad_norm import GradNorm
from andon.detect.nonfinite import bad_cells
from andon.detect.rank_loss import RankLoss
from andon.detect.straggler import Straggler
from andon.detect.topology import Topology
from andon.diagnose.gather import data
from andon.diagnose.record import Posted, Record
from andon.policy import Policy
from andon.wire import Event, Frame
from campaign.cases import FIRST
from campaign.posts import Posts
from campaign.trainer import GROUPS


class History:
    """The healthy steps before every case, as they were posted: what the server's detectors know."""

    def __init__(self, topology: str, posts: Posts) -> None:
        groups = GROUPS.get(topology)
        self.topology = Topology.from_groups(groups) if groups is not None else None
        self.norms = [(event.step, event.data["grad_norm"]) for event in posts.of("step")]
        self.batches = posts.of("batch.seen")
        self.frames = [frame for frame in posts.frames if frame.stream == "rank"]


def read(posts: Posts, history: History) -> dict[str, Any]:
    """Return what is said, ready for JSON."""
    ranks = [frame for frame in posts.frames if frame.stream == "rank"]
    layers = [frame for frame in posts.frames if frame.stream == "layer"]
    bad = _bad(ranks, layers, history.topology)
    return {
        "first_bad": bad,
        "batches": [_batch([*history.batches, *posts.of("batch.seen")], cell) for cell in bad],
        "verdicts": [_verdict(event.data, event.step) for event in posts.of("verdict")],
        "grad_norm": _grad_norm(posts, history),
        "ranks": _by_rank(ranks, history),
        "straggler": _straggler(ranks, history),
        "checksum": [[event.step, event.data] for event in posts.of("checksum.report")],
        "twin": [[event.step, event.data] for event in posts.of("twin.report")],
        "actions": [[event.step, event.data["action"]] for event in posts.of("action")],
    }


def _bad(ranks: list[Frame], layers: list[Frame], topology: Topology | None) -> list[dict[str, Any]]:
    """Return the first-bad cell, and that of every later step that was bad by itself."""
    rows = concat(bad_cells(frame) for frame in ranks)
    lanes = concat(bad_cells(frame) for frame in layers)
    found, since = [], 0
    while (first := first_bad(rows, topology=topology, layers=_or_none(lanes), since_step=since)) is not None:
        found.append(first.to_document())
        since = first.step + 1
    return found


def _batch(seen: list[Event], cell: dict[str, Any]) -> dict[str, Any]:
    """Return what the diagnosis says of the batch of a cell, and which samples it held."""
    events = [
        Posted(id=str(number), type=one.type, step=one.step, rank=one.rank, data=one.data)
        for number, one in enumerate(seen)
    ]
    record = Record(incident="I-1", first=cell, events=events)
    here = [one.data for one in seen if one.step == cell["step"] and one.rank in cell["ranks"]]
    facts = [fact.kind for fact in data.facts(record)]
    return {"facts": facts, "samples": [name for one in here for name in one.get("samples", [])]}


def _or_none(cells: BadCells) -> BadCells | None:
    return cells if len(cells) else None


def _verdict(said: dict[str, Any], step: int | None) -> dict[str, Any]:
    kept = ("kind", "severity", "would", "mode", "phase", "module", "what", "micro_batch", "detail")
    return {"step": step} | {name: said[name] for name in kept if said.get(name) is not None}


def _grad_norm(posts: Posts, history: History) -> list[dict[str, Any]]:
    detector = GradNorm(Policy().grad_norm)
    for step, norm in history.norms:
        detector.update(step or 0, norm)
    found: list[Finding] = []
    for event in posts.of("step"):
        norm = event.data.get("grad_norm")
        found += detector.update(event.step or 0, norm if isinstance(norm, float) else None)
    return [_plain(one) for one in found]


def _by_rank(ranks: list[Frame], history: History) -> list[dict[str, Any]]:
    detector = RankLoss(Policy().spike)
    for frame in history.frames:
        detector.update(frame)
    return [_plain(one) for frame in ranks for one in detector.update(frame)]


def _straggler(ranks: list[Frame], history: History) -> list[dict[str, Any]]:
    detector = Straggler(history.topology)
    found = [one for frame in ranks for one in detector.update(frame)]
    return [_plain(one) for one in (*found, *detector.close()) if (one.step or 0) > FIRST]


def _plain(finding: Finding) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(finding)
    kept = ("kind", "severity", "step", "score", "lanes", "detail")
    return {name: document[name] for name in kept}
