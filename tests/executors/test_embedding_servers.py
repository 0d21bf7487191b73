"""Rows of tables on embedding servers: training is what it is with all rows in the trainers."""

from __future__ import annotations

import importlib
import itertools
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("torchrec")
pytest.importorskip("numba")
pytest.importorskip("ray")

import ray
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.model_parallel import DistributedModelParallel

from flexshard.errors import CacheError
from flexshard.executors import (
    EmbeddingServers,
    FlexShardEmbeddingBagCollectionSharder,
    FlexShardEmbeddingCollectionSharder,
    LookaheadPipeline,
    full_state_dict,
    load_checkpoint,
    save_checkpoint,
    table_norms,
)
from flexshard.executors.servers.row_server import RowServer
from flexshard.executors.stores.served import ServedStore, _ServedRows
from flexshard.planner import FlexShardPlanner
from flexshard.tables import OPTIMIZERS
from tests.executors import (
    lookahead_model as looking,
    ranks,
    test_lookahead as plain,
    test_pooled_caches,
    test_state_memory,
)
from tests.executors.test_lookahead import HOST, fused
from tests.slow import first

STEPS = 12
SHAPES = {1: (1, 1), 2: (1, 2), 4: (2, 2)}
SOME = ["rowwise_adagrad", "adam"]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a Ray cluster on this machine."""
    ray.init(address="local", num_cpus=64, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


def with_servers(rank: int, address: str, number: int, work: Callable[..., Any], *args: Any, **how: Any) -> Any:
    """Do something of which every model with a cache has its rows on servers."""
    shard = looking.shard
    with EmbeddingServers(number, address=address) as servers:

        def served(plan: Any, factors: Any, options: Any, device: str = "cpu", **sharder: Any) -> Any:
            made = shard(plan, factors, options, device, **sharder, **({} if factors is None else {"servers": servers}))
            assert all(isinstance(store, ServedStore) for store in looking.caches(made[0]))
            assert factors is None or looking.caches(made[0])
            return made

        with mock.patch.object(looking, "shard", served):
            return work(rank, *args, **how)


# -- one server


def test_a_server_has_every_so_many_rows() -> None:
    server = RowServer(1, 3)
    server.make("1/a", 8, {"weight": (2, "float16"), "sum": (1, "float32")})  # rows 1, 4, 7
    server.make("2/a", 2, {"weight": (2, "float16"), "sum": (1, "float32")})  # row 1
    assert server.nbytes() == 4 * (2 * 2 + 4)
    rows = {"weight": np.arange(6, dtype=np.float16).reshape(3, 2), "sum": np.ones((3, 1), np.float32)}
    server.write([("1/a", np.array([2, 0])), ("2/a", np.array([0]))], rows)
    found = server.read([("2/a", np.array([0])), ("1/a", np.array([0, 1, 2]))], ["weight"])
    assert found["weight"].tolist() == [[4, 5], [2, 3], [0, 0], [0, 1]]
    assert found["weight"].dtype == np.float16
    server.drop(["1/"])
    assert server.nbytes() == 2 * 2 + 4


def test_a_server_without_memory_says_so() -> None:
    with pytest.raises(CacheError, match=r"table 'a': no memory for its 1,000,000,000,000 rows .* take more servers"):
        RowServer(0, 1).make("1/a", 10**12, {"weight": (10**5, "float32")})


def reads_and_writes(rank: int, address: str) -> int:
    """Random rows of two tables against arrays; what is written is not waited for."""
    generator = np.random.default_rng(rank)
    sizes, wrong = {"a": 5000, "b": 300}, 0
    with EmbeddingServers(3, address=address) as servers:
        tables = servers.tables()
        for table, rows in sizes.items():
            tables.make(table, rows, {"weight": (40, "float32"), "sum": (1, "float32")})
        expected = {table: np.zeros((rows, 41), np.float32) for table, rows in sizes.items()}
        for _ in range(30):
            wanted = [
                # Each rank writes to rows of its own; large parts travel another way than small ones.
                (table, generator.permutation(rows // 2)[: generator.integers(0, rows // 2)] * 2 + rank)
                for table, rows in sizes.items()
            ]
            new = generator.random((sum(ids.size for _, ids in wanted), 41), np.float32)
            written = {"weight": torch.from_numpy(new[:, :40].copy()), "sum": torch.from_numpy(new[:, 40:].copy())}
            tables.begin_write(wanted, written)
            for (table, ids), part in zip(wanted, np.split(new, [wanted[0][1].size]), strict=True):
                expected[table][ids] = part
            asked = [
                (table, generator.integers(0, rows // 2, generator.integers(1, 900)) * 2 + rank)
                for table, rows in reversed(sizes.items())
            ]
            found = tables.read(asked, ["sum", "weight"])
            got = np.concatenate([found["weight"].numpy(), found["sum"].numpy()], axis=1)
            wrong += int((got != np.concatenate([expected[table][ids] for table, ids in asked])).any())
    return wrong


def test_what_is_written_is_what_is_read(address: str) -> None:
    assert ranks.run(1, 2, reads_and_writes, address) == [0, 0]


# -- training


def cases(rank: int, plan: Any, optimizers: list[str]) -> list[Any]:
    """(optimizer, share, lookahead, delayed, what differs) of all of them."""
    found = []
    for optimizer in optimizers:
        outputs, _, parallel = plain.train(rank, plan, None, optimizer, stock=True)
        expected = looking.everything(parallel)
        for factor, ahead, delayed in itertools.product((0.1, 1.0), (1, 4), (False, True)):
            logits, _, parallel = plain.train(rank, plan, factor, optimizer, ahead=ahead, delayed_sync=delayed)
            differing = looking.differs(looking.everything(parallel), expected)
            differing += looking.steps_that_differ(logits, outputs)
            found.append((optimizer, factor, ahead, delayed, differing))
    return found


@pytest.mark.parametrize("case", first(1, [(2, ["adam"]), (2, list(OPTIMIZERS)), (4, SOME), (1, SOME)]))
def test_optimizers(address: str, case: tuple[int, list[str]]) -> None:
    world, names = case
    plan = looking.plan_for(*SHAPES[world])
    for results in ranks.run(*SHAPES[world], with_servers, address, 3, cases, plan, names, limit=500.0):
        assert len(results) == len(names) * 8
        assert [case for case in results if case[4]] == []


def test_evaluation_checkpoints_and_resharding_with_a_warm_cache(address: str, tmp_path: Path) -> None:
    plans = looking.plan_for(1, 2), looking.plan_for(1, 2, tiers=False)
    for one, other in (plans, plans[::-1]):
        folder = str(tmp_path / str(one is plans[0]))
        assert ranks.run(1, 2, with_servers, address, 2, plain.interrupted, one, other, folder) == [[], []]


@pytest.mark.slow  # other loops have servers too; plain ones are in test_lookahead
def test_a_plain_loop(address: str) -> None:
    assert ranks.run(1, 2, with_servers, address, 2, plain.plainly, looking.plan_for(1, 2)) == [[], []]


def with_tokens(rank: int, home: str) -> list[float]:
    """Rows through servers in a cluster of the first rank's own, which wants tokens unless its environment says no."""
    os.environ["HOME"] = home
    del os.environ["RAY_AUTH_MODE"]
    importlib.import_module("ray._raylet").Config.initialize("")  # this module has imported it already
    with EmbeddingServers(2, address="local", options={"num_cpus": 0.1}) as servers:
        tables = servers.tables()
        tables.make("a", 10, {"weight": (2, "float32")})
        if not rank:
            tables.write([("a", np.arange(10))], {"weight": torch.arange(20.0).reshape(10, 2)})
        dist.barrier()
        return tables.read([("a", np.array([9]))], ["weight"])["weight"].ravel().tolist()


