"""``solve``: from tables, a cluster and a budget to a plan."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
import numpy.typing as npt

from flexshard import units
from flexshard._values import whole
from flexshard.costmodels import REDUCTIONS, Cost, OverlapLike, Table, strategy_name
from flexshard.errors import BudgetError, JobError, UnitError
from flexshard.planner._instance import Allocation, Instance, build_instance
from flexshard.planner._paper import solve_paper
from flexshard.planner._plan import Alternative, Plan, Settings, TablePlan, Tier
from flexshard.planner._reduction import cost_with_reductions, sparse_tiers
from flexshard.planner._solver import solve_instance
from flexshard.planner._thresholds import allocate
from flexshard.topologies import Cluster

__all__ = ["METHODS", "budget_bytes", "parse_budget", "per_table", "solve"]

METHODS = ("optimal", "paper")


def solve(
    tables: Sequence[Table],
    cluster: Cluster,
    *,
    batch_size: int,
    budget: str | float = "neutral",
    tiers: int = 3,
    method: str = "optimal",
    overlap: OverlapLike = None,
    index_dedup: bool = False,
    reduction: str = "dense",
    translation: str = "loader",
) -> Plan:
    """Decide where every row of every table lives, so that training communicates least within a memory budget.

    Args:
        tables: with their access profiles.
        cluster: to train on.
        batch_size: B, samples per rank.
        budget: "neutral" (no more memory per rank than row-wise), a difference to that ("+2GiB", "-500 MB", or a
            number of bytes), or an absolute limit ("40GiB"), of which the cluster's reserve is taken off.
        tiers: most group sizes that the plan may use.
        method: "optimal", or "paper" for the published algorithm with 2 or 3 tiers.
        overlap: what other work hides; see :func:`flexshard.costmodels.overlap_of`.
        reduction: how gradients of copies are brought together: "dense" (all-reduce), "sparse" (all-gather of the rows
            that were touched) or "auto" (for each tier, whichever is predicted to take less). Chosen after the tiers,
            whose proof holds for dense ones.
        translation: where ids are translated to ranks and slots: "loader" (ahead of the model, in host memory) or
            "device" (four bytes per row of a rank's memory, in every placement and so in the budget too).
        index_dedup: count distinct rows per batch instead of all reads.

    Raises:
        JobError: an argument that cannot be used.
        BudgetError: no placement fits; its ``least_bytes`` would.
    """
    if method not in METHODS:
        raise JobError(f"method must be one of {', '.join(METHODS)}, found {method!r}")
    tiers = whole(tiers, "tiers", JobError)
    if method == "paper" and tiers not in (2, 3):
        raise JobError(f"tiers must be 2 or 3 for method 'paper', found {tiers}")
    if reduction not in REDUCTIONS:
        raise JobError(f"reduction must be one of {', '.join(REDUCTIONS)}, found {reduction!r}")
    instance = build_instance(
        tables, cluster, batch_size=batch_size, overlap=overlap, index_dedup=index_dedup, translation=translation
    )
    limit = budget_bytes(budget, instance)
    settings = Settings(
        batch_size=instance.batch_size,
        budget=budget if isinstance(budget, str) else f"{float(budget):+} B",
        budget_bytes=limit,
        tiers=tiers,
        method=method,
        index_dedup=instance.index_dedup,
        overlap=tuple((f"{kind}@{size}", share) for (kind, size), share in sorted(instance.overlap.items())),
        reduction=reduction,
        translation=translation,
    )
    limit -= instance.held_bytes
    best = solve_instance(instance, limit, tiers)
    allocation, price, next_gib = best.allocation, best.price, None
    alternatives: list[tuple[Alternative, ...]] = [()] * len(instance.tables)
    if method == "paper":
        allocation = solve_paper(instance, limit, tiers)
    else:
        more = limit + units.GIB
        next_gib = min(best.seconds, solve_instance(instance, more, tiers, start_price=price or None).seconds)
        alternatives = _alternatives(instance, allocation, limit, price, tiers)
    sparse = sparse_tiers(instance, allocation, reduction)
    predicted = cost_with_reductions(instance, allocation, sparse)
    placed, baselines = _tables(instance, allocation, sparse, alternatives), _baselines(instance, limit)
    if any(table.dedup_factor > 1 for table in instance.tables):
        whole_batches = solve(
            [replace(table, dedup_factor=1.0) for table in instance.tables],
            cluster,
            batch_size=batch_size,
            budget=budget,
            tiers=tiers,
            method=method,
            overlap=overlap,
            index_dedup=index_dedup,
            reduction=reduction,
            translation=translation,
        )
        baselines["without_deduplication"] = whole_batches.predicted
        for name, other in whole_batches.tables.items():
            rows = tuple((tier.group_size, tier.rows) for tier in other.tiers)
            placed[name] = replace(placed[name], undeduplicated=rows)
    return Plan(
        cluster=cluster,
        settings=settings,
        tables=placed,
        predicted=predicted,
        baselines=baselines,
        # Two orders of one sum may differ in the last bit; a bound above the cost would read as a contradiction.
        lower_bound_seconds=min(best.lower_bound_seconds, predicted.exposed_seconds),
        memory_price_seconds_per_gib=price * units.GIB,
        next_gib_seconds=next_gib,
        job_digest=_job_digest(instance, settings),
    )


def budget_bytes(budget: str | float, instance: Instance) -> float:
    """Bytes per rank that a budget comes to; raises as :func:`parse_budget`."""
    neutral = instance.cost(instance.uniform(instance.cluster.world_size)).memory_bytes
    return parse_budget(budget, neutral, instance.cluster)


def parse_budget(budget: str | float, neutral_bytes: float, cluster: Cluster) -> float:
    """Bytes per rank that a budget comes to, where row-wise needs ``neutral_bytes``.

    Raises:
        JobError: not one of the forms that :func:`solve` takes.
    """
    if isinstance(budget, bool) or not isinstance(budget, (str, int, float, np.number)):
        raise JobError(f"budget must be 'neutral', a difference or a limit, found {budget!r}")
    if not isinstance(budget, str):
        if not np.isfinite(budget):
            raise JobError(f"budget must be a finite number of bytes, found {budget}")
        return neutral_bytes + float(budget)
    if budget.strip() == "neutral":
        return neutral_bytes
    try:
        size = units.parse_bytes(budget)
    except UnitError as error:
        raise JobError(f"budget must be 'neutral', a difference ('+2GiB') or a limit ('40GiB'): {error}") from error
    if budget.strip()[0] in "+-":
        return neutral_bytes + size
    if size <= cluster.reserve_bytes:
        raise JobError(
            f"budget {budget!r} is not above the cluster's reserve of {units.format_bytes(cluster.reserve_bytes)};"
            " raise it or lower the reserve"
        )
    return size - cluster.reserve_bytes


def _baselines(instance: Instance, limit: float) -> dict[str, Cost]:
    """The four closed-form baselines; the paper's at the same budget, or at the least that they can have."""
    found = {
        "row_wise": instance.cost(instance.uniform(instance.cluster.world_size)),
        "data_parallel": instance.cost(instance.uniform(1)),
    }
    for tiers in (2, 3):
        try:
            allocation = solve_paper(instance, limit, tiers)
        except BudgetError as error:
            allocation = solve_paper(instance, error.least_bytes, tiers)
        found[f"paper_{tiers}_tier"] = instance.cost(allocation)
    return found


def _tables(
    instance: Instance,
    allocation: Allocation,
    sparse: npt.NDArray[np.bool_],
    alternatives: Sequence[tuple[Alternative, ...]],
) -> dict[str, TablePlan]:
    reads = instance.tier_reads(allocation)
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
            tiers=_tiers(instance, index, allocation[index], reads[index], sparse[index]),
            alternatives=alternatives[index],
            dedup_factor=table.dedup_factor,
        )
        for index, table in enumerate(instance.tables)
    }


