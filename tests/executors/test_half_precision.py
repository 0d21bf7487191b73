"""Gradients of 16-bit tables travel and add up in float32: beside TorchRec's row-wise sharding of the same tables."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torchrec")

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import CommOp, ShardingPlan
from torchrec.modules.embedding_configs import DataType

import flexshard
from flexshard.costmodels import strategy_name
from flexshard.errors import PlanError
from flexshard.executors import FlexShardEmbeddingCollectionSharder
from flexshard.executors.comm.wire import Wire
from flexshard.planner import FlexShardPlanner, Tier
from tests.executors import models, ranks

ROWS, DIM = 64, 32
FUSED = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1, "eps": 1e-8}


def collection() -> EmbeddingCollection:
    torch.manual_seed(1)
    config = EmbeddingConfig(
        name="goods", embedding_dim=DIM, data_type=DataType.FP16, num_embeddings=ROWS, feature_names=["f"]
    )
    return EmbeddingCollection(tables=[config])


def sharded(whose: str, registry: Any = None) -> Any:
    model: Any = torch.nn.Module()
    model.rows = collection()
    if whose == "torchrec":
        sharder: Any = EmbeddingCollectionSharder(FUSED)
        how = {"goods": row_wise(compute_kernel="fused")}
        plan = ShardingPlan(
            {
                "rows": construct_module_sharding_plan(
                    model.rows, how, sharder, local_size=1, world_size=2, device_type="cpu"
                )
            }
        )
    else:
        counts = [1000 // (1 + row) for row in range(ROWS)]
        profile = flexshard.AccessProfile.from_counts(counts, num_samples=1000)
        table = flexshard.Table("goods", ROWS, DIM, profile, dtype="float16", features=["f"])
        solved = flexshard.solve([table], models.small_cluster(2, 1), batch_size=8, budget="1MiB")
        sizes = [(2, ROWS)] if whose == "one tier" else [(1, ROWS // 2), (2, ROWS // 2)]
        tiers, first = [], 0
        for size, rows in sizes:
            tiers.append(
                Tier(strategy_name(size, 2), size, rows, first, 0.0, None, 0.0, 0.0, 0.0, first_holder=size - 1)
            )
            first += rows
        placed = replace(solved.tables["goods"], tiers=tuple(tiers))
        solved = replace(solved, tables={"goods": placed})
        sharder = FlexShardEmbeddingCollectionSharder(FUSED, registry)
        plan = FlexShardPlanner(solved, profiles={"goods": profile}).plan(model, [sharder])
    return DistributedModelParallel(model, plan=plan, sharders=[sharder], device=torch.device("cpu"))


def weights(parallel: Any) -> torch.Tensor:
    found = parallel.state_dict()["rows.embeddings.goods.weight"]
    if hasattr(found, "full_tensor"):
        return found.full_tensor().float()
    full = torch.zeros(ROWS, DIM)
    for shard in found.local_shards():
        full[shard.metadata.shard_offsets[0] :][: shard.tensor.shape[0]] = shard.tensor.float()
    torch.distributed.all_reduce(full)
    return full


def moved(rank: int, whose: str, scale: float, mean_over: int, seed: int = 0) -> tuple[float, bool, float]:
    """How far weights move under a gradient of this size per lookup, whether all stay finite, and the share of
    elements of rows that were read that do not move at all.
    """
    parallel = sharded(whose)
    before = weights(parallel)
    generator = torch.Generator().manual_seed(seed + rank)
    ids = torch.randint(0, ROWS, (mean_over,), generator=generator)
    out = parallel.module.rows(KeyedJaggedTensor(["f"], ids, lengths=torch.ones(mean_over, dtype=torch.long)))
    target = torch.rand(mean_over, DIM, generator=generator) + 0.5
    (out["f"].values() * target * scale).sum().backward()
    after = weights(parallel)
    read = torch.zeros(ROWS)
    read[ids] = 1
    torch.distributed.all_reduce(read)
    still = (after == before)[read > 0].float().mean()
    return float((after - before).abs().max()), bool(after.isfinite().all()), float(still)


@pytest.mark.parametrize("whose", ["one tier", "two tiers"])
@pytest.mark.parametrize(("scale", "lookups"), [(2e-8, 16), (1e5, 16), (1 / (2048 * 50), 2048 * 5)])
def test_gradients_of_every_size(whose: str, scale: float, lookups: int) -> None:
    for expected, found in zip(
        ranks.run(2, 1, moved, "torchrec", scale, lookups), ranks.run(2, 1, moved, whose, scale, lookups), strict=True
    ):
        assert found[0] == pytest.approx(expected[0], rel=1e-2)
        assert found[0] > 0.05
        assert found[1]
        assert found[2] == pytest.approx(expected[2], abs=0.01)


def with_codecs(rank: int, precision: str) -> list[str]:
    # TorchRec's registry takes FP16 for BF16 over gloo, without a word of its own.
    config = QCommsConfig(forward_precision=CommType.FP32, backward_precision=CommType[precision])
    registry = {CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.name: get_qcomm_codecs(config)}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        sharded("two tiers", registry)
    return [str(warning.message) for warning in said if "gradients" in str(warning.message)]


def test_what_quantised_gradients_lose_is_said() -> None:
    (text,) = ranks.run(2, 1, with_codecs, "FP16")[0]
    assert "gradients travel as FP16" in text
    assert "below 6e-08 become 0" in text
    assert "above 65504" in text
    (text,) = ranks.run(2, 1, with_codecs, "BF16")[0]
    assert "8 significant bits" in text
    assert ranks.run(2, 1, with_codecs, "FP32") == [[], []]


def with_int8(rank: int) -> float:
    config = QCommsConfig(forward_precision=CommType.INT8, backward_precision=CommType.FP32)
    parallel = sharded("one tier", {CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.name: get_qcomm_codecs(config)})
    ids = torch.arange(ROWS)
    out = parallel.module.rows(KeyedJaggedTensor(["f"], ids, lengths=torch.ones(ROWS, dtype=torch.long)))
    return float((out["f"].values() - weights(parallel)).abs().max())


def test_rows_of_eight_bits_on_the_wire() -> None:
    for difference in ranks.run(2, 1, with_int8):
        assert 0 < difference < 0.01


def test_rows_that_do_not_fit_the_precision_are_named() -> None:
    codec = get_qcomm_codecs(QCommsConfig(forward_precision=CommType.INT8)).forward
    with pytest.raises(PlanError, match="rows of dimension 8 cannot be sent in the precision"):
        _ = Wire((64, 8), (torch.float32,) * 2, codec).row_bytes
