"""Plans that may keep rows in the host's memory, behind a cache of their owner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from flexshard import units
from flexshard.costmodels import Collective, Cost, distinct_of_stretches, read_chance, stretches_of
from flexshard.errors import BudgetError, JobError
from flexshard.planner.assembly import closed_form_baselines, table_plans, with_fullest_rank
from flexshard.planner.deciding import limit_of, settings_of
from flexshard.planner.digest import job_digest
from flexshard.planner.plan import Plan, TableCache, TablePlan
from flexshard.planner.problem import Problem
from flexshard.planner.reductions import cost_with_reductions
from flexshard.planner.solver.cached_rows import Options, Side, options_of
from flexshard.planner.solver.cached_search import Limits, are_few, choose_cached, least_hbm_bytes, takes_longer
from flexshard.planner.solver.cached_sums import CachedSums
from flexshard.planner.solver.deduplication import Variants
from flexshard.tables import Table

__all__ = ["plan_with_caches"]

_ROUNDED = 1e-9  # a share of what a plan takes that counts as nothing

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def plan_with_caches(problem: Problem) -> Plan:
    """The plan of a problem of tables without pooling that says how much of the host's memory they may take.

    The bound holds for all plans whose caches keep rows for one of :data:`BATCHES`.

    Raises:
        BudgetError: nothing fits; its ``least_bytes`` would.
        JobError: an overlap under which other rows take longer to read than those without copies.
    """
    variants = Variants(problem)
    limit = limit_of(problem, variants.plain)
    best = _best(problem, variants, limit)
    options, instance = best.options, variants.of(best.options.once)
    sparse = problem.reduction.sparse_tiers(instance, options.allocation)
    uncached = cost_with_reductions(instance, options.allocation, sparse)
    predicted = _with_caches(best, uncached)
    predicted = with_fullest_rank(predicted, instance, options.allocation, in_order=problem.in_order)
    none = ((),) * len(problem.tables)
    placed = table_plans(instance, options.allocation, sparse, none)
    settings = settings_of(problem, limit)
    return Plan(
        cluster=problem.cluster,
        settings=settings,
        tables={name: _cached(table, index, best) for index, (name, table) in enumerate(placed.items())},
        predicted=predicted,
        baselines=closed_form_baselines(variants, limit, in_order=problem.in_order),
        lower_bound_seconds=min(best.lower_bound_seconds, predicted.exposed_seconds),
        # Programs have prices of nothing but rounding where memory does not bind.
        memory_price_seconds_per_gib=best.price * units.GIB if best.price * limit > _ROUNDED * best.seconds else 0.0,
        next_gib_seconds=None,
        job_digest=job_digest(variants.plain.tables, problem.cluster, settings),
    )


@dataclass(frozen=True, eq=False)
class _Best:
    """An option of every table, what they take with latencies, the price of a byte; a bound of all, and the caches."""

    options: Options
    seconds: float
    price: float
    lower_bound_seconds: float
    caches: CachedSums


def _best(problem: Problem, variants: Variants, limit_bytes: float) -> _Best:
    instance = variants.plain
    assert problem.host_memory is not None
    if instance.group_sizes[-1] != problem.cluster.world_size:
        raise JobError(
            "host_memory: rows without copies are not the slowest to read on this cluster with this overlap, and caches"
            " need them to be; leave host_memory out"
        )
    limits = Limits(limit_bytes, problem.host_memory, problem.timeout_seconds)
    sides = _sides(problem, variants)
    subsets = sorted(instance.level_subsets(problem.tiers), key=len, reverse=True)
    found = None if are_few(sides, subsets[0]) else _without_caches(problem, variants, limit_bytes, sides)
    bounds: list[float] = []
    prices: tuple[float, float] | None = None
    for levels in subsets:
        latency = float(instance.alpha_seconds[levels].sum()) + instance.always_seconds
        if found and prices and takes_longer(sides, levels, limits, prices, found.seconds - latency):
            continue
        choice = choose_cached(sides, levels, limits)
        prices = choice.prices
        bounds.append(choice.chosen.lower_bound_seconds + latency)
        options, seconds = choice.chosen.options, choice.chosen.seconds + latency
        if options is not None and (found is None or seconds < found.seconds):
            found = _Best(options, seconds, choice.prices[0], 0.0, sides[0].caches)
    if found is None:
        least = min(least_hbm_bytes(sides, levels, limits.host_bytes) for levels in subsets)
        raise BudgetError(
            f"no placement fits {units.format_bytes(limit_bytes)} per rank and"
            f" {units.format_bytes(limits.host_bytes)} of its host's memory; with so much of that the least is about"
            f" {units.format_bytes(least)} ({np.ceil(least):,.0f} bytes): raise the budget or host_memory, use more"
            " ranks, or a smaller batch",
            least,
        )
    # A program that ends early has no bound, but nothing takes less than no time.
    return replace(found, lower_bound_seconds=max(min([found.seconds, *bounds]), 0.0))


def _without_caches(problem: Problem, variants: Variants, limit_bytes: float, sides: Sequence[Side]) -> _Best | None:
    """The best plan that has none, which knows more of ranks that wait for the owner of a hot row."""
    try:
        instance, plain = variants.solve(limit_bytes, problem.tiers)
    except BudgetError:
        return None
    tables = np.arange(len(problem.tables))
    parts = [
        options_of(side, of, plain.allocation[of], np.zeros_like(of))
        for side in sides
        for of in [tables[instance.deduplicated == side.once]]
    ]
    options = Options.joined(parts)
    return _Best(options[np.argsort(options.table)], plain.seconds, plain.price, 0.0, sides[0].caches)


def _sides(problem: Problem, variants: Variants) -> list[Side]:
    """Tables with every id sent, with a batch's sent once, or both where that is to be chosen."""
    samples = [
        float(table.distinct_samples(problem.batch_size * problem.cluster.world_size)) for table in problem.tables
    ]
    chances = np.concatenate(
        [
            np.append(found, 0.0) if table.rows > table.profile.rows_read else found
            for table, number in zip(problem.tables, samples, strict=True)
            for found in [read_chance(table.profile, number)]
        ]
    )
    rate = problem.cluster.host_bytes_per_s
    assert rate is not None
    stretches = tuple(_stretches(table) if problem.in_order else None for table in problem.tables)
    caches = CachedSums(variants.plain, chances, rate, np.array(samples), stretches)
    return [
        Side(instance, instance is not variants.plain, instance.once_seconds * instance.deduplicated, caches)
        for instance in variants.sides
    ]