def _tiers(
    instance: Instance,
    index: int,
    rows: npt.NDArray[np.int64],
    reads: npt.NDArray[np.float64],
    sparse: npt.NDArray[np.bool_],
) -> tuple[Tier, ...]:
    table, world = instance.tables[index], instance.cluster.world_size
    profile = table.profile
    cum_rows = instance.cum_rows[instance.starts[index] : instance.starts[index + 1]]
    total = float(reads.sum())
    ends = np.cumsum(rows)
    tiers = []
    for size, end, number, read, gathered in zip(
        instance.group_sizes.tolist(), ends.tolist(), rows.tolist(), reads.tolist(), sparse.tolist(), strict=True
    ):
        if number == 0:
            continue
        first, last = np.searchsorted(cum_rows, [end - number, end - 1], side="right").tolist()
        hottest, coldest = (
            float(profile.counts[group]) / profile.num_samples if group < profile.counts.size else 0.0
            for group in (first, last)
        )
        covered = profile.covered(end) - profile.covered(end - number) if instance.index_dedup else read / total
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
            )
        )
    return tuple(tiers)


def _held_out(table: Table, first: int, end: int) -> float | None:
    before, after = table.profile.covered_held_out(first), table.profile.covered_held_out(end)
    return None if before is None or after is None else after - before


