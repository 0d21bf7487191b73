"""TorchRec's own planner, asked for a plan of the same tables, priced by our cost model."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flexshard._internal import INSTALL_TORCHREC, plain_sum
from flexshard.costmodels import (
    POOLED_KERNELS,
    SLOT_BYTES,
    Cost,
    LocalRates,
    PooledCosts,
    RowWidths,
    collectives_between,
    placement_cost,
    pooled_cost,
    priced,
    table_wise_cost,
    with_hottest,
)
from flexshard.errors import MissingDependencyError, SolverError
from flexshard.planner.constraints import TableConstraints
from flexshard.planner.problem import Problem
from flexshard.tables import DATA_TYPES, Table

_ID_BYTES = 8  # TorchRec's

__all__ = ["TorchRecChoice", "price_choices", "torchrec_choices", "torchrec_cost"]


@dataclass(frozen=True)
class TorchRecChoice:
    """What TorchRec's planner chose for a table.

    Attributes:
        sharding_type: "data_parallel", "row_wise", "table_wise" or "column_wise".
        shards: (rank, share of the table's columns) of each shard of the last two.
        compute_kernel, ranks, columns: of a pooled table its kernel, the rank of each shard, and how many columns the
            first has.
    """

    sharding_type: str
    shards: tuple[tuple[int, float], ...] = ()
    compute_kernel: str = "fused"
    ranks: tuple[int, ...] = ()
    columns: int = 0


def torchrec_cost(problem: Problem) -> Cost:
    """Cost, by our model, of the plan that TorchRec's default planner makes; of its busiest rank.

    TorchRec finds rows by arithmetic, so what the problem's translation of ids holds is not in it.

    Raises:
        MissingDependencyError: TorchRec is not installed.
        SolverError: its planner finds no plan.
    """
    return price_choices(problem, torchrec_choices(problem))


def torchrec_choices(problem: Problem) -> list[TorchRecChoice]:
    """Ask TorchRec's ``EmbeddingShardingPlanner``, with its defaults, on a topology of the cluster's figures.

    The tables are those of collections on the meta device, whose features' pooling factors add up to L.
    """
    try:
        import torch
        from torchrec import (
            EmbeddingBagCollection,
            EmbeddingBagConfig,
            EmbeddingCollection,
            EmbeddingConfig,
            PoolingType,
        )
        from torchrec.distributed.embedding import EmbeddingCollectionSharder
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
        from torchrec.distributed.planner.types import PlannerError
        from torchrec.modules.embedding_configs import DataType
    except ImportError as error:
        raise MissingDependencyError(f"TorchRec's planner needs TorchRec ({error}); {INSTALL_TORCHREC}") from error
    tables, cluster, batch_size = problem.tables, problem.cluster, problem.batch_size
    groups: dict[int, list[Any]] = {}
    pooled: list[Any] = []
    for index, table in enumerate(tables):
        fields = {
            "name": f"table_{index}",
            "embedding_dim": table.dim,
            "num_embeddings": table.rows,
            "feature_names": [f"feature_{index}_{number}" for number in range(_features(table))],
            # TorchRec has no tables of float64; they count as float32 there.
            "data_type": DataType[DATA_TYPES[table.dtype].torchrec or "FP32"],
        }
        if table.is_pooled:
            pooled.append(EmbeddingBagConfig(**fields, pooling=PoolingType[table.pooling.upper()]))
        else:
            groups.setdefault(table.dim, []).append(EmbeddingConfig(**fields))  # these share one dimension
    model = torch.nn.ModuleDict(
        {
            f"dim_{dim}": EmbeddingCollection(tables=configs, device=torch.device("meta"))
            for dim, configs in groups.items()
        }
    )
    if pooled:
        model["pooled"] = EmbeddingBagCollection(tables=pooled, device=torch.device("meta"))
    outer = cluster.under_torchrec.level(cluster.world_size).all_to_all
    inner = cluster.under_torchrec.level(cluster.ranks_per_node).all_to_all if cluster.ranks_per_node > 1 else outer
    constraints = {
        f"table_{index}": ParameterConstraints(
            pooling_factors=[table.profile.avg_length / _features(table)] * _features(table)
        )
        for index, table in enumerate(tables)
    }
    try:
        with _quiet():
            topology = Topology(
                world_size=cluster.world_size,
                local_world_size=cluster.ranks_per_node,
                compute_device="cuda",
                hbm_cap=int(cluster.hbm_bytes - cluster.reserve_bytes),
                ddr_cap=int(problem.host_memory or 0),  # as for everybody else
                intra_host_bw=(inner.bytes_per_s if inner else 1e9) / 1e3,  # bytes per millisecond, as its constants
                inter_host_bw=(outer.bytes_per_s if outer else 1e9) / 1e3,
            )
            planner = EmbeddingShardingPlanner(topology=topology, batch_size=batch_size, constraints=constraints)
            plan = planner.plan(model, [EmbeddingCollectionSharder(), EmbeddingBagCollectionSharder()])
    except PlannerError as error:
        raise SolverError(f"TorchRec's planner found no plan: {str(error).strip().splitlines()[0]}") from error
    shardings = {name: sharding for module in plan.plan.values() for name, sharding in module.items()}
    return [_choice(shardings[f"table_{index}"], table) for index, table in enumerate(tables)]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without TorchRec's advice on how to set its planner up for training, which nobody here is doing."""
    loggers = [logging.getLogger("torchrec"), logging.getLogger()]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _features(table: Table) -> int:
    return max(1, len(table.features)) if table.is_pooled else 1


def _choice(sharding: Any, table: Table) -> TorchRecChoice:
    if table.is_pooled:
        shards = [] if sharding.sharding_spec is None else sharding.sharding_spec.shards
        return TorchRecChoice(
            sharding.sharding_type,
            compute_kernel=sharding.compute_kernel,
            ranks=tuple(int(shard.placement.rank()) for shard in shards) or tuple(sharding.ranks),
            columns=int(shards[0].shard_sizes[1]) if shards else table.dim,
        )
    if sharding.sharding_type in ("data_parallel", "row_wise"):
        return TorchRecChoice(sharding.sharding_type)
    shards = sharding.sharding_spec.shards
    return TorchRecChoice(
        sharding.sharding_type,
        tuple((int(shard.placement.rank()), shard.shard_sizes[1] / table.dim) for shard in shards),
    )


def price_choices(problem: Problem, choices: Sequence[TorchRecChoice]) -> Cost:
    """Cost of whole-table choices: what all ranks share, and the busiest rank's part of each metric besides."""
    if problem.pooled_tables:
        return _with_pooled(problem, choices)
    cluster, hidden = problem.cluster.under_torchrec, problem.hidden
    shared, received = Cost(), Cost()
    per_rank = [Cost() for _ in range(cluster.world_size)]
    hottest, widths = 0.0, RowWidths(0, 0, 0)
    for table, choice in zip(problem.tables, choices, strict=True):
        reads = float(table.reads(problem.batch_size) @ table.profile.rows)
        variation = table.length_variation(problem.batch_size)
        size = 1 if choice.sharding_type == "data_parallel" else cluster.world_size
        whole = placement_cost(table, cluster, size, rows=table.rows, reads=reads, variation=variation, overlap=hidden)
        whole = _with_long_ids(whole)
        if not choice.shards:
            shared += whole
            hot, own = float(table.reads(problem.batch_size)[0]), RowWidths.of_table(table)
            if size > 1 and hot * own.moved_bytes(_ID_BYTES) > hottest * widths.moved_bytes(_ID_BYTES):
                hottest, widths = hot, own
            continue
        # Whoever owns the shards, every rank asks each of them and gets its own rows back.
        received += Cost(collectives=whole.collectives)
        shared += Cost(0.0, reads * table.row_bytes, reads * len(choice.shards), dynamic_memory_sigma_bytes=None)
        for rank, share in choice.shards:
            per_rank[rank] += _with_long_ids(table_wise_cost(table, cluster, reads=reads, share=share))
    counts = collectives_between(cluster.world_size, (), (), np.zeros((0, 0)), np.zeros(0, np.bool_), 4)
    sharing = cluster.ranks_on_link(cluster.world_size)
    waited = with_hottest(shared.collectives, cluster.world_size, hottest, widths, _ID_BYTES, sharing=sharing)
    shared = replace(shared, collectives=waited) + Cost(collectives=priced(counts, {}, cluster, hidden))
    # How its ranks' shares of a batch differ is not worked out; what their mean does would read as the fullest's.
    found = replace(shared + _busiest(per_rank, received, sharing), dynamic_memory_sigma_bytes=None)
    if problem.rates is None:
        return found
    look_up, update = _local(problem, choices, problem.rates)
    return replace(found, look_up_seconds=look_up, update_seconds=update)


def _with_long_ids(cost: Cost) -> Cost:
    """The cost where ids are as long as TorchRec's, not as ours."""
    calls = tuple(one.scaled(_ID_BYTES / SLOT_BYTES) if one.content == "ids" else one for one in cost.collectives)
    return replace(cost, collectives=calls)


def _with_pooled(problem: Problem, choices: Sequence[TorchRecChoice]) -> Cost:
    """The same of a model with pooled tables; the fullest rank with some is taken to be that with the others."""
    costs = PooledCosts(problem.cluster, problem.batch_size, problem.hidden, problem.rates)
    placed, others = [], []
    for table, choice in zip(problem.tables, choices, strict=True):
        if not table.is_pooled:
            others.append(choice)
            continue
        kernel = choice.compute_kernel if choice.compute_kernel in POOLED_KERNELS else "fused"
        options = costs.options(
            replace(table, pooling="sum"),  # its means may be cut by rows
            sharding_types=[choice.sharding_type],
            compute_kernels=[kernel],
            min_partition=choice.columns or None,
            cache_load_factors=TableConstraints.cache_load_factors,  # as TorchRec's
        )
        # A table that is cut in one piece is TorchRec's under whatever name.
        (option,) = options or costs.options(table, sharding_types=["table_wise"], compute_kernels=[kernel])
        placed.append((option, choice.ranks))
    pooled = pooled_cost(costs, placed, plain_sum(costs.received_bytes(table) for table in problem.pooled_tables))
    return pooled + price_choices(problem.of_rows(problem.sequence_tables), others) if others else pooled


def _local(problem: Problem, choices: Sequence[TorchRecChoice], rates: LocalRates) -> tuple[float, float]:
    """Lookups and updates of the rank that serves most."""
    world = problem.cluster.world_size
    seconds = np.zeros((world, 2))
    for table, choice in zip(problem.tables, choices, strict=True):
        reads = float(table.reads(problem.batch_size) @ table.profile.rows)
        own = np.array(rates.of(table))
        if not choice.shards:  # every rank reads its share of all rows
            seconds += reads * (own[:, 1] + own[:, 2] * table.row_bytes)
        for rank, share in choice.shards:
            seconds[rank] += reads * world * (own[:, 1] + own[:, 2] * table.row_bytes * share)
        if choice.sharding_type == "data_parallel":
            seconds[:, 1] += rates.sweep * table.rows * table.row_bytes
    busiest = seconds[seconds.sum(axis=1).argmax()]
    return float(busiest[0]), float(busiest[1])


def _busiest(per_rank: Sequence[Cost], received: Cost, sharing: int) -> Cost:
    """The largest of each metric over the ranks. An all-to-all takes as long as its fullest buffer, either way; where
    ranks share a link, as the fullest of links.
    """
    links = [per_rank[first : first + sharing] for first in range(0, len(per_rank), sharing)]
    served = [
        {
            c.content: plain_sum(one.nbytes for cost in link for one in cost.collectives if one.content == c.content)
            / sharing
        }
        for link in links
        for c in received.collectives
    ]
    return Cost(
        static_memory_bytes=max(cost.static_memory_bytes for cost in per_rank),
        dynamic_memory_bytes=max(cost.dynamic_memory_bytes for cost in per_rank),
        rows_read=max(cost.rows_read for cost in per_rank),
        collectives=tuple(
            replace(c, excess_bytes=max(0.0, *(nbytes.get(c.content, 0.0) - c.nbytes for nbytes in served)))
            for c in received.collectives
        ),
    )
