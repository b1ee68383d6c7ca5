"""Per-layer norms: outliers against their own past, bad by itself, dead."""

import json
import math

import numpy as np

from andon.detect.layers import LayerWatch
from andon.policy import LayerRules
from tests.andon.detect.shapes import frame

RULES = LayerRules()


def history(n=60, layers=4, seed=0):
    """Usual norms: layer i around 0.1·(i + 1), log-normal."""
    rng = np.random.default_rng(seed)
    return [
        {f"h.{i}": 0.1 * (i + 1) * float(np.exp(rng.normal(0, 0.1))) for i in range(layers)} for _ in range(n)
    ]


def run(watch, rows, metric="grad_norm", first_step=0):
    return [f for s, row in enumerate(rows, start=first_step) for f in watch.update_step(s, metric, row)]


class TestOutliers:
    def test_a_layer_far_from_its_own_past_is_named_and_the_others_are_not(self):
        watch = LayerWatch(RULES)
        rows = [*history(), {**history(1, seed=1)[0], "h.2": 40.0}]
        [finding] = run(watch, rows)
        assert (finding.kind, finding.severity, finding.rule) == ("layer_outlier", "warn", "layer")
        assert finding.lanes == ("h.2",)
        assert finding.step == 60
        assert finding.numbers["value"] == 40.0
        assert finding.score > 6

    def test_a_value_usual_for_another_layer_is_an_outlier_here(self):
        watch = LayerWatch(RULES)
        [finding] = run(watch, [*history(), {**history(1, seed=1)[0], "h.0": 0.4}])
        assert finding.lanes == ("h.0",)

    def test_an_excursion_is_told_once(self):
        watch = LayerWatch(RULES)
        high = [{**row, "h.2": 40.0} for row in history(10, seed=1)]
        again = [*history(5, seed=2), *({**row, "h.2": 40.0} for row in history(2, seed=3))]
        assert [f.step for f in run(watch, [*history(), *high, *again])] == [60, 75]

    def test_one_ordinary_value_does_not_end_an_excursion(self):
        high = [{**row, "h.2": 40.0} for row in history(2, seed=1)]
        assert [
            f.step for f in run(LayerWatch(RULES), [*history(), high[0], *history(1, seed=2), high[1]])
        ] == [60]

    def test_it_is_not_judged_before_its_warm_up(self):
        assert run(LayerWatch(RULES), [*history(49), {"h.0": 90.0}]) == []


class TestBadByItself:
    def test_a_gradient_above_a_thousand_needs_no_history(self):
        [finding] = run(LayerWatch(RULES), [{"h.0": 1.0, "h.1": 1000.5}])
        assert (finding.kind, finding.lanes) == ("layer_grad_norm_bad", ("h.1",))

    def test_a_thousand_is_not_above_and_other_metrics_may_be_large(self):
        watch = LayerWatch(RULES)
        assert run(watch, [{"h.0": 1000.0}]) == []
        assert run(watch, [{"h.0": 5e6}], metric="weight_norm") == []

    def test_it_is_told_again_only_after_it_was_gone(self):
        rows = [{"h.0": v} for v in (2000.0, 3000.0, 1.0, 2000.0)]
        assert [f.step for f in run(LayerWatch(RULES), rows)] == [0, 3]


class TestDeadLayers:
    def test_a_ratio_of_zero_for_five_hundred_steps(self):
        rows = [{"h.0": 0.0, "h.1": 1e-3}] * 700
        [finding] = run(LayerWatch(RULES), rows, metric="update_ratio", first_step=1)
        assert (finding.kind, finding.step, finding.lanes) == ("layer_dead", 500, ("h.0",))

    def test_steps_count_and_not_records(self):
        watch = LayerWatch(RULES)
        found = [
            f for step in range(0, 1000, 100) for f in watch.update_step(step, "update_ratio", {"h.0": 0.0})
        ]
        assert [f.step for f in found] == [500]

    def test_one_update_in_between_begins_anew(self):
        rows = [{"h.0": 0.0}] * 400 + [{"h.0": 1e-4}] + [{"h.0": 0.0}] * 499
        assert run(LayerWatch(RULES), rows, metric="update_ratio") == []


class TestFrames:
    def test_the_largest_of_several_ranks_counts(self):
        columns = {"step": [1, 1], "lane": ["h.0", "h.0"], "rank": [0, 1], "grad_norm": [2.0, 1500.0]}
        [finding] = LayerWatch(RULES).update(frame(columns, stream="layer"))
        assert finding.numbers["value"] == 1500.0
        assert finding.series == "layer.grad_norm"
        assert finding.view == "reduced"

    def test_nonfinite_and_missing_values_are_left_to_their_rule(self):
        columns = {"step": [1] * 3, "lane": ["a", "b", "c"], "grad_norm": ["nan", None, "inf"]}
        watch = LayerWatch(RULES)
        assert watch.update(frame(columns, stream="layer")) == []
        assert watch.state()["baselines"] == []

    def test_a_layers_gradient_of_zero_is_a_value_and_no_logarithm_is_taken(self):
        columns = {"step": [1], "lane": ["a"], "grad_norm": [0.0], "update_ratio": [0.0]}
        assert LayerWatch(RULES).update(frame(columns, stream="layer")) == []

    def test_steps_of_a_frame_are_judged_in_order_whatever_the_order_of_its_rows(self):
        columns = {"step": [2, 1], "lane": [0, 0], "grad_norm": [1.0, 2000.0]}
        [finding] = LayerWatch(RULES).update(frame(columns, stream="layer"))
        assert finding.step == 1

    def test_another_stream_says_nothing(self):
        assert LayerWatch(RULES).update(frame({"step": [1], "lane": [0], "grad_norm": [5000.0]})) == []


def test_a_watch_restored_from_json_goes_on():
    rows = [*history(), {**history(1, seed=1)[0], "h.2": 40.0}, *history(20, seed=2)]
    for cut in (0, 30, 60, 61, 62, 70):
        whole, first = LayerWatch(RULES), LayerWatch(RULES)
        expected = run(whole, rows)
        got = run(first, rows[:cut])
        second = LayerWatch.restore(RULES, json.loads(json.dumps(first.state())))
        got += run(second, rows[cut:], first_step=cut)
        assert got == expected
        assert second.state() == whole.state()


def test_findings_are_valid_json():
    found = run(LayerWatch(RULES), [{"h.0": math.nextafter(math.inf, 0)}])
    json.dumps(found[0].to_document(), allow_nan=False)
