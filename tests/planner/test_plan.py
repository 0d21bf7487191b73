"""Plans as documents: bytes, fingerprints, explanations, differences, budgets."""

from __future__ import annotations

import builtins
import json
import math
import pickle
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexshard import AccessProfile, Cluster, Plan, Table, TableConstraints, diff, explain, load_job, pareto, solve
from flexshard.costmodels import Cost, StepWork, column_wise_cost, placement_cost
from flexshard.errors import BudgetError, JobError, PlanError, SolverError
from flexshard.planner import Job, Problem, compare, marginal_curve, plan_document, whole_table_cost
from flexshard.planner.baselines.torchrec_choices import TorchRecChoice, price_choices, torchrec_choices
from flexshard.planner.solver.build import build_instance
from flexshard.profiling import LengthMoments, power_law_probabilities
from flexshard.topologies import CollectiveRate, Level
from tests.commands import run
from tests.slow import first

GIB = 1 << 30


ROWS = 1_000_000


def items(rows: int = ROWS, length: float = 200.0, exponent: float = 0.7, name: str = "items") -> Table:
    """By default a table whose optimal plan has three tiers."""
    profile = AccessProfile.from_probabilities(power_law_probabilities(rows, length, exponent))
    return Table(name, rows, 256, profile)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return solve([items(), items(1000, 5, 1.2, "users")], Cluster.preset("a100-4x8-roce"), batch_size=4096)


