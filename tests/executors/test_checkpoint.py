"""A checkpoint holds the logical table: saved under one plan, loaded under another, moved while running."""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("torchrec")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from flexshard import units
from flexshard.errors import CheckpointError, OutputError, PlanError
from flexshard.executors import full_state_dict, load_checkpoint, save_checkpoint
from flexshard.executors.state import live_tensors
from tests.executors import models, ranks
from tests.executors.test_numerics import TOLERANCE, largest
from tests.slow import first

RowsOf = dict[str, list[tuple[int, int, str]]]


def split_for(cluster: Any, seed: int) -> RowsOf:
    return models.random_split(cluster, np.random.default_rng(seed))


def first_half(rank: int, cluster: Any, seed: int, folder: str, optimizer: str) -> None:
    from flexshard.executors import save_checkpoint

    parallel, optim = models.shard(models.plan_of(cluster, split_for(cluster, seed), seed=seed), optimizer, seed=seed)
    for step in range(5):
        optim.zero_grad()
        parallel(models.make_batch(step, rank))[0].backward()
        optim.step()
    save_checkpoint(folder, parallel, optim)


def second_half(rank: int, cluster: Any, seed: int, folder: str, optimizer: str) -> dict[str, float]:
    from flexshard.executors import load_checkpoint

    parallel, optim = models.shard(models.plan_of(cluster, split_for(cluster, seed), seed=seed), optimizer, seed=seed)
    load_checkpoint(folder, parallel, optim)
    outputs = models.train(parallel, optim, rank, range(5, 10))
    expected = models.reference(optimizer, 10, cluster.world_size)
    return models.differences(parallel, outputs, rank, replace(expected, outputs=expected.outputs[5:]))


@pytest.mark.parametrize("optimizer", first(2, list(models.OPTIMIZERS)[::-1]))
def test_training_goes_on_under_another_plan_and_ranking(tmp_path: Path, optimizer: str) -> None:
    folder = str(tmp_path / "checkpoint")
    ranks.run(2, 2, first_half, models.small_cluster(2, 2), 1, folder, optimizer)
    found = largest(ranks.run(1, 4, second_half, models.small_cluster(1, 4), 2, folder, optimizer))
    for key, difference in found.items():
        assert difference <= TOLERANCE[optimizer][key], found


def save_four(rank: int, folder: str) -> list[Any]:
    from flexshard.executors import full_state_dict, save_checkpoint

    cluster = models.small_cluster(2, 2)
    parallel, optim = models.shard(models.plan_of(cluster, split_for(cluster, 3)), "rowwise_adagrad")
    models.train(parallel, optim, rank, range(3))
    save_checkpoint(folder, parallel, optim)
    torch.save(full_state_dict(parallel), f"{folder}/export.pt") if rank == 0 else full_state_dict(parallel)
    return state_of(parallel)


def state_of(parallel: Any) -> list[Any]:
    states = parallel.fused_optimizer.state_dict()["state"]
    weights = {k: v.full_tensor().numpy() for k, v in parallel.state_dict().items() if "embeddings" in k}
    return [weights, {n: t.full_tensor().numpy() for s in states.values() for n, t in s.items()}]


def load_other(rank: int, nodes: int, per_node: int, folder: str) -> list[Any]:
    from flexshard.executors import load_checkpoint

    cluster = models.small_cluster(nodes, per_node)
    parallel, optim = models.shard(models.plan_of(cluster, split_for(cluster, 9), seed=4), "rowwise_adagrad", seed=4)
    load_checkpoint(folder, parallel, optim)
    return state_of(parallel)


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (4, 2)])
def test_any_number_of_ranks_loads_it(tmp_path: Path, shape: tuple[int, int]) -> None:
    folder = str(tmp_path)
    saved = ranks.run(2, 2, save_four, folder)[0]
    loaded = ranks.run(*shape, load_other, *shape, folder)[0]
    for before, after in zip(saved, loaded, strict=True):
        assert before.keys() == after.keys()
        assert all(np.array_equal(before[key], after[key]) for key in before)
    unsharded = models.new_model()
    unsharded.load_state_dict(torch.load(tmp_path / "export.pt"))
    exported = unsharded.wide.embeddings["goods"].weight.detach().numpy()
    assert np.array_equal(exported, saved[0]["wide.embeddings.goods.weight"])


