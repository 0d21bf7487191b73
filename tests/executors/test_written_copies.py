"""What ranks write to their parameters each for itself: copies of a row are one row all the same."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torchrec")

import torch
import torch.distributed as dist

from flexshard.errors import CacheError
from flexshard.executors.sharding.module import ShardedRowsModule
from tests.executors import models, ranks

CLUSTER = models.small_cluster(2, 2)
SPLIT = {
    name: [(1, rows // 3, "dense"), (2, rows // 3, "sparse"), (4, rows - 2 * (rows // 3), "dense")]
    for name, (rows, _) in (models.WIDE | models.NARROW).items()
}
WAYS = ("drawn", "drawn, then saved", "one rank's", "in training")


def tables_of(parallel: Any) -> list[Any]:
    return [module.tables for module in parallel.modules() if isinstance(module, ShardedRowsModule)]


def write(parallel: Any, rank: int, *, everywhere: bool = True) -> None:
    generator = torch.Generator().manual_seed(rank)
    with torch.no_grad():
        for name, parameter in parallel.named_parameters():
            if "embeddings" in name and (everywhere or rank == 1):
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.1)


def apart(parallel: Any) -> float:
    """How far ranks' outputs for one batch are from each other, and from those of the whole tables."""
    parallel.eval()
    with torch.no_grad():
        logits = parallel(models.make_batch(0, 0))[1]
        model = models.new_model()
        model.load_state_dict({name: models.whole(value) for name, value in parallel.state_dict().items()})
        expected = model(models.make_batch(0, 0))[1]
    parallel.train()
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, logits)
    return max(float((one - expected).abs().max()) for one in every)


def written(rank: int, plan: Any, optimizer: str, way: str, sharder: dict[str, Any]) -> tuple[float, list[bool]]:
    parallel, optim = models.shard(plan, optimizer, sharder=sharder)
    if way == "in training":
        models.train(parallel, optim, rank, range(2))
        parallel.state_dict()  # or caches have newer rows, which writes would lose
    before = {name: value.detach().clone() for name, value in parallel.named_parameters()}
    write(parallel, rank, everywhere=way != "one rank's")
    if way == "drawn, then saved":
        parallel.state_dict()
    worst = apart(parallel)
    changed = any(not torch.equal(before[name], value) for name, value in parallel.named_parameters())
    quiet = []
    for step in range(3):
        models.train(parallel, optim, rank, range(step, step + 1))
        quiet.append(not any(tables.copies_written() for tables in tables_of(parallel)))
    return max(worst, apart(parallel)), [changed or way == "one rank's", *quiet]


@pytest.mark.parametrize(
    "sharder", [{}, {"cache_load_factors": dict.fromkeys(list(models.WIDE)[:2], 1.0)}], ids=["", "cached"]
)
@pytest.mark.parametrize("way", WAYS)
def test_copies_are_alike_whatever_ranks_write(way: str, sharder: dict[str, Any]) -> None:
    plan = models.plan_of(CLUSTER, SPLIT)
    for optimizer in ("sgd", "rowwise_adagrad"):
        for difference, as_expected in ranks.run(2, 2, written, plan, optimizer, way, sharder):
            assert difference < 1e-5
            assert all(as_expected)


def lost(rank: int, plan: Any, sharder: dict[str, Any], _why: str) -> str:
    parallel, optim = models.shard(plan, "sgd", sharder=sharder)
    models.train(parallel, optim, rank, range(2))
    write(parallel, rank, everywhere=False)
    try:
        parallel.state_dict()
    except CacheError as error:
        return str(error)
    return "nothing was said"


@pytest.mark.parametrize("tiers", ["copies", "none"])
def test_what_one_rank_cannot_take_over_all_hear_of(tiers: str) -> None:
    everywhere = {name: [(4, rows, "dense")] for name, (rows, _) in (models.WIDE | models.NARROW).items()}
    plan = models.plan_of(CLUSTER, SPLIT if tiers == "copies" else everywhere)
    sharder = {"cache_load_factors": dict.fromkeys(models.WIDE | models.NARROW, 1.0)}
    for rank, said in enumerate(ranks.run(2, 2, lost, plan, sharder, tiers)):
        assert "parameters were written to while the cache had newer rows" in said
        assert rank == 1 or said.startswith("rank 1: ")


def drawn_anew(rank: int, plan: Any, sharder: dict[str, Any]) -> tuple[float, list[str]]:
    parallel, optim = models.shard(plan, "sgd", sharder=sharder)
    models.train(parallel, optim, rank, range(2))
    with torch.no_grad():
        for name, value in parallel.state_dict().items():
            if "embeddings" in name:
                value.to_local().fill_(7.0)
    torch.manual_seed(100 + rank)
    for module in parallel.modules():
        if isinstance(module, ShardedRowsModule):
            module.reset_parameters()
    whole = {name: models.whole(value) for name, value in parallel.state_dict().items() if "embeddings" in name}
    outside = [name for name, rows in whole.items() if not 0 < float(rows.abs().max()) <= len(rows) ** -0.5]
    outside += [name for name, rows in whole.items() if float(rows.std()) < 0.4 * len(rows) ** -0.5]
    models.train(parallel, optim, rank, range(2, 4))
    return apart(parallel), outside


@pytest.mark.parametrize(
    "sharder", [{}, {"cache_load_factors": dict.fromkeys(list(models.WIDE)[:2], 1.0)}], ids=["", "cached"]
)
def test_reset_parameters_draws_rows_anew(sharder: dict[str, Any]) -> None:
    """Uniformly up to one over the square root of their number, which is TorchRec's default."""
    for difference, outside in ranks.run(2, 2, drawn_anew, models.plan_of(CLUSTER, SPLIT), sharder):
        assert difference < 1e-5
        assert not outside
