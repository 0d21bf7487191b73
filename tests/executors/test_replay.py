"""Replay by hand, at size, and with bad input; NumPy only."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torchrec")

import torch
from benchmarks.calls import compared

import flexshard
from flexshard import AccessProfile, Cluster, Table
from flexshard.costmodels import Layout
from flexshard.embeddings import IndexBijection
from flexshard.errors import DataError, PlanError
from flexshard.executors import Lookups, replay, split_by_rank
from flexshard.planner import Plan, Tier
from flexshard.tables import translation_bytes
from flexshard.topologies import CollectiveRate, Level


def plan_for(nodes: int, ranks_per_node: int, rows: int, sizes: dict[int, int], first_holder: int = 0) -> Plan:
    from dataclasses import replace

    cluster = Cluster.preset("a100-4x8-roce", nodes=nodes)
    assert cluster.ranks_per_node == ranks_per_node
    profile = AccessProfile.from_counts(np.arange(rows, 0, -1), num_samples=rows)
    plan = flexshard.solve([Table("t", rows, 4, profile)], cluster, batch_size=2, index_dedup=False)
    tiers, first = [], 0
    for size, number in sizes.items():
        holder = min(first_holder, size - 1)
        tiers.append(Tier("", size, number, first, 0.0, None, 0.0, 0.0, 0.0, first_holder=holder))
        first += number
    return replace(plan, tables={"t": replace(plan.tables["t"], tiers=tuple(tiers))})


def test_by_hand() -> None:
    # 16 ranks in two nodes; row k has position k. Rows 0, 1 are on every rank, 2 to 9 in every node, 10 to 99 once.
    plan = plan_for(2, 8, 100, {1: 2, 8: 8, 16: 90})
    # Rank 0 asks for row 0 (its own), 3 (position 1 of its node) and 12 (rank 2); rank 9 for row 10 (rank 0) twice.
    step = {"t": Lookups(np.array([0, 3, 12, 10, 10]), np.array([0, 0, 0, 9, 9]))}
    found = replay(plan, [step], {"t": IndexBijection.identity(100)})
    flex, everywhere = found.find("embeddings", 8), found.find("embeddings", 16)
    assert flex is not None
    assert everywhere is not None
    row = 4 * 4
    assert flex.received[0].tolist() == [row] + [0] * 15
    assert flex.sent[0].tolist() == [0, row] + [0] * 14
    assert everywhere.received[0, [0, 9]].tolist() == [row, 2 * row]
    assert everywhere.sent[0, [0, 2]].tolist() == [2 * row, row]
    # Between nodes: ids (4 bytes) and gradients of rank 9 to rank 0, and rows back.
    assert found.all_to_all_scale_out_bytes[0, 9] == 2 * (4 + row)
    assert found.all_to_all_scale_out_bytes[0, 0] == 2 * row
    assert found.all_to_all_scale_out_bytes.sum() == 2 * (4 + 2 * row)
    replicas = found.find("replicas", 8)
    assert replicas is not None
    assert replicas.sent[0, 5] == row  # 8 rows over 8 positions
    assert found.rows_served[0].tolist() == [3, 1, 1] + [0] * 13  # row 0 for itself, row 10 twice; rows 3; 12
    assert found.dynamic_memory_bytes[0, 0] == (3 + 2) * row


def test_no_row_is_lost_at_a_thousand_ranks() -> None:
    rows = 50_000
    plan = plan_for(128, 8, rows, {1: 100, 8: 10_000, 1024: rows - 10_100})
    generator = np.random.default_rng(1)
    ids, owners = generator.integers(0, rows, 200_000), generator.integers(0, 1024, 200_000)
    ranking = IndexBijection(generator.permutation(rows), rows)
    found = replay(plan, [{"t": Lookups(ids, owners)}], {"t": ranking})
    assert found.rows_served.sum() == ids.size
    for content in ("ids", "embeddings", "gradients"):
        for size in (8, 1024):
            traffic = found.find(content, size)
            assert traffic is not None
            assert traffic.sent.sum() == traffic.received.sum() > 0


def test_tiers_begin_with_the_rank_that_they_say() -> None:
    # As by hand above; the row-wise rows begin with rank 5, those in every node with local rank 5.
    plan = plan_for(2, 8, 100, {1: 2, 8: 8, 16: 90}, first_holder=5)
    step = {"t": Lookups(np.array([0, 3, 12, 10, 21]), np.array([0, 0, 0, 9, 9]))}
    found = replay(plan, [step], {"t": IndexBijection.identity(100)})
    flex, everywhere = found.find("embeddings", 8), found.find("embeddings", 16)
    assert flex is not None
    assert everywhere is not None
    row = 4 * 4
    # Row 3 is second in its node: local rank 6. Row 12 is third (rank 7), 10 first (rank 5), 21 twelfth (rank 0).
    assert flex.sent[0].tolist() == [0] * 6 + [row] + [0] * 9
    assert everywhere.sent[0].tolist() == [row, 0, 0, 0, 0, row, 0, row] + [0] * 8
    assert found.rows_served[0].tolist() == [2, 0, 0, 0, 0, 1, 1, 1] + [0] * 8


def test_a_tier_that_begins_with_no_rank_of_its_group_is_refused() -> None:
    tier = Tier("row_wise", 4, 10, 0, 0.0, None, 0.0, 0.0, 0.0, first_holder=4)
    message = "table 'a': the tier of group size 4 begins at local rank 4, and a group has 0 to 3; plan again"
    with pytest.raises(PlanError, match=message):
        Layout.of({"a": [tier]}, {"a": 10}, 4)


@pytest.mark.parametrize("holder", [0, 1, 3])
@pytest.mark.parametrize("sizes", [{1: 7, 2: 20, 4: 73}, {4: 100}, {2: 3, 1: 97}, {1: 100}, {4: 1, 2: 98, 1: 1}])
def test_every_row_has_one_slot_per_copy(sizes: dict[int, int], holder: int) -> None:
    tiers, first = [], 0
    for size, number in sizes.items():
        tiers.append(Tier("", size, number, first, 0.0, None, 0.0, 0.0, 0.0, first_holder=min(holder, size - 1)))
        first += number
    layout = Layout.of({"a": tiers, "b": tiers}, {"a": 100, "b": 100}, 4)
    locations = np.concatenate([layout.locations(table, np.arange(100)) for table in (0, 1)])
    assert np.unique(locations).size == 200
    for table in (0, 1):
        for asking in range(4):
            holder, level, slot = layout.holder(table, np.arange(100), asking)
            for rank in range(4):
                for index, size in enumerate(layout.group_sizes):
                    piece = layout.piece(table, index, rank % size)
                    mine = (holder == rank) & (level == index)
                    if mine.any():  # the rank is of the asking rank's group
                        assert np.flatnonzero(mine).tolist() == list(piece.positions)
                        assert slot[mine].tolist() == list(range(piece.slots.start, piece.slots.stop))


def test_static_memory_is_the_plans_own() -> None:
    rows = 4096
    profile = AccessProfile.from_counts(np.arange(rows, 0, -1), num_samples=rows)
    cluster = Cluster.preset("a100-4x8-roce", nodes=2)
    for translation in ("loader", "device"):
        plan = flexshard.solve([Table("t", rows, 4, profile)], cluster, batch_size=64, translation=translation)
        found = replay(plan, [{}], {"t": profile})
        # Tiers are rounded up to whole rows on every rank.
        slack = 3 * 16 * plan.tables["t"].kappa_replicated
        assert 0 <= found.static_memory_bytes - plan.predicted.static_memory_bytes < slack


def test_of_rows_behind_a_cache_a_rank_has_the_caches_places() -> None:
    rate = CollectiveRate(1e-5, 1e10)
    levels = (Level(1, None, rate), Level(2, rate, rate), Level(4, rate, None))
    cluster = Cluster("host", 2, 2, 64e9, 0.0, levels, host_bytes_per_s=20e9)
    profile = AccessProfile.from_counts(np.floor(1e5 / np.arange(1, 5_001)).astype(np.int64), num_samples=200_000)
    how = {"batch_size": 16, "budget": "-200KB", "host_memory": "1GiB"}
    plan = flexshard.solve([Table("items", 5_000, 64, profile)], cluster, **how)
    assert plan.tables["items"].cache is not None
    ids = np.arange(64)
    found = replay(plan, [{"items": Lookups(ids, ids % 4)}], {"items": profile})
    assert found.static_memory_bytes == pytest.approx(plan.predicted.static_memory_bytes, rel=1e-6)


def test_a_rank_looks_a_list_of_a_deduplicated_table_up_once() -> None:
    lists = [[5, 6], [5, 6], [7], [5, 6], [], [], [6, 5], [5, 6]]
    samples = {"a": (np.concatenate(lists).astype(np.int64), np.array([len(one) for one in lists]))}
    (step,) = split_by_rank(samples, world_size=2, batch_size=4, deduplicated=["a"])
    assert step["a"].ids.tolist() == [5, 6, 7, 6, 5, 5, 6]
    assert step["a"].ranks.tolist() == [0, 0, 0, 1, 1, 1, 1]
    (step,) = split_by_rank(samples, world_size=2, batch_size=4)
    assert step["a"].ids.size == 11


def test_samples_go_to_ranks_in_turn() -> None:
    values, lengths = np.arange(10), np.array([1, 2, 0, 3, 1, 1, 2])
    steps = list(split_by_rank({"t": (values, lengths)}, world_size=2, batch_size=1))
    assert [step["t"].ids.tolist() for step in steps] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert [step["t"].ranks.tolist() for step in steps] == [[0, 1, 1], [1, 1, 1], [0, 1]]
    with pytest.raises(DataError, match="7 samples are less than one step"):
        list(split_by_rank({"t": (values, lengths)}, world_size=4, batch_size=2))


def test_bad_input_is_named() -> None:
    plan = plan_for(2, 8, 100, {1: 2, 8: 8, 16: 90})
    ranking = {"t": IndexBijection.identity(100)}
    with pytest.raises(DataError, match="id 100 is outside 0 to 99"):
        replay(plan, [{"t": Lookups(np.array([100]), np.array([0]))}], ranking)
    with pytest.raises(DataError, match="rank 16 is outside 0 to 15"):
        replay(plan, [{"t": Lookups(np.array([0]), np.array([16]))}], ranking)
    with pytest.raises(PlanError, match="no table 'x'"):
        replay(plan, [{"x": Lookups(np.array([0]), np.array([0]))}], ranking)
    with pytest.raises(PlanError, match="its tiers need a ranking"):
        replay(plan, [{}], {})
    with pytest.raises(DataError, match="no batches"):
        replay(plan, [], ranking)


def test_a_place_takes_four_bytes_a_row_however_many_ranks() -> None:
    """Locations of 1,024 ranks' rows do not fit into 31 bits here; positions do."""
    from flexshard.embeddings import IndexBijection
    from flexshard.executors.sharding.translation import LocationTable
    from flexshard.planner import Tier

    rows, world = 2_000_000, 1024
    tiers = [
        Tier("data_parallel", 1, rows - 1000, 0, 0.0, None, 0.0, 0.0, 0.0),
        Tier("row_wise", world, 1000, rows - 1000, 0.0, None, 0.0, 0.0, 0.0),
    ]
    layout = Layout.of({"a": tiers, "b": tiers}, {"a": rows, "b": rows}, world)
    assert layout.location_type is np.int64
    ranking = np.random.default_rng(0).permutation(rows)
    table = LocationTable(layout, 1, IndexBijection(ranking, rows), torch.device("cpu"))
    assert table.nbytes == 4 * rows
    ids = torch.from_numpy(ranking[[0, 5, rows - 1, rows - 1000]].copy())
    positions = np.array([0, 5, rows - 1, rows - 1000])
    assert table.locations(ids).tolist() == layout.locations(1, positions).tolist()


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("others", [1000, 1 << 33])
@pytest.mark.parametrize("hot", [0, 1, 64, 200])
def test_rows_without_copies_are_found_by_arithmetic(
    hot: int, others: int, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beside another table of so many rows that locations are eight bytes; places stay four."""
    from flexshard.embeddings import IndexBijection
    from flexshard.executors.sharding import translation
    from flexshard.planner import Tier

    if plain:
        monkeypatch.setattr(translation, "has_numba", lambda: False)
    rows, world = 1000, 4
    tiers = [
        Tier("data_parallel", 1, hot // 2, 0, 0.0, None, 0.0, 0.0, 0.0),
        Tier("flex", 2, hot - hot // 2, hot // 2, 0.0, None, 0.0, 0.0, 0.0, first_holder=1),
        Tier("row_wise", world, rows - hot, hot, 0.0, None, 0.0, 0.0, 0.0, first_holder=3),
    ]
    placed = [tier for tier in tiers if tier.rows]
    large = [Tier("row_wise", world, others, 0, 0.0, None, 0.0, 0.0, 0.0)]
    layout = Layout.of({"a": large, "b": placed}, {"a": others, "b": rows}, world)
    assert (layout.location_type is np.int64) == (others > rows)
    ranking = np.random.default_rng(hot).permutation(rows)[:hot]
    bijection = IndexBijection(ranking, rows)
    table = translation.LocationTable(layout, 1, bijection, torch.device("cpu"))
    ids = np.random.default_rng(1).integers(0, rows, 5000)
    expected = layout.locations(1, np.concatenate([ranking, np.setdiff1d(np.arange(rows), ranking)]).argsort()[ids])
    for kind in (torch.int32, torch.int64):
        assert table.locations(torch.from_numpy(ids).to(kind)).tolist() == expected.tolist()
    assert table.nbytes == (translation_bytes(rows, hot) if hot else 0)
    assert bijection.positions(ids).tolist() == [*bijection.position_of[ids]]
    assert bijection.rows(np.arange(rows)).tolist() == bijection.row_at.tolist()


def test_rows_dealt_by_id_are_as_even_as_those_dealt_by_popularity() -> None:
    """Of what is left to row-wise, popular rows fall to the ranks by chance; so many do that it evens out."""
    rows, world, hot = 100_000, 8, 1000
    p = 1.0 / np.arange(1, rows + 1) ** 1.05
    popularity = np.random.default_rng(0).permutation(rows)  # position of each id
    load = p[popularity]
    cold = np.flatnonzero(popularity >= hot)
    by_id = np.bincount(np.arange(cold.size) % world, weights=load[cold])
    assert by_id.max() / by_id.mean() < 1.05


@pytest.mark.parametrize("seed", range(4))
def test_what_is_priced_is_what_is_called(seed: int) -> None:
    """Of random jobs of up to 50 groups: the calls of every kind, level and content, and bytes for the same batches; to
    the byte where it is known what each rank asks each for.
    """
    _, same, nbytes = compared(seed)
    assert same
    for (_, _, content), (expected, exact, counted) in nbytes.items():
        assert counted == exact, content
        rows = content in ("embeddings", "gradients")  # between which is padding
        assert counted == pytest.approx(expected, rel=0.12 if rows else 1e-12), content