def save_beside_training(rank: int, folder: str) -> tuple[list[Any], list[Any]]:
    """torch's copy of the state goes to disk while training goes on."""
    cluster = models.small_cluster(1, 2)
    plan = models.plan_of(cluster, split_for(cluster, 3))
    parallel, optim = models.shard(plan, "rowwise_adagrad")
    models.train(parallel, optim, rank, range(2))
    before = state_of(parallel)
    state = {"model": parallel.state_dict(), "optimizer": parallel.fused_optimizer.state_dict()}
    saving = dcp.async_save(state, checkpoint_id=folder, process_group=dist.new_group(backend="gloo"))
    models.train(parallel, optim, rank, range(2, 4))
    saving.result()
    parallel, _ = models.shard(plan, "rowwise_adagrad")
    state = {"model": parallel.state_dict(), "optimizer": parallel.fused_optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    parallel.load_state_dict(state["model"])
    parallel.fused_optimizer.load_state_dict(state["optimizer"])
    return before, state_of(parallel)


def test_saving_beside_training(tmp_path: Path) -> None:
    before, after = ranks.run(1, 2, save_beside_training, str(tmp_path))[0]
    for expected, found in zip(before, after, strict=True):
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[name], values) for name, values in expected.items())


def killed_while_saving(rank: int, folder: str) -> Any:
    """The second save ends in the middle of its files."""
    import os

    import torch.distributed.checkpoint as dcp

    from flexshard.executors import save_checkpoint

    cluster = models.small_cluster(2, 1)
    parallel, optim = models.shard(models.plan_of(cluster, split_for(cluster, 3)), "rowwise_adagrad")
    save_checkpoint(folder, parallel, optim)
    whole = dcp.save

    def half(*args: Any, **kwargs: Any) -> None:
        whole(*args, **kwargs)
        os._exit(9)

    dcp.save = half
    save_checkpoint(folder, parallel, optim)


def load_two(rank: int, folder: str) -> None:
    from flexshard.executors import load_checkpoint

    cluster = models.small_cluster(2, 1)
    parallel, optim = models.shard(models.plan_of(cluster, split_for(cluster, 3)), "rowwise_adagrad")
    load_checkpoint(folder, parallel, optim)


def test_a_killed_save_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    found = ranks.run(2, 1, killed_while_saving, folder, expect_failures=True)
    assert all("code 9" in str(error) for error in found)
    assert (tmp_path / "checkpoint" / "latest").read_text().strip() == "save-1"
    ranks.run(2, 1, load_two, folder)


def test_a_truncated_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    found = ranks.run(2, 1, load_two, str(folder), expect_failures=True)
    assert all(isinstance(error, CheckpointError) for error in found)
    assert "no checkpoint is here" in str(found[0])
    ranks.run(2, 2, save_four, str(folder))
    file = max((folder / "save-1").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-100])
    found = ranks.run(2, 1, load_two, str(folder), expect_failures=True)
    assert all(isinstance(error, CheckpointError) and file.name in str(error) for error in found), found


