"""Tables of TorchRec's collections as tensor trains: alone, beside others, and on several ranks."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torchrec")

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.modules.embedding_configs import PoolingType

import flexshard
from flexshard.costmodels import TableRates, TTRates
from flexshard.embeddings import CompressedEmbeddingCollection, TTEmbedding, TTShape, compress, updated_in_backward
from flexshard.errors import TableError
from flexshard.executors import FlexShardEmbeddingCollectionSharder
from flexshard.planner import CompressionPlan, FlexShardPlanner, TTOption, plan_compression
from tests.executors import models, ranks

ROWS, DIM = 60, 8
RATE, STEPS = 0.1, 4


def batch(rank: int, step: int, *, weighted: bool = False) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    lengths = torch.randint(0, 5, (12,), generator=generator)
    count = int(lengths.sum())
    return KeyedJaggedTensor(
        keys=["a", "b", "c"],
        values=torch.randint(0, ROWS, (count,), generator=generator),
        lengths=lengths,
        weights=torch.rand(count, generator=generator) if weighted else None,
    )


class Model(nn.Module):
    """Feature a is looked up in two tables."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        tables = {"x": ["a", "c"], "y": ["a"], "z": ["b"]}
        self.lookup = EmbeddingCollection(
            tables=[
                EmbeddingConfig(name=name, num_embeddings=ROWS, embedding_dim=DIM, feature_names=list(features))
                for name, features in tables.items()
            ]
        )

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        found = self.lookup(features)
        return sum(  # type: ignore[return-value]
            (number + 1) * found[name].values().sin().sum() for number, name in enumerate(["a@x", "c", "a@y", "b"])
        )


def full_rank() -> dict[str, Any]:
    """A tensor train that can be any table of this size."""
    return {"row_factors": [3, 4, 5], "dim_factors": [2, 2, 2], "tt_ranks": [6, 10]}


@pytest.mark.parametrize("names", [["x"], ["y", "z"], ["x", "y", "z"]])
def test_sequences_are_those_of_the_tables(names: list[str]) -> None:
    model = Model()
    features = batch(0, 0)
    expected = {name: rows.values().detach() for name, rows in model.lookup(features).items()}
    changed, report = compress(model, {name: full_rank() for name in names}, allow_larger=True)
    assert changed is model
    assert [entry.name for entry in report] == [f"lookup.{name}" for name in names]
    assert all(entry.error is not None and entry.error < 1e-3 for entry in report)
    found = model.lookup(features)
    assert list(found) == list(expected)
    for name, rows in expected.items():
        torch.testing.assert_close(found[name].values(), rows, atol=1e-4, rtol=1e-4)
        assert found[name].lengths().tolist() == features[name.split("@")[0]].lengths().tolist()


@pytest.mark.parametrize("weighted", [False, True])
def test_bags_are_those_of_the_tables(weighted: bool) -> None:
    pooling = {"x": PoolingType.SUM, "y": PoolingType.SUM if weighted else PoolingType.MEAN, "z": PoolingType.SUM}
    model: nn.Module = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=name, num_embeddings=ROWS, embedding_dim=DIM, feature_names=features, pooling=pooling[name]
            )
            for name, features in {"x": ["a", "c"], "y": ["a"], "z": ["b"]}.items()
        ],
        is_weighted=weighted,
    )
    features = batch(1, 0, weighted=weighted)
    expected = model(features)
    model, _ = compress(model, {"x": full_rank(), "z": full_rank()}, allow_larger=True)
    found = model(features)
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found.values(), expected.values(), atol=1e-4, rtol=1e-4)


def bags(names: str = "xz") -> tuple[Any, EmbeddingBagCollection]:
    """Two features of one table, and a table that may stay as it is; and what they were."""
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(name="x", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["a", "b"]),
        EmbeddingBagConfig(name="z", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["c"]),
    ]
    collection = EmbeddingBagCollection(tables=tables)
    compressed, _ = compress(copy.deepcopy(collection), {name: full_rank() for name in names}, allow_larger=True)
    return compressed, collection


