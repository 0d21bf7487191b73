"""From a decision on a whole model to its plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from flexshard import units
from flexshard._internal import plain_sum
from flexshard.costmodels import Cost, PooledOption, pooled_cost
from flexshard.planner.deciding import dense_seconds, objective_seconds, settings_of
from flexshard.planner.digest import job_digest
from flexshard.planner.plan import Plan, TablePlan
from flexshard.planner.pooled_plan import PooledAlternative, PooledShard, PooledTablePlan
from flexshard.planner.problem import Problem
from flexshard.planner.whole_model.joint import WholeDecision, decide_whole
from flexshard.planner.whole_model.longest_first import table_wise_ranks
from flexshard.planner.whole_model.pooled_menus import HBM, HOST, Choice
from flexshard.tables import Table

__all__ = ["plan_decided", "plan_whole"]

_ALTERNATIVES = 3


def plan_whole(problem: Problem) -> Plan:
    """The plan of a problem some of whose tables TorchRec shards, or may; raises as :func:`flexshard.solve`."""
    return plan_decided(decide_whole(problem))


def plan_decided(decision: WholeDecision) -> Plan:
    """The plan that a decision comes to."""
    problem = decision.problem
    costs, received = decision.menus.costs, decision.menus.received_bytes
    pooled = pooled_cost(costs, decision.pooled, received)
    sequences = decision.sequences
    predicted = pooled if sequences is None else sequences.predicted + pooled
    dense = dense_seconds(problem)
    settings = settings_of(problem, decision.limit_bytes)
    seconds, spare = objective_seconds(problem, predicted, dense), decision.limit_bytes - predicted.memory_bytes
    return Plan(
        cluster=problem.cluster,
        settings=settings,
        tables={} if sequences is None else _within_budget(sequences.table_plans(), spare),
        predicted=predicted,
        baselines=_baselines(decision, pooled),
        lower_bound_seconds=min(decision.lower_bound_seconds, seconds),
        memory_price_seconds_per_gib=decision.prices.get(HBM, 0.0) * units.GIB,
        next_gib_seconds=None,
        job_digest=job_digest(problem.tables, problem.cluster, settings),
        pooled={
            table.name: _table_plan(decision, index, table, *choice)
            for index, (table, choice) in enumerate(zip(decision.menus.tables, decision.pooled, strict=True))
        },
        pooled_predicted=pooled,
    )


def _within_budget(tables: Mapping[str, TablePlan], spare_bytes: float) -> dict[str, TablePlan]:
    """Tables whose alternatives fit where the whole plan leaves room, not their own part of the budget."""

    def judged(table: TablePlan) -> TablePlan:
        others = tuple(replace(one, fits=one.memory_bytes <= spare_bytes) for one in table.alternatives)
        return replace(table, alternatives=others)

    return {name: judged(table) for name, table in tables.items()}


def _table_plan(
    decision: WholeDecision, index: int, table: Table, option: PooledOption, ranks: Sequence[int]
) -> PooledTablePlan:
    costs = decision.menus.costs
    memory, seconds = option.static_bytes + option.dynamic_bytes, costs.seconds(option).sum(axis=0)
    return PooledTablePlan(
        name=table.name,
        rows=table.rows,
        dim=table.dim,
        dtype=option.dtype,
        optimizer=table.optimizer,
        features=tuple(table.features),
        pooling=table.pooling,
        profile_digest=table.profile.digest,
        profile_path=table.profile.path,
        num_samples=table.profile.num_samples,
        avg_length=table.profile.avg_length,
        sharding_type=option.sharding_type,
        compute_kernel=option.compute_kernel,
        cache_load_factor=option.cache_load_factor,
        shards=tuple(
            PooledShard(
                int(rank), *size, *offset, float(memory[shard]), float(option.host_bytes[shard]), float(seconds[shard])
            )
            for shard, (rank, size, offset) in enumerate(zip(ranks, option.sizes, option.offsets, strict=True))
        ),
        alternatives=_alternatives(decision, option, decision.menus.options[index]),
        dedup_factor=table.dedup_factor,
    )


def _alternatives(
    decision: WholeDecision, chosen: PooledOption, menu: Sequence[PooledOption]
) -> tuple[PooledAlternative, ...]:
    """The other options of a table, by what they cost an average rank at the prices of memory."""
    world, costs = decision.problem.cluster.world_size, decision.menus.costs

    def figures(option: PooledOption) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        """Seconds, bytes, and both together, of an average rank."""
        held = float((option.static_bytes + option.dynamic_bytes).sum()), float(option.host_bytes.sum())
        seconds = float(costs.seconds(option).sum())
        priced = seconds + plain_sum(
            decision.prices.get(kind, 0.0) * of for kind, of in zip((HBM, HOST), held, strict=True)
        )
        return np.array([seconds, held[0], priced]) / world

    now = figures(chosen)
    others = [((figures(option) - now).tolist(), option) for option in menu if option is not chosen]
    others.sort(key=lambda one: one[0][2])
    return tuple(
        PooledAlternative(
            option.sharding_type,
            option.compute_kernel,
            option.cache_load_factor,
            seconds,
            nbytes,
            priced,
            None if option.dtype == chosen.dtype else option.dtype,
        )
        for (seconds, nbytes, priced), option in others[:_ALTERNATIVES]
    )


def _baselines(decision: WholeDecision, planned: Cost) -> dict[str, Cost]:
    """Every pooled table row-wise (means whole, where there is room), replicated, or table-wise, beside the closed-form
    baselines of the others; the paper's, whose tables are not pooled, beside row-wise ones. What does not fit is listed
    all the same. ``planned`` is the cost of the pooled tables as the plan has them.
    """
    costs, received, tables = decision.menus.costs, decision.menus.received_bytes, decision.menus.tables
    world = costs.cluster.world_size

    def cost_of(choices: Sequence[Choice]) -> Cost:
        return pooled_cost(costs, choices, received)

    def every(sharding_type: str) -> list[PooledOption]:
        return [costs.options(table, sharding_types=[sharding_type])[0] for table in tables]

    row_wise = cost_of(decision.row_wise)
    everywhere = tuple(range(world))
    copies = cost_of([(option, everywhere) for option in every("data_parallel")])
    whole = every("table_wise")
    table_wise = cost_of(
        [(option, (rank,)) for option, rank in zip(whole, table_wise_ranks(costs, whole, world), strict=True)]
    )
    if decision.sequences is None:
        return {"row_wise": row_wise, "data_parallel": copies, "table_wise": table_wise}
    others = decision.sequences.baselines()
    beside = {"data_parallel": copies, "once_per_node": planned}
    found = {name: cost + beside.get(name, row_wise) for name, cost in others.items()}
    return found | {"table_wise": others["row_wise"] + table_wise}