def resharded(rank: int, optimizer: str) -> tuple[dict[str, float], Any, Any, str]:
    from flexshard.executors import reshard

    said = io.StringIO()

    cluster = models.small_cluster(2, 2)
    parallel, optim = models.shard(models.plan_of(cluster, split_for(cluster, 21)), optimizer)
    outputs = models.train(parallel, optim, rank, range(5))
    other = models.plan_of(cluster, split_for(cluster, 22), seed=5)
    profiles = {name: models.profile_of(name, 5) for _, name in models.table_names()}
    with contextlib.redirect_stdout(said):
        moved = reshard(parallel, other, profiles=profiles)
    outputs += models.train(parallel, optim, rank, range(5, 10))
    again = reshard(parallel, other, profiles=profiles, quiet=True)
    assert parallel.module.wide.fingerprint == other.fingerprint
    expected = models.reference(optimizer, 10, 4)
    return models.differences(parallel, outputs, rank, expected), moved, again, said.getvalue()


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "sgd"])
def test_resharding_a_running_job(optimizer: str) -> None:
    found = ranks.run(2, 2, resharded, optimizer)
    for key, difference in largest([rank[0] for rank in found]).items():
        assert difference <= TOLERANCE[optimizer][key]
    _, moved, again, said = found[0]
    # What is said before is what moves; rank 0 says it alone.
    assert said.startswith(
        f"reshard: {moved.rows:,} copies of rows ({units.format_bytes(moved.nbytes)}) come from other"
    )
    assert f"{moved.kept:,} stay; about " in said
    assert [rank[3] for rank in found[1:]] == ["", "", ""]
    assert moved.rows > 0
    assert moved.kept > 0
    assert (again.rows, again.nbytes) == (0, 0)  # the same plan moves nothing


def rows_that_move(rank: int) -> int:
    from flexshard.executors import reshard

    cluster = models.small_cluster(2, 2)
    before: RowsOf = {name: [(4, rows, "dense")] for name, (rows, _) in (models.WIDE | models.NARROW).items()}
    after = {name: [(1, 2, "dense"), (4, tiers[0][1] - 2, "dense")] for name, tiers in before.items()}
    parallel, _ = models.shard(models.plan_of(cluster, before), "sgd")
    profiles = {name: models.profile_of(name) for _, name in models.table_names()}
    return reshard(parallel, models.plan_of(cluster, after), profiles=profiles).rows


def test_only_rows_that_change_place_travel() -> None:
    # The two hottest rows of each of four tables go to the three ranks that lack them. The others are dealt by id:
    # those behind a hot row move up by one rank, or by two, and only those ahead of both stay.
    expected = 0
    for name, (rows, _) in (models.WIDE | models.NARROW).items():
        hot = models.profile_of(name).ranked_rows[:2]
        expected += 2 * 3 + int((np.setdiff1d(np.arange(rows), hot) > hot.min()).sum())
    assert ranks.run(2, 2, rows_that_move)[0] == expected


def wrong_plan(rank: int) -> None:
    from flexshard.executors import reshard

    cluster = models.small_cluster(2, 1)
    parallel, _ = models.shard(models.plan_of(cluster, split_for(cluster, 3)), "sgd")
    other = models.small_cluster(2, 2)
    profiles = {name: models.profile_of(name) for _, name in models.table_names()}
    reshard(parallel, models.plan_of(other, split_for(other, 3)), profiles=profiles)


def test_resharding_to_a_plan_for_other_ranks_is_refused() -> None:
    found = ranks.run(2, 1, wrong_plan, expect_failures=True)
    assert all(isinstance(error, PlanError) and "the plan is for 4 ranks" in str(error) for error in found), found


def plan_of_other_tables(rank: int) -> None:
    from flexshard.executors import reshard

    cluster = models.small_cluster(2, 1)
    plan = models.plan_of(cluster, split_for(cluster, 3))
    parallel, _ = models.shard(plan, "sgd")
    tables = {"other" if name == "goods" else name: table for name, table in plan.tables.items()}
    profiles = {name: models.profile_of(name) for _, name in models.table_names()}
    reshard(parallel, replace(plan, tables=tables), profiles=profiles)


def test_resharding_to_a_plan_for_other_tables_is_refused() -> None:
    found = ranks.run(2, 1, plan_of_other_tables, expect_failures=True)
    assert all("the plan has no table 'goods'" in str(error) for error in found), found