def _alternatives(
    instance: Instance, allocation: Allocation, limit: float, price: float, tiers: int, keep: int = 3
) -> list[tuple[Alternative, ...]]:
    """For each table, the next best sets of group sizes at the plan's price of memory."""
    chosen_seconds, chosen_memory = per_table(instance, allocation)
    spare_bytes = limit - float(chosen_memory.sum())
    used = allocation.any(axis=0)
    elsewhere = (allocation > 0).sum(axis=0) - (allocation > 0) > 0
    found: list[dict[tuple[int, ...], Alternative]] = [{} for _ in instance.tables]
    for levels in instance.level_subsets(tiers):
        other, _ = allocate(instance, levels, price if price > 0 else 1e-30)
        seconds, memory = per_table(instance, other)
        # Collectives that no other table uses come and go with this one, and their latency with them.
        after = elsewhere | (other > 0)
        added_seconds = seconds - chosen_seconds + (after.astype(np.int64) - used) @ instance.alpha_seconds
        added_memory = memory - chosen_memory
        fits = added_memory <= spare_bytes
        differs = ((other > 0) != (allocation > 0)).any(axis=1) & (after.sum(axis=1) <= tiers)
        for index in np.flatnonzero(differs).tolist():
            sizes = tuple(int(g) for g in instance.group_sizes[other[index] > 0])
            priced = float(added_seconds[index] + price * added_memory[index])
            best = found[index].get(sizes)
            if best is None or priced < best.priced_seconds:
                found[index][sizes] = Alternative(
                    sizes, float(added_seconds[index]), float(added_memory[index]), priced, bool(fits[index])
                )
    return [
        tuple(sorted(entries.values(), key=lambda entry: (entry.priced_seconds, entry.group_sizes))[:keep])
        for entries in found
    ]


def per_table(instance: Instance, allocation: Allocation) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Exposed seconds without latencies and memory of each table; shape (T,) each."""
    reads = instance.tier_reads(allocation)
    seconds = allocation @ instance.comm_fixed + reads @ instance.comm_per_read
    memory = (allocation * instance.table_memory_fixed).sum(axis=1) + reads @ instance.memory_per_read
    return instance.row_bytes * seconds, instance.row_bytes * memory


def _job_digest(instance: Instance, settings: Settings) -> str:
    tables = [
        (t.name, t.rows, t.dim, t.dtype, t.optimizer, t.replication_multiplier, t.features, t.profile.digest)
        + ((t.dedup_factor,) if t.dedup_factor > 1 else ())
        for t in instance.tables
    ]
    text = json.dumps([tables, asdict(instance.cluster), asdict(settings)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