@pytest.mark.slow
def test_the_first_rank_may_start_a_cluster_that_wants_tokens(tmp_path: Path) -> None:
    assert ranks.run(1, 2, with_tokens, str(tmp_path)) == [[18.0, 19.0]] * 2
    assert (tmp_path / ".ray" / "auth_token").exists()


def pooled(rank: int, address: str) -> list[str]:
    """As ``test_a_cache_changes_no_bit`` of pooled tables."""
    with EmbeddingServers(2, address=address) as servers:
        sharder = partial(FlexShardEmbeddingBagCollectionSharder, servers=servers)
        with mock.patch.object(test_pooled_caches, "FlexShardEmbeddingBagCollectionSharder", sharder):
            differing = test_pooled_caches.with_and_without(rank)
        assert min(servers.nbytes()) > 0
        return differing


@pytest.mark.slow
def test_pooled_tables(address: str) -> None:
    assert ranks.run(1, 2, pooled, address) == [[], []]


def _not_written(self: Any, slots: Any, rows: Any) -> None:
    """Rows that leave the cache are lost."""


def _states_not_written(self: Any, slots: Any, rows: Any) -> None:
    _write(self, slots, {"weight": rows["weight"]})


def _of_another_table(self: Any, slots: Any) -> Any:
    order, wanted = _by_table(self, slots)
    return order, [(self._ranges[0].table, np.minimum(ids, looking.ROWS["shops"] - 1)) for _, ids in wanted]