def test_a_plan_reads_back_to_the_same_bytes(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "a.json")
    loaded = Plan.load(tmp_path / "a.json")
    loaded.save(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert loaded.fingerprint == plan.fingerprint
    assert loaded.predicted == plan.predicted
    assert loaded.tables == plan.tables
    assert loaded.cluster == plan.cluster


def test_another_process_makes_the_same_plan(tmp_path: Path) -> None:
    script = (
        "from tests.planner.test_plan import items\n"
        "from flexshard import Cluster, solve\n"
        "print(solve([items()], Cluster.preset('a100-4x8-roce'), batch_size=4096).fingerprint)"
    )
    results = {
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert results == {solve([items()], Cluster.preset("a100-4x8-roce"), batch_size=4096).fingerprint + "\n"}


@pytest.mark.parametrize("kind", ["rows", "compared", "step", "whole model"])
def test_plans_do_not_depend_on_how_sum_rounds(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is another on Python 3.12: a plan file was of another fingerprint there, and what ran of another plan."""
    given = [items(), items(1000, 5, 1.2, "users"), items(5000, 3, 0.8, "shops")]
    if kind == "whole model":
        given[1:] = [replace(table, pooling="sum") for table in given[1:]]
    how: dict[str, Any] = {"step": StepWork(0.01)} if kind == "step" else {}

    def made() -> bytes:
        plan = solve(given, Cluster.preset("a100-4x8-roce"), batch_size=4096, **how)
        if kind == "compared":
            plan = replace(
                plan, baselines=plan.baselines | {"whole": whole_table_cost(Problem(given, plan.cluster, 8))}
            )
        plan.save(tmp_path / "plan.json")
        loaded = Plan.load(tmp_path / "plan.json")
        assert loaded.fingerprint == plan.fingerprint == json.loads((tmp_path / "plan.json").read_text())["fingerprint"]
        return (tmp_path / "plan.json").read_bytes()

    plain = builtins.sum

    def exact(numbers: Any, /, start: Any = 0) -> Any:
        items = list(numbers)
        if items and all(isinstance(item, float) for item in items):
            return start + math.fsum(items) * (1 + 2**-52)
        return plain(items, start)

    expected = made()
    monkeypatch.setattr(builtins, "sum", exact)
    assert made() == expected


def test_plans_that_say_the_same_are_equal(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert len({loaded, plan}) == 1
    assert replace(plan, memory_price_seconds_per_gib=plan.memory_price_seconds_per_gib + 1) != plan
    assert plan != plan.fingerprint


def test_clusters_and_frontiers_print_in_a_line() -> None:
    cluster = Cluster.preset("a100-4x8-roce")
    assert repr(cluster) == "Cluster('a100-4x8-roce': 4 nodes x 8 ranks of 37.3 GiB, groups of 1, 8, 32)"
    curve = pareto([items()], cluster, batch_size=4096)
    assert repr(curve).startswith(f"ParetoCurve({len(curve.points)} points, ")
    assert len(repr(curve)) < 100


def test_positions_of_other_rows_are_not_called_rows(tmp_path: Path) -> None:
    counts = np.arange(100, 0, -1)
    for name, order in (("one", counts), ("other", counts[::-1])):
        table = Table("t", 100, 8, AccessProfile.from_counts(order, num_samples=200))
        solve([table], Cluster.preset("dgx-h100", nodes=1), batch_size=64).save(tmp_path / f"{name}.json")
    done = run(tmp_path, "diff", "one.json", "other.json")
    assert done.stdout.startswith(
        "All positions have the same ranks.\nt: the two plans order rows by different profiles"
    )
    assert run(tmp_path, "diff", "one.json", "one.json").stdout == "All rows have the same ranks.\n"


def test_rows_and_tables_that_torchrec_shards_are_counted_apart(tmp_path: Path) -> None:
    tables = [replace(items(4000, 3, 0.8, "pooled"), pooling="sum"), items(1000, 5, 1.2, "users")]
    for name, kind in (("one", "row_wise"), ("other", "table_wise")):
        asked = {"pooled": TableConstraints(sharding_types=[kind])}
        plan = solve(tables, Cluster.preset("dgx-h100", nodes=1), batch_size=64, budget="+10MiB", constraints=asked)
        plan.save(tmp_path / f"{name}.json")
    said = run(tmp_path, "diff", "one.json", "other.json").stdout
    assert "1 table is sharded otherwise by TorchRec, " in said
    assert "rows have other ranks" not in said


def test_a_stored_plan_of_version_1_still_loads() -> None:
    plan = Plan.load(Path(__file__).parent / "plan_v1.json")
    assert [tier.rows for tier in plan.tables["items"].tiers] == [300, 700]
    assert plan.predicted.exposed_seconds == pytest.approx(4.692e-3, rel=1e-3)
    assert plan.tables["items"].features == ("clicks",)


def test_a_stored_job_of_version_1_still_loads() -> None:
    job = load_job(Path(__file__).parent / "job_v1.yaml")
    (table,) = job.tables
    assert (table.rows, table.dim, table.dtype, table.optimizer) == (20, 8, "float16", "adam")
    assert (table.kappa_replicated, table.features) == (4.0, ("clicks", "views"))
    assert (job.batch_size, job.budget, job.tiers, job.index_dedup) == (64, "+1MiB", 2, True)
    assert job.cluster.world_size == 8
    assert job.solve().settings.overlap == (("all_to_all@4", 0.5),)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"version": 2', '"version": 3', "version 3 of plans is unknown; this FlexShard reads 1 and 2"),
        ('"format": "flexshard.plan"', '"format": "x"', "not a plan"),
        ('"rows": 1000000', '"rows": 1000001', "does not match its fingerprint"),
        ("{", "[", r"plan.json:\d+: not valid JSON"),
    ],
)
def test_broken_plan_files(plan: Plan, tmp_path: Path, old: str, new: str, message: str) -> None:
    plan.save(tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text()
    assert old in text
    (tmp_path / "plan.json").write_text(text.replace(old, new, 1))
    with pytest.raises(PlanError, match=message):
        Plan.load(tmp_path / "plan.json")


def test_baselines_price_of_memory_and_proof(plan: Plan) -> None:
    assert list(plan.baselines) == [
        "row_wise",
        "data_parallel",
        "paper_2_tier",
        "paper_3_tier",
        "row_wise_dedup",
    ]
    row_wise = plan.baselines["row_wise"]
    assert plan.predicted.memory_bytes <= row_wise.memory_bytes
    assert plan.lower_bound_seconds <= plan.predicted.exposed_seconds <= plan.lower_bound_seconds * (1 + 1e-5)
    assert plan.memory_price_seconds_per_gib > 0
    # The price is the slope of the frontier: a thousandth of a GiB buys a thousandth of it, and never more.
    tables = [items(), items(1000, 5, 1.2, "users")]
    richer = solve(tables, plan.cluster, batch_size=4096, budget=GIB / 1000)
    saved = plan.predicted.exposed_seconds - richer.predicted.exposed_seconds
    assert saved == pytest.approx(plan.memory_price_seconds_per_gib / 1000, rel=0.05)
    with_one_more = solve(tables, plan.cluster, batch_size=4096, budget="+1GiB")
    assert plan.next_gib_seconds == pytest.approx(with_one_more.predicted.exposed_seconds, rel=1e-9)


def test_budgets_are_differences_or_limits(paper_cluster: Cluster) -> None:
    table = items()
    neutral = solve([table], paper_cluster, batch_size=4096).settings.budget_bytes
    for budget, expected in (
        ("+2GiB", neutral + 2 * GIB),
        ("-10 MB", neutral - 1e7),
        (12345.0, neutral + 12345),
        ("30 GiB", 30 * GIB - paper_cluster.reserve_bytes),
    ):
        assert solve([table], paper_cluster, batch_size=4096, budget=budget).settings.budget_bytes == expected
    for wrong in ("much", "40", "3 GB/s", float("nan"), None, True):
        with pytest.raises(JobError, match="budget must be"):
            solve([table], paper_cluster, batch_size=4096, budget=wrong)  # type: ignore[arg-type]
    with pytest.raises(JobError, match="not above the cluster's reserve"):
        solve([table], paper_cluster, batch_size=4096, budget="1 GB")


@pytest.mark.parametrize("method", ["optimal", "paper"])
def test_the_least_feasible_budget_is_named_and_works(method: str, paper_cluster: Cluster) -> None:
    table = items()
    with pytest.raises(BudgetError, match=r"the least that is feasible|needs at least") as caught:
        solve([table], paper_cluster, batch_size=4096, budget="5 GB", method=method, index_dedup=False)
    least = caught.value.least_bytes
    limit = f"{least + paper_cluster.reserve_bytes + 1:.0f} B"
    plan = solve([table], paper_cluster, batch_size=4096, budget=limit, method=method, index_dedup=False)
    assert plan.predicted.memory_bytes == pytest.approx(least, rel=1e-6)


def test_numbers_of_numpy_are_numbers(paper_cluster: Cluster, tmp_path: Path) -> None:
    table = Table(
        "t",
        np.int64(10),
        np.int32(8),
        AccessProfile.from_counts(np.arange(10), np.int64(5)),
        "float32",
        "sgd",
        np.float32(4),
    )
    plan = solve(
        [table],
        paper_cluster,
        batch_size=np.int64(64),
        budget=np.int64(100),
        tiers=np.int64(2),
        overlap={"all_to_all@8": np.float32(0.5)},
        index_dedup=np.bool_(True),
    )
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").fingerprint == plan.fingerprint
    assert "rows" in explain(plan).text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "guess"}, "method must be one of optimal, paper"),
        ({"tiers": 0}, "tiers must be at least 1"),
        ({"tiers": "2"}, "tiers must be a whole number, found '2'"),
        ({"index_dedup": "no"}, "index_dedup must be True, False or 'auto', found 'no'"),
        ({"tiers": 4, "method": "paper"}, "tiers must be 2 or 3 for method 'paper'"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"overlap": {"x": 1}}, "overlap names 'x'"),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], message: str, paper_cluster: Cluster) -> None:
    with pytest.raises(JobError, match=message):
        solve([items()], paper_cluster, **({"batch_size": 4096} | arguments))  # type: ignore[arg-type]


def test_wrong_lists_of_tables(paper_cluster: Cluster) -> None:
    with pytest.raises(JobError, match="no tables"):
        solve([], paper_cluster, batch_size=1)
    with pytest.raises(JobError, match="'items' is given twice"):
        solve([items(), items()], paper_cluster, batch_size=1)


def test_tables_of_every_shape_together_on_four_levels() -> None:
    cluster = Cluster.preset("gb200-nvl72", nodes=36)
    tables = [
        replace(items(50_000, 100, 1.0, "a"), optimizer="adam"),
        replace(items(20_000, 300, 0.9, "b"), dtype="float16", dim=64),
        replace(items(100, 10, 0.5, "c"), replication_multiplier=2.0),
    ]
    plan = solve(tables, cluster, batch_size=512, tiers=4)
    assert {name: sum(t.rows for t in p.tiers) for name, p in plan.tables.items()} == {
        "a": 50_000,
        "b": 20_000,
        "c": 100,
    }
    fewer = [solve(tables, cluster, batch_size=512, tiers=n).predicted.exposed_seconds for n in (1, 2, 3, 4)]
    assert fewer == sorted(fewer, reverse=True), "more tiers never cost more"


def test_the_price_is_that_of_the_levels_in_use(paper_cluster: Cluster) -> None:
    # All row-wise, because no other level is worth its latency: memory buys nothing at the margin.
    ranks = np.arange(1, 100_001)
    table = Table("t", 100_000, 64, AccessProfile.from_counts((1e6 * ranks**-1.1).astype(np.int64), 10**6))
    plan = solve([table], paper_cluster, batch_size=256)
    assert [tier.strategy for tier in plan.tables["t"].tiers] == ["row_wise"]
    assert plan.memory_price_seconds_per_gib == 0
    richer = solve([table], paper_cluster, batch_size=256, budget="+1GiB")
    assert plan.next_gib_seconds == pytest.approx(richer.predicted.exposed_seconds)
    assert richer.predicted.exposed_seconds < plan.predicted.exposed_seconds, "a whole GiB does pay for a latency"


def test_rows_of_very_different_counts_keep_their_reads() -> None:
    cluster = Cluster.preset("a100-4x8-roce")
    table = Table("t", 10**6, 64, AccessProfile.from_histogram([10**15, 3], [10, 10**6 - 10], 10**6))
    instance = build_instance(Problem([table], cluster, 64))
    reads = instance.tier_reads(np.array([[10, 500_000, 499_990]]))[0]
    assert reads[1:] == pytest.approx([64 * 3 * 0.5, 64 * 3 * 0.49999], rel=1e-12)


def test_index_dedup_counts_distinct_rows(paper_cluster: Cluster) -> None:
    table = items()
    plain = solve([table], paper_cluster, batch_size=4096, index_dedup=False)
    dedup = solve([table], paper_cluster, batch_size=4096, index_dedup=True)
    p = table.profile.counts / table.profile.num_samples
    expected = float((1 - (1 - np.minimum(p, 1)) ** 4096) @ table.profile.rows)
    assert dedup.predicted.rows_read == pytest.approx(expected)
    assert dedup.predicted.rows_read < plain.predicted.rows_read / 2
    assert sum(t.covered for t in dedup.tables["items"].tiers) == pytest.approx(1.0)


def test_one_rank_and_one_node() -> None:
    alone = Cluster("alone", 1, 1, 1e12, 0.0, (Level(1),))
    plan = solve([items()], alone, batch_size=16)
    assert plan.predicted.exposed_seconds == 0
    assert [t.strategy for t in plan.tables["items"].tiers] == ["row_wise"]
    rate = CollectiveRate(1e-5, 1e10)
    node = Cluster("node", 1, 8, 1e12, 0.0, (Level(1, None, rate), Level(8, rate)))
    assert {t.group_size for t in solve([items()], node, batch_size=16).tables["items"].tiers} <= {1, 8}


def test_memory_at_p999_warns_where_it_does_not_fit(paper_cluster: Cluster) -> None:
    lengths = LengthMoments(1000, 200_000, 10**9, 5000)
    shape = items()
    profile = AccessProfile.from_histogram(
        shape.profile.counts, shape.profile.rows, shape.profile.num_samples, lengths=lengths
    )
    table = replace(shape, profile=profile)
    tight = replace(paper_cluster, hbm_bytes=1.75e9, reserve_bytes=0.0)
    plan = solve([table], tight, batch_size=4096)
    expected = plan.predicted.dynamic_memory_p999_bytes
    assert expected is not None
    assert expected > plan.predicted.dynamic_memory_bytes
    assert "Warning:" in str(plan)
    assert "run out" in str(plan)


def test_explanation_of_boundaries(plan: Plan) -> None:
    found = explain(plan, "items")
    tiers = plan.tables["items"].tiers
    assert [b.position for b in found.boundaries] == [t.first_position + t.rows - 1 for t in tiers]
    for boundary in found.boundaries[:-1]:
        # At a boundary two tiers cost the same at the price of memory, to within the step between two counts.
        assert boundary.others[0].priced_seconds == pytest.approx(boundary.chosen.priced_seconds, rel=1e-3)
    assert "one more GiB per rank would save" in found.text
    assert found.table.alternatives
    for alternative in found.table.alternatives:
        assert not alternative.fits or alternative.exposed_seconds >= 0
    with pytest.raises(PlanError, match="no table 'x'; it has items, users"):
        explain(plan, "x")


def test_a_budget_that_much_more_memory_would_beat_is_not_said_to_be_loose(paper_cluster: Cluster) -> None:
    counts = np.maximum(1, 1e5 / np.arange(1, 100_001) ** 0.5).astype(np.int64)
    table = Table("key", 100_000, 64, AccessProfile.from_counts(counts, num_samples=int(counts.sum())))
    tight = solve([table], paper_cluster, batch_size=512)
    assert tight.memory_price_seconds_per_gib == 0
    assert any(not other.fits and other.priced_seconds < 0 for other in tight.tables["key"].alternatives)
    assert "Much more would, as the choices beyond the budget show." in explain(tight, "key").text
    assert "does not bind" not in explain(tight, "key").text
    roomy = solve([table], paper_cluster, batch_size=512, budget="30GiB")
    assert "The budget does not bind" in explain(roomy, "key").text


def test_alternatives_cost_what_they_say(paper_cluster: Cluster) -> None:
    table = items()
    plan = solve([table], paper_cluster, batch_size=4096)
    two = min(plan.tables["items"].alternatives, key=lambda a: a.priced_seconds)
    budget = two.memory_bytes + plan.predicted.memory_bytes - plan.settings.budget_bytes
    other = solve([table], paper_cluster, batch_size=4096, budget=budget, tiers=len(two.group_sizes))
    latency = plan.predicted.exposed_seconds + two.exposed_seconds - other.predicted.exposed_seconds
    assert latency >= -1e-9, "no plan of that memory is better than the alternative says, but for latencies saved"


@pytest.mark.parametrize("objective", ["communication", "step"])
def test_alternatives_in_one_tier_expose_what_the_baselines_do(objective: str) -> None:
    rate, slow = CollectiveRate(20e-6, 10e9), CollectiveRate(50e-6, 5e9)
    node = Cluster("node", 1, 8, 40e9, 0.0, (Level(1, None, slow), Level(8, rate, None)), hbm_bytes_per_s=1.5e12)
    plan = solve([items()], node, batch_size=512, budget="10 GB", objective=objective, index_dedup=False)
    whole = {(1,): "data_parallel", (8,): "row_wise"}
    others = [one for one in plan.tables["items"].alternatives if one.group_sizes in whole]
    assert others
    for one in others:
        cost = plan.baselines[whole[one.group_sizes]]
        assert one.exposed_seconds == pytest.approx(cost.exposed_seconds - plan.predicted.exposed_seconds, rel=1e-6)
        assert one.memory_bytes == pytest.approx(cost.memory_bytes - plan.predicted.memory_bytes, rel=1e-6)
    assert ("by the links that the step waits for" in str(explain(plan, "items"))) == (objective == "step")


def test_a_gap_is_over_the_bound(paper_cluster: Cluster) -> None:
    plan = solve([items()], paper_cluster, batch_size=4096)
    seconds = plan.predicted.exposed_seconds
    for bound, gap in ((seconds / 2, 1.0), (seconds, 0.0), (2 * seconds, 0.0), (0.0, np.inf)):
        assert replace(plan, lower_bound_seconds=bound).proven_gap == pytest.approx(gap)


def test_diff_counts_rows_and_bytes(paper_cluster: Cluster) -> None:
    table = items()
    before = solve([table], paper_cluster, batch_size=4096)
    after = solve([table], paper_cluster, batch_size=4096, budget="+100MiB")
    found = diff(before, after)

    def groups(plan: Plan) -> np.ndarray:
        return np.concatenate([np.full(t.rows, t.group_size) for t in plan.tables["items"].tiers])

    # Rows without copies are dealt in order of id, and others are among them now.
    moved = int(((groups(before) != groups(after)) | (groups(after) == paper_cluster.world_size)).sum())
    assert found.rows == moved > 0
    assert found.nbytes == moved * table.row_bytes
    assert diff(before, before).moves == ()
    placed = before.tables["items"]
    turned = tuple(replace(tier, first_holder=tier.group_size - 1) for tier in placed.tiers)
    elsewhere = diff(before, replace(before, tables={"items": replace(placed, tiers=turned)}))
    many = sum(tier.rows for tier in placed.tiers if tier.group_size > 1)
    assert elsewhere.rows == many > 0  # the same tiers, dealt from another rank on
    assert all(move.source == move.target for move in elsewhere.moves)
    for move in elsewhere.moves:
        by_id = move.target == paper_cluster.world_size
        assert move.begins == (None if by_id else (0, (move.target or 0) - 1))
    assert all(move.begins is None for move in found.moves)
    renamed = solve([replace(table, name="other")], paper_cluster, batch_size=4096)
    assert {m.table: (m.source is None, m.target is None) for m in diff(before, renamed).moves} == {
        "items": (False, True),
        "other": (True, False),
    }
    assert (diff(before, renamed).rows, diff(before, renamed).nbytes) == (table.rows, table.rows * table.row_bytes)
    for wider in (replace(table, dim=128), replace(table, dtype="float16")):
        other = replace(before, tables=solve([wider], paper_cluster, batch_size=4096).tables)
        assert diff(before, other).rows == table.rows  # written anew, where they are too


@pytest.mark.parametrize("budget", ["+1MiB", "+3MiB", "+1100KiB"])
def test_diff_counts_rows_whose_ranks_change(budget: str) -> None:
    """Of every row, the ranks that have it under each plan, as the executor deals rows."""
    slow, fast = CollectiveRate(1e-5, 1e9), CollectiveRate(1e-5, 1e10)
    cluster = Cluster("c", 2, 4, 1e10, 0.0, (Level(1, None, slow), Level(4, fast, slow), Level(8, slow, None)))
    table = items(20_000)
    before, after = (solve([table], cluster, batch_size=64, budget=one) for one in ("+900KiB", budget))

    def held(plan: Plan) -> np.ndarray:
        """Rows by position, whose ids are their positions here; shape (rows, ranks)."""
        found = np.zeros((table.rows, 8), bool)
        for tier in plan.tables["items"].tiers:
            position = np.arange(tier.rows)
            for group in range(0, 8, tier.group_size):
                rank = group + (position + tier.first_holder) % tier.group_size
                found[tier.first_position + position, rank] = True
        return found

    moved = (held(after) & ~held(before)).any(axis=1)
    groups = [held(plan).sum(axis=1) for plan in (before, after)]
    said = np.zeros(table.rows, bool)
    for move in diff(before, after).moves:
        said[move.first_position : move.first_position + move.rows] = True
        if move.begins is not None:
            assert move.begins[0] != move.begins[1]
    with_copies = groups[1] > 1
    assert (said & with_copies).sum() == ((moved | (groups[0] != groups[1])) & with_copies).sum() > 0
    assert said[moved].all()


def test_rows_of_other_numbers_of_ranks_all_move() -> None:
    rate = CollectiveRate(1e-5, 1e10)
    level = Level(1, None, rate)
    one = Cluster("one", 1, 2, 1e10, 0.0, (level, Level(2, rate, None)))
    two = Cluster("two", 2, 2, 1e10, 0.0, (level, Level(2, rate, rate), Level(4, rate, None)))
    table = items(3_000)
    plans = [solve([table], cluster, batch_size=64, tiers=1, budget="-100KiB") for cluster in (one, two)]
    sizes = [[tier.group_size for tier in plan.tables["items"].tiers] for plan in plans]
    found = diff(*plans)
    assert (found.rows, diff(plans[0], plans[0]).rows) == (3_000, 0)
    assert [(move.source, move.target) for move in found.moves] == [(sizes[0][0], sizes[1][0])]


def test_pareto_points_are_optimal_plans_of_their_memory(paper_cluster: Cluster) -> None:
    table = items()
    curve = pareto([table], paper_cluster, batch_size=4096)
    seconds = [point.exposed_seconds for point in curve.points]
    memory = [point.memory_bytes for point in curve.points]
    assert memory == sorted(memory)
    assert all(a > b for a, b in pairwise(seconds))
    for point in curve.points[:: len(curve.points) // 2]:
        best = solve([table], paper_cluster, batch_size=4096, budget=point.memory_bytes - curve.neutral_bytes)
        assert point.exposed_seconds == pytest.approx(best.predicted.exposed_seconds, rel=1e-5)
    neutral = solve([table], paper_cluster, batch_size=4096)
    assert curve.mark("memory_neutral").exposed_seconds == pytest.approx(neutral.predicted.exposed_seconds)
    assert curve.mark("full_replication").rows == (ROWS, 0, 0)
    assert curve.mark("row_wise").memory_bytes == curve.neutral_bytes


def test_marginal_curve_by_hand() -> None:
    # 2 ranks; D·s = 4 bytes; kappa 3 against 1; memory per row 4·(3 - 1/2 - w), time 4·(1/β_ar - 2w/β_a2a).
    cluster = Cluster(
        "two", 2, 1, 1e9, 0.0, (Level(1, None, CollectiveRate(1.0, 2.0)), Level(2, CollectiveRate(1.0, 8.0)))
    )
    profile = AccessProfile.from_counts([8, 4, 1], num_samples=1, num_rows=10)
    table = Table("t", 10, 1, profile, optimizer="sgd")
    curve = marginal_curve([table], cluster, batch_size=1)
    memory, seconds = [0.0], [0.0]
    for w, rows in ((8, 1), (4, 1), (1, 1), (0, 7)):
        memory.append(memory[-1] + rows * 4 * (2.5 - w))
        seconds.append(seconds[-1] + rows * (4 / 2 - (4 + 4 + 4) * w / 8))  # a row, its gradient and its id
    crossing = curve.marks["memory_neutral"]
    assert np.delete(curve.memory_bytes, crossing).tolist() == pytest.approx(memory)
    assert np.delete(curve.seconds, crossing).tolist() == pytest.approx(seconds)
    assert curve.memory_bytes[crossing] == 0.0
    assert curve.rows[crossing] == 3 + round(22 / 10)
    assert curve.rows[curve.marks["greatest_memory_saving"]] == 2
    assert curve.seconds[curve.marks["communication_neutral"]] == min(seconds)


def test_whole_tables_by_milp_equal_every_choice(paper_cluster: Cluster) -> None:
    random = np.random.default_rng(3)
    tables = [items(int(random.integers(100, 3000)), float(random.integers(1, 80)), 0.7, f"t{k}") for k in range(5)]
    best = whole_table_cost(tables, paper_cluster, batch_size=512, budget="+1MiB")
    neutral = solve(tables, paper_cluster, batch_size=512).settings.budget_bytes
    options = [
        [placement_cost(t, paper_cluster, g, rows=t.rows, reads=512 * t.profile.avg_length) for g in (1, 8, 32)]
        for t in tables
    ]
    costs = [sum(choice, Cost()) for choice in product(*options)]
    expected = min(c.exposed_seconds for c in costs if c.memory_bytes <= neutral + 2**20)
    (counts,) = (c for c in best.collectives if c.content == "counts")  # what all choices share
    assert best.exposed_seconds == pytest.approx(expected + counts.seconds, rel=1e-6)
    with pytest.raises(BudgetError, match="no choice of whole tables fits"):
        whole_table_cost(tables, paper_cluster, batch_size=512, budget="-1GiB")


def test_whole_tables_that_do_not_fit_are_left_out(paper_cluster: Cluster) -> None:
    """Every id sent once takes less memory than any choice of theirs."""
    table = items(100_000, 400.0, 1.2)
    how: dict[str, Any] = {"batch_size": 512, "index_dedup": "auto", "budget": "-20MiB"}
    with pytest.warns(UserWarning, match="left out: no choice of whole tables fits"):
        plan = compare([table], paper_cluster, **how, torchrec=False)
    assert "row_wise" in plan.baselines
    assert "whole_table" not in plan.baselines


def test_a_budget_error_reaches_other_processes() -> None:
    """It was lost on its way: a rank, or a worker, that had got it waited or died instead."""
    error = pickle.loads(pickle.dumps(BudgetError("too little", 12.5)))
    assert (str(error), error.least_bytes) == ("too little", 12.5)


def test_compare_adds_the_slow_baselines(paper_cluster: Cluster) -> None:
    plan = compare(Job((items(),), paper_cluster, 4096), torchrec=False)
    assert list(plan.baselines)[-1] == "whole_table"
    whole, row_wise = (plan.baselines[name] for name in ("whole_table", "row_wise"))
    assert plan.predicted.exposed_seconds <= whole.exposed_seconds
    assert whole.static_memory_bytes == row_wise.static_memory_bytes  # the same, as nothing else fits
    assert whole.dynamic_memory_p999_bytes == row_wise.dynamic_memory_p999_bytes


@pytest.mark.parametrize("megabytes", first(1, [55, 50, 60]))
def test_every_baseline_counts_the_translation_of_ids(megabytes: int, paper_cluster: Cluster) -> None:
    """Locations were left out of whole tables, which then beat the bound of the "optimal" plan."""
    p = np.arange(1, 1_750_001) ** -1.1
    profile = AccessProfile.from_probabilities(20 * p / p.sum())
    tables = [Table(name, 1_750_000, 16, profile, replication_multiplier=1.0) for name in "ab"]
    budget = f"{paper_cluster.reserve_bytes + megabytes * 10**6} B"
    problem = Problem(tables, paper_cluster, 2048, budget=budget, translation="device")
    plan = compare(problem, torchrec=False)
    whole = plan.baselines["whole_table"]
    assert whole.exposed_seconds >= plan.lower_bound_seconds * (1 - 1e-9)
    assert whole.memory_bytes <= plan.settings.budget_bytes
    curve = pareto(problem)
    assert min(point.memory_bytes for point in curve.points) > 2 * 1_750_000 / 4


@pytest.mark.skipif(find_spec("torchrec") is None, reason="TorchRec is not installed")
@pytest.mark.filterwarnings("ignore")
def test_torchrecs_own_planner_is_asked_and_priced(paper_cluster: Cluster) -> None:
    tables = [
        items(name="large"),
        items(50, 3, 0.5, "tiny"),
        replace(items(20_000, 30, 0.9, "half"), dtype="float16", dim=64),
    ]
    choices = torchrec_choices(Problem(tables, paper_cluster, 512))
    kinds = {"data_parallel", "row_wise", "table_wise", "column_wise"}
    assert {choice.sharding_type for choice in choices} <= kinds
    for choice in choices:
        assert sum(share for _, share in choice.shards) == (pytest.approx(1.0) if choice.shards else 0)
    plan = compare(Job(tuple(tables), paper_cluster, 512))
    priced = price_choices(Problem(tables, paper_cluster, 512), choices)
    assert plan.baselines["torchrec"].exposed_seconds == pytest.approx(priced.exposed_seconds)
    assert plan.baselines["torchrec"].dynamic_memory_p999_bytes is None  # the mean rank's would read as the fullest's
    if priced.memory_bytes <= plan.settings.budget_bytes:
        assert plan.predicted.exposed_seconds <= priced.exposed_seconds * (1 + 1e-9)


@pytest.mark.skipif(find_spec("torchrec") is None, reason="TorchRec is not installed")
def test_torchrecs_planner_has_the_memory_that_there_is(paper_cluster: Cluster) -> None:
    small = replace(paper_cluster, hbm_bytes=4.14e9)
    pooled = [replace(items(name=f"t{i}", length=20.0), pooling="sum") for i in range(4)]
    problem = Problem(pooled, small, 64, budget="4.14 GB")
    # 4 GB of weights on 32 ranks with 0.14 GB each: TorchRec would take host memory, if there were any.
    roomy = {one.compute_kernel for one in torchrec_choices(replace(problem, host_memory=1e11))}
    assert roomy & {"fused_uvm", "fused_uvm_caching"}
    with pytest.raises(SolverError, match="TorchRec's planner found no plan"):
        torchrec_choices(problem)
    with pytest.raises(SolverError, match="TorchRec's planner found no plan"):
        compare(problem, torchrec=True)
    with pytest.warns(UserWarning, match="left out: TorchRec's planner found no plan"):
        plan = compare(problem)
    assert "torchrec" not in plan.baselines


def test_ranks_on_one_link_share_what_it_carries(paper_cluster: Cluster) -> None:
    tables = [items(name="a"), items(name="b")]
    alone = price_choices(Problem(tables, paper_cluster, 4096), [TorchRecChoice("table_wise", ((0, 1.0),))] * 2)
    shared = Problem(tables, replace(paper_cluster, ranks_per_link=2), 4096)
    for ranks, share in (((0, 0), 0.5), ((0, 1), 0.5), ((0, 2), 0.25)):
        placed = [TorchRecChoice("table_wise", ((rank, 1.0),)) for rank in ranks]
        found = next(one for one in price_choices(shared, placed).collectives if one.content == "embeddings")
        whole = next(one for one in alone.collectives if one.content == "embeddings")
        assert found.nbytes == whole.nbytes
        assert found.nbytes + found.excess_bytes == pytest.approx(share * (whole.nbytes + whole.excess_bytes))


def test_rates_of_their_own_are_in_plans_that_have_them(paper_cluster: Cluster, tmp_path: Path) -> None:
    plain = solve([items()], paper_cluster, batch_size=512)
    assert "own_" not in json.dumps(plan_document(plain)["cluster"])
    inner = paper_cluster.levels[0]
    own = replace(inner, own_reduce_scatter=CollectiveRate(1e-5, 1e9, note="by hand"))
    measured = replace(paper_cluster, levels=(own, *paper_cluster.levels[1:]))
    plan = solve([items()], measured, batch_size=512)
    assert plan.job_digest != plain.job_digest
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").cluster == measured


def longer_ids(cost: Cost) -> float:
    """Seconds of the half of every id that 8 bytes have and 4 have not."""
    ids = [one for one in cost.collectives if one.content == "ids"]
    return sum(one.calls * (one.nbytes + one.excess_bytes) / 2 / one.bytes_per_s for one in ids)


def test_pricing_another_planners_choices(paper_cluster: Cluster) -> None:
    tables = [items(name="a"), items(name="b"), items(name="c")]
    problem = Problem(tables, paper_cluster, 4096)
    reads = 4096 * tables[0].profile.avg_length
    whole = [price_choices(problem, [TorchRecChoice(kind)] * 3) for kind in ("row_wise", "data_parallel")]
    plan = solve(tables, paper_cluster, batch_size=4096)
    for cost, name in zip(whole, ("row_wise", "data_parallel"), strict=True):
        # TorchRec is taken to tell its counts in one number, and its ids are as long again as ours.
        expected = plan.baselines[name].exposed_seconds + longer_ids(cost)
        assert cost.exposed_seconds == pytest.approx(expected, rel=1e-4)
        assert cost.memory_bytes == pytest.approx(plan.baselines[name].memory_bytes)
    # Two tables on rank 0 and one on rank 1: rank 0 sends for two tables to all 32 ranks.
    placed = [TorchRecChoice("table_wise", ((rank, 1.0),)) for rank in (0, 0, 1)]
    cost = price_choices(problem, placed)
    sent = 2 * 32 * reads * tables[0].row_bytes
    rows = next(c for c in cost.collectives if c.content == "embeddings")
    assert rows.nbytes == pytest.approx(3 * reads * tables[0].row_bytes), "what a rank receives, on average"
    assert rows.nbytes + rows.excess_bytes == pytest.approx(sent)
    assert cost.rows_read == pytest.approx(2 * 32 * reads)
    assert cost.input_ids == pytest.approx(3 * reads)
    # All columns on all ranks is column-wise: the same memory, bytes and ids as its formula.
    everywhere = TorchRecChoice("column_wise", tuple((rank, 1 / 32) for rank in range(32)))
    split = price_choices(replace(problem, tables=tuple(tables[:1])), [everywhere])
    formula = column_wise_cost(tables[0], paper_cluster, rows=tables[0].rows, reads=reads)
    assert split.memory_bytes == pytest.approx(formula.memory_bytes)
    assert split.input_ids == pytest.approx(formula.input_ids)
    assert split.rows_read == pytest.approx(formula.rows_read)
    counts = next(c for c in split.collectives if c.content == "counts")
    assert split.exposed_seconds == pytest.approx(formula.exposed_seconds + counts.seconds + longer_ids(split))
    assert cost.static_memory_bytes == pytest.approx(2 * ROWS * tables[0].row_bytes * tables[0].kappa_sharded)


def test_json_documents_are_plain(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "p.json")
    document = json.loads((tmp_path / "p.json").read_text())
    assert list(document)[:3] == ["format", "version", "fingerprint"]
    assert document["predicted"]["exposed_seconds"] == plan.predicted.exposed_seconds
    assert document["tables"][0]["tiers"][0]["strategy"] == "data_parallel"


def test_plans_show_themselves(tmp_path: Path) -> None:
    counts = [1000 // (row + 1) + 1 for row in range(100)]
    profile = AccessProfile.from_counts(counts, num_samples=1000)
    profile.save(tmp_path / "t.profile.parquet")
    table = Table("<t>", 100, 16, str(tmp_path / "t.profile.parquet"))  # type: ignore[arg-type]
    plan = solve([table], "a100-4x8-roce:2", batch_size=64)  # type: ignore[arg-type]
    assert plan.fingerprint == solve([table], Cluster.preset("a100-4x8-roce", nodes=2), batch_size=64).fingerprint
    assert repr(plan) == f"Plan(1 table on a100-4x8-roce:2 x 16 ranks, fingerprint={plan.fingerprint[:16]!r})"
    assert "&lt;t&gt;" in plan._repr_html_()
    frame = plan.to_frame()
    assert frame["rows"].to_pylist() == [tier.rows for tier in plan.tables["<t>"].tiers]
    assert frame["table"].to_pylist() == ["<t>"] * len(plan.tables["<t>"].tiers)
    assert "a100-4x8-roce" in Cluster.presets()
    found = profile.to_frame()
    assert found["row"].to_pylist() == profile.ranked_rows.tolist()
    assert found["count"].to_pylist() == sorted(counts, reverse=True)


def test_rates_of_earlier_releases_keep_a_plans_bytes(tmp_path: Path) -> None:
    """They do not say of which length, data type and optimizer they are; a plan does not say so either."""
    from flexshard.costmodels import LocalRates, StepWork, TableRates
    from flexshard.planner import plan_document

    rates = (1e-6, 1e-7, 0.0)
    for kernel, more in (((), set()), ((5.0, "float32", "sgd"), {"length", "dtype", "optimizer"})):
        local = LocalRates(rates, rates, 1e-9, "here", (TableRates(2_000, 16, (1e-6, 1e-7), rates, rates, *kernel),))
        profile = AccessProfile.from_probabilities(power_law_probabilities(2_000, 5, 1.0))
        table = Table("t", 2_000, 16, profile)
        plan = solve([table], Cluster.preset("a100-4x8-roce"), batch_size=64, step=StepWork(0.01, local))
        (own,) = plan_document(plan)["settings"]["rates"]["tables"]
        assert set(own) == {"rows", "dim", "pooled", "look_up", "update"} | more
        plan.save(tmp_path / "plan.json")
        loaded = Plan.load(tmp_path / "plan.json")
        assert loaded.settings == plan.settings
        assert loaded.fingerprint == plan.fingerprint
