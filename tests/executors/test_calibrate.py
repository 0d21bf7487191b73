"""Calibration on this machine: every shape gets rates that say about what was measured."""

from __future__ import annotations

import re
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torchrec")

import torch
import yaml

from flexshard.calibration import DenseShape, calibrate, lookup_rates
from flexshard.calibration.batches import sample_batches
from flexshard.calibration.dense_tables import dense_table
from flexshard.costmodels import LocalRates, TableRates, TTRates, TTReads, fit_rates
from flexshard.errors import DataError, JobError
from flexshard.executors import MemoryStore
from flexshard.executors.stores.updates import OptimizerSpec
from flexshard.profiling import AccessProfile
from flexshard.tables import OPTIMIZERS, StepOptions, Table, TTShape

pytestmark = pytest.mark.filterwarnings("ignore:times of ")  # machines that run tests are busy


def table(rows: int, dim: int, length: float, **kernel: Any) -> Table:
    profile = AccessProfile.from_counts(np.array([round(100 * length)]), num_samples=100)
    return Table("t", rows, dim, profile, **kernel)


def test_rates_of_shapes_and_of_dense_tables() -> None:
    shapes = [TTShape.choose(50_000, 16, 8), TTShape.choose(50_000, 16, 8, cores=2), TTShape.choose(900, 16, 8)]
    seen: list[tuple[int, int]] = []
    rates = calibrate(shapes, batch_size=64, rounds=2, progress=lambda done, total: seen.append((done, total)))
    assert [(own.row_factors, own.dim_factors, own.tt_ranks) for own in rates.shapes] == [
        (s.row_factors, s.dim_factors, s.tt_ranks) for s in shapes
    ]
    assert seen == [(1, 5), (2, 5), (3, 5), (4, 5), (5, 5)]  # the shapes, and the two tables that they stand for
    for shape in shapes:
        ids, bags = next(sample_batches(shape.num_embeddings, 64, 0))
        assert 1e-5 < rates.step_seconds(shape, TTReads.of(ids, bags, shape)) < 10
    assert 0 < rates.dense_seconds(1000, 16) < 10


def test_sampled_batches_are_skewed_and_within_the_table() -> None:
    for rows in (10, 1000, 10**12):
        batches = list(sample_batches(rows, 512, seed=1))
        assert [bags for _, bags in batches] == [512, 512, 128, 512, 256]
        for ids, bags in batches:
            assert ids.min() >= 0
            assert ids.max() < rows
            assert ids.size % bags == 0


def test_dimensions_that_fbgemm_does_not_take_and_devices_that_are_not_there() -> None:
    shapes = [TTShape.choose(500, 6, 2)]
    assert calibrate(shapes, batch_size=8, rounds=1).dense_seconds(10, 6) > 0
    for device in ("foo", "meta", "cuda:99"):
        with pytest.raises(JobError, match=f"device '{device}' cannot be measured"):
            calibrate(shapes, device=device)


def test_batches_have_the_length_of_the_table() -> None:
    assert [ids.size // bags for ids, bags in sample_batches(1000, 64, 0, 3.4)] == [3, 3, 3, 1, 2]
    with pytest.raises(JobError, match="1 shapes and 2 lengths"):
        calibrate([TTShape.choose(500, 8, 2)], lengths=[1.0, 2.0])


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ((9, 8, float("nan")), "length of a table"),
        ((9, 8, 1.0, "int8"), "dtype of a table is one of float64, .* found 'int8'"),
        ((9, 8, 1.0, "float32", "adamw"), "optimizer of a table is one of .* found 'adamw'"),
    ],
)
def test_tables_that_there_are_not(shape: Any, says: str) -> None:
    with pytest.raises(JobError, match=says):
        calibrate([], tables=[shape])


