"""What a run actually saw, against a trainer that keeps every sample it trained on in a plain set."""

from collections import Counter
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.intervals import Window
from andon.seen import Attempt, Mark, kept_until, lineage, seen


def positions(windows):
    return {at for window in windows for at in range(window.start, window.stop)}


@dataclass(frozen=True)
class Step:
    """One optimizer step of the naive trainer."""

    attempt: int
    number: int
    samples: tuple[int, ...]
    applied: bool
    passed: range  # where the loader went in it


@dataclass(frozen=True)
class Saved:
    """A checkpoint: where everything stood, and the whole history of these weights."""

    attempt: int
    step: int
    position: int
    consumed: int
    history: tuple[Step, ...]
    skips: frozenset[int]
    left_out: frozenset[int]


@dataclass
class Trainer:
    """A trainer that forgets nothing; what it reports is all that `andon.seen` is given."""

    attempt: int = 1
    parent: int | None = None
    began: int = 0
    step: int = 0
    position: int = 0
    consumed: int = 0
    batch: int = 2
    history: tuple[Step, ...] = ()
    skips: frozenset[int] = frozenset()  # what this loader leaves out
    left_out: frozenset[int] = frozenset()  # what any loader of these weights was told to
    told: list[Window] = field(default_factory=list)  # skips of this attempt
    marks: dict[int, Mark] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)
    every: list[Step] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)
    reported: list[Attempt] = field(default_factory=list)
    start: Mark = field(default_factory=lambda: Mark(0, 0, 0))

    def mark(self) -> None:
        self.marks[self.step] = Mark(self.step, self.position, self.consumed)

    def train(self, applied: bool = True) -> None:
        samples, began = [], self.position
        while len(samples) < self.batch:
            if self.position not in self.skips:
                samples.append(self.position)
            self.position += 1
        self.step += 1
        self.consumed += len(samples)
        done = Step(self.attempt, self.step, tuple(samples), applied, range(began, self.position))
        self.history += (done,)
        self.every.append(done)

    def skip(self, width: int) -> None:
        """Leave out the next samples; the step that reads past them takes an unusual stride."""
        self.mark()
        window = Window(self.position, self.position + width)
        self.told.append(window)
        self.skips |= positions([window])
        self.left_out |= positions([window])
        self.train()
        self.mark()

    def drop(self) -> None:
        self.mark()
        self.train(applied=False)
        self.dropped.add(self.step)
        self.mark()

    def save(self) -> None:
        self.mark()
        at = (self.attempt, self.step, self.position, self.consumed)
        self.saved.append(Saved(*at, self.history, self.skips, self.left_out))

    def end(self) -> None:
        self.mark()
        self.reported.append(
            Attempt(
                number=self.attempt,
                parent=self.parent,
                began=self.began,
                last=self.step,
                start=self.start,
                marks=tuple(self.marks.values()),
                skips=tuple(self.told),
                dropped=frozenset(self.dropped),
            )
        )

    def restart(self, which: int, width: int, lost: bool) -> None:
        """Go back to one of the checkpoints, leaving out `width` samples from its position.

        `lost`: the loader is not restored and begins anew.
        """
        if not self.saved:
            return
        self.end()
        state = self.saved[which % len(self.saved)]
        self.attempt, self.parent = self.attempt + 1, state.attempt
        self.began = self.step = state.step
        self.position = 0 if lost else state.position
        self.consumed, self.history = state.consumed, state.history
        self.marks, self.dropped = {}, set()
        self.start = Mark(state.step, self.position, state.consumed)
        window = Window(self.position, self.position + width)
        self.told = [window] if width else []
        self.skips = (frozenset() if lost else state.skips) | positions([window])
        self.left_out = state.left_out | positions([window])
        self.train()
        self.mark()


actions = st.lists(
    st.one_of(
        st.tuples(st.just("train"), st.integers(1, 4)),
        st.tuples(st.just("batch"), st.integers(1, 3)),
        st.tuples(st.just("skip"), st.integers(1, 5)),
        st.tuples(st.just("drop")),
        st.tuples(st.just("save")),
        st.tuples(st.just("restart"), st.integers(0, 9), st.integers(0, 6), st.booleans()),
    ),
    max_size=25,
)


def run(program) -> Trainer:
    trainer = Trainer()
    trainer.train()
    trainer.mark()
    for name, *arguments in program:
        match name:
            case "train":
                for _ in range(arguments[0]):
                    trainer.train()
            case "batch":
                trainer.mark()
                trainer.batch = arguments[0]
            case "skip":
                trainer.skip(arguments[0])
            case "drop":
                trainer.drop()
            case "save":
                trainer.save()
            case "restart":
                trainer.restart(*arguments)
    trainer.end()
    return trainer


def passed(trainer):
    return {at for step in trainer.history for at in step.passed}


@given(actions)
def test_the_windows_are_those_of_a_trainer_that_forgets_nothing(program):
    trainer = run(program)
    answer = seen(trainer.reported, trainer.attempt, trainer.step)

    times = Counter(at for step in trainer.history if step.applied for at in step.samples)
    read = {at for step in trainer.history for at in step.samples}
    thrown = {
        at for step in trainer.every if step not in trainer.history and step.applied for at in step.samples
    }
    assert answer.unknown == ()
    assert positions(answer.trained) == set(times)
    assert positions(answer.repeated) == {at for at, count in times.items() if count > 1}
    assert positions(answer.dropped) == read - set(times)
    assert positions(answer.skipped) == trainer.left_out & passed(trainer) - read
    assert positions(answer.replayed) == thrown & set(times)
    assert positions(answer.rolled_back) == thrown - set(times)
    assert answer.unaccounted == ()


