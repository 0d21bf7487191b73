"""Plans for newer profiles: what moves, counted row by row, and what the running plan costs under them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flexshard import AccessProfile, Cluster, Plan, Table, solve
from flexshard.costmodels import Layout, RowWidths, StepWork, gathered_bytes
from flexshard.embeddings import IndexBijection
from flexshard.errors import PlanError
from flexshard.planner import moving_seconds, replan, row_moves
from flexshard.planner.plan import Tier
from flexshard.planner.replanning import kept_by_holder
from flexshard.topologies import CollectiveRate, Level

ROWS = 3_000


def profile(seed: int, length: int = 8) -> AccessProfile:
    random = np.random.default_rng(seed)
    ids = random.permutation(ROWS)[np.minimum(random.zipf(1.3, 20_000 * length) - 1, ROWS - 1)]
    return AccessProfile.from_ids(ids, lengths=np.full(20_000, length), num_rows=ROWS)


def cluster() -> Cluster:
    fast, slow = CollectiveRate(1e-6, 1e11), CollectiveRate(1e-6, 1e10)
    return Cluster("two", 2, 4, 1e9, 0.0, (Level(1, None, slow), Level(4, fast, slow), Level(8, slow, None)))


def held(tiers: list[tuple[int, int]], ranking: IndexBijection, holder: int) -> list[set[int]]:
    """Ids that each of eight ranks holds, row by row, where tiers begin with rank ``holder`` of their group."""
    ids, first, found = np.asarray(ranking.row_at), 0, [set() for _ in range(8)]  # type: ignore[var-annotated]
    for size, rows in tiers:
        for offset, row in enumerate(ids[first : first + rows].tolist()):
            for rank in range((offset + holder) % size, 8, size):
                found[rank].add(row)
        first += rows
    return found


@pytest.mark.parametrize("holders", [(0, 0), (0, 5), (3, 3), (6, 2)])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([(8, 300)], [(8, 300)]),
        ([(1, 20), (4, 80), (8, 200)], [(1, 35), (4, 30), (8, 235)]),
        ([(4, 300)], [(1, 50), (8, 250)]),
        ([(2, 10), (8, 290)], [(4, 10), (8, 290)]),
        ([(1, 300)], [(8, 300)]),
    ],
)
def test_moves_row_by_row(
    before: list[tuple[int, int]], after: list[tuple[int, int]], holders: tuple[int, int]
) -> None:
    random = np.random.default_rng(0)
    orders = [IndexBijection(random.permutation(300)[:120], 300) for _ in range(2)]
    layouts = []
    for tiers, holder in zip((before, after), holders, strict=True):
        firsts = np.cumsum([0, *[rows for _, rows in tiers]])
        made = [
            Tier("any", g, rows, int(at), 0, None, 0, 0, 0, first_holder=holder % g)
            for (g, rows), at in zip(tiers, firsts, strict=False)
        ]
        layouts.append(Layout.of({"t": made}, {"t": 300}, 8))
    found = row_moves((layouts[0], 0), (layouts[1], 0), *orders, 5, table="t")
    was, will = (held(*one) for one in zip((before, after), orders, holders, strict=True))
    assert found.moved == sum(len(new - old) for old, new in zip(was, will, strict=True))
    assert found.kept == sum(len(new & old) for old, new in zip(was, will, strict=True))
    assert found.nbytes == 20 * found.moved


def test_how_many_rows_stay_by_the_rank_that_tiers_begin_with() -> None:
    random = np.random.default_rng(1)
    orders = [IndexBijection(random.permutation(300)[:140], 300) for _ in range(2)]

    def layout(tiers: list[tuple[int, int, int]]) -> Layout:
        at = np.cumsum([0, *[rows for _, rows, _ in tiers]]).tolist()
        made = [
            Tier("any", g, rows, first, 0, None, 0, 0, 0, first_holder=holder)
            for (g, rows, holder), first in zip(tiers, at, strict=False)
        ]
        return Layout.of({"t": made}, {"t": 300}, 8)

    before = layout([(1, 20, 0), (2, 50, 1), (4, 70, 3), (8, 160, 6)])
    stay = kept_by_holder((before, 0), (layout([(2, 60, 0), (4, 80, 0), (8, 160, 0)]), 0), *orders)
    for holders in ((0, 0, 0), (1, 2, 5), (0, 3, 7), (1, 1, 6)):
        after = layout([(2, 60, holders[0]), (4, 80, holders[1]), (8, 160, holders[2])])
        moves = row_moves((before, 0), (after, 0), *orders, 5, table="t")
        assert moves.kept == sum(stay[g][holder] for g, holder in zip((2, 4, 8), holders, strict=True))


def test_tiers_begin_where_most_rows_stay() -> None:
    """Ids that are numbered by popularity, of which some more have copies: the others' ranks follow from how many."""
    p = np.arange(1, 20_001) ** -1.05
    old, new = (AccessProfile.from_counts(np.round(p * reads).astype(np.int64), 50_000) for reads in (1e6, 1.2e6))
    slow = CollectiveRate(1e-6, 1e9)
    where = replace(cluster(), levels=(Level(1, None, slow), cluster().levels[1], Level(8, slow, None)))
    plan = solve([Table("a", 20_000, 64, old)], where, batch_size=4)
    found = replan(plan, {"a": new}, older={"a": old})
    (first, last), (then_first, then_last) = (one.tables["a"].tiers for one in (plan, found.after))
    copied = then_first.rows - first.rows
    assert copied % 8 == (then_last.first_holder - last.first_holder) % 8 != 0
    assert then_first.first_holder == first.first_holder
    (moves,) = found.moves
    assert copied <= moves.moved <= 2 * copied  # copies of these rows, and nothing else


