"""Which rows every batch of an epoch holds: arithmetic on (seed, epoch, position), the same for whoever asks.

An epoch is one sequence of all rows. Batches are ranges of *positions* in it; batch ``n`` belongs to lane ``n mod
lanes``, and each lane is a stretch of the sequence of its own, so that ranks that read every lanes-th batch read
different parts of the files. Where rows are shuffled, row groups (splits) come in a random order, and what falls into
one window of positions is shuffled again; so no more than a window is in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

__all__ = ["EpochOrder", "OrderSettings", "Share", "Window"]

IntArray = npt.NDArray[np.int64]
Range = tuple[int, int]


@dataclass(frozen=True)
class OrderSettings:
    """What an epoch's order follows from, beside the seed and the epoch.

    Attributes:
        num_rows: of the dataset.
        batch_size: rows per batch; with whole sessions at most, but for longer sessions.
        lanes: stretches of the epoch that are read side by side.
        shuffle: nothing, ``samples``, or ``sessions`` whose samples stay in order.
        window: rows that are shuffled together.
        splits: rows at which the stretches start that are read in a random order, from 0; ascending.
        sessions: rows at which sessions start, from 0; ascending. None where they are not needed.
        whole_sessions: batches end where sessions do.
    """

    num_rows: int
    batch_size: int
    lanes: int
    shuffle: str | None
    window: int
    splits: IntArray
    sessions: IntArray | None
    whole_sessions: bool


@dataclass(frozen=True)
class Share:
    """What a rank reads in a step.

    Attributes:
        ranges: positions of the epoch, from and to.
        repeated: how many of the rows at the end were in the epoch before.
    """

    ranges: tuple[Range, ...]
    repeated: int = 0


@dataclass(frozen=True)
class Window:
    """Rows that are in memory together.

    Attributes:
        firsts, sizes: stretches of rows to read, in the order of the files.
        places: of every row, among those, in the order in which they are trained.
    """

    firsts: IntArray
    sizes: IntArray
    places: IntArray


class EpochOrder:
    """The sequence of an epoch's rows and its batches.

    Attributes:
        starts, stops: positions of every batch, in the order in which they are trained; the last may be short.
    """

    def __init__(self, settings: OrderSettings, seed: int, epoch: int) -> None:
        self.settings = settings
        self._seed = [seed & 0xFFFFFFFF, seed >> 32, epoch & 0xFFFFFFFF, epoch >> 32]
        self._set_splits()
        self.starts, self.stops = self._batches()

    @property
    def num_batches(self) -> int:
        """Of all ranks together; the last may be short."""
        return self.starts.size

    @property
    def batches_in_lanes(self) -> int:
        """How many come from each lane in turn; those after them are what is left over."""
        return self._in_lanes

    def steps(self, world_size: int, *, drop_last: bool, consumed: int = 0) -> int:
        """Batches of each rank, after ``consumed`` batches of all ranks."""
        left = self.num_batches - consumed
        if drop_last:
            return max(0, left - self._is_short()) // world_size
        return -(-left // world_size)

    def share(self, consumed: int, rank: int, world_size: int, *, pad_last: bool) -> Share:
        """What a rank reads in the step after ``consumed`` batches of all ranks.

        Where fewer than a batch per rank are left, their rows are divided among the ranks, or with ``pad_last`` the
        epoch's first rows are read again until every rank has a batch.
        """
        if consumed + world_size <= self.num_batches - self._is_short():
            return Share((self._range(consumed + rank),))
        left = [self._range(number) for number in range(consumed, self.num_batches)]
        if pad_last:
            return self._padded(left, rank)
        return self._divided(left, rank, world_size)

    def rows(self, first: int, stop: int) -> IntArray:
        """Rows of the dataset at positions ``first`` to ``stop``."""
        if self.settings.shuffle is None:
            return np.arange(first, stop, dtype=np.int64)
        parts = []
        for window in range(self.window_of(first), self.window_of(stop - 1) + 1 if stop > first else 0):
            begin = int(self.windows[window])
            parts.append(self.window_rows(window)[max(0, first - begin) : stop - begin])
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def window_of(self, position: int) -> int:
        """The window that has a position."""
        return int(np.searchsorted(self.windows, position, side="right")) - 1

    def window_rows(self, window: int) -> IntArray:
        """Rows of the dataset in a window, in the order in which they are trained."""
        held = self.window(window)
        return np.asarray(_stretches(held.firsts, held.sizes)[held.places], np.int64)

    def window(self, window: int) -> Window:
        """What a window holds, and the order in which it is trained."""
        first, stop = int(self.windows[window]), int(self.windows[window + 1])
        begin = int(np.searchsorted(self._split_ends, first, side="right")) - 1
        end = int(np.searchsorted(self._split_ends, stop, side="left"))
        starts = np.maximum(self._split_ends[begin:end], first)
        sizes = np.minimum(self._split_ends[begin + 1 : end + 1], stop) - starts
        firsts = self._split_firsts[begin:end] + starts - self._split_ends[begin:end]
        ascending = np.argsort(firsts)
        places: IntArray = np.zeros(sizes.size, np.int64)
        places[ascending] = np.cumsum(sizes[ascending]) - sizes[ascending]  # at which each stretch of rows is read
        inside = _stretches(places, sizes)
        return Window(firsts[ascending], sizes[ascending], self._shuffled(window, inside, firsts, sizes))

    def lane_stop(self, position: int) -> int:
        """Where the lane ends that has a position."""
        return int(self._lane_bounds[self._lane_bounds.searchsorted(position, side="right")])

    # How the sequence is cut.

    def _set_splits(self) -> None:
        settings = self.settings
        splits = np.append(settings.splits, settings.num_rows)
        if settings.sessions is not None and (settings.shuffle == "sessions" or settings.whole_sessions):
            starts = np.append(settings.sessions, settings.num_rows)
            splits = starts[np.searchsorted(starts, splits)]
        splits = np.unique(splits)  # without row groups of no rows
        sizes = np.diff(splits)
        order = np.arange(sizes.size)
        if settings.shuffle is not None:
            order = np.random.RandomState([*self._seed, 0]).permutation(sizes.size)
        self._split_firsts: IntArray = splits[:-1][order]
        self._split_ends: IntArray = np.zeros(sizes.size + 1, np.int64)
        np.cumsum(sizes[order], out=self._split_ends[1:])

    @cached_property
    def _session_ends(self) -> IntArray:
        """Positions at which sessions start before windows are shuffled, and the end."""
        assert self.settings.sessions is not None
        starts = np.append(self.settings.sessions, self.settings.num_rows)
        if self.settings.shuffle is None:
            return starts
        firsts = np.searchsorted(starts, self._split_firsts)
        lasts = np.searchsorted(starts, self._split_firsts + np.diff(self._split_ends))
        sessions = _stretches(firsts, lasts - firsts)
        positions: IntArray = np.zeros(sessions.size + 1, np.int64)
        np.cumsum(np.diff(starts)[sessions], out=positions[1:])
        return positions

    @cached_property
    def windows(self) -> IntArray:
        """Positions at which windows start, and the end."""
        settings = self.settings
        step = max(1, settings.window // settings.batch_size) * settings.batch_size
        bounds = []
        for first, stop in zip(self._lane_bounds[:-1].tolist(), self._lane_bounds[1:].tolist(), strict=True):
            bounds.append(np.arange(first, stop, step if settings.shuffle is not None else max(1, stop - first)))
        found = np.unique(np.append(np.concatenate(bounds) if bounds else [], settings.num_rows)).astype(np.int64)
        if settings.whole_sessions:
            found = np.unique(self._session_ends[np.searchsorted(self._session_ends, found)])
        return found

    @cached_property
    def _lane_bounds(self) -> IntArray:
        """Positions at which lanes start, at which what is left over starts, and the end."""
        settings = self.settings
        if settings.whole_sessions:
            wanted = np.arange(settings.lanes + 1) * settings.num_rows // settings.lanes
            return self._session_ends[np.searchsorted(self._session_ends, wanted)]
        each = settings.num_rows // settings.batch_size // settings.lanes * settings.batch_size
        return np.append(np.arange(settings.lanes + 1) * each, settings.num_rows)

    def _batches(self) -> tuple[IntArray, IntArray]:
        settings = self.settings
        if not settings.whole_sessions:
            starts = np.arange(0, settings.num_rows, settings.batch_size)
            each = settings.num_rows // settings.batch_size // settings.lanes
            self._in_lanes = taken = each * settings.lanes
            starts[:taken] = starts[:taken].reshape(settings.lanes, each).T.reshape(-1)
            return starts, np.minimum(starts + settings.batch_size, settings.num_rows)
        return self._interleaved(self._cut_at_sessions())

    def _interleaved(self, cuts: IntArray) -> tuple[IntArray, IntArray]:
        """One batch of each lane in turn; what longer lanes have more comes last."""
        firsts = np.searchsorted(cuts, self._lane_bounds)
        each = int(np.diff(firsts).min()) if firsts.size > 1 else 0
        self._in_lanes = each * self.settings.lanes
        numbers = np.concatenate(
            [
                (firsts[None, :-1] + np.arange(each)[:, None]).reshape(-1),
                *(np.arange(first + each, last) for first, last in pairwise(firsts)),
            ]
        )
        return cuts[:-1][numbers], cuts[1:][numbers]

    def _cut_at_sessions(self) -> IntArray:
        """Positions at which batches of whole sessions start, and the end."""
        cuts: list[int] = [0]
        for window in range(self.windows.size - 1):
            first, stop = int(self.windows[window]), int(self.windows[window + 1])
            ends = self._ends_within(window)
            while cuts[-1] < stop:
                # As many sessions as fit, and at least one.
                last = int(np.searchsorted(ends, cuts[-1] + self.settings.batch_size, side="right")) - 1
                cuts.append(int(max(ends[last], ends[np.searchsorted(ends, cuts[-1], side="right")])))
            assert cuts[-1] == stop, (first, stop)
        return np.array(cuts, np.int64)

    def _ends_within(self, window: int) -> IntArray:
        """Positions at which sessions start in a window as it is shuffled, and its end."""
        first, stop = int(self.windows[window]), int(self.windows[window + 1])
        begin, end = np.searchsorted(self._session_ends, [first, stop])
        ends = self._session_ends[begin : end + 1]
        if self.settings.shuffle is None:
            return ends
        order = self._permutation(window, ends.size - 1)
        return np.concatenate([[first], first + np.cumsum(np.diff(ends)[order])])

    def _shuffled(self, window: int, places: IntArray, firsts: IntArray, sizes: IntArray) -> IntArray:
        """Places of rows, of stretches one after the other, in the order in which they are trained."""
        if self.settings.shuffle is None:
            return places
        if self.settings.shuffle == "samples":
            return places[self._permutation(window, places.size)]
        # What stays together: the rows of a session in a stretch.
        sessions, starts = self.settings.sessions, []
        assert sessions is not None
        for first, size, passed in zip(firsts.tolist(), sizes.tolist(), np.cumsum(sizes) - sizes, strict=True):
            begin, end = np.searchsorted(sessions, [first, first + size])
            if begin == end or sessions[begin] != first:
                starts.append(np.array([passed]))
            starts.append(sessions[begin:end] - first + passed)
        units = np.concatenate(starts)
        order = self._permutation(window, units.size)
        lengths = np.diff(np.append(units, places.size))[order]
        return places[_stretches(units[order], lengths)]

    def _permutation(self, window: int, size: int) -> IntArray:
        # The one generator whose permutations NumPy promises never to change.
        return np.asarray(np.random.RandomState([*self._seed, 1 + window]).permutation(size), np.int64)

    # The last step.

    def _range(self, number: int) -> Range:
        return int(self.starts[number]), int(self.stops[number])

    def _is_short(self) -> bool:
        """Whether the last batch is not whole; batches of whole sessions always are."""
        if self.settings.whole_sessions or not self.num_batches:
            return False
        return int(self.stops[-1] - self.starts[-1]) < self.settings.batch_size

    def _padded(self, left: Sequence[Range], rank: int) -> Share:
        if self.settings.whole_sessions:
            if rank < len(left):
                return Share((left[rank],))
            again = self._range((rank - len(left)) % self.num_batches)
            return Share((again,), again[1] - again[0])
        size, have = self.settings.batch_size, [left[rank]] if rank < len(left) else []
        missing = size - sum(stop - first for first, stop in have)
        # How many rows the ranks before take again.
        before = size * rank - sum(stop - first for first, stop in left[:rank])
        ranges, taken = list(have), 0
        while taken < missing:
            first = (before + taken) % self.settings.num_rows
            stop = min(self.settings.num_rows, first + missing - taken)
            ranges.append((first, stop))
            taken += stop - first
        return Share(tuple(ranges), missing)

    def _divided(self, left: Sequence[Range], rank: int, world_size: int) -> Share:
        total = sum(stop - first for first, stop in left)
        cuts = np.arange(world_size + 1) * total // world_size
        if self.settings.whole_sessions:
            cuts = self._near_sessions(left, cuts)
            if np.diff(cuts).max() > self.settings.batch_size:  # which those that are left do not exceed but for one
                return Share((left[rank],)) if rank < len(left) else self._first_again()
        first, stop = int(cuts[rank]), int(cuts[rank + 1])
        if first == stop:  # fewer rows, or sessions, than ranks: nobody gets an empty batch
            return self._first_again()
        ranges, passed = [], 0
        for begin, end in left:
            low, high = max(first, passed), min(stop, passed + end - begin)
            if low < high:
                ranges.append((begin + low - passed, begin + high - passed))
            passed += end - begin
        return Share(tuple(ranges))

    def _near_sessions(self, left: Sequence[Range], cuts: IntArray) -> IntArray:
        """The cuts, moved to where sessions end."""
        ends, passed = [np.zeros(1, np.int64)], 0
        for first, stop in left:
            found = self._ends_within(self.window_of(first))
            inside = found[(found > first) & (found <= stop)]
            ends.append(inside - first + passed)
            passed += stop - first
        every = np.concatenate(ends)
        return every[np.minimum(np.searchsorted(every, cuts), every.size - 1)]

    def _first_again(self) -> Share:
        """The epoch's first row, or session."""
        size = int(self._ends_within(0)[1]) if self.settings.whole_sessions else 1
        return Share(((0, size),), size)


def _stretches(firsts: IntArray, sizes: IntArray) -> IntArray:
    """So many numbers from each first one on, one stretch after the other."""
    ends = np.cumsum(sizes)
    return np.asarray(np.repeat(firsts - (ends - sizes), sizes) + np.arange(int(sizes.sum())), np.int64)