def _in_another_order(self: Any, slots: Any) -> Any:
    order, wanted = _by_table(self, slots)
    return order[::-1].copy(), wanted


_write, _by_table = _ServedRows.write, _ServedRows._by_table
MUTANTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "not written": ("write", _not_written),
    "states not written": ("write", _states_not_written),
    "of another table": ("_by_table", _of_another_table),
    "in another order": ("_by_table", _in_another_order),
}


def mutated(rank: int, plan: Any) -> dict[str, bool]:
    """Whether some step's logits differ under each mutant."""
    outputs, _, _ = plain.train(rank, plan, None, "rowwise_adagrad", stock=True, steps=range(30))
    noticed = {}
    for name, (method, wrong) in MUTANTS.items():
        with mock.patch.object(_ServedRows, method, wrong):
            logits, _, _ = plain.train(rank, plan, 0.1, "rowwise_adagrad", ahead=2, steps=range(30))
        noticed[name] = bool(looking.steps_that_differ(logits, outputs))
    return noticed


def test_mutants_are_noticed(address: str) -> None:
    for noticed in ranks.run(1, 2, with_servers, address, 2, mutated, looking.plan_for(1, 2)):
        assert noticed == dict.fromkeys(MUTANTS, True)


# -- state


def trained(rank: int, plan: Any, factor: float | None, steps: int = 5) -> Any:
    parallel, optimizer = looking.shard(plan, factor, fused("rowwise_adagrad"))
    pipeline = LookaheadPipeline(parallel, optimizer, HOST, lookahead=3)
    batches = looking.batches(rank, range(40))
    for _ in range(steps):
        pipeline.progress(batches)
    return parallel, optimizer, pipeline, batches


def saved(rank: int, plan: Any, factor: float | None, folder: str) -> dict[str, np.ndarray]:
    parallel, optimizer, _, _ = trained(rank, plan, factor)
    save_checkpoint(folder, parallel, optimizer)
    return looking.everything(parallel)


def loaded(rank: int, plan: Any, factor: float | None, folder: str) -> dict[str, np.ndarray]:
    """Into a model that has been trained otherwise, with a warm cache; and on it goes."""
    parallel, optimizer, pipeline, batches = trained(rank, plan, factor, 3)
    load_checkpoint(folder, parallel, optimizer)
    found = looking.everything(parallel)
    for _ in range(4):
        pipeline.progress(batches)
    return found | {f"then {name}": values for name, values in looking.everything(parallel).items()}


@pytest.mark.parametrize("shape", first(1, [(1, 2), (1, 1)]))
def test_checkpoints_do_not_know_of_servers(address: str, tmp_path: Path, shape: tuple[int, int]) -> None:
    """Saved with and without, loaded with and without, under another plan, by another number of ranks, from another
    number of servers.
    """
    folders = {True: str(tmp_path / "served"), False: str(tmp_path / "plain")}
    plan, other = looking.plan_for(1, 2), looking.plan_for(*shape, tiers=shape == (1, 1))
    first_saved = ranks.run(1, 2, with_servers, address, 3, saved, plan, 0.3, folders[True])[0]
    assert looking.differs(first_saved, ranks.run(1, 2, saved, plan, None, folders[False])[0]) == []
    expected = ranks.run(*shape, loaded, other, None, folders[False])[0]
    assert looking.differs(first_saved, {name: expected[name] for name in first_saved}) == []
    assert looking.differs(ranks.run(*shape, loaded, other, None, folders[True])[0], expected) == []
    for folder in folders.values():
        found = ranks.run(*shape, with_servers, address, 2, loaded, other, 0.3, folder)[0]
        assert looking.differs(found, expected) == []