def resharded_to_dedup(rank: int) -> tuple[float, float]:
    """Bytes of rows that are sent, by a model resharded to a plan with index deduplication and by a fresh one."""
    from flexshard.executors import Observer, reshard

    cluster = models.small_cluster(2, 1)
    whole: RowsOf = {name: [(2, rows, "dense")] for name, (rows, _) in (models.WIDE | models.NARROW).items()}
    profiles = {name: models.profile_of(name) for _, name in models.table_names()}
    dedup = models.plan_of(cluster, whole, index_dedup=True)
    moved, _ = models.shard(models.plan_of(cluster, whole), "sgd")
    reshard(moved, dedup, profiles=profiles)
    fresh, _ = models.shard(dedup, "sgd")
    sent = []
    for parallel in (moved, fresh):
        with Observer() as observer, torch.no_grad():
            parallel(models.make_batch(0, rank))
            observer.step()
        sent.append(sum(c.bytes for c in observer.result().of("all_to_all", 2, "embeddings")))
    return sent[0], sent[1]


def test_resharding_takes_over_index_deduplication() -> None:
    moved, fresh = ranks.run(2, 1, resharded_to_dedup)[0]
    assert moved == fresh


def save_where_nothing_can_be(rank: int) -> None:
    from flexshard.executors import save_checkpoint

    cluster = models.small_cluster(2, 1)
    parallel, optim = models.shard(models.plan_of(cluster, split_for(cluster, 3)), "sgd")
    save_checkpoint("/proc/nothing/here", parallel, optim)


def test_a_folder_that_cannot_be_made_stops_every_rank_at_once() -> None:
    found = ranks.run(2, 1, save_where_nothing_can_be, timeout=30.0, limit=25.0, expect_failures=True)
    assert all(isinstance(error, OutputError) and "/proc/nothing/here" in str(error) for error in found), found


def stock_and_ours(rank: int, folder: str) -> tuple[float, float]:
    """A checkpoint of TorchRec's row-wise sharding loaded into ours, and ours into TorchRec's."""
    import torch.distributed.checkpoint as dcp

    cluster = models.small_cluster(2, 1)
    ours, _ = models.shard(models.plan_of(cluster, split_for(cluster, 3)), "rowwise_adagrad")
    theirs = models.row_wise_of_torchrec("rowwise_adagrad", 1, 2)

    def logits(parallel: Any) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = parallel(models.make_batch(9, rank))[1]
            return found.clone()

    def steps(parallel: Any) -> None:
        for step in range(3):
            parallel(models.make_batch(step, rank))[0].backward()

    differences = []
    for number, (source, target) in enumerate(((theirs, ours), (ours, theirs))):
        steps(source)
        place = f"{folder}/{number}"
        dcp.save({"model": source.state_dict(), "opt": source.fused_optimizer.state_dict()}, checkpoint_id=place)
        state = {"model": target.state_dict(), "opt": target.fused_optimizer.state_dict()}
        dcp.load(state, checkpoint_id=place)
        target.load_state_dict(state["model"])
        target.fused_optimizer.load_state_dict(state["opt"])
        steps(source)
        steps(target)
        differences.append(float((logits(source) - logits(target)).abs().max()))
    return differences[0], differences[1]


def test_checkpoints_go_both_ways_between_torchrec_and_us(tmp_path: Path) -> None:
    for found in ranks.run(2, 1, stock_and_ours, str(tmp_path)):
        assert max(found) < 1e-4


def plain_names(rank: int) -> tuple[list[str], float]:
    """The names that an unsharded model has; plain modules' state_dict and load_state_dict."""
    cluster = models.small_cluster(2, 1)
    parallel, _ = models.shard(models.plan_of(cluster, split_for(cluster, 3)), "sgd")
    state = parallel.module.state_dict()
    doubled = {name: value * 2 for name, value in state.items()}
    parallel.module.load_state_dict(doubled)
    after = parallel.module.state_dict()["wide.embeddings.goods.weight"].full_tensor()
    names = [name for name, _ in parallel.module.named_parameters()]
    return names, float((after - 2 * state["wide.embeddings.goods.weight"].full_tensor()).abs().max())


