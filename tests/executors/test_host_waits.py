"""How often a step makes the host wait for the device, counted on CPUs beside TorchRec's own row-wise sharding."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("torchrec")

import torch
from benchmarks.lookahead.host_operations import compare
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import flexshard
from flexshard import FlexShardEmbeddingCollectionSharder, FlexShardPlanner
from flexshard._internal import NO_SLOT, segment_of, sum_by_slot, to_device
from flexshard.costmodels import Layout
from flexshard.embeddings import IndexBijection
from flexshard.errors import DataError
from flexshard.executors import MemoryStore, reshard, start_input_dist
from flexshard.executors.comm.bucketized_ids import Buckets, bucketize
from flexshard.executors.sharding.batches import Lookup, ids_of_tables
from flexshard.executors.sharding.joint_locations import JointLocations, TableIds
from flexshard.executors.sharding.translation import LocationTable
from flexshard.executors.stores import base
from flexshard.executors.stores.fused import FusedStore
from flexshard.executors.stores.updates import OptimizerSpec
from flexshard.planner import Tier
from flexshard.tables import StepOptions
from tests.executors import models, ranks
from tests.host_waits import HostWaits, as_on_cuda

ROWS = 40
SPLITS = {
    "row-wise": [(4, ROWS, "dense")],
    "dense tiers": [(1, 10, "dense"), (2, 10, "dense"), (4, 20, "dense")],
    "gathered tiers": [(1, 10, "sparse"), (2, 10, "sparse"), (4, 20, "dense")],
}


def collection(groups: int) -> EmbeddingCollection:
    """Four tables, in groups that learn at different rates."""
    torch.manual_seed(0)
    module = EmbeddingCollection(
        tables=[
            EmbeddingConfig(name=f"t{i}", num_embeddings=ROWS, embedding_dim=8, feature_names=[f"f{i}"])
            for i in range(4)
        ]
    )
    for index in range(4):
        rate = {"lr": 0.1 + 0.1 * (index % groups)}
        apply_optimizer_in_backward(torch.optim.SGD, [module.embeddings[f"t{index}"].weight], rate)
    return module


def batch_of(rank: int, step: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    lengths = torch.randint(0, 4, (4 * 6,), generator=generator)
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor([f"f{i}" for i in range(4)], ids, lengths=lengths)


def waits(rank: int, parallel: Any, on_host: list[torch.Tensor]) -> dict[str, int]:
    """Of one training step, after one that warms up."""
    for step in range(2):
        batch = batch_of(rank, step)
        with as_on_cuda(), HostWaits(on_host) as counter:
            output = parallel(batch)
            sum((jagged.values() ** 2).sum() for jagged in output.values()).backward()  # type: ignore[union-attr]
    return dict(counter.counts)


def of_torchrec(rank: int) -> dict[str, int]:
    model, sharder = collection(1), EmbeddingCollectionSharder()
    how = {f"t{i}": row_wise(compute_kernel="fused") for i in range(4)}
    plan = construct_module_sharding_plan(model, how, sharder, local_size=2, world_size=4, device_type="cpu")
    parallel = DistributedModelParallel(
        model, plan=ShardingPlan({"": plan}), sharders=[sharder], device=torch.device("cpu")
    )
    return waits(rank, parallel, [])


def of_ours(rank: int, split: str, groups: int, index_dedup: bool | str) -> dict[str, int]:
    cluster = models.small_cluster(2, 2)
    profile = flexshard.AccessProfile.from_counts(torch.arange(ROWS, 0, -1).numpy(), num_samples=10)
    tables = [flexshard.Table(f"t{index}", ROWS, 8, profile) for index in range(4)]
    plan = flexshard.solve(tables, cluster, batch_size=6, budget="1GiB", index_dedup=index_dedup is True)
    if index_dedup == "some":
        plan = replace(plan, tables=plan.tables | {"t1": replace(plan.tables["t1"], index_dedup=True)})
    plan = models.with_tiers(plan, {table.name: SPLITS[split] for table in tables})
    model, sharders = collection(groups), [FlexShardEmbeddingCollectionSharder()]
    sharding = FlexShardPlanner(plan, profiles=dict.fromkeys(plan.tables, profile)).collective_plan(model, sharders)
    parallel = DistributedModelParallel(model, plan=sharding, sharders=sharders, device=torch.device("cpu"))
    assert len(parallel.module.groups) == groups
    return waits(rank, parallel, [parallel.module.tables.steps])


def measured(rank: int) -> dict[str, dict[str, int]]:
    found = {"TorchRec": of_torchrec(rank)}
    for split in SPLITS:
        for groups in (1, 4):
            for index_dedup in (False, True, "some"):
                found[f"{split}, {groups} groups, dedup {index_dedup}"] = of_ours(rank, split, groups, index_dedup)
    return found


def test_a_step_waits_no_more_often_than_torchrecs() -> None:
    """And not more often where there are more groups; gathered tiers take one wait more, however many there are."""
    (found, *_) = ranks.run(2, 2, measured)
    base = sum(found.pop("TorchRec").values())
    for name, counts in found.items():
        gathers = name.startswith("gathered")
        assert sum(counts.values()) == 2 + gathers <= base, (name, counts)


def operations(rank: int) -> list[tuple[float, float]]:
    found = []
    for pooled in (True, False):
        with as_on_cuda():
            by_name = compare(pooled=pooled)
        found.append((by_name["ours"][0], by_name["TorchRec's"][0]))
    return found


def test_a_step_with_caches_starts_few_more_kernels_than_torchrecs_without() -> None:
    """Whose own caches would add theirs."""
    ((bags, rows),) = ranks.run(1, 1, operations)
    assert bags[0] < 1.9 * bags[1], bags
    assert rows[0] < 1.6 * rows[1], rows


@pytest.mark.parametrize(
    ("waiting", "name"),
    [
        (lambda x: x[0].item(), "item"),
        (lambda x: int(x.sum()), "item"),
        (lambda x: x.tolist(), "tolist"),
        (lambda x: x.cpu().tolist(), "cpu"),
        (lambda x: x.numpy(), "numpy"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x[x > 1], "boolean mask"),
        (lambda x: x.clone().index_put_((x > 1,), torch.zeros(())), "boolean mask"),
        (lambda x: x.unique(), "unique"),
        (lambda x: x.unique_consecutive(), "unique_consecutive"),
        (lambda x: x.repeat_interleave(x.long()), "repeat_interleave"),
        (lambda x: x.new_tensor([1.0]), "copy of numbers that Python or NumPy have"),
        (lambda x: torch.segment_reduce(x, "sum", lengths=torch.full((1,), 3)), "segment_reduce"),
    ],
)
def test_the_counter_sees(waiting: Any, name: str) -> None:
    values = torch.arange(3.0)
    with HostWaits() as counter:
        waiting(values)
    assert counter.counts == {name: 1}
    with HostWaits() as counter:
        (values * 2).sum()[None].index_select(0, torch.zeros(1, dtype=torch.long))
        to_device(np.arange(3), values.device)
    assert not counter.counts


# -- what avoids waits gives the same numbers


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize("lookups", [[0, 0, 0], [300, 1, 64], [1, 0, 129], [5000, 0, 3]])
def test_buckets_by_sorting(lookups: list[int], kind: torch.dtype) -> None:
    """FBGEMM's own order."""
    slots, number = 120, 5
    ends = [0, 40, 70, slots]  # of the classes
    buckets = Buckets(number, tuple(ends[:-1]), slots, kind, torch.device("cpu"))
    generator = torch.Generator().manual_seed(sum(lookups))
    parts = [
        torch.randint(0, number, (n,), generator=generator) * slots
        + torch.randint(ends[k], ends[k + 1], (n,), generator=generator)
        for k, n in enumerate(lookups)
    ]
    locations = torch.cat(parts).to(kind)
    for index_dedup in (False, True):
        plain = bucketize(locations, lookups, buckets, index_dedup=index_dedup)
        with as_on_cuda():
            by_sorting = bucketize(locations, lookups, buckets, index_dedup=index_dedup)
        sent = int(plain.counts.sum())
        assert torch.equal(by_sorting.slots[:sent], plain.slots[:sent])
        assert torch.equal(by_sorting.counts, plain.counts)
        assert torch.equal(by_sorting.index, plain.index)


