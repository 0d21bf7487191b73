"""Costs of pooled tables against values worked out by hand, and added up."""

from __future__ import annotations

import copy
import gc
from dataclasses import replace

import numpy as np
import pytest

from flexshard import AccessProfile, Cluster, Table
from flexshard.costmodels import LocalRates, PooledCosts, PooledOption, StepWork, pooled_cost, step_phases
from flexshard.costmodels.pooled_options import POOLED_LOADS
from flexshard.costmodels.pooled_shards import column_width
from flexshard.topologies import CollectiveRate, Level

B, L, ROWS, DIM = 100, 3.0, 1_000, 256
U, W = 8, 4


def rate(alpha: float, beta: float) -> CollectiveRate:
    return CollectiveRate(alpha, beta)


CLUSTER = Cluster(
    "two nodes",
    2,
    W,
    1e12,
    0.0,
    (
        Level(1, None, rate(3.0, 1e9)),
        Level(W, rate(5.0, 8e9), rate(4.0, 2e9)),
        Level(U, rate(7.0, 4e9), None),
    ),
    host_bytes_per_s=1e9,
)
RATES = LocalRates((0.0, 1e-9, 1e-12), (0.0, 2e-9, 3e-12), 1e-12)


def table(pooling: str = "sum", **fields: object) -> Table:
    profile = AccessProfile.from_counts(np.full(ROWS, 3), 1_000)
    return Table("t", ROWS, DIM, profile, pooling=pooling, features=("f", "g"), **fields)  # type: ignore[arg-type]


def only(costs: PooledCosts, sharding_type: str, kernel: str = "fused") -> PooledOption:
    found = costs.options(table(), sharding_types=[sharding_type], compute_kernels=[kernel], cache_load_factors=[0.2])
    assert len(found) == 1
    return found[0]


IDS = U * B * L * 8 + U * B * 2 * 8  # ids of all ranks, and two lengths a sample
SUMS = U * B * 2 * DIM * 4  # of two features, float32


@pytest.mark.parametrize(
    ("sharding_type", "shards", "seconds_of_ids", "seconds_of_rows"),
    [
        ("table_wise", 1, IDS / 4e9, 2 * SUMS / 4e9),
        ("column_wise", 2, IDS / 4e9, 2 * SUMS / 2 / 4e9),
        ("table_column_wise", 2, IDS / 4e9, 2 * SUMS / 2 / 4e9),
        # A reduce-scatter and an all-gather, each half of an all-reduce over all ranks.
        ("row_wise", U, (U * B * L * 8 / U + U * B * 2 * 8) / 4e9, 2 * SUMS / 2e9),
        # Reduced inside the node, then a fourth of it from each of its ranks.
        ("table_row_wise", W, (U * B * L * 8 / W + U * B * 2 * 8) / 4e9, 2 * (SUMS / 8e9 + SUMS / W / 4e9)),
        ("grid_shard", 2 * W, (U * B * L * 8 / W + U * B * 2 * 8) / 4e9, 2 * (SUMS / 2 / 8e9 + SUMS / 2 / W / 4e9)),
        ("data_parallel", U, 0.0, ROWS * DIM * 4 / 1e9),
    ],
)
def test_what_travels(sharding_type: str, shards: int, seconds_of_ids: float, seconds_of_rows: float) -> None:
    costs = PooledCosts(CLUSTER, B)
    option = only(costs, sharding_type)
    assert option.shards == shards
    found = dict(zip(POOLED_LOADS, costs.seconds(option), strict=True))
    if sharding_type == "data_parallel":
        expected = {"on all ranks alike": seconds_of_ids + seconds_of_rows}
    else:
        expected = {f"ids {sharding_type}": seconds_of_ids, f"rows {sharding_type}": seconds_of_rows}
    for load, seconds in found.items():
        np.testing.assert_allclose(seconds, expected.get(load, 0.0))


ROWS_READ = U * B * L * DIM * 4  # a row per lookup of all ranks, float32