def test_names_and_states_are_those_of_the_unsharded_model() -> None:
    names, difference = ranks.run(2, 1, plain_names)[0]
    assert sorted(names) == sorted(name for name, _ in models.new_model().named_parameters())
    assert difference == 0.0


def all_save_to_one_file(rank: int, folder: str) -> str:
    """As loops in a hurry do, TorchRec's BERT4Rec example among them: the file holds one rank's part."""
    import torch.distributed as dist

    cluster = models.small_cluster(1, 2)
    parallel, _ = models.shard(models.plan_of(cluster, split_for(cluster, 3)), "sgd")
    before = {name: models.whole(value) for name, value in parallel.state_dict().items()}
    state = parallel.state_dict()
    for turn in range(2):
        if rank == turn:
            torch.save(state, f"{folder}/model.pt")
        dist.barrier()
    try:
        parallel.load_state_dict(torch.load(f"{folder}/model.pt"))
    except CheckpointError as error:
        unchanged = all(torch.equal(models.whole(v), before[n]) for n, v in parallel.state_dict().items())
        return f"{unchanged} {error}"
    return ""


def test_a_file_that_every_rank_wrote_is_refused(tmp_path: Path) -> None:
    for message in ranks.run(1, 2, all_save_to_one_file, str(tmp_path)):
        assert message.startswith("True ")
        assert "is rank 1's of 2, as when several ranks save to one file" in message


def in_pieces(rank: int, folder: str) -> None:
    """Blocks are files' chunks of a few rows, for our own loads and for TorchRec's."""
    cluster = models.small_cluster(2, 2)
    splits = [models.random_split(cluster, np.random.default_rng(seed)) for seed in (1, 2)]
    with mock.patch.multiple(live_tensors, _PIECE_BYTES=150, _MOST_PIECES=7):
        first, optimizer = models.shard(models.plan_of(cluster, splits[0]), "rowwise_adagrad")
        models.train(first, optimizer, rank, range(3))
        save_checkpoint(folder, first, optimizer)
        second, other = models.shard(models.plan_of(cluster, splits[1]), "rowwise_adagrad")
        load_checkpoint(folder, second, other)
        dcp.save({"m": first.state_dict()}, checkpoint_id=f"{folder}/plain")
        stock = models.row_wise_of_torchrec("rowwise_adagrad", 2, 4)
        state = {"m": stock.state_dict()}
        dcp.load(state, checkpoint_id=f"{folder}/plain")
        stock.load_state_dict(state["m"])
        chunks = dcp.FileSystemReader(f"{folder}/plain").read_metadata().state_dict_metadata
    assert len(chunks["m.wide.embeddings.goods.weight"].chunks) > 4 * 4  # type: ignore[union-attr]
    expected = {name: models.whole(value) for name, value in first.state_dict().items()}
    for model in (second, stock):
        for name, value in model.state_dict().items():
            assert torch.equal(models.whole(value), expected[name]), name
    models.train(second, other, rank, range(3, 5))


def test_checkpoints_are_read_in_pieces(tmp_path: Path) -> None:
    ranks.run(2, 2, in_pieces, str(tmp_path))


