"""Where a lookahead cache should be: what its placements put on the critical path of a step.

Batches are known ahead. Between two steps a row has to travel at once only if the next batch needs it and some other
rank has updated it; all else may travel beside the computation ("delayed", section 3.3 of BagPipe). Placements:

* replicated: every rank has every row of the global batch; gradients of those that the next one needs are summed over
  all ranks by an all-reduce.
* partitioned: every row has one place; others get it and send gradients. Its place is a rank that reads it most often
  in this very batch, chosen anew, and for nothing, in each batch: less than any rule can reach, such as the paper's
  programs, which place samples.
* LRPP: as replicated, but a row that one rank alone reads, now and in the next batch, is not summed over ranks.
* owner: each row is cached by its owner, by a hash; ranks that read it get it and send gradients. Rows that the next
  batch does not need wait in both directions. The hottest rows are replicated, as many (all, perhaps) as were best in
  the first half of the batches; figures are of the second.

An all-reduce of n rows moves 2 (U-1)/U n rows through each rank's link (its ring); an all-to-all what the busiest rank
sends or receives. Each call costs a latency.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.lookahead.streams import Batch, criteo, ecommerce, globo

__all__ = ["main"]

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

_LATENCY = 50e-6
_LINKS = {"10 Gbps": 1.25e9, "25 Gbps": 3.125e9}
_DIM = 48  # the paper's
_NONE = np.empty(0, np.int64)
_HOT = (0, 64, 256, 1024, 4096, 16384)


@dataclass(frozen=True)
class Reads:
    """Who reads what in a batch.

    Attributes:
        rows: distinct, ascending.
        ranks: how many ranks read each.
        pair_row: of each (rank, row) that is read, the row's index in ``rows``.
        pair_rank: its rank.
        pair_reads: how often it is read.
    """

    rows: IntArray
    ranks: IntArray
    pair_row: IntArray
    pair_rank: IntArray
    pair_reads: IntArray

    @classmethod
    def of(cls, batch: Batch, world: int) -> Reads:
        """Samples go to the ranks in equal parts, in order."""
        samples, width = batch.shape
        rank = np.repeat(np.arange(samples) * world // samples, width)
        pairs, reads = np.unique(batch.reshape(-1) * world + rank, return_counts=True)
        rows, of_pair = np.unique(pairs // world, return_inverse=True)
        return cls(rows, np.bincount(of_pair), of_pair, pairs % world, reads)

    def in_(self, other: Reads) -> BoolArray:
        """Which of the rows another batch reads too."""
        return np.isin(self.rows, other.rows, assume_unique=True)

    def only_rank(self) -> IntArray:
        """The rank that reads a row, or -1 where several do."""
        alone = np.full(len(self.rows), -1)
        alone[self.pair_row] = self.pair_rank
        return np.where(self.ranks == 1, alone, -1)


@dataclass(frozen=True)
class Traffic:
    """Rows through the busiest rank's link on the critical path between two steps, and calls that carry them."""

    rows: float
    calls: int

    def seconds(self, bandwidth: float) -> float:
        return self.calls * _LATENCY + self.rows * _DIM * 4 / bandwidth


def replicated(now: Reads, following: Reads, world: int) -> Traffic:
    return Traffic(_ring(int(now.in_(following).sum()), world), 1)


def partitioned(now: Reads, following: Reads, world: int) -> Traffic:
    """The gradients of one batch, and rows of the next."""
    sent, _ = _urgent(now, following, _NONE, _best_place(now, world), world)
    got, _ = _urgent(following, now, _NONE, _best_place(following, world), world)
    return Traffic(sent + got, 2)


def _best_place(batch: Reads, world: int) -> IntArray:
    """Of each row, a rank that reads it most often; among several, any."""
    order = np.lexsort((_owner_of(batch.pair_row * world + batch.pair_rank, 1 << 20), batch.pair_reads, batch.pair_row))
    place = np.empty(len(batch.rows), np.int64)
    place[batch.pair_row[order]] = batch.pair_rank[order]  # the last one counts
    return place


def lrpp(now: Reads, following: Reads, world: int) -> Traffic:
    """What is summed on the critical path: read by several ranks now, or by another one next."""
    known = np.searchsorted(following.rows, now.rows).clip(max=len(following.rows) - 1)
    next_rank = np.where(following.rows[known] == now.rows, following.only_rank()[known], -2)
    alone = now.only_rank()
    return Traffic(_ring(int(((next_rank != -2) & ((alone < 0) | (next_rank != alone))).sum()), world), 1)


