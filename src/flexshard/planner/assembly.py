"""From allocations to the tables and baselines of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from flexshard.costmodels import Cost, strategy_name
from flexshard.errors import BudgetError
from flexshard.planner.plan import Alternative, TablePlan, Tier
from flexshard.planner.solver.deduplication import Variants
from flexshard.planner.solver.holders import holders_apart, hottest_rows
from flexshard.planner.solver.instance import Allocation, Instance
from flexshard.planner.solver.loads import fullest_rank_bytes
from flexshard.planner.solver.published import solve_published
from flexshard.tables import Table

__all__ = ["closed_form_baselines", "table_plans", "with_fullest_rank"]


def with_fullest_rank(cost: Cost, instance: Instance, allocation: Allocation, *, in_order: bool) -> Cost:
    """With the memory of the fullest rank, of samples in the order of the data or shuffled."""
    return replace(cost, fullest_dynamic_bytes=fullest_rank_bytes(instance, allocation, in_order=in_order))


def closed_form_baselines(variants: Variants, limit: float, *, in_order: bool) -> dict[str, Cost]:
    """The four closed-form baselines, which send every lookup, the paper's at the same budget or at the least that they
    can have; and row-wise with ids sent once, where they may be. ``in_order`` as of :func:`with_fullest_rank`.
    """
    instance = variants.plain

    def cost_of(allocation: Allocation, instance: Instance = instance) -> Cost:
        return with_fullest_rank(instance.cost(allocation), instance, allocation, in_order=in_order)

    baselines = {
        "row_wise": cost_of(instance.uniform(instance.cluster.world_size)),
        "data_parallel": cost_of(instance.uniform(1)),
    }
    for tiers in (2, 3):
        try:
            allocation = solve_published(instance, limit, tiers)
        except BudgetError as error:
            allocation = solve_published(instance, error.least_bytes, tiers)
        baselines[f"paper_{tiers}_tier"] = cost_of(allocation)
    if variants.problem.index_dedup and instance.cluster.world_size > 1:
        baselines["row_wise_dedup"] = cost_of(instance.uniform(instance.cluster.world_size), variants.once)
    return baselines


def table_plans(
    instance: Instance,
    allocation: Allocation,
    sparse: npt.NDArray[np.bool_],
    alternatives: Sequence[tuple[Alternative, ...]],
) -> dict[str, TablePlan]:
    """Tables of a plan by name, in the instance's order; ``sparse`` of shape (T, G)."""
    reads, holders = instance.tier_reads(allocation), holders_apart(instance, hottest_rows(instance, allocation))
    return {
        table.name: TablePlan(
            name=table.name,
            rows=table.rows,
            dim=table.dim,
            dtype=table.dtype,
            optimizer=table.optimizer,
            features=tuple(table.features),
            kappa_replicated=table.kappa_replicated,
            kappa_sharded=table.kappa_sharded,
            profile_digest=table.profile.digest,
            profile_path=table.profile.path,
            num_samples=table.profile.num_samples,
            avg_length=table.profile.avg_length,
            tiers=_tiers(instance, index, allocation[index], reads[index], sparse[index], holders[index]),
            alternatives=alternatives[index],
            dedup_factor=table.dedup_factor,
            index_dedup=bool(instance.deduplicated[index]),
        )
        for index, table in enumerate(instance.tables)
    }


def _tiers(
    instance: Instance,
    index: int,
    rows: npt.NDArray[np.int64],
    reads: npt.NDArray[np.float64],
    sparse: npt.NDArray[np.bool_],
    holders: npt.NDArray[np.int64],
) -> tuple[Tier, ...]:
    table, world = instance.tables[index], instance.cluster.world_size
    profile = table.profile
    cum_rows = instance.cum_rows[instance.starts[index] : instance.starts[index + 1]]
    total = float(reads.sum())
    ends = np.cumsum(rows)
    tiers = []
    levels = (instance.group_sizes, ends, rows, reads, sparse, holders)
    for size, end, number, read, gathered, holder in zip(*(of.tolist() for of in levels), strict=True):
        if number == 0:
            continue
        first, last = np.searchsorted(cum_rows, [end - number, end - 1], side="right").tolist()
        hottest, coldest = (
            float(profile.counts[group]) / profile.num_samples if group < profile.counts.size else 0.0
            for group in (first, last)
        )
        known = instance.deduplicated[index] and last < profile.counts.size
        share = float(profile.sample_share[last]) if known else None
        covered = profile.covered(end) - profile.covered(end - number) if instance.deduplicated[index] else read / total
        tiers.append(
            Tier(
                strategy_name(size, world),
                size,
                number,
                end - number,
                covered,
                _held_out(table, end - number, end),
                read,
                hottest,
                coldest,
                "sparse" if gathered else "dense",
                share,
                holder,
            )
        )
    return tuple(tiers)


def _held_out(table: Table, first: int, end: int) -> float | None:
    before, after = table.profile.covered_held_out(first), table.profile.covered_held_out(end)
    return None if before is None or after is None else after - before