@pytest.mark.parametrize(
    ("sharding_type", "shards", "seconds_of_ids", "seconds_of_rows"),
    [
        ("table_wise", 1, IDS / 4e9, 2 * ROWS_READ / 4e9),
        ("column_wise", 2, IDS / 4e9, 2 * ROWS_READ / 2 / 4e9),
        ("row_wise", U, (U * B * L * 8 / U + U * B * 2 * 8) / 4e9, 2 * ROWS_READ / U / 4e9),
        ("data_parallel", U, 0.0, ROWS * DIM * 4 / 1e9),
    ],
)
def test_what_travels_without_pooling(
    sharding_type: str, shards: int, seconds_of_ids: float, seconds_of_rows: float
) -> None:
    costs, sequence = PooledCosts(CLUSTER, B), table("none")
    (option,) = costs.options(sequence, sharding_types=[sharding_type])
    assert option.shards == shards
    found = dict(zip(POOLED_LOADS, costs.seconds(option), strict=True))
    if sharding_type == "data_parallel":
        expected = {"on all ranks alike": seconds_of_ids + seconds_of_rows}
    else:
        expected = {
            f"ids sequence {sharding_type}": seconds_of_ids,
            f"rows sequence {sharding_type}": seconds_of_rows,
        }
    for load, seconds in found.items():
        np.testing.assert_allclose(seconds, expected.get(load, 0.0))
    assert costs.latency(f"sequence {sharding_type}") == (3.0 if sharding_type == "data_parallel" else 5 * 7.0)
    assert costs.received_bytes(sequence) == B * L * DIM * 4
    assert not costs.options(sequence, sharding_types=["table_row_wise", "table_column_wise", "grid_shard"])
    placed = [(option, tuple(range(shards)))]
    assert {one.content for one in pooled_cost(costs, placed).collectives} <= {
        *("sequence ids", "sequence rows", "sequence gradients", "sequence replicas")
    }


@pytest.mark.parametrize(
    ("sharding_type", "latency"),
    [
        ("table_wise", 5 * 7.0),
        ("row_wise", 3 * 7.0 + 2 * 3.0),
        ("table_row_wise", 5 * 7.0 + 2 * 5.0),
        ("data_parallel", 3.0),
    ],
)
def test_latency_of_a_sharding_type(sharding_type: str, latency: float) -> None:
    assert PooledCosts(CLUSTER, B).latency(sharding_type) == latency


def test_memory() -> None:
    costs = PooledCosts(CLUSTER, B)
    state = 4 * ROWS  # row-wise Adagrad
    whole = only(costs, "table_wise")
    assert whole.static_bytes.tolist() == [ROWS * DIM * 4 + state]
    assert whole.dynamic_bytes.tolist() == [U * B * L * 8 + SUMS]
    halves = only(costs, "column_wise")
    assert halves.static_bytes.tolist() == [ROWS * DIM * 2 + state] * 2  # each has numbers per row of its own
    blocks = only(costs, "row_wise")
    assert blocks.static_bytes.sum() == whole.static_bytes.sum()
    copies = only(costs, "data_parallel")
    assert copies.static_bytes.tolist() == pytest.approx([table().kappa_replicated * ROWS * DIM * 4] * U)
    assert costs.received_bytes(table()) == B * 2 * DIM * 4


