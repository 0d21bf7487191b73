"""What the ranks look up: user histories, and the skew of two of the paper's models on a million rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from benchmarks.published import published_table
from flexshard import AccessProfile

__all__ = ["WORKLOADS", "Workload"]

IntArray = npt.NDArray[np.int64]
ROWS = 1_000_000
GLOBO = Path(__file__).resolve().parents[3] / "shared" / "data" / "globo_clicks.parquet"


@dataclass(frozen=True)
class Workload:
    """One table and its batches.

    Attributes:
        name: of the workload.
        rows: E.
        batch_size: B, samples per rank.
        profile: with ranked rows.
        reads: how often each row is read; shape (E,).
        batch: (rank, step) to ids and lengths of B samples.
        message_bytes: what its plans send, least to most: the sizes at which the cluster is measured for it.
    """

    name: str
    rows: int
    batch_size: int
    profile: AccessProfile
    reads: IntArray
    batch: Callable[[int, int], tuple[IntArray, IntArray]]
    message_bytes: tuple[int, ...]

    def busiest_node(self, nodes: int, ranks_per_node: int) -> float:
        """Reads of the node that serves most, over the mean, where rank k has the k-th block of rows, as TorchRec's
        row-wise sharding deals them: what its link carries, and everybody waits for.
        """
        block = -(-self.rows // (nodes * ranks_per_node))
        per_node = np.add.reduceat(self.reads, np.arange(0, self.rows, block * ranks_per_node))
        return float(per_node.max() / per_node.sum() * nodes)


def published(model: str, batch_size: int = 200) -> Workload:
    """A published model's distribution, its 10 or 30 million rows taken together to a million; ids say nothing of p."""
    table = published_table(model)
    ends = np.concatenate([[0], np.cumsum(table.profile.rows)])
    reads = np.concatenate([[0.0], np.cumsum(table.profile.counts * table.profile.rows / table.profile.num_samples)])
    p = np.diff(np.interp(np.linspace(0, table.rows, ROWS + 1), ends, reads))
    length = round(float(p.sum()))
    place = np.random.default_rng(0).permutation(ROWS)
    cumulative = np.cumsum(p) / p.sum()
    counts = np.zeros(ROWS, np.int64)
    samples = 1_000_000
    counts[place] = np.round(p / p.sum() * length * samples)
    profile = AccessProfile.from_counts(counts, num_samples=samples)

    def batch(rank: int, step: int) -> tuple[IntArray, IntArray]:
        drawn = np.random.default_rng([rank, step]).random(batch_size * length)
        ids = place[np.minimum(np.searchsorted(cumulative, drawn, side="right"), ROWS - 1)]
        return ids, np.full(batch_size, length, np.int64)

    return Workload(f"{model}-like", ROWS, batch_size, profile, counts, batch, (1 << 20, 1 << 22, 1 << 24, 1 << 25))


def globo(batch_size: int = 4096) -> Workload:
    """Clicks of each user, in order of time; profiled on all, a rank draws users at random."""
    table = pq.read_table(GLOBO, columns=["user_id", "item_id", "timestamp"])
    user, item, times = (column.to_numpy() for column in table.columns)
    order = np.lexsort((times, user))
    items, ids = np.unique(item[order], return_inverse=True)
    _, lengths = np.unique(user[order], return_counts=True)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    counts = np.bincount(ids, minlength=len(items))
    profile = AccessProfile.from_counts(counts, num_samples=len(lengths))

    def batch(rank: int, step: int) -> tuple[IntArray, IntArray]:
        users = np.random.default_rng([rank, step]).integers(0, len(lengths), batch_size)
        return np.concatenate([ids[ends[u] : ends[u + 1]] for u in users.tolist()]), lengths[users]

    return Workload("globo_clicks", len(items), batch_size, profile, counts, batch, (1 << 19, 1 << 21, 1 << 23))


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "RM-2": lambda: published("RM-2"),
    "RM-1": lambda: published("RM-1"),
    "globo": globo,
}
