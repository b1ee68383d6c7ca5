"""What it means that a failure came back in its watch window.

The step, the samples and the nodes of the two failures are compared; what differs is innocent. Loss spikes
come from a batch together with a state of the weights, so the same batches replayed from an earlier
checkpoint need not spike (PaLM, arXiv:2204.02311, §5.1): one that comes back on other samples is no fault
of the data.
"""

from typing import Any, Literal

import msgspec

from andon.intervals import Windows, common

Kind = Literal["same_data", "same_step", "other_nodes", "same_node", "other_step", "none"]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two failures.

    Args:
        step: its first bad step; None: not known.
        samples: what its bad steps read, by loader position; () = not known.
        suspects: nodes of the ranks that went bad by themselves; empty = none named.
        ran_on: every node of its attempt; empty = not told.
        excluded: nodes its launch had to leave out.
    """

    step: int | None
    samples: Windows = ()
    suspects: frozenset[str] = frozenset()
    ran_on: frozenset[str] = frozenset()
    excluded: frozenset[str] = frozenset()

    @property
    def named(self) -> frozenset[str]:
        """The suspects, where they are not simply all nodes: then they name none."""
        return frozenset() if self.suspects >= self.ran_on and self.ran_on else self.suspects


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """How it came back, in one word and in a sentence, with what was compared."""

    kind: Kind
    says: str
    numbers: dict[str, Any]


def verdict(before: Failure, after: Failure) -> Verdict:
    """Return what the second failure says about the cause of the first."""
    kind, says = _verdict(before, after)
    numbers = {
        "recurrence": kind,
        "step_before": before.step,
        "step_after": after.step,
        "samples_before": [[window.start, window.stop] for window in before.samples],
        "samples_after": [[window.start, window.stop] for window in after.samples],
        "nodes_before": sorted(before.named),
        "nodes_after": sorted(after.named),
    }
    return Verdict(kind=kind, says=says, numbers=numbers)


def _verdict(before: Failure, after: Failure) -> tuple[Kind, str]:
    if before.step is None or after.step is None:
        return "none", "it failed again; without a bad step of both, nothing more can be said"
    known = bool(before.samples and after.samples)
    again = bool(known and common(before.samples, after.samples))
    elsewhere, nodes = _elsewhere(before, after), sorted(before.named & after.named)
    on = f" on {', '.join(nodes[:3])}" if nodes else ""
    if again and elsewhere:
        return "other_nodes", "the same samples failed again on other nodes: data or software, not hardware"
    if again:
        return "same_data", f"the same samples failed again{on}: data first"
    if after.step == before.step:
        at = f"step {after.step:,} failed again"
        if known:
            at += " on other samples"
            if elsewhere:
                return "other_nodes", f"{at} and other nodes: software or the schedule at this step"
            return "same_step", f"{at}{on}: software or the schedule at this step, not these samples"
        if elsewhere:
            return "other_nodes", f"{at} on other nodes: software or data, not hardware"
        return "same_step", f"{at}{on}: data, software or hardware"
    at = f"it failed again at step {after.step:,}, before at step {before.step:,}"
    if nodes:
        return "same_node", f"{at}, with other data{on} again: hardware first"
    return "other_step", f"{at}, with other data: optimisation, not data"


def _elsewhere(before: Failure, after: Failure) -> bool:
    """Whether nothing that was suspected can have had a part in the second failure."""
    if not before.named:
        return False
    if (after.ran_on or before.named <= after.excluded) and not before.named & after.ran_on:
        return True
    return bool(after.named) and not before.named & after.named
