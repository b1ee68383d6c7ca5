"""The demo's data set: packed from the standard library, read afresh, damaged on disk."""

import numpy as np
import pytest

from demo import data
from demo.job import Job, prepare


@pytest.fixture
def shard(tmp_path):
    data.build(tmp_path, size_bytes=40_000)
    shard = data.Shard(tmp_path)
    yield shard
    shard.close()


class TestShard:
    def test_two_builds_are_equal(self, shard, tmp_path):
        data.build(tmp_path / "again", size_bytes=40_000)
        again = data.Shard(tmp_path / "again")
        assert (again.digest, len(again)) == (shard.digest, len(shard))

    def test_windows_overlap_by_one_byte_so_that_every_byte_is_predicted(self, shard):
        first, second = shard.read(0), shard.read(1)
        assert first.name.endswith("@0")
        assert second.name.endswith(f"@{data.CONTEXT}")
        assert first.tokens[-1] == second.tokens[0]
        assert first.targets == data.CONTEXT

    def test_a_hole_leaves_a_sample_without_any_token_and_its_neighbours_whole(self, shard):
        before = [shard.read(index).fingerprint for index in (3, 5)]
        data.punch_hole(shard, 4)
        sample = shard.read(4)
        assert (len(sample.tokens), sample.targets, sample.mask_density) == (0, 0, 0.0)
        assert shard.read(3).fingerprint != before[0]  # it shares its last byte with the hole
        assert shard.read(3).targets == data.CONTEXT - 1
        assert shard.read(6).targets == data.CONTEXT

    def test_binary_bytes_are_all_outside_ascii(self, shard):
        data.overwrite_with_binary(shard, [2], seed=1)
        assert shard.read(2).tokens.min() >= 128

    def test_collate_pads_on_the_right_and_masks_what_is_not_predicted(self, shard):
        data.punch_hole(shard, 4)
        inputs, targets, mask = data.collate([shard.read(0), shard.read(4)])
        assert mask.sum(axis=1).tolist() == [data.CONTEXT, 0]
        assert (inputs[1] == data.PADDING).all()
        assert (inputs[0, 1:] == targets[0, :-1]).all()
        assert inputs.dtype == targets.dtype == np.int64


class TestFault:
    def test_the_hole_lies_where_the_rank_will_read_in_that_step(self, tmp_path):
        job = Job(directory=str(tmp_path), run="r", fault="hole", fault_step=7, fault_rank=2)
        shard = prepare(job)
        empty = []
        for rank in range(job.world_size):
            loader = job.loader(len(shard), rank)
            for step in range(1, 11):
                empty += [
                    (step, rank) for p in loader.next_batch() if shard.read(loader.sample(p)).targets == 0
                ]
        assert empty == [(7, 2)]

    def test_the_configuration_names_no_secret_and_no_place(self, tmp_path):
        job = Job(directory=str(tmp_path), run="r", secret="whsec_x", url="http://127.0.0.1:1")
        assert not {"secret", "url", "directory", "permit"} & job.config().keys()
        assert str(tmp_path) not in str(job.config())
