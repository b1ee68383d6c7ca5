"""Checkpoints: committed last, verified whole, deleted only by leave."""

import json

import numpy as np
import pytest

from andon import checkpoints
from andon.checkpoints import MANIFEST, CheckpointError, Positions
from tests.andon.listener import Listener

POSITIONS = Positions(loader_position=48, consumed_samples=40, optimizer_step=9, schedule_position=10)


def make(root, step=10, *, weights=None, quarantined=False):
    directory = checkpoints.directory_of(root, step, quarantined=quarantined)
    weights = {"embed.weight": np.arange(6, dtype=np.float32)} if weights is None else weights
    checkpoints.write_arrays(directory, "weights.npz", weights)
    checkpoints.write_arrays(directory, "optimizer.npz", {"embed.weight.exp_avg": np.ones(3, np.float32)})
    checkpoints.write_document(directory, "loader.json", {"position": 48})
    manifest = checkpoints.commit(
        directory,
        run="r",
        attempt=1,
        step=step,
        positions=POSITIONS,
        parts={"weights": ["weights.npz"], "optimizer": ["optimizer.npz"], "loader": ["loader.json"]},
    )
    return directory, manifest


class TestCommit:
    def test_a_directory_without_a_manifest_was_never_committed(self, tmp_path):
        directory = checkpoints.directory_of(tmp_path, 10)
        checkpoints.write_arrays(directory, "weights.npz", {"w": np.ones(2)})
        assert checkpoints.committed(tmp_path) == []
        with pytest.raises(CheckpointError, match="never committed"):
            checkpoints.verify(directory)

    def test_the_event_names_every_file_with_size_and_digest_and_the_four_positions(self, tmp_path):
        directory, manifest = make(tmp_path)
        event = manifest.event(directory)
        data = event["data"]
        assert (event["type"], event["step"], data["uri"]) == ("checkpoint.committed", 10, directory.as_uri())
        assert {f["path"]: (f["bytes"], f["sha256"]) for f in data["files"]} == {
            name: ((directory / name).stat().st_size, checkpoints.sha256_of(directory / name))
            for name in ("weights.npz", "optimizer.npz", "loader.json")
        }
        assert data["positions"] == {
            "loader_position": 48,
            "consumed_samples": 40,
            "optimizer_step": 9,
            "schedule_position": 10,
        }
        assert data["finite"] is True
        assert data["quarantined"] is False

    def test_nonfinite_weights_and_moments_are_named_when_committed(self, tmp_path):
        weights = {"a": np.array([1.0, np.nan], np.float32), "b": np.ones(2, np.float32)}
        directory, manifest = make(tmp_path, weights=weights)
        assert (manifest.finite, manifest.nonfinite, manifest.norms["weights"]) == (False, ("a",), None)
        assert checkpoints.read_manifest(directory) == manifest

    def test_integers_and_text_never_count_as_nonfinite(self, tmp_path):
        _, manifest = make(tmp_path, weights={"steps": np.array([2**40])})
        assert manifest.finite

    def test_a_listed_file_that_is_absent_stops_the_commit(self, tmp_path):
        directory = checkpoints.directory_of(tmp_path, 10)
        checkpoints.write_arrays(directory, "weights.npz", {"w": np.ones(2)})
        with pytest.raises(CheckpointError, match=r"gone\.npz"):
            checkpoints.commit(
                directory, run="r", attempt=1, step=10, positions=POSITIONS, parts={"weights": ["gone.npz"]}
            )
        assert not (directory / MANIFEST).exists()

    def test_no_partly_written_name_stays_behind(self, tmp_path):
        directory, _ = make(tmp_path)
        assert sorted(p.name for p in directory.iterdir()) == [
            MANIFEST,
            "loader.json",
            "optimizer.npz",
            "weights.npz",
        ]

    def test_quarantine_is_no_candidate_for_a_restart(self, tmp_path):
        make(tmp_path, 20, quarantined=True)
        directory, _ = make(tmp_path, 10)
        assert checkpoints.committed(tmp_path) == [(10, directory)]

    def test_the_digest_does_not_depend_on_the_order_of_the_file_list(self, tmp_path):
        _, manifest = make(tmp_path)
        files = [{"path": f.path, "bytes": f.bytes, "sha256": f.sha256, "extra": 1} for f in manifest.files]
        assert checkpoints.files_digest(reversed(files)) == manifest.digest
        files[0]["bytes"] += 1
        assert checkpoints.files_digest(files) != manifest.digest