@pytest.mark.parametrize("on_cuda", [False, True])
@pytest.mark.parametrize(
    "parts",
    [
        [(100, True), (60, False), (90, True), (30, False)],
        [(0, True), (160, False), (90, True), (30, True)],
        [(160, True), (0, False), (0, True), (120, False)],
    ],
)
def test_some_tables_ids_once_and_others_each(parts: list[tuple[int, bool]], on_cuda: bool) -> None:
    """Two classes of two tables each: every lookup finds its row, in its bucket and class, and the ids of some tables
    are there once.
    """
    slots, number, lookups = 90, 4, [160, 120]
    ends = [0, 20, 50, 70, slots]  # of the tables
    buckets = Buckets(number, (0, 50), slots, torch.int32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(len(parts) + parts[0][0])
    ids = [
        torch.randint(0, number, (n,), generator=generator) * slots
        + torch.randint(ends[k], ends[k + 1], (n,), generator=generator)
        for k, (n, _) in enumerate(parts)
    ]
    locations = torch.cat(ids).int()
    with as_on_cuda() if on_cuda else nullcontext():
        found = bucketize(locations, lookups, buckets, index_dedup=parts)
    sent = sum(len(one.unique()) if once else len(one) for one, (_, once) in zip(ids, parts, strict=True))
    assert int(found.counts.sum()) == sent
    assert found.shared
    assert torch.equal(found.slots[found.index], locations % slots)
    segment = torch.repeat_interleave(torch.arange(number * 2), found.counts.flatten().long())
    class_of = torch.repeat_interleave(torch.arange(2), torch.tensor(lookups))
    assert torch.equal(segment[found.index], locations // slots * 2 + class_of)
    start = 0
    for one, (number, once) in zip(ids, parts, strict=True):
        own = found.index[start : start + number]
        assert len(own.unique()) == (len(one.unique()) if once else number)
        start += number


@pytest.mark.parametrize("lengths", [[], [0], [3, 0, 0, 2], [0, 0, 5, 0], [1]])
def test_which_segment_an_item_is_in(lengths: list[int]) -> None:
    found = segment_of(np.array(lengths, np.int64), torch.device("cpu"))
    assert found.tolist() == [segment for segment, length in enumerate(lengths) for _ in range(length)]


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_locations_of_many_tables_at_once(seed: int, large: bool) -> None:
    """As of each table by itself: with all rows dealt, with a set of copied ones, listed, in order of id."""
    generator = np.random.default_rng(seed)
    rows = {"dealt": 40, "few": 7000, "none": 7, "listed": 101, "by id": 300, "some": 513}
    hot = {"few": 64, "listed": 90, "by id": 20, "some": 3}
    if large:  # positions are listed, since locations take eight bytes
        rows["huge"] = 1 << 31
    tiers = {
        name: [
            *([Tier("data_parallel", 1, hot[name], 0, 0.0, None, 0.0, 0.0, 0.0)] if name in hot else []),
            Tier(
                "row_wise",
                4,
                number - hot.get(name, 0),
                hot.get(name, 0),
                0.0,
                None,
                0.0,
                0.0,
                0.0,
                first_holder=at % 4,
            ),
        ]
        for at, (name, number) in enumerate(rows.items())
    }
    layout = Layout.of(tiers, rows, 4)
    tables = [
        LocationTable(
            layout,
            index,
            IndexBijection(generator.permutation(number)[: hot[name]], number)
            if name in hot and name != "by id"
            else IndexBijection.identity(number),
            torch.device("cpu"),
        )
        for index, (name, number) in enumerate(rows.items())
    ]
    which = [*generator.integers(0, len(tables), 20).tolist(), *range(len(tables))]
    lookups = [
        (at, torch.from_numpy(generator.integers(0, tables[at].num_rows, generator.integers(0, 50)))) for at in which
    ]
    expected = [tables[at].locations(ids).clone() for at, ids in lookups]
    for several in (lookups, [(at, ids) for at, ids in lookups if at in (0, 2)], [], [(1, lookups[0][1][:0])]):
        number, order = len(several), generator.permutation(len(several)).tolist()
        for places in (list(range(number)), order):  # of each lookup's feature in the batch
            features = [several[places.index(place)][1] for place in range(number)]
            given = TableIds(
                [at for at, _ in several],
                places,
                torch.cat(features) if features else torch.empty(0, dtype=torch.long),
                [len(ids) for ids in features],
            )
            parts, outside = JointLocations(tables, translated=False).locations(given)
            assert outside is None or outside.tolist() == [len(tables)]
            found = [one for part in parts for one in part.tolist()]
            assert found == [one for at, ids in several for one in tables[at].locations(ids).tolist()]
            assert all(part.dtype == tables[0].location_type for part in parts)
    for (at, ids), one in zip(lookups, expected, strict=True):  # which now have what they list in common
        assert torch.equal(one, tables[at].locations(ids))


@pytest.mark.parametrize("slots", [[], [NO_SLOT], [NO_SLOT, NO_SLOT], [3, 1, 3, NO_SLOT, 0, 1, 3], [5, 5], [2]])
def test_sums_by_slot_without_a_wait(slots: list[int]) -> None:
    at, gradient = torch.tensor(slots, dtype=torch.long), torch.randn(len(slots), 3)
    gradient[at == NO_SLOT] = torch.nan
    distinct, sums, _ = sum_by_slot(at, gradient)
    with as_on_cuda():
        filled, filled_sums, some = sum_by_slot(at, gradient)
    if not len(distinct):
        assert some is None or not some.any()
        return
    assert torch.equal(filled[: len(distinct)], distinct)
    assert torch.equal(filled_sums[: len(distinct)], sums)
    assert torch.equal(filled[len(distinct) :], distinct[-1].expand(len(slots) - len(distinct)))
    assert torch.equal(filled_sums[len(distinct) :], sums[-1].expand(len(slots) - len(distinct), 3))


def trained(rank: int, optimizer: str, index_dedup: bool, store: Any, seed: int) -> None:
    split = models.random_split(models.small_cluster(2, 2), np.random.default_rng(seed))
    found = {}
    for name in ("plain", "as on CUDA"):
        with as_on_cuda() if name == "as on CUDA" else nullcontext():
            plan = models.plan_of(models.small_cluster(2, 2), split, index_dedup=index_dedup)
            parallel, combined = models.shard(plan, optimizer, sharder={"sharded_store": store})
            outputs = models.train(parallel, combined, rank, range(4))
            weights = [models.whole(value) for value in parallel.state_dict().values()]
            found[name] = torch.cat([*outputs, *(weight.flatten() for weight in weights)])
    torch.testing.assert_close(found["as on CUDA"], found["plain"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("optimizer", "index_dedup", "store"),
    [
        ("sgd", True, FusedStore),
        ("adagrad", False, FusedStore),
        ("adam", False, MemoryStore),
        ("rowwise_adagrad", True, MemoryStore),
    ],
)
def test_training_without_waits_gives_the_same_weights(optimizer: str, index_dedup: bool, store: Any) -> None:
    ranks.run(2, 2, trained, optimizer, index_dedup, store, len(optimizer))


def bad_ids(rank: int) -> list[str]:
    cluster = models.small_cluster(1, 2)
    plan = models.plan_of(cluster, models.random_split(cluster, np.random.default_rng(0)))
    parallel, _ = models.shard(plan)
    messages = []
    for change in (lambda ids: ids.fill_(-1), lambda ids: ids.fill_(1 << 40)):
        batch = models.make_batch(0, rank)
        if rank == 1:
            change(batch.features["user"].values()[:1])
        for _ in range(2):
            with as_on_cuda(), pytest.raises(DataError) as caught:
                parallel(batch)
            messages.append(str(caught.value))
    with as_on_cuda():
        parallel(models.make_batch(1, rank))[0].backward()
    return messages


def bad_ids_together(rank: int) -> list[Any]:
    """Two collections in one exchange, of which either has one, or both, or none."""
    cluster = models.small_cluster(1, 2)
    plan = models.plan_of(cluster, models.random_split(cluster, np.random.default_rng(0)))
    parallel, _ = models.shard(plan)
    found: list[Any] = []
    for bad in ((), ("user",), ("clicked",), ("clicked", "user")):
        batch = models.make_batch(0, rank)
        for feature in bad if rank == 1 else ():
            batch.features[feature].values()[:1] = -1
        with as_on_cuda():
            try:
                start_input_dist(parallel, batch.features)
                found.append(float(parallel(batch)[0].detach()))
            except DataError as error:
                found.append(str(error))
    found.append(float(parallel(models.make_batch(0, rank))[0].detach()))
    return found


def test_ids_outside_tables_of_several_collections() -> None:
    for rank, (none, user, goods, both, plain) in enumerate(ranks.run(1, 2, bad_ids_together)):
        assert none == pytest.approx(plain)
        for text, table, feature in ((user, "users", "user"), (goods, "goods", "clicked"), (both, "goods", "clicked")):
            if rank:
                assert f"feature {feature!r}: id -1 is outside table {table!r}" in text
            else:
                assert f"rank 1 has bad ids of table {table!r}" in text


def test_ids_outside_their_table_are_named_though_the_host_does_not_wait() -> None:
    first, second = ranks.run(1, 2, bad_ids)
    assert all(m == "rank 0: rank 1 has bad ids of table 'users'; its own message names it" for m in first)
    assert "rank 1: feature 'user': id -1 is outside table 'users', which has rows 0 to 63" in second[0]
    assert f"feature 'user': id {1 << 40} is outside table 'users'" in second[2]


def resharded(rank: int) -> None:
    """Old rows are taken off their device before new ones get memory there."""
    cluster = models.small_cluster(2, 2)
    first, second = (models.random_split(cluster, np.random.default_rng(seed)) for seed in (1, 2))
    parallel, optimizer = models.shard(models.plan_of(cluster, first), "rowwise_adagrad")
    models.train(parallel, optimizer, rank, range(2))
    before = {name: models.whole(value) for name, value in parallel.state_dict().items()}
    parameters = dict(parallel.named_parameters())
    profiles = {name: models.profile_of(name) for _, name in models.table_names()}
    with as_on_cuda():
        moved = reshard(parallel, models.plan_of(cluster, second), profiles=profiles)
    assert moved.rows > 0
    for name, value in parallel.state_dict().items():
        assert torch.equal(models.whole(value), before[name]), name
    old = parameters["wide.embeddings.goods.weight"]
    assert old.untyped_storage().nbytes() == 0
    models.train(parallel, optimizer, rank, range(2, 4))


def test_resharding_through_the_hosts_memory() -> None:
    ranks.run(2, 2, resharded)


def test_what_fbgemm_is_given() -> None:
    """One bag for each row that is looked up: its kernels have a warp for each."""
    store = FusedStore(OptimizerSpec("sgd"), 10, 4, torch.float32, torch.device("cpu"))
    with mock.patch.object(store._kernel, "forward", wraps=store._kernel.forward) as kernel:
        store.look_up(torch.tensor([3, 3, 9]))
    indices, offsets = kernel.call_args.args
    assert indices.tolist() == [3, 3, 9]
    assert offsets.tolist() == [0, 1, 2, 3]
    assert indices.dtype == offsets.dtype == torch.int64


def test_a_slot_that_stands_there_again_is_rounded_as_before() -> None:
    """Of several with chances of their own any could win on CUDA, another one on each copy."""
    spec = OptimizerSpec("sgd", 0.1)
    store = MemoryStore(spec, 6, 8, torch.float16, torch.device("cpu"))
    slots, gradient = torch.tensor([4, 4, 1, NO_SLOT, NO_SLOT, 2]), torch.randn(6, 8)
    with as_on_cuda():
        where, sums, some = sum_by_slot(slots, gradient)
    assert where.tolist() == [1, 2, 4, 4, 4, 4]
    drawn = iter(torch.rand(6))

    def rounded_by_chance(_: Any, weight: torch.Tensor, *__: Any, **___: Any) -> None:
        for row in weight:
            row.fill_(next(drawn))

    written: dict[int, torch.Tensor] = {}

    def any_order(values: torch.Tensor, dim: int, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        for slot, row in zip(index.tolist(), rows, strict=True):
            assert torch.equal(written.setdefault(slot, row), row)
        return values

    with (
        mock.patch.object(base, "apply_update", rounded_by_chance),
        mock.patch.object(torch.Tensor, "index_copy_", any_order),
    ):
        store.update_rows(where, sums, read=some)
    assert sorted(written) == [1, 2, 4]


@pytest.mark.parametrize("name", ["adagrad", "rowwise_adagrad"])
def test_rows_that_nobody_touched_stay_with_an_eps_of_0(name: str) -> None:
    spec = OptimizerSpec(name, 0.1, StepOptions(eps=0.0))
    store = MemoryStore(spec, 3, 4, torch.float32, torch.device("cpu"))
    store.values.copy_(torch.arange(12.0).view(3, 4))
    with as_on_cuda():
        where, sums, some = sum_by_slot(torch.tensor([NO_SLOT, NO_SLOT]), torch.ones(2, 4))
    store.update_rows(where, sums, read=some)
    dense = torch.zeros(3, 4)
    dense[1, 2] = 2.0
    store.update_copies(slice(0, 3), dense)
    expected = torch.arange(12.0).view(3, 4)
    expected[1, 2] -= 0.1 if name == "adagrad" else 0.2
    torch.testing.assert_close(store.values, expected)


def test_values_that_no_length_counts_are_not_looked_at() -> None:
    batch = KeyedJaggedTensor(["f"], torch.tensor([1, 2, 3, 99]), lengths=torch.tensor([1, 2]))
    lookup = Lookup("f", "f", 0, 0)
    table = LocationTable(
        Layout.of({"t": [Tier("row_wise", 1, 4, 0, 0.0, None, 0.0, 0.0, 0.0)]}, {"t": 4}, 1),
        *(0, IndexBijection.identity(4), torch.device("cpu")),
    )
    for context in (nullcontext(), as_on_cuda()):
        with context:
            found, problem = ids_of_tables(batch, [lookup], [table], translated=False)
        assert problem is None
        assert [ids.tolist() for ids in (*found.ids, found.together())] == [[1, 2, 3]] * 2
