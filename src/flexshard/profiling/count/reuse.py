"""Meta's statistics of embedding lookups (dlrm_datasets, "embedding_bag": reuse histograms), as profiles.

Each block of the text describes one set of batches: lookups ("indices"), distinct rows ("unique cols"), and, per bin
of lookups per row (lo, hi], the share of the rows and the share of the lookups that fall into it, to three decimals.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

import numpy as np

from flexshard._internal import read_text
from flexshard.errors import DataError
from flexshard.profiling.profile import AccessProfile

__all__ = ["read_reuse_histogram"]

_BATCHES = re.compile(r"Locality stats after processing (\d+) batches of size (\d+)")
_INDICES = re.compile(r"Avg # of indices: (\d+)")
_ROWS = re.compile(r"Avg # of unique cols: (\d+)")
_BIN = re.compile(r"\((\d+)(?:, (\d+)\]|\+): ([\d.]+)")


@dataclass(frozen=True)
class _Block:
    name: str
    line: int
    samples: int
    lookups: int
    rows: int
    bins: tuple[tuple[int, int | None], ...]
    row_shares: tuple[float, ...]
    lookup_shares: tuple[float, ...]


def read_reuse_histogram(
    path: str | os.PathLike[str], *, num_rows: int | None = None, batch: int = 0, table: str | None = None
) -> AccessProfile:
    """A profile from one block of Meta's reuse statistics; all tables of the block together count as one.

    Lookups per bin are exact to the text's three decimals. Within a bin all rows have one of two neighbouring counts,
    so that rows and lookups of the bin both add up. Bins whose share of rows rounds to nothing hold as many rows as
    their lookups need at the geometric middle of the bin.

    Args:
        path: the text file.
        num_rows: rows of the table(s); by default those that were read at all, since the text does not say.
        batch: which block of the file, from 0.
        table: name of the profile; the block's by default.

    Raises:
        DataError: unreadable, no such block, or a block that is cut off; names file and line.
    """
    block = _blocks(path)[batch : batch + 1]
    if not block or batch < 0:
        raise DataError(f"{path}: no block {batch}; the file has {len(_blocks(path))}, counted from 0")
    histogram = block[0]
    counts: dict[int, int] = {}
    for (low, high), row_share, lookup_share in zip(
        histogram.bins, histogram.row_shares, histogram.lookup_shares, strict=True
    ):
        for count, rows in _split(low, high, row_share * histogram.rows, lookup_share * histogram.lookups):
            counts[count] = counts.get(count, 0) + rows
    values = np.array(sorted(counts, reverse=True), np.int64)
    numbers = np.array([counts[value] for value in values], np.int64)
    return AccessProfile.from_histogram(
        values, numbers, histogram.samples, num_rows, table=histogram.name if table is None else table
    )


def _split(low: int, high: int | None, rows: float, lookups: float) -> list[tuple[int, int]]:
    """(count, rows) pairs, of neighbouring counts in (low, high], with the bin's lookups and about its rows."""
    most = high if high is not None else max(2 * low, 1)
    if lookups < 1:
        return []
    mean = lookups / rows if rows >= 1 else 0.0
    if not low < mean <= most:
        # Three decimals say too little of the rows; take the nearest mean that the bin allows.
        middle = np.sqrt((low + 1) * most)
        mean = float(np.clip(mean, low + 1, most)) if rows >= 1 else float(middle)
    number = max(1, round(lookups / mean))
    below = min(max(int(np.floor(lookups / number)), low + 1), most)
    above_rows = round(lookups) - below * number
    above_rows = int(np.clip(above_rows, 0, number)) if below < most else 0
    pairs = [(below, number - above_rows), (below + 1, above_rows)]
    return [(count, count_rows) for count, count_rows in pairs if count_rows]


def _blocks(path: str | os.PathLike[str]) -> list[_Block]:
    lines = read_text(path, DataError).splitlines()
    starts = [index for index, line in enumerate(lines) if _BATCHES.search(line)]
    if not starts:
        raise DataError(f"{path}: no line 'Locality stats after processing N batches of size M'; not reuse statistics")
    ends = [*starts[1:], len(lines) + 1]
    blocks = []
    for start, end in zip(starts, ends, strict=True):
        try:
            blocks.append(_block(path, lines, start, end - 1))
        except (ValueError, OverflowError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{path}:{start + 1}: a number of this block cannot be read: {error}") from error
    return blocks


def _block(path: str | os.PathLike[str], lines: list[str], start: int, end: int) -> _Block:
    body = lines[start:end]
    header, indices, rows = (_find(pattern, body) for pattern in (_BATCHES, _INDICES, _ROWS))
    heads = [offset for offset, line in enumerate(body) if line.endswith(":") and "col sizes" in line]
    if header is None or indices is None or rows is None or len(heads) < 1:
        raise DataError(f"{path}:{start + 1}: a block of reuse statistics that is cut off")
    split = next((i for i, line in enumerate(body) if line.startswith("Ratio of index distribution")), None)
    if split is None:
        raise DataError(f"{path}:{start + 1}: a block without 'Ratio of index distribution'")
    row_bins, lookup_bins = (_bins(part) for part in (body[heads[0] : split], body[split:]))
    if any(not 0 <= share <= 1 for _, share in (*row_bins, *lookup_bins)):
        raise DataError(f"{path}:{start + 1}: a share of this block is not between 0 and 1")
    if any(high is not None and high <= low for (low, high), _ in row_bins):
        raise DataError(f"{path}:{start + 1}: a bin of this block does not ascend")
    if not row_bins or [edge for edge, _ in row_bins] != [edge for edge, _ in lookup_bins]:
        raise DataError(f"{path}:{start + 1}: rows and lookups are given for different bins")
    name = lines[start - 1].strip() if start else ""
    return _Block(
        name or f"block{start}",
        start + 1,
        int(header[1]) * int(header[2]),
        int(indices[1]) * int(header[1]),
        int(rows[1]),
        tuple(edge for edge, _ in row_bins),
        tuple(share for _, share in row_bins),
        tuple(share for _, share in lookup_bins),
    )


def _find(pattern: re.Pattern[str], lines: list[str]) -> re.Match[str] | None:
    return next((match for line in lines if (match := pattern.search(line))), None)


def _bins(lines: list[str]) -> list[tuple[tuple[int, int | None], float]]:
    matches = [match for line in lines if (match := _BIN.match(line))]
    return [((int(m[1]), int(m[2]) if m[2] else None), float(m[3])) for m in matches]
