"""The store of caches on GPUs, on the host here: rows with copies apart from the host's rows, the parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torchrec")
pytest.importorskip("numba")

import torch
from torchrec import EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.model_parallel import DistributedModelParallel

from flexshard.errors import CacheError
from flexshard.executors import FlexShardEmbeddingCollectionSharder
from flexshard.executors.stores.copied_slots import CopiedSlots
from flexshard.executors.stores.fused import FusedStore
from flexshard.executors.stores.mapped import MappedStore
from flexshard.executors.stores.updates import OptimizerSpec
from flexshard.planner import FlexShardPlanner
from tests.executors import lookahead_model as looking, ranks, test_lookahead as host
from tests.host_waits import as_on_cuda

HOST = torch.device("cpu")
SLOTS, DIM = 12, 4
OTHERS = [range(2, 5), range(8, 12)]  # without copies
COPIED = [0, 1, 5, 6, 7]


def store() -> MappedStore:
    spec = OptimizerSpec.of({"optimizer": "exact_sgd", "learning_rate": 1.0}, "t", HOST)
    how: dict[str, Any] = {"cache_rows": 4, "cache": FusedStore, "label": "t"}
    made = MappedStore(spec, SLOTS, DIM, torch.float32, HOST, **how, ranges=OTHERS)
    made.part("weight").copy_(torch.arange(SLOTS * DIM, dtype=torch.float32).view(SLOTS, DIM))
    made.rows_written()
    return made


def write(made: MappedStore) -> None:
    """As users do to parameters."""
    with torch.no_grad():
        made.flat.mul_(2.0)


def test_which_slots_have_copies() -> None:
    slots = CopiedSlots(SLOTS, OTHERS, HOST)
    assert slots.all().tolist() == COPIED
    assert len(slots) == len(COPIED)
    assert slots.among(torch.tensor(COPIED)).tolist() == list(range(len(COPIED)))
    assert slots.range_among(slice(5, 8)) == slice(2, 5)
    assert slots.range_among(slice(5, 12)) == slice(2, 5)


def test_copies_are_updated_apart_and_are_the_parameters_after_a_flush() -> None:
    made, gradient = store(), torch.ones(2, DIM)
    before = made.part("weight").clone()
    made.update_rows(torch.tensor([1, 6]), gradient)
    made.set_learning_rate(0.5)
    made.update_copies(slice(5, 7), gradient)
    expected = before[[1, 5, 6]] - torch.tensor([[1.0], [0.5], [1.5]])
    assert torch.equal(made.rows_at(torch.tensor([1, 5, 6])), expected)
    assert torch.equal(made.values, before)  # older, so far
    assert torch.equal(made.part("weight")[[1, 5, 6]], expected)


def test_writing_to_parameters_counts_or_is_refused() -> None:
    made, every = store(), torch.tensor(COPIED)
    before = made.rows_at(every)
    write(made)
    assert torch.equal(made.rows_at(every), 2.0 * before)
    made.update_rows(torch.tensor([1]), torch.ones(1, DIM))
    made.flush()
    write(made)
    assert torch.equal(made.rows_at(torch.tensor([1])), 2.0 * (2.0 * before[1:2] - 1.0))
    made.update_rows(torch.tensor([1]), torch.ones(1, DIM))
    write(made)  # to what is older than the copy
    with pytest.raises(CacheError, match="parameters were written to while the cache had newer rows"):
        made.rows_at(every)
    assert made.take_failure() is not None


def test_what_is_released_is_not_the_hosts() -> None:
    made = store()
    made.update_rows(torch.tensor([1]), torch.ones(1, DIM))
    made.release()
    left, row = made._near.flat.untyped_storage().nbytes(), made.values[1].tolist()
    assert (left, row) == (0, [3.0, 4.0, 5.0, 6.0])


def test_many_rows_are_moved_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from flexshard.executors.lookahead.host_rows import LocalRows

    monkeypatch.setattr("flexshard._internal.parts._PART_BYTES", 3 * 4 * (DIM + 1))
    generator = torch.Generator().manual_seed(0)
    values = {"weight": torch.randn(20, DIM, generator=generator), "sum": torch.randn(20, 1, generator=generator)}
    cache = {"weight": torch.zeros(10, DIM), "sum": torch.zeros(10, 1)}
    rows = LocalRows(values, lambda: False)
    rows._on_host = False  # as a GPU's
    slots, places = np.array([3, 19, 0, 7, 8, 11, 2]), np.array([9, 0, 1, 2, 7, 5, 4])
    rows.fetch(slots, cache, places)
    for name, whole in values.items():
        assert torch.equal(cache[name][places], whole[slots])
        cache[name] *= 2
    before = {name: whole.clone() for name, whole in values.items()}
    rows.put_back(slots, cache, places)
    for name, whole in values.items():
        assert torch.equal(whole[slots], 2 * before[name][slots])


def drawn(rank: int, plan: Any) -> list[bool]:
    """Whether copies of rows that are drawn where they are sharded are what the parameters are."""
    torch.manual_seed(3)
    model = looking.Model()
    tables = [
        EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=looking.DIM, feature_names=[name])
        for name, rows in looking.ROWS.items()
    ]
    model.tables = EmbeddingCollection(device=torch.device("meta"), tables=tables)
    factors = dict.fromkeys(looking.CACHED, 0.3)
    sharders: Any = [FlexShardEmbeddingCollectionSharder(host.fused("adagrad"), cache_load_factors=factors)]
    with as_on_cuda():
        sharding = FlexShardPlanner(plan, profiles=host._profiles()).collective_plan(model, sharders)
        parallel = DistributedModelParallel(model, plan=sharding, sharders=sharders, device=HOST)
        found = []
        for cached in looking.caches(parallel):
            assert isinstance(cached, MappedStore)
            every = cached._copied_slots
            rows = cached.rows_at(every)
            found += [bool(rows.abs().sum() > 0), torch.equal(rows, cached.part("weight")[every])]
    return found


def test_rows_of_a_model_without_memory_are_drawn() -> None:
    assert ranks.run(1, 2, drawn, looking.plan_for(1, 2)) == [[True, True]] * 2
