"""Checkpoints that a trainer wrote by itself: committed beside training, read back, told, and let go."""

import importlib.util
import json
import struct
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon import hold
from andon.checkpoint_states import state_of
from andon.checkpoints import CheckpointError, commit, verify
from andon.checkpoints import Positions as At
from andon.permit import Checkpoint, Permit
from andon.readers import safetensors
from tests.andon.listener import Listener

AT = At(loader_position=0, consumed_samples=0, optimizer_step=1, schedule_position=1)


def tensors(path, **named):
    """Write a safetensors file: name → (dtype, shape, bytes)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, shape, body) in named.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(body)]}
        data += body
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def floats(*values):
    return struct.pack(f"<{len(values)}f", *values)


class TestSafetensors:
    def test_weights_are_read_back_from_the_disk(self, tmp_path):
        tensors(
            tmp_path / "model.safetensors",
            a=("F32", [2], floats(3.0, 4.0)),
            b=("BF16", [1], struct.pack("<H", 0x7FC0)),  # NaN
            c=("I64", [1], bytes(8)),
        )
        manifest = commit(
            tmp_path, run="r", attempt=1, step=1, positions=AT, parts={"weights": ["model.safetensors"]}
        )
        assert (manifest.finite, manifest.nonfinite) == (False, ("b",))
        with pytest.raises(CheckpointError, match="b has nonfinite values"):
            verify(tmp_path)

    def test_the_norm_is_that_of_all_weights(self, tmp_path):
        tensors(tmp_path / "w.safetensors", a=("F32", [2], floats(3.0, 4.0)), b=("F16", [0], b""))
        manifest = commit(
            tmp_path, run="r", attempt=1, step=1, positions=AT, parts={"weights": ["w.safetensors"]}
        )
        assert manifest.norms == {"weights": 5.0}
        assert verify(tmp_path).finite

    def test_a_file_that_is_cut_is_never_committed(self, tmp_path):
        path = tmp_path / "w.safetensors"
        tensors(path, a=("F32", [2], floats(3.0, 4.0)))
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(CheckpointError, match="cannot be read back"):
            commit(tmp_path, run="r", attempt=1, step=1, positions=AT, parts={"weights": ["w.safetensors"]})

    @given(st.binary(max_size=60), st.integers(0, 100))
    def test_no_bytes_crash_it(self, tmp_path_factory, noise, at):
        path = tmp_path_factory.mktemp("noise") / "w.safetensors"
        tensors(path, a=("F32", [2], floats(3.0, 4.0)))
        whole = path.read_bytes()
        path.write_bytes(whole[:at] + noise + whole[at + len(noise) :])
        try:
            assert all(values.dtype.kind == "f" for _, values in safetensors.chunks(path))
        except safetensors.SafetensorsError:
            return


if importlib.util.find_spec("torch") is not None:
    import torch
    from torch import nn

    from andon.integrations import resuming
    from andon.loader import Loader
    from andon.saving import files_of, loader_state
    from andon.watch import watch


@pytest.fixture
def listener(tmp_path):
    one = Listener(tmp_path)
    yield one
    one.close()


@pytest.fixture
def monitor(tmp_path, listener):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("not trained: needs torch")
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    made = watch(
        model,
        optimizer,
        directory=tmp_path / "run",
        url=listener.url,
        run=listener.run,
        secret=listener.secret,
        spool_dir=str(tmp_path / "spool"),
        loader=Loader(size=8, seed=0, global_batch=2),
    )
    yield made
    made.close()


def train_and_write(monitor, directory):
    model = monitor.norms.model
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    monitor.step(loss)
    directory.mkdir(parents=True)
    torch.save(model.state_dict(), directory / "model.pt")
    monitor.save(directory, lambda one: files_of(one, [("*.pt", "weights")], rest="other"))


class TestSaver:
    def test_a_checkpoint_is_committed_read_back_and_told(self, monitor, listener, tmp_path):
        directory = tmp_path / "run" / "one"
        train_and_write(monitor, directory)
        assert monitor.saver.drain(60)
        assert state_of(directory) == ("verified", "")
        assert {"weights", "rng", "loader", "digests"} <= verify(directory).parts.keys()
        assert loader_state(directory) == monitor.parts.loader.state()
        assert [line.verdict for line in monitor.restored(directory)] == ["equal"] * 4
        monitor.close()
        (event,) = listener.of("checkpoint.committed")
        assert (event.step, event.data["verified"], event.data["finite"]) == (1, True, True)

    def test_what_is_nonfinite_is_told_as_bad(self, monitor, listener, tmp_path):
        with torch.no_grad():
            next(iter(monitor.norms.model.parameters())).fill_(torch.nan)
        directory = tmp_path / "run" / "one"
        directory.mkdir(parents=True)
        (directory / "model.pt").write_bytes(b"weights")
        monitor.save(directory, lambda one: files_of(one, [("*.pt", "weights")], rest="other"))
        assert monitor.saver.drain(60)
        assert state_of(directory)[0] == "bad"
        monitor.close()
        (event,) = listener.of("checkpoint.committed")
        assert (event.data["verified"], event.data["finite"]) == (False, False)

    def test_a_save_that_fails_ends_neither_the_next_one_nor_the_training(self, monitor, tmp_path, capsys):
        directory = tmp_path / "run" / "one"
        directory.mkdir(parents=True)
        monitor.save(directory, lambda _: {"weights": ["gone.pt"]})
        train_and_write(monitor, tmp_path / "run" / "two")
        assert monitor.saver.drain(60)
        assert "gone.pt" in capsys.readouterr().out
        assert state_of(tmp_path / "run" / "two")[0] == "verified"

    def test_a_save_from_before_the_hold_is_finished_before_the_ranks_leave(self, monitor, tmp_path):
        """Its hashing began late; what counts is when it was written."""
        directory, held = tmp_path / "run" / "one", tmp_path / "run" / hold.FILE_NAME
        directory.mkdir(parents=True)
        (directory / "model.pt").write_bytes(b"weights")

        def parts_of(one):
            until = time.monotonic() + 30
            while not held.exists() and time.monotonic() < until:
                time.sleep(0.01)
            return files_of(one, [("*.pt", "weights")], rest="other")

        monitor.save(directory, parts_of)
        with pytest.raises(SystemExit) as left:
            monitor.hold("a reason of its own")
        assert left.value.code == hold.EXIT_HELD
        assert held.exists()
        assert state_of(directory) == ("verified", "")
        assert not verify(directory).quarantined

    def test_nothing_is_deleted_without_a_yes(self, monitor, listener, tmp_path):
        directories = [tmp_path / "run" / name for name in ("one", "two")]
        for directory in directories:
            train_and_write(monitor, directory)
        gone = []
        monitor.saver.remove(lambda: resuming.due(directories, 1), then=gone.append)
        assert monitor.saver.drain(60)
        assert (gone, listener.asked) == ([], [directories[0].as_uri()])
        listener.allow_deletion = True
        monitor.saver.remove(lambda: resuming.due(directories, 1), then=gone.append)
        assert monitor.saver.drain(60)
        assert gone == [directories[0]]
        assert not directories[0].exists()
        monitor.close()
        assert [one.data["uri"] for one in listener.of("checkpoint.deleted")] == [directories[0].as_uri()]

    def test_the_newest_verified_one_stays_whatever_came_after(self, monitor, tmp_path):
        directories = [tmp_path / "run" / name for name in ("one", "two", "three")]
        for directory in directories[:2]:
            train_and_write(monitor, directory)
        assert monitor.saver.drain(60)
        directories[2].mkdir()  # not committed yet
        assert resuming.due(directories, 1) == [directories[0]]
        assert resuming.newest_verified(directories) == directories[1]
        assert resuming.due(directories, None) == []

    def test_what_lies_past_a_permits_checkpoint_is_not_gone_on_from(self, monitor, tmp_path):
        directories = [tmp_path / "run" / name for name in ("one", "two")]
        for directory in directories:
            train_and_write(monitor, directory)
        assert monitor.saver.drain(60)
        permit = Permit(
            permit="P-1",
            run="r",
            attempt=2,
            incident="1",
            approval="A",
            approval_digest="0" * 64,
            plan="rollback_and_replay",
            checkpoint=Checkpoint(1, directories[0].as_uri()),
            issued_at="2026-01-01T00:00:00Z",
            expires_at="2026-01-02T00:00:00Z",
        )
        assert resuming.abandon(directories, permit) == [directories[1]]
        assert resuming.newest_verified(directories) == directories[0]
        moved = resuming.set_aside(directories[1])
        assert moved is not None
        assert (moved[0].name, moved[1].step) == ("attempt-1-two", 2)
        assert not directories[1].exists()