@pytest.mark.parametrize("names", ["x", "xz"])
@pytest.mark.parametrize(("strides", "samples"), [((2, 2, 2), 2), ((3, 1, 2), 4), ((2, 3, 1), 3)])
def test_bags_that_samples_share(names: str, strides: tuple[int, ...], samples: int) -> None:
    compressed, collection = bags(names)
    lengths = torch.arange(sum(strides)) % 3
    inverse = torch.stack([(torch.arange(samples) * 2 + 1) % stride for stride in strides])
    features = KeyedJaggedTensor(
        ["a", "b", "c"],
        torch.arange(int(lengths.sum())),
        lengths=lengths,
        stride_per_key_per_rank=[[stride] for stride in strides],
        inverse_indices=(["a", "b", "c"], inverse),
    )
    torch.testing.assert_close(compressed(features).values(), collection(features).values(), atol=1e-4, rtol=1e-4)


def test_lengths_by_feature_and_sample() -> None:
    compressed, collection = bags()
    flat = batch(0, 0)
    features = KeyedJaggedTensor(flat.keys(), flat.values(), lengths=flat.lengths().view(3, -1))
    torch.testing.assert_close(compressed(features).values(), collection(flat).values(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("optimizer", [None, "sgd"])
def test_what_was_frozen_stays_frozen(optimizer: str | None) -> None:
    collection = EmbeddingCollection(
        tables=[
            EmbeddingConfig(name=name, num_embeddings=ROWS, embedding_dim=DIM, feature_names=[feature])
            for name, feature in zip("xyz", "abc", strict=True)
        ]
    )
    for name in "xz":
        collection.embeddings[name].weight.requires_grad_(False)
    how = {**full_rank(), "optimizer": optimizer, "dtype": torch.bfloat16}
    compressed, _ = compress(collection, {"x": how, "y": how}, allow_larger=True)
    tables: Any = compressed.tables
    before = {name: tables[name].to_dense() for name in "xy"}
    found = compressed(batch(0, 0))  # type: ignore[operator]
    assert {jagged.values().dtype for jagged in found.values()} == {torch.float32}
    sum((jagged.values() ** 2).sum() for jagged in found.values()).backward()
    if optimizer is None:
        torch.optim.SGD([one for one in compressed.parameters() if one.requires_grad], 0.5).step()
    assert torch.equal(tables["x"].to_dense(), before["x"])
    assert not torch.equal(tables["y"].to_dense(), before["y"])


def test_a_table_is_started_anew_if_asked() -> None:
    model = Model()
    _, (report,) = compress(model, {"lookup.x": {"tt_ranks": 2, "optimizer": "adagrad"}}, decompose=False)
    assert report.error is None
    table = model.lookup.tables["x"]
    assert isinstance(table, TTEmbedding)
    assert table.optimizer == "adagrad"
    assert isinstance(model.lookup, CompressedEmbeddingCollection)


def test_tables_that_are_not_there() -> None:
    with pytest.raises(TableError, match=r"no table 'q'; it has lookup\.x, lookup\.y, lookup\.z"):
        compress(Model(), {"q": 4})
    twice = nn.ModuleDict({"one": Model(), "two": Model()})
    with pytest.raises(TableError, match=r"several tables are called 'x': one\.lookup\.x, two\.lookup\.x"):
        compress(twice, {"x": 4})
    compress(twice, {"two.lookup.x": 2}, decompose=False)
    with pytest.raises(TableError, match=r"factors .* cover 6 rows only"):
        compress(Model(), {"x": {"tt_ranks": 2, "row_factors": [1, 2, 3]}})


def test_what_is_not_smaller_is_refused_and_what_is_not_alike_is_said() -> None:
    def model() -> EmbeddingCollection:
        table = EmbeddingConfig(name="ads", num_embeddings=1000, embedding_dim=16, feature_names=["ad"])
        made = EmbeddingCollection(tables=[table])
        torch.manual_seed(0)
        with torch.no_grad():
            made.embeddings["ads"].weight.copy_(TTEmbedding(1000, 16, tt_ranks=4, std=1.0).to_dense())
        return made

    largest = max(rank for rank in range(1, 100) if TTShape.choose(1000, 16, rank).compression > 1)
    with pytest.raises(
        TableError, match=f"'ads': a tensor train of .* numbers saves nothing of 16,000; .* to {largest} "
    ):
        compress(model(), {"ads": 64}, decompose=False)
    larger, report = compress(model(), {"ads": 64}, allow_larger=True)
    assert isinstance(larger, CompressedEmbeddingCollection)
    assert report[0].shape.compression < 1
    with pytest.warns(
        UserWarning, match=r"'ads': .* ranks \(1, 1\) .* relative error of 0\.[5-9]\d?; with rank [24] it is"
    ):
        compress(model(), {"ads": 1})
    _, report = compress(model(), {"ads": 4})
    assert report[0].error is not None
    assert report[0].error < 1e-5
    numbers = report[0].shape.parameters
    assert str(report[0]).startswith(f"ads: 1,000 x 16 by TT ranks 4 x 4: {numbers:,} numbers, ")
    noise = model()
    with torch.no_grad():
        noise.embeddings["ads"].weight.normal_()
    with pytest.warns(UserWarning, match="no rank that makes the table smaller has 0.5 or less"):
        compress(noise, {"ads": 4})


def test_a_table_of_several_features_is_updated_once() -> None:
    torch.manual_seed(0)
    fused, plain = Model(), Model()
    compress(fused, {"x": full_rank() | {"optimizer": "sgd", "learning_rate": RATE}}, allow_larger=True)
    compress(plain, {"x": full_rank()}, allow_larger=True)
    features = batch(0, 0)
    fused(features).backward()
    plain(features).backward()
    for a, b in zip(fused.lookup.tables["x"].cores, plain.lookup.tables["x"].cores, strict=True):
        assert b.grad is not None
        torch.testing.assert_close(a.detach(), b.detach() - RATE * b.grad, atol=1e-5, rtol=1e-4)


def test_a_module_that_stands_twice_is_replaced_twice_and_all_or_nothing_is() -> None:
    tied = nn.Module()
    tied.a = Model().lookup
    tied.b = tied.a
    compress(tied, {"a.x": full_rank()}, allow_larger=True)
    assert tied.a is tied.b
    assert isinstance(tied.b, CompressedEmbeddingCollection)
    two = nn.ModuleDict({"one": Model(), "two": Model()})
    for wrong in (0, "x", {"bogus": 1}, {"tt_ranks": 2, "mode": "sum"}):
        with pytest.raises(TableError):
            compress(two, {"one.lookup.x": 2, "two.lookup.x": wrong}, decompose=False)  # type: ignore[dict-item]
        assert isinstance(two["one"].lookup, EmbeddingCollection)
    with pytest.raises(TableError, match="is named twice"):
        compress(two["one"], {"lookup.x": 4, "x": 4})


class Clicks(nn.Module):
    """A table of the model's own, with an optimizer in backward, and a layer that another optimizer steps."""

    def __init__(self, optimizer: str, rank: int = 0, **more: Any) -> None:
        super().__init__()
        torch.manual_seed(7 + rank)  # the first one's numbers are everybody's
        how: dict[str, Any] = {"tt_ranks": 4, "std": 1.0, "hot_rows": 3, "optimizer": optimizer, "learning_rate": RATE}
        how |= more
        if torch.distributed.is_initialized():
            how["process_group"] = torch.distributed.group.WORLD
        self.table = TTEmbedding(ROWS, DIM, **how)
        self.over = nn.Linear(DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.over(self.table(ids).sin()).square().mean()


def ids_of(rank: int, step: int) -> torch.Tensor:
    return torch.randint(0, ROWS, (12,), generator=torch.Generator().manual_seed(100 * step + rank))


def train_clicks(model: nn.Module, table: TTEmbedding, world: int, rank: int | None) -> list[np.ndarray]:
    """On the ids of one rank, or of all."""
    dense = [parameter for name, parameter in model.named_parameters() if ".over." in f".{name}"]
    optimizer = torch.optim.SGD(dense, lr=RATE)
    for step in range(STEPS):
        if step == 2:
            table.pin_rows(torch.tensor([1, 7]))
        optimizer.zero_grad()
        batches = [ids_of(one, step) for one in range(world)]
        model(torch.cat(batches) if rank is None else batches[rank]).backward()
        optimizer.step()
        assert all(core.grad is None for core in table.cores)
    return [parameter.detach().numpy().copy() for parameter in model.parameters()]


def fused_in_a_job(rank: int, optimizer: str, wrapped: str) -> list[np.ndarray]:
    model = Clicks(optimizer, rank)
    table = model.table
    parallel: Any
    ignored = updated_in_backward(model)
    assert len(ignored) == 4
    if wrapped == "DDP":
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
        parallel = nn.parallel.DistributedDataParallel(model)
    else:
        wrapper = DefaultDataParallelWrapper(params_to_ignore=ignored)
        parallel = DistributedModelParallel(
            model, device=torch.device("cpu"), sharders=[], data_parallel_wrapper=wrapper
        )
    return train_clicks(parallel, table, torch.distributed.get_world_size(), rank)


@pytest.mark.parametrize(
    ("optimizer", "wrapped", "world"), [("sgd", "DDP", 2), ("adam", "DDP", 2), ("rowwise_adagrad", "DMP", 2)]
)
def test_fused_updates_in_a_job_are_those_of_the_whole_batch(optimizer: str, wrapped: str, world: int) -> None:
    model = Clicks(optimizer)
    expected = train_clicks(model, model.table, world, None)
    for found in ranks.run(1, world, fused_in_a_job, optimizer, wrapped):
        for own, due in zip(found, expected, strict=True):
            np.testing.assert_allclose(own, due, atol=2e-5, rtol=1e-4)


def half_a_step(rank: int, scaled: bool) -> list[str]:
    """What changes where one rank's gradient is not finite, of a row that is pinned or of one that is not."""
    found = []
    for wrong in (1, 5):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
        model = Clicks("adam", rank, grad_scaler=scaler)
        model.table.pin_rows(torch.tensor([1]))
        rows = model.table(torch.tensor([1, 2, 5]))
        before = [tensor.clone() for tensor in model.table.state_dict().values()]
        upstream = torch.ones(3, DIM)
        if rank == 1:
            upstream[[1, 2, 5].index(wrong)] = float("inf")
        try:
            rows.backward(upstream)
            found.append("taken")
        except TableError as error:
            found.append(str(error))
        after = model.table.state_dict()
        assert all(torch.equal(a, b) for a, b in zip(before, after.values(), strict=True))
        model.table(torch.tensor([1, 2, 5])).sum().backward()  # and it goes on
        assert not torch.equal(model.table.cores[0], before[list(after).index("cores.0")])
    return found


def test_no_rank_takes_half_a_step() -> None:
    for found in ranks.run(1, 2, half_a_step, False):
        assert all("numbers that are not finite" in said for said in found)
    for found in ranks.run(1, 2, half_a_step, True):
        assert found == ["taken", "taken"]  # a scaler leaves it out without a word


def folded_in_a_job(rank: int) -> tuple[list[np.ndarray], str]:
    model = Clicks("sgd", rank)
    model.table.pin_rows(torch.tensor([1, 7]))
    for step in range(3):
        model(ids_of(rank, step)).backward()
    model.table.unpin_rows(steps=5)
    with pytest.raises(TableError) as caught:
        model.table.pin_rows(torch.tensor([rank]))
    return [model.table.to_dense().numpy()], str(caught.value)


def test_ranks_fold_the_same_rows_to_the_same_cores() -> None:
    (first, said), (second, also) = ranks.run(1, 2, folded_in_a_job)
    np.testing.assert_array_equal(first[0], second[0])
    assert said == also
    assert "ranks pin or unpin different rows" in said


def fused_by_itself(rank: int) -> str:
    with pytest.raises(TableError) as caught:
        TTEmbedding(ROWS, DIM, tt_ranks=2, optimizer="sgd")(torch.arange(3))
    return str(caught.value)


def test_gradients_that_nobody_averages_are_refused() -> None:
    assert all("process_group=torch.distributed.group.WORLD" in said for said in ranks.run(1, 2, fused_by_itself))


def reference(world: int) -> dict[str, np.ndarray]:
    model, _ = compress(Model(), {"x": full_rank()}, allow_larger=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum(model(batch(rank, step)) for rank in range(world)) / world).backward()  # type: ignore[union-attr]
        optimizer.step()
    tables = model.get_submodule("lookup.collection").embeddings
    return {
        "x": model.get_submodule("lookup.tables.x").to_dense().numpy(),
        **{name: tables[name].weight.detach().numpy() for name in ("y", "z")},
    }


def decide() -> tuple[CompressionPlan, flexshard.AccessProfile]:
    """x is compressed, since lookups of dense tables are slow on this imagined machine; y and z are not offered any."""
    counts = (100 / (1 + np.arange(ROWS))).astype(np.int64)
    profile = flexshard.AccessProfile.from_counts(counts, num_samples=10, num_rows=ROWS)
    tables = [flexshard.Table(name, ROWS, DIM, profile, optimizer="sgd") for name in "xyz"]
    shape = TTShape.choose(ROWS, DIM, **full_rank())
    slow = TableRates(ROWS, DIM, (0.0, 1.0), (0.0, 0.5, 0.0), (0.0, 0.5, 0.0))
    decision = plan_compression(
        tables,
        models.small_cluster(2, 2),
        options={"x": [TTOption(shape)]},
        rates=TTRates("imagined", (0.0,) * 12, (0.0, 1.0, 0.0), (), (slow,)),
        batch_size=12,
        budget="+1MiB",
    )
    return decision, profile


def train(rank: int, decision: CompressionPlan, profile: flexshard.AccessProfile) -> dict[str, np.ndarray]:
    model, _ = compress(Model(), decision.shapes, allow_larger=True)
    fused = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": RATE}
    sharders = [FlexShardEmbeddingCollectionSharder(fused)]
    planner = FlexShardPlanner(decision.plan, profiles={"y": profile, "z": profile})
    plan = planner.collective_plan(model, sharders)
    parallel = DistributedModelParallel(model, plan=plan, sharders=sharders, device=torch.device("cpu"))
    cores = [parameter for name, parameter in parallel.named_parameters() if ".cores." in name]
    assert len(cores) == 3
    optimizer = torch.optim.SGD(cores, lr=RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        parallel(batch(rank, step)).backward()
        optimizer.step()
    from flexshard.executors import full_state_dict

    whole = full_state_dict(parallel)
    found = {name.split(".")[-2]: tensor.numpy() for name, tensor in whole.items() if ".embeddings." in name}
    tables = [part for part in parallel.modules() if isinstance(part, TTEmbedding)]
    return found | {"x": tables[0].to_dense().numpy()}


def test_under_distributed_model_parallel_beside_a_plan() -> None:
    """A decision carried out: cores on every rank, their gradients all-reduced; other tables split as planned."""
    expected = reference(4)
    first, *others = ranks.run(2, 2, train, *decide())
    assert first.keys() == expected.keys()
    for name, weight in expected.items():
        np.testing.assert_allclose(first[name], weight, atol=2e-5, rtol=2e-4)
    for found in others:  # the whole tables are gathered on rank 0
        np.testing.assert_array_equal(found["x"], first["x"])


def hot_in_a_job(rank: int) -> list[np.ndarray]:
    torch.manual_seed(3)
    table = nn.parallel.DistributedDataParallel(TTEmbedding(ROWS, DIM, tt_ranks=4, std=1.0, hot_rows=3))
    optimizer = torch.optim.SGD(table.parameters(), lr=RATE)
    for step in range(4):
        if step == 2:
            table.module.pin_rows(torch.tensor([1, 7]))
        optimizer.zero_grad()
        table(torch.arange(rank, 20, 2 + rank)).square().sum().backward()
        optimizer.step()
    table.module.unpin_rows(steps=5)
    return [table.module.to_dense().numpy()]


def test_hot_rows_in_a_job_are_the_same_on_every_rank() -> None:
    first, second = ranks.run(1, 2, hot_in_a_job)
    np.testing.assert_array_equal(first[0], second[0])


def test_ids_stay_where_a_collection_puts_them() -> None:
    torch.manual_seed(0)
    configs = [EmbeddingConfig(name=n, num_embeddings=ROWS, embedding_dim=DIM, feature_names=[n]) for n in ("a", "b")]
    before = EmbeddingCollection(tables=configs, need_indices=True)
    features = batch(0, 0)
    expected = before(features)
    after, _ = compress(before, {"a": full_rank()}, allow_larger=True)
    found = after(features)
    for name in ("a", "b"):
        assert torch.equal(found[name].weights(), expected[name].weights())
        torch.testing.assert_close(found[name].values(), expected[name].values(), atol=1e-5, rtol=1e-5)


def test_shapes_of_a_decision_are_taken() -> None:
    model, report = compress(Model(), {"x": TTShape.choose(ROWS, DIM, 2, cores=2)}, decompose=False)
    assert report[0].shape == TTShape.choose(ROWS, DIM, 2, cores=2)
    assert model.get_submodule("lookup.tables.x").shape == report[0].shape
