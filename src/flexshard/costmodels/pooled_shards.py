"""Shards of a table under one of TorchRec's sharding types: how it is cut, and what each of them costs."""

from __future__ import annotations

from functools import cached_property
from math import ceil

import numpy as np
import numpy.typing as npt

from flexshard._internal import plain_sum
from flexshard.costmodels.local_rates import LocalRates
from flexshard.costmodels.pooled_options import (
    CUT_BY_ROWS,
    FLOAT_BYTES,
    SEQUENCE,
    Channel,
    PooledOption,
    features_of,
    module_of,
    ways_of_rows,
)
from flexshard.tables import DATA_TYPES, OPTIMIZERS, Table
from flexshard.topologies import Cluster

__all__ = ["Shards", "column_width", "copies_of", "cuts_of"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_ID_BYTES = 8  # TorchRec's ids and lengths
_CACHE_INDEX_BYTES = 4  # per row of a cached table, in the rank's memory
_LEAST_COLUMNS = 128  # of a column shard, unless the table says otherwise


def column_width(dim: int, least: int | None = None) -> int:
    """Columns of a column shard, as TorchRec cuts a table: the least divisor of D that is a multiple of four and at
    least ``least`` (128 by default); D where there is none.
    """
    bound = _LEAST_COLUMNS if least is None else least
    return next((width for width in range(bound, dim) if dim % width == 0 and width % 4 == 0), dim)


def copies_of(table: Table, number: int) -> IntArray:
    """The whole table as so many shards, as :func:`cuts_of` has them."""
    return np.tile(np.array([table.rows, table.dim, 0, 0], np.int64), (number, 1))


def cuts_of(cluster: Cluster, sharding_type: str, table: Table, width: int) -> IntArray | None:
    """Rows, columns, first row and first column of each shard of a table in columns of ``width``, shape (shards, 4);
    None where the type is another one under a name of its own: columns that are not cut, rows of a node where there is
    but one.
    """
    world, node, one_node = cluster.world_size, cluster.ranks_per_node, cluster.nodes == 1
    columns = range(0, table.dim, width)
    if sharding_type == "data_parallel":
        return copies_of(table, world)
    if sharding_type == "table_wise":
        return copies_of(table, 1)
    if sharding_type == "row_wise":
        return _row_blocks(table.rows, world, table.dim, 0) if world > 1 else None
    whole_rows = np.array([(table.rows, width, 0, first) for first in columns], np.int64)
    if sharding_type == "column_wise":
        return whole_rows if len(columns) > 1 else None
    if one_node or node == 1:
        return None
    if sharding_type == "table_row_wise":
        return _row_blocks(table.rows, node, table.dim, 0)
    if len(columns) == 1:
        return None
    if sharding_type == "table_column_wise":
        return whole_rows
    return np.concatenate([_row_blocks(table.rows, node, width, first) for first in columns])


def _row_blocks(rows: int, count: int, width: int, column: int) -> IntArray:
    """Blocks of rows as TorchRec cuts them: all of the same size but the last ones."""
    block = ceil(rows / count)
    first = np.minimum(np.arange(count, dtype=np.int64) * block, rows)
    each = np.full(count, width, np.int64), first, np.full(count, column, np.int64)
    return np.stack([np.minimum(block, rows - first), *each], axis=1)


class Shards:
    """Shards of a table under one sharding type: what kernels do not change."""

    def __init__(
        self,
        cluster: Cluster,
        batch_size: int,
        rates: LocalRates | None,
        table: Table,
        sharding_type: str,
        cuts: IntArray,
    ) -> None:
        self._cluster, self._batch_size, self._rates = cluster, batch_size, rates
        self._table, self._type = table, sharding_type
        self._cuts, self._known = cuts, dict[tuple[str, float | None], PooledOption]()
        self.rows, self.columns = cuts[:, 0].astype(np.float64), cuts[:, 1].astype(np.float64)

    @property
    def _asking(self) -> int:
        """Ranks whose ids a shard is looked up by."""
        return 1 if self._type == "data_parallel" else self._cluster.world_size

    @cached_property
    def _weights(self) -> FloatArray:
        """Bytes of weights."""
        nbytes: FloatArray = self.rows * self.columns * DATA_TYPES[self._table.dtype].nbytes
        return nbytes

    @cached_property
    def _state(self) -> FloatArray:
        """Bytes of optimizer state; each column shard has the numbers that are per row."""
        width = int(self._cuts[0, 1])  # the same of all shards
        nbytes: FloatArray = self.rows * OPTIMIZERS[self._table.optimizer].state_bytes(width)
        return nbytes

    @cached_property
    def _ids(self) -> FloatArray:
        """Ids looked up, of all ranks that ask. Rows of a histogram, which knows no ids, are taken to be read alike."""
        table, shares = self._table, self.rows / self._table.rows
        if self._type in CUT_BY_ROWS and table.profile.row_counts is not None:
            block = int(self.rows[0])  # the first is the largest; offsets of those without rows are the table's end
            read = table.profile.share_in_blocks(block, ceil(table.rows / block) + 1)
            shares = read[self._cuts[:, 2] // block] * (self.rows > 0)
        ids: FloatArray = self._asking * table.lookups(self._batch_size) * shares
        return ids

    @cached_property
    def _sums(self) -> FloatArray:
        """Bytes of the sums, or without pooling of the rows, that a shard's owner has for all ranks' samples."""
        table = self._table
        if not table.is_pooled:
            rows: FloatArray = self._ids * self.columns * FLOAT_BYTES
            return rows
        sums: FloatArray = self._asking * table.distinct_samples(self._batch_size) * features_of(table) * self.columns
        return sums * FLOAT_BYTES

    def _moved(self) -> dict[Channel, FloatArray]:
        table, cluster, shards = self._table, self._cluster, len(self.rows)
        if cluster.world_size == 1:
            return {}
        if self._type == "data_parallel":
            gradients = float(table.rows) * table.row_bytes  # DDP reduces them in the weights' type
            return {("all_reduce", 1, f"{module_of(table)} replicas"): np.full(shards, gradients)}
        lengths = cluster.world_size * table.distinct_samples(self._batch_size) * features_of(table)
        moved: dict[Channel, FloatArray] = {
            ("all_to_all", cluster.world_size, f"{module_of(table)} ids"): _ID_BYTES * (self._ids + lengths)
        }
        inside = cluster.ranks_per_node if self._type in ("table_row_wise", "grid_shard") else 1
        for channel in ways_of_rows(cluster, self._type if table.is_pooled else SEQUENCE + self._type):
            # What a node has reduced, its ranks share to send.
            reduced = channel[1] == cluster.world_size and inside > 1
            moved[channel] = self._sums / inside if reduced else self._sums
        return moved

    def option(self, kernel: str, cached: float | None = None) -> PooledOption:
        """With a kernel, and the share of the table's rows that it caches; worked out once."""
        if (kernel, cached) not in self._known:
            self._known[kernel, cached] = self._option(kernel, cached)
        return self._known[kernel, cached]

    def _option(self, kernel: str, cached: float | None) -> PooledOption:
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
            cuts=self._cuts,
            moved=moved,
            local_seconds=self._local(sweeps=replicated or kernel == "dense"),
            static_bytes=static,
            dynamic_bytes=np.zeros(len(self.rows)) if replicated else _ID_BYTES * self._ids + self._sums,
            host_bytes=host,
            ids=self._ids,
            cache_load_factor=cached,
            dtype=table.dtype,
            is_sequence=not table.is_pooled,
        )

    def _local(self, *, sweeps: bool) -> FloatArray:
        """Seconds of lookups and of updates."""
        table, rates = self._table, self._rates
        if rates is None:
            return np.zeros((2, len(self.rows)))
        width = self.columns * DATA_TYPES[table.dtype].nbytes
        per_id = [own[1] + own[2] * width for own in rates.of(table)]
        measured = rates.measured(table)
        if measured is not None and table.is_pooled:
            whole = plain_sum(own[1] + own[2] * table.row_bytes for own in rates.of(table))
            per_id = [one * (measured.pooled[1] / whole if whole else 0.0) for one in per_id]
        look_up, update = (self._ids * one for one in per_id)
        if sweeps:
            update = update + rates.sweep * self._weights
        return np.stack([look_up, update])
