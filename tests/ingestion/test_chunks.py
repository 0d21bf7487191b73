"""Batches as slices of what is decoded at once: whose memory they are, which of them an error takes, and how much is
decoded at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("torchrec")

import torch

from flexshard._internal import expand
from flexshard.embeddings import InverseKeyedJaggedTensor, arrow_columns
from flexshard.errors import DataError
from flexshard.ingestion import SessionReader
from flexshard.ingestion.stored_rows import RowStreams, StoredRows


def rows_of(rows: int) -> pa.Table:
    generator = np.random.default_rng(0)
    return pa.table(
        {
            "ids": pa.array(np.arange(rows), pa.int32()),
            "lists": [[*range(number % 4)] for number in range(rows)],
            "unsigned": pa.array(np.arange(rows), pa.uint32()),
            "wide": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(2.0 * rows)), 2),
            "label": generator.random(rows).astype(np.float32),
            "hit": generator.random(rows) < 0.5,
        }
    )


@pytest.mark.parametrize("group_rows", [7, 30, 100])  # batches of many, of two and of one piece
def test_slices_of_chunks_are_what_their_rows_are(tmp_path: Path, group_rows: int) -> None:
    table, features = rows_of(100), ["ids", "lists", "unsigned"]
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=group_rows)
    for groups in ([], [["ids", "lists"]]):
        reader = SessionReader(
            tmp_path, batch_size=20, features=features, groups=groups, dense=["wide", "label", "hit"], dense_nulls="nan"
        )
        for number, batch in enumerate(reader):
            part = table.slice(20 * number, 20)
            due = InverseKeyedJaggedTensor.from_arrow(part, groups, keys=features)
            found, expected = batch.sparse_features, due.to_keyed_jagged()
            assert found.values().dtype == torch.int64
            assert found.lengths().dtype == torch.int32
            assert torch.equal(found.values(), expected.values())
            assert torch.equal(found.lengths(), expected.lengths())
            for name, tensor in batch.dense.items():
                assert tensor.tolist() == part[name].to_pylist()


def test_dense_tensors_may_be_written_to_and_hold_their_own_memory(tmp_path: Path) -> None:
    table = rows_of(100)
    pq.write_table(table, tmp_path / "a.parquet")
    seen = []
    for batch in SessionReader(tmp_path, batch_size=20, features=["ids"], dense=["wide", "label", "hit", "ids"]):
        seen.append(batch.dense["label"].clone())
        for tensor in batch.dense.values():
            assert tensor.untyped_storage().nbytes() == tensor.nbytes  # all of which is sent to other processes
            tensor.zero_()
        batch.features.plain.values().zero_()  # type: ignore[union-attr]
    assert torch.cat(seen).tolist() == table["label"].to_pylist()


def test_an_error_takes_the_batch_that_has_it(tmp_path: Path) -> None:
    """Not those of the same chunk before it."""
    labels = pa.array([1.0] * 70 + [None] + [1.0] * 29)
    pq.write_table(pa.table({"ids": range(100), "label": labels}), tmp_path / "a.parquet")
    batches = iter(SessionReader(tmp_path, batch_size=20, features=["ids"], dense=["label"]))
    assert [next(batches).sparse_features.values()[0].item() for _ in range(3)] == [0, 20, 40]
    with pytest.raises(DataError, match=r"a\.parquet: column 'label' is null in row 70"):
        next(batches)


def test_lists_of_dense_columns_are_of_one_length_in_each_batch(tmp_path: Path) -> None:
    lists = [[1.0]] * 40 + [[1.0, 2.0]] * 40
    pq.write_table(pa.table({"ids": range(80), "d": lists}), tmp_path / "a.parquet", row_group_size=50)
    widths = [
        batch.dense["d"].shape[1] for batch in SessionReader(tmp_path, batch_size=20, features=["ids"], dense=["d"])
    ]
    assert widths == [1, 1, 2, 2]
    with pytest.raises(DataError, match="column 'd' has 2 numbers in row 40, and 1 in others"):
        list(SessionReader(tmp_path, batch_size=30, features=["ids"], dense=["d"]))


def test_small_row_groups_are_decoded_at_once_and_others_in_chunks(tmp_path: Path) -> None:
    # Of 32 MiB, of 33 in chunks of 6, and of too many rows.
    for rows, columns, chunks in ((1 << 18, 16, 1), (1 << 17, 33, 6), ((1 << 18) + 1, 1, 1), (1 << 20, 1, 2)):
        table = pa.table({f"c{number}": np.arange(rows) for number in range(columns)})
        pq.write_table(table, tmp_path / "a.parquet", row_group_size=rows)
        streams = RowStreams(StoredRows(expand(tmp_path), table.column_names))
        assert len(streams.take(0, rows)) == chunks


def test_batches_of_columns_are_those_of_their_table() -> None:
    table = rows_of(50).select(["ids", "lists"])
    for groups in ([], [["lists"]]):
        due = InverseKeyedJaggedTensor.from_arrow(table.slice(10, 20), groups)
        found = InverseKeyedJaggedTensor.from_columns(arrow_columns(table), groups, rows=(10, 30))
        assert found.keys() == due.keys()
        assert torch.equal(found.to_keyed_jagged().values(), due.to_keyed_jagged().values())
        assert torch.equal(found.to_keyed_jagged().lengths(), due.to_keyed_jagged().lengths())
    with pytest.raises(DataError, match="newest is"):
        InverseKeyedJaggedTensor.from_columns(arrow_columns(table), newest="x")


def test_a_chunk_with_an_error_is_looked_into_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []

    def counting(table: pa.RecordBatch, *others: Any, **more: Any) -> Any:
        looked.append(table.num_rows)
        return arrow_columns(table, *others, **more)

    monkeypatch.setattr("flexshard.ingestion.conversion.arrow_columns", counting)
    ids = pa.array([[0], *[[number, number] for number in range(98)], [None]])
    pq.write_table(pa.table({"ids": ids}), tmp_path / "a.parquet")
    batches = iter(SessionReader(tmp_path / "a.parquet", batch_size=10, features=["ids"]))
    assert [next(batches).sparse_features.stride() for _ in range(9)] == [10] * 9
    with pytest.raises(DataError, match="row 99"):
        next(batches)
    assert looked == [100]
