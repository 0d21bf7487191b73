"""Plans that keep rows in the host's memory behind caches, against all that there are."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement, product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import yaml

import flexshard
from flexshard.costmodels import lookahead_reads
from flexshard.errors import BudgetError, JobError
from flexshard.planner import Plan, Problem
from flexshard.planner.solver import cached_rows, cached_search
from flexshard.planner.solver.cached_sums import BATCHES, SLACK
from flexshard.planner.solver.deduplication import Variants
from flexshard.planner.solver.instance import Instance
from flexshard.topologies import Cluster, CollectiveRate, Level
from tests.commands import run
from tests.slow import first

BATCH = 3


def cluster_of(*, alpha: float = 1e-6, host_bytes_per_s: float = 2e9) -> Cluster:
    """Two nodes of two ranks, slow between nodes."""
    fast, slow = CollectiveRate(alpha, 4e9), CollectiveRate(2 * alpha, 1e9)
    levels = (Level(1, None, slow), Level(2, fast, slow), Level(4, slow, None))
    return replace(
        Cluster("small", nodes=2, ranks_per_node=2, hbm_bytes=1 << 30, reserve_bytes=0, levels=levels),
        host_bytes_per_s=host_bytes_per_s,
    )


def small_tables(generator: np.random.Generator, rows: int, number: int) -> list[flexshard.Table]:
    """Rows of different counts, some never read."""
    tables = []
    for index in range(number):
        counts = np.unique(np.geomspace(1, 3000, 40).astype(np.int64))
        counts = generator.choice(counts, rows, replace=False) * (np.arange(rows) > 0)
        profile = flexshard.AccessProfile.from_counts(counts, num_samples=3000, num_rows=rows)
        dim = int(generator.choice([4, 16]))
        tables.append(flexshard.Table(f"t{index}", rows, dim, profile))
    return tables


def placements(instance: Instance, tiers: int) -> list[list[np.ndarray]]:
    """Every allocation of each table to at most so many levels, the same ones for all, by choice of levels."""
    found = []
    for levels in instance.level_subsets(tiers):
        of_levels = []
        for rows in instance.num_rows.tolist():
            ends = [(*cuts, rows) for cuts in combinations_with_replacement(range(rows + 1), len(levels) - 1)]
            allocation = np.zeros((len(ends), instance.group_sizes.size), np.int64)
            allocation[:, levels] = np.diff(np.array(ends), axis=1, prepend=0)
            of_levels.append(allocation)
        found.append(of_levels)
    return found


def cache_of(problem: Problem, instance: Instance, index: int, first: int, batches: int) -> tuple[float, float]:
    """Places and fetches of a table's rows from a position on, row by row from the closed forms."""
    table = problem.tables[index]
    cuts = table.profile.rows.cumsum()
    places = fetched = read = 0.0
    for position in range(first, table.rows):
        group = int(np.searchsorted(cuts, position, side="right"))
        if group == len(cuts):
            continue
        one = flexshard.AccessProfile.from_counts(
            np.array([table.profile.counts[group]]), num_samples=table.profile.num_samples, num_rows=1
        )
        reads = lookahead_reads(one, problem.batch_size * problem.cluster.world_size, batches - 1)
        places, fetched = places + min(SLACK * reads.cached, 1.0), fetched + reads.fetched
        read += reads.distinct
    ranks = problem.cluster.world_size
    return max(places, read + ranks * cached_rows.SIGMAS * (np.sqrt(read / ranks) + 1)), fetched


