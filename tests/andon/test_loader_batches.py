"""Any data set or stream as resumable batches: what is read is the order of the positions, exactly."""

import importlib.util
import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from andon.intervals import Window
from andon.loader import Loader, LoaderError
from andon.loader_batches import batches

HAS = {name: importlib.util.find_spec(name) is not None for name in ("torch", "torchdata")}
needs_torch = pytest.mark.skipif(not HAS["torch"], reason="torch is not installed here")
needs_torchdata = pytest.mark.skipif(
    not (HAS["torch"] and HAS["torchdata"]), reason="torchdata is not installed here"
)

windows = st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda w: Window(w[0], w[0] + w[1]))


class Once:
    """A stream that begins anew with every `iter`, and says how much was read of it."""

    def __init__(self, size):
        self.size, self.reads = size, 0

    def __iter__(self):
        for number in range(self.size):
            self.reads += 1
            yield f"s{number}"


class Stateful(Once):
    """A stream that can go on where it was."""

    at = 0

    def __iter__(self):
        while self.at < self.size:
            self.reads += 1
            self.at += 1
            yield f"s{self.at - 1}"

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def take(ranks, steps):
    """Return the samples of `steps` global batches, in the order of ranks."""
    return [sample for _ in range(steps) for rank in ranks for sample in next(rank)]


def of_ranks(make_data, world_size, **options):
    return [batches(make_data(), rank=rank, world_size=world_size, **options) for rank in range(world_size)]


launches = st.lists(
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(0, 4), st.lists(windows, max_size=2)),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize(
    ("make_data", "is_map"),
    [
        (lambda: [f"s{n}" for n in range(200)], True),
        (lambda: Once(200), False),
        (lambda: Stateful(200), False),
    ],
    ids=["map", "stream", "stateful stream"],
)
@settings(max_examples=60, deadline=None)
@given(launches=launches)
def test_the_samples_are_the_intended_ones_minus_the_windows(make_data, is_map, launches):
    skipped: set[int] = set()
    seen: list[str] = []
    saved = batches(make_data(), batch_size=1, seed=3).state_dict()
    for world_size, batch_size, steps, skips in launches:
        ranks = of_ranks(make_data, world_size, batch_size=batch_size, seed=3)
        for rank in ranks:
            rank.load_state_dict(json.loads(json.dumps(saved)))
            for window in skips:
                rank.skip(window)
        skipped |= {p for w in skips for p in range(w.start, w.stop) if p >= saved["position"]}
        for _ in range(steps):
            for rank in ranks:
                seen += next(rank)
        saved = ranks[0].state_dict()
        assert all(rank.state_dict() == saved for rank in ranks)
    order = Loader(size=200 if is_map else None, seed=3, global_batch=1)
    intended = [p for p in range(saved["position"]) if p not in skipped]
    assert seen == [f"s{order.sample(position)}" for position in intended]
    assert len(seen) == len(set(seen)) == saved["consumed_samples"]


class TestMap:
    def test_positions_name_the_samples_of_the_last_batch(self):
        data = [f"s{n}" for n in range(10)]
        train = batches(data, batch_size=3, rank=1, world_size=2, seed=1)
        batch = next(train)
        assert train.positions == (3, 4, 5)
        assert batch == [data[train.order.sample(one)] for one in train.positions]

    def test_it_goes_on_into_the_next_epoch_in_another_order(self):
        train = batches("abcdef", batch_size=6, seed=1)
        first, second = next(train), next(train)
        assert sorted(first) == sorted(second) == list("abcdef")
        assert first != second

    def test_a_state_of_other_data_is_refused(self):
        saved = batches("abc", batch_size=1).state_dict()
        with pytest.raises(LoaderError, match="size"):
            batches("abcd", batch_size=1).load_state_dict(saved)
        with pytest.raises(LoaderError, match="no state of a loader"):
            batches("abc", batch_size=1).load_state_dict({"epoch": 1})

    def test_the_batch_size_must_be_said(self):
        with pytest.raises(LoaderError, match="batch_size"):
            batches("abc")


def test_the_lines_in_the_documentation_deal_batches():
    page = (Path(__file__).parents[2] / "docs" / "trainer.md").read_text()
    first = "    from andon.loader import Window"
    lines = textwrap.dedent(first + page.split(first)[1].split("\n\nData with")[0])
    names: dict[str, Any] = {"data": range(5000), "rank": 1, "world_size": 2}
    exec(lines, names)
    assert names["where"] == tuple(range(8, 16))
    assert names["batch"] == [names["train"].order.sample(position) for position in range(8, 16)]
    assert names["saved"]["position"] == 16
    assert names["train"].order.skips == (Window(1440, 1920),)


