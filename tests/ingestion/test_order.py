"""The order of an epoch, on its own: what it holds, however it is shuffled, cut and shared out."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from flexshard.ingestion.order import EpochOrder, OrderSettings


@st.composite
def orders(draw: st.DrawFn) -> EpochOrder:
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=30))
    rows = sum(lengths)
    shuffle = draw(st.sampled_from([None, "samples", "sessions"]))
    whole = shuffle != "samples" and draw(st.booleans())
    splits = sorted({0, *draw(st.lists(st.integers(0, rows - 1), max_size=6))})
    return EpochOrder(
        OrderSettings(
            num_rows=rows,
            batch_size=draw(st.integers(1, 12)),
            lanes=draw(st.integers(1, 5)),
            shuffle=shuffle,
            window=draw(st.integers(1, 60)),
            splits=np.array(splits),
            sessions=np.cumsum([0, *lengths[:-1]]),
            whole_sessions=whole,
        ),
        seed=draw(st.integers(0, 2**40)),
        epoch=draw(st.integers(0, 3)),
    )


def session_of(order: EpochOrder, rows: np.ndarray) -> np.ndarray:
    assert order.settings.sessions is not None
    return np.searchsorted(order.settings.sessions, rows, side="right") - 1


@given(order=orders())
@settings(max_examples=300, deadline=None)
def test_every_row_is_in_one_batch(order: EpochOrder) -> None:
    rows = order.settings.num_rows
    assert sorted(order.rows(0, rows).tolist()) == list(range(rows))
    spans = sorted(zip(order.starts.tolist(), order.stops.tolist(), strict=True))
    assert spans[0][0] == 0
    assert spans[-1][1] == rows
    assert all(a[1] == b[0] for a, b in pairwise(spans))
    for first, stop in spans:  # any part of the sequence by itself is what it is in the whole
        np.testing.assert_array_equal(order.rows(first, stop), order.rows(0, rows)[first:stop])
    if not order.settings.whole_sessions:
        sizes = order.stops - order.starts
        assert (sizes[:-1] == order.settings.batch_size).all()


@given(order=orders())
@settings(max_examples=300, deadline=None)
def test_sessions_stay_whole_and_in_order(order: EpochOrder) -> None:
    rows = order.settings.num_rows
    if order.settings.shuffle == "samples":
        return
    sequence = order.rows(0, rows)
    for session in range(int(session_of(order, sequence).max()) + 1):
        own = sequence[session_of(order, sequence) == session]
        assert (np.diff(own) > 0).all()  # of no shuffling does a session's order depend
    if order.settings.whole_sessions:
        for first, stop in zip(order.starts.tolist(), order.stops.tolist(), strict=True):
            held = session_of(order, order.rows(first, stop))
            for session in set(held.tolist()):
                assert (session_of(order, np.arange(rows)) == session).sum() == (held == session).sum()
            assert stop - first <= order.settings.batch_size or len(set(held.tolist())) == 1


@given(order=orders(), worlds=st.lists(st.integers(1, 6), min_size=1, max_size=5), pad=st.booleans())
@settings(max_examples=400, deadline=None)
def test_ranks_that_come_and_go_read_every_row_once(order: EpochOrder, worlds: list[int], pad: bool) -> None:
    """A step of each number of ranks in turn, until the epoch ends: whatever the number was before."""
    taken, repeated, consumed, turn = [], 0, 0, 0
    while consumed < order.num_batches:
        world = worlds[turn % len(worlds)]
        assert order.steps(world, drop_last=False, consumed=consumed) >= 1
        shares = [order.share(consumed, rank, world, pad_last=pad) for rank in range(world)]
        sizes = [sum(stop - first for first, stop in share.ranges) for share in shares]
        assert min(sizes) > 0
        for share, size in zip(shares, sizes, strict=True):
            rows = np.concatenate([order.rows(first, stop) for first, stop in share.ranges])
            taken += rows[: size - share.repeated].tolist()
            repeated += share.repeated
        if not order.settings.whole_sessions:
            last = consumed + world >= order.num_batches
            if pad or not last:
                assert set(sizes) == {order.settings.batch_size}
            else:
                assert max(sizes) - min(sizes) <= 1
        consumed, turn = min(order.num_batches, consumed + world), turn + 1
    assert sorted(taken) == list(range(order.settings.num_rows))
    if worlds == [1] and not pad:
        assert repeated == 0


@given(order=orders(), world=st.integers(1, 6))
@settings(max_examples=100, deadline=None)
def test_ranks_have_as_many_batches(order: EpochOrder, world: int) -> None:
    rows, size = order.settings.num_rows, order.settings.batch_size
    if order.settings.whole_sessions:
        assert order.steps(world, drop_last=True) == order.num_batches // world
        assert order.steps(world, drop_last=False) == -(-order.num_batches // world)
    else:
        assert order.steps(world, drop_last=True) == rows // (size * world)
        assert order.steps(world, drop_last=False) == -(-rows // (size * world))


def order_of(rows: int, **how: object) -> EpochOrder:
    plain = {"lanes": 1, "shuffle": None, "window": 64, "splits": np.arange(0, rows, 50), "sessions": None}
    return EpochOrder(OrderSettings(num_rows=rows, whole_sessions=False, **(plain | how)), 3, 0)  # type: ignore[arg-type]


def test_lanes_are_stretches_of_their_own() -> None:
    order = order_of(100, batch_size=10, lanes=3)
    assert order.starts.tolist() == [0, 30, 60, 10, 40, 70, 20, 50, 80, 90]  # three each, and one that is left over
    assert order.lane_stop(29) == 30
    assert order.lane_stop(95) == 100


def test_windows_hold_what_is_shuffled_together() -> None:
    order = order_of(1000, batch_size=8, shuffle="samples", window=100)
    assert set(np.diff(order.windows)[:-1]) == {96}  # whole batches, so that none needs two windows
    rows = order.rows(0, 96)
    splits = np.unique(rows // 50)
    assert splits.size <= 3  # two row groups, or parts of three, come from anywhere
    assert not np.array_equal(np.sort(rows), rows)


def test_the_order_is_what_it_was() -> None:
    """A checkpoint of today goes on tomorrow: the numbers themselves are kept, whatever NumPy is installed."""
    order = order_of(20, batch_size=4, shuffle="samples", window=8, splits=np.arange(0, 20, 5))
    assert order.rows(0, 20).tolist() == FIXED


FIXED = [3, 2, 4, 0, 7, 5, 6, 1, 8, 13, 10, 9, 12, 15, 11, 14, 19, 18, 17, 16]


@pytest.mark.parametrize("shuffle", ["samples", "sessions"])
def test_seeds_and_epochs_shuffle_otherwise(shuffle: str) -> None:
    settings_of = OrderSettings(400, 10, 1, shuffle, 80, np.arange(0, 400, 20), np.arange(0, 400, 4), False)
    first = EpochOrder(settings_of, 1, 0).rows(0, 400)
    for seed, epoch in ((1, 1), (2, 0), (1 + 2**32, 0)):
        assert not np.array_equal(first, EpochOrder(settings_of, seed, epoch).rows(0, 400))
    np.testing.assert_array_equal(first, EpochOrder(settings_of, 1, 0).rows(0, 400))