def brute_force(problem: Problem, hbm_bytes: float, host_bytes: float) -> float:
    """Least exposed seconds of everything that fits."""
    variants, cluster, best = Variants(problem), problem.cluster, np.inf
    count = len(problem.tables)
    caches: dict[Any, tuple[float, float]] = {}
    for mask in product((False, True), repeat=count) if variants.are_chosen else [(False,) * count]:
        instance = variants.of(np.array(mask))
        rank_bytes = instance.row_bytes * instance.table_memory_fixed[:, -1]
        for of_levels in placements(instance, problem.tiers):
            for chosen in product(*of_levels):
                allocation = np.stack(chosen)
                seconds, memory = instance.exposed_seconds(allocation), instance.memory_bytes(allocation)
                if seconds >= best:
                    continue  # caches take no less time
                for stays in product((0, *BATCHES), repeat=count):
                    more = saved = host = 0.0
                    for index, batches in enumerate(stays):
                        behind = int(allocation[index, -1])
                        if not batches or not behind:
                            continue
                        key = index, behind, batches
                        if key not in caches:
                            caches[key] = cache_of(
                                problem, instance, index, int(instance.num_rows[index]) - behind, batches
                            )
                        places, fetched = caches[key]
                        if places >= behind:
                            continue
                        more += 2 * rank_bytes[index] * fetched / cluster.host_bytes_per_s  # type: ignore[operator]
                        saved += rank_bytes[index] * (behind - places)
                        host += rank_bytes[index] * behind
                    if memory - saved <= hbm_bytes * (1 + 1e-12) and host <= host_bytes * (1 + 1e-12):
                        best = min(best, seconds + more)
    return best


def problems(seed: int, number: int, rows: int) -> list[tuple[Problem, float, float]]:
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(number):
        tables = small_tables(generator, rows, 2)
        cluster = cluster_of(
            alpha=float(generator.choice([0.0, 1e-7])), host_bytes_per_s=float(generator.choice([5e8, 4e9]))
        )
        how = {"index_dedup": bool(generator.integers(2)) and "auto", "tiers": int(generator.integers(1, 4))}
        problem = Problem(tables, cluster, batch_size=BATCH, **how)
        neutral = Variants(problem).plain.memory_bytes(Variants(problem).plain.uniform(4))
        whole = sum(table.rows * table.row_bytes for table in tables) / 4 * 2
        budget, host = float(neutral * generator.uniform(0.5, 0.95)), float(whole * generator.choice([0.3, 1.0, 10.0]))
        found.append((replace(problem, budget=budget_of(budget), host_memory=host), budget, host))
    return found


def budget_of(nbytes: float) -> str:
    return f"{nbytes!r} B"


