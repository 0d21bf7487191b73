"""What a cache holds and fetches, predicted beside caches that ran, which keep no row beyond the batches known.

Of the tables of Criteo's sizes, from the probabilities that rows are drawn with; of recorded streams, from the first
half for the second: from its profile, as if each batch were drawn by itself and from the windows of samples that it
keeps, and from the distinct rows of stretches of consecutive samples of just the sizes that matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

import flexshard
from benchmarks.lookahead.streams import CRITEO_ROWS, Batch, criteo, ecommerce, globo, zipf_probabilities
from flexshard.costmodels import LookaheadReads, lookahead_reads, lookahead_reads_of_stretches
from flexshard.executors.lookahead.oracle import LookaheadOracle

__all__ = ["main"]


def measured(batches: list[Batch], rows: int, ahead: int, *, keep: bool, slots: int | None = None) -> LookaheadReads:
    """Means over the steps once as many batches are known as there will be."""
    oracle = LookaheadOracle(rows, rows if slots is None else slots, keep=keep)
    found = []
    for number, batch in enumerate(batches):
        admission = oracle.admit(batch.reshape(-1))
        assert admission is not None
        if number >= ahead:
            if number >= 2 * ahead:
                held = oracle.held().rows.size
                found.append((admission.rows.size, admission.carried.size, admission.fetched.rows.size, held))
            oracle.retire()
    return LookaheadReads(*np.mean(found, axis=0).tolist())


def _slots(cached: float, distinct: float) -> int:
    return int(2 * cached + distinct)


def independent(ahead: int, number: int, samples: int) -> None:
    """Criteo's tables: the closed forms alone."""
    batches = list(islice(criteo(samples), number))
    tables = [lookahead_reads(flexshard.AccessProfile.from_probabilities(zipf_probabilities(rows)), samples, ahead)
              for rows in CRITEO_ROWS]  # fmt: skip
    expected = LookaheadReads(*np.sum([astuple(reads) for reads in tables], axis=0).tolist())
    ran = measured(batches, sum(CRITEO_ROWS), ahead, keep=False)
    kept = measured(batches, sum(CRITEO_ROWS), ahead, keep=True, slots=_slots(ran.cached, ran.distinct))
    print(f"Criteo's tables, Zipf 1.05, {samples:,} samples, lookahead {ahead}: {_errors(expected, ran)}")
    print(f"  twice the slots: {kept.fetched:,.0f} fetched")


def recorded(name: str, source: Iterator[Batch], samples: int, aheads: tuple[int, ...]) -> None:
    """Print both predictions."""
    batches = list(source)
    half = len(batches) // 2
    first = np.concatenate([batch.reshape(-1) for batch in batches[:half]])
    width, rows = batches[0].shape[1], int(max(batch.max() for batch in batches)) + 1
    profile = flexshard.AccessProfile.from_ids(first, lengths=np.full(samples * half, width), num_rows=rows)
    for ahead in aheads:
        if half < 4 * ahead:
            continue
        sizes = sorted({samples, 2 * samples, ahead * samples, (ahead + 1) * samples})
        distinct = [_distinct(first, size * width) for size in sizes]
        ran = measured(batches[half:], rows, ahead, keep=False)
        kept = measured(batches[half:], rows, ahead, keep=True, slots=_slots(ran.cached, 4 * ran.distinct))
        print(f"{name}, {samples:,} samples, lookahead {ahead}")
        print(f"  popularity: {_errors(lookahead_reads(profile, samples, ahead), ran)}")
        print(f"  profile in order: {_errors(lookahead_reads(profile, samples, ahead, in_order=True), ran)}")
        print(f"  stretches:  {_errors(lookahead_reads_of_stretches(sizes, distinct, samples, ahead), ran)}")
        print(f"  twice the slots: {kept.fetched:,.0f} fetched")


def _distinct(stream: npt.NDArray[np.int64], size: int) -> float:
    """Of at most 64 stretches, evenly spaced; the mean."""
    starts = np.linspace(0, stream.size - size, min(64, max(stream.size // size, 1))).astype(np.int64)
    return float(np.mean([np.unique(stream[start : start + size]).size for start in starts]))


def _errors(expected: LookaheadReads, ran: LookaheadReads) -> str:
    names = ("distinct", "needed next", "fetched", "cached")
    pairs = zip(names, astuple(expected), astuple(ran), strict=True)
    return ", ".join(f"{name} {a:,.0f} / {b:,.0f} ({(a / b - 1) * 100:+.1f} %)" for name, a, b in pairs)


def main(clicks: Path | None, lookups: Path | None) -> None:
    """On every stream that is there."""
    for ahead, number in ((4, 40), (20, 80), (50, 130)):
        independent(ahead, number, 16_384)
    for samples in (1_024, 16_384):
        for name, path, read in (("globo_clicks", clicks, globo), ("ecommerce_orm_busy", lookups, ecommerce)):
            if path is not None:
                recorded(name, read(path, samples), samples, (4, 20))
