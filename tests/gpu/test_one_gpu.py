"""What only a GPU shows: ``make test-gpu``. One GPU is enough; without one every test says so and is skipped.

One process with NCCL, and two that share the GPU with gloo between them.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torchrec")

import torch
import torch.distributed as dist
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import train_pipelines

import flexshard
from flexshard import FlexShardEmbeddingCollectionSharder, FlexShardPlanner
from flexshard.embeddings import TTEmbeddingBag
from flexshard.executors import full_state_dict, load_checkpoint, reshard, save_checkpoint
from tests.executors import models, ranks

DEVICE, BACKENDS = "cuda", {1: "nccl", 2: "gloo"}
DEVICES = ("cpu", DEVICE)
WAITS = 3  # see tests/executors/test_host_waits.py
MIB = 1 << 20

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


def planned(world: int, seed: int = 0, **how: Any) -> flexshard.Plan:
    cluster = models.small_cluster(1, world)
    return models.plan_of(cluster, models.random_split(cluster, np.random.default_rng(seed)), **how)


def weights(parallel: Any) -> torch.Tensor:
    """Of all tables, on the first rank; one number elsewhere."""
    state = full_state_dict(parallel)
    return torch.cat([torch.zeros(1), *(state[key].flatten() for key in sorted(state))])


def trained(rank: int, world: int, optimizer: str, index_dedup: bool) -> float:
    """Largest difference between a run on the device and one on the CPU."""
    found = []
    for device in DEVICES:
        plan = planned(world, len(optimizer), index_dedup=index_dedup)
        parallel, combined = models.shard(plan, optimizer, device=device)
        outputs = models.train(parallel, combined, rank, range(5), device=device)
        found.append(torch.cat([*(output.flatten().cpu() for output in outputs), weights(parallel)]))
    return float((found[0] - found[1]).abs().max())


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("index_dedup", [False, True])
@pytest.mark.parametrize("optimizer", list(models.OPTIMIZERS))
def test_training_gives_the_cpus_weights(world: int, optimizer: str, index_dedup: bool) -> None:
    found = ranks.run(1, world, trained, world, optimizer, index_dedup, backend=f"cpu:gloo,cuda:{BACKENDS[world]}")
    assert max(found) < 1e-4


def waits(rank: int) -> int:
    """Of the host in a step, as CUDA counts them."""
    parallel, optimizer = models.shard(planned(1), device=DEVICE)
    models.train(parallel, optimizer, rank, range(3), device=DEVICE)
    batch = models.make_batch(3, rank).to(torch.device(DEVICE))
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        wide = parallel.module.wide(batch.features)
        sum(jagged.values().sum() for jagged in wide.values()).backward()  # type: ignore[union-attr]
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def test_a_step_hardly_waits() -> None:
    assert ranks.run(1, 1, waits, backend="nccl")[0] <= WAITS


@pytest.mark.parametrize("optimizer", [None, "rowwise_adagrad", "adam"])
def test_a_tensor_train_never_waits(optimizer: str | None) -> None:
    how: dict[str, Any] = {"tt_ranks": 8, "std": 1.0, "padding_idx": 7, "hot_rows": 20, "optimizer": optimizer}
    tables = {device: TTEmbeddingBag(4000, 16, mode="sum", validate=False, device=device, **how) for device in DEVICES}
    tables[DEVICE].load_state_dict(tables["cpu"].state_dict())
    generator = torch.Generator().manual_seed(0)
    for number in range(4):
        ids = torch.randint(0, 4000, (64, 10), generator=generator) ** 2 // 4000
        found = {}
        for device, table in tables.items():
            if not number:
                table.pin_rows(ids[:2].flatten().to(device))
            given = ids.to(device)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if number else "default")  # numbers of steps were loaded
            found[device] = table(given)
            found[device].sum().backward()
            torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(found[DEVICE].cpu(), found["cpu"], rtol=1e-3, atol=1e-3)


def streamed(rank: int, world: int, name: str) -> float:
    """A pipeline whose streams are kept busy, against a plain loop."""
    found = []
    for piped in (False, True):
        parallel, optimizer = models.shard(planned(world), device=DEVICE)
        if not piped:
            models.train(parallel, optimizer, rank, range(6), device=DEVICE)
        else:
            pipeline = getattr(train_pipelines, name)(parallel, optimizer, torch.device(DEVICE))
            batches = iter([models.make_batch(step, rank) for step in range(6)])
            for _ in range(6):
                for stream in ("_memcpy_stream", "_data_dist_stream", "_prefetch_stream"):
                    if getattr(pipeline, stream, None) is not None:
                        with torch.cuda.stream(getattr(pipeline, stream)):
                            torch.cuda._sleep(20_000_000)
                pipeline.progress(batches)
        found.append(weights(parallel))
    return float((found[0] - found[1]).abs().max())


@pytest.mark.parametrize(
    "name", ["TrainPipelineSparseDist", "TrainPipelineFusedSparseDist", "PrefetchTrainPipelineSparseDist"]
)
@pytest.mark.parametrize("world", [1, 2])
def test_streams_wait_for_each_other(world: int, name: str) -> None:
    found = ranks.run(1, world, streamed, world, name, backend=f"cpu:gloo,cuda:{BACKENDS[world]}")
    assert max(found) < 1e-4


def stored(rank: int, world: int, folder: str) -> None:
    """Checkpoints and resharding bring back what was trained."""
    parallel, optimizer = models.shard(planned(world), "adagrad", device=DEVICE)
    models.train(parallel, optimizer, rank, range(2), device=DEVICE)
    before = full_state_dict(parallel)
    save_checkpoint(folder, parallel, optimizer)
    models.train(parallel, optimizer, rank, range(2, 4), device=DEVICE)
    load_checkpoint(folder, parallel, optimizer)
    profiles = {name: models.profile_of(name) for _, name in models.table_names()}
    reshard(parallel, planned(world, 7), profiles=profiles)
    after = full_state_dict(parallel)
    for key, value in before.items():
        assert torch.equal(value, after[key]), key
    models.train(parallel, optimizer, rank, range(4, 6), device=DEVICE)


@pytest.mark.parametrize("world", [1, 2])
def test_checkpoints_and_resharding(world: int, tmp_path: Any) -> None:
    ranks.run(1, world, stored, world, str(tmp_path), backend=f"cpu:gloo,cuda:{BACKENDS[world]}")


def peaks(rank: int) -> dict[str, float]:
    """MiB of the device beside the tables and what is given."""
    rows, dim = 2_000_000, 64
    profile = flexshard.AccessProfile.from_counts(np.arange(rows, 0, -1), num_samples=1 << 40)
    table = flexshard.Table("t", rows, dim, profile)
    plan = flexshard.solve([table], models.small_cluster(1, 1), batch_size=8, budget="1GiB")
    config = EmbeddingConfig(name="t", num_embeddings=rows, embedding_dim=dim, feature_names=["f"])
    model = EmbeddingCollection(tables=[config])
    sharders: list[Any] = [FlexShardEmbeddingCollectionSharder()]
    sharding = FlexShardPlanner(plan, profiles={"t": profile}).collective_plan(model, sharders)
    parallel = DistributedModelParallel(model, plan=sharding, sharders=sharders, device=torch.device(DEVICE))
    features = KeyedJaggedTensor(["f"], torch.arange(8), lengths=torch.ones(8, dtype=torch.long))
    parallel(features.to(torch.device(DEVICE)))["f"].values().sum().backward()

    def peak(work: Any) -> float:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = work()
        del kept
        return (torch.cuda.max_memory_allocated() - before) / MIB

    block = rows * dim * 4 / MIB
    return {
        "state_dict": peak(parallel.state_dict) - block,
        "full_state_dict": peak(lambda: full_state_dict(parallel)),
        "reshard": peak(lambda: reshard(parallel, plan, profiles={"t": profile})),
    }


def test_what_checkpoints_and_resharding_take_beside_the_tables() -> None:
    (found,) = ranks.run(1, 1, peaks, backend="nccl")
    assert all(peak < 256 for peak in found.values()), found


def clipped(rank: int) -> None:
    dist.barrier()
    parallel, _ = models.shard(planned(1), device=DEVICE)
    batch = models.make_batch(0, rank).to(torch.device(DEVICE))
    batch.features["user"].values()[:1] = 1 << 40
    with pytest.raises(flexshard.errors.DataError, match=r"feature 'user': id \d+ is outside table 'users'"):
        parallel(batch)
    torch.cuda.synchronize()  # no kernel has read or written beyond its table
    parallel(models.make_batch(1, rank).to(torch.device(DEVICE)))[0].backward()


def test_ids_outside_their_table_are_named_and_do_no_harm() -> None:
    ranks.run(1, 1, clipped, backend="nccl")