@pytest.fixture
def no_spare_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of a few rows have no room for more than what a batch is expected to read."""
    monkeypatch.setattr(cached_rows, "SIGMAS", 0.0)


@pytest.mark.usefixtures("no_spare_places")
@pytest.mark.parametrize("seed", first(1, range(3)))
def test_small_problems_are_solved_to_the_optimum(seed: int) -> None:
    fitting = 0
    for problem, budget, host in problems(seed, 6, 5):
        best = brute_force(problem, budget, host)
        if not np.isfinite(best):
            with pytest.raises(BudgetError):
                flexshard.solve(problem)
            continue
        plan = flexshard.solve(problem)
        fitting += any(table.cache for table in plan.tables.values())
        assert plan.predicted.exposed_seconds == pytest.approx(best, rel=1e-9)
        assert plan.lower_bound_seconds <= plan.predicted.exposed_seconds
        assert plan.predicted.memory_bytes <= budget * (1 + 1e-9)
        assert plan.predicted.host_memory_bytes <= host * (1 + 1e-9)
    assert fitting > 0


@pytest.mark.usefixtures("no_spare_places")
@pytest.mark.parametrize("seed", first(0, range(2)))
def test_what_prices_ask_for_is_between_the_bound_and_little_more(seed: int) -> None:
    """As of large problems, of which not every option can be tried: small ones, whose optimum is known."""
    apart = []
    with pytest.MonkeyPatch.context() as patch:
        for problem, _, _ in problems(10 + seed, 24, 6):
            try:
                best = flexshard.solve(problem).predicted.exposed_seconds
            except BudgetError:
                continue
            patch.setattr(cached_search, "_ALL_OPTIONS", 0)
            plan = flexshard.solve(problem)
            patch.undo()
            assert plan.lower_bound_seconds <= best * (1 + 1e-9)
            assert plan.predicted.exposed_seconds >= best * (1 - 1e-9)
            apart.append(plan.predicted.exposed_seconds / best)
    assert len(apart) > 5
    assert np.median(apart) < 1.02


def test_tiers_memory_and_what_is_better_without(capfd: pytest.CaptureFixture[str]) -> None:
    """Random models of a few tables: no more group sizes than asked for, no byte too much, never worse for having
    caches to choose from, and nothing printed.
    """
    generator, caches = np.random.default_rng(5), 0
    for _ in range(10):
        tables = []
        for index in range(int(generator.integers(2, 6))):
            rows = int(generator.integers(2, 60_000))
            counts = np.floor(1e5 / (1 + np.arange(rows)) ** generator.uniform(0.7, 1.3)).astype(np.int64)
            profile = flexshard.AccessProfile.from_counts(counts, num_samples=200_000, num_rows=rows)
            tables.append(flexshard.Table(f"t{index}", rows, int(generator.choice([16, 64])), profile))
        cluster = cluster_of(alpha=float(generator.choice([0.0, 1e-5, 1e-3])))
        how: dict[str, Any] = {
            "batch_size": int(generator.integers(16, 512)),
            "tiers": int(generator.integers(1, 4)),
            "index_dedup": bool(generator.integers(2)) and "auto",
        }
        neutral = flexshard.solve(tables, cluster, **how).settings.budget_bytes
        nbytes = neutral * float(generator.uniform(0.5, 1.3))
        try:
            without = flexshard.solve(tables, cluster, **how, budget=budget_of(nbytes)).predicted.exposed_seconds
        except BudgetError:
            without = np.inf
        try:
            plan = flexshard.solve(tables, cluster, **how, budget=budget_of(nbytes), host_memory="1GiB")
        except BudgetError:
            assert without == np.inf
            continue
        assert len({tier.group_size for table in plan.tables.values() for tier in table.tiers}) <= how["tiers"]
        assert plan.predicted.memory_bytes <= nbytes * (1 + 1e-11)
        assert plan.lower_bound_seconds <= plan.predicted.exposed_seconds <= without * (1 + 1e-9)
        for table in plan.tables.values():
            assert table.cache is None or table.cache.rows >= 1
            caches += table.cache is not None
    assert caches > 5
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("seed", [1, 14, 21, 36])
def test_gathered_gradients_are_no_reason_to_be_worse(seed: int) -> None:
    """Of problems whose copies' gradients are gathered best: with memory on the host no plan takes longer than without,
    and no bound is above what less memory can do.
    """
    generator = np.random.default_rng(seed)
    tables = [
        replace(table, dim=int(generator.choice([4, 64, 256])))
        for table in small_tables(generator, 30, int(generator.integers(1, 3)))
    ]
    cluster = cluster_of(alpha=float(generator.choice([0.0, 1e-6, 1e-4])), host_bytes_per_s=1e8)
    how: dict[str, Any] = {"batch_size": int(generator.integers(1, 4)), "reduction": "auto"}
    neutral = flexshard.solve(tables, cluster, **how).settings.budget_bytes
    how["budget"] = budget_of(neutral * float(generator.uniform(0.9, 2.5)))
    without = flexshard.solve(tables, cluster, **how)
    assert any(tier.reduction == "sparse" for table in without.tables.values() for tier in table.tiers)
    least = without.predicted.exposed_seconds
    for host_memory in (1_000, 1_000_000):
        plan = flexshard.solve(tables, cluster, **how, host_memory=host_memory)
        assert plan.settings.host_memory == host_memory
        assert plan.predicted.exposed_seconds <= least * (1 + 1e-9)
        assert 0 < plan.lower_bound_seconds <= plan.predicted.exposed_seconds


def middling(number: int = 4, rows: int = 300_000) -> list[flexshard.Table]:
    generator = np.random.default_rng(1)
    tables = []
    for index in range(number):
        counts = np.floor(2e6 / (1 + np.arange(rows)) ** generator.uniform(0.8, 1.2)).astype(np.int64)
        profile = flexshard.AccessProfile.from_counts(counts, num_samples=2_000_000, num_rows=rows)
        tables.append(flexshard.Table(f"t{index}", rows, 32, profile))
    return tables


def budgets() -> tuple[list[flexshard.Table], Cluster, float]:
    tables, cluster = middling(), Cluster.preset("dgx-a100", 2)
    neutral = flexshard.solve(tables, cluster, batch_size=64).settings.budget_bytes
    return tables, cluster, neutral


def limit(cluster: Cluster, nbytes: float) -> str:
    return f"{nbytes + cluster.reserve_bytes!r} B"


def test_memory_buys_time_and_bounds_hold() -> None:
    """The less memory, the longer it takes, never longer than without the host's, and the bound is close."""
    tables, cluster, neutral = budgets()
    seconds, places = [], []
    for share in (1.0, 0.7, 0.5, 0.4):
        how: dict[str, Any] = {"batch_size": 64, "budget": limit(cluster, share * neutral)}
        plan = flexshard.solve(tables, cluster, **how, host_memory="8GiB")
        assert plan.predicted.memory_bytes <= share * neutral * (1 + 1e-9)
        assert 0 <= 1 - plan.lower_bound_seconds / plan.predicted.exposed_seconds < 5e-3
        try:
            without = flexshard.solve(tables, cluster, **how).predicted.exposed_seconds
        except BudgetError:
            without = np.inf
        assert plan.predicted.exposed_seconds <= without * (1 + 1e-4)
        seconds.append(plan.predicted.exposed_seconds)
        caches = [table.cache for table in plan.tables.values() if table.cache]
        places.append(sum(cache.rows for cache in caches))
        host = sum(
            table.row_bytes * table.kappa_sharded * table.tiers[-1].rows / 16
            for table in plan.tables.values()
            if table.cache
        )
        assert plan.predicted.host_memory_bytes == pytest.approx(host)
        for table in plan.tables.values():
            if table.cache is None:
                continue
            reads = lookahead_reads(table_named(tables, table.name).profile, 64 * 16, table.cache.batches - 1)
            # Rows with copies are not among them.
            enough = reads.distinct + 16 * 4 * (np.sqrt(reads.distinct / 16) + 1)
            assert table.cache.rows * 16 <= max(SLACK * reads.cached, enough)
            assert table.cache.fetched * 16 <= reads.fetched * (1 + 1e-9)
    assert seconds == sorted(seconds)
    assert places[-1] > 0


