"""What all tests share."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import settings

from flexshard import Cluster

# A run on two slow cores must not fail on time, and must try the same examples as any other.
settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=False)
settings.load_profile("repeatable")

# Ranks come from a process that is older than the Ray clusters that tests start, and so know nothing of their tokens.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

# Tests run side by side, one per processor: threads of small operations would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Without a GPU its kernels run in Triton's interpreter, which must be known before Triton is imported.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Of ``-n auto``: one more than there are processors, since tests wait for processes that start and for files."""
    return len(os.sched_getaffinity(0)) + 1 if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1) + 1


SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture
def paper_cluster() -> Cluster:
    return Cluster.preset("a100-4x8-roce")


@pytest.fixture
def real_data() -> Path:
    """Folder of the real data sets; skips where it is absent."""
    folder = SHARED / "data"
    if not folder.is_dir():
        pytest.skip("real data is not here (../shared/data)")
    return folder
