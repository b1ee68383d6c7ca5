"""Symptom, leading family and default plan: what the first answer says, and why."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.detect.cells import LOCAL_VALUE, REDUCED_ONLY, FirstBad, Phase
from andon.detect.finding import Finding
from andon.diagnose.families import Diagnosis, Facts, Family, default_plan, diagnose, worst
from andon.diagnose.symptoms import SYMPTOMS


def finding(kind, severity="halt", step=1000, series="loss"):
    said: dict[str, Any] = {"rule": "r", "detector": "d", "detector_version": 1, "detail": ""}
    return Finding(kind=kind, severity=severity, step=step, series=series, **said)


def first(*ranks, phase=Phase.BACKWARD, step=18_003, tie_reason="", layer=None):
    return FirstBad(
        step=step,
        micro_batch=None,
        phase=phase,
        ranks=ranks,
        tie=len(ranks) > 1,
        tie_reason=tie_reason,
        certainty=LOCAL_VALUE if ranks else REDUCED_ONLY,
        layer=layer,
    )


class TestNonfinite:
    def test_one_rank_that_broke_by_itself_leads_to_its_data(self):
        got = diagnose([finding("nonfinite")], first(61, layer="h.6"))
        assert (got.symptom, got.family) == ("one_rank_nonfinite", Family.DATA)
        assert "rank 61" in got.why
        assert "step 18003" in got.why
        assert "h.6" in got.why
        assert {family for family, _ in got.others} == {Family.NUMERICS, Family.HARDWARE}

    def test_reduced_values_alone_blame_no_rank(self):
        got = diagnose([finding("nonfinite")], first(phase=Phase.REDUCE))
        assert (got.symptom, got.family) == ("instant_nonfinite", Family.NUMERICS)
        assert "rank" in got.why
        assert not any(char.isdigit() for char in got.why)

    def test_many_equal_ranks_are_not_one_shard(self):
        got = diagnose([finding("nonfinite")], first(0, 1, 2, 3, tie_reason="4 equal cells in backward"))
        assert (got.symptom, got.family) == ("instant_nonfinite", Family.NUMERICS)

    def test_a_tie_of_one_tensor_group_is_still_one_cell(self):
        reason = "ranks 56-63 exchange values in forward (tensor group): one cell"
        got = diagnose([finding("nonfinite")], first(*range(56, 64), phase=Phase.FORWARD, tie_reason=reason))
        assert (got.symptom, got.family) == ("one_rank_nonfinite", Family.DATA)
        assert "ranks 56-63" in got.why

    def test_a_hardware_record_on_the_same_node_leads_to_hardware(self):
        facts = Facts(hardware_nodes=frozenset({"node-07"}), bad_nodes=frozenset({"node-07", "node-08"}))
        got = diagnose([finding("nonfinite")], first(61), facts)
        assert got.family == Family.HARDWARE
        assert "node-07" in got.why

    def test_a_hardware_record_elsewhere_does_not(self):
        facts = Facts(hardware_nodes=frozenset({"node-01"}), bad_nodes=frozenset({"node-07"}))
        assert diagnose([finding("nonfinite")], first(61), facts).family == Family.DATA

    def test_recurrence_on_other_nodes_disproves_hardware(self):
        node = frozenset({"node-07"})
        facts = Facts(hardware_nodes=node, bad_nodes=node, recurrence="other_nodes")
        assert diagnose([finding("nonfinite")], first(61), facts).family == Family.DATA

    @pytest.mark.parametrize(
        ("recurrence", "family"), [("other_step", Family.OPTIMIZER), ("same_data", Family.DATA)]
    )
    def test_a_nan_that_came_back_is_judged_by_how_it_did(self, recurrence, family):
        assert diagnose([finding("nonfinite")], first(), Facts(recurrence=recurrence)).family == family
        node = frozenset({"node-07"})
        facts = Facts(recurrence=recurrence, hardware_nodes=node, bad_nodes=node)
        assert diagnose([finding("nonfinite")], first(61), facts).family == Family.HARDWARE

    def test_right_after_a_restart_the_restore_is_suspected(self):
        got = diagnose([finding("nonfinite")], first(step=5003), Facts(restarted_at=5001))
        assert got.family == Family.DISTRIBUTED
        assert (
            diagnose([finding("nonfinite")], first(step=6000), Facts(restarted_at=5001)).family != got.family
        )

    def test_broken_moments_without_a_broken_gradient_lead_to_the_optimizer(self):
        assert diagnose([finding("nonfinite_state")], None).family == Family.OPTIMIZER

    def test_skipped_steps_of_one_rank(self):
        got = diagnose([finding("nonfinite_skipped", "warn")], first(5))
        assert (got.symptom, got.family) == ("skipped_nonfinite", Family.DATA)


class TestCurves:
    def test_a_spike_that_recovers_and_one_that_stays(self):
        assert diagnose([finding("loss_spike", "warn")], None).symptom == "spike_recovers"
        stays = diagnose([finding("loss_spike", "warn", 1000), finding("loss_spike", "halt", 1002)], None)
        assert (stays.symptom, stays.family) == ("spike_stays", Family.DATA)
        assert "step 1000" in stays.why

    def test_a_second_spike_at_another_step_is_optimisation_and_not_data(self):
        facts = Facts(recurrence="other_step")
        got = diagnose([finding("loss_spike")], None, facts)
        assert got.family == Family.OPTIMIZER
        assert "optimisation, not data" in got.why
        assert default_plan(got, facts).kind == "rollback_and_replay"

    @pytest.mark.parametrize(
        ("kind", "symptom"),
        [
            ("level_shift", "level_shift"),
            ("grad_norm_creep", "creep"),
            ("grad_norm_collapse", "vanishing_gradient"),
            ("layer_dead", "vanishing_gradient"),
            ("layer_grad_norm_bad", "layer_outlier"),
            ("grad_norm_spike", "gradient_spike"),
            ("scaler_not_restored", "scaler_not_restored"),
            ("checksum_differs", "silent_corruption"),
            ("straggler", "slow"),
        ],
    )
    def test_each_kind_has_its_symptom(self, kind, symptom):
        assert diagnose([finding(kind, "warn")], None).symptom == symptom

    def test_only_evaluation(self):
        assert (
            diagnose([finding("nonfinite_shown", "info", series="eval_loss")], None).symptom
            == "only_evaluation"
        )
        assert diagnose([finding("nonfinite_shown", "info", series="router_loss")], None).symptom == "unknown"

    def test_nothing_known_is_said_as_cause_unknown(self):
        got = diagnose([], None)
        assert got.family == Family.UNKNOWN
        assert "cause unknown" in got.why


def about(family):
    return Diagnosis(symptom="unknown", family=family, why="")


class TestDefaultPlan:
    @pytest.mark.parametrize(
        ("family", "kind"),
        [
            (Family.DATA, "rollback_and_skip"),
            (Family.NUMERICS, "rollback_and_skip"),
            (Family.HARDWARE, "rollback_and_replay"),
            (Family.COMMUNICATION, "rollback_and_replay"),
            (Family.DISTRIBUTED, "rollback_and_replay"),
            (Family.OPTIMIZER, "rollback_and_replay"),
            (Family.UNKNOWN, "rollback_and_skip"),
        ],
    )
    def test_it_follows_the_family(self, family, kind):
        assert default_plan(about(family)).kind == kind

    def test_good_weights_need_no_rollback(self):
        facts = Facts(update_applied=False)
        assert default_plan(about(Family.DATA), facts).kind == "skip_and_continue"
        assert default_plan(about(Family.HARDWARE), facts).kind == "rollback_and_replay"
        assert default_plan(about(Family.DATA), Facts(update_applied=None)).kind == "rollback_and_skip"

    def test_hardware_that_came_back_on_other_nodes_is_skipped_data(self):
        choice = default_plan(about(Family.HARDWARE), Facts(recurrence="other_nodes"))
        assert choice.kind == "rollback_and_skip"
        assert "disproved" in choice.why

    def test_a_false_alarm_and_a_hold_by_hand_resume_in_place(self):
        assert default_plan(about(Family.DATA), Facts(false_alarm=True)).kind == "resume_in_place"
        facts = Facts(held_by_hand=True)
        assert default_plan(diagnose([], None, facts), facts).kind == "resume_in_place"

    def test_a_suspect_checkpoint_goes_one_further(self):
        assert default_plan(about(Family.DATA), Facts(checkpoint_suspect=True)).kind == "rollback_one_further"


kinds = st.sampled_from(
    ["nonfinite", "nonfinite_state", "nonfinite_skipped", "loss_spike", "level_shift", "hang", "never_seen"]
)


@given(
    st.lists(
        st.builds(finding, kinds, st.sampled_from(["info", "warn", "halt"]), st.none() | st.integers(0, 9))
    ),
    st.sampled_from([None, first(), first(3), first(1, 2, 3)]),
    st.sampled_from(["none", "same_data", "same_step", "other_step", "other_nodes", "same_node"]),
    st.sampled_from([None, True, False]),
)
def test_any_incident_has_a_known_symptom_a_reason_and_a_plan(findings, cell, recurrence, applied):
    facts = Facts(recurrence=recurrence, update_applied=applied)
    got = diagnose(findings, cell, facts)
    assert got.symptom in SYMPTOMS
    assert got.why
    assert default_plan(got, facts).why
    assert diagnose(findings[::-1], cell, facts) == got


def test_the_worst_finding_is_the_severest_and_of_those_the_earliest():
    a, b, c = finding("x", "warn", 1), finding("y", "halt", 9), finding("z", "halt", 3)
    assert worst([a, b, c]) is c
    assert worst([]) is None
