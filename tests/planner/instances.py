"""Small planning problems, drawn at random and solved by trying everything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np
from hypothesis import strategies as st

from flexshard.costmodels import Cost, bundles, expected_padding, placement_cost
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


@dataclass(frozen=True)
class Assignments:
    """Every way to give each row of a table a group size; shape (n,), of ``waits`` and ``used`` (n, G).

    ``waits`` is how much longer a level's all-to-alls take for the rank that holds the hottest row there.
    """

    memory: np.ndarray
    seconds: np.ndarray
    waits: np.ndarray
    used: np.ndarray


def wait_seconds(table: Table, cluster: Cluster, size: int, hottest: float) -> float:
    """The owner of a row answers its whole group: g - 1 times the row's w more than the mean, ids, rows, gradients."""
    rate = cluster.level(size).all_to_all
    if rate is None:
        return 0.0
    return (size - 1) * hottest * (4 + table.row_bytes + 4 * table.dim) / rate.bytes_per_s


def brute_force(tables: list[Table], cluster: Cluster, batch_size: int, budget: float, tiers: int) -> float:
    """Least exposed seconds of all placements that fit: every assignment of every single row."""
    best = float("inf")
    all_sizes = cluster.group_sizes
    for sizes in combinations(all_sizes, min(tiers, len(all_sizes))):
        whole = None
        for table in tables:
            other = _assignments(table, cluster, batch_size, sizes)
            whole = other if whole is None else _together(whole, other)
        assert whole is not None
        latency = np.zeros(len(whole.memory))
        for index, size in enumerate(all_sizes):
            latency += whole.used[:, index] * (level_seconds(tables, cluster, size))
        total = whole.seconds + whole.waits.sum(axis=1) + latency + always(tables, cluster, [])
        fits = whole.memory <= budget * (1 + 1e-12)
        best = min(best, float(total[fits].min(initial=np.inf)))
    return best


def level_seconds(tables: list[Table], cluster: Cluster, size: int) -> float:
    """What a level takes whatever rows it has."""
    level = cluster.level(size)
    alpha = (level.all_reduce.alpha_seconds if level.all_reduce else 0.0) + 3 * (
        level.all_to_all.alpha_seconds if level.all_to_all else 0.0
    )
    padding = 0.0
    if level.all_to_all:
        kinds = {(table.dim, table.dtype, table.optimizer): table for table in tables}
        widths = [(table.row_bytes, 4 * table.dim) for table in kinds.values()]
        per_peer = sum(
            expected_padding([widths[index][which] for index in bundle])
            for which in (0, 1)
            for bundle in bundles([row for row, _ in widths])
        )
        padding = size * per_peer / level.all_to_all.bytes_per_s
    return alpha + padding + always(tables, cluster, [size]) - always(tables, cluster, [])


def _together(a: Assignments, b: Assignments) -> Assignments:
    def pairs(combine: np.ufunc, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return combine(x[:, None], y[None]).reshape(-1, *x.shape[1:])

    return Assignments(
        pairs(np.add, a.memory, b.memory),
        pairs(np.add, a.seconds, b.seconds),
        pairs(np.maximum, a.waits, b.waits),
        pairs(np.logical_or, a.used, b.used),
    )


def _assignments(table: Table, cluster: Cluster, batch_size: int, sizes: tuple[int, ...]) -> Assignments:
    """All ways to give each row of a table one of the sizes; rows in any order, not only ranges."""
    counts = np.repeat(table.profile.counts, table.profile.rows)
    w = np.zeros(table.rows)
    w[: counts.size] = batch_size * counts / table.profile.num_samples
    levels = [cluster.group_sizes.index(size) for size in sizes]
    memory, seconds, waits = np.zeros((3, table.rows, len(cluster.group_sizes)))
    for index, size in zip(levels, sizes, strict=True):
        for row, reads in enumerate(w.tolist()):
            cost = placement_cost(table, cluster, size, rows=1, reads=reads)
            memory[row, index] = cost.memory_bytes
            seconds[row, index] = sum(c.seconds - c.calls * c.alpha_seconds for c in cost.collectives)
            waits[row, index] = wait_seconds(table, cluster, size, reads)
    chosen = np.array(list(product(levels, repeat=table.rows)))  # (n, rows)
    rows = np.arange(table.rows)
    there = chosen[:, :, None] == np.arange(len(cluster.group_sizes))  # (n, rows, G)
    return _undominated(
        Assignments(
            memory[rows, chosen].sum(axis=1),
            seconds[rows, chosen].sum(axis=1),
            (there * waits).max(axis=1),
            there.any(axis=1),
        )
    )


def _undominated(every: Assignments) -> Assignments:
    """Without those that another one with the same levels beats in memory, time and every wait."""
    values = np.column_stack([every.memory, every.seconds, every.waits])
    kept: list[int] = []
    for used in np.unique(every.used, axis=0):
        same = np.flatnonzero((every.used == used).all(axis=1))
        order = same[np.lexsort(values[same].T[::-1])]
        best: list[int] = []
        for index in order.tolist():
            if not best or not (values[best] <= values[index]).all(axis=1).any():
                best.append(index)
        kept += best
    return Assignments(*(getattr(every, name)[kept] for name in ("memory", "seconds", "waits", "used")))
