"""The loader: positions mean the same data whatever the layout, and a restore is exact."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.intervals import Window
from andon.loader import Loader, LoaderError, LoaderState, shuffled


def read(loader: Loader, steps: int) -> list[int]:
    return [position for _ in range(steps) for position in loader.next_batch()]


windows = st.tuples(st.integers(0, 60), st.integers(0, 30)).map(lambda w: Window(w[0], w[0] + w[1]))


class TestOrder:
    def test_every_epoch_reads_every_sample_once(self):
        loader = Loader(size=12, seed=1, global_batch=4)
        samples = [loader.sample(position) for position in read(loader, 6)]
        assert sorted(samples[:12]) == sorted(samples[12:]) == list(range(12))
        assert samples[:12] != samples[12:]

    def test_the_order_is_this_one_forever(self):
        # A change of the order would make every checkpoint's position name other data.
        assert shuffled(8, 20260, 0).tolist() == EXPECTED_ORDER

    def test_without_shuffling_samples_come_as_they_lie(self):
        loader = Loader(size=3, seed=1, global_batch=4, shuffle=False)
        assert [loader.sample(position) for position in read(loader, 2)] == [0, 1, 2, 0, 1, 2, 0, 1]

    def test_a_batch_of_millions_among_few_windows_is_dealt_by_ranges(self):
        loader = Loader(size=None, seed=1, global_batch=10**12, skips=[Window(5, 10**6)])
        assert loader.deal() == [Window(0, 5), Window(10**6, 10**6 + 10**12 - 5)]

    def test_the_ranks_share_each_batch_without_overlap(self):
        ranks = [Loader(size=100, seed=1, global_batch=8, rank=rank, world_size=4) for rank in range(4)]
        assert sorted(position for rank in ranks for position in read(rank, 3)) == list(range(24))

    @given(st.integers(0, 5), st.sampled_from([1, 2, 4]))
    def test_a_global_batch_does_not_depend_on_the_number_of_ranks(self, steps, world_size):
        ranks = [
            Loader(size=50, seed=3, global_batch=4, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        for _ in range(steps):
            for rank in ranks:
                rank.next_batch()
        joined = [position for rank in ranks for position in rank.next_batch()]
        assert joined == list(range(4 * steps, 4 * steps + 4))


EXPECTED_ORDER = [0, 3, 4, 1, 5, 7, 6, 2]


class TestSkips:
    def test_a_skipped_window_is_never_read_and_never_counted_as_consumed(self):
        loader = Loader(size=100, seed=1, global_batch=4, skips=[Window(4, 10)])
        assert read(loader, 3) == [0, 1, 2, 3, 10, 11, 12, 13, 14, 15, 16, 17]
        assert (loader.position, loader.consumed_samples) == (18, 12)
        assert loader.trained == (Window(0, 4), Window(10, 18))

    def test_a_batch_may_straddle_a_window(self):
        loader = Loader(size=100, seed=1, global_batch=4, skips=[Window(2, 9)])
        assert loader.next_batch() == [0, 1, 9, 10]

    def test_skip_says_how_many_samples_it_drops(self):
        loader = Loader(size=100, seed=1, global_batch=4)
        loader.next_batch()
        assert loader.skip(Window(0, 10)) == 6
        assert loader.position == 10
        assert loader.skip(Window(8, 12)) == 2

    @given(st.lists(windows, max_size=6), st.integers(1, 12))
    def test_no_position_of_a_window_is_read_and_no_other_is_left_out(self, skips, steps):
        loader = Loader(size=7, seed=1, global_batch=3, skips=skips)
        seen = read(loader, steps)
        dropped = {position for w in skips for position in range(w.start, w.stop)}
        assert seen == [p for p in range(seen[-1] + 1) if p not in dropped]
        trained = [p for w in loader.trained for p in range(w.start, w.stop)]
        assert trained == seen
        assert loader.consumed_samples == len(seen)

    @given(
        size=st.one_of(st.none(), st.integers(1, 40)),
        launches=st.lists(
            st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 4), st.lists(windows, max_size=3)),
            min_size=1,
            max_size=4,
        ),
        first=st.integers(0, 50),
    )
    def test_over_any_launches_the_samples_are_the_intended_ones_minus_the_windows(
        self, size, launches, first
    ):
        """Each launch has its number of ranks and batch size, is given windows, and begins where the one
        before saved; the intended sequence is every position from the first on."""
        skipped: set[int] = set()
        seen: list[int] = []
        state = Loader(size=size, seed=5, global_batch=1, position=first).state()
        for world_size, batch_size, steps, skips in launches:
            at = state.position
            ranks = [
                Loader(
                    size=size, seed=5, global_batch=world_size * batch_size, rank=rank, world_size=world_size
                )
                for rank in range(world_size)
            ]
            for rank in ranks:
                rank.restore(state)
                for window in skips:
                    rank.skip(window)
            skipped |= {p for w in skips for p in range(w.start, w.stop) if p >= at}
            for _ in range(steps):
                shares = [rank.next_batch() for rank in ranks]
                assert {len(share) for share in shares} == {batch_size}
                seen += [position for share in shares for position in share]
            assert all(rank.state() == ranks[0].state() for rank in ranks)
            state = ranks[0].state()
        assert seen == [p for p in range(first, state.position) if p not in skipped]
        assert state.position not in skipped
        assert state.consumed_samples == len(seen)
        assert [p for w in state.trained for p in range(w.start, w.stop)] == seen


class TestRestore:
    @given(st.integers(0, 20), st.lists(windows, max_size=3))
    def test_a_restored_loader_goes_on_as_the_saved_one(self, steps, skips):
        loader = Loader(size=9, seed=4, global_batch=2, skips=skips)
        read(loader, steps)
        other = Loader(size=9, seed=4, global_batch=2)
        other.restore(loader.state())
        assert other.state() == loader.state()
        assert read(other, 5) == read(loader, 5)

    @pytest.mark.parametrize(
        ("field", "value"),
        [("size", 10), ("size", None), ("seed", 5), ("shuffle", False), ("schema", "andon.loader/0")],
    )
    def test_a_state_of_another_order_is_refused_by_name(self, field, value):
        state = LoaderState(**({"size": 9, "seed": 4, "position": 0, "consumed_samples": 0} | {field: value}))
        with pytest.raises(LoaderError, match=field):
            Loader(size=9, seed=4, global_batch=2).restore(state)

    @pytest.mark.parametrize(
        ("arguments", "what"),
        [
            ({"size": 0}, "size"),
            ({"global_batch": 3, "world_size": 2}, "global_batch"),
            ({"rank": 2, "world_size": 2}, "rank"),
            ({"position": -1}, "position"),
        ],
    )
    def test_impossible_arguments_are_named(self, arguments, what):
        with pytest.raises(LoaderError, match=what):
            Loader(**({"size": 9, "seed": 1, "global_batch": 2} | arguments))
