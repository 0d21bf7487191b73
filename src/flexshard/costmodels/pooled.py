"""What a table costs under every sharding type and kernel that TorchRec runs, shard by shard.

Rows of a pooled table are summed where they are looked up, so what travels is one row per sample and feature, whatever
L: to all ranks from one owner (table-wise), from the owner of each column shard, or as partial sums that are reduced
(row-wise). Of a table without pooling (TorchRec's ``EmbeddingCollection``) every row travels that is looked up, from
its owner. Legend: U ranks, W of a node, N nodes, S samples per rank, L ids per sample, F features, E rows of D numbers,
d columns of a shard.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from flexshard._internal import plain_sum
from flexshard.costmodels.local_rates import LocalRates
from flexshard.costmodels.overlap import Overlap, hidden_share
from flexshard.costmodels.pooled_options import (
    CUT_BY_ROWS,
    FLOAT_BYTES,
    LOOK_UP,
    POOLED_KERNELS,
    POOLED_LOADS,
    POOLED_TYPES,
    SEQUENCE_TYPES,
    UPDATE,
    Channel,
    PooledOption,
    features_of,
    load_of,
    module_of,
    type_of,
    ways_of_rows,
)
from flexshard.costmodels.pooled_shards import Shards, column_width, copies_of, cuts_of
from flexshard.costmodels.tensor_train.cost import tensor_train_cost
from flexshard.costmodels.tensor_train.reads import TTReads
from flexshard.tables import Table, TTShape
from flexshard.topologies import Cluster, CollectiveRate

__all__ = ["PooledCosts"]

FloatArray = npt.NDArray[np.float64]

_INPUT_CALLS = 3  # how many ids come, how many of each sample, ids


@dataclass(frozen=True)
class PooledCosts:
    """Costs of tables that TorchRec shards on a cluster.

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

    @cached_property
    def _cluster(self) -> Cluster:
        return self.cluster.under_torchrec

    # -- what travels

    def rate(self, channel: Channel) -> CollectiveRate:
        """Of one call. Links between a rank and its host take no time to start."""
        kind, size, _ = channel
        if kind == "host":
            assert self.cluster.host_bytes_per_s is not None
            return CollectiveRate(0.0, self.cluster.host_bytes_per_s)
        rate: CollectiveRate | None = getattr(self._cluster.level(size), kind)
        assert rate is not None
        return rate

    def exposed(self, channel: Channel) -> float:
        """Share of a channel's time that nothing hides."""
        return 1.0 - hidden_share(self.overlap, *channel)

    def seconds(self, option: PooledOption) -> FloatArray:
        """Of each kind of load, what each shard takes of its rank; without latencies. Shape (loads, shards)."""
        found = np.zeros((len(POOLED_LOADS), option.shards))
        for channel, nbytes in option.moved.items():
            load = load_of(option.shared_calls, channel[2])
            found[load] += self.exposed(channel) * nbytes / self.rate(channel).bytes_per_s
        found[POOLED_LOADS.index(LOOK_UP)] += option.local_seconds[0]
        found[POOLED_LOADS.index(UPDATE)] += option.local_seconds[1]
        return found

    def sharing(self, load: str) -> int:
        """Ranks that carry a kind of load together: where those of a node share a link, whatever crosses links. That of
        it which stays within nodes counts as if it did not.
        """
        together, crosses = self.cluster.ranks_on_link(self.cluster.world_size), load not in (LOOK_UP, UPDATE)
        return together if crosses and self.cluster.ranks_per_node % together == 0 else 1

    def calls(self, shared_calls: str) -> dict[Channel, int]:
        """Calls of a step, forward and backward, by one of :data:`SHARED_CALLS`."""
        world, sharding_type = self.cluster.world_size, type_of(shared_calls)
        module = "pooled" if sharding_type == shared_calls else "sequence"
        if sharding_type == "data_parallel":
            return {("all_reduce", 1, f"{module} replicas"): 1} if world > 1 else {}
        calls: dict[Channel, int] = {("all_to_all", world, f"{module} ids"): _INPUT_CALLS}
        calls |= dict.fromkeys(ways_of_rows(self.cluster, shared_calls), 1)
        return calls if world > 1 else {}

    def latency(self, shared_calls: str) -> float:
        """Exposed time that such calls take to start."""
        calls = self.calls(shared_calls).items()
        return plain_sum(self.exposed(one) * number * self.rate(one).alpha_seconds for one, number in calls)

    def received_bytes(self, table: Table) -> float:
        """Bytes of sums (of rows, without pooling) that every rank has of its own samples, wherever they come from."""
        if not table.is_pooled:
            return table.lookups(self.batch_size) * table.dim * FLOAT_BYTES
        return table.distinct_samples(self.batch_size) * features_of(table) * table.dim * FLOAT_BYTES

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
        cores = plain_sum(one.nbytes for one in cost.collectives)
        return PooledOption(
            sharding_type="data_parallel",
            compute_kernel=f"tensor train, {shape}",
            cuts=copies_of(table, world),
            moved={} if world == 1 else {("all_reduce", 1, f"{module_of(table)} replicas"): cores * each},
            local_seconds=np.stack([0.0 * each, seconds * each]),
            static_bytes=cost.static_memory_bytes * each,
            dynamic_bytes=cost.dynamic_memory_bytes * each,
            host_bytes=0.0 * each,
            ids=reads.ids * each,
            loss=loss,
            is_sequence=not table.is_pooled,
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
        by rows where TorchRec would train them wrongly: see :data:`CUT_BY_ROWS`. Tables without pooling have the
        types of :data:`SEQUENCE_TYPES`.
        """
        found = []
        width = column_width(table.dim, min_partition)
        for sharding_type in (one for one in POOLED_TYPES if one in sharding_types):
            if table.pooling == "mean" and sharding_type in CUT_BY_ROWS:
                continue
            if not table.is_pooled and sharding_type not in SEQUENCE_TYPES:
                continue
            shards = self._shards(table, sharding_type, width)
            if shards is None:
                continue
            if sharding_type == "data_parallel":
                found.append(shards.option("dense"))
                continue
            for kernel in (one for one in POOLED_KERNELS if one in compute_kernels):
                shares = list(cache_load_factors) if kernel == "fused_uvm_caching" else [None]
                found += [shards.option(kernel, share) for share in shares]
        return found

    def _shards(self, table: Table, sharding_type: str, width: int) -> Shards | None:
        """Shards of a table in columns of ``width``, which several ask for; None as :func:`cuts_of`."""
        key = id(table), sharding_type, width
        known = self._known.get(key)
        if known is None or known[0] is not table:  # as in a copy, of other tables
            cuts = cuts_of(self.cluster, sharding_type, table, width)
            how = self.cluster, self.batch_size, self.rates
            known = self._known[key] = table, None if cuts is None else Shards(*how, table, sharding_type, cuts)
        return known[1]

    @cached_property
    def _known(self) -> dict[tuple[int, str, int], tuple[Table, Shards | None]]:
        """By the number of the table, which is kept beside."""
        return {}
