"""The memory of stateful detectors: loaded when first asked for, saved at the end of a look."""

from typing import Any, Protocol

from andon.detect.grad_norm import GradNorm
from andon.detect.layers import LayerWatch
from andon.detect.skips import SkipCounter
from andon.detect.spike import RobustSpike
from andon.policy import Policy
from runs.models import Attempt, DetectorState, Event


class _Stateful(Protocol):
    def state(self) -> dict[str, Any]: ...


class Newest:
    """The newest step judged per reduced series: every node posts its copy, and one counts.

    A step that arrives after a later one was judged is left out too: a window has an order.
    """

    def __init__(self, steps: dict[str, int] | None = None) -> None:
        self.steps = dict(steps or {})

    def is_new(self, series: str, step: int) -> bool:
        """Return whether `step` is above all judged of `series`, and take it as judged."""
        if step <= self.steps.get(series, -1):
            return False
        self.steps[series] = step
        return True

    def state(self) -> dict[str, Any]:
        """Return the memory as JSON-ready data."""
        return dict(self.steps)


class Memory:
    """The detectors of one run during one look.

    A rule that is off keeps no baseline: switched on later, it begins with a warm-up instead of with
    a window from before.
    """

    def __init__(self, run_id: int, policy: Policy) -> None:
        self.run_id = run_id
        self.policy = policy
        self._live: dict[tuple[int, str, str], _Stateful] = {}

    def skips(self, attempt: int) -> SkipCounter:
        """Return the counter of skipped updates of an attempt."""
        rules = self.policy.nonfinite
        known = self._live.get((attempt, "skips", "skipped"))
        if known is None:
            state = self._stored(attempt, "skips", "skipped")
            known = (
                SkipCounter.restore(rules, state)
                if state is not None
                else SkipCounter(rules, previous_scale=self._scale_before(attempt))
            )
            self._live[attempt, "skips", "skipped"] = known
        assert isinstance(known, SkipCounter)
        return known

    def loss(self, attempt: int) -> RobustSpike:
        """Return the spike detector of the reduced loss of an attempt."""
        rules = self.policy.spike
        known = self._live.get((attempt, "spike", "loss"))
        if known is None:
            state = self._stored(attempt, "spike", "loss")
            known = RobustSpike(rules) if state is None else RobustSpike.restore(rules, state)
            self._live[attempt, "spike", "loss"] = known
        assert isinstance(known, RobustSpike)
        return known

    def newest(self, attempt: int) -> Newest:
        """Return the newest steps judged of an attempt."""
        known = self._live.get((attempt, "newest", "reduced"))
        if known is None:
            known = Newest(self._stored(attempt, "newest", "reduced"))
            self._live[attempt, "newest", "reduced"] = known
        assert isinstance(known, Newest)
        return known

    def norm(self, attempt: int) -> GradNorm:
        """Return the detector of the global gradient norm of an attempt."""
        rules = self.policy.grad_norm
        known = self._live.get((attempt, "grad_norm", "grad_norm"))
        if known is None:
            state = self._stored(attempt, "grad_norm", "grad_norm")
            known = GradNorm(rules) if state is None else GradNorm.restore(rules, state)
            self._live[attempt, "grad_norm", "grad_norm"] = known
        assert isinstance(known, GradNorm)
        return known

    def layers(self, attempt: int) -> LayerWatch:
        """Return the watch over the layers of an attempt."""
        rules = self.policy.layer
        known = self._live.get((attempt, "layers", "layer"))
        if known is None:
            state = self._stored(attempt, "layers", "layer")
            known = LayerWatch(rules) if state is None else LayerWatch.restore(rules, state)
            self._live[attempt, "layers", "layer"] = known
        assert isinstance(known, LayerWatch)
        return known

    def save(self) -> None:
        """Store every memory that was asked for."""
        DetectorState.objects.bulk_create(
            [
                DetectorState(
                    run_id=self.run_id, attempt=attempt, detector=detector, series=series, state=live.state()
                )
                for (attempt, detector, series), live in self._live.items()
            ],
            update_conflicts=True,
            unique_fields=["run", "attempt", "detector", "series"],
            update_fields=["state", "updated_at"],
        )

    def _stored(self, attempt: int, detector: str, series: str) -> dict[str, Any] | None:
        return (
            DetectorState.objects.filter(
                run_id=self.run_id, attempt=attempt, detector=detector, series=series
            )
            .values_list("state", flat=True)
            .first()
        )

    def _scale_before(self, attempt: int) -> float | None:
        """Return the last loss scale of the attempt before, None where it posted none."""
        before = Attempt.objects.filter(run_id=self.run_id, number__lt=attempt).order_by("-number").first()
        if before is None:
            return None
        newest = (
            Event.objects.filter(
                run_id=self.run_id, attempt=before.number, type="step", data__loss_scale__gt=0
            )
            .order_by("-step")
            .values_list("data", flat=True)
            .first()
        )
        return None if newest is None else float(newest["loss_scale"])
