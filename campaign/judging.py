"""What was said and done in a case against what had to be."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from andon import hold
from campaign.cases import Case

Said = dict[str, Any]
Ranks = list[dict[str, Any]]


@dataclass
class Verdict:
    """How a case ended.

    Attributes:
        found: the product said what it had to.
        wrong: what it said or did otherwise, in words.
        together: all ranks acted alike, at the same step.
        applied: bad updates that reached the weights of any rank.
        held: the ranks were stopped.
        slow: a rank was called slow in a clean control: on cores that others use, it may have been.
    """

    case: Case
    found: bool = False
    wrong: list[str] = field(default_factory=list)
    together: bool = True
    applied: int = 0
    held: bool = False
    slow: bool = False

    @property
    def missed(self) -> bool:
        """Whether a fault was not found where it is; an expected one is listed too."""
        return not self.case.clean and bool(self.wrong or not self.found)


def judge(case: Case, ranks: Ranks) -> Verdict:
    """Return the verdict on a case that the four ranks played."""
    verdict = Verdict(case)
    _judge_acts(verdict, ranks)
    said: Said = ranks[0].get("said") or {}
    expect = case.expect
    if case.clean:
        verdict.wrong += _not_clean(said)
        verdict.slow = bool(said.get("straggler"))
        verdict.found = not verdict.wrong
        return verdict
    told = _BY[expect.by](case, said, ranks)
    verdict.found = not told
    if not expect.miss:
        verdict.wrong += told
    return verdict


def _judge_acts(verdict: Verdict, ranks: Ranks) -> None:
    expect = verdict.case.expect
    acts, code = ranks[0]["acts"], ranks[0]["code"]
    verdict.together = all((one["acts"], one["code"]) == (acts, code) for one in ranks)
    if not verdict.together:
        verdict.wrong.append("the ranks did not act alike")
    verdict.held = code is not None
    skipped = tuple(step for step, skip, halt, *_ in acts if skip and not halt)
    halted = next((step for step, _, halt, *_ in acts if halt), None)
    if skipped != expect.skips:
        verdict.wrong.append(f"dropped the updates of {list(skipped)}, not of {list(expect.skips)}")
    if halted != expect.halt:
        verdict.wrong.append(f"halted at {halted}, not at {expect.halt}")
    stops = expect.halt is not None or expect.holds
    if code != (hold.EXIT_HELD if stops else None):
        verdict.wrong.append(f"left with {code}")
    if stops and not ranks[0].get("held", True):
        verdict.wrong.append("no hold file was written")
    bad = {*expect.bad_steps, *([halted] if halted is not None else [])}
    verdict.applied = sum(len(bad & set(one["changed"])) for one in ranks)
    if verdict.applied:
        verdict.wrong.append(f"{verdict.applied} bad updates reached the weights of a rank")


def _not_clean(said: Said) -> list[str]:
    wrong = [f"called step {cell['step']} bad" for cell in said.get("first_bad", [])]
    wrong += [f"said {one['kind']}" for one in said.get("verdicts", []) if one["severity"] == "halt"]
    for check in ("checksum", "twin"):
        wrong += [
            f"{check} {data['status']}" for _, data in said.get(check, []) if data["status"] == "differs"
        ]
    wrong += [f"{part} differs on rank {rank}" for part, rank, _ in said.get("restore", [])]
    return wrong


def _within(case: Case, step: int | None) -> bool:
    return step is not None and case.expect.first <= step <= case.expect.last


def _cell(case: Case, said: Said, ranks: Ranks) -> list[str]:
    cells = said["first_bad"]
    if not cells:
        return ["no cell was called bad"]
    first, expect = cells[0], case.expect
    wrong = []
    if not _within(case, first["step"]):
        wrong.append(f"first bad at step {first['step']}, not {expect.first}")
    if tuple(first["ranks"]) != expect.ranks:
        wrong.append(f"first bad on ranks {first['ranks']}, not {list(expect.ranks)}")
    if first["phase"] != expect.phase:
        wrong.append(f"first bad in {first['phase']}, not in {expect.phase}")
    if expect.micro is not None and first["micro_batch"] != expect.micro:
        wrong.append(f"first bad in micro-batch {first['micro_batch']}, not {expect.micro}")
    return wrong


def _verdict(case: Case, said: Said, _ranks: Ranks) -> list[str]:
    steps = [one["step"] for one in said["verdicts"] if one["kind"] == case.expect.phase]
    return _first(case, steps, case.expect.phase)


def _grad_norm(case: Case, said: Said, _ranks: Ranks) -> list[str]:
    steps = [one["step"] for one in said["grad_norm"] if one["kind"] == case.expect.phase]
    return _first(case, steps, case.expect.phase)


def _first(case: Case, steps: list[int], what: str) -> list[str]:
    if not steps:
        return [f"{what} was not said"]
    return [] if _within(case, steps[0]) else [f"{what} was said at step {steps[0]}"]


def _ranks(case: Case, said: Said, _ranks: Ranks) -> list[str]:
    found = [one for one in said["ranks"] if _within(case, one["step"])]
    named = tuple(found[0]["lanes"]) if found else ()
    return [] if named == case.expect.ranks else [f"loss of ranks {list(named)} was called odd"]


def _straggler(case: Case, said: Said, _ranks: Ranks) -> list[str]:
    found = said["straggler"]
    named = tuple(sorted({lane for one in found for lane in one["lanes"]}))
    if named != case.expect.ranks:
        return [f"ranks {list(named)} were called slow"]
    return _first(case, [one["step"] for one in found], "straggler")


def _checksum(case: Case, said: Said, _ranks: Ranks) -> list[str]:
    reports = [(step, data) for step, data in said["checksum"] if data["status"] == "differs"]
    if not reports:
        return ["replicas were never said to differ"]
    step, data = reports[0]
    named = tuple(one["rank"] for one in data["differing"])
    wrong = _first(case, [step], "the difference")
    if named != case.expect.ranks:
        wrong.append(f"replicas of ranks {list(named)} were said to differ")
    kinds = {name.split(".")[0] for one in data["differing"] for name in one["tensors"]}
    if f"{case.expect.phase}s" not in kinds:
        wrong.append(f"only {sorted(kinds)} were said to differ")
    return wrong


def _twin(case: Case, said: Said, _ranks: Ranks) -> list[str]:
    passed = [data["status"] for _, data in said["checksum"] if data["status"] == "differs"]
    if passed:
        return ["replica checksums found it, which spread errors never do"]
    reports = [(step, data) for step, data in said["twin"] if data["status"] == "differs"]
    if not reports:
        return ["twins were never said to differ"]
    step, data = reports[0]
    wrong = _first(case, [step], "the difference")
    named = tuple(one["rank"] for one in data["differing"])
    if named != case.expect.ranks:
        wrong.append(f"twins of ranks {list(named)} were said to differ")
    again = {one["again"] for one in data["differing"]}
    return wrong if again == {case.expect.phase} else [*wrong, f"called {sorted(map(str, again))}"]


def _restore(case: Case, said: Said, _ranks: Ranks) -> list[str]:
    found = {(part, rank) for part, rank, _ in said["restore"]}
    wanted = {(case.expect.phase, rank) for rank in case.expect.ranks}
    return [] if found == wanted else [f"named {sorted(found)}, not {sorted(wanted)}"]


def _ring(case: Case, _said: Said, ranks: Ranks) -> list[str]:
    wrong = []
    for rank, one in enumerate(ranks):
        steps = {steps[-1] for steps in one["repeats"]}
        wanted = {case.expect.first} if rank in case.expect.ranks else set()
        if case.topology == "pipeline" and rank - 2 in case.expect.ranks:
            continue  # the second stage of the same data
        if steps != wanted:
            wrong.append(f"rank {rank} was said to repeat a batch at {sorted(steps)}")
    return wrong


def _recurrence(case: Case, said: Said, _ranks: Ranks) -> list[str]:
    expect = case.expect
    steps = [*expect.skips, expect.halt]
    told = [(cell["step"], cell["ranks"], cell["phase"]) for cell in said["first_bad"]]
    wanted = [(step, [rank], expect.phase) for step, rank in zip(steps, expect.ranks, strict=True)]
    wrong = [] if told == wanted else [f"bad cells {told}, not {wanted}"]
    batches = said["batches"]
    if not all("batch_overlong" in one["facts"] for one in batches):
        wrong.append("a batch was not called overlong")
    common = set.intersection(*(set(one["samples"]) for one in batches)) if batches else set()
    return wrong if len(common) == 1 else [*wrong, f"samples in common: {sorted(common)}"]


def _acts(_case: Case, _said: Said, _ranks: Ranks) -> list[str]:
    return []


def _outside(case: Case, said: Said, _ranks: Ranks) -> list[str]:
    expect, wrong = case.expect, []
    if said["step"] != expect.first:
        wrong.append(f"stopped at step {said['step']}, not {expect.first}")
    if tuple(said["ranks"]) != expect.ranks:
        wrong.append(f"named ranks {said['ranks']}, not {list(expect.ranks)}")
    return wrong


_BY: dict[str, Callable[[Case, Said, Ranks], list[str]]] = {
    "acts": _acts,
    "checksum": _checksum,
    "first_bad": _cell,
    "grad_norm": _grad_norm,
    "outside": _outside,
    "ranks": _ranks,
    "recurrence": _recurrence,
    "restore": _restore,
    "ring": _ring,
    "straggler": _straggler,
    "twin": _twin,
    "verdict": _verdict,
}