class Pooling(torch.nn.Module):
    """Pooled tables, and a layer on top."""

    def __init__(self, bags: torch.nn.Module) -> None:
        super().__init__()
        self.bags, self.over = bags, torch.nn.Linear(16, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        found: torch.Tensor = self.over(self.bags(batch).values())
        return found


def whole_tables(rank: int, folder: str, optimizer: str, kinds: tuple[str, str]) -> float:
    """Tables that TorchRec has whole on one rank, or cut by rows: saved as the one kind and loaded as the other; the
    largest difference of weights after steps on both.
    """
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
    from torchrec.distributed.types import ShardingPlan
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    how = {"table_wise": table_wise(rank=1, compute_kernel="fused"), "row_wise": row_wise(compute_kernel="fused")}

    def sharded(kind: str) -> tuple[Any, Any]:
        torch.manual_seed(0)
        configs = [
            EmbeddingBagConfig(name=name, num_embeddings=40, embedding_dim=8, feature_names=[f"f_{name}"])
            for name in ("a", "b")
        ]
        model = Pooling(EmbeddingBagCollection(tables=configs))
        sharder = EmbeddingBagCollectionSharder({"optimizer": models.OPTIMIZERS[optimizer][1], "learning_rate": 0.1})
        by_name = {"a": how[kind], "b": how["row_wise"]}
        plan = construct_module_sharding_plan(model.bags, by_name, sharder, 2, 2, "cpu")
        parallel = DistributedModelParallel(
            model, plan=ShardingPlan({"bags": plan}), sharders=[sharder], device=torch.device("cpu")
        )
        dense = dict(in_backward_optimizer_filter(parallel.named_parameters()))
        adam = KeyedOptimizerWrapper(dense, lambda found: torch.optim.Adam(found, lr=0.01))
        return parallel, CombinedOptimizer([parallel.fused_optimizer, adam])

    def steps(parallel: Any, optim: Any, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed + rank)
        for _ in range(2):
            ids = torch.randint(0, 40, (12,), generator=generator)
            batch = KeyedJaggedTensor(["f_a", "f_b"], ids, lengths=torch.tensor([2, 1, 2, 1] * 2))
            optim.zero_grad()
            parallel(batch).sum().backward()
            optim.step()

    saved, loaded = sharded(kinds[0]), sharded(kinds[1])
    steps(*saved, seed=1)
    save_checkpoint(folder, *saved)
    steps(*loaded, seed=5)
    load_checkpoint(folder, *loaded)
    for one in (saved, loaded):
        steps(*one, seed=9)
    one, other = (full_state_dict(parallel) for parallel, _ in (saved, loaded))
    return max((float((value - other[name]).abs().max()) for name, value in one.items()), default=0.0)


KINDS = [("table_wise", "table_wise"), ("row_wise", "table_wise"), ("table_wise", "row_wise")]


@pytest.mark.parametrize("kinds", first(1, KINDS))
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
def test_ranks_without_a_shard_of_a_table_load_it(tmp_path: Path, optimizer: str, kinds: tuple[str, str]) -> None:
    """Of SGD there is no state, and torch's own planner took such a checkpoint for one of torch 2.3."""
    assert max(ranks.run(1, 2, whole_tables, str(tmp_path), optimizer, kinds)) < 1e-6


def saved_over(rank: int, folder: str, latest: str | bytes, position: Any) -> list[str]:
    """What a save says, and a load after it, where rank 0 has another position and ``latest`` says this."""
    from flexshard.executors import load_checkpoint, save_checkpoint

    cluster, place = models.small_cluster(2, 1), Path(folder)
    parallel, optim = models.shard(models.plan_of(cluster, split_for(cluster, 3)), "sgd")
    save_checkpoint(place, parallel, optim, position={"step": 1})
    if rank == 0 and latest != "as it is":
        (place / "latest").write_bytes(latest if isinstance(latest, bytes) else latest.encode())
    torch.distributed.barrier()
    said = []
    for work in (
        lambda: load_checkpoint(place, parallel, optim),
        lambda: save_checkpoint(place, parallel, optim, position=position if rank == 0 else None),
        lambda: load_checkpoint(place, parallel, optim),
    ):
        try:
            said.append(str(work()))
        except CheckpointError as error:
            said.append(f"error: {error}")
    return said


@pytest.mark.parametrize("latest", ["", ".", "..", "../precious", "save-7/../..", b"\xff\xfe"])
def test_a_save_takes_nothing_away_but_the_save_before(latest: str | bytes, tmp_path: Path) -> None:
    """Not where ``latest`` was cut off, or names something else."""
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "data").write_text("d")
    folder = tmp_path / "runs" / "checkpoint"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("n")
    for load, save, again in ranks.run(2, 1, saved_over, str(folder), latest, {"step": 2}):
        assert load.startswith("error: ")
        assert ("names no save" in load) == isinstance(latest, str)
        assert (save, again) == ("None", "{'step': 2}")
    assert sorted(file.name for file in folder.iterdir()) == ["latest", "notes.txt", "save-1", "save-2"]
    assert (tmp_path / "precious" / "data").read_text() == "d"


