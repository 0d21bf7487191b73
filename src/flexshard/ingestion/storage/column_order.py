"""In what order columns lie in a file, and how many rows a row group has, so that jobs read few large stretches
(DPP paper, section 4.2.3: feature reordering).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexshard.ingestion.storage.merged_reads import Disk, ReadCost, read_cost

__all__ = ["ReadPattern", "best_order", "job_costs", "order_by_hit_rate", "order_by_jobs", "rows_per_group"]

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
_HELD_BACK = 5  # one job of so many, the last ones, on which orders are compared
_LEAST_ROWS = 1 << 10


@dataclass(frozen=True)
class ReadPattern:
    """What jobs read of columns, and how.

    Attributes:
        reads: whether each job reads each column; shape (jobs, columns).
        runs: how often each job ran; shape (jobs,).
        row_bytes: of each column, compressed, per row; shape (columns,).
        gap: bytes between two columns up to which one read takes both.
        disk: that is read.
    """

    reads: BoolArray
    runs: FloatArray
    row_bytes: FloatArray
    gap: float
    disk: Disk

    def seconds(self, order: IntArray, rows: int, jobs: slice = slice(None)) -> float:
        """That the disk takes for one row group, per run of a job on average."""
        runs = self.runs[jobs]
        costs = job_costs(self.reads[jobs][:, order], _laid_out(self.row_bytes[order], rows), self.gap)
        taken = np.array([cost.seconds(self.disk) for cost in costs])
        return float(runs @ taken / runs.sum())


def job_costs(reads: BoolArray, stretches: tuple[IntArray, IntArray], gap: float) -> list[ReadCost]:
    """What each job asks of storage for one row group, of which columns lie at ``stretches`` (starts and sizes)."""
    starts, sizes = stretches
    return [read_cost(starts[chosen], sizes[chosen], gap) for chosen in reads]


def order_by_hit_rate(reads: BoolArray, runs: FloatArray) -> IntArray:
    """Columns that more jobs read first; others in the order that they have."""
    return np.argsort(-(runs @ reads), kind="stable")


def order_by_jobs(reads: BoolArray, runs: FloatArray) -> IntArray:
    """Columns that more jobs read first; of those that as many read, such as are read by the same jobs together."""
    jobs = np.packbits(reads, axis=0)
    return np.lexsort([*jobs[::-1], -(runs @ reads)])


def best_order(pattern: ReadPattern, rows: int) -> IntArray:
    """The order which takes a disk least: by hit rate, or by jobs too.

    Where the log is long enough, each is made from its first jobs and compared on the last ones, so that chance in the
    log does not decide.
    """
    held_back = pattern.runs.size // _HELD_BACK
    first, tried = (slice(-held_back), slice(-held_back, None)) if held_back else (slice(None), slice(None))
    best = min(
        (order_by_hit_rate, order_by_jobs),
        key=lambda made: pattern.seconds(made(pattern.reads[first], pattern.runs[first]), rows, tried),
    )
    return best(pattern.reads, pattern.runs)


def rows_per_group(pattern: ReadPattern, order: IntArray, efficiency: float, most: int) -> int:
    """Rows of a row group, doubled until the disk spends a share of its time on bytes that jobs want, up to ``most``.

    Over all runs; the rest of the time goes to seeks, and to gaps.
    """
    rows = min(_LEAST_ROWS, most)
    if not (pattern.reads @ pattern.row_bytes).any():
        return most  # jobs of which nothing is known
    wanted = pattern.runs @ (pattern.reads @ pattern.row_bytes) / pattern.runs.sum()
    while rows < most and wanted * rows / pattern.disk.bytes_per_s < efficiency * pattern.seconds(order, rows):
        rows = min(2 * rows, most)
    return rows


def _laid_out(row_bytes: FloatArray, rows: int) -> tuple[IntArray, IntArray]:
    """Where columns lie, one after the other."""
    sizes = np.ceil(row_bytes * rows).astype(np.int64)
    return np.cumsum(sizes) - sizes, sizes
