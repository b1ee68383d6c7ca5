"""Batch lineage: which samples a rank trained on, from memory."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.batch_ring import BatchFacts, BatchRing, describe, event_data


class TestRing:
    def test_it_keeps_the_last_steps_and_drops_the_oldest(self):
        ring = BatchRing(3)
        for step in range(1, 6):
            ring.append(step, BatchFacts(names=(f"s{step}",), shards=("a.bin",), offsets=(9,)))
        assert [one["step"] for one in ring.document(2)["steps"]] == [3, 4, 5]
        assert ring.of(2) is None
        assert ring.of(4).names == ("s4",)

    def test_its_document_is_json_and_says_only_what_was_told(self):
        ring = BatchRing()
        ring.append(1, BatchFacts(names=("a", "b"), loader={"position": 16}))
        document = json.loads(json.dumps(ring.document(0)))
        assert document["steps"] == [{"step": 1, "samples": ["a", "b"], "loader": {"position": 16}}]

    def test_a_sample_that_came_twice_is_found(self):
        ring = BatchRing()
        ring.append(1, BatchFacts(fingerprints=("x", "y")))
        ring.append(4, BatchFacts(fingerprints=("z", "x")))
        assert ring.duplicates() == [("x", [1, 4])]

    def test_a_ring_of_nothing_is_refused(self):
        with pytest.raises(ValueError, match="at least one"):
            BatchRing(0)


class TestDescribe:
    def test_it_counts_what_the_loss_sees_and_what_the_vocabulary_lacks(self):
        ids = np.array([[1, 2, 300, -1], [4, 4, 4, 4]])
        mask = np.array([[True, True, False, False], [True] * 4])
        facts = describe(ids, mask, vocabulary=256, names=("a", "b"))
        assert facts.tokens == (2, 4)
        assert facts.invalid_ids == (2, 0)
        assert facts.mask_density == (0.5, 1.0)
        assert facts.names == ("a", "b")

    def test_shapes_that_differ_are_named(self):
        with pytest.raises(ValueError, match=r"\(1, 3\).*\(1, 2\)"):
            describe(np.zeros((1, 2), np.int64), np.ones((1, 3), np.bool_))
        with pytest.raises(ValueError, match="samples, tokens"):
            describe(np.zeros(3, np.int64))

    @given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(0, 5))
    def test_equal_samples_have_equal_fingerprints_whatever_the_padding(self, tokens, padding):
        row = np.array([tokens + [0] * padding])
        mask = np.arange(row.shape[1])[None, :] < len(tokens)
        alone = describe(np.array([tokens], np.int32))
        assert describe(row, mask).fingerprints == alone.fingerprints

    def test_a_changed_token_changes_it(self):
        first, second = describe(np.array([[1, 2, 3]])), describe(np.array([[1, 2, 4]]))
        assert first.fingerprints != second.fingerprints


def test_the_event_names_samples_as_the_wire_does():
    data = event_data(BatchFacts(positions=(4,), names=("s",), mask_density=(1 / 3,)))
    assert data == {"positions": [4], "samples": ["s"], "mask_density": [0.3333]}
