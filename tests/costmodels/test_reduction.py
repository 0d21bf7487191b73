"""Dense and sparse reduction of replicated tiers, by hand and by drawing batches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from flexshard import AccessProfile, Cluster, Plan, Table, solve
from flexshard.costmodels import gathered_bytes, replica_reduction, touched_rows
from flexshard.errors import JobError
from flexshard.topologies import CollectiveRate, Level


def cluster_of(all_reduce: float = 1e9, *, nodes: int = 4, width: int = 2, alpha: float = 0.0) -> Cluster:
    world = nodes * width
    fast, slow = CollectiveRate(alpha, 10e9), CollectiveRate(alpha, 1e9)
    reduce = CollectiveRate(alpha, all_reduce)
    levels = Level(1, None, reduce), Level(width, fast, reduce), Level(world, slow, None)
    return Cluster("c", nodes, width, 1e12, 0.0, levels)


def test_touched_rows_by_hand() -> None:
    # Two rows: p = 1/2 and 1/4. A group of 1 with B = 2: 1 - (1/2)^2 = 3/4 and 1 - (3/4)^2 = 7/16.
    table = Table("t", 2, 4, AccessProfile.from_counts([2, 1], num_samples=4))
    mean, variance = touched_rows(table, 2, 1, 0, 2)
    assert mean == pytest.approx(3 / 4 + 7 / 16)
    assert variance == pytest.approx(3 / 16 + 7 / 16 * 9 / 16)
    # The second row alone, split over a group of 2, which reads it with four samples.
    mean, _ = touched_rows(table, 2, 2, 1, 1)
    assert mean == pytest.approx((1 - (3 / 4) ** 4) / 2)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(0, 5), st.tuples(*[st.integers(0, 17)] * 2))
def test_touched_rows_of_any_range_are_those_of_its_rows(counts: list[int], unread: int, ends: tuple[int, int]) -> None:
    table = Table("t", len(counts) + unread, 4, AccessProfile.from_counts(counts, num_samples=10))
    first, last = sorted(min(end, table.rows) for end in ends)
    chances = np.zeros(table.rows)
    chances[: len(counts)] = 1 - (1 - np.sort(counts)[::-1] / 10) ** (3 * 2)
    inside = chances[first:last]
    mean, variance = touched_rows(table, 3, 2, first, last - first)
    assert mean == pytest.approx(inside.sum() / 2, abs=1e-12)
    assert variance == pytest.approx((inside * (1 - inside)).sum() / 2, abs=1e-12)


def test_gathered_bytes_by_hand() -> None:
    # 8 ranks, groups of 2: four copies. Without variance each sends 3 rows of 16 bytes and a slot of 4.
    assert gathered_bytes(cluster_of(), 2, [(3.0, 0.0)], [16]) == 4 * 3 * (16 + 4)
    # Blom: the largest of 4 normal numbers is about 1.05 standard deviations above their mean.
    more = gathered_bytes(cluster_of(), 2, [(3.0, 4.0)], [16])
    assert more == pytest.approx(4 * (3 + 1.0491 * 2) * 20, rel=1e-3)


def test_every_store_is_padded_by_itself() -> None:
    """Copies send as many entries of each store as the fullest of them; of a store's tables together."""
    touched, nbytes = [(3.0, 4.0), (5.0, 9.0), (2.0, 1.0)], [16, 16, 32]
    apart = [
        gathered_bytes(cluster_of(), 2, touched[first:last], nbytes[first:last]) for first, last in ((0, 2), (2, 3))
    ]
    assert gathered_bytes(cluster_of(), 2, touched, nbytes, [0, 0, 1]) == pytest.approx(sum(apart))
    assert gathered_bytes(cluster_of(), 2, touched, nbytes) < 0.97 * sum(apart)


def test_the_padding_is_that_of_drawn_batches() -> None:
    rows, batch, copies = 500, 16, 8
    p = 0.5 / (1 + np.arange(rows))
    table = Table("t", rows, 4, AccessProfile.from_probabilities(p, np.ones(rows, np.int64)))
    generator = np.random.default_rng(0)
    drawn = generator.random((400, copies, rows)) < 1 - (1 - p) ** batch
    largest = drawn.sum(axis=2).max(axis=1).mean()
    expected = gathered_bytes(cluster_of(), 1, [touched_rows(table, batch, 1, 0, rows)], [table.row_bytes])
    assert expected / copies / (table.row_bytes + 4) == pytest.approx(largest, rel=0.02)


def tables() -> list[Table]:
    """One table whose rows are all hot, and one of many rows that are rarely read."""
    hot = AccessProfile.from_probabilities(np.full(100, 0.5), np.ones(100, np.int64))
    cold = AccessProfile.from_probabilities(np.full(2000, 1e-4), np.ones(2000, np.int64))
    return [Table("hot", 100, 8, hot), Table("cold", 2000, 8, cold)]


