"""What deciding costs: the oracle's CPU time, beside the decisions of BagPipe's published program in numpy.

The published program (github.com/uw-mad-dash/bagpipe) keeps, for each table, the last batch that reads a row and how
long it stays in the cache, as dense arrays, and takes a batch's distinct rows by ``np.unique``. Its decisions are
written here as its authors would with numpy today (``np.isin`` for ``np.in1d``, which numpy has no more); what they
lose time with beside these (scans of whole arrays each batch, remote calls, JSON) is left out. Both are one thread;
CPU time of it. They take turns of a dozen batches, since each is a process of its own where it is used, with the
processor's caches to itself.
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


class PublishedProgram:
    """Which rows of a batch are fetched, kept, and synchronised now, later or not at all."""

    def __init__(self, rows: tuple[int, ...]) -> None:
        self._latest = [np.full(number, -1, np.int64) for number in rows]
        self._stays = [np.full(number, -1, np.int64) for number in rows]
        self._known: deque[list[tuple[IntArray, IntArray]]] = deque()
        self._arrived = 0
        self._emitted = 0

    def arrive(self, batch: list[npt.NDArray[np.uint32]]) -> None:
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
            fetch = ids[self._stays[table][ids] < now]
            self._stays[table][ids] = last
            once = (counts == 1) & (last == now)
            needed = np.isin(ids, following[table][0], assume_unique=True) if following else np.zeros(len(ids), bool)
            _now, _later = ids[needed & ~once], ids[~needed & ~once]
            fetched += fetch.size
        self._emitted += 1
        return fetched


def check_alike() -> None:
    """Both decide alike, where ours keeps no row beyond the batches known."""
    batches, ahead = [batch.astype(np.uint32) for batch in islice(criteo(2_048), 40)], 8
    first = np.array(list(accumulate(CRITEO_ROWS, initial=0))[:-1], np.uint32)
    ours, theirs = LookaheadOracle(sum(CRITEO_ROWS), 1_000_000, keep=False), PublishedProgram(CRITEO_ROWS)
    fetched = []
    for number, batch in enumerate(batches):
        admission = ours.admit(np.ascontiguousarray(batch.T).reshape(-1))
        assert admission is not None
        fetched.append(admission.fetched.size)
        theirs.arrive([batch[:, table] - first[table] for table in range(len(CRITEO_ROWS))])
        if number >= ahead:
            ours.retire()
            assert theirs.emit() == fetched[number - ahead]


def measure(samples: int, ahead: int, features: int, profiles: Sequence[flexshard.AccessProfile]) -> None:
    """Print samples per second of CPU time of both, and how many rows they fetch."""
    rows = CRITEO_ROWS[:features]
    first = np.array(list(accumulate(rows, initial=0))[:-1])
    first_measured = 2 * ahead  # both caches are as full as they become
    number_of_batches = first_measured + _TURN * _TURNS
    source = criteo(samples)
    batches = [batch[:, :features].astype(np.uint32) for batch in islice(source, number_of_batches)]
    ids = [np.ascontiguousarray(batch.T).reshape(-1) for batch in batches]  # table after table, as batches come
    distinct = max(np.unique(batch).size for batch in ids[:2])
    needed = sum(lookahead_reads(profile, samples, ahead).cached for profile in profiles[:features])
    ours = LookaheadOracle(sum(rows), min(sum(rows), int(1.05 * needed) + distinct))
    theirs = PublishedProgram(rows)
    by_table = [[batch[:, table] - np.uint32(first[table]) for table in range(features)] for batch in batches]
    fetched = []

    def decide(number: int) -> None:
        admission = ours.admit(ids[number])
        if ours.window > ahead:
            ours.retire()
        assert admission is not None
        fetched.append(admission.fetched.size)

    def decide_as_published(number: int) -> None:
        theirs.arrive(by_table[number])
        if number >= ahead:
            theirs.emit()

    our_times, their_times = [], []
    starts = range(first_measured, number_of_batches, _TURN)
    for turn in (range(first_measured), *(range(start, start + _TURN) for start in starts)):
        our_times += [_seconds(decide, number) for number in turn]
        their_times += [_seconds(decide_as_published, number) for number in turn]
    our_times, their_times = our_times[first_measured:], their_times[first_measured:]
    our, their = np.median(our_times), np.median(their_times)
    print(
        f"  {samples:>7,} samples, {features} features, lookahead {ahead:>3}: {samples / our / 1e6:5.2f} M samples/s"
        f" (best {samples / min(our_times) / 1e6:.2f}), {our * 1e9 / samples / features:.1f} ns a lookup; published"
        f" program {samples / their / 1e6:.2f} M; ratio {their / our:.1f}; fetched"
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
