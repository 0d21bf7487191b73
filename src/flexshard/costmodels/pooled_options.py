"""How TorchRec may shard a table, as values: sharding types, kernels, and what each of an option's shards costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from flexshard.costmodels.cost import CollectiveKind
from flexshard.tables import Table
from flexshard.topologies import Cluster

__all__ = [
    "CUT_BY_ROWS",
    "FLOAT_BYTES",
    "LOOK_UP",
    "POOLED_KERNELS",
    "POOLED_LOADS",
    "POOLED_TYPES",
    "SEQUENCE",
    "SEQUENCE_TYPES",
    "SHARED_CALLS",
    "UPDATE",
    "Channel",
    "PooledOption",
    "features_of",
    "load_of",
    "module_of",
    "type_of",
    "ways_of_rows",
]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Channel = tuple[CollectiveKind, int, str]  # kind, group size and content of collectives

POOLED_TYPES = (
    "data_parallel",
    "table_wise",
    "column_wise",
    "row_wise",
    "table_row_wise",
    "table_column_wise",
    "grid_shard",
)
SEQUENCE_TYPES = ("data_parallel", "table_wise", "column_wise", "row_wise")  # of tables without pooling
POOLED_KERNELS = ("fused", "dense", "fused_uvm", "fused_uvm_caching")
# Of these TorchRec 1.8 divides means by lengths after partial sums are added up, and in a collection that has tables
# sharded otherwise it divides those by theirs as well: their weights train wrongly, without a word.
CUT_BY_ROWS = frozenset({"row_wise", "table_row_wise", "grid_shard"})
EVEN, LOOK_UP, UPDATE = "on all ranks alike", "look up", "update"
UNEVEN = ("table_wise", "column_wise", "row_wise", "table_row_wise", "table_column_wise", "grid_shard")
SEQUENCE = "sequence "  # before names of calls and of loads, of tables without pooling
# Tables that share calls: those of a sharding type, in a module of pooled tables or of others.
SHARED_CALLS = (*POOLED_TYPES, *(SEQUENCE + kind for kind in SEQUENCE_TYPES))
# What ranks wait for one another after. Tables of a sharding type share its calls, each of which takes as long as its
# busiest rank; another type's busiest rank does not make up for it.
POOLED_LOADS = (
    *(EVEN, LOOK_UP, UPDATE),
    *(f"{what} {kind}" for kind in UNEVEN for what in ("ids", "rows")),
    *(f"{what} {SEQUENCE}{kind}" for kind in UNEVEN if kind in SEQUENCE_TYPES for what in ("ids", "rows")),
)

_IDS = ("pooled ids", "sequence ids")  # contents of collectives
FLOAT_BYTES = 4  # sums and their gradients travel as float32


@dataclass(frozen=True, eq=False)
class PooledOption:
    """One way of sharding a table; arrays have an entry per shard.

    Attributes:
        sharding_type, compute_kernel: in TorchRec's words.
        cuts: rows and columns of each shard, and its first row and column; shape (shards, 4).
        moved: bytes that the owner of a shard moves, by channel.
        local_seconds: of lookups and updates; shape (2, shards).
        static_bytes, dynamic_bytes: of a rank's memory, the latter in a step.
        host_bytes: of host memory.
        ids: looked up in a step, of all ranks.
        cache_load_factor: share of the table's rows that are cached; None for other kernels.
        dtype: of weights.
        loss: what it costs in quality, as of a tensor train that stands for the table.
        is_sequence: whether the table has no pooling.
    """

    sharding_type: str
    compute_kernel: str
    cuts: IntArray
    moved: Mapping[Channel, FloatArray]
    local_seconds: FloatArray
    static_bytes: FloatArray
    dynamic_bytes: FloatArray
    host_bytes: FloatArray
    ids: FloatArray
    cache_load_factor: float | None = None
    dtype: str = "float32"
    loss: float = 0.0
    is_sequence: bool = False

    @property
    def name(self) -> str:
        """Such as ``table_wise/fused``; with the share of rows that are cached."""
        cached = "" if self.cache_load_factor is None else f" ({100 * self.cache_load_factor:g} %)"
        return f"{self.sharding_type}/{self.compute_kernel}{cached}"

    @property
    def sends_ids(self) -> bool:
        """Whether ids go to other ranks; copies, and tensor trains, are everywhere."""
        return any(content in _IDS for _, _, content in self.moved)

    @property
    def shards(self) -> int:
        """How many."""
        return len(self.cuts)

    @cached_property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of each shard."""
        return tuple((rows, columns) for rows, columns, _, _ in self.cuts.tolist())

    @cached_property
    def offsets(self) -> tuple[tuple[int, int], ...]:
        """First row and column of each shard."""
        return tuple((row, column) for _, _, row, column in self.cuts.tolist())

    @property
    def shared_calls(self) -> str:
        """Which of :data:`SHARED_CALLS` it takes part in."""
        return f"{SEQUENCE if self.is_sequence else ''}{self.sharding_type}"

    @property
    def is_tensor_train(self) -> bool:
        """Whether it stands for the table as a tensor train."""
        return self.compute_kernel not in POOLED_KERNELS


def type_of(shared_calls: str) -> str:
    """The sharding type of tables that share calls."""
    return shared_calls.removeprefix(SEQUENCE)


def load_of(shared_calls: str, content: str) -> int:
    """Which of :data:`POOLED_LOADS` what travels in some of :data:`SHARED_CALLS` is of."""
    if content in ("pooled host reads", "pooled host writes"):
        return POOLED_LOADS.index(LOOK_UP if content == "pooled host reads" else UPDATE)
    if type_of(shared_calls) not in UNEVEN:
        return POOLED_LOADS.index(EVEN)
    return POOLED_LOADS.index(f"{'ids' if content in _IDS else 'rows'} {shared_calls}")


def module_of(table: Table) -> str:
    """Of which kind of TorchRec's modules a table is, as contents of collectives begin."""
    return "pooled" if table.is_pooled else "sequence"


def features_of(table: Table) -> int:
    """How many have lengths of their own."""
    return max(1, len(table.features))


def ways_of_rows(cluster: Cluster, shared_calls: str) -> list[Channel]:
    """Channels of sums (of rows, where there is no pooling) and of their gradients."""
    world, node = cluster.world_size, cluster.ranks_per_node
    if shared_calls.startswith(SEQUENCE):
        return [("all_to_all", world, "sequence rows"), ("all_to_all", world, "sequence gradients")]
    sharding_type = shared_calls
    if sharding_type == "row_wise":
        return [("reduce_scatter", 1, "pooled sums"), ("all_gather", 1, "pooled gradients")]
    across: list[Channel] = [("all_to_all", world, "pooled sums"), ("all_to_all", world, "pooled gradients")]
    if sharding_type in ("table_row_wise", "grid_shard") and node > 1:
        # Reduced among the ranks of a node first, each of which sends and receives as in an all-to-all.
        across += [("all_to_all", node, "pooled sums"), ("all_to_all", node, "pooled gradients")]
    return across