def owner(now: Reads, following: Reads, hot: IntArray, world: int) -> Traffic:
    """``hot``: rows that are replicated, ascending."""
    (sent, summed), (got, _) = (
        _urgent(batch, other, hot, _owner_of(batch.rows, world), world)
        for batch, other in ((now, following), (following, now))
    )
    return Traffic(sent + got + _ring(summed, world), 2 + bool(len(hot)))


def _urgent(batch: Reads, other: Reads, hot: IntArray, home: IntArray, world: int) -> tuple[float, int]:
    """Rows that both batches read: those that travel to or from their homes, and how many are replicated."""
    both = batch.in_(other)
    moved = both & ~np.isin(batch.rows, hot, assume_unique=True)
    mine = moved[batch.pair_row]
    return _busiest(batch.pair_rank[mine], home[batch.pair_row[mine]], world), int((both & ~moved).sum())


def _ring(rows: int, world: int) -> float:
    return 2 * (world - 1) / world * rows


def _owner_of(rows: IntArray, world: int) -> IntArray:
    mixed = rows.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return ((mixed >> np.uint64(33)) % np.uint64(world)).astype(np.int64)


def _busiest(reader: IntArray, home: IntArray, world: int) -> float:
    """Most rows that one rank sends or receives, where ``reader`` needs a row of ``home``."""
    away = reader != home
    return float(max(np.bincount(side[away], minlength=world).max() for side in (reader, home)))


def _hottest(batches: Sequence[Reads], number: int) -> IntArray:
    """Rows that most ranks read."""
    rows, ranks = (np.concatenate([getattr(batch, name) for batch in batches]) for name in ("rows", "ranks"))
    distinct, index = np.unique(rows, return_inverse=True)
    total = np.bincount(index, weights=ranks)
    return np.sort(distinct[np.argsort(-total, kind="stable")[:number]])


def _mean(traffic: Sequence[Traffic], bandwidth: float) -> float:
    return float(np.mean([one.seconds(bandwidth) for one in traffic]))


def compare(name: str, batches: Iterator[Batch], *, world: int, number: int) -> None:
    """Print the placements' critical path over a stream."""
    reads = [Reads.of(batch, world) for batch in islice(batches, number)]
    half = len(reads) // 2
    pairs = list(pairwise(reads))
    for link, bandwidth in _LINKS.items():

        def tiers(hot: IntArray, where: slice) -> list[Traffic]:
            return [owner(now, following, hot, world) for now, following in pairs[where]]

        first, second = slice(0, half), range(half, len(pairs))
        everywhere = [replicated(*pair, world) for pair in pairs]
        candidates = [_hottest(reads[:half], rows) for rows in _HOT]
        fitted = min(candidates, key=lambda hot: _mean(tiers(hot, first), bandwidth))
        chosen, label = tiers(fitted, slice(half, None)), f"{len(fitted):,} rows"
        if _mean(everywhere[first], bandwidth) < _mean(tiers(fitted, first), bandwidth):
            chosen, label = everywhere[half:], "all rows"
        found = {
            "replicated": everywhere[half:],
            "partitioned, at its best": [partitioned(*pairs[at], world) for at in second],
            "LRPP": [lrpp(*pairs[at], world) for at in second],
            "owner": tiers(_NONE, slice(half, None)),
            f"owner, {label} replicated": chosen,
        }
        best = _mean(found["LRPP"], bandwidth)
        distinct = np.mean([len(batch.rows) for batch in reads[half:]])
        print(f"{name}, {world} ranks, {link}; {distinct:,.0f} distinct rows a batch")
        for kind, traffic in found.items():
            seconds, rows = _mean(traffic, bandwidth), np.mean([one.rows for one in traffic])
            traveled = f"{rows * _DIM * 4 / 1e6:8.2f} MB  {seconds * 1e3:8.2f} ms"
            print(f"  {kind:32} {traveled}  LRPP / this: {best / seconds:.2f}")


def main(clicks: Path | None, lookups: Path | None, *, worlds: Sequence[int] = (8, 32)) -> None:
    """Compare placements on every stream that is there."""
    for world in worlds:
        for samples in (16_384, 65_536):
            compare(
                f"Criteo's tables, Zipf 1.05, {samples:,} samples",
                criteo(samples),
                world=world,
                number=16 if samples < 50_000 else 8,
            )
        for samples in (4_096, 16_384):
            for name, path, read in (("globo_clicks", clicks, globo), ("ecommerce_orm_busy", lookups, ecommerce)):
                if path is not None:
                    label = f"{name}, {samples:,} samples"
                    compare(label, read(path, samples), world=world, number=60)
