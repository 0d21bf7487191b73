"""The formulas of design section 3, against values worked by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from flexshard.costmodels import (
    Cost,
    breakpoints,
    column_wise_cost,
    normalized_costs,
    overlap_of,
    placement_cost,
    row_lines,
    strategy_name,
    table_wise_cost,
)
from flexshard.errors import JobError, TableError
from flexshard.profiling import AccessProfile, LengthMoments
from flexshard.tables import Table, expected_distinct
from flexshard.topologies import Cluster, CollectiveRate, Level

# 2 nodes x 4 ranks; round figures, so that results can be worked on paper.
CLUSTER = Cluster(
    "by-hand",
    2,
    4,
    1e9,
    0.0,
    (
        Level(1, None, CollectiveRate(1e-3, 1e6)),
        Level(4, CollectiveRate(2e-3, 1e7), CollectiveRate(3e-3, 2e6)),
        Level(8, CollectiveRate(4e-3, 1e6), None),
    ),
)
# 100 rows of 16 float32: 64 bytes a row. Row-wise Adagrad keeps 4 bytes a row: 1/16 of the weights.
PROFILE = AccessProfile.from_counts([50] * 10 + [1] * 40, num_samples=100, num_rows=100)
TABLE = Table("t", 100, 16, PROFILE)


def cost(group_size: int, rows: int = 100, reads: float = 200.0) -> Cost:
    return placement_cost(TABLE, CLUSTER, group_size, rows=rows, reads=reads)


def test_row_wise() -> None:
    c = cost(8)
    assert c.static_memory_bytes == pytest.approx(100 * 64 * (1 + 1 / 16) / 8)  # 850
    assert c.dynamic_memory_bytes == 2 * 200 * 64  # 25,600
    assert c.input_ids == 200
    assert c.rows_read == 200
    # Ids, rows, gradients: 12 ms of latency, 200 times 4 + 64 + 64 bytes.
    assert [(one.content, one.calls, one.nbytes) for one in c.collectives] == [
        ("embeddings", 1, 12800),
        ("gradients", 1, 12800),
        ("ids", 1, 800),
    ]
    assert c.dynamic_comm_seconds == pytest.approx(3 * 4e-3 + 200 * 132 / 1e6)  # 38.4 ms
    assert c.static_comm_seconds == 0
    assert c.exposed_seconds == pytest.approx(0.0384)


def test_data_parallel() -> None:
    c = cost(1)
    assert c.static_memory_bytes == pytest.approx(100 * 64 * (3 + 1 / 16))  # 19,600
    assert c.dynamic_memory_bytes == 200 * 64
    assert c.input_ids == 0
    assert c.rows_read == 200
    assert c.dynamic_comm_seconds == 0
    assert c.static_comm_seconds == pytest.approx(1e-3 + 100 * 64 / 1e6)  # 7.4 ms


def test_flex() -> None:
    c = cost(4)
    assert c.static_memory_bytes == pytest.approx(100 * 64 * (3 + 1 / 16) / 4)  # 4,900
    assert c.dynamic_memory_bytes == 2 * 200 * 64
    assert c.input_ids == 200
    assert c.dynamic_comm_seconds == pytest.approx(3 * 2e-3 + 200 * 132 / 1e7)  # 8.64 ms
    assert c.static_comm_seconds == pytest.approx(3e-3 + 100 * 64 / 4 / 2e6)  # 3.8 ms
    assert c.exposed_seconds == pytest.approx(8.64e-3 + 3.8e-3)


def test_gradients_of_16_bit_rows_travel_as_float32() -> None:
    table = replace(TABLE, dtype="float16", optimizer="adam")
    c = placement_cost(table, CLUSTER, 4, rows=100, reads=200.0)
    found = {one.content: one.nbytes for one in c.collectives}
    # 32 bytes a row; copies' sums of Adam carry how often the row was read.
    assert found == {"ids": 800, "embeddings": 200 * 32, "gradients": 200 * 64, "replicas": 100 * 68 / 4}


def test_column_wise_is_row_wise_but_for_ids_and_reads() -> None:
    c = column_wise_cost(TABLE, CLUSTER, rows=100, reads=200.0)
    r = cost(8)
    assert (c.input_ids, c.rows_read) == (1600, 1600)
    assert (c.static_memory_bytes, c.dynamic_memory_bytes) == (r.static_memory_bytes, r.dynamic_memory_bytes)
    assert c.exposed_seconds == pytest.approx(r.exposed_seconds + 7 * 800 / 1e6), "ids go to all"


def test_table_wise_owner_serves_everybody() -> None:
    c = table_wise_cost(TABLE, CLUSTER, reads=200.0, share=0.5)
    assert c.static_memory_bytes == pytest.approx(100 * 64 * (1 + 1 / 16) / 2)
    assert c.rows_read == 1600, "of half a row each"
    assert c.dynamic_memory_bytes == 800 * 64
    assert c.dynamic_comm_seconds == pytest.approx(3 * 4e-3 + (800 * 128 + 1600 * 4) / 1e6)


def test_costs_add_and_pay_latency_once() -> None:
    together, parts = cost(8, 100, 200.0), cost(8, 60, 150.0) + cost(8, 40, 50.0)
    assert parts.exposed_seconds == pytest.approx(together.exposed_seconds)
    assert parts.memory_bytes == pytest.approx(together.memory_bytes)
    mixed = cost(1, 10, 150.0) + cost(4, 30, 40.0) + cost(8, 60, 10.0)
    assert list(dict.fromkeys(c.name for c in mixed.collectives)) == [
        "all_reduce@1",
        "all_reduce@4",
        "all_to_all@4",
        "all_to_all@8",
    ]
    assert mixed.rows_read == 200
    assert Cost() + mixed == mixed


def test_an_empty_set_of_rows_uses_no_collective() -> None:
    assert cost(8, 0, 0.0) == Cost(collectives=(), dynamic_memory_sigma_bytes=None)


@pytest.mark.parametrize(
    ("optimizer", "dtype", "replicated", "sharded"),
    [
        ("sgd", "float32", 3.0, 1.0),  # weights, gradient, bucket
        ("rowwise_adagrad", "float32", 3 + 1 / 16, 1 + 1 / 16),  # 4 bytes of 64
        ("adagrad", "float32", 4.0, 2.0),
        ("adam", "float32", 5.0, 3.0),  # two moments
        ("partial_rowwise_adam", "float32", 4 + 1 / 16, 2 + 1 / 16),
        ("adam", "float16", 9.0, 5.0),  # state stays float32, 8 bytes on 2, and so do gradient and bucket
    ],
)
def test_kappa_counts_what_a_rank_holds(optimizer: str, dtype: str, replicated: float, sharded: float) -> None:
    table = Table("t", 100, 16, PROFILE, dtype, optimizer)
    assert table.kappa_replicated == pytest.approx(replicated)
    assert table.kappa_sharded == pytest.approx(sharded)
    assert Table("t", 100, 16, PROFILE, dtype, optimizer, 6.0).kappa_replicated == 6.0


def test_breakpoints_of_the_paper() -> None:
    # kappa = 6, B = 4096, U = 32, D = 256: p = (6 - (1 + 1/256)/32) / 4096.
    cluster = Cluster.preset("a100-4x8-roce")
    table = Table("t", 100, 256, PROFILE, replication_multiplier=6)
    dp = breakpoints(table, cluster, 1, 4096)
    assert dp.memory == pytest.approx((6 - (1 + 1 / 256) / 32) / 4096)
    assert dp.memory == pytest.approx((6 - 1 / 32) / 4096, rel=1e-4), "the design's rounded form"
    # One row less on the wire saves 2/25.8e9 s per byte and read, and its id; its all-reduce costs 1/179e9.
    moved = 2 + 4 / 1024
    assert dp.communication == pytest.approx(25.8 / (moved * 179) / 4096)
    flex = breakpoints(table, cluster, 8, 4096)
    assert flex.memory == float("inf")
    assert flex.communication == pytest.approx(1 / (8 * 12.36) / (moved / 25.8 - moved / 77) / 4096)
    assert flex.both == float("inf")


def test_normalised_costs_meet_one_at_the_breakpoints() -> None:
    for size in (1, 4):
        at = breakpoints(TABLE, CLUSTER, size, 10)
        for p, which in ((at.memory, 0), (at.communication, 1)):
            if np.isfinite(p):
                assert normalized_costs(TABLE, CLUSTER, size, 10, [p])[which][0] == pytest.approx(1.0)
                assert normalized_costs(TABLE, CLUSTER, size, 10, [2 * p])[which][0] < 1.0
                assert normalized_costs(TABLE, CLUSTER, size, 10, [p / 2])[which][0] > 1.0


def test_normalised_costs_are_ratios_of_costs() -> None:
    # 100 rows of p = 0.2 at B = 10: 200 reads. Latencies are per iteration and not part of equation (1).
    memory, comm = normalized_costs(TABLE, CLUSTER, 4, 10, [0.2])
    assert memory[0] == pytest.approx(cost(4).memory_bytes / cost(8).memory_bytes)
    assert comm[0] == pytest.approx((26400 / 1e7 + 1600 / 2e6) / (26400 / 1e6))


@given(st.sampled_from([1, 4, 8]), st.integers(1, 1000), st.floats(0, 1e6))
def test_lines_and_placements_are_one_model(size: int, rows: int, reads: float) -> None:
    lines = row_lines(TABLE, CLUSTER)
    k = lines.group_sizes.index(size)
    c = cost(size, rows, reads)
    memory = 64 * (lines.memory_fixed[k] * rows + lines.memory_per_read[k] * reads)
    latency = sum(one.calls * one.alpha_seconds for one in c.collectives)
    seconds = 64 * (lines.comm_fixed[k] * rows + lines.comm_per_read[k] * reads) + latency
    assert c.memory_bytes == pytest.approx(memory)
    assert c.exposed_seconds == pytest.approx(seconds)


def test_expected_distinct_reads() -> None:
    # Of 4 samples: 1 - 0.5^4; a row of p = 1e-12 in a million samples is read a millionth of the time.
    assert expected_distinct([0.5, 0.0, 1.0, 7.0], 4).tolist() == pytest.approx([0.9375, 0.0, 1.0, 1.0])
    assert expected_distinct([1e-12], 10**6)[0] == pytest.approx(1e-6, rel=1e-5)
    # w of the table: p = 0.5 and 0.01 in 10 samples.
    assert TABLE.reads(10).tolist() == pytest.approx([5.0, 0.1])
    assert TABLE.reads(10, index_dedup=True).tolist() == pytest.approx([1 - 0.5**10, 1 - 0.99**10])


def test_overlap_hides_its_share() -> None:
    hidden = overlap_of({"all_to_all@4": 0.5, "all_reduce@4": 1.0}, CLUSTER)
    c = placement_cost(TABLE, CLUSTER, 4, rows=100, reads=200.0, overlap=hidden)
    assert c.exposed_seconds == pytest.approx(8.64e-3 / 2)
    assert c.comm_seconds == pytest.approx(8.64e-3 + 3.8e-3)
    assert overlap_of("paper", CLUSTER) == {("all_to_all", 4): 1.0, ("all_reduce", 4): 1.0}
    assert overlap_of(None, CLUSTER) == {}


@pytest.mark.parametrize(
    ("overlap", "message"),
    [
        ({"all_to_all@5": 0.5}, "which the cluster does not have; it has all_reduce@1, "),
        ({"all_to_all@4": 1.5}, "between 0 and 1, found 1.5"),
        ("some", "must be 'paper' or fractions"),
    ],
)
def test_wrong_overlaps(overlap: object, message: str) -> None:
    with pytest.raises(JobError, match=message):
        overlap_of(overlap, CLUSTER)  # type: ignore[arg-type]


def test_memory_quantile_from_length_moments() -> None:
    # Lengths 1 and 3 alternately: mean 2, variance 1. A batch of 100: mean 200, deviation 10, so 5 % of the mean.
    profile = AccessProfile.from_counts([100, 100], 100, lengths=LengthMoments(100, 200, 500, 3))
    table = Table("t", 2, 16, profile)
    assert table.length_variation(100) == pytest.approx(0.05)
    c = placement_cost(table, CLUSTER, 8, rows=2, reads=200.0, variation=table.length_variation(100))
    assert c.dynamic_memory_p999_bytes == pytest.approx(2 * 64 * (200 + 3.0902323 * 10))
    assert (c + c).dynamic_memory_p999_bytes == pytest.approx(2 * (c.dynamic_memory_p999_bytes or 0))
    assert cost(8).dynamic_memory_p999_bytes is None


def test_the_normal_quantile_holds_on_simulated_batches() -> None:
    random = np.random.default_rng(0)
    lengths = random.geometric(0.05, 200_000)
    profile = AccessProfile.from_counts([int(lengths.sum())], lengths.size, lengths=LengthMoments.of(lengths))
    variation = Table("t", 1, 16, profile).length_variation(512)
    assert variation is not None
    batches = random.choice(lengths, (20_000, 512)).sum(axis=1)
    predicted = batches.mean() * (1 + 3.09 * variation)
    assert np.quantile(batches, 0.999) == pytest.approx(predicted, rel=0.01)


def test_strategies_have_torchrecs_names() -> None:
    assert [strategy_name(g, 8) for g in (1, 4, 8)] == ["data_parallel", "flex", "row_wise"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rows": 0}, "rows must be at least 1"),
        ({"dim": 0}, "dim must be at least 1"),
        ({"rows": 50}, "has 50 rows, but its profile is of 100"),
        ({"dtype": "int8"}, "dtype must be one of float64"),
        ({"optimizer": "lion"}, "optimizer must be one of sgd"),
        ({"replication_multiplier": 0.5}, "replication_multiplier must be at least 1"),
        ({"replication_multiplier": float("nan")}, "replication_multiplier must be at least 1"),
    ],
)
def test_wrong_tables(fields: dict[str, object], message: str) -> None:
    arguments = {"name": "t", "rows": 100, "dim": 16, "profile": PROFILE} | fields
    with pytest.raises(TableError, match=message):
        Table(**arguments)  # type: ignore[arg-type]