def table_named(tables: list[flexshard.Table], name: str) -> flexshard.Table:
    return next(table for table in tables if table.name == name)


def test_little_host_memory_is_kept_to() -> None:
    # Of tables of many sizes others are taken where the host has less.
    tables = [
        replace(middling(1, rows)[0], name=f"t{rows}") for rows in (40_000, 60_000, 90_000, 130_000, 190_000, 270_000)
    ]
    cluster = Cluster.preset("dgx-a100", 2)
    neutral = flexshard.solve(tables, cluster, batch_size=64).settings.budget_bytes
    how: dict[str, Any] = {"batch_size": 64, "budget": limit(cluster, 0.7 * neutral)}
    roomy = flexshard.solve(tables, cluster, **how, host_memory="8GiB")
    less = 0.85 * roomy.predicted.host_memory_bytes
    tight = flexshard.solve(tables, cluster, **how, host_memory=less)
    assert 0 < tight.predicted.host_memory_bytes <= less
    assert tight.predicted.exposed_seconds >= roomy.predicted.exposed_seconds * (1 - 1e-6)
    with pytest.raises(BudgetError, match=r"no placement fits .* per rank and .* of its host's memory") as caught:
        flexshard.solve(tables, cluster, batch_size=64, budget=limit(cluster, 0.01 * neutral), host_memory="8GiB")
    again = flexshard.solve(
        tables, cluster, batch_size=64, budget=limit(cluster, 1.01 * caught.value.least_bytes), host_memory="8GiB"
    )
    assert again.predicted.memory_bytes <= 1.01 * caught.value.least_bytes


