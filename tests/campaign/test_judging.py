"""The judge of the campaign: what was said or done otherwise is told, and no miss goes unlisted."""

import copy
import json

import pytest

from campaign import report
from campaign.cases import Case, Expect
from campaign.judging import judge

EXPECT = Expect("first_bad", 1003, 1003, (2,), "backward", skips=(1003,), halt=1004, bad_steps=(1003, 1004))
FAULT = Case("a fault", "ddp", "backward, nan", "backward", 2, 1003, expect=EXPECT)
CLEAN = Case("ordinary", "ddp", "clean", "none")
CELL = {"step": 1003, "ranks": [2], "phase": "backward", "micro_batch": None}


def played(halt=1004, code=93, **said):
    acts = [[step, step >= 1003, step == halt, False, "1.0", 0, None] for step in range(1001, 1005)]
    rank = {"acts": acts, "code": code, "changed": [1001, 1002], "held": True}
    return [{**copy.deepcopy(rank), **({"said": said} if number == 0 else {})} for number in range(4)]


def ordinary(**said):
    rank = {"acts": [[1001, False, False, False, "1.0", 0, None]], "code": None, "changed": [1001]}
    return [{**copy.deepcopy(rank), **({"said": said} if number == 0 else {})} for number in range(4)]


def test_what_is_as_it_must_be_is_found():
    verdict = judge(FAULT, played(first_bad=[CELL]))
    assert (verdict.found, verdict.wrong, verdict.together, verdict.applied) == (True, [], True, 0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"step": 1004}, "first bad at step 1004, not 1003"),
        ({"ranks": [1]}, "first bad on ranks [1], not [2]"),
        ({"ranks": []}, "first bad on ranks [], not [2]"),
        ({"phase": "reduce"}, "first bad in reduce, not in backward"),
    ],
)
def test_another_rank_step_or_phase_is_wrong(change, says):
    verdict = judge(FAULT, played(first_bad=[CELL | change]))
    assert (verdict.wrong, verdict.missed) == ([says], True)


def test_nothing_said_is_wrong():
    assert judge(FAULT, played(first_bad=[])).wrong == ["no cell was called bad"]


def test_a_bad_update_on_one_rank_counts():
    ranks = played(first_bad=[CELL])
    ranks[3]["changed"].append(1004)
    verdict = judge(FAULT, ranks)
    assert verdict.applied == 1
    assert "1 bad updates reached the weights of a rank" in verdict.wrong


def test_a_rank_that_acts_alone_is_seen():
    ranks = played(first_bad=[CELL])
    ranks[2]["acts"][-1][2] = False
    assert judge(FAULT, ranks).together is False


def test_a_halt_at_another_step_is_wrong():
    assert "halted at 1003, not at 1004" in " ".join(judge(FAULT, played(1003, first_bad=[CELL])).wrong)


@pytest.mark.parametrize(
    "said",
    [
        {"first_bad": [CELL]},
        {"verdicts": [{"kind": "loss_spike", "severity": "halt"}]},
        {"twin": [[1005, {"status": "differs"}]]},
        {"restore": [["rng", 1, ""]]},
    ],
)
def test_a_clean_control_of_which_anything_is_said_is_wrong(said):
    assert judge(CLEAN, ordinary()).wrong == []
    assert judge(CLEAN, ordinary(**said)).wrong


def test_a_rank_called_slow_in_a_clean_control_is_counted_apart():
    verdict = judge(CLEAN, ordinary(straggler=[{"kind": "straggler"}]))
    assert verdict.wrong == []
    assert report.notes([verdict]) == {report.SLOW: 1}


def test_a_control_that_is_held_is_wrong():
    verdict = judge(CLEAN, [one | {"code": 93} for one in ordinary()])
    assert verdict.held
    assert verdict.wrong


def test_every_miss_is_listed_and_the_goals_follow(tmp_path):
    blind = Case(
        "a blind one", "fsdp2", "bit flip", "x", expect=Expect("first_bad", miss="nobody can see it")
    )
    quiet = ordinary(first_bad=[])
    verdicts = [judge(FAULT, played(first_bad=[])), judge(blind, quiet), judge(CLEAN, ordinary())]
    met = report.goals(verdicts, whole=False)
    assert met["every fault right in rank, step and phase, or its miss explained"] is False
    assert report.misses(verdicts) == [
        "WRONG   a fault: no cell was called bad",
        "missed  a blind one: nobody can see it",
    ]
    assert [row[1:] for row in report.rows(verdicts)[1:]] == [
        ["1", "0", "0", "1"],
        ["1", "0", "1", "0"],
        ["1", "1", "0", "0"],
    ]
    assert all(report.goals(verdicts[1:], whole=False).values())
    assert report.goals(verdicts, whole=True)["at least 350 faults"] is False
    written = json.loads(report.write(tmp_path, verdicts, met, {"ddp": 1.0}).read_text())
    assert [one["name"] for one in written["cases"]] == ["a fault", "a blind one", "ordinary"]
