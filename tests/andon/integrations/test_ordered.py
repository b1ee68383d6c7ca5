"""A trainer's DataLoader in the order of positions, and what a batch says of itself."""

import importlib.util

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from andon.intervals import Window
from andon.loader import Loader, LoaderError

if importlib.util.find_spec("torch") is None:
    pytest.skip("not trained: needs torch", allow_module_level=True)

import torch
from torch.utils.data import DataLoader, TensorDataset

from andon.batch_ring import BatchFacts
from andon.integrations import lineage
from andon.integrations.ordered import OrderedBatches, check_window, ordered, take_up
from andon.loader_batches import batches


def read_epochs(order, steps, micro_batches, *, dropped=0):
    """Train `steps` steps as a loop with epochs does; return the indexes of every batch, in order."""
    sampler = OrderedBatches(order, micro_batches)
    sampler.dropped = dropped
    seen: list[list[int]] = []
    skipped = dropped
    while len(seen) < steps * micro_batches:
        for indexes in sampler:
            if skipped:
                skipped -= 1
                continue
            assert indexes == [order.sample(one) for one in order.next_batch()]
            seen.append(indexes)
            if len(seen) == steps * micro_batches:
                break
    return seen


sizes = st.integers(5, 60)
few = st.integers(1, 3)


@settings(max_examples=60, deadline=None)
@given(sizes, few, few, few, few, st.integers(0, 6), st.integers(0, 20), st.integers(0, 30))
def test_ranks_read_the_order_minus_the_window_and_go_on_where_they_stopped(
    size, each, before, after, micro_batches, steps, gap, width
):
    """For any world size before and after, through epochs, resumed in the middle of one."""
    first = [
        Loader(size=size, seed=3, global_batch=each * before, rank=r, world_size=before)
        for r in range(before)
    ]
    seen = [read_epochs(order, steps, micro_batches) for order in first]
    state = first[0].state()
    window = Window(state.position + gap, state.position + gap + width)
    dealt = [index for step in zip(*seen, strict=True) for batch in step for index in batch]
    for rank in range(after):
        order = Loader(size=size, seed=3, global_batch=each * after, rank=rank, world_size=after)
        take_up(order, state, 0)
        check_window(order, window)
        order.skip(window)
        length = len(OrderedBatches(order, micro_batches))
        dropped = steps * micro_batches % length
        seen.append(read_epochs(order, 4, micro_batches, dropped=dropped))
    dealt += [index for step in zip(*seen[before:], strict=True) for batch in step for index in batch]
    alone = Loader(size=size, seed=3, global_batch=1, skips=[window])
    assert dealt == [alone.sample(alone.next_batch()[0]) for _ in range(len(dealt))]


def test_a_window_before_the_checkpoint_is_refused():
    order = Loader(size=10, seed=0, global_batch=2)
    take_up(order, None, 8)
    assert (order.position, order.consumed_samples) == (8, 8)
    with pytest.raises(LoaderError, match="before the checkpoint's 8"):
        check_window(order, Window(6, 9))


def test_a_stream_and_a_sampler_of_its_own_are_left_as_they_are():
    class Stream(torch.utils.data.IterableDataset):  # type: ignore[misc]
        def __iter__(self):
            return iter(range(3))

    given = {"seed": 0, "batch_size": 2, "micro_batches": 1, "rank": 0, "world_size": 1}
    with pytest.raises(LoaderError, match="stream"):
        ordered(DataLoader(Stream()), **given)
    rows = TensorDataset(torch.arange(6))
    weighted = torch.utils.data.WeightedRandomSampler([1.0] * 6, 6)
    with pytest.raises(LoaderError, match="an order of its own"):
        ordered(DataLoader(rows, sampler=weighted), **given)


@pytest.mark.parametrize("shuffle", [False, True])
def test_workers_read_the_same_shuffled_or_not(shuffle):
    rows = TensorDataset(torch.arange(7))
    made, sampler = ordered(
        DataLoader(rows, batch_size=2, shuffle=shuffle, num_workers=1),
        seed=1,
        batch_size=2,
        micro_batches=1,
        rank=0,
        world_size=1,
    )
    expected = sampler.order.copy()
    wanted = [[expected.sample(one) for one in expected.next_batch()] for _ in range(3)]
    assert [batch[0].tolist() for batch in made] == wanted
    assert (wanted == [[0, 1], [2, 3], [4, 5]]) is not shuffle
    resumable = batches(DataLoader(rows, batch_size=2, shuffle=shuffle, num_workers=1), seed=1)
    assert [next(resumable)[0].tolist() for _ in range(3)] == wanted


class TestFacts:
    def test_what_counts_in_the_loss_is_read_off_the_labels(self):
        ids = torch.tensor([[5, 6, 7, 0], [5, 6, 99, 0]])
        labels = torch.tensor([[-100, 6, 7, -100], [-100, 6, 99, -100]])
        facts = lineage.facts_of({"input_ids": ids, "labels": labels}, vocabulary=50, shards=("a", "b"))
        assert facts is not None
        assert (facts.tokens, facts.mask_density) == ((2, 2), (0.5, 0.5))
        assert (facts.invalid_ids, facts.shards) == ((0, 1), ("a", "b"))
        assert len(set(facts.fingerprints)) == 2

    def test_padding_is_none_by_the_attention_mask(self):
        ids = torch.tensor([[5, 6, 0, 0]])
        facts = lineage.facts_of({"input_ids": ids, "attention_mask": (ids != 0).int()})
        assert facts is not None
        assert facts.lengths == (2,)

    @pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.uint8])
    def test_other_samples_are_fingerprinted_by_their_bytes(self, kind):
        one = torch.arange(12).reshape(3, 4).to(kind)
        first = lineage.facts_of((one, torch.tensor([0, 1, 2])))
        again = lineage.facts_of({"x": torch.cat([one[:1], one[:1]])})
        assert first is not None
        assert again is not None
        assert len(set(first.fingerprints)) == 3
        assert set(again.fingerprints) == {first.fingerprints[0]}

    @pytest.mark.parametrize("batch", [None, "text", [], {}, torch.tensor(1.0), torch.zeros(0, 3)])
    def test_what_tells_nothing_is_told_as_nothing(self, batch):
        assert lineage.facts_of(batch) is None

    def test_a_batch_carries_its_facts_and_the_model_never_sees_them(self):
        describing = lineage.Describing(
            lambda rows: {"input_ids": torch.stack(rows)}, None, lambda rows: {"names": [f"n{len(rows)}"] * 2}
        )
        batch = describing([torch.tensor([1, 2]), torch.tensor([3, 4])])
        facts = lineage.take(batch)
        assert facts is not None
        assert (facts.names, list(batch)) == (("n2", "n2"), ["input_ids"])
        assert lineage.take(batch) is None

    def test_a_step_is_told_from_its_micro_batches_and_only_as_a_whole(self):
        one = BatchFacts(positions=(1, 2), lengths=(3, 4))
        whole = lineage.joined([one, BatchFacts(positions=(5, 6))])
        assert (whole.positions, whole.lengths) == ((1, 2, 5, 6), ())
        assert lineage.joined([]) == BatchFacts()