def test_a_plan_with_caches_is_kept_and_explained(tmp_path: Path) -> None:
    tables, cluster, neutral = budgets()
    problem = Problem(tables, cluster, 64, limit(cluster, 0.4 * neutral), host_memory="8GiB")
    plan = flexshard.solve(problem)
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again.fingerprint == plan.fingerprint == flexshard.solve(problem).fingerprint
    assert again.tables == plan.tables
    (name, cached) = next((name, table) for name, table in plan.tables.items() if table.cache)
    text = flexshard.explain(again, name).text
    assert cached.cache is not None
    assert f"where a row stays for {cached.cache.batches} batches" in text
    assert "in a cache" in str(again)
    assert "a little more memory would lower the bound, at a rate of" in str(again)
    assert "Host's memory: " in str(again)
    assert {one.content for one in plan.predicted.collectives if one.kind == "host"} == {
        "cached fetches",
        "cached writes",
    }
    changes = flexshard.diff(flexshard.solve(tables, cluster, batch_size=64), plan).caches
    assert {(one.table, one.source) for one in changes} == {(n, None) for n, t in plan.tables.items() if t.cache}


def test_job_files_and_commands_know_host_memory(tmp_path: Path) -> None:
    (table,), cluster = middling(1, 100_000), Cluster.preset("dgx-a100", 2)
    neutral = flexshard.solve([table], cluster, batch_size=64).settings.budget_bytes
    table.profile.save(tmp_path / "t0.parquet")
    job = {
        "format": "flexshard.job",
        "version": 1,
        "cluster": "dgx-a100:2",
        "batch_size": 64,
        "budget": limit(cluster, 0.4 * neutral),
        "host_memory": "8GiB",
        "tables": [{"name": "t0", "dim": 32, "profile": "t0.parquet"}],
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job), encoding="utf-8")

    for command in ("plan job.yaml -o plan.json", "explain plan.json", "pareto job.yaml -o frontier.png"):
        result = run(tmp_path, *command.split())
        assert (result.returncode, result.stderr) == (0, ""), command
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.tables["t0"].cache is not None
    assert plan.settings.host_memory == 8 << 30
    flexshard.solve([table], cluster, batch_size=64).save(tmp_path / "without.json")
    shown = run(tmp_path, "diff", "without.json", "plan.json").stdout
    assert "t0: comes to be behind a cache" in " ".join(shown.split())
    refused = run(tmp_path, "replan", "plan.json", "t0.parquet")
    assert refused.returncode == 2
    assert "the plan may keep some on the host" in refused.stderr


def test_boundaries_cost_the_same_on_both_sides() -> None:
    """Where a table's last tier begins, the next row would cost as much with copies, at the price of memory; but in the
    one in which memory ends.
    """
    tables, cluster = middling(), Cluster.preset("dgx-a100", 2)
    neutral = flexshard.solve(tables, cluster, batch_size=1024).settings.budget_bytes
    plan = flexshard.solve(tables, cluster, batch_size=1024, budget=limit(cluster, 0.7 * neutral), host_memory="8GiB")
    alike = []
    for table in plan.tables.values():
        if table.cache is None or len(table.tiers) < 2:
            continue
        boundary = flexshard.explain(plan, table.name).boundaries[-2]
        other = next(one for one in boundary.others if one.group_size == 16)
        alike.append(other.priced_seconds == pytest.approx(boundary.chosen.priced_seconds, rel=0.1))
    assert len(alike) > 1
    assert alike.count(False) <= 1


def test_the_frontier_shows_what_memory_buys() -> None:
    tables, cluster = middling(2, 20_000), Cluster.preset("dgx-a100", 2)
    curve = flexshard.pareto(Problem(tables, cluster, 64, host_memory="8GiB"))
    memory = [point.memory_bytes for point in curve.points]
    seconds = [point.exposed_seconds for point in curve.points]
    assert memory == sorted(memory)
    assert seconds == sorted(seconds, reverse=True)
    assert len(curve.points) > 4
    neutral = flexshard.solve(tables, cluster, batch_size=64).settings.budget_bytes
    assert memory[0] < 0.5 * neutral
    assert neutral == pytest.approx(curve.neutral_bytes)