def handled(rank: int, plan: Any, factor: float | None) -> dict[str, np.ndarray]:
    """What users do with a model's state, between steps."""
    parallel, _, pipeline, batches = trained(rank, plan, factor)
    found: dict[str, Any] = {}

    def note(what: str) -> None:
        found.update({f"{what} {name}": values for name, values in looking.everything(parallel).items()})
        for step in range(3):
            found[f"{what} step {step}"] = pipeline.progress(batches).detach().numpy()

    note("trained")
    with torch.no_grad():
        for name, value in parallel.state_dict().items():
            if "goods" in name:
                value.to_local().mul_(2.0)
    note("written to")
    found |= {f"norm {name}": np.array(norm) for name, norm in table_norms(parallel).items()}
    found |= {f"max {name}": np.array(norm) for name, norm in table_norms(parallel, norm_type=float("inf")).items()}
    whole = [full_state_dict(parallel)]
    torch.distributed.broadcast_object_list(whole)
    found |= {f"whole {name}": value.numpy() for name, value in whole[0].items()}
    pipeline.progress(batches)
    parallel.load_state_dict({name: value.clone() for name, value in whole[0].items()}, strict=False)
    note("loaded")
    for group in parallel.fused_optimizer.param_groups:
        group["lr"] = 0.01
    note("another rate")
    parallel.load_state_dict(parallel.state_dict())
    note("loaded from itself")
    return found


def test_states_are_handled_as_without_servers(address: str) -> None:
    plan = looking.plan_for(1, 2)
    expected = ranks.run(1, 2, handled, plan, None)
    for found, whole in zip(ranks.run(1, 2, with_servers, address, 3, handled, plan, 0.3), expected, strict=True):
        assert len(found) > 40
        norms = [name for name in whole if name.startswith("norm")]
        for name in norms:  # sums in another order
            np.testing.assert_allclose(found.pop(name), whole.pop(name), rtol=1e-12)
        assert looking.differs(found, whole) == []


def shown(rank: int, plan: Any) -> dict[str, Any]:
    """Parameters are what a rank holds: rows with copies; they may be written to."""
    found = {}
    for factor in (None, 0.3):
        parallel, _, pipeline, batches = trained(rank, plan, factor)
        tables = parallel.module.tables.tables
        slots = {name: tables.layout.table_slots[[n, n + 1]].tolist() for n, name in enumerate(tables.names)}
        copied = {name: sum(len(held[2]) for held in tables.held(n)[:-1]) for n, name in enumerate(tables.names)}
        parameters = {name.split(".")[-2]: value for name, value in parallel.named_parameters() if "embeddings" in name}
        with torch.no_grad():
            for name in looking.CACHED:
                parameters[name][: copied[name]].mul_(0.5)  # the same rows on every rank that has them
        pipeline.progress(batches)
        lengths = {name: (len(parameters[name]), copied[name], end - start) for name, (start, end) in slots.items()}
        found[factor] = lengths, looking.everything(parallel)
    return {
        "with": found[0.3][0],
        "without": found[None][0],
        "differing": looking.differs(found[0.3][1], found[None][1]),
    }


def test_parameters_are_the_rows_that_a_rank_holds(address: str) -> None:
    for found in ranks.run(1, 2, with_servers, address, 2, shown, looking.plan_for(1, 2)):
        assert found["differing"] == []
        for name in looking.ROWS:
            shown_rows, copied, _ = found["with"][name]
            assert shown_rows == copied > 0 or name not in looking.CACHED
            all_rows, _, slots = found["without"][name]
            assert all_rows == slots > copied


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingConfig(
            name="t", num_embeddings=test_state_memory.ROWS, embedding_dim=test_state_memory.DIM, feature_names=["f"]
        )
        self.tables = EmbeddingCollection(tables=[config], device=torch.device("meta"))


