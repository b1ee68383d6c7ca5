"""Find a recording's answer again, from its posts alone, by the detectors everybody uses."""

from typing import Any

from andon.detect.cells import BadCells, concat, first_bad
from andon.detect.nonfinite import bad_cells
from andon.detect.spike import RobustBaseline
from andon.policy import SpikeRules
from andon.recording import Recording


def derive(recording: Recording) -> dict[str, Any]:
    """Return what the posts of attempt 1 show, under the same names as the recording's answer."""
    if recording.description.answer["kind"] == "nonfinite":
        return _nonfinite(recording)
    return _spike(recording)


def _nonfinite(recording: Recording) -> dict[str, Any]:
    ranks: list[BadCells] = []
    layers: list[BadCells] = []
    for post in recording.posts(1):
        if post.kind == "frame":
            frame = post.frame()
            (ranks if frame.stream == "rank" else layers).append(bad_cells(frame))
    found = first_bad(concat(ranks), layers=concat(layers))
    if found is None:
        return {"step": None}
    return {
        "step": found.step,
        "ranks": list(found.ranks),
        "phase": found.phase.name.lower(),
        "layer": found.layer,
        "sample": _empty_sample(recording, found.step, found.ranks[0]) if found.ranks else None,
    }


def _empty_sample(recording: Recording, step: int, rank: int) -> str | None:
    """Return the id of the sample without any label in that rank's batch."""
    for post in recording.posts(1):
        for event in post.events if post.kind == "event" else []:
            if event["type"] == "batch.seen" and event["step"] == step and event["rank"] == rank:
                data = event["data"]
                for name, density in zip(data["samples"], data["mask_density"], strict=True):
                    if density == 0:
                        return str(name)
    return None


def _spike(recording: Recording) -> dict[str, Any]:
    baseline = RobustBaseline(SpikeRules())
    warned: int | None = None
    for post in recording.posts(1):
        for event in post.events if post.kind == "event" else []:
            if event["type"] != "step":
                continue
            verdict = baseline.update(event["data"]["loss"])
            if verdict.severity is not None and warned is None:
                warned = event["step"]
            if verdict.severity == "halt":
                return {"step": warned, "halt_step": event["step"]}
    return {"step": warned, "halt_step": None}
