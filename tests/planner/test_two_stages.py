"""Ids sent once a node: priced by hand, by counting batches, and beside plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flexshard import AccessProfile, Cluster, Plan, Table, explain, solve
from flexshard.costmodels import Collective, Cost, NodeReads, RowWidths, StepWork, step_phases, two_stage_cost
from flexshard.profiling import power_law_probabilities
from flexshard.topologies import CollectiveRate, Level

SLOW, FAST = CollectiveRate(1e-3, 1e6), CollectiveRate(1e-4, 1e7)
CLUSTER = Cluster("two by four", 2, 4, 1e9, 0.0, (Level(1, None, SLOW), Level(4, FAST, SLOW), Level(8, SLOW, None)))


def table_of(rows: int = 5_000, **fields: object) -> Table:
    return Table("t", rows, 8, AccessProfile.from_probabilities(power_law_probabilities(rows, 12, 1.1)), **fields)  # type: ignore[arg-type]


def test_a_step_by_hand() -> None:
    """1,000 rows a rank, 3,000 a node of four: 750 a rank cross nodes, after 1,000 within them."""
    rows = NodeReads(RowWidths(32, 64, 64), 1_000.0, 3_000.0)
    collectives = tuple(
        Collective("all_to_all", 8, 1, 1_000.0 * item, 1e-3, 1e6, 0.0, content, 700.0)
        for content, item in (("embeddings", 32), ("gradients", 64), ("ids", 4))
    )
    found = two_stage_cost(Cost(collectives=collectives), CLUSTER, [rows], None, seconds_per_id=1e-6)
    seen = {(one.group_size, one.content): one for one in found.collectives}
    assert {key: one.nbytes for key, one in seen.items()} == {
        (4, "node embeddings"): 32_000.0,
        (4, "node gradients"): 64_000.0,
        (4, "node ids"): 4_000.0,
        (8, "embeddings"): 24_000.0,
        (8, "gradients"): 48_000.0,
        (8, "ids"): 3_000.0,
    }
    # Seven others asked the hottest row's owner; one other node does, and three others ask one inside.
    assert {one.excess_bytes for key, one in seen.items() if key[0] == 8} == {100.0}
    assert {one.excess_bytes for key, one in seen.items() if key[0] == 4} == {300.0}
    assert found.index_dedup_seconds == pytest.approx(1e-3)
    assert found.dynamic_memory_bytes == 750 * 32
    within = 3e-4 + (100_000 + 900) / 1e7
    assert found.comm_seconds == pytest.approx(within + 3e-3 + (75_000 + 300) / 1e6)
    # The stages wait for each other: a step takes them one after the other.
    phases = step_phases(found, 8, StepWork(0.0))
    assert [phase.name for phase in phases] == [
        "find distinct ids",
        "ids within nodes",
        "ids",
        "embeddings",
        "embeddings within nodes",
        "gradients within nodes",
        "gradients",
    ]
    assert sum(phase.seconds for phase in phases) == pytest.approx(found.comm_seconds + 1e-3)


def test_rows_of_a_node_are_those_that_batches_have() -> None:
    table, random = table_of(), np.random.default_rng(0)
    plan = solve([table], CLUSTER, batch_size=64, index_dedup=True, tiers=1)
    (outer,) = (
        one for one in plan.baselines["once_per_node"].collectives if one.content == "ids" and one.group_size == 8
    )
    p = np.repeat(table.profile.counts, table.profile.rows) / table.profile.num_samples
    counted = [(random.random((4 * 64, len(p))) < p).any(axis=0).sum() for _ in range(20)]
    assert 4 * outer.nbytes / 4 == pytest.approx(np.mean(counted), rel=0.02)


def test_it_stands_beside_the_plan_and_is_not_run(tmp_path: Path) -> None:
    plan = solve([table_of()], CLUSTER, batch_size=64, index_dedup=True)
    per_node = plan.baselines["once_per_node"]
    assert per_node.exposed_seconds != plan.predicted.exposed_seconds
    assert "once_per_node" not in plan.costs
    assert "once_per_node" not in str(plan)
    assert "crossed nodes once a node" in explain(plan).text
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").baselines["once_per_node"] == per_node
    step = solve([table_of()], CLUSTER, batch_size=64, index_dedup=True, step=StepWork(0.01))
    assert "crossed nodes once a node" in explain(step).text


@pytest.mark.parametrize(
    ("cluster", "options"),
    [
        (CLUSTER, {"index_dedup": False}),
        (Cluster("one node", 1, 4, 1e9, 0.0, (Level(1, None, SLOW), Level(4, FAST, None))), {"index_dedup": True}),
        (Cluster("lone", 4, 1, 1e9, 0.0, (Level(1, None, SLOW), Level(4, FAST, None))), {"index_dedup": True}),
    ],
)
def test_where_there_is_nothing_to_send_once(cluster: Cluster, options: dict[str, bool]) -> None:
    plan = solve([table_of()], cluster, batch_size=64, **options)  # type: ignore[arg-type]
    assert "once_per_node" not in plan.baselines
    assert "once a node" not in explain(plan).text


def test_a_table_whose_ids_are_all_sent_keeps_them() -> None:
    """Of two tables only one sends ids once: the other's bytes, and the owner of the hottest row, are as they were."""
    often, once = table_of(), table_of(200)
    both = solve([often, Table("u", 200, 8, once.profile)], CLUSTER, batch_size=64, index_dedup="auto", tiers=1)
    per_node = both.baselines.get("once_per_node")
    assert [table.index_dedup for table in both.tables.values()].count(True) >= 1
    assert per_node is not None
    for one in per_node.collectives:
        before = next((c for c in both.predicted.collectives if c.key == one.key), None)
        assert before is None or one.nbytes <= before.nbytes


