"""A job with a cache that is killed goes on from its last checkpoint to the weights that it would have had."""

from __future__ import annotations

import errno
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("torchrec")
pytest.importorskip("numba")

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology

from flexshard.errors import CheckpointError, OutputError
from flexshard.executors import (
    FlexShardEmbeddingBagCollectionSharder,
    LookaheadPipeline,
    load_checkpoint,
    save_checkpoint,
)
from flexshard.executors.lookahead.row_moves import RowMoves
from flexshard.executors.stores.cached import CachedStore
from flexshard.ingestion import IngestionClient, IngestionSpec, SessionBatch
from tests.executors import lookahead_model as looking, models, ranks
from tests.slow import first

STEPS, EVERY = 12, 3
FUSED = {"optimizer": "exact_row_wise_adagrad", "learning_rate": 0.2, "eps": 1e-8}


def train(rank: int, plan: Any, folder: str, *, resume: bool = False) -> dict[str, Any]:
    """All steps, or those that are left, with a checkpoint after every third; what the model is then."""
    parallel, optimizer = looking.shard(plan, 0.3, FUSED)
    pipeline = LookaheadPipeline(parallel, optimizer, torch.device("cpu"), lookahead=3)
    first = 0
    if resume:
        position = load_checkpoint(folder, parallel, optimizer)
        assert position is not None
        first = position["trained"]
    batches = looking.batches(rank, range(first, STEPS))
    for step in range(first + 1, STEPS + 1):
        pipeline.progress(batches)
        if step % EVERY == 0:
            save_checkpoint(folder, parallel, optimizer, position={"trained": first + pipeline.trained})
    return looking.everything(parallel)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(rank: int, plan: Any, folder: str, when: str) -> None:
    """As ``train``, until the last rank is killed."""
    if rank != 1:
        train(rank, plan, folder)
        return
    calls = 0

    def at(number: int, original: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            kill()
        return original(*args, **kwargs)

    fetch, look_up, save = RowMoves._fetch, CachedStore.announce, dcp.save
    places = {
        "copies": mock.patch.object(RowMoves, "_fetch", lambda *args: at(9, fetch, *args)),
        "steps": mock.patch.object(CachedStore, "announce", lambda *args: at(10, look_up, *args)),
        "checkpoints": mock.patch.object(dcp, "save", lambda *args, **kwargs: at(2, save, *args, **kwargs)),
    }
    with places[when]:
        train(rank, plan, folder)


def resumed(rank: int, plan: Any, folder: str) -> dict[str, Any]:
    return train(rank, plan, folder, resume=True)


@pytest.mark.parametrize("when", first(2, ["copies", "checkpoints", "steps"]))
def test_a_killed_trainer_goes_on_to_the_same_weights(tmp_path: Path, when: str) -> None:
    plan = looking.plan_for(1, 2)
    expected = ranks.run(1, 2, train, plan, str(tmp_path / "whole"))[0]
    folder = tmp_path / "killed"
    found = ranks.run(1, 2, killed, plan, str(folder), when, timeout=15.0, expect_failures=True)
    assert f"ended with code -{int(signal.SIGKILL)}" in str(found[1])
    assert isinstance(found[0], Exception)
    saved = int((folder / "latest").read_text().strip().rpartition("-")[2])
    assert 1 <= saved < STEPS // EVERY
    start = time.monotonic()
    again = ranks.run(1, 2, resumed, plan, str(folder))
    assert time.monotonic() - start < 60  # the paper's Figure 14, and here with all that is left to train
    for state in again:
        assert looking.differs(state, expected) == []


def full_disk(rank: int, plan: Any, folder: str) -> list[Any]:
    """The disk is full in the second save; training goes on from the first."""
    parallel, optimizer = looking.shard(plan, 0.3, FUSED)
    pipeline = LookaheadPipeline(parallel, optimizer, torch.device("cpu"), lookahead=3)
    batches = looking.batches(rank, range(STEPS))
    for _ in range(3):
        pipeline.progress(batches)
    save_checkpoint(folder, parallel, optimizer, position={"trained": pipeline.trained})
    first = looking.everything(parallel)
    pipeline.progress(batches)
    with mock.patch.object(dcp, "save", side_effect=OSError(errno.ENOSPC, "No space left on device")):
        try:
            save_checkpoint(folder, parallel, optimizer, position={"trained": pipeline.trained})
            text = ""
        except OutputError as error:
            text = str(error)
    pipeline.progress(batches)  # nothing of the job is lost
    position = load_checkpoint(folder, parallel, optimizer)
    return [text, position, looking.differs(looking.everything(parallel), first)]


def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path: Path) -> None:
    for text, position, differing in ranks.run(1, 2, full_disk, looking.plan_for(1, 2), str(tmp_path / "saves")):
        assert "No space left on device" in text
        assert "the previous one is untouched" in text
        assert position == {"trained": 3}
        assert differing == []


