"""What a pooled table costs under every sharding type and kernel that TorchRec runs, shard by shard.

Rows of a pooled table are summed where they are looked up, so what travels is one row per sample and feature, whatever
L: to all ranks from one owner (table-wise), from the owner of each column shard, or as partial sums that are reduced
(row-wise). Legend: U ranks, W of a node, N nodes, S samples per rank, L ids per sample, F features, E rows of D
numbers, d columns of a shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil

import numpy as np
import numpy.typing as npt

from flexshard.costmodels.cost import CollectiveKind
from flexshard.costmodels.local_rates import LocalRates
from flexshard.costmodels.overlap import Overlap, hidden_share
from flexshard.costmodels.tensor_train.cost import tensor_train_cost
from flexshard.costmodels.tensor_train.reads import TTReads
from flexshard.tables import DATA_TYPES, OPTIMIZERS, Table, TTShape
from flexshard.topologies import Cluster, CollectiveRate

__all__ = ["POOLED_KERNELS", "POOLED_LOADS", "POOLED_TYPES", "Channel", "PooledCosts", "PooledOption", "column_width"]

FloatArray = npt.NDArray[np.float64]
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
POOLED_KERNELS = ("fused", "dense", "fused_uvm", "fused_uvm_caching")
# Of these TorchRec 1.8 divides means by lengths after partial sums are added up, and in a collection that has tables
# sharded otherwise it divides those by theirs as well: their weights train wrongly, without a word.
CUT_BY_ROWS = frozenset({"row_wise", "table_row_wise", "grid_shard"})
_EVEN, _LOOK_UP, _UPDATE = "on all ranks alike", "look up", "update"
_UNEVEN = ("table_wise", "column_wise", "table_row_wise", "table_column_wise", "grid_shard")
# What ranks wait for one another after. Tables of a sharding type share its calls, each of which takes as long as its
# busiest rank; another type's busiest rank does not make up for it.
POOLED_LOADS = (_EVEN, _LOOK_UP, _UPDATE, *(f"{what} {kind}" for kind in _UNEVEN for what in ("ids", "rows")))

_ID_BYTES = 8  # TorchRec's ids and lengths
_FLOAT_BYTES = 4  # sums and their gradients travel as float32
_CACHE_INDEX_BYTES = 4  # per row of a cached table, in the rank's memory
_LEAST_COLUMNS = 128  # of a column shard, unless the table says otherwise
_INPUT_CALLS = 3  # how many ids come, how many of each sample, ids


@dataclass(frozen=True, eq=False)
class PooledOption:
    """One way of sharding a pooled table; arrays have an entry per shard.

    Attributes:
        sharding_type, compute_kernel: in TorchRec's words.
        sizes, offsets: (rows, columns) of each shard, and its first row and column.
        moved: bytes that the owner of a shard moves, by channel.
        local_seconds: of lookups and updates; shape (2, shards).
        static_bytes, dynamic_bytes: of a rank's memory, the latter in a step.
        host_bytes: of host memory.
        ids: looked up in a step, of all ranks.
        cache_load_factor: share of the table's rows that are cached; None for other kernels.
        dtype: of weights.
        loss: what it costs in quality, as of a tensor train that stands for the table.
    """

    sharding_type: str
    compute_kernel: str
    sizes: tuple[tuple[int, int], ...]
    offsets: tuple[tuple[int, int], ...]
    moved: Mapping[Channel, FloatArray]
    local_seconds: FloatArray
    static_bytes: FloatArray
    dynamic_bytes: FloatArray
    host_bytes: FloatArray
    ids: FloatArray
    cache_load_factor: float | None = None
    dtype: str = "float32"
    loss: float = 0.0

    @property
    def name(self) -> str:
        """Such as ``table_wise/fused``; with the share of rows that are cached."""
        cached = "" if self.cache_load_factor is None else f" ({100 * self.cache_load_factor:g} %)"
        return f"{self.sharding_type}/{self.compute_kernel}{cached}"

    @property
    def shards(self) -> int:
        """How many."""
        return len(self.sizes)

    @property
    def is_tensor_train(self) -> bool:
        """Whether it stands for the table as a tensor train."""
        return self.compute_kernel not in POOLED_KERNELS


def column_width(dim: int, least: int | None = None) -> int:
    """Columns of a column shard, as TorchRec cuts a table: the least divisor of D that is a multiple of four and at
    least ``least`` (128 by default); D where there is none.
    """
    bound = _LEAST_COLUMNS if least is None else least
    return next((width for width in range(bound, dim) if dim % width == 0 and width % 4 == 0), dim)


@dataclass(frozen=True)
class PooledCosts:
    """Costs of pooled tables on a cluster.

    Attributes:
        cluster: to train on.
        batch_size: B, samples per rank.
        overlap: share of each collective's time that is hidden.
        rates: of lookups and updates; None where they do not count.
    """

    cluster: Cluster
    batch_size: int
    overlap: Overlap | None = None
    rates: LocalRates | None = None

    # -- what travels

    @staticmethod
    def load(sharding_type: str, content: str) -> int:
        """Which of :data:`POOLED_LOADS` what travels for a sharding type is of."""
        if content in ("pooled host reads", "pooled host writes"):
            return POOLED_LOADS.index(_LOOK_UP if content == "pooled host reads" else _UPDATE)
        if sharding_type not in _UNEVEN:
            return POOLED_LOADS.index(_EVEN)
        return POOLED_LOADS.index(f"{'ids' if content == 'pooled ids' else 'rows'} {sharding_type}")

    def rate(self, channel: Channel) -> CollectiveRate:
        """Of one call. Links between a rank and its host take no time to start."""
        kind, size, _ = channel
        if kind == "host":
            assert self.cluster.host_bytes_per_s is not None
            return CollectiveRate(0.0, self.cluster.host_bytes_per_s)
        rate: CollectiveRate | None = getattr(self.cluster.level(size), kind)
        assert rate is not None
        return rate

    def exposed(self, channel: Channel) -> float:
        """Share of a channel's time that nothing hides."""
        return 1.0 - hidden_share(self.overlap, *channel)

    def seconds(self, option: PooledOption) -> FloatArray:
        """Of each kind of load, what each shard takes of its rank; without latencies. Shape (loads, shards)."""
        found = np.zeros((len(POOLED_LOADS), option.shards))
        for channel, nbytes in option.moved.items():
            load = self.load(option.sharding_type, channel[2])
            found[load] += self.exposed(channel) * nbytes / self.rate(channel).bytes_per_s
        found[POOLED_LOADS.index(_LOOK_UP)] += option.local_seconds[0]
        found[POOLED_LOADS.index(_UPDATE)] += option.local_seconds[1]
        return found

    def sharing(self, load: str) -> int:
        """Ranks that carry a kind of load together: where those of a node share a link, whatever crosses links. That of
        it which stays within nodes counts as if it did not.
        """
        together, crosses = self.cluster.ranks_on_link(self.cluster.world_size), load not in (_LOOK_UP, _UPDATE)
        return together if crosses and self.cluster.ranks_per_node % together == 0 else 1

    def calls(self, sharding_type: str) -> dict[Channel, int]:
        """Calls of a step that all tables of a sharding type share, forward and backward."""
        world, node = self.cluster.world_size, self.cluster.ranks_per_node
        if sharding_type == "data_parallel":
            return {("all_reduce", 1, "pooled replicas"): 1} if world > 1 else {}
        calls: dict[Channel, int] = {("all_to_all", world, "pooled ids"): _INPUT_CALLS}
        calls |= dict.fromkeys(self._sums(sharding_type, node, world), 1)
        return calls if world > 1 else {}

    def latency(self, sharding_type: str) -> float:
        """Exposed time that the calls of a sharding type take to start."""
        calls = self.calls(sharding_type).items()
        return sum(self.exposed(one) * number * self.rate(one).alpha_seconds for one, number in calls)

    def _sums(self, sharding_type: str, node: int, world: int) -> list[Channel]:
        """Channels of sums and of their gradients."""
        if sharding_type == "row_wise":
            return [("reduce_scatter", 1, "pooled sums"), ("all_gather", 1, "pooled gradients")]
        across: list[Channel] = [("all_to_all", world, "pooled sums"), ("all_to_all", world, "pooled gradients")]
        if sharding_type in ("table_row_wise", "grid_shard") and node > 1:
            # Reduced among the ranks of a node first, each of which sends and receives as in an all-to-all.
            across += [("all_to_all", node, "pooled sums"), ("all_to_all", node, "pooled gradients")]
        return across

    def received_bytes(self, table: Table) -> float:
        """Bytes of sums that every rank has of its own samples, wherever they come from."""
        return table.distinct_samples(self.batch_size) * _features(table) * table.dim * _FLOAT_BYTES

    # -- options

    def tensor_train(self, table: Table, shape: TTShape, reads: TTReads, seconds: float, loss: float) -> PooledOption:
        """A table as a tensor train that every rank holds, whose cores' gradients are reduced with those of copies.

        Args:
            table: that it stands for.
            shape: of the tensor train.
            reads: of a rank's batch.
            seconds: of lookups, backward and update.
            loss: what it costs in quality.
        """
        world, cost = self.cluster.world_size, tensor_train_cost(table, self.cluster, shape, reads)
        each = np.ones(world)
        cores = sum(one.nbytes for one in cost.collectives)
        return PooledOption(
            sharding_type="data_parallel",
            compute_kernel=f"tensor train, {shape}",
            sizes=((table.rows, table.dim),) * world,
            offsets=((0, 0),) * world,
            moved={("all_reduce", 1, "pooled replicas"): cores * each} if world > 1 else {},
            local_seconds=np.stack([0.0 * each, seconds * each]),
            static_bytes=cost.static_memory_bytes * each,
            dynamic_bytes=cost.dynamic_memory_bytes * each,
            host_bytes=0.0 * each,
            ids=reads.ids * each,
            loss=loss,
        )

    def options(
        self,
        table: Table,
        *,
        sharding_types: Iterable[str] = POOLED_TYPES,
        compute_kernels: Iterable[str] = ("fused",),
        min_partition: int | None = None,
        cache_load_factors: Iterable[float] = (),
    ) -> list[PooledOption]:
        """Every way of sharding a table that TorchRec would list, of the types and kernels asked for. Data-parallel
        tables have TorchRec's dense kernel, whatever kernels are asked for. Tables whose rows are averaged are not cut
        by rows where TorchRec would train them wrongly: see :data:`CUT_BY_ROWS`.
        """
        found = []
        width = column_width(table.dim, min_partition)
        for sharding_type in (one for one in POOLED_TYPES if one in sharding_types):
            if table.pooling == "mean" and sharding_type in CUT_BY_ROWS:
                continue
            cuts = self._cuts(sharding_type, table, width)
            if cuts is None:
                continue
            shards = _Shards(self, table, sharding_type, cuts)
            if sharding_type == "data_parallel":
                found.append(shards.option("dense"))
                continue
            for kernel in (one for one in POOLED_KERNELS if one in compute_kernels):
                shares = list(cache_load_factors) if kernel == "fused_uvm_caching" else [None]
                found += [shards.option(kernel, share) for share in shares]
        return found

    def _cuts(self, sharding_type: str, table: Table, width: int) -> list[tuple[int, int, int, int]] | None:
        """(rows, columns, first row, first column) of each shard; None where the type is another one under a name of
        its own: columns that are not cut, rows of a node where there is but one.
        """
        world, node, one_node = self.cluster.world_size, self.cluster.ranks_per_node, self.cluster.nodes == 1
        columns = list(range(0, table.dim, width))
        if sharding_type == "data_parallel":
            return [(table.rows, table.dim, 0, 0)] * world
        if sharding_type == "table_wise":
            return [(table.rows, table.dim, 0, 0)]
        if sharding_type == "row_wise":
            return list(_row_blocks(table.rows, world, table.dim, 0)) if world > 1 else None
        if sharding_type == "column_wise":
            return [(table.rows, width, 0, first) for first in columns] if len(columns) > 1 else None
        if one_node or node == 1:
            return None
        if sharding_type == "table_row_wise":
            return list(_row_blocks(table.rows, node, table.dim, 0))
        if len(columns) == 1:
            return None
        if sharding_type == "table_column_wise":
            return [(table.rows, width, 0, first) for first in columns]
        return [block for first in columns for block in _row_blocks(table.rows, node, width, first)]