class TestVerify:
    def test_a_whole_checkpoint_verifies(self, tmp_path):
        directory, manifest = make(tmp_path)
        assert checkpoints.verify(directory) == manifest

    def test_a_flipped_bit_is_found_and_the_file_named(self, tmp_path):
        directory, _ = make(tmp_path)
        body = bytearray((directory / "weights.npz").read_bytes())
        body[-1] ^= 1
        (directory / "weights.npz").write_bytes(body)
        with pytest.raises(CheckpointError, match=r"weights\.npz: its SHA-256 differs"):
            checkpoints.verify(directory)

    def test_all_that_is_wrong_is_named_at_once(self, tmp_path):
        directory, _ = make(tmp_path)
        (directory / "loader.json").unlink()
        (directory / "weights.npz").write_bytes(b"short")
        with pytest.raises(CheckpointError, match=r"loader\.json: missing; weights\.npz: 5 bytes"):
            checkpoints.verify(directory)

    def test_nonfinite_values_do_not_verify_however_whole_the_files_are(self, tmp_path):
        directory, _ = make(tmp_path, weights={"a": np.array([np.inf])})
        with pytest.raises(CheckpointError, match="weights: a has nonfinite values"):
            checkpoints.verify(directory)

    def test_what_a_manifest_claims_is_looked_at_afresh(self, tmp_path):
        directory, _ = make(tmp_path, weights={"a": np.array([np.inf])})
        document = json.loads((directory / MANIFEST).read_text())
        document["finite"] = True
        (directory / MANIFEST).write_text(json.dumps(document))
        with pytest.raises(CheckpointError, match="nonfinite"):
            checkpoints.verify(directory)

    @pytest.mark.parametrize("body", [b"", b"[]", b'{"schema": "andon.checkpoint/1"}', b"\xff"])
    def test_a_manifest_that_cannot_be_read_is_refused(self, tmp_path, body):
        directory, _ = make(tmp_path)
        (directory / MANIFEST).write_bytes(body)
        with pytest.raises(CheckpointError, match=r"commit\.json"):
            checkpoints.verify(directory)

    def test_pickles_are_never_loaded(self, tmp_path):
        with pytest.raises(ValueError, match=r"[Oo]bject arrays"):
            make(tmp_path, weights={"a": np.array([object()], dtype=object)})


class TestDelete:
    @pytest.fixture
    def listener(self, tmp_path):
        listener = Listener(tmp_path)
        yield listener
        listener.close()

    @pytest.fixture
    def client(self, listener, tmp_path):
        from andon.client import Client

        with Client(listener.url, listener.run, listener.secret, spool_dir=tmp_path / "spool") as client:
            yield client

    def test_it_deletes_when_the_gate_allows_it(self, tmp_path, listener, client):
        directory, _ = make(tmp_path)
        listener.allow_deletion = True
        assert checkpoints.delete(directory, client) == (True, "allowed by the deletion gate")
        assert not directory.exists()

    def test_it_keeps_what_the_gate_denies(self, tmp_path, client):
        directory, manifest = make(tmp_path)
        deleted, _ = checkpoints.delete(directory, client)
        assert not deleted
        assert checkpoints.verify(directory) == manifest

    def test_no_answer_means_no(self, tmp_path, listener, client):
        directory, _ = make(tmp_path)
        listener.allow_deletion = True
        listener.close()
        deleted, why = checkpoints.delete(directory, client)
        assert (deleted, directory.exists()) == (False, True)
        assert "kept" in why

    def test_nobody_to_ask_means_no(self, tmp_path):
        directory, _ = make(tmp_path)
        assert checkpoints.delete(directory, None) == (False, "kept: nobody to ask")
        assert directory.exists()