def test_kernels() -> None:
    costs = PooledCosts(CLUSTER, B, rates=RATES)
    fused, dense, uvm, cached = (
        only(costs, "table_wise", k) for k in ("fused", "dense", "fused_uvm", "fused_uvm_caching")
    )
    ids = U * B * L
    np.testing.assert_allclose(fused.local_seconds[:, 0], [ids * (1e-9 + 1e-12 * 1024), ids * (2e-9 + 3e-12 * 1024)])
    assert dense.static_bytes[0] - fused.static_bytes[0] == ROWS * DIM * 4  # its gradient
    assert dense.local_seconds[1, 0] - fused.local_seconds[1, 0] == pytest.approx(1e-12 * ROWS * DIM * 4)
    assert uvm.static_bytes[0] == 0
    assert uvm.host_bytes[0] == fused.static_bytes[0]
    crossing = ids * DIM * 4 / 1e9
    assert costs.seconds(uvm)[1, 0] - costs.seconds(fused)[1, 0] == pytest.approx(crossing)
    assert costs.seconds(uvm)[2, 0] - costs.seconds(fused)[2, 0] == pytest.approx(crossing)
    # All rows are read alike: a fifth of them is hit a fifth of the time.
    assert costs.seconds(cached)[1, 0] - costs.seconds(fused)[1, 0] == pytest.approx(0.8 * crossing)
    assert cached.static_bytes[0] == pytest.approx(0.2 * ROWS * DIM * 4 + 4 * ROWS)


def test_column_widths_are_torchrecs() -> None:
    assert [column_width(dim) for dim in (64, 128, 256, 384, 250, 512)] == [64, 128, 128, 128, 250, 128]
    assert [column_width(64, least) for least in (1, 16, 20, 33, 64)] == [4, 16, 32, 64, 64]


def test_shards_are_cut_as_torchrec_cuts_them() -> None:
    torch = pytest.importorskip("torch")
    plan = pytest.importorskip("torchrec.distributed.sharding_plan")
    costs = PooledCosts(CLUSTER, B)
    for rows, dim, least in ((1_000, 256, None), (10, 256, 64), (7, 96, 32), (1_001, 384, 96)):
        own = Table("t", rows, dim, AccessProfile.from_counts(np.ones(5, np.int64), 10), pooling="sum")
        for option in costs.options(own, min_partition=least):
            sizes, offsets = plan.calculate_shard_sizes_and_offsets(
                torch.empty(rows, dim, device="meta"), U, W, option.sharding_type, least
            )
            assert [list(size) for size in option.sizes] == [list(map(int, size)) for size in sizes], option.name
            held = [i for i, size in enumerate(sizes) if size[0]]
            assert [list(option.offsets[i]) for i in held] == [list(map(int, offsets[i])) for i in held], option.name


@pytest.mark.parametrize("sharing", [1, 2, W])
def test_what_tables_take_together_is_what_the_busiest_ranks_wait_for(sharing: int) -> None:
    costs = PooledCosts(replace(CLUSTER, ranks_per_link=sharing), B, rates=RATES)
    names = ("table_wise", "table_wise", "row_wise", "table_row_wise", "data_parallel", "column_wise")
    ranks = ((3,), (3,), tuple(range(U)), (4, 5, 6, 7), tuple(range(U)), (0, 5))
    placed = [(only(costs, name), where) for name, where in zip(names, ranks, strict=True)]
    cost = pooled_cost(costs, placed, 1_000.0)
    loads = np.zeros((len(POOLED_LOADS), U))
    for option, where in placed:
        for shard, rank in enumerate(where):
            loads[:, rank] += costs.seconds(option)[:, shard]
    travels = [load for load, name in enumerate(POOLED_LOADS) if name not in ("look up", "update")]
    for load in travels:  # what ranks on one link carry takes the mean of them
        loads[load] = loads[load].reshape(-1, sharing).mean(axis=1).repeat(sharing)
    latency = sum(costs.latency(name) for name in dict.fromkeys(names))
    work = StepWork(0.0)
    assert sum(phase.seconds for phase in step_phases(cost, U, work)) == pytest.approx(
        loads.max(axis=1).sum() + latency
    )
    memory = np.zeros(U)
    for option, where in placed:
        np.add.at(memory, list(where), option.static_bytes + option.dynamic_bytes)
    assert cost.memory_bytes == pytest.approx(memory.max() + 1_000.0)
    exposed = loads[travels].max(axis=1).sum() + latency
    assert cost.exposed_seconds == pytest.approx(exposed)
    # Gradients of copies alone are static.
    assert cost.static_comm_seconds == pytest.approx(3.0 + ROWS * DIM * 4 / 1e9)


