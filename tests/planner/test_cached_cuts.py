"""Where tables are cut, from intervals of counts: against every count there is."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest

import flexshard
from flexshard.errors import BudgetError
from flexshard.planner import Problem
from flexshard.planner.caching import _sides
from flexshard.planner.solver import cached_cuts, cached_search
from flexshard.planner.solver.cached_rows import Side
from flexshard.planner.solver.cached_sums import CachedSums, Cuts, Prices
from flexshard.planner.solver.deduplication import Variants
from tests.planner.test_caching import cluster_of
from tests.slow import first

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def sides_of(seed: int, *, bursts: bool) -> list[Side]:
    """Tables of more counts than are looked at first, some few, some with rows that are never read."""
    generator = np.random.default_rng(seed)
    tables = []
    for index in range(4):
        size = int(generator.choice([3, 150, 900]))
        counts = np.sort(generator.choice(40_000, size, replace=False) + 1)[::-1] ** generator.uniform(0.5, 1.5)
        counts = np.unique(counts.astype(np.int64))[::-1]
        repeats = generator.integers(1, 4, counts.size)
        every = np.repeat(counts, repeats)
        rows = every.size + int(generator.integers(0, 50))
        samples = int(every.max() * generator.uniform(1.0, 30.0))
        profile = flexshard.AccessProfile.from_counts(every, num_samples=samples, num_rows=rows)
        tables.append(flexshard.Table(f"t{index}", rows, int(generator.choice([4, 16])), profile))
    batch = int(generator.choice([64, 1024, 16_384]))
    problem = Problem(tables, cluster_of(), batch, host_memory="1GiB", index_dedup="auto")
    sides = _sides(problem, Variants(problem))
    if bursts:  # caches hold fewer rows than popularity alone says, by a share of each table's own

        def held(stretch: float) -> float:
            return float(min(stretch, 100.0) ** 0.9)

        old = sides[0].caches
        caches = CachedSums(old.instance, old.chances, old.host_bytes_per_s, old.samples, (held, None, held, held))
        sides = [Side(side.instance, side.once, side.extra_seconds, caches) for side in sides]
    return sides


def costs(side: Side, levels: IntArray, prices: Prices, batches: Sequence[int]) -> list[dict[int, FloatArray]]:
    """Of each table, by batches for which rows stay, what it costs to have copies of no row, and of those up to and
    including each count.
    """
    caches, instance = side.caches, side.instance
    starts = instance.starts
    gain = cached_cuts._gain_of_caches(side, levels, prices, Cuts(np.arange(starts[-1]), starts[:-1], np.diff(starts)))
    found: list[dict[int, FloatArray]] = [{} for _ in instance.tables]
    for stays in batches:
        places, fetched = caches.of_rows(stays)
        for table, (start, end) in enumerate(pairwise(starts)):
            of = slice(start, end)
            held = np.cumsum(instance.rows_of_count[of] * places[of]) * caches.row_host_bytes[table]
            moved = np.cumsum(instance.rows_of_count[of] * fetched[of]) * caches.fetch_seconds[table]
            behind = prices[1] * held + prices[0] * moved
            changes = np.array([0.0]) if gain is None else np.append(0.0, gain[of] - behind)
            found[table][stays] = behind[-1] + changes
    return found


@pytest.mark.parametrize("bursts", [False, True])
@pytest.mark.parametrize("seed", first(3, range(60)))
def test_no_count_is_better_than_those_that_are_found(seed: int, *, bursts: bool) -> None:
    sides = sides_of(seed, bursts=bursts)
    instance, generator, compared = sides[0].instance, np.random.default_rng(seed), 0
    for levels in instance.level_subsets(3):
        if levels[-1] != instance.group_sizes.size - 1:
            continue
        for _ in range(8):
            prices = (1.0, 10 ** generator.uniform(-14, -7), float(generator.choice([0.0, 1e-13, 1e-10])))
            prices = (0.0, 1.0, prices[2]) if generator.random() < 0.1 else prices
            batches = sides[0].caches.batches
            # What is the first count that a table may have behind a cache: none, or any.
            first = instance.starts[:-1] - 1 + generator.integers(0, np.diff(instance.starts) + 1)
            first = np.where((first < instance.starts[:-1]) | (generator.random(first.size) < 0.5), -1, first)
            found = cached_cuts._best_cuts(sides, levels, prices, batches, first, between="looked at")
            some = cached_cuts._best_cuts(sides, levels, prices, batches, first, between="bounded")
            for side, (number, ahead, slack), (near, near_ahead, less) in zip(sides, found, some, strict=True):
                assert not slack.any()
                starts = instance.starts
                for table, every in enumerate(costs(side, levels, prices, batches)):
                    rows = np.append(0, instance.cum_rows[starts[table] : starts[table + 1]])
                    barred = 0 if first[table] < 0 else int(first[table] - starts[table]) + 1
                    if barred and levels.size == 1:  # nothing has copies then, so nothing is behind a cache either
                        assert number[table] == near[table] == 0
                        continue
                    for values in every.values():
                        values[:barred] = np.inf
                    taken = every[int(number[table])][int(np.searchsorted(rows, ahead[table]))]
                    least = min(float(values.min()) for values in every.values())
                    size = max(float(np.abs(values[barred:]).max()) for values in every.values())
                    assert taken <= least + 1e-11 * size
                    bounded = every[int(near[table])][int(np.searchsorted(rows, near_ahead[table]))] - less[table]
                    assert bounded <= least + 1e-11 * size
                compared += np.count_nonzero((ahead > 0) & (ahead < instance.num_rows))
    assert compared  # with copies of some rows, and others behind a cache


@pytest.mark.parametrize("seed", range(5))
def test_what_is_dominated_is_nowhere_better(seed: int) -> None:
    generator = np.random.default_rng(seed)
    numbers, intervals, rows = 6, 400, 8
    spread = 10 ** generator.uniform(-4, 0, (numbers, intervals, 1))
    of_rows = 1.0 + spread * generator.random((numbers, intervals, rows))  # of a byte each
    following = of_rows.sum(axis=-1) + 10 ** generator.uniform(-4, 1, (numbers, intervals))
    ahead = np.concatenate([np.zeros((numbers, intervals, 1)), np.cumsum(of_rows, axis=-1)], axis=-1)
    values = following[..., None] - ahead + generator.random((intervals, rows + 1))  # wherever the last tier begins
    of_bytes = np.stack([of_rows.min(axis=-1), of_rows.max(axis=-1)], axis=1)
    nbytes = np.full(intervals, float(rows))
    dominated = cached_cuts._dominated(values.min(axis=-1), following, of_bytes, nbytes)
    best = values[values.min(axis=-1).argmin(axis=0), np.arange(intervals)]
    assert (values >= best - 1e-9)[dominated].all()
    assert 0.1 < dominated.mean() < 5 / 6


@pytest.mark.parametrize("bursts", [False, True])
def test_sums_of_any_rows(*, bursts: bool) -> None:
    side = sides_of(1, bursts=bursts)[0]
    caches, instance = side.caches, side.instance
    generator = np.random.default_rng(0)
    sizes = np.diff(instance.starts)
    table = generator.integers(0, sizes.size, 500)
    counts = generator.integers(0, sizes[table] + 1)
    for stays in (1, 4, 1025):
        places, fetched = caches.of_rows(stays)
        found = caches.sums_of_rows(np.full_like(table, stays), table, counts)
        units = (caches.row_host_bytes, caches.fetch_seconds)
        for sums, each, unit in zip(found, (places, fetched), units, strict=True):
            expected = [
                float((instance.rows_of_count * each)[start : start + number].sum() * unit[of])
                for of, start, number in zip(table, instance.starts[table], counts, strict=True)
            ]
            assert sums == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("batch_size", [9, 10, 39, 40, 44])
def test_a_small_table_of_which_popularity_alone_would_fetch_nothing(batch_size: int) -> None:
    generator = np.random.default_rng(1)
    ids = np.arange(200_000) * 20 // 200_000 * 20 + np.minimum((20 * generator.random(200_000) ** 2).astype(int), 19)
    table = flexshard.Table("t", 400, 16, flexshard.AccessProfile.from_ids(ids, num_rows=400))
    for budget in ("30 KiB", "60 KiB", "200 KiB"):
        with suppress(BudgetError):
            plan = flexshard.solve([table], cluster_of(), batch_size=batch_size, budget=budget, host_memory="1 MiB")
            assert plan.lower_bound_seconds <= plan.predicted.exposed_seconds


@pytest.mark.parametrize("seed", first(3, range(30)))
def test_what_rows_cost_is_within_its_interval(seed: int) -> None:
    def growing(stretch: float) -> float:  # rows go on being new, however many were read
        return float(stretch)

    old = sides_of(seed, bursts=False)[0].caches
    for stretches in ((None,) * 4, (growing, None, growing, growing)):
        caches = CachedSums(old.instance, old.chances, old.host_bytes_per_s, old.samples, stretches)
        for stays in caches.batches:
            for (low, high), each in zip(caches.intervals.shares(stays), caches.of_rows(stays), strict=True):
                assert (np.minimum.reduceat(each, caches.intervals.first) >= low * (1 - 1e-12)).all()
                assert (np.maximum.reduceat(each, caches.intervals.first) <= high * (1 + 1e-12)).all()


@pytest.mark.parametrize("seed", first(4, range(100)))
def test_the_bound_at_prices_is_below_every_option(seed: int) -> None:
    """Caches have room for a batch, which what their rows take on average may not have."""
    generator = np.random.default_rng(seed)
    rows, dim = int(generator.integers(60, 400)), int(generator.choice([4, 16, 64]))
    counts = np.sort((30_000 * generator.random(rows) ** generator.uniform(1, 6)).astype(np.int64) + 1)[::-1]
    samples = int(counts[0] * generator.uniform(1, 20))
    table = flexshard.Table("t", rows, dim, flexshard.AccessProfile.from_counts(counts, num_samples=samples))
    cluster = cluster_of(host_bytes_per_s=float(generator.choice([1e8, 2e9, 1e11])))
    batch = int(generator.choice([1, 3, 10, 50]))
    problem = Problem([table], cluster, batch, host_memory="1GiB", index_dedup=bool(generator.integers(2)))
    sides, limits = _sides(problem, Variants(problem)), cached_search.Limits(1e6, 1e6)
    room, cached = limits.room(sides[0].instance), 0
    for levels in sides[0].instance.level_subsets(2):
        every = cached_search._every_option(sides, levels)
        if every is None or np.ptp(every.hbm_bytes) == 0:
            continue
        scale = np.ptp(every.seconds) / np.ptp(every.hbm_bytes)
        for price in scale * 10 ** generator.uniform(-2, 2, 6):
            prices = float(price), float(scale * generator.choice([0.0, 1e-3, 1e-1]))
            values = every.seconds + prices[0] * every.hbm_bytes + prices[1] * every.host_bytes
            expected = values.min() - prices[0] * room.hbm_bytes - prices[1] * room.host_bytes
            of = sides, levels, limits, (1.0, *prices), cached_search._batches(sides, levels)
            for between in typing.get_args(cached_cuts.Between)[:2]:
                assert cached_search._cheapest_of_all(*of, between=between)[1] <= expected + 1e-9 * values.min()
            cached += every.batches[values.argmin()] > 0
    assert cached or seed >= 4