def solved(reduction: str, cluster: Cluster) -> Plan:
    return solve(tables(), cluster, batch_size=10, budget="1GB", tiers=1, reduction=reduction)


def kinds(plan: Plan) -> dict[str, str]:
    return {name: table.tiers[0].reduction for name, table in plan.tables.items()}


def test_the_plan_chooses_per_tier() -> None:
    cluster = cluster_of(all_reduce=1e12)  # everything is replicated
    assert {t.strategy for table in solved("dense", cluster).tables.values() for t in table.tiers} == {"data_parallel"}
    assert kinds(solved("dense", cluster)) == {"hot": "dense", "cold": "dense"}
    assert kinds(solved("sparse", cluster)) == {"hot": "sparse", "cold": "sparse"}
    auto = solved("auto", cluster)
    assert kinds(auto) == {"hot": "dense", "cold": "sparse"}
    for other in ("dense", "sparse"):
        assert auto.predicted.comm_seconds < solved(other, cluster).predicted.comm_seconds
    found = {c.content: c for c in auto.predicted.collectives}
    assert list(found) == ["touched_rows", "replicas", "touched", "counts"]
    assert found["replicas"].nbytes == 100 * 8 * 4
    assert found["touched"].nbytes == 4
    assert found["touched_rows"].seconds < found["replicas"].seconds * 20  # of 20 times the rows
    reductions = (found[name] for name in ("touched_rows", "replicas", "touched"))
    assert auto.predicted.static_comm_seconds == sum(c.seconds for c in reductions)


def test_two_latencies_are_weighed() -> None:
    """With a latency that outweighs all bytes, one kind of collective is used for both tables."""
    kinds_found = set(kinds(solved("auto", cluster_of(all_reduce=1e12, alpha=1e-3))).values())
    assert len(kinds_found) == 1


def test_older_plans_keep_their_bytes(tmp_path: object) -> None:
    from flexshard.planner import plan_document

    plain = plan_document(solved("dense", cluster_of()))
    assert "reduction" not in plain["settings"]
    assert all("reduction" not in tier for table in plain["tables"] for tier in table["tiers"])
    auto = solved("auto", cluster_of(all_reduce=1e12))
    path = f"{tmp_path}/plan.json"
    auto.save(path)
    assert Plan.load(path).tables["cold"].tiers[0].reduction == "sparse"
    assert Plan.load(path).fingerprint == auto.fingerprint


def test_translation_on_the_device_is_static_memory() -> None:
    """A set of the rows that are not row-wise, and a place for each of them, on every rank."""
    loader = solve(tables(), cluster_of(), batch_size=10)
    device = solve(tables(), cluster_of(), batch_size=10, translation="device")
    held = sum((table.rows // 64 + 1) * 16 for table in tables())
    assert device.baselines["row_wise"].memory_bytes == loader.baselines["row_wise"].memory_bytes + held
    assert device.settings.budget_bytes == loader.settings.budget_bytes + held  # neutral: row-wise counts it as well
    whole = loader.baselines["data_parallel"].static_memory_bytes
    assert device.baselines["data_parallel"].static_memory_bytes == pytest.approx(whole + held + 4 * 2100)
    for table in device.tables.values():
        fewer = sum(tier.rows for tier in table.tiers if tier.group_size < 4)
        assert fewer <= sum(tier.rows for tier in loader.tables[table.name].tiers if tier.group_size < 4)
    absolute = solve(tables(), cluster_of(), batch_size=10, budget=f"{whole} B", translation="device")
    assert absolute.predicted.memory_bytes <= whole


def test_bad_choices_are_named() -> None:
    with pytest.raises(JobError, match="reduction must be one of dense, sparse, auto, found 'gather'"):
        solved("gather", cluster_of())
    with pytest.raises(JobError, match="translation must be one of loader, device, found 'gpu'"):
        solve(tables(), cluster_of(), batch_size=10, translation="gpu")


def test_sums_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without room for those of both tables, each is worked out whenever it is asked for; to the same."""
    tables = [Table(name, 20, 4, AccessProfile.from_counts(np.arange(20, 0, -1), num_samples=40)) for name in "ab"]
    expected = [touched_rows(table, 8, 2, 3, 10) for table in tables]
    kept = replica_reduction._KeptSums()
    monkeypatch.setattr(replica_reduction, "_KEPT", kept)
    monkeypatch.setattr(replica_reduction, "_MOST_COUNTS", 30)
    for _ in range(3):
        assert [touched_rows(table, 8, 2, 3, 10) for table in tables] == expected
        assert len(kept._sums) == 1
