from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flexshard import AccessProfile
from flexshard.errors import DataError

ray: Any = pytest.importorskip("ray")
pytest.importorskip("ray.data")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def two_workers() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
        yield
        ray.shutdown()


@pytest.mark.usefixtures("two_workers")
def test_a_ray_dataset_gives_the_same_bytes_as_its_files(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for k in range(4):
        ids = pa.array([random.integers(0, 100, n).tolist() for n in random.integers(0, 9, 200)], pa.list_(pa.int64()))
        pq.write_table(pa.table({"ids": ids}), tmp_path / f"{k}.parquet")
    dataset = ray.data.read_parquet(str(tmp_path))
    distributed = AccessProfile.from_ray(dataset, column="ids", num_rows=100)
    local = AccessProfile.from_parquet(tmp_path, column="ids", num_rows=100)
    distributed.save(tmp_path / "ray.profile")
    assert distributed.bursts is None  # blocks come in no order, and bursts are of one
    replace(local, bursts=None).save(tmp_path / "local.profile")
    assert (tmp_path / "ray.profile").read_bytes() == (tmp_path / "local.profile").read_bytes()


@pytest.mark.slow
@pytest.mark.usefixtures("two_workers")
def test_errors_of_workers_are_the_drivers(tmp_path: Path) -> None:
    pq.write_table(pa.table({"ids": [[1, 60], [3]]}), tmp_path / "0.parquet")
    dataset = ray.data.read_parquet(str(tmp_path))
    with pytest.raises(DataError, match=r"ids are outside \[0, 50\)"):
        AccessProfile.from_ray(dataset, column="ids", num_rows=50)
    with pytest.raises(DataError, match="no column 'other'"):
        AccessProfile.from_ray(dataset, column="other", num_rows=50)