@pytest.mark.parametrize(
    ("seconds", "says"),
    [
        ([1e-3, 1e-3, 1e-3], "do not grow with the ids; was the machine busy?"),
        ([1e-3, 40e-3, 4e-3], r"are up to \d+\.\d times off their fit; was the machine busy?"),
        ([1.1e-3, 2e-3, 3.8e-3], None),
    ],
)
def test_times_that_make_no_line_are_told(
    seconds: list[float], says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = DenseShape(1_000, 16, 20.0)

    def measured(*_: Any) -> tuple[TableRates, list[list[float]], list[float]]:
        work = [[1.0, ids, ids * 16] for ids in (1e3, 2e3, 4e3)]
        rates = fit_rates([one[:2] for one in work], seconds)
        zero = (0.0, 0.0, 0.0)
        return TableRates(1_000, 16, rates, zero, zero, 20.0, "float32", "sgd"), work, seconds

    monkeypatch.setattr(lookup_rates, "measure_dense", measured)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        calibrate([], tables=[shape])
    assert [bool(re.search(says or "", str(one.message))) for one in told] == ([True] if says else [])


def test_nothing_to_calibrate() -> None:
    with pytest.raises(JobError, match="no shapes to calibrate"):
        calibrate([])


def test_dense_tables_have_rates_of_their_own(tmp_path: Path) -> None:
    tables = [(1_000, 8, 2.0), (30_000, 32, 10.0)]
    rates = calibrate([], tables=tables, batch_size=256, rounds=2)
    rates.save(tmp_path / "rates.yaml")
    loaded = TTRates.load(tmp_path / "rates.yaml")
    assert loaded == rates
    assert [(one.rows, one.dim) for one in loaded.tables] == [(1_000, 8), (30_000, 32)]
    local = loaded.local
    assert local.of(table(30_000, 32, 10.0)) == (rates.tables[1].look_up, rates.tables[1].update)
    assert local.of(table(5, 5, 1.0)) == (local.look_up, local.update)
    # A batch as large as the largest that was timed takes about what it took.
    assert 0 < loaded.dense_seconds(2560, 32, 30_000) < 1
    assert loaded.dense_seconds(2560, 32, 30_000) != loaded.dense_seconds(2560, 32)
    shape = TTShape.choose(900, 16, 8)
    ids, bags = next(sample_batches(900, 64, 0))
    reads = TTReads.of(ids, bags, shape)
    with pytest.raises(DataError, match="no tensor train was measured"):
        loaded.step_seconds(shape, reads)
    with pytest.raises(DataError, match="no dense table was measured by itself"):
        _ = TTRates("old", (0.0,) * 12, (0.0, 0.0, 0.0)).local


def test_tables_of_one_size_are_measured_at_each_length_type_and_optimizer(tmp_path: Path) -> None:
    """The last length of a size once took the place of the others."""
    asked = [
        (900, 8, 2.0),
        (900, 8, 2.3),
        (900, 8, 30.0),
        DenseShape(900, 8, 2.0, "float16"),
        (900, 8, 2.0, "float32", "adam"),
    ]
    rates = calibrate([], tables=asked, batch_size=64, rounds=1)
    assert [(one.length, one.dtype, one.optimizer) for one in rates.tables] == [
        (2.0, "float32", "rowwise_adagrad"),
        (30.0, "float32", "rowwise_adagrad"),
        (2.0, "float16", "rowwise_adagrad"),
        (2.0, "float32", "adam"),
    ]
    rates.save(tmp_path / "rates.yaml")
    local = TTRates.load(tmp_path / "rates.yaml").local
    for index, wanted in enumerate(
        (
            table(900, 8, 3.0),
            table(900, 8, 20.0),
            table(900, 8, 20.0, dtype="float16"),
            table(900, 8, 1.0, optimizer="adam"),
        )
    ):
        assert local.measured(wanted) == rates.tables[index]
    # An unmeasured size has the mean of its kernel, one of an unmeasured kernel that of all.
    adam = rates.tables[3]
    assert local.of(table(77, 8, 1.0, optimizer="adam"))[1] == (adam.update[0], 0.0, adam.update[1] / 32)
    assert local.of(table(900, 8, 1.0, optimizer="sgd")) == (local.look_up, local.update)
    assert rates.dense_seconds(100, 8, 900, dtype="float32", optimizer="adam", length=2.0) == pytest.approx(
        adam.pooled[0] + 100 * adam.pooled[1], rel=1e-12
    )


def test_files_of_earlier_releases_hold_for_all_types_and_optimizers(tmp_path: Path) -> None:
    rates = calibrate([], tables=[(900, 8, 2.0)], batch_size=64, rounds=1)
    path = tmp_path / "rates.yaml"
    rates.save(path)
    body = yaml.safe_load(path.read_text())
    for field in ("length", "dtype", "optimizer"):
        del body["tables"][0][field]
    path.write_text(yaml.safe_dump(body))
    old = TTRates.load(path).local
    assert old.of(table(900, 8, 5.0, optimizer="adam", dtype="float16")) == (
        rates.tables[0].look_up,
        rates.tables[0].update,
    )
    body["tables"][0]["dtype"] = "int8"
    path.write_text(yaml.safe_dump(body))
    with pytest.raises(DataError, match=r"tables\.0\.dtype|tables\[0\]\.dtype"):
        TTRates.load(path)


def test_the_slower_optimizer_is_priced_so() -> None:
    slow, fast = (
        TableRates(50, 8, (0.0, 1e-6), (0.0, 1e-7, 0.0), (0.0, update, 0.0), 2.0, "float32", optimizer)
        for update, optimizer in ((9e-7, "adam"), (1e-7, "sgd"))
    )
    local = LocalRates((0.0, 0.0, 1e-9), (0.0, 0.0, 1e-9), 1e-9, "measured", (slow, fast))
    assert local.of(table(50, 8, 2.0, optimizer="adam"))[1][1] == 9e-7
    assert local.of(table(50, 8, 2.0, optimizer="sgd"))[1][1] == 1e-7


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("optimizer", ["adam", "partial_rowwise_adam", "lars_sgd"])
def test_rows_that_fbgemm_has_no_kernel_for_are_updated_as_executors_do(optimizer: str, pooled: bool) -> None:
    """What is timed is what runs: the same weights after a step."""
    shape, cpu = DenseShape(20, 8, 2.0, "float32", optimizer), torch.device("cpu")
    plain: Any = dense_table(shape, pooled=pooled, device="cpu")
    store = MemoryStore(OptimizerSpec(optimizer, learning_rate=0.1), 20, 8, torch.float32, cpu)
    start = torch.randn(20, 8, generator=torch.Generator().manual_seed(0))
    plain._options = StepOptions(learning_rate=0.1)
    plain._weight.copy_(start)
    store.values.copy_(start)
    ids = torch.tensor([3, 5, 3, 3, 19, 0])
    offsets = torch.tensor([0, 2, 2, 6]) if pooled else torch.arange(7)
    gradient = torch.randn(len(offsets) - 1, 8, generator=torch.Generator().manual_seed(1))
    rows = plain(ids, offsets)
    expected = [start[ids[a:b]].sum(0) for a, b in pairwise(offsets.tolist())]
    torch.testing.assert_close(rows, torch.stack(expected))
    rows.backward(gradient)
    store.begin_step(1)
    store.look_up(ids).update(gradient.repeat_interleave(offsets.diff(), dim=0))
    torch.testing.assert_close(plain._weight, store.values, rtol=0, atol=1e-7)
    assert not torch.equal(plain._weight, start)
    assert set(plain._states) == {state.name for state in OPTIMIZERS[optimizer].states}
