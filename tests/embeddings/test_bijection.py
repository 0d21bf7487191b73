"""The index bijection."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings, strategies as st

from flexshard.embeddings import IndexBijection
from flexshard.errors import DataError, TableError


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.permutations(range(n)), st.integers(0, n))))
def test_it_is_one_to_one_and_goes_both_ways(case: tuple[int, list[int], int]) -> None:
    number, order, ranked = case
    bijection = IndexBijection(order[:ranked], number)
    ids = np.arange(number)
    positions = bijection.positions(ids)
    assert sorted(positions.tolist()) == ids.tolist()
    assert bijection.rows(positions).tolist() == ids.tolist()
    assert bijection.rows(np.arange(ranked)).tolist() == order[:ranked] or bijection.is_identity
    rest = bijection.rows(np.arange(ranked, number))
    assert rest.tolist() == sorted(rest.tolist())  # rows that nobody ranked follow in order of id


def test_bad_rankings_are_refused() -> None:
    with pytest.raises(TableError, match="names row 2 twice"):
        IndexBijection([2, 0, 2], 5)
    with pytest.raises(TableError, match="names row 7, but the table has rows 0 to 4"):
        IndexBijection([7], 5)
    with pytest.raises(TableError, match="whole row ids"):
        IndexBijection([0.5], 5)


def grouped_batches(rows: int, groups: int, batches: int, seed: int = 0) -> tuple[list[np.ndarray], np.ndarray]:
    """Batches that each read rows of one hidden group and a few others, and the group of every row."""
    generator = np.random.default_rng(seed)
    group = generator.integers(0, groups, rows)
    members = [np.flatnonzero(group == number) for number in range(groups)]
    found = []
    for _ in range(batches):
        own = generator.choice(members[int(generator.integers(0, groups))], 70)
        found.append(np.concatenate([own, generator.integers(0, rows, 10)]))
    return found, group


def test_rows_that_are_read_together_come_together() -> None:
    pytest.importorskip("igraph")
    rows, groups = 4000, 20
    batches, group = grouped_batches(rows, groups, 600)
    counts = np.bincount(np.concatenate(batches), minlength=rows)
    ranking = IndexBijection(np.lexsort((np.arange(rows), -counts)), rows)
    found = IndexBijection.by_community(batches, ranking, hot_share=0.01, seed=1)
    assert np.array_equal(np.sort(found.row_at), np.arange(rows))  # a bijection
    assert np.array_equal(found.row_at[:40], ranking.row_at[:40])  # hot rows stay
    assert np.array_equal(found.position_of[found.row_at], np.arange(rows))
    read = found.row_at[40:][counts[found.row_at[40:]] > 0]
    same = np.mean(group[read[1:]] == group[read[:-1]])
    by_frequency = ranking.row_at[counts[ranking.row_at] > 0]
    assert same > 0.95
    assert np.mean(group[by_frequency[1:]] == group[by_frequency[:-1]]) < 0.2
    # So a batch has fewer distinct prefixes of a tensor train.
    prefixes = [np.mean([np.unique(order.positions(b) // 50).size for b in batches]) for order in (ranking, found)]
    assert prefixes[1] < 0.5 * prefixes[0]
    again = IndexBijection.by_community(batches, ranking, hot_share=0.01, seed=1)
    assert np.array_equal(again.row_at, found.row_at)


@given(st.integers(1, 60), st.integers(0, 5), st.floats(0, 1), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_communities_are_always_a_bijection(rows: int, batches: int, hot: float, most: int) -> None:
    pytest.importorskip("igraph")
    generator = np.random.default_rng(rows)
    drawn = [generator.integers(0, rows, generator.integers(0, 30)) for _ in range(batches)]
    ranking = IndexBijection(generator.permutation(rows)[: rows // 2], rows)
    found = IndexBijection.by_community(drawn, ranking, hot_share=hot, pairs_per_batch=20, max_pairs=most)
    assert np.array_equal(np.sort(found.row_at), np.arange(rows))


def test_pairs_are_capped_and_kept_evenly() -> None:
    from flexshard.embeddings.ordering.communities import index_graph

    position_of = np.arange(100)
    batches = [np.array([2 * number, 2 * number + 1]) for number in range(50)] * 40  # one pair each, 40 times
    found = index_graph(batches, position_of, 0, pairs_per_batch=10, max_pairs=1600, seed=0)
    assert found.counts.sum() == 1600
    assert found.edges.shape == (50, 2)
    assert found.counts.min() >= 20  # early and late ones alike
    assert (found.edges[:, 1] == found.edges[:, 0] + 1).all()
    assert found.companions.shape == (0, 4)
    none = index_graph([np.array([0, 1])], position_of, 50, pairs_per_batch=10, max_pairs=1600, seed=0)
    assert none.edges.shape == (0, 2)  # hot rows take no part


def test_rows_too_rare_for_the_graph_join_their_companions() -> None:
    pytest.importorskip("igraph")
    rows = 6000
    batches, group = grouped_batches(rows, 10, 1500)
    counts = np.bincount(np.concatenate(batches), minlength=rows)
    ranking = IndexBijection(np.lexsort((np.arange(rows), -counts)), rows)
    found = IndexBijection.by_community(batches, ranking, hot_share=0.0, max_pairs=16 * 2000)
    rare = found.row_at[np.isin(found.row_at, ranking.row_at[2000:]) & (counts[found.row_at] > 0)]
    assert rare.size > 2000
    assert np.mean(group[rare[1:]] == group[rare[:-1]]) > 0.8


def test_bijections_are_saved(tmp_path: Path) -> None:
    found = IndexBijection([5, 0, 3], 9)
    found.save(tmp_path / "b.parquet")
    loaded = IndexBijection.load(tmp_path / "b.parquet")
    assert loaded.row_at.tolist() == found.row_at.tolist()
    assert pq.read_table(tmp_path / "b.parquet")["row"].to_pylist() == [5, 0, 3]
    with pytest.raises(TableError, match=r"none\.parquet: no such file"):
        IndexBijection.load(tmp_path / "none.parquet")
    pq.write_table(pa.table({"row": [1]}), tmp_path / "other.parquet")
    with pytest.raises(TableError, match=r"other\.parquet: not an index bijection of version 1"):
        IndexBijection.load(tmp_path / "other.parquet")
    whole = (tmp_path / "b.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TableError, match=r"cut\.parquet: not an index bijection, or damaged"):
        IndexBijection.load(tmp_path / "cut.parquet")


def test_batches_outside_the_table_are_named() -> None:
    ranking = IndexBijection.identity(10)
    with pytest.raises(TableError, match=r"an id \(or position\) 10, but the table has rows 0 to 9"):
        IndexBijection.by_community([np.array([1, 10])], ranking)
    with pytest.raises(TableError, match="hot_share is a share of the rows, found 2"):
        IndexBijection.by_community([], ranking, hot_share=2)


def test_a_batch_is_renumbered_wherever_it_is() -> None:
    torch = pytest.importorskip("torch")
    torchrec = pytest.importorskip("torchrec")
    from flexshard.embeddings import Reindex

    users, items = IndexBijection([3, 0], 5), IndexBijection(np.arange(7)[::-1], 7)
    renumber = Reindex({"user": users, "item": items, "shown": items})
    assert len(list(renumber.buffers())) == 2
    assert not renumber.state_dict()
    batch = torchrec.KeyedJaggedTensor(
        keys=["item", "day", "user", "shown"],
        values=torch.tensor([6, 0, 2, 9, 9, 3, 1, 5], dtype=torch.int32),
        lengths=torch.tensor([2, 1, 1, 1, 2, 0, 0, 1], dtype=torch.int32),
        weights=torch.arange(8.0),
    )
    found = renumber(batch)
    assert found.values().tolist() == [0, 6, 4, 9, 9, 0, 2, 1]
    assert found.values().dtype == torch.int32
    assert torch.equal(found.lengths(), batch.lengths())
    assert torch.equal(found.weights(), batch.weights())
    wrong = torchrec.KeyedJaggedTensor(keys=["user"], values=torch.tensor([5]), lengths=torch.tensor([1]))
    with pytest.raises(DataError, match="feature 'user': id 5 is outside the table's rows, 0 to 4"):
        renumber(wrong)


def test_ids_outside_the_table_have_no_position() -> None:
    for bijection in (IndexBijection([5, 3], 10), IndexBijection.identity(10)):
        for wrong in (-1, 10):
            with pytest.raises(TableError, match=rf"an id \(or position\) {wrong}, but the table has rows 0 to 9"):
                bijection.positions(np.array([0, wrong]))
            with pytest.raises(TableError, match="the table has rows 0 to 9"):
                bijection.rows(np.array([wrong]))


def test_batches_of_several_sizes_keep_them() -> None:
    torch = pytest.importorskip("torch")
    torchrec = pytest.importorskip("torchrec")
    from flexshard.embeddings import Reindex

    batch = torchrec.KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.tensor([0, 1, 2]),
        lengths=torch.tensor([1, 1, 1]),
        stride_per_key_per_rank=[[2], [1]],
    )
    found = Reindex({"a": IndexBijection([1], 3)})(batch)
    assert found.stride_per_key_per_rank() == [[2], [1]]
    assert found.values().tolist() == [1, 0, 2]