def _stretches(table: Table) -> Callable[[float], float] | None:
    """How many distinct rows of a table consecutive samples read, if its profile knows."""
    known = stretches_of(table.profile)
    return None if known is None else distinct_of_stretches(*known)


def _with_caches(best: _Best, cost: Cost) -> Cost:
    """A placement's cost where some tables' rows are on the host."""
    options, rank_bytes = best.options, best.caches.row_host_bytes
    behind = np.where(options.batches > 0, options.allocation[:, -1], 0)
    moved = float(rank_bytes @ options.fetched)
    calls = tuple(
        Collective("host", 1, 1, moved, 0.0, best.caches.host_bytes_per_s, content=content)
        for content in ("cached fetches", "cached writes")
    )
    return replace(
        cost,
        static_memory_bytes=cost.static_memory_bytes - float(rank_bytes @ (behind - options.places)),
        host_memory_bytes=cost.host_memory_bytes + float(rank_bytes @ behind),
        collectives=cost.collectives + (calls if moved else ()),
    )


def _cached(table: TablePlan, index: int, best: _Best) -> TablePlan:
    options, caches = best.options, best.caches
    batches, behind = int(options.batches[index]), int(options.allocation[index, -1])
    if not batches:
        return table
    world = caches.instance.cluster.world_size
    places, fetched = float(options.places[index]), float(options.fetched[index])
    scales = tuple(float(one) for one in caches.scales(batches)[:, index])
    return replace(
        table, cache=TableCache(min(places / behind, 1.0), batches, places / world, fetched / world, *scales)
    )