class TestStream:
    def test_what_does_not_fill_a_global_batch_is_left_out_on_all_ranks_alike(self):
        ranks = of_ranks(lambda: Once(11), 2, batch_size=2)
        read = [list(rank) for rank in ranks]
        assert read == [[["s0", "s1"], ["s4", "s5"]], [["s2", "s3"], ["s6", "s7"]]]
        assert {rank.position for rank in ranks} == {rank.consumed_samples for rank in ranks} == {8}

    def test_one_that_keeps_state_reads_nothing_twice(self):
        first = batches(Stateful(100), batch_size=4)
        take([first], 20)
        data = Stateful(100)
        again = batches(data, batch_size=4)
        again.restore(first.state())
        assert next(again) == ["s80", "s81", "s82", "s83"]
        assert data.reads == 4

    def test_one_that_keeps_none_is_read_again_to_its_position(self):
        first = batches(Once(100), batch_size=4)
        take([first], 20)
        data = Once(100)
        again = batches(data, batch_size=4)
        again.restore(first.state())
        assert next(again) == ["s80", "s81", "s82", "s83"]
        assert data.reads == 84

    def test_a_generator_may_be_read_on_but_not_back(self):
        train = batches((f"s{n}" for n in range(100)), batch_size=4)
        begin = train.state()
        take([train], 2)
        later = train.state()
        assert next(train) == ["s8", "s9", "s10", "s11"]
        for state in (begin, later):
            with pytest.raises(LoaderError, match="cannot go back"):
                train.restore(state)
        fresh = batches((f"s{n}" for n in range(100)), batch_size=4)
        fresh.restore(later)
        assert next(fresh) == ["s8", "s9", "s10", "s11"]

    def test_state_that_is_no_plain_data_goes_into_no_checkpoint(self):
        class Odd(Stateful):
            def state_dict(self):
                return {"generator": object()}

        train = batches(Odd(20), batch_size=2)
        next(train)
        assert train.state().source is None
        json.dumps(train.state_dict())


class Squares:
    """A map-style data set that a worker process can hold."""

    def __len__(self):
        return 30

    def __getitem__(self, index):
        return index * index


@needs_torch
class TestTorch:
    def test_workers_that_read_ahead_change_nothing(self):
        plain, ahead = (batches(Squares(), batch_size=4, seed=2, workers=n) for n in (0, 1))
        assert [next(ahead) for _ in range(3)] == [next(plain) for _ in range(3)]
        assert ahead.state() == plain.state()
        for train in (plain, ahead):
            train.skip(Window(14, 22))  # two batches of it lie in the workers' hands
        assert [next(ahead) for _ in range(3)] == [next(plain) for _ in range(3)]
        assert ahead.positions == plain.positions
        assert ahead.state() == plain.state()

    @pytest.mark.parametrize("shuffle", [False, True])
    def test_a_data_loader_is_taken_apart(self, shuffle):
        from torch.utils.data import DataLoader

        loader = DataLoader(Squares(), batch_size=5, shuffle=shuffle, collate_fn=sum)
        train = batches(loader, seed=4)
        order = Loader(size=30, seed=4, global_batch=5, shuffle=shuffle)
        expected = sum(order.sample(position) ** 2 for position in range(5))
        assert next(train) == expected
        assert train.order.global_batch == 5

    def test_a_sampler_with_an_order_of_its_own_is_refused(self):
        from torch.utils.data import DataLoader, WeightedRandomSampler

        loader = DataLoader(Squares(), batch_size=5, sampler=WeightedRandomSampler([1.0] * 30, 30))
        with pytest.raises(LoaderError, match="WeightedRandomSampler"):
            batches(loader)
        assert batches(loader, shuffle=True).order.shuffle

    def test_an_iterable_data_set_is_a_stream_though_it_inherits_an_index(self):
        from torch.utils.data import DataLoader, IterableDataset

        class Counting(IterableDataset):  # type: ignore[misc, unused-ignore]
            def __iter__(self):
                return iter(range(40))

            def __len__(self):
                return 40

        train = batches(DataLoader(Counting(), batch_size=4, collate_fn=list), rank=1, world_size=2)
        assert [next(train), next(train)] == [[4, 5, 6, 7], [12, 13, 14, 15]]


@needs_torchdata
@pytest.mark.parametrize("workers", [0, 1])
def test_torchdata_s_stateful_loader_goes_on_where_it_was(workers):
    from torch.utils.data import IterableDataset

    stateful = importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader

    class Counting(IterableDataset):  # type: ignore[misc, unused-ignore]
        def __init__(self):
            self.at = self.first = 0

        def __iter__(self):
            self.first = self.at
            while self.at < 100:
                self.at += 1
                yield (self.at - 1, self.first)

        def state_dict(self):
            return {"at": self.at}

        def load_state_dict(self, state):
            self.at = state["at"]

    def reader():
        return stateful(Counting(), batch_size=None, num_workers=workers)

    first = batches(reader(), batch_size=4, skips=[Window(10, 20)])
    assert [n for _ in range(3) for n, _ in next(first)] == [*range(10), 20, 21]
    saved = json.loads(json.dumps(first.state_dict()))
    assert saved["source"] is not None
    again = batches(reader(), batch_size=4)
    again.load_state_dict(saved)
    samples = next(again)
    assert [n for n, _ in samples] == [22, 23, 24, 25]
    assert {begun for _, begun in samples} == {22}  # the stream itself began there: nothing was read again