def _features(table: Table) -> int:
    return max(1, len(table.features))


def _row_blocks(rows: int, count: int, width: int, column: int) -> Iterator[tuple[int, int, int, int]]:
    """Blocks of rows as TorchRec cuts them: all of the same size but the last ones."""
    block = ceil(rows / count)
    for number in range(count):
        first = min(number * block, rows)
        yield min(block, rows - first), width, first, column


class _Shards:
    """Shards of a table under one sharding type: what kernels do not change."""

    def __init__(
        self, costs: PooledCosts, table: Table, sharding_type: str, cuts: list[tuple[int, int, int, int]]
    ) -> None:
        self._costs, self._table, self._type = costs, table, sharding_type
        self._cuts = np.array(cuts, np.int64)
        self.rows, self.columns = self._cuts[:, 0].astype(np.float64), self._cuts[:, 1].astype(np.float64)

    @cached_property
    def _weights(self) -> FloatArray:
        """Bytes of weights."""
        nbytes: FloatArray = self.rows * self.columns * DATA_TYPES[self._table.dtype].nbytes
        return nbytes

    @cached_property
    def _state(self) -> FloatArray:
        """Bytes of optimizer state; each column shard has the numbers that are per row."""
        optimizer = OPTIMIZERS[self._table.optimizer]
        nbytes: FloatArray = self.rows * np.array([optimizer.state_bytes(int(d)) for d in self.columns])
        return nbytes

    @cached_property
    def _ids(self) -> FloatArray:
        """Ids looked up, of all ranks that ask; rows are taken to be read alike, wherever they are cut."""
        table, costs = self._table, self._costs
        asking = 1 if self._type == "data_parallel" else costs.cluster.world_size
        ids: FloatArray = asking * table.lookups(costs.batch_size) * self.rows / table.rows
        return ids

    @cached_property
    def _sums(self) -> FloatArray:
        """Bytes of the sums that a shard's owner has for all ranks' samples."""
        table, costs = self._table, self._costs
        asking = 1 if self._type == "data_parallel" else costs.cluster.world_size
        sums: FloatArray = asking * table.distinct_samples(costs.batch_size) * _features(table) * self.columns
        return sums * _FLOAT_BYTES

    def _moved(self) -> dict[Channel, FloatArray]:
        table, costs = self._table, self._costs
        cluster, shards = costs.cluster, len(self.rows)
        if cluster.world_size == 1:
            return {}
        if self._type == "data_parallel":
            gradients = float(table.rows) * table.row_bytes  # DDP reduces them in the weights' type
            return {("all_reduce", 1, "pooled replicas"): np.full(shards, gradients)}
        lengths = cluster.world_size * table.distinct_samples(costs.batch_size) * _features(table)
        moved: dict[Channel, FloatArray] = {
            ("all_to_all", cluster.world_size, "pooled ids"): _ID_BYTES * (self._ids + lengths)
        }
        inside = cluster.ranks_per_node if self._type in ("table_row_wise", "grid_shard") else 1
        for channel in costs._sums(self._type, cluster.ranks_per_node, cluster.world_size):
            # What a node has reduced, its ranks share to send.
            reduced = channel[1] == cluster.world_size and inside > 1
            moved[channel] = self._sums / inside if reduced else self._sums
        return moved

    def option(self, kernel: str, cached: float | None = None) -> PooledOption:
        """With a kernel, and the share of the table's rows that it caches."""
        table, replicated = self._table, self._type == "data_parallel"
        moved, host = self._moved(), np.zeros(len(self.rows))
        static = self._weights + self._state
        if replicated:
            static = np.full(len(self.rows), table.kappa_replicated * table.rows * table.row_bytes)
        elif kernel == "dense":
            static = static + self.rows * self.columns * DATA_TYPES[table.dtype].gradient_bytes
        elif kernel != "fused":
            host = static
            missed, static = 1.0, np.zeros(len(self.rows))
            if cached is not None:
                missed -= table.profile.covered(ceil(cached * table.rows))
                static = cached * self._weights + _CACHE_INDEX_BYTES * self.rows
            crossing = missed * self._ids * self.columns * DATA_TYPES[table.dtype].nbytes
            moved |= {("host", 1, "pooled host reads"): crossing, ("host", 1, "pooled host writes"): crossing}
        return PooledOption(
            sharding_type=self._type,
            compute_kernel=kernel,
            sizes=tuple((int(rows), int(columns)) for rows, columns, _, _ in self._cuts.tolist()),
            offsets=tuple((int(row), int(column)) for _, _, row, column in self._cuts.tolist()),
            moved=moved,
            local_seconds=self._local(sweeps=replicated or kernel == "dense"),
            static_bytes=static,
            dynamic_bytes=np.zeros(len(self.rows)) if replicated else _ID_BYTES * self._ids + self._sums,
            host_bytes=host,
            ids=self._ids,
            cache_load_factor=cached,
            dtype=table.dtype,
        )

    def _local(self, *, sweeps: bool) -> FloatArray:
        """Seconds of lookups and of updates."""
        table, rates = self._table, self._costs.rates
        if rates is None:
            return np.zeros((2, len(self.rows)))
        width = self.columns * DATA_TYPES[table.dtype].nbytes
        per_id = [own[1] + own[2] * width for own in rates.of(table)]
        measured = rates.measured(table)
        if measured is not None:
            whole = sum(own[1] + own[2] * table.row_bytes for own in rates.of(table))
            per_id = [one * (measured.pooled[1] / whole if whole else 0.0) for one in per_id]
        look_up, update = (self._ids * one for one in per_id)
        if sweeps:
            update = update + rates.sweep * self._weights
        return np.stack([look_up, update])
