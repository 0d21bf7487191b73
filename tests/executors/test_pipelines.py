"""TorchRec's pipelines give what they give with its own sharder, whatever they overlap.

Those that need a device's streams run with the host's, which do nothing: this shows the order of calls, not that
streams wait for each other.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("torchrec")

import torch
from torchrec.distributed.train_pipeline import train_pipelines

from tests.executors import models, ranks

PIPELINES = {
    "TrainPipelineBase": {},
    "TrainPipelineSparseDist": {},
    "TrainPipelineSparseDistLite": {},
    "TrainPipelineFusedSparseDist": {},
    "TrainPipelineSemiSync": {"start_batch": 1},
    "PrefetchTrainPipelineSparseDist": {},
    "EvalPipelineSparseDist": {},
    "EvalPipelineFusedSparseDist": {},
}


def run(name: str, parallel: Any, optimizer: Any, rank: int, steps: int) -> torch.Tensor:
    """Losses of each step, and then the weights."""
    if name.startswith("Eval"):
        parallel.eval()
    pipeline = getattr(train_pipelines, name)(parallel, optimizer, torch.device("cpu"), **PIPELINES[name])
    if name.startswith("Prefetch"):
        pipeline._data_dist_stream = torch.cpu.Stream()
    batches = iter([models.make_batch(step, rank) for step in range(steps)])
    losses = [pipeline.progress(batches).detach().flatten() for _ in range(steps)]
    state = {name: models.whole(value) for name, value in parallel.state_dict().items()}
    return torch.cat([*losses, *(state[key].flatten() for key in sorted(state))])


def _nothing(*_: Any) -> None:
    pass


def both(rank: int, name: str, seed: int) -> float:
    cluster = models.small_cluster(1, 2)
    with ExitStack() as patches:
        # What a machine without a device lacks.
        patches.enter_context(mock.patch.object(torch.Tensor, "record_stream", _nothing))
        host = torch.device("cpu")
        patches.enter_context(mock.patch.object(torch.cpu.Stream, "device", host, create=True))
        patches.enter_context(mock.patch.object(torch.cuda, "current_stream", _nothing))
        split = models.random_split(cluster, np.random.default_rng(seed))
        ours = run(name, *models.shard(models.plan_of(cluster, split), "sgd"), rank, 6)
        stock = models.row_wise_of_torchrec("sgd", 2, 2)
        theirs = run(name, stock, models.optimizer_of(stock), rank, 6)
    return float((ours - theirs).abs().max())


@pytest.mark.parametrize("name", list(PIPELINES))
def test_pipelines_give_what_torchrecs_sharder_gives(name: str) -> None:
    assert max(ranks.run(1, 2, both, name, len(name))) < 1e-5
