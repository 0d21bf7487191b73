"""What checkpoints and resharding take beside the tables: at most 256 MiB and what they give."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchrec")

import torch
import torch.distributed as dist
from torchrec import EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.model_parallel import DistributedModelParallel

import flexshard
from flexshard import FlexShardEmbeddingCollectionSharder, FlexShardPlanner
from flexshard.executors import full_state_dict, load_checkpoint, reshard, save_checkpoint
from tests.executors import models, ranks

ROWS, DIM, MIB = 1_200_000, 64, 1 << 20
TABLE = ROWS * DIM * 4

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peak memory")


def peak_bytes(work: Callable[[], Any], times: int = 1) -> int:
    """How far the process's memory rises while something is done; the least of some times, since what an allocator gave
    back before, or another thread takes meanwhile, adds to it.
    """
    peaks = []
    for _ in range(times):
        Path("/proc/self/clear_refs").write_text("5")
        before = _memory("VmRSS")
        work()
        peaks.append(_memory("VmHWM") - before)
    return min(peaks)


def _memory(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def planned(hot: int) -> tuple[flexshard.Plan, flexshard.AccessProfile]:
    generator = torch.Generator().manual_seed(0)
    counts = torch.randperm(ROWS, generator=generator) + 1
    profile = flexshard.AccessProfile.from_counts(counts.numpy(), num_samples=1 << 40)
    table = flexshard.Table("t", ROWS, DIM, profile)
    plan = flexshard.solve([table], models.small_cluster(1, 2), batch_size=8, budget="1GiB", index_dedup=False)
    return models.with_tiers(plan, {"t": [(1, hot, "dense"), (2, ROWS - hot, "dense")]}), profile


def peaks(rank: int, folder: str) -> dict[str, float]:
    """In MiB, less what each gives: a rank's block, the whole table on rank 0, the tables in their new places."""
    plan, profile = planned(20_000)
    config = EmbeddingConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["f"])
    model, sharders = EmbeddingCollection(tables=[config]), [FlexShardEmbeddingCollectionSharder()]
    sharding = FlexShardPlanner(plan, profiles={"t": profile}).collective_plan(model, sharders)
    parallel = DistributedModelParallel(model, plan=sharding, sharders=sharders, device=torch.device("cpu"))
    del model
    kept: list[Any] = []
    found = {"state_dict": peak_bytes(lambda: kept.append(parallel.state_dict())) - TABLE / 2}
    kept.clear()
    found["full_state_dict"] = peak_bytes(lambda: full_state_dict(parallel), 2) - TABLE * (rank == 0)
    found["save_checkpoint"] = peak_bytes(lambda: save_checkpoint(folder, parallel)) - TABLE / 2
    found["load_checkpoint"] = peak_bytes(lambda: load_checkpoint(folder, parallel), 2) - TABLE / 2
    other, _ = planned(100_000)
    found["reshard"] = peak_bytes(lambda: reshard(parallel, other, profiles={"t": profile})) - TABLE / 2
    dist.barrier()
    return {name: peak / MIB for name, peak in found.items()}


def test_what_they_take_beside_the_tables() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for rank, found in enumerate(ranks.run(1, 2, peaks, folder)):
            print(rank, {name: round(peak) for name, peak in found.items()})
            assert all(peak < 256 for peak in found.values()), (rank, found)