@pytest.mark.parametrize("reduction", ["dense", "sparse", "auto"])
def test_gathered_gradients_are_priced_as_planned(reduction: str) -> None:
    """Those of copies counted as reduced whole, whatever the plan had them as."""
    counts = (1e6 / np.arange(1, 40_001) ** 1.1).astype(np.int64) + 1
    given = [np.random.default_rng(seed).permutation(counts) for seed in range(2)]
    old, new = (AccessProfile.from_counts(one, num_samples=500) for one in given)
    table = Table("a", 40_000, 64, old)
    how = {"batch_size": 4, "budget": "+30MB", "reduction": reduction}
    plan = solve([table], Cluster.preset("a100-4x8-roce"), **how)
    assert ("sparse" in {tier.reduction for tier in plan.tables["a"].tiers}) is (reduction == "sparse")
    same = replan(plan, {"a": old}, older={"a": old})
    assert same.seconds_before == pytest.approx(plan.predicted.exposed_seconds, rel=1e-12)
    assert same.seconds_after == pytest.approx(plan.predicted.exposed_seconds, rel=1e-12)
    assert same.after.fingerprint == plan.fingerprint, "the same input, the same plan"
    found = replan(plan, {"a": new}, older={"a": old})
    fresh = solve([replace(table, profile=new)], plan.cluster, **how)
    assert found.seconds_after == pytest.approx(fresh.predicted.exposed_seconds, rel=1e-12)
    assert found.after.fingerprint == fresh.fingerprint
    if reduction == "sparse":  # what a group touches of rows that are hot no more, row by row
        (tier,) = plan.tables["a"].tiers
        rows = old.ranked_rows[tier.first_position : tier.first_position + tier.rows]
        q = 1 - (1 - np.minimum(given[1][rows] / 500, 1 - 2**-53)) ** (4 * tier.group_size)
        touched = np.array([[q.sum(), (q * (1 - q)).sum()]]) / tier.group_size
        expected = gathered_bytes(plan.cluster, tier.group_size, touched, [RowWidths.of_table(table).gradient_bytes])
        (call,) = (one for one in found.cost_before.collectives if one.kind == "all_gather")
        assert call.nbytes == pytest.approx(expected)


