"""Calibration on this machine: every shape gets rates that say about what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torchrec")

from flexshard.calibration import calibrate
from flexshard.calibration.batches import sample_batches
from flexshard.costmodels import TTRates, TTReads
from flexshard.errors import DataError, JobError
from flexshard.tables.tensor_train_shape import TTShape


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
    assert local.of(30_000, 32) == (rates.tables[1].look_up, rates.tables[1].update)
    assert local.of(5, 5) == (local.look_up, local.update)
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