def test_what_other_work_hides_is_not_waited_for() -> None:
    costs = PooledCosts(CLUSTER, B, {("all_to_all", U): 0.5, ("all_reduce", 1): 1.0})
    plain = PooledCosts(CLUSTER, B)
    for name, share in (("table_wise", 0.5), ("data_parallel", 0.0)):
        np.testing.assert_allclose(costs.seconds(only(costs, name)), share * plain.seconds(only(plain, name)))
        assert costs.latency(name) == share * plain.latency(name)
    # Half an all-reduce is hidden as one is, and half of the ids.
    ids = (U * B * L * 8 / U + U * B * 2 * 8) / 4e9
    of_row_wise = dict(zip(POOLED_LOADS, costs.seconds(only(costs, "row_wise")), strict=True))
    np.testing.assert_allclose(of_row_wise["ids row_wise"], ids / 2)
    np.testing.assert_allclose(of_row_wise["rows row_wise"], 0.0)


@pytest.mark.parametrize("sharding_type", ["row_wise", "table_row_wise", "grid_shard"])
def test_blocks_of_rows_are_read_as_the_profile_says(sharding_type: str) -> None:
    costs = PooledCosts(CLUSTER, B, rates=RATES)
    counts = np.ones(ROWS, np.int64)
    counts[[0, 1, ROWS // 2]] = 3_000, 2_000, 500
    read = AccessProfile.from_counts(counts, 1_000)
    own = Table("t", ROWS, DIM, read, pooling="sum", features=("f", "g"))
    (option,) = costs.options(own, sharding_types=[sharding_type])
    held = np.array(
        [counts[first : first + rows].sum() for (rows, _), (first, _) in zip(option.sizes, option.offsets, strict=True)]
    )
    np.testing.assert_allclose(option.ids, U * B * held / 1_000)
    assert option.ids.max() > 3 * option.ids.mean()
    lengths = U * B * 2
    np.testing.assert_allclose(option.moved["all_to_all", U, "pooled ids"], 8 * (U * B * held / 1_000 + lengths))
    np.testing.assert_allclose(option.local_seconds[0] / option.ids, option.local_seconds[0, 0] / option.ids[0])
    # Which rows they are does not matter where a table is not cut by rows, nor where the profile does not know it.
    unknown = AccessProfile.from_histogram(*np.unique(counts, return_counts=True), 1_000)
    (alike,) = costs.options(replace(own, profile=unknown), sharding_types=[sharding_type])
    np.testing.assert_allclose(
        alike.ids, option.ids.sum() * np.array([one for one, _ in option.sizes]) / sum(one for one, _ in option.sizes)
    )
    (whole,), (other,) = (
        costs.options(one, sharding_types=["table_wise"]) for one in (own, replace(own, profile=unknown))
    )
    assert whole.ids == other.ids == option.ids.sum() / (2 if sharding_type == "grid_shard" else 1)


def test_on_one_rank_nothing_travels() -> None:
    alone = Cluster("one", 1, 1, 1e9, 0.0, (Level(1),))
    costs = PooledCosts(alone, B)
    assert {one.sharding_type for one in costs.options(table())} == {"data_parallel", "table_wise", "column_wise"}
    assert not any(costs.seconds(one).any() or costs.latency(one.sharding_type) for one in costs.options(table()))


def test_copies_of_costs_have_options_of_the_tables_asked_for() -> None:
    """Shards are kept by the number of their table, which another may have once the table is gone."""
    costs = PooledCosts(CLUSTER, B)
    known = [table() for _ in range(50)]
    for one in known:
        costs.options(one)
    copied = copy.deepcopy(costs)
    del known, one, costs
    gc.collect()
    for rows in range(101, 201):
        profile = AccessProfile.from_counts(np.full(rows, 3), 1_000)
        (option,) = copied.options(replace(table(), rows=rows, profile=profile), sharding_types=["table_wise"])
        assert option.sizes == ((rows, DIM),)
