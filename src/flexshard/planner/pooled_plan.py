"""What a plan says of a table that TorchRec shards: how, where each shard lies, and what else it could be."""

from __future__ import annotations

from dataclasses import dataclass

from flexshard.tables import DATA_TYPES

__all__ = ["PooledAlternative", "PooledShard", "PooledTablePlan"]


@dataclass(frozen=True)
class PooledShard:
    """A shard of such a table on its rank.

    Attributes:
        rank: that holds it.
        rows, columns: how many.
        first_row, first_column: where in the table it begins.
        memory_bytes: of the rank's memory, what a step needs included.
        host_bytes: of host memory.
        seconds: that it keeps its rank and the rank's links busy in a step; latencies of calls are not in it.
    """

    rank: int
    rows: int
    columns: int
    first_row: int
    first_column: int
    memory_bytes: float
    host_bytes: float
    seconds: float


@dataclass(frozen=True)
class PooledAlternative:
    """Another way of sharding a table, beside the one that it has.

    Attributes:
        sharding_type, compute_kernel: in TorchRec's words.
        cache_load_factor: share of the rows that are cached; None for other kernels.
        seconds: more than now that an average rank is busy.
        memory_bytes: more than now that an average rank holds.
        priced_seconds: both at the plan's prices of memory. Below 0 where it would not fit beside the other tables'
            shards, would make the busiest rank busier, or would start further collectives.
        dtype: of its weights; None where it is as now.
    """

    sharding_type: str
    compute_kernel: str
    cache_load_factor: float | None
    seconds: float
    memory_bytes: float
    priced_seconds: float
    dtype: str | None = None


@dataclass(frozen=True)
class PooledTablePlan:
    """A table of a plan that TorchRec shards.

    Attributes:
        name, rows, dim, dtype, optimizer, features, pooling, dedup_factor: as in :class:`Table`; ``dtype`` is that of
            the option chosen.
        profile_digest, profile_path, num_samples, avg_length: as in :class:`TablePlan`.
        sharding_type, compute_kernel: in TorchRec's words.
        cache_load_factor: share of the rows that "fused_uvm_caching" holds in a rank's memory; None for other kernels.
        shards: in order of columns and rows.
        alternatives: next best ways of sharding it, cheapest first.
    """

    name: str
    rows: int
    dim: int
    dtype: str
    optimizer: str
    features: tuple[str, ...]
    pooling: str
    profile_digest: str
    profile_path: str | None
    num_samples: int
    avg_length: float
    sharding_type: str
    compute_kernel: str
    shards: tuple[PooledShard, ...]
    cache_load_factor: float | None = None
    alternatives: tuple[PooledAlternative, ...] = ()
    dedup_factor: float = 1.0

    @property
    def row_bytes(self) -> int:
        """D·s: bytes of one row's weights."""
        return self.dim * DATA_TYPES[self.dtype].nbytes

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of its shards, each once, ascending."""
        return tuple(sorted({shard.rank for shard in self.shards}))