def test_pooled_tables_beside_are_as_planned() -> None:
    pooled = table_of(300, pooling="sum")
    both = solve([table_of(), replace(pooled, name="bags")], CLUSTER, batch_size=64, index_dedup=True, tiers=1)
    alone = {one.key: one for one in both.pooled_predicted.collectives}  # type: ignore[union-attr]
    beside = {one.key: one for one in both.baselines["once_per_node"].collectives if one.content.startswith("pooled")}
    assert beside
    assert beside == {key: one for key, one in alone.items() if one.content.startswith("pooled")}


@pytest.mark.parametrize("objective", ["communication", "step"])
def test_what_other_work_hides_inside_nodes_is_hidden(objective: str) -> None:
    """A step's proof weighs links by overlaps of its own, which say nothing of these calls."""
    slow = replace(CLUSTER, levels=(CLUSTER.levels[0], Level(4, CollectiveRate(1e-3, 3e6), SLOW), CLUSTER.levels[2]))
    step = StepWork(0.0) if objective == "step" else None
    how = {"batch_size": 512, "index_dedup": True, "overlap": {"all_to_all@4": 0.9}, "step": step}
    plan = solve([replace(table_of(), dim=64)], slow, objective=objective, **how)  # type: ignore[arg-type]
    inside = [one for one in plan.baselines["once_per_node"].collectives if one.content.startswith("node ")]
    assert {one.overlap for one in inside} == {0.9}


def test_the_outermost_level_may_come_first() -> None:
    """Tiers are in order of time: of a level of which nearly all is hidden, too."""
    plans = [
        solve([table_of()], CLUSTER, batch_size=64, index_dedup=True, tiers=1, overlap={"all_to_all@8": share})
        for share in (0.5, 0.99)
    ]
    assert [[tier.group_size for tier in plan.tables["t"].tiers] for plan in plans] == [[8], [8]]
    ids = [
        [one.nbytes for one in plan.baselines["once_per_node"].collectives if one.content.endswith("ids")]
        for plan in plans
    ]
    assert ids[0] == pytest.approx(ids[1])


def test_ranks_that_share_a_link_do_not_share_it_inside_nodes() -> None:
    fullest = []
    for sharing in (1, 2):
        cluster = replace(CLUSTER, ranks_per_link=sharing)
        plan = solve([table_of()], cluster, batch_size=64, index_dedup=True, tiers=1)
        fullest.append(
            [one.excess_bytes for one in plan.baselines["once_per_node"].collectives if one.content[:5] == "node "]
        )
    assert fullest[0] == pytest.approx(fullest[1])
    assert min(fullest[0]) > 0
