"""What deciding costs: the oracle's CPU time, beside the decisions of BagPipe's published program in numpy.

The published program (github.com/uw-mad-dash/bagpipe) keeps, for each table, the last batch that reads a row and how
long it stays in the cache, as dense arrays, and takes a batch's distinct rows by ``np.unique``. Its decisions are here
twice: statement by statement as published (``np.isin`` for ``np.in1d``, which numpy has no more), and with less work.
What it loses time with beside these (scans of whole arrays each batch, remote calls, JSON) is left out. All are one
thread; CPU time of it. They take turns of a dozen batches, since each is a process of its own where it is used, with
the processor's caches to itself.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate, islice

import numpy as np
import numpy.typing as npt

import flexshard
from benchmarks.lookahead.streams import CRITEO_ROWS, criteo, zipf_probabilities
from flexshard.costmodels import lookahead_reads
from flexshard.executors.lookahead.oracle import LookaheadOracle

__all__ = ["main"]

_TURN, _TURNS = 12, 3
IntArray = npt.NDArray[np.int64]


Ids = npt.NDArray[np.uint32]


class PublishedProgram:
    """Which rows of a batch are fetched, kept, and synchronised now, later or not at all; as published.

    ``parse_data`` and ``train_addition`` of ``BagPipe/load_csv.py`` and ``BagPipe/oraclecacher.py``.
    """

    def __init__(self, rows: tuple[int, ...], ahead: int) -> None:
        self._latest = [np.full(number, -1, np.int64) for number in rows]
        self._stays = [np.full(number, -1, np.int64) for number in rows]
        self._ahead = ahead
        self._current: list[tuple[Ids, Ids]] = []
        self._known: deque[list[tuple[Ids, Ids, Ids]]] = deque()
        self._arrived = self._emitted = 0

    def arrive(self, batch: list[Ids]) -> None:
        """A batch, table by table; the one before it is known then, which needs its follower."""
        following = []
        for ids in batch:
            distinct, counts = np.unique(ids, return_counts=True)
            following.append((distinct, distinct[counts == 1]))
        if self._current:
            known = []
            for latest, (ids, once), (next_ids, _) in zip(self._latest, self._current, following, strict=True):
                latest[ids] = self._arrived - 1
                is_next = np.isin(ids, next_ids, assume_unique=True)
                _sync_now, sync_later = ids[is_next], ids[~is_next]
                known.append((ids, once, sync_later))
            self._known.append(known)
        self._current = following
        self._arrived += 1

    def emit(self) -> int:
        """Decide for the oldest; rows that are fetched for it."""
        now, fetched = self._emitted, 0
        for latest, stays, (ids, once, sync_later) in zip(
            self._latest, self._stays, self._known.popleft(), strict=True
        ):
            fetched += ids[stays[ids] < now].size
            last = latest[ids]
            kept = ids[np.logical_and(last <= now + self._ahead, last > now)]
            stays[kept] = latest[kept]
            no_sync = once[latest[once] == now]
            _sync_later = sync_later[np.isin(sync_later, no_sync, assume_unique=True, invert=True)]
        self._emitted += 1
        return fetched


class ShortProgram:
    """The same decisions with less work: each row is looked up once in each array."""

    def __init__(self, rows: tuple[int, ...]) -> None:
        self._latest = [np.full(number, -1, np.int64) for number in rows]
        self._stays = [np.full(number, -1, np.int64) for number in rows]
        self._known: deque[list[tuple[Ids, IntArray]]] = deque()
        self._arrived = self._emitted = 0

    def arrive(self, batch: list[Ids]) -> None:
        """A batch, table by table."""
        found = [np.unique(ids, return_counts=True) for ids in batch]
        for latest, (ids, _) in zip(self._latest, found, strict=True):
            latest[ids] = self._arrived
        self._known.append(found)  # type: ignore[arg-type]  # named tuples, as NumPy types them
        self._arrived += 1

    def emit(self) -> int:
        """Decide for the oldest; rows that are fetched for it."""
        now, fetched = self._emitted, 0
        oldest, following = self._known.popleft(), self._known[0] if self._known else None
        for table, (ids, counts) in enumerate(oldest):
            last = self._latest[table][ids]
            fetched += ids[self._stays[table][ids] < now].size
            self._stays[table][ids] = last
            once = (counts == 1) & (last == now)
            needed = np.isin(ids, following[table][0], assume_unique=True) if following else np.zeros(len(ids), bool)
            _now, _later = ids[needed & ~once], ids[~needed & ~once]
        self._emitted += 1
        return fetched


def check_alike() -> None:
    """All decide alike, where ours keeps no row beyond the batches known."""
    batches, ahead = [batch.astype(np.uint32) for batch in islice(criteo(2_048), 40)], 8
    first = np.array(list(accumulate(CRITEO_ROWS, initial=0))[:-1], np.uint32)
    ours = LookaheadOracle(sum(CRITEO_ROWS), 1_000_000, keep=False)
    published, short = PublishedProgram(CRITEO_ROWS, ahead), ShortProgram(CRITEO_ROWS)
    fetched = []
    for number, batch in enumerate(batches):
        admission = ours.admit(np.ascontiguousarray(batch.T).reshape(-1))
        assert admission is not None
        fetched.append(admission.fetched.rows.size)
        by_table = [batch[:, table] - first[table] for table in range(len(CRITEO_ROWS))]
        published.arrive(by_table)
        short.arrive(by_table)
        if number >= ahead:
            ours.retire()
            assert short.emit() == fetched[number - ahead]
        if number > ahead:  # it takes a batch up when its follower is there
            assert published.emit() == fetched[number - ahead - 1]


def measure(samples: int, ahead: int, features: int, profiles: Sequence[flexshard.AccessProfile]) -> None:
    """Print samples per second of CPU time of all, and how many rows they fetch."""
    rows = CRITEO_ROWS[:features]
    first = np.array(list(accumulate(rows, initial=0))[:-1])
    first_measured = 2 * ahead  # all caches are as full as they become
    number_of_batches = first_measured + _TURN * _TURNS
    source = criteo(samples)
    batches = [batch[:, :features].astype(np.uint32) for batch in islice(source, number_of_batches)]
    ids = [np.ascontiguousarray(batch.T).reshape(-1) for batch in batches]  # table after table, as batches come
    distinct = max(np.unique(batch).size for batch in ids[:2])
    needed = sum(lookahead_reads(profile, samples, ahead).cached for profile in profiles[:features])
    ours = LookaheadOracle(sum(rows), min(sum(rows), int(1.05 * needed) + distinct))
    published, short = PublishedProgram(rows, ahead), ShortProgram(rows)
    by_table = [[batch[:, table] - np.uint32(first[table]) for table in range(features)] for batch in batches]
    fetched = []

    def decide(number: int) -> None:
        admission = ours.admit(ids[number])
        if ours.window > ahead:
            ours.retire()
        assert admission is not None
        fetched.append(admission.fetched.rows.size)

    def decide_as_published(number: int) -> None:
        published.arrive(by_table[number])
        if number > ahead:
            published.emit()

    def decide_shortly(number: int) -> None:
        short.arrive(by_table[number])
        if number >= ahead:
            short.emit()

    ways = (decide, decide_as_published, decide_shortly)
    times: list[list[float]] = [[] for _ in ways]
    for start in range(0, number_of_batches, _TURN):  # from the first batch on: by then memory is shared out, too
        for way, found in zip(ways, times, strict=True):
            found += [_seconds(way, number) for number in range(start, min(start + _TURN, number_of_batches))]
    our, as_published, shortly = (float(np.median(found[first_measured:])) for found in times)
    print(
        f"  {samples:>7,} samples, {features} features, lookahead {ahead:>3}: {samples / our / 1e6:5.2f} M samples/s"
        f" (best {samples / min(times[0][first_measured:]) / 1e6:.2f}), {our * 1e9 / samples / features:.1f} ns a"
        f" lookup; published program {samples / as_published / 1e6:.2f} M, ratio {as_published / our:.1f}; with less"
        f" work {samples / shortly / 1e6:.2f} M, ratio {shortly / our:.1f}; fetched"
        f" {np.mean(fetched[first_measured:]):,.0f} of {distinct:,}"
    )


def _seconds(work: Callable[[int], None], number: int) -> float:
    """CPU time of a batch."""
    start = time.thread_time()
    work(number)
    return time.thread_time() - start


def main() -> None:
    """Growth with batch, features and lookahead (the paper's Figure 17)."""
    check_alike()
    profiles = [flexshard.AccessProfile.from_probabilities(zipf_probabilities(rows)) for rows in CRITEO_ROWS]
    print(f"Oracle: {len(CRITEO_ROWS)} tables of {sum(CRITEO_ROWS):,} rows, Zipf 1.05, ids hashed")
    for samples, ahead, features in (
        (16_384, 50, 26), (16_384, 100, 26), (16_384, 200, 26), (131_072, 20, 26), (4_096, 50, 26), (65_536, 20, 26),
        (16_384, 50, 13),
    ):  # fmt: skip
        measure(samples, ahead, features, profiles)