def peaks(rank: int, address: str, folder: str) -> dict[str, float]:
    """In MiB: what a table of 293 MiB takes in a trainer whose rows are on servers."""
    plan, profile = test_state_memory.planned(20_000)
    peak = test_state_memory.peak_bytes
    with EmbeddingServers(2, address=address) as servers:
        sharders: Any = [
            FlexShardEmbeddingCollectionSharder(fused("sgd"), cache_load_factors={"t": 0.02}, servers=servers)
        ]
        model, made = Large(), []

        def make() -> None:
            sharding = FlexShardPlanner(plan, profiles={"t": profile}).collective_plan(model, sharders)
            made.append(DistributedModelParallel(model, plan=sharding, sharders=sharders, device=torch.device("cpu")))

        found = {"sharding": peak(make)}
        (parallel,) = made
        assert sum(servers.nbytes()) == test_state_memory.TABLE
        before = table_norms(parallel)
        found["save_checkpoint"] = peak(lambda: save_checkpoint(folder, parallel), 2)
        found["load_checkpoint"] = peak(lambda: load_checkpoint(folder, parallel), 2)
        found["norms"] = peak(lambda: table_norms(parallel))
        assert table_norms(parallel) == before
        assert min(before.values()) > 0
        return {what: nbytes / (1 << 20) for what, nbytes in found.items()}


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peak memory")
def test_a_table_never_is_in_a_trainer(address: str, tmp_path: Path) -> None:
    for found in ranks.run(1, 2, peaks, address, str(tmp_path)):
        assert all(mebibytes < 250 for mebibytes in found.values()), found


# -- faults

EVERY = 3


def job(rank: int, plan: Any, folder: str, steps: int, *, resume: bool = False, kill: Any = None) -> Any:
    """Train with a checkpoint after every third step; what the model is then."""
    parallel, optimizer = looking.shard(plan, 0.3, fused("rowwise_adagrad"))
    pipeline = LookaheadPipeline(parallel, optimizer, HOST, lookahead=3)
    trained = 0
    if resume:
        position = load_checkpoint(folder, parallel, optimizer)
        assert position is not None
        trained = position["trained"]
    batches = looking.batches(rank, range(trained, steps))
    for step in range(trained + 1, steps + 1):
        if kill is not None:
            kill(parallel, step)
        pipeline.progress(batches)
        if step % EVERY == 0:
            save_checkpoint(folder, parallel, optimizer, position={"trained": step})
    return looking.everything(parallel)


def with_a_kill(rank: int, plan: Any, folder: str, when: str) -> str:
    """As ``job``, until the second of two servers is killed."""

    def kill(parallel: Any) -> None:
        if rank == 0:
            (store,) = looking.caches(parallel)
            os.kill(store.on_servers.servers.pids()[1], signal.SIGKILL)

    def at_step(parallel: Any, step: int) -> None:
        if when == "steps" and step == 8:
            kill(parallel)
        if when == "checkpoints" and step == 6:
            original = dcp.save

            def save(*args: Any, **kwargs: Any) -> Any:
                kill(parallel)
                return original(*args, **kwargs)

            patch.setattr(dcp, "save", save)
        if when == "copies" and step == 8:
            (store,) = looking.caches(parallel)
            fetch = store._moves._fetch

            def fetched(*args: Any) -> None:
                kill(parallel)
                fetch(*args)

            store._moves._fetch = fetched

    with pytest.MonkeyPatch.context() as patch:
        text = plain.message_of(partial(job, rank, plan, folder, 40, kill=at_step))
    ranks.leave_together()
    return text


@pytest.mark.parametrize("when", first(1, ["checkpoints", "steps", "copies"]))
def test_a_killed_server_ends_all_ranks_and_training_goes_on_with_new_ones(
    address: str, tmp_path: Path, when: str
) -> None:
    plan, folder = looking.plan_for(1, 2), str(tmp_path)
    expected = ranks.run(1, 2, job, plan, str(tmp_path / "whole"), STEPS)[0]
    start = time.monotonic()
    texts = ranks.run(1, 2, with_servers, address, 2, with_a_kill, plan, folder, when)
    gone = "embedding server 1 of 2 is gone; end this job, start it again with new servers"
    assert any(gone in text for text in texts)
    assert all(
        gone in text
        or "has a cache of table 'goods' that is too small for a batch, or whose rows cannot be moved" in text
        for text in texts
    )
    kept = (Path(folder) / "latest").read_text().strip()
    assert kept == ("save-1" if when == "checkpoints" else "save-2")
    for state in ranks.run(1, 2, with_servers, address, 3, partial(job, resume=True), plan, folder, STEPS):
        assert looking.differs(state, expected) == []
    assert time.monotonic() - start < 60  # the paper's Figure 14, and here with all that is trained


def trainer_killed(rank: int, plan: Any, folder: str) -> None:
    def kill(_: Any, step: int) -> None:
        if rank == 1 and step == 8:
            os.kill(os.getpid(), signal.SIGKILL)

    job(rank, plan, folder, 40, kill=kill)


