"""When things go wrong every rank ends, soon, with one clear error."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torchrec")

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from flexshard.errors import CommunicationError, DataError, FlexShardError, JobError, PlanError, TableError
from tests.executors import models, ranks

ALL_TABLES = models.WIDE | models.NARROW


def plan_for(nodes: int = 2, ranks_per_node: int = 1, seed: int = 30) -> Any:
    cluster = models.small_cluster(nodes, ranks_per_node)
    return models.plan_of(cluster, models.random_split(cluster, np.random.default_rng(seed)))


def shard_only(rank: int, plan: Any) -> None:
    models.shard(plan)


def refused(plan: Any, *, nodes: int = 2, ranks_per_node: int = 1) -> str:
    found = ranks.run(nodes, ranks_per_node, shard_only, plan, expect_failures=True)
    assert all(isinstance(error, PlanError) for error in found), found
    return str(found[-1])


def test_plans_for_something_else() -> None:
    plan = plan_for()
    goods = plan.tables["goods"]

    def changed(**fields: Any) -> Any:
        return replace(plan, tables=plan.tables | {"goods": replace(goods, **fields)})

    assert "table 'goods': the plan is for rows 998, the model has 997" in refused(changed(rows=998))
    assert "table 'goods': the plan is for dim 32, the model has 16" in refused(changed(dim=32))
    assert "table 'goods': the plan is for dtype float16, the model has float32" in refused(changed(dtype="float16"))
    assert "table 'goods': the plan is for features x, the model has clicked, shown" in refused(
        changed(features=("x",))
    )
    assert "profile is not the one that the plan was made from" in refused(changed(profile_digest="0" * 64))
    renamed = replace(plan, tables={"other": replace(goods, name="other")} | dict(plan.tables))
    assert "the plan has table 'other', which no EmbeddingCollection of the model has" in refused(renamed)
    assert "the plan is for 4 ranks, 1 per node; the job has 2" in refused(plan_for(4, 1))
    assert "the plan is for 2 ranks, 2 per node; the job has 2, 1 per node" in refused(plan_for(1, 2))


def on_a_node_of_its_own_size(rank: int, plan: Any) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = ("1", "many")[rank]
    models.shard(plan)


def test_nodes_of_other_sizes() -> None:
    """Ranks whose node fits the plan hear of one that does not."""
    for error in ranks.run(2, 1, on_a_node_of_its_own_size, plan_for(), expect_failures=True):
        assert isinstance(error, PlanError)
        assert "the plan is for 2 ranks, 1 per node; the job has 2, many per node" in str(error)


def in_two_dimensions(rank: int, plan: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torchrec.distributed.types import ShardingEnv2D

    from flexshard import FlexShardEmbeddingCollectionSharder, FlexShardPlanner

    alone, world = [torch.distributed.new_group([one]) for one in range(2)][rank], torch.distributed.group.WORLD
    env = ShardingEnv2D(alone, world, world, init_device_mesh("cpu", (2, 1)))
    sharders: list[Any] = [FlexShardEmbeddingCollectionSharder({"optimizer": EmbOptimType.EXACT_SGD})]
    model = models.new_model()
    profiles = {name: models.profile_of(name) for _, name in models.table_names()}
    planned = FlexShardPlanner(plan, profiles=profiles).plan(model, sharders).plan["wide"]
    sharders[0].shard(model.wide, planned, env, torch.device("cpu"))


def test_replicas_of_sharded_models_are_refused() -> None:
    for error in ranks.run(2, 1, in_two_dimensions, plan_for(), expect_failures=True):
        assert isinstance(error, PlanError)
        assert "not for DMPCollection" in str(error)


def with_plan_of_its_own(rank: int, plans: list[Any], collective: bool) -> None:
    if collective:
        models.shard(plans[rank])
        return
    from torchrec.distributed.model_parallel import DistributedModelParallel

    from flexshard import FlexShardEmbeddingCollectionSharder, FlexShardPlanner

    sharders: list[Any] = [FlexShardEmbeddingCollectionSharder({"optimizer": EmbOptimType.EXACT_SGD})]
    model = models.new_model()
    profiles = {name: models.profile_of(name) for _, name in models.table_names()}
    plan = FlexShardPlanner(plans[rank], profiles=profiles).plan(model, sharders)
    DistributedModelParallel(model, plan=plan, sharders=sharders, device=torch.device("cpu"))


@pytest.mark.parametrize("collective", [True, False])
def test_ranks_with_different_plans(collective: bool) -> None:
    plans = [plan_for(seed=30), plan_for(seed=31)]
    found = ranks.run(2, 1, with_plan_of_its_own, plans, collective, expect_failures=True)
    for error in found:
        assert isinstance(error, PlanError)
        assert plans[1].fingerprint[:12] in str(error)
        assert "rank 1" in str(error)
        assert "goods" in str(error)


def look_up_outside(rank: int, plan: Any, pipelined: bool) -> None:
    parallel, optim = models.shard(plan)
    batch = models.make_batch(0, rank)
    if rank == 1:
        batch.features.values()[0] = 997  # "shown", which is looked up in goods
    if not pipelined:
        parallel(batch)
        return
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

    pipeline = TrainPipelineSparseDist(parallel, optim, torch.device("cpu"))
    batches = iter([models.make_batch(1, rank), batch, models.make_batch(2, rank)])
    for _ in range(3):
        pipeline.progress(batches)


def look_up_where_groups_are_small(rank: int) -> None:
    """No tier spans all ranks, and the bad id is met in one node."""
    cluster = models.small_cluster(2, 2)
    split = {n: [(1, rows // 2, "dense"), (2, rows - rows // 2, "dense")] for n, (rows, _) in ALL_TABLES.items()}
    parallel, _ = models.shard(models.plan_of(cluster, split))
    batch = models.make_batch(0, rank)
    if rank == 3:
        batch.features.values()[0] = -1
    parallel(batch)


def test_a_bad_id_stops_the_ranks_of_other_groups_too() -> None:
    found = ranks.run(2, 2, look_up_where_groups_are_small, expect_failures=True)
    assert all(isinstance(error, DataError) and "goods" in str(error) for error in found), found


def look_up_floats(rank: int, plan: Any) -> None:
    from torchrec import KeyedJaggedTensor

    parallel, _ = models.shard(plan)
    plain = models.make_batch(0, rank).features
    values = plain.values().float() if rank == 1 else plain.values()
    parallel.module.wide(KeyedJaggedTensor(plain.keys(), values, lengths=plain.lengths()))


def test_ids_that_are_no_whole_numbers() -> None:
    found = ranks.run(2, 1, look_up_floats, plan_for(), expect_failures=True)
    assert "ids of table 'goods' must be whole numbers, found torch.float32" in str(found[1])
    assert "rank 1 has bad ids of table 'goods'" in str(found[0])


def look_up_short_ids(rank: int, plan: Any) -> list[Any]:
    """The same ids as int64, and on rank 1 of a narrower type, which no tensor is indexed by."""
    from torchrec import KeyedJaggedTensor

    parallel, _ = models.shard(plan)
    plain, found = models.make_batch(0, rank).features, []
    for dtype in (torch.int64, torch.int16):
        values = plain.values().to(dtype if rank == 1 else torch.int64)
        batch = KeyedJaggedTensor(plain.keys(), values, lengths=plain.lengths())
        found.append({name: rows.values().detach().numpy() for name, rows in parallel.module.wide(batch).items()})
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_ids_of_any_width_find_their_rows(size: int) -> None:
    split = {name: [(size, rows, "dense")] for name, (rows, _) in ALL_TABLES.items()}
    for whole, short in ranks.run(2, 1, look_up_short_ids, models.plan_of(models.small_cluster(2, 1), split)):
        assert whole.keys() == short.keys()
        assert all((whole[name] == short[name]).all() for name in whole)


def profile_on_one_rank(rank: int, plan: Any) -> None:
    from flexshard import FlexShardEmbeddingCollectionSharder, FlexShardPlanner

    profiles = {name: "none.parquet" if rank else models.profile_of(name) for _, name in models.table_names()}
    FlexShardPlanner(plan, profiles=profiles).collective_plan(
        models.new_model(), [FlexShardEmbeddingCollectionSharder({})]
    )


def test_a_profile_that_one_rank_cannot_read_stops_all() -> None:
    found = ranks.run(2, 1, profile_on_one_rank, plan_for(), expect_failures=True)
    assert all("none.parquet" in str(error) for error in found), found
    assert str(found[0]).startswith("rank 1: ")


@pytest.mark.parametrize("pipelined", [False, True])
def test_an_id_outside_its_table_stops_every_rank(pipelined: bool) -> None:
    found = ranks.run(2, 2, look_up_outside, plan_for(2, 2), pipelined, expect_failures=True)
    assert all(isinstance(error, DataError) for error in found), found
    assert "rank 1: feature 'shown': id 997 is outside table 'goods', which has rows 0 to 996" in str(found[1])
    for rank in (0, 2, 3):
        assert "rank 1 has bad ids of table 'goods'" in str(found[rank])


def without_a_feature(rank: int, plan: Any) -> None:
    from torchrec import KeyedJaggedTensor

    parallel, _ = models.shard(plan)
    batch = models.make_batch(0, rank).features
    if rank == 1:
        batch = KeyedJaggedTensor(["shown"], torch.zeros(1, dtype=torch.long), lengths=torch.ones(1, dtype=torch.long))
    parallel.module.wide(batch)


def test_a_missing_feature() -> None:
    found = ranks.run(2, 1, without_a_feature, plan_for(), expect_failures=True)
    assert all(isinstance(error, DataError) for error in found)
    assert "rank 1 has no feature for table 'goods'" in str(found[0])
    assert "rank 1: the batch has no feature 'clicked', which table 'goods' is looked up by" in str(found[1])


MISFITS: dict[str, tuple[tuple[int, ...], list[int], str]] = {  # shape of ids, lengths of two features
    "more lengths": ((3,), [1, 1, 3, 0], "lengths add up to 5, for 3 ids"),
    "negative": ((3,), [2, 2, 1, -2], "a length is -2"),
    "of one feature": ((3,), [1, 1, 1], "3 lengths are not as many for each of 2 features (clicked, shown)"),
    "a table": ((3, 1), [1, 1, 1, 0], "ids must have one dimension, found shape (3, 1)"),
}


def with_what_does_not_fit(rank: int, plan: Any) -> list[str]:
    from torchrec import KeyedJaggedTensor

    parallel, _ = models.shard(plan)
    goods, good, said = parallel.module.wide, models.make_batch(0, rank), []
    for shape, lengths, _ in MISFITS.values():
        keys, values = ["clicked", "shown"], torch.zeros(shape, dtype=torch.long)
        batch = KeyedJaggedTensor(keys, values, lengths=torch.tensor(lengths)) if rank == 1 else good.features
        with pytest.raises(DataError) as error:
            goods(batch)["clicked"]
        said.append(str(error.value))
    parallel(good)[0].backward()  # training goes on
    return said


def test_lengths_that_do_not_fit_ids_are_said_on_every_rank() -> None:
    first, second = ranks.run(2, 1, with_what_does_not_fit, plan_for())
    assert first == ["rank 0: rank 1 has a batch whose lengths do not fit its ids; its own message names it"] * len(
        first
    )
    for said, (*_, why) in zip(second, MISFITS.values(), strict=True):
        assert said == f"rank 1: the batch does not fit together: {why}"


def die(rank: int, plan: Any) -> None:
    parallel, optim = models.shard(plan)
    models.train(parallel, optim, rank, range(2))
    if rank == 1:
        parallel(models.make_batch(2, rank))  # in the middle of the step
        os._exit(7)
    models.train(parallel, optim, rank, range(2, 4))


def test_a_rank_that_dies_in_the_middle_of_a_step() -> None:
    start = time.monotonic()
    found = ranks.run(2, 2, die, plan_for(2, 2), timeout=8.0, expect_failures=True)
    assert time.monotonic() - start < 40
    assert "ended with code 7" in str(found[1])
    for rank in (0, 2, 3):
        assert isinstance(found[rank], (CommunicationError, RuntimeError)), found
    told = [error for error in found if isinstance(error, CommunicationError)]
    assert told
    for error in told:
        assert "of tables" in str(error)
        assert "a rank ended, or did not answer within the process group's timeout" in str(error)


def be_late(rank: int, plan: Any) -> float:
    parallel, optim = models.shard(plan)
    models.train(parallel, optim, rank, range(1))
    if rank == 0:
        time.sleep(12)
        return 0.0
    start = time.monotonic()
    with pytest.raises(CommunicationError, match="exchanging counts of tables goods, shops, days with ranks 0, 1 fail"):
        parallel(models.make_batch(1, rank))
    return time.monotonic() - start


def test_a_process_group_that_times_out() -> None:
    found = ranks.run(2, 1, be_late, plan_for(), timeout=3.0)
    assert 2 < found[1] < 8


def shard_with(rank: int, fused: dict[str, Any]) -> None:
    from torchrec.distributed.model_parallel import DistributedModelParallel

    from flexshard import FlexShardEmbeddingCollectionSharder, FlexShardPlanner

    sharders: list[Any] = [FlexShardEmbeddingCollectionSharder(fused)]
    model = models.new_model()
    profiles = {name: models.profile_of(name) for _, name in models.table_names()}
    plan = FlexShardPlanner(plan_for(), profiles=profiles).collective_plan(model, sharders)
    DistributedModelParallel(model, plan=plan, sharders=sharders, device=torch.device("cpu"))


def test_optimizers_that_are_not_offered() -> None:
    for optimizer, word in ((EmbOptimType.LAMB, "lamb"), (EmbOptimType.MADGRAD, "madgrad")):
        found = ranks.run(2, 1, shard_with, {"optimizer": optimizer}, expect_failures=True)
        for error in found:
            assert isinstance(error, TableError)
            assert f"table 'goods': optimizer {word}" in str(error)
            assert "on cpu" in str(error)
    found = ranks.run(
        2, 1, shard_with, {"optimizer": EmbOptimType.EXACT_SGD, "weight_decay": 0.1}, expect_failures=True
    )
    assert "weight_decay" in str(found[0])


def solve_in_the_script(rank: int) -> tuple[str, list[str]]:
    """Profiles and a cluster instead of a plan; one table has no profile, and there is an EmbeddingBagCollection."""
    import warnings

    from torch import nn
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel

    from flexshard import FlexShardEmbeddingCollectionSharder, FlexShardPlanner

    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    sharders: list[Any] = [FlexShardEmbeddingCollectionSharder(fused), EmbeddingBagCollectionSharder(fused)]
    model = nn.Module()
    model.inner = models.new_model()
    model.bags = EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(name="tags", embedding_dim=8, num_embeddings=100, feature_names=["tag"])]
    )
    profiles = {name: models.profile_of(name) for _, name in models.table_names() if name != "days"}
    planner = FlexShardPlanner(profiles=profiles, cluster=models.small_cluster(2, 1), batch_size=24, budget="1GiB")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        plan = planner.collective_plan(model, sharders)
    parallel = DistributedModelParallel(model, plan=plan, sharders=sharders, device=torch.device("cpu"))
    assert type(parallel.module.bags).__name__ == "ShardedEmbeddingBagCollection"
    logits = parallel.module.inner(models.make_batch(0, rank))[1]
    expected = models.reference("sgd", 1, 2).outputs[0][rank]
    assert float((logits - expected).abs().max()) < 1e-6
    assert planner.solved is not None
    return planner.solved.fingerprint, [str(w.message) for w in said if "has no profile" in str(w.message)]


def test_solving_in_the_script_and_leaving_the_rest_to_torchrec() -> None:
    found = ranks.run(2, 1, solve_in_the_script)
    assert found[0][0] == found[1][0]
    assert any("table 'days' of inner.wide has no profile" in text for text in found[0][1])


def test_a_planner_needs_something_to_plan_with() -> None:
    from flexshard import FlexShardPlanner

    with pytest.raises(JobError, match="needs a plan, or profiles, a cluster and a batch_size"):
        FlexShardPlanner(profiles={})


@pytest.mark.parametrize("how", ["fused_params", "in the model"])
def test_optimizers_whose_memory_is_not_known_are_not_planned_as_others(how: str) -> None:
    from flexshard import FlexShardEmbeddingCollectionSharder, FlexShardPlanner

    model, fused, name = models.new_model(), {"optimizer": EmbOptimType.LAMB}, "lamb"
    if how == "in the model":
        from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

        apply_optimizer_in_backward(torch.optim.RMSprop, model.wide.parameters(), {"lr": 0.1})
        fused, name = {"optimizer": EmbOptimType.EXACT_SGD}, "RMSprop"
    profiles = {table: models.profile_of(table) for _, table in models.table_names()}
    planner = FlexShardPlanner(profiles=profiles, cluster=models.small_cluster(1, 2), batch_size=24)
    with pytest.raises(
        PlanError, match=rf"table '\w+': optimizer {name} is none that plans are made for; use one of sgd"
    ):
        planner.plan(model, [FlexShardEmbeddingCollectionSharder(fused)])


def shard_what_is_not_known(rank: int, plan: Any) -> list[str]:
    """Tables with two optimizers, planned and sharded; and virtual ones."""
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    def said(work: Any) -> str:
        try:
            work()
        except FlexShardError as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    twice, virtual = models.new_model(), models.new_model()
    for optimizer in (torch.optim.SGD, torch.optim.Adagrad):
        apply_optimizer_in_backward(optimizer, twice.wide.parameters(), {"lr": 0.1})
    for config in virtual.wide.embedding_configs():
        config.use_virtual_table = True
    return [said(partial(models.shard, plan, "sgd", model=model)) for model in (twice, virtual)]


def test_what_torchrec_has_and_tiers_do_not_is_refused() -> None:
    for twice, virtual in ranks.run(2, 1, shard_what_is_not_known, plan_for()):
        assert "apply_optimizer_in_backward gave it 2 optimizers, SGD, Adagrad; a table has one" in twice
        assert twice.startswith("PlanError: ")
        assert "use_virtual_table is of TorchRec's virtual tables, whose rows are evicted; leave it out" in virtual
        assert virtual.startswith("TableError: ")


def shard_a_model_of_its_own(rank: int, plan: Any, collective: bool) -> None:
    """Rank 1 has a smaller table."""
    from torchrec.distributed.model_parallel import DistributedModelParallel

    from flexshard import FlexShardEmbeddingCollectionSharder, FlexShardPlanner

    model = models.new_model()
    if rank == 1:
        model.wide = models._collection(models.WIDE | {"goods": (900, ["clicked", "shown"])}, 16, models.DataType.FP32)
    sharders: list[Any] = [FlexShardEmbeddingCollectionSharder({"optimizer": EmbOptimType.EXACT_SGD})]
    planner = FlexShardPlanner(plan, profiles={name: models.profile_of(name) for _, name in models.table_names()})
    made = planner.collective_plan(model, sharders) if collective else planner.plan(models.new_model(), sharders)
    DistributedModelParallel(model, plan=made, sharders=sharders, device=torch.device("cpu"))


@pytest.mark.parametrize("collective", [True, False])
def test_models_that_differ_between_ranks(collective: bool) -> None:
    start = time.monotonic()
    found = ranks.run(2, 1, shard_a_model_of_its_own, plan_for(), collective, timeout=20.0, expect_failures=True)
    assert time.monotonic() - start < 15
    for error in found:
        assert isinstance(error, PlanError), error
        assert "table 'goods': the plan is for" in str(error)
        assert "997" in str(error)
        assert "900" in str(error)
    assert str(found[0]).startswith("rank 1: ")


def end_while_saving(rank: int, plan: Any, folder: str, when: str) -> None:
    import torch.distributed.checkpoint as dcp

    from flexshard.executors import save_checkpoint

    parallel, optim = models.shard(plan)
    save_checkpoint(folder, parallel, optim)
    if rank == 1 and when == "before":
        os._exit(9)
    if rank == 1:
        dcp.save = lambda *_, **__: os._exit(9)
    save_checkpoint(folder, parallel, optim)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_the_rank_that_survives_a_killed_save_says_so(tmp_path: Any, when: str) -> None:
    from flexshard.errors import OutputError

    start = time.monotonic()
    folder = str(tmp_path / "saved")
    found = ranks.run(2, 1, end_while_saving, plan_for(), folder, when, timeout=20.0, expect_failures=True)
    assert time.monotonic() - start < 15
    assert isinstance(found[0], OutputError), found[0]
    assert "saved: the checkpoint could not be written; the previous one is untouched" in str(found[0])
    assert "a rank ended" in str(found[0])
    assert (tmp_path / "saved" / "latest").read_text().strip() == "save-1"
