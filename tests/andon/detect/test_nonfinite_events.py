"""The hold table, row by row, on events as the wire decodes them."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.detect.cells import NO_LANE, SOURCES, VALUES, Phase
from andon.detect.nonfinite import event_cells, judge_event
from andon.policy import Policy
from tests.andon.detect.shapes import event

POLICY = Policy()
NAN, INF = math.nan, math.inf


def judged(*args, policy=POLICY, backfill=False, **fields):
    return judge_event(event(*args, **fields), policy, backfill=backfill)


class TestAnAppliedNonfiniteValueHolds:
    @pytest.mark.parametrize("value", [NAN, INF, -INF, "nan", "Infinity", "-inf", 1e300 * 1e300])
    def test_a_nonfinite_loss_is_a_halt_whatever_its_spelling(self, value):
        [finding] = judged(step=18_003, loss=value)
        assert (finding.kind, finding.severity, finding.rule) == ("nonfinite", "halt", "nonfinite")
        assert finding.step == 18_003
        assert finding.series == "loss"
        assert finding.phase == "forward"

    def test_a_number_beyond_a_double_is_a_halt(self):
        from andon.wire import decode_events

        [(_, one)] = decode_events(
            b'{"type":"step","step":3,"data":{"loss":1e999}}', "application/json"
        ).events
        [finding] = judge_event(one, POLICY)
        assert finding.severity == "halt"
        assert finding.numbers["loss"] == "+inf"

    @pytest.mark.parametrize("said", [{"skipped": False}, {}])
    def test_applied_and_not_said_both_hold(self, said):
        [finding] = judged(loss=2.1, grad_norm=NAN, **said)
        assert finding.severity == "halt"
        assert finding.series == "grad_norm"
        assert finding.phase == "reduce"
        assert finding.numbers["loss"] == 2.1

    def test_bits_alone_hold_and_give_the_phase(self):
        [finding] = judged(rank=61, nonfinite=4 | 8, loss=2.113)
        assert finding.severity == "halt"
        assert finding.phase == "backward"
        assert finding.view == "local"
        assert finding.lanes == (61,)
        assert finding.numbers["bits"] == 12

    def test_loss_zero_beside_a_nan_gradient_is_a_dead_run_and_not_a_perfect_fit(self):
        """Shape of a Hugging Face Trainer's log after the weights were poisoned."""
        findings = [judged(step=s, loss=loss, grad_norm=NAN)[0] for s, loss in ((1, 0.3), (2, 0.0), (3, 0.0))]
        assert [f.severity for f in findings] == ["halt"] * 3

    def test_a_dead_run_with_a_loss_scale_of_one_and_nothing_skipped_holds(self):
        """Shape of a run that trained on at full speed with "grad norm: nan" and no loss key."""
        [finding] = judged(step=5426, grad_norm="nan", loss_scale=1.0, skipped=False)
        assert finding.severity == "halt"


class TestASkippedUpdateIsNotJudgedHere:
    @pytest.mark.parametrize(
        "fields",
        [
            {"loss": NAN, "skipped": True},
            {"grad_norm": INF, "skipped": True},
            {"loss": 2.0, "grad_norm": INF, "loss_scale": 65536.0, "skipped": True},
            {"nonfinite": 4 | 8 | 64},
            {"loss": NAN, "loss_scale": 65536.0, "skipped": True},
        ],
    )
    def test_it_says_nothing(self, fields):
        assert judged(**fields) == []

    @pytest.mark.parametrize("bits", [16, 32, 16 | 64, 32 | 64, 2 | 16 | 64])
    def test_nonfinite_weights_or_moments_hold_even_then(self, bits):
        [finding] = judged(rank=3, nonfinite=bits, skipped=True)
        assert (finding.kind, finding.severity) == ("nonfinite_state", "halt")

    def test_a_step_that_another_post_called_skipped_is_not_judged_here_either(self):
        silent, denied = event(step=7, rank=1, loss=NAN), event(step=7, rank=1, loss=NAN, skipped=False)
        assert judge_event(silent, POLICY, skipped_steps={7}) == []
        assert judge_event(silent, POLICY, skipped_steps={8})[0].severity == "halt"
        assert judge_event(denied, POLICY, skipped_steps={7})[0].severity == "halt"

    def test_a_nonfinite_loss_under_a_scaler_that_was_applied_holds(self):
        assert judged(loss=NAN, loss_scale=1024.0, skipped=False)[0].severity == "halt"


