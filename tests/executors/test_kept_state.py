"""A ``state_dict`` that is kept over a training step: saved or loaded later, tables of then beside layers of now."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchrec")

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from flexshard.errors import CheckpointError
from tests.executors import models, ranks


def said(work: Callable[[], Any]) -> str:
    try:
        work()
    except (CheckpointError, CheckpointException) as error:
        return str(error)
    return ""


def kept(rank: int, folder: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")  # DCP's, of threads
    cluster = models.small_cluster(1, 2)
    split = {name: [(1, rows // 2, "dense"), (2, rows - rows // 2, "dense")] for name, (rows, _) in TABLES.items()}
    parallel, optimizer = models.shard(models.plan_of(cluster, split), "rowwise_adagrad")
    state, states = parallel.state_dict(), parallel.fused_optimizer.state_dict()
    clones = {name: value.clone() for name, value in state.items()}
    deep = copy.deepcopy(state)
    dcp.save({"m": state}, checkpoint_id=f"{folder}/fresh")
    models.train(parallel, optimizer, rank, range(2))
    fresh = parallel.state_dict()
    again = {
        "twice": said(lambda: [parallel.load_state_dict(dict(fresh)) for _ in range(2)]),
        "loaded, then saved": said(lambda: dcp.save({"m": fresh}, checkpoint_id=f"{folder}/again")),
    }
    trained = {name: models.whole(value) for name, value in parallel.state_dict().items()}
    refused = {
        "saved": said(lambda: dcp.save({"m": state}, checkpoint_id=f"{folder}/stale")),
        "pickled": said(lambda: torch.save(state, io.BytesIO())),
        "loaded": said(lambda: parallel.load_state_dict(state)),
        "optimizer": said(lambda: parallel.fused_optimizer.load_state_dict(states)),
    }
    unchanged = all(
        torch.equal(models.whole(value), trained[name])
        for name, value in parallel.state_dict().items()
        if "embeddings" in name
    )
    found = {}
    models.train(parallel, optimizer, rank, range(1))
    refused["loaded, then trained"] = said(lambda: torch.save(fresh, io.BytesIO()))
    for name, copies in (("clones", clones), ("deep", deep)):
        torch.save(copies, io.BytesIO())
        dcp.save({"m": copies}, checkpoint_id=f"{folder}/{name}")
        parallel.load_state_dict(dict(copies))  # whose names DMP changes
        back = parallel.state_dict()
        found[name] = all(torch.equal(models.whole(value), models.whole(back[key])) for key, value in copies.items())
        models.train(parallel, optimizer, rank, range(1))
    return {"again": again, "refused": refused, "unchanged": unchanged, **found}


TABLES = models.WIDE | models.NARROW


def test_a_kept_state_is_neither_saved_nor_loaded(tmp_path: Path) -> None:
    for found in ranks.run(1, 2, kept, str(tmp_path)):
        for message in found["refused"].values():
            assert "the model's rows have changed since: call state_dict() again" in message, found
        assert found["again"] == {"twice": "", "loaded, then saved": ""}
        assert found["unchanged"]
        assert found["clones"]
        assert found["deep"]