def odd_positions(rank: int, plan: Any, folder: str) -> list[Any]:
    parallel, optimizer = looking.shard(plan, 0.3, FUSED)
    save_checkpoint(folder, parallel, optimizer)
    found: list[Any] = [load_checkpoint(folder, parallel, optimizer)]
    try:
        save_checkpoint(folder, parallel, optimizer, position={"at": object()})
    except CheckpointError as error:
        found.append(str(error))
    return found


def test_positions_that_are_missing_or_no_numbers(tmp_path: Path) -> None:
    ((nothing, text),) = ranks.run(1, 1, odd_positions, looking.plan_for(1, 1), str(tmp_path / "saves"))
    assert nothing is None
    assert "position must be a dict of numbers and texts" in text


# -- readers

SAVED = 20


def clicks(path: Path) -> None:
    """Clicks of sessions, some items far more often than others."""
    generator = np.random.default_rng(0)
    rows = 24_000
    columns = {
        "session": np.arange(rows) // 6,
        "time": np.arange(rows),
        "item": (generator.random(rows) ** 3 * 5_000).astype(np.int64),
        "user": (generator.random(rows) ** 2 * 900).astype(np.int64),
        "label": (generator.random(rows) < 0.3).astype(np.float32),
    }
    pq.write_table(pa.table(columns), path, row_group_size=500)


class Clicks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = {"item": 5_000, "user": 900}
        self.bags = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(name=f"{name}_ids", num_embeddings=rows, embedding_dim=8, feature_names=[name])
                for name, rows in sizes.items()
            ]
        )
        self.over = nn.Linear(16, 1)

    def forward(self, batch: SessionBatch) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.over(self.bags(batch.sparse_features).values()).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.dense["label"]), logits


def from_readers(rank: int, folder: str, kills: int, stop: int, resume: bool) -> dict[str, Any]:
    """Train on what processes of readers give, of which some are killed, up to a batch; weights and states then."""
    spec = IngestionSpec(
        paths=f"{folder}/clicks.parquet", batch_size=60, features=["item", "user"], dense=["label"], session="session",
        time="time", shuffle="sessions", seed=3,
    )  # fmt: skip
    torch.manual_seed(3)
    model, factors = Clicks(), {"item_ids": 0.3, "user_ids": 0.5}
    sharders = [FlexShardEmbeddingBagCollectionSharder(FUSED, cache_load_factors=factors)]
    planner = EmbeddingShardingPlanner(Topology(2, "cpu"))
    plan = planner.collective_plan(model, sharders, torch.distributed.group.WORLD)
    parallel = DistributedModelParallel(model, plan=plan, sharders=sharders, device=torch.device("cpu"))
    optimizer = models.optimizer_of(parallel)
    pipeline = LookaheadPipeline(parallel, optimizer, torch.device("cpu"), lookahead=3)
    killed_at = {10 + 7 * number for number in range(kills)}
    backend = "processes" if kills else "threads"
    with IngestionClient(spec, rank=rank, world_size=2, workers=2, backend=backend) as client:
        if resume:
            position = load_checkpoint(f"{folder}/saves", parallel, optimizer)
            assert position is not None
            client.load_state_dict(position[str(rank)])
        batches, trained, gone = iter(client), 0, []
        with suppress(StopIteration):
            while trained < stop:
                pipeline.progress(batches)
                trained += 1
                if trained in killed_at:
                    alive = [pid for pid in client._pool.pids if pid not in gone]
                    gone += alive[:1]
                    for pid in alive[:1]:
                        os.kill(pid, signal.SIGKILL)
        assert (len(gone) > 0) == (kills > 0)
        if stop == SAVED:  # the batches that were read ahead are read again
            states: list[Any] = [None, None]
            torch.distributed.all_gather_object(states, client.state_dict(pipeline.last_batch))
            save_checkpoint(f"{folder}/saves", parallel, optimizer, position=dict(zip("01", states, strict=True)))
    found = looking.everything(parallel)
    return found | {"steps": np.array(trained)}


@pytest.mark.slow  # readers that are killed are in test_service, trainers above
def test_killed_readers_change_nothing_and_a_job_goes_on_from_the_last_batch_trained(tmp_path: Path) -> None:
    clicks(tmp_path / "clicks.parquet")
    whole = ranks.run(1, 2, from_readers, str(tmp_path), 0, 50, False)[0]
    assert whole.pop("steps") == 50
    ranks.run(1, 2, from_readers, str(tmp_path), 2, SAVED, False)
    again = ranks.run(1, 2, from_readers, str(tmp_path), 2, 50 - SAVED, True)[0]
    assert again.pop("steps") == 50 - SAVED
    assert looking.differs(again, whole) == []