@pytest.mark.parametrize("position", [12, [1], "text", {"a": float("nan")}, {"a": "\ud800"}, {1: 2}, {"a": {1, 2}}])
def test_a_position_that_could_not_be_read_again_is_not_saved(position: Any, tmp_path: Path) -> None:
    """On rank 0, whose position counts; all ranks hear of it, and the save before stays."""
    folder = tmp_path / "checkpoint"
    for load, save, again in ranks.run(2, 1, saved_over, str(folder), "as it is", position):
        assert load == again == "{'step': 1}"
        assert "error: position must be a dict of numbers and texts" in save
    assert sorted(file.name for file in folder.iterdir()) == ["latest", "save-1"]


def test_saves_that_were_killed_are_taken_away(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    ranks.run(2, 1, saved_over, str(folder), "as it is", {"of": (1, 2)})
    (folder / "save-1").mkdir()  # which a kill left
    (load, _, again), _ = ranks.run(2, 1, saved_over, str(folder), "as it is", {"of": (1, 2)})
    assert (load, again) == ("{'step': 1}", "{'of': [1, 2]}")
    assert sorted(file.name for file in folder.iterdir()) == ["latest", "save-4"]


def test_a_damaged_file_is_called_damaged(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    ranks.run(2, 2, save_four, str(folder))
    for file in (folder / "save-1").glob("*.distcp"):
        file.write_bytes(bytes(file.stat().st_size))
    found = ranks.run(2, 1, load_two, str(folder), expect_failures=True)
    assert all(isinstance(error, CheckpointError) and "is damaged; load another" in str(error) for error in found), (
        found
    )


def load_into_others(rank: int, folder: str) -> list[str]:
    """What loading into a model with another optimizer, and into one without a buffer, says."""
    plan, said = models.plan_of(models.small_cluster(1, 2), split_for(models.small_cluster(1, 2), 3)), []
    saved, optim = models.shard(plan, "adagrad")
    models.train(saved, optim, rank, range(2))
    saved.module.register_buffer("seen", torch.ones(3))
    save_checkpoint(folder, saved, optim)
    for kind in (EmbOptimType.LARS_SGD, EmbOptimType.EXACT_ADAGRAD):
        parallel, optim = models.shard(plan, fused={"optimizer": kind, "learning_rate": 0.1})
        with pytest.raises(CheckpointError) as error:
            load_checkpoint(folder, parallel, optim)
        said.append(str(error.value))
    load_checkpoint(folder, parallel, optim, strict=False)
    before, after = state_of(saved), state_of(parallel)
    for one, other in zip(before, after, strict=True):
        assert all(np.array_equal(one[key], other[key]) for key in one)
    return said


def test_what_fits_by_its_names_alone_is_not_loaded(tmp_path: Path) -> None:
    """Adagrad's sums have the name and shape of LARS's momentum."""
    for other, more in ranks.run(1, 2, load_into_others, str(tmp_path)):
        assert "save-1: its optimizer of " in other
        assert "is adagrad, the model's is lars_sgd; build the model with the former, or load weights alone" in other
        assert "it has seen, which the model has not; strict=False ignores what is so" in more