def test_what_is_not_known_of_caches_is_refused() -> None:
    tables, cluster, _ = budgets()
    cases: dict[str, dict[str, Any]] = {
        "method 'paper' is not known of rows behind caches": {"method": "paper"},
        "objective 'step' is not known of rows behind caches": {"objective": "step"},
        "rows without copies are not the slowest to read": {"overlap": {"all_to_all@16": 1.0}},
        "host_memory is a number of bytes above 0": {"host_memory": 0},
    }
    for message, how in cases.items():
        with pytest.raises(JobError, match=message):
            flexshard.solve(tables, cluster, **({"batch_size": 64, "host_memory": "8GiB"} | how))
    with pytest.raises(JobError, match="host_memory needs to know how fast ranks reach it"):
        flexshard.solve(tables, replace(cluster, host_bytes_per_s=None), batch_size=64, host_memory="8GiB")


def drifting(steps: int, samples: int, rows: int) -> np.ndarray:
    """Ids of one click a sample, most of them of rows that are new."""
    generator = np.random.default_rng(3)
    newest = np.arange(steps * samples) * rows // (steps * samples)
    ids = newest - np.floor(generator.pareto(0.7, newest.size) * 20).astype(np.int64)
    return np.where(ids >= 0, ids, generator.integers(0, rows, ids.size))


@pytest.mark.parametrize("order", ["file", "shuffled"])
def test_caches_that_run_fetch_what_the_plan_says(order: Literal["file", "shuffled"]) -> None:
    """A log in its order, and the same shuffled: all ranks' caches together, least recently used rows leave first."""
    pytest.importorskip("numba")
    pytest.importorskip("torch")
    from flexshard.executors.lookahead.oracle import LookaheadOracle

    samples, steps, rows, ahead = 4 * 500, 300, 60_000, 2
    ids = drifting(steps, samples, rows)
    if order == "shuffled":
        ids = np.random.default_rng(0).permutation(ids)
    profile = flexshard.AccessProfile.from_ids(ids, num_rows=rows)
    table = flexshard.Table("clicks", rows, 64, profile)
    how: dict[str, Any] = {"batch_size": 500, "index_dedup": True, "tiers": 1, "sample_order": order}
    neutral = flexshard.solve([table], cluster_of(), **how).settings.budget_bytes
    plan = flexshard.solve([table], cluster_of(), **how, budget=budget_of(0.35 * neutral), host_memory="1GiB")
    cache = plan.tables["clicks"].cache
    assert cache is not None
    oracle = LookaheadOracle(rows, int(cache.rows * 4))
    fetched = []
    for step, batch in enumerate(ids.reshape(steps, samples)):
        while (admission := oracle.admit(batch)) is None:
            oracle.retire()
        fetched.append(admission.fetched.rows.size)
        if step >= ahead:
            oracle.retire()
    assert np.mean(fetched[steps // 4 :]) / 4 == pytest.approx(cache.fetched, rel=0.1)
    assert cache.held_scale == pytest.approx(1.0, rel=0.05) if order == "shuffled" else cache.held_scale < 0.8


def test_options_of_many_tables_are_not_tried_one_by_one() -> None:
    """Where all rows are in one tier there are few of them, but as many to look up as tables and batches."""
    profile = flexshard.AccessProfile.from_counts(np.arange(3, 0, -1), 10)
    rate = CollectiveRate(1e-5, 1e9)
    cluster = Cluster("c", 2, 1, 1e9, 0.0, (Level(1, None, rate), Level(2, rate, None)), host_bytes_per_s=1e9)

    def few(number: int) -> bool:
        tables = [flexshard.Table(f"t{index}", 3, 4, profile) for index in range(number)]
        instance = Variants(Problem(tables, cluster, 8, host_memory="1GiB", index_dedup=False)).plain
        side = type("side", (), {"instance": instance, "caches": type("caches", (), {"batches": BATCHES})})
        return cached_search.are_few([side], np.array([1]))  # type: ignore[list-item]

    assert few(60)
    assert not few(61)