@given(actions)
def test_each_sample_the_lineage_passed_is_exactly_one_thing(program):
    trainer = run(program)
    answer = seen(trainer.reported, trainer.attempt, trainer.step)
    kinds = [answer.trained, answer.dropped, answer.skipped, answer.unaccounted]
    times = Counter(at for windows in kinds for at in positions(windows))
    assert set(times) == positions(answer.passed) == passed(trainer)
    assert set(times.values()) <= {1}


@given(actions, st.integers(0, 30))
def test_any_checkpoint_can_be_asked_for(program, which):
    trainer = run([("save",), *program])
    state = trainer.saved[which % len(trainer.saved)]
    answer = seen(trainer.reported, state.attempt, state.step)
    assert positions(answer.trained) == {at for one in state.history if one.applied for at in one.samples}


@given(actions)
def test_the_steps_of_every_attempt_are_kept_or_thrown_away(program):
    trainer = run(program)
    answer = seen(trainer.reported, trainer.attempt, trainer.step)
    kept = Counter((step.attempt, step.number) for step in trainer.history)
    every = Counter((step.attempt, step.number) for step in trainer.every)
    told = [(one, window) for one in answer.attempts for window in (one.kept_steps,) if window]
    assert {(one.number, at) for one, window in told for at in positions([window])} == set(kept)
    told = [(one, window) for one in answer.attempts for window in (one.thrown_steps,) if window]
    assert {(one.number, at) for one, window in told for at in positions([window])} == set(every) - set(kept)
    last = {one.number: one.kept_steps.stop - 1 for one in answer.attempts if one.kept_steps}
    assert {n: at for n, at in kept_until(trainer.reported).items() if n in last} == last


def test_a_rollback_and_skip_in_numbers():
    first = Attempt(number=1, last=1002, start=Mark(0, 0), marks=(Mark(900, 28_800), Mark(1002, 32_064)))
    second = Attempt(
        number=2,
        parent=1,
        began=900,
        last=1100,
        start=Mark(900, 28_800),
        marks=(Mark(901, 35_232), Mark(1100, 41_600)),
        skips=(Window(28_800, 35_200),),
    )
    answer = seen([first, second], 2, 1100)
    assert answer.lineage == ((1, 1, 900), (2, 901, 1100))
    assert answer.trained == (Window(0, 28_800), Window(35_200, 41_600))
    assert answer.skipped == (Window(28_800, 35_200),)
    assert answer.rolled_back == (Window(28_800, 32_064),)
    assert answer.replayed == answer.repeated == answer.unaccounted == ()
    assert answer.attempts[0].thrown_steps == Window(901, 1003)
    assert answer.document()["skipped"] == [[28_800, 35_200]]
    assert msgspec.json.encode(answer.document())


class TestWhatIsNotKnown:
    def test_a_jump_that_nobody_declared_is_unaccounted_for(self):
        one = Attempt(
            number=1,
            last=20,
            start=Mark(0, 0, 0),
            marks=(Mark(10, 40, 40), Mark(11, 60, 44), Mark(20, 96, 80)),
        )
        answer = seen([one], 1, 20)
        assert answer.trained == (Window(0, 40), Window(60, 96))
        assert answer.unaccounted == (Window(40, 60),)
        assert "the loader passed 20 samples" in answer.unknown[0]

    def test_a_run_without_loader_positions_knows_its_steps_only(self):
        answer = seen([Attempt(number=1, last=20)], 1, 20)
        assert answer.trained == ()
        assert answer.attempts[0].kept_steps == Window(1, 21)
        assert answer.unknown == ("attempt 1: no loader position was reported on both sides of any step",)

    def test_steps_outside_the_reports_are_named(self):
        one = Attempt(number=1, last=30, marks=(Mark(10, 40), Mark(20, 80)))
        answer = seen([one], 1, 30)
        assert answer.trained == (Window(40, 80),)
        assert answer.unknown == (
            "attempt 1, steps 1 to 10: no loader position before",
            "attempt 1, steps 21 to 30: no loader position after",
        )

    def test_a_loader_that_goes_backwards_is_not_believed(self):
        one = Attempt(number=1, last=20, start=Mark(0, 0), marks=(Mark(10, 40), Mark(20, 30)))
        answer = seen([one], 1, 20)
        assert answer.trained == ()
        assert "goes backwards at step 20" in answer.unknown[0]

    def test_a_batch_that_is_cut_in_two_says_so(self):
        one = Attempt(number=1, last=10, start=Mark(0, 0), marks=(Mark(10, 41),))
        assert "not exact" in seen([one], 1, 5).unknown[0]

    def test_an_unknown_step_or_a_broken_line_is_refused(self):
        one = Attempt(number=2, parent=1, began=5, last=10)
        with pytest.raises(ValueError, match="step 11 is no step of attempt 2"):
            seen([one], 2, 11)
        with pytest.raises(ValueError, match="step 5 is no step of attempt 1"):
            lineage({2: one}, 2, 10)
        loop = Attempt(number=2, parent=2, began=5, last=10)
        with pytest.raises(ValueError, match="cannot begin from attempt 2"):
            lineage({2: loop}, 2, 10)
