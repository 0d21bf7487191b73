"""Small planning problems, drawn at random and solved by trying everything."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product

import numpy as np
from hypothesis import strategies as st

from flexshard.costmodels import Cost, placement_cost
from flexshard.profiling import AccessProfile
from flexshard.tables import Table
from flexshard.topologies import Cluster, CollectiveRate, Level


@st.composite
def clusters(draw: st.DrawFn, max_levels: int = 4) -> Cluster:
    """Two to ``max_levels`` levels; inner all-to-alls are never slower than outer ones."""
    factors = draw(st.lists(st.sampled_from([2, 3, 4]), min_size=1, max_size=max_levels - 1))
    sizes = [1, *np.cumprod(factors).tolist()]
    world = sizes[-1]
    betas = sorted((draw(st.floats(1e6, 1e9)) for _ in sizes), reverse=True)
    alpha = st.sampled_from([0.0, 1e-7, 1e-5, 1e-3])
    levels = tuple(
        Level(
            size,
            CollectiveRate(draw(alpha), betas[k]) if size > 1 else None,
            CollectiveRate(draw(alpha), draw(st.floats(1e6, 1e9))) if size < world else None,
        )
        for k, size in enumerate(sizes)
    )
    node = draw(st.sampled_from(sizes))
    return Cluster("random", world // node, node, 1e9, 0.0, levels)


@st.composite
def table_lists(draw: st.DrawFn, max_tables: int = 2, max_rows: int = 5) -> list[Table]:
    tables = []
    for index in range(draw(st.integers(1, max_tables))):
        counts = draw(st.lists(st.sampled_from([0, 1, 2, 3, 7, 30, 200, 5000]), min_size=1, max_size=max_rows))
        counts[0] = max(counts[0], 1)
        kappa = draw(st.sampled_from([None, 1.0, 3.0, 6.0]))
        optimizer = draw(st.sampled_from(["sgd", "rowwise_adagrad", "adam"]))
        dtype = draw(st.sampled_from(["float32", "float16"]))
        profile = AccessProfile.from_counts(counts, num_samples=1000)
        dim = draw(st.sampled_from([4, 8, 64]))
        tables.append(Table(f"t{index}", len(counts), dim, profile, dtype, optimizer, kappa))
    return tables


def tier_cost(table: Table, cluster: Cluster, size: int, rows: int, w: np.ndarray, first: int) -> Cost:
    """Cost of ``rows`` of a table's rows from rank ``first`` on, straight from the published formulas."""
    return placement_cost(table, cluster, size, rows=rows, reads=float(w[first : first + rows].sum()))


def always(tables: list[Table], cluster: Cluster, sizes: Sequence[int]) -> float:
    """What is called whatever the rows: the exchange of how many ids of each kind of table go to each level."""
    if cluster.world_size == 1:
        return 0.0
    kinds = len({(table.dim, table.dtype, table.optimizer) for table in tables})
    rate = cluster.level(cluster.world_size).all_to_all
    assert rate is not None
    return rate.seconds(cluster.world_size * (kinds * sum(size > 1 for size in sizes) + 3) * 4)


def brute_force(tables: list[Table], cluster: Cluster, batch_size: int, budget: float, tiers: int) -> float:
    """Least exposed seconds of all placements that fit: every assignment of every single row."""
    best = float("inf")
    for sizes in combinations(cluster.group_sizes, min(tiers, len(cluster.group_sizes))):
        per_table = [_pareto(_assignments(table, cluster, batch_size, sizes)) for table in tables]
        for choice in product(*per_table):
            total = sum((cost for cost in choice), Cost())
            if total.memory_bytes <= budget * (1 + 1e-12):
                used = {one.group_size for one in total.collectives}
                best = min(best, total.exposed_seconds + always(tables, cluster, sorted(used)))
    return best


def _assignments(table: Table, cluster: Cluster, batch_size: int, sizes: tuple[int, ...]) -> list[Cost]:
    """Costs of all ways to give each row of a table one of the sizes; rows in any order, not only ranges."""
    counts = np.repeat(table.profile.counts, table.profile.rows)
    w = np.zeros(table.rows)
    w[: counts.size] = batch_size * counts / table.profile.num_samples
    found = []
    for groups in product(sizes, repeat=table.rows):
        cost = Cost()
        for size in set(groups):
            mine = np.array([g == size for g in groups])
            cost += placement_cost(table, cluster, size, rows=int(mine.sum()), reads=float(w[mine].sum()))
        found.append(cost)
    return found


def _pareto(costs: list[Cost]) -> list[Cost]:
    """Drop what another of the same collectives beats in memory and time."""
    kept: dict[tuple[str, ...], list[Cost]] = {}
    for cost in sorted(costs, key=lambda c: (c.memory_bytes, c.exposed_seconds)):
        same = kept.setdefault(tuple(c.name for c in cost.collectives), [])
        if not same or cost.exposed_seconds < same[-1].exposed_seconds:
            same.append(cost)
    return [cost for group in kept.values() for cost in group]
