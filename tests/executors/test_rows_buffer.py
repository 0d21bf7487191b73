"""Rows of several classes in one buffer: copied run by run or place by place, they are the same."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torchrec")

import torch
from hypothesis import given, strategies as st

from flexshard.executors.comm import rows_buffer
from flexshard.executors.comm.rows_buffer import RowsBuffer, buffer_of, of_classes
from flexshard.executors.comm.wire import Wire

CPU = torch.device("cpu")
DIMS = (3, 8, 3, 5)


@st.composite
def counts_of(draw: st.DrawFn) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Of 1 to 20 segments, fewer and more than are copied one by one, and 1 to 4 classes."""
    segments, classes = draw(st.integers(1, 20)), draw(st.integers(1, len(DIMS)))
    cells = st.lists(st.integers(0, 4), min_size=segments * classes, max_size=segments * classes)
    return np.array(draw(cells), np.int64).reshape(segments, classes)


def numbered(counts: np.ndarray[tuple[int, int], np.dtype[np.int64]], wire: Wire) -> list[torch.Tensor]:
    """Rows of each class, no two alike."""
    totals = counts.sum(axis=0).tolist()
    return [torch.arange(n * d).view(n, d).to(kind) for n, d, kind in zip(totals, wire.dims, wire.dtypes, strict=False)]


@pytest.mark.parametrize("few", [0, 16, 1000])
@given(counts=counts_of(), dtypes=st.lists(st.sampled_from([torch.float32, torch.float16]), min_size=4, max_size=4))
def test_rows_come_out_as_they_went_in(
    few: int,
    counts: np.ndarray[tuple[int, int], np.dtype[np.int64]],
    dtypes: list[torch.dtype],
) -> None:
    classes = tuple(range(counts.shape[1]))
    wire = Wire(DIMS, tuple(dtypes))
    rows = numbered(counts, wire)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_buffer, "_FEW_RUNS", few)
        whole = buffer_of(wire, classes, counts, rows)
        for index in classes:
            assert torch.equal(whole.get(index), rows[index])
            every = torch.arange(len(rows[index]))
            assert torch.equal(whole.view(index)[whole.places(index, every)], rows[index])
        for segment in range(len(counts)):
            part = whole.part(slice(segment, segment + 1))
            for index in classes:
                first, number = counts[:segment, index].sum(), counts[segment, index]
                assert torch.equal(part.get(index), rows[index][first : first + number])
        ids = torch.arange(int(counts.sum()))
        split = of_classes(ids, counts)
        runs = np.split(ids.numpy(), np.cumsum(counts.ravel())[:-1])
        for index in classes:
            expected = np.concatenate(runs[index :: len(classes)])
            assert split[index].tolist() == expected.tolist()


def test_rows_of_a_single_segment_are_those_of_the_buffer() -> None:
    counts = np.array([[2, 3]])
    wire = Wire((3, 8), (torch.float32, torch.float32))
    buffer = RowsBuffer.make(wire, (0, 1), counts, CPU, zero=True)
    buffer.get(1).add_(1.0)
    assert buffer.view(1).sum() == 24.0