class TestWhatIsOnlyShown:
    @pytest.mark.parametrize(
        "name", ["eval_loss", "perplexity", "act_norm", "router_aux_loss", "gpu_temp_c", "something_new"]
    )
    def test_a_nonfinite_value_elsewhere_in_a_step_is_information(self, name):
        [finding] = judged(**{name: NAN, "loss": 2.0})
        assert (finding.kind, finding.severity, finding.series) == ("nonfinite_shown", "info", name)

    def test_another_event_type_holds_nothing(self):
        [finding] = judged("heartbeat", rank=1, loss=NAN)
        assert finding.severity == "info"

    def test_a_nested_value_is_shown_by_its_path(self):
        [finding] = judged(router={"loads": [0.1, NAN]})
        assert finding.series == "router.loads[1]"
        assert finding.severity == "info"

    def test_both_are_said_when_both_happen(self):
        findings = judged(loss=NAN, eval_loss=NAN)
        assert [f.severity for f in findings] == ["halt", "info"]

    @pytest.mark.parametrize(
        "fields",
        [{"loss": -1.0}, {"grad_norm": 0.0}, {"grad_norm": -1}, {"loss_scale": -1.0}, {"loss": None}],
    )
    def test_sentinels_and_null_are_not_measured(self, fields):
        assert judged(**fields) == []
        assert len(event_cells(event(**fields))) == 0

    def test_a_healthy_step_gives_nothing(self):
        assert judged(rank=4, loss=2.1, grad_norm=0.4, nonfinite=0, skipped=False) == []

    def test_backfill_is_shown_and_never_asks_to_hold(self):
        [finding] = judged(loss=NAN, backfill=True)
        assert finding.severity == "info"
        assert finding.kind == "nonfinite"
        assert finding.numbers["backfill"] is True

    def test_the_rule_can_be_switched_off(self):
        off = Policy(modes={"nonfinite": "off"})
        assert judged(loss=NAN, policy=off) == []


class TestViews:
    def test_a_single_rank_speaks_for_itself(self):
        assert judged(rank=61, loss=NAN)[0].view == "local"

    @pytest.mark.parametrize("who", [{}, {"ranks": "0-3"}, {"rank": 2, "ranks": [0, 1, 2]}])
    def test_without_one_rank_everything_is_reduced(self, who):
        assert judged(loss=NAN, **who)[0].view == "reduced"
        assert not event_cells(event(loss=NAN, **who)).local.any()

    def test_a_view_that_claims_local_without_a_rank_names_nobody(self):
        assert judged(loss=NAN, view="local")[0].view == "reduced"

    def test_a_gradient_norm_is_reduced_unless_said(self):
        assert judged(rank=3, grad_norm=NAN)[0].view == "reduced"
        said = judged(rank=3, grad_norm=NAN, view="local")[0]
        assert (said.view, said.phase) == ("local", "backward")

    @pytest.mark.parametrize("bits", [8, 16, 32, 8 | 16])
    def test_reduced_bits_never_name_a_rank_whatever_the_view_says(self, bits):
        part = event_cells(event(rank=3, nonfinite=bits, view="local"))
        assert not part.local.any()

    def test_a_rank_whose_loss_was_reduced_is_no_origin(self):
        assert judged(rank=0, loss=NAN, view="reduced")[0].view == "reduced"


class TestCells:
    def test_one_cell_per_rank_named(self):
        part = event_cells(event(step=9, ranks="0-2", loss=NAN))
        assert part.lane.tolist() == [0, 1, 2]
        assert part.step.tolist() == [9, 9, 9]

    def test_a_value_without_rank_has_a_cell_without_lane(self):
        part = event_cells(event(step=9, loss=INF))
        assert part.lane.tolist() == [NO_LANE]
        assert SOURCES[part.source[0]] == "loss"
        assert VALUES[part.value[0]] == "+inf"

    def test_a_skipped_cell_is_marked_unless_the_state_is_broken(self):
        assert event_cells(event(rank=1, loss=NAN, skipped=True)).skipped.tolist() == [True]
        assert event_cells(event(rank=1, nonfinite=32 | 64)).skipped.tolist() == [False]

    @given(st.integers(1, 127))
    def test_the_phase_is_that_of_the_lowest_bit(self, bits):
        part = event_cells(event(rank=1, nonfinite=bits))
        if not bits & 63:
            assert len(part) == 0
            return
        lowest = bits & -bits
        expected = {
            1: Phase.DATA,
            2: Phase.FORWARD,
            4: Phase.BACKWARD,
            8: Phase.REDUCE,
            16: Phase.OPTIMIZER,
            32: Phase.OPTIMIZER,
        }
        assert part.phase[0] == expected[lowest]
        assert bool(part.local[0]) == bool(bits & 7)


@given(
    st.dictionaries(
        st.sampled_from(["loss", "grad_norm", "loss_scale", "lr", "eval_loss", "tokens_per_s"]),
        st.floats(allow_nan=True, allow_infinity=True),
    ),
    st.sampled_from([None, True, False]),
    st.integers(0, 127),
)
def test_every_finding_is_valid_json_and_only_the_table_halts(values, skipped, bits):
    extra = {} if skipped is None else {"skipped": skipped}
    findings = judge_event(event(rank=1, nonfinite=bits, **values, **extra), POLICY)
    for finding in findings:
        json.dumps(finding.to_document(), allow_nan=False)
    judged_bad = any(not math.isfinite(values.get(name, 0.0)) for name in ("loss", "grad_norm"))
    applied = not (skipped is True or bits & 64)
    expected = bool((judged_bad or bits & 63) and applied) or bool(bits & 48)
    assert any(f.severity == "halt" for f in findings) == expected
