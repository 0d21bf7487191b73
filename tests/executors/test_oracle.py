"""The lookahead oracle against the paper's example, a plain rewriting of it, and what it promises."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

pytest.importorskip("numba")

from flexshard.errors import CacheError
from flexshard.executors.lookahead.oracle import Admission, LookaheadOracle


def ids(*rows: int) -> np.ndarray:
    return np.array(rows, np.int64)


def test_the_papers_figure_6_step_by_step() -> None:
    """Batches {3, 9}, {3, 4}, {6, 3}, {6, 1}; what is fetched for each, and what leaves after it."""
    oracle = LookaheadOracle(10, 8, keep=False)
    batches = [ids(3, 9), ids(3, 4), ids(6, 3), ids(6, 1)]
    admitted = [oracle.admit(batch) for batch in batches[:3]]
    fetched = [batch.fetched.rows.tolist() for batch in admitted]
    assert fetched == [[3, 9], [4], [6]]
    assert admitted[1].rows[admitted[1].carried].tolist() == [3]
    assert oracle.retire().rows.tolist() == [9]  # after batch 1; 3 is used until batch 3
    last = oracle.admit(batches[3])
    assert last.fetched.rows.tolist() == [1]
    assert last.rows[last.carried].tolist() == [6]
    assert oracle.retire().rows.tolist() == [4]
    assert oracle.retire().rows.tolist() == [3]  # 6 is used by batch 4
    assert sorted(oracle.retire().rows.tolist()) == [1, 6]
    assert oracle.held().rows.size == 0


@st.composite
def streams(draw: st.DrawFn) -> tuple[int, list[np.ndarray], int, int]:
    """Rows, batches, how many are known beside the current one, and slots."""
    rows = draw(st.integers(1, 12))
    batch = st.lists(st.integers(0, rows - 1), min_size=0, max_size=8)
    batches = [np.array(one, np.int64) for one in draw(st.lists(batch, min_size=1, max_size=14))]
    return rows, batches, draw(st.integers(0, 5)), draw(st.integers(1, 14))


def run(
    rows: int, batches: list[np.ndarray], ahead: int, slots: int, *, keep: bool
) -> tuple[list[Admission], LookaheadOracle] | None:
    """Train on the batches, the next ``ahead`` of them known; with what the cache and its host hold, checked.

    Rows are numbers that count their updates. Rows travel as early as they may. None if the slots do not suffice.
    """
    oracle = LookaheadOracle(rows, slots, keep=keep)
    host, cache, truth = np.zeros(rows, np.int64), np.full(slots, -1), np.zeros(rows, np.int64)
    waiting, under_way, admitted = deque(batches), deque(), []

    def take_up() -> None:
        while waiting and len(under_way) <= ahead:
            before = oracle.held()
            found = oracle.admit(waiting[0])
            if found is None:
                after = oracle.held()
                assert (before.rows.tolist(), before.slots.tolist()) == (after.rows.tolist(), after.slots.tolist())
                return
            ours = waiting.popleft()
            assert found.rows.tolist() == list(dict.fromkeys(ours.tolist()))
            host[found.evicted.rows] = cache[found.evicted.slots]
            cache[found.fetched.slots] = host[found.fetched.rows]
            under_way.append((ours, found))
            admitted.append(found)

    take_up()
    while under_way:
        ours, found = under_way.popleft()
        assert (oracle.find(found.rows) == found.row_slots).all()
        assert (cache[found.slots] == truth[ours]).all()  # section 3.2: never a row that misses an update
        cache[found.row_slots] += 1
        truth[found.rows] += 1
        gone = oracle.retire()
        host[gone.rows] = cache[gone.slots]
        take_up()
    if waiting:
        least = len(set(waiting[0].tolist()))
        assert oracle.needed[0] == least > slots
        return None
    held = oracle.held()
    host[held.rows] = cache[held.slots]
    assert (host == truth).all()
    return admitted, oracle


@settings(max_examples=300, deadline=None)
@given(streams(), st.booleans())
def test_no_row_is_ever_stale(stream: tuple[int, list[np.ndarray], int, int], keep: bool) -> None:
    run(*stream, keep=keep)


@settings(max_examples=200, deadline=None)
@given(streams())
def test_rows_are_fetched_as_often_as_must_be(stream: tuple[int, list[np.ndarray], int, int]) -> None:
    """Algorithm 1 fetches a row where none of the batches known with its last use reads it, and no policy that holds
    only rows that are known to be read again does with less; keeping rows while there is room fetches each once.
    """
    rows, batches, ahead, _ = stream
    expected, last = 0, {}
    for number, batch in enumerate(batches):
        for row in set(batch.tolist()):
            expected += row not in last or number - last[row] > ahead
            last[row] = number
    exact, _ = run(rows, batches, ahead, rows, keep=False)
    kept, _ = run(rows, batches, ahead, rows, keep=True)
    assert sum(batch.fetched.rows.size for batch in exact) == expected
    assert sum(batch.fetched.rows.size for batch in kept) == len(last) <= expected


def belady(batches: list[np.ndarray], slots: int) -> int:
    """Fetches of the offline optimum: what is not in the batch and needed last leaves."""
    cache: set[int] = set()
    fetches = 0
    for number, batch in enumerate(batches):
        wanted = set(batch.tolist())
        fetches += len(wanted - cache)
        cache |= wanted

        def next_use(row: int, number: int = number) -> int:
            return next((at for at in range(number + 1, len(batches)) if row in batches[at]), len(batches))

        for row in sorted(cache - wanted, key=next_use, reverse=True)[: max(len(cache) - slots, 0)]:
            cache.remove(row)
    return fetches


class Plain:
    """The same decisions with dicts and lists."""

    def __init__(self, slots: int, *, keep: bool) -> None:
        self.slots, self.keep, self.batch = slots, keep, 0
        self.last: dict[int, int] = {}  # of the rows that are in the cache
        self.idle: list[int] = []
        self.under_way: deque[tuple[int, list[int]]] = deque()
        self.needed = (0, 0)

    def admit(self, batch: list[int]) -> tuple[list[int], list[int], list[int]] | None:
        rows = list(dict.fromkeys(batch))
        missing = [row for row in rows if row not in self.last]
        idle = [row for row in self.idle if row not in rows]
        leaving = max(len(missing) - (self.slots - len(self.last)), 0)
        if leaving > len(idle):
            self.needed = len(rows), len(missing)
            return None
        self.batch += 1
        evicted, self.idle = idle[:leaving], idle[leaving:]
        carried = [row for row in rows if self.last.get(row) == self.batch - 1]
        for row in evicted:
            del self.last[row]
        self.last |= dict.fromkeys(rows, self.batch)
        self.under_way.append((self.batch, rows))
        return missing, evicted, carried

    def retire(self) -> list[int]:
        number, rows = self.under_way.popleft()
        over = [row for row in rows if self.last.get(row) == number]
        if self.keep:
            self.idle += over
            return []
        for row in over:
            del self.last[row]
        return over


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 8), st.integers(1, 5), st.booleans(), st.sampled_from(["i8", "u4", "i4"]))
def test_decisions_are_those_of_a_plain_model(
    data: st.DataObject, rows: int, slots: int, keep: bool, kind: str
) -> None:
    """Over long streams in few slots, batches refused and then others, retired in between as it comes."""
    oracle, plain = LookaheadOracle(rows, slots, keep=keep), Plain(slots, keep=keep)
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    refused = 0
    for _ in range(120):
        if plain.under_way and rng.random() < 0.5:
            assert oracle.retire().rows.tolist() == plain.retire()
        batch = rng.integers(0, rows, rng.integers(0, 5)).astype(kind)
        expected, found = plain.admit(batch.tolist()), oracle.admit(batch)
        if expected is None:
            refused += 1
            assert found is None
            assert oracle.needed == plain.needed
        else:
            assert found is not None
            assert found.fetched.rows.tolist() == expected[0]
            assert (oracle.find(found.fetched.rows) == found.fetched.slots).all()
            assert found.evicted.rows.tolist() == expected[1]
            assert found.rows[found.carried].tolist() == expected[2]
            assert (oracle.find(batch.astype(np.int64)) == found.slots).all()
        assert sorted(oracle.held().rows.tolist()) == sorted(plain.last)
        assert oracle.window == len(plain.under_way)


def test_a_window_shrinks_before_the_cache_overflows() -> None:
    oracle = LookaheadOracle(10, 4)
    assert oracle.admit(ids(1, 2, 3)) is not None
    assert oracle.admit(ids(4, 5)) is None
    assert oracle.needed == (2, 2)
    assert oracle.admit(ids(4, 1)) is not None
    oracle.retire()
    assert oracle.window == 1
    third = oracle.admit(ids(5, 6, 4))
    assert sorted(third.evicted.rows.tolist()) == [2, 3]
    assert third.rows[third.carried].tolist() == [4]


def test_what_has_been_idle_longest_leaves_first_and_nothing_that_comes_again() -> None:
    oracle = LookaheadOracle(10, 4)
    for batch in (ids(0, 1), ids(2), ids(3)):
        oracle.admit(batch)
        oracle.retire()
    found = oracle.admit(ids(0, 5))  # 0 has been idle as long as 1 has, and is read again
    assert found.evicted.rows.tolist() == [1]
    assert oracle.find(ids(0, 1, 2, 3, 5)).tolist()[1] == -1


@pytest.mark.parametrize(("rows", "slots"), [(10, 0), (-1, 3), (1 << 33, 3), (10, 1 << 32)])
def test_sizes_that_cannot_be(rows: int, slots: int) -> None:
    with pytest.raises(CacheError, match=r"slots|num_rows"):
        LookaheadOracle(rows, slots)


@pytest.mark.parametrize(
    ("dtype", "wrong"), [("u4", 900), ("u4", 2**32 - 1), ("i4", -1), ("i8", -(2**63)), (">i8", 2**40)]
)
@pytest.mark.parametrize("place", [0, 300, 999])
def test_an_id_that_is_no_row_leaves_everything_as_it_was_wherever_it_is(dtype: str, wrong: int, place: int) -> None:
    oracle, other = LookaheadOracle(900, 600), LookaheadOracle(900, 600)
    rng = np.random.default_rng(0)
    for number in range(6):
        batch = rng.integers(0, 900, 1000).astype(dtype)
        broken = batch.copy()
        broken[place] = wrong
        with pytest.raises(CacheError, match=rf"row {wrong} is outside the table, which has rows 0 to 899"):
            oracle.admit(broken)
        batch = batch[:500]
        found, expected = oracle.admit(batch), other.admit(batch)
        assert (found is None) == (expected is None)
        if found is not None:
            for name in ("slots", "rows", "row_slots", "carried"):
                assert (getattr(found, name) == getattr(expected, name)).all()
            for name in ("fetched", "evicted"):
                ours, others = getattr(found, name), getattr(expected, name)
                assert (ours.rows == others.rows).all()
                assert (ours.slots == others.slots).all()
        if number % 2:
            assert (oracle.retire().rows == other.retire().rows).all()
    assert (oracle.find(np.arange(900)) == other.find(np.arange(900))).all()


@pytest.mark.parametrize(("dtype", "rows"), [("i1", 1000), ("i2", 100_000), ("i4", 10), ("i8", 10), (">i8", 10)])
def test_negative_ids_of_any_width_are_no_rows(dtype: str, rows: int) -> None:
    oracle = LookaheadOracle(rows, 4)
    with pytest.raises(CacheError, match=r"row -2 is outside the table"):
        oracle.admit(np.array([1, -2], dtype))
    with pytest.raises(CacheError, match=r"row -2 is outside the table"):
        oracle.find(np.array([1, -2], dtype))


@pytest.mark.parametrize("wrong", [[-1], [3, 4], [1 << 40], [0.5], [[1]], [True]])
def test_ids_that_are_no_rows(wrong: list[object]) -> None:
    oracle = LookaheadOracle(4, 4)
    oracle.admit(ids(1, 2))
    with pytest.raises(CacheError, match=r"outside the table, which has rows 0 to 3|whole numbers in one dimension"):
        oracle.admit(np.array(wrong))
    with pytest.raises(CacheError):
        oracle.find(np.array(wrong))
    assert sorted(oracle.held().rows.tolist()) == [1, 2]
    oracle.retire()
    with pytest.raises(CacheError, match="no batch is under way"):
        oracle.retire()
