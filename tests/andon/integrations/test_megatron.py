"""A permit on Megatron's command line, and the learning rate it resumed with."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.cli import main
from andon.integrations.megatron import arguments, check_lr, iterations_to_skip
from andon.permit import Change, Checkpoint, Permit, Positions, SkipWindow, issue
from andon.signing import SigningKey
from andon.wire import format_time

BATCH = 64


def permit(
    *, skip=(57_600, 64_768), step=900, position=57_600, uri="file:///scratch/ckpt/iter_0000900", **more
):
    now_ns = time.time_ns()
    return Permit(
        permit="P-1",
        run="r",
        attempt=2,
        incident="1",
        approval="A-1",
        approval_digest="0" * 64,
        plan="rollback_and_skip" if skip else "rollback_and_replay",
        checkpoint=Checkpoint(step, uri, None),
        positions=Positions(loader_position=position),
        skip=SkipWindow(*skip) if skip else None,
        issued_at=format_time(now_ns),
        expires_at=format_time(now_ns + 3600 * 10**9),
        **more,
    )


def schedule(step):
    """Warm-up over 500 steps, then a straight fall."""
    return 3e-4 * step / 500 if step <= 500 else 3e-4 * (1 - (step - 500) / 10_000)


def printed(steps, of=schedule):
    return [(step, float(f"{of(step):.6E}")) for step in steps]


class TestArguments:
    def test_the_window_is_iterations_from_0_after_the_checkpoint(self):
        """Steps 901 to 1012 read samples 57,600 to 64,767; iteration i is the step i + 1."""
        skipped = iterations_to_skip(permit(), BATCH)
        assert (skipped[0], skipped[-1], len(skipped)) == (900, 1011, 112)
        assert arguments(permit(), BATCH)[:5] == [
            "--load",
            "/scratch/ckpt",
            "--ckpt-step",
            "900",
            "--iterations-to-skip",
        ]

    def test_a_replay_skips_nothing(self):
        assert arguments(permit(skip=None), BATCH) == ["--load", "/scratch/ckpt", "--ckpt-step", "900"]

    @given(
        step=st.integers(0, 10**6),
        position=st.integers(0, 10**9),
        begin=st.integers(0, 10**4),
        width=st.integers(0, 10**4),
        batch=st.integers(1, 4096),
    )
    def test_exactly_the_iterations_that_read_a_sample_of_the_window(
        self, step, position, begin, width, batch
    ):
        window = (position + begin, position + begin + width)
        skipped = iterations_to_skip(permit(skip=window, step=step, position=position), batch)
        reads = [(position + (one - step) * batch, position + (one - step + 1) * batch) for one in skipped]
        assert all(first < window[1] and window[0] < end for first, end in reads) or not width
        if width:
            assert reads[0][0] <= window[0]
            assert reads[-1][1] >= window[1]

    @pytest.mark.parametrize(
        ("more", "says"),
        [
            ({"position": None}, "no loader position"),
            ({"position": 60_000}, "before the checkpoint's"),
            ({"skip": (57_600, 10**12)}, "is the batch size right"),
        ],
    )
    def test_what_cannot_be_counted_is_said(self, more, says):
        with pytest.raises(ValueError, match=says):
            arguments(permit(**more), BATCH)


class TestLr:
    BEFORE = printed(range(10, 1_011, 10))

    def test_the_schedule_stood_still_while_batches_were_skipped(self):
        after = printed(range(1_020, 1_100, 10), lambda step: schedule(step - 112))
        found = check_lr(self.BEFORE, after, permit(), BATCH)
        assert (found.verdict, found.step) == ("equal", 1_020)

    def test_a_schedule_that_began_anew_differs(self):
        after = printed(range(1_020, 1_100, 10), lambda step: schedule(step - 900))
        found = check_lr(self.BEFORE, after, permit(), BATCH)
        assert found.verdict == "differs"
        assert "112 iterations skipped" in found.detail

    @pytest.mark.parametrize(
        "change",
        [
            Change(what="lr × 0.3", changes_regime=True),
            Change(what="learning rate", was=3e-4, to=9e-5, changes_regime=True),
        ],
    )
    def test_a_declared_factor_is_expected(self, change):
        lower = printed(range(1_020, 1_100, 10), lambda step: 0.3 * schedule(step - 112))
        declared = permit(changes=(change,))
        assert check_lr(self.BEFORE, lower, declared, BATCH).verdict == "equal"
        same = printed(range(1_020, 1_100, 10), lambda step: schedule(step - 112))
        assert check_lr(self.BEFORE, same, declared, BATCH).verdict == "differs"

    def test_a_replay_is_compared_step_by_step(self):
        after = printed(range(910, 1_000, 10))
        assert check_lr(self.BEFORE, after, permit(skip=None), BATCH).verdict == "equal"

    def test_without_a_step_in_common_nothing_is_said_to_be_equal(self):
        assert check_lr(self.BEFORE, [], permit(), BATCH).verdict == "not comparable"


class TestCommand:
    LINE = " iteration {:8d}/ 9000 | consumed samples: 8 | learning rate: {:.6E} | lm loss: 2.0 |\n"

    @pytest.fixture
    def files(self, tmp_path):
        key = SigningKey.load_or_create(tmp_path / "key")
        (tmp_path / "permit.json").write_text(json.dumps(issue(permit(), key)))
        for name, steps, shift in (
            ("before", range(10, 1_011, 10), 0),
            ("after", range(1_020, 1_060, 10), 112),
        ):
            lines = [self.LINE.format(step, schedule(step - shift)) for step in steps]
            (tmp_path / f"{name}.log").write_text("".join(lines))
        return tmp_path, key.key_id

    def test_arguments_are_printed_ready_to_paste(self, files, capsys):
        folder, key = files
        given = [str(folder / "permit.json"), "--global-batch-size", "64", "--key", key]
        assert main(["megatron", "args", *given]) == 0
        assert capsys.readouterr().out.startswith(
            "--load /scratch/ckpt --ckpt-step 900 --iterations-to-skip 900 901 "
        )

    def test_a_permit_of_another_key_gives_none(self, files, capsys):
        folder, _ = files
        given = [str(folder / "permit.json"), "--global-batch-size", "64", "--key", "0" * 64]
        assert main(["megatron", "args", *given]) == 2
        assert capsys.readouterr().out == ""

    def test_the_rate_is_read_from_the_logs(self, files, capsys):
        folder, key = files
        logs = [str(folder / "before.log"), str(folder / "after.log")]
        given = [str(folder / "permit.json"), *logs, "--global-batch-size", "64", "--key", key]
        assert main(["megatron", "lr", *given]) == 0
        assert capsys.readouterr().out.startswith("equal: step 1020: ")
        text = (folder / "after.log").read_text().replace("learning rate: 2", "learning rate: 1")
        (folder / "after.log").write_text(text)
        assert main(["megatron", "lr", *given]) == 1