@pytest.mark.slow
def test_a_killed_trainer_leaves_a_checkpoint_to_go_on_from(address: str, tmp_path: Path) -> None:
    plan, folder = looking.plan_for(1, 2), str(tmp_path)
    expected = ranks.run(1, 2, job, plan, str(tmp_path / "whole"), STEPS)[0]
    found = ranks.run(1, 2, with_servers, address, 2, trainer_killed, plan, folder, timeout=15.0, expect_failures=True)
    assert all(isinstance(error, Exception) for error in found)
    for state in ranks.run(1, 2, with_servers, address, 2, partial(job, resume=True), plan, folder, STEPS):
        assert looking.differs(state, expected) == []


# -- what cannot be


def refusals(rank: int, address: str, plan: Any) -> list[str]:
    def many() -> Any:
        with mock.patch("flexshard.executors.servers.embedding_servers._START_SECONDS", 2.0):
            return EmbeddingServers(2, address=address, options={"num_cpus": 10_000})

    found = [
        plain.message_of(lambda: EmbeddingServers(0, address=address)),
        plain.message_of(many),
        plain.message_of(lambda: EmbeddingServers(1, address=address, options={"nmu_cpus": 1})),
        plain.message_of(lambda: EmbeddingServers(1, address=address, options={"max_restarts": 5})),
        plain.message_of(lambda: EmbeddingServers(1, options=["num_cpus"] if rank else None)),  # type: ignore[arg-type]
        plain.message_of(lambda: EmbeddingServers(1, address=6379)),  # type: ignore[arg-type]
        plain.message_of(lambda: EmbeddingServers(1, address="127.0.0.1:1")),
        plain.message_of(lambda: EmbeddingServers(2 + rank, address=address)),
        plain.message_of(lambda: FlexShardEmbeddingCollectionSharder(servers="tables")),  # type: ignore[arg-type]
    ]
    with EmbeddingServers(1, address=address) as servers:
        found.append(plain.message_of(lambda: FlexShardEmbeddingBagCollectionSharder(servers=servers)))
        alone = [dist.new_group([one]) for one in range(2)][rank]
        found.append(plain.message_of(lambda: servers.tables(alone)))
        with pytest.warns(UserWarning, match="none of these is behind a cache"):
            looking.shard(plan, None, fused("sgd"), servers=servers)
        first_model, *_ = looking.shard(plan, 0.3, fused("sgd"), servers=servers)
        again, *_ = looking.shard(plan, 0.3, fused("sgd"), servers=servers)  # two models are two
        before = looking.everything(again)
        with torch.no_grad():
            for name, value in first_model.state_dict().items():
                if "embeddings" in name:
                    value.to_local().zero_()
        assert looking.everything(first_model)["tables.embeddings.goods.weight"].max() == 0
        assert looking.differs(looking.everything(again), before) == []
    found.append(plain.message_of(lambda: looking.everything(again)))
    with mock.patch.dict("sys.modules", {"ray": None}):
        found.append(plain.message_of(lambda: EmbeddingServers(1)))
    return found


EXPECTED = (
    r"CacheError: number of embedding servers must be .*at least 1, found 0",
    r"CacheError: 2 of 2 embedding servers have not started within 2 s; the Ray cluster has .* CPUs free: take fewer",
    r"CacheError: embedding servers could not be started: .*nmu_cpus",
    r"CacheError: options: 'max_restarts' is the servers' own; leave it out",
    r"CacheError: (rank 1: )?options are Ray's of an actor, by name, found \['num_cpus'\]",
    r"CacheError: address is a text, such as '10.0.0.1:6379', or None, found 6379",
    r"CacheError: this process is connected to Ray at .* already; leave address='127.0.0.1:1' out",
    r"CacheError: (rank 1: )?3 embedding servers are asked for here, 2 on rank 0",
    r"TableError: servers must be EmbeddingServers, found str",
    r"TableError: servers were given, and no pooled table for them; name some in cache_load_factors",
    r"CacheError: these embedding servers are of ranks \[0, 1\], the module is sharded over ranks \[\d\]; make",
    r"CacheError: .*the embedding servers have been closed",
    r"MissingDependencyError: .*pip install 'flexshard\[ray\]'",
)


def test_what_cannot_be_is_said(address: str) -> None:
    for found in ranks.run(1, 2, refusals, address, looking.plan_for(1, 2)):
        for text, pattern in zip(found, EXPECTED, strict=True):
            assert re.match(pattern, text), text