@pytest.mark.parametrize("memory", ["mean", "p99.9"])
def test_tables_begin_with_the_ranks_where_they_do(memory: str) -> None:
    """Other ranks would suit the newer popularity better, and move all rows of tables that stay row-wise."""
    old = {f"t{index}": profile(index) for index in range(3)}
    # What was the hottest table is the coolest now, of the same rows.
    new = {f"t{index}": profile(index, length=8 * 4**index) for index in range(3)}
    tables = [Table(name, ROWS, 64, one) for name, one in old.items()]
    how = {"batch_size": 64, "index_dedup": False, "tiers": 1, "memory": memory, "budget": "1GB"}
    how["sample_order"] = "shuffled"
    overlap = {"all_reduce@1": 0.0, "all_to_all@8": 1.0}
    plan = solve(tables, cluster(), overlap=overlap, **how)
    assert all([tier.group_size for tier in table.tiers] == [8] for table in plan.tables.values())
    begin = {name: table.tiers[0].first_holder for name, table in plan.tables.items()}
    assert len(set(begin.values())) > 1
    fresh = solve([replace(one, profile=new[one.name]) for one in tables], cluster(), overlap=overlap, **how)
    assert {name: table.tiers[0].first_holder for name, table in fresh.tables.items()} != begin
    found = replan(plan, new, older=old)
    assert {name: table.tiers[0].first_holder for name, table in found.after.tables.items()} == begin
    assert found.nbytes == 0
    # What is said of the fullest rank is of these ranks.
    said, other = found.after.predicted, fresh.predicted
    assert said.fullest_dynamic_bytes != other.fullest_dynamic_bytes
    assert replace(said, fullest_dynamic_bytes=None) == replace(other, fullest_dynamic_bytes=None)


@pytest.mark.parametrize("step", [None, StepWork(1e-4)])
def test_what_a_newer_profile_saves(step: StepWork | None, tmp_path: Path) -> None:
    old, new = profile(0), profile(1)
    old.save(tmp_path / "old.profile")
    table = Table("t", ROWS, 64, replace(old, path="old.profile"))
    how = {"batch_size": 512, "index_dedup": False, "step": step}
    plan = solve([table], cluster(), **how)
    plan.save(tmp_path / "plan.json")
    found = replan(Plan.load(tmp_path / "plan.json"), {"t": new}, base=tmp_path)
    fresh = solve([Table("t", ROWS, 64, new)], cluster(), **how)
    assert found.seconds_after == pytest.approx(fresh.objective_seconds(fresh.predicted))
    assert found.after.tables["t"].tiers == fresh.tables["t"].tiers
    # The old plan's tiers hold what were the hottest rows, and now are any.
    w = 512 * new.dense_counts() / new.num_samples
    order = np.asarray(IndexBijection(old.ranked_rows, ROWS).row_at)
    reads = [float(w[order[t.first_position : t.first_position + t.rows]].sum()) for t in plan.tables["t"].tiers]
    sent = sum(r for r, t in zip(reads, plan.tables["t"].tiers, strict=True) if t.group_size > 1)
    assert found.cost_before.input_ids == pytest.approx(sent)
    assert found.cost_before.static_memory_bytes == plan.predicted.static_memory_bytes
    assert found.saved_seconds > 0
    assert found.moving_seconds == moving_seconds(plan.cluster, found.nbytes) > 0
    assert found.steps_to_pay == pytest.approx(found.moving_seconds / found.saved_seconds)
    # Its own profile changes nothing.
    same = replan(plan, {"t": old}, older={"t": old})
    assert same.nbytes == 0
    for mine, planned in zip(same.cost_before.collectives, plan.predicted.collectives, strict=True):
        assert mine.key == planned.key
        assert (mine.nbytes, mine.excess_bytes) == pytest.approx((planned.nbytes, planned.excess_bytes))
    assert same.saved_seconds == pytest.approx(0, abs=1e-12)
    assert same.steps_to_pay == float("inf") or same.moving_seconds == 0
    with pytest.raises(PlanError, match="not the one that the plan was made from"):
        replan(plan, {"t": new}, older={"t": new})
    with pytest.raises(PlanError, match="no table 'x'"):
        replan(plan, {"x": new}, older={"t": old})
