"""One rank: trains a model of one-hot features under TorchRec's shardings and ours, with and without delayed
synchronisation.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.streamable import Pipelineable

from benchmarks.cluster.models import ROWS
from flexshard import AccessProfile, Cluster, FlexShardEmbeddingCollectionSharder, FlexShardPlanner, Plan, Table, solve
from flexshard._internal import write_text
from flexshard.embeddings import compress
from flexshard.executors import LookaheadPipeline
from flexshard.executors.comm.delayed import DelayedRows
from flexshard.executors.stores.base import LookedUp
from flexshard.executors.stores.fused import FusedStore
from flexshard.executors.stores.updates import OptimizerSpec
from flexshard.planner import Tier

DIM = 48
FUSED = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05}
HOST = torch.device("cpu")
BLOCK = 6  # steps that are timed together: what the last one leaves under way is waited for at its end
SAMPLES = 1_000_000
TT_RANK = 16


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cluster", type=Path)
    parser.add_argument("--model", choices=list(DENSE), required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--most-rows", type=int, required=True)
    parser.add_argument("--ids", required=True)
    parser.add_argument("--ways", nargs="*", default=[], help="of training; all by default")
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    stream = Stream(args.batch_size, args.most_rows, args.ids)
    results = train(DENSE[args.model], stream, Cluster.load(args.cluster), args.rounds, args.ways)
    if dist.get_rank() == 0:
        write_text(args.result, json.dumps(results))
    dist.barrier()
    os._exit(0)  # without the wait of groups for each other's sockets


# -- data


@dataclass
class Batch(Pipelineable):
    """Samples of numbers, one id per table, and a label."""

    numbers: torch.Tensor
    ids: KeyedJaggedTensor
    labels: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:  # noqa: ARG002, D102 - as TorchRec has it
        return self

    def record_stream(self, stream: torch.Stream) -> None:  # noqa: D102 - as TorchRec has it
        pass

    def pin_memory(self) -> Batch:  # noqa: D102 - as TorchRec has it
        return self


def zipf(rows: int, exponent: float) -> npt.NDArray[np.float64]:
    """Shares of rows, by popularity."""
    weights = np.arange(1, rows + 1.0) ** -exponent
    return np.asarray(weights / weights.sum())


def hot(rows: int, share: float) -> npt.NDArray[np.float64]:
    """The same where a hundredth of the rows has that share."""
    few = -(-rows // 100)
    weights = np.exp(-np.arange(few) / few)
    of_others = np.full(rows - few, (1.0 - share) / max(rows - few, 1))
    found = np.concatenate([share * weights / weights.sum(), of_others])
    return np.sort(found / found.sum())[::-1]


LAWS: dict[str, Callable[[int, float], npt.NDArray[np.float64]]] = {"zipf": zipf, "hot": hot}


class Stream:
    """Batches shaped as Criteo's: 13 numbers and 26 ids, of rows in no order of popularity.

    Args:
        ids: ``zipf:EXPONENT``, a power law; or ``hot:SHARE``, of which a hundredth of each table's rows has so much, by
            an exponential law, and the others the rest, alike (BagPipe, section 5.3).
    """

    def __init__(self, batch_size: int, most_rows: int, ids: str) -> None:
        self.batch_size = batch_size
        self.rows = {f"c{i}": min(rows, most_rows) for i, rows in enumerate(ROWS)}
        law, _, number = ids.partition(":")
        self.shares = {name: LAWS[law](rows, float(number)) for name, rows in self.rows.items()}
        self.places = {
            name: np.random.default_rng(number).permutation(rows)
            for number, (name, rows) in enumerate(self.rows.items())
        }

    def tables(self) -> list[Table]:
        """With the distribution that ids are drawn from."""
        found = []
        for name, rows in self.rows.items():
            counts = np.zeros(rows, np.int64)
            counts[self.places[name]] = np.round(self.shares[name] * SAMPLES)
            profile = AccessProfile.from_counts(counts, num_samples=SAMPLES)
            found.append(Table(name, rows, DIM, profile, optimizer="rowwise_adagrad"))
        return found

    def batches(self, seed: int, most: int = 16) -> Iterator[Batch]:
        """The first ``most`` again and again."""
        rng, kept = np.random.default_rng([seed, dist.get_rank()]), list[Batch]()
        for _ in range(most):
            drawn = [
                self.places[name][np.searchsorted(np.cumsum(shares), rng.random(self.batch_size) * (1 - 1e-12))]
                for name, shares in self.shares.items()
            ]
            ids = torch.from_numpy(np.concatenate(drawn))
            lengths = torch.ones(len(ids), dtype=torch.int64)
            numbers = torch.from_numpy(rng.random((self.batch_size, 13), np.float32))
            labels = torch.from_numpy(rng.integers(0, 2, self.batch_size).astype(np.float32))
            kept.append(Batch(numbers, KeyedJaggedTensor(list(self.rows), ids, lengths=lengths), labels))
        while True:
            yield from kept


# -- models, with the layers of BagPipe's Table 2


def layers(*widths: int, last: bool = False) -> nn.Sequential:
    found: list[nn.Module] = []
    for a, b in pairwise(widths):
        found += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*(found[:-1] if last else found))


class DLRM(nn.Module):
    """Layers over the numbers, dot products of what they give and of every two rows, layers over those."""

    def __init__(self, tables: int) -> None:
        super().__init__()
        self.bottom = layers(13, 512, 256, 64, DIM)
        self.pairs = torch.triu_indices(tables + 1, tables + 1, 1)
        self.top = layers(DIM + self.pairs.shape[1], 1024, 1024, 1024, 256, 128, 1, last=True)

    def forward(self, numbers: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Logits; rows have shape (B, tables, D)."""
        own = self.bottom(numbers)
        every = torch.cat([own.unsqueeze(1), rows], 1)
        dots = torch.bmm(every, every.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        logits: torch.Tensor = self.top(torch.cat([own, dots], 1)).squeeze(1)
        return logits


class DeepAndCross(nn.Module):
    """Crosses of all inputs with themselves beside layers over them."""

    def __init__(self, tables: int) -> None:
        super().__init__()
        width = 13 + tables * DIM
        self.cross = nn.ModuleList([nn.Linear(width, 1) for _ in range(3)])
        self.deep = layers(width, 1024, 512, 256, 64, 48)
        self.over = layers(width + 48, 1024, 512, 256, 1, last=True)

    def forward(self, numbers: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Logits; rows have shape (B, tables, D)."""
        given = crossed = torch.cat([numbers, rows.flatten(1)], 1)
        for layer in self.cross:
            crossed = given * layer(crossed) + crossed
        logits: torch.Tensor = self.over(torch.cat([crossed, self.deep(given)], 1)).squeeze(1)
        return logits


DENSE: dict[str, Callable[[int], nn.Module]] = {"dlrm": DLRM, "deep-and-cross": DeepAndCross}


class Model(nn.Module):
    """Tables and layers."""

    def __init__(self, tables: nn.Module, dense: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.tables, self.dense, self._names = tables, dense, names
        self._pooled = isinstance(tables, EmbeddingBagCollection)
        self._local = isinstance(tables, LocalTables)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss, twice: to train on, and to look at."""
        found = self.tables(batch.ids)
        if self._pooled:
            rows = found.values().view(-1, len(self._names), DIM)
        elif self._local:
            rows = found
        else:
            rows = torch.stack([found[name].values() for name in self._names], 1)
        loss = nn.functional.binary_cross_entropy_with_logits(self.dense(batch.numbers, rows), batch.labels)
        return loss, loss.detach()


class LocalTables(nn.Module):
    """All rows on every rank, which nobody else hears of: what no exchange at all would take."""

    def __init__(self, rows: dict[str, int]) -> None:
        super().__init__()
        self._first = np.concatenate([[0], np.cumsum(list(rows.values()))])
        spec = OptimizerSpec.of(dict(FUSED), "all", HOST)
        self._store = [FusedStore(spec, int(self._first[-1]), DIM, torch.float32, HOST)]

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        """Shape (B, tables, D)."""
        tables = len(self._first) - 1
        slots = ids.values().view(tables, -1) + torch.from_numpy(self._first[:-1]).view(-1, 1)
        rows: torch.Tensor = _Local.apply(torch.zeros((), requires_grad=True), self._store[0], slots.t().reshape(-1))
        return rows.view(-1, tables, DIM)


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _anchor: torch.Tensor, store: FusedStore, slots: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            ctx.found = store.look_up(slots)
        rows: torch.Tensor = ctx.found.rows
        return rows

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        found: LookedUp = ctx.found
        found.update(gradient.contiguous())
        return None, None, None


# -- how they are trained


@dataclass
class Run:
    """One way to train: a step, and what waits for all that it leaves under way."""

    step: Callable[[], Any]
    settle: Callable[[], None]
    words: str = ""


def pipelined(
    dense: Callable[[int], nn.Module],
    stream: Stream,
    tables: nn.Module,
    plan: Any,
    sharders: list[Any],
    compressed: Mapping[str, Any] | None = None,
    **how: Any,
) -> Run:
    torch.manual_seed(0)
    model: Any = Model(tables, dense(len(stream.rows)), list(stream.rows))
    if compressed:
        model, _ = compress(model, compressed, decompose=False)
    whole = plan(model) if callable(plan) else plan
    model = DistributedModelParallel(model, plan=whole, sharders=sharders, device=HOST)
    model._dmp_wrapped_module.register_comm_hook(None, fp16_compress_hook)
    rest = dict(in_backward_optimizer_filter(model.named_parameters()))
    sgd = KeyedOptimizerWrapper(rest, lambda parameters: torch.optim.SGD(parameters, lr=0.01))
    optimizer: Any = CombinedOptimizer([model.fused_optimizer, sgd])
    pipeline: Any = (
        LookaheadPipeline(model, optimizer, HOST, **how) if how else TrainPipelineSparseDist(model, optimizer, HOST)
    )
    batches = stream.batches(0)

    def settle() -> None:
        for joint in pipeline._joint() if how else ():
            joint.sync.settle()

    return Run(lambda: pipeline.progress(batches), settle)


def alone(dense: Callable[[int], nn.Module], stream: Stream) -> Run:
    """All rows on every rank; the layers as the others have them."""
    torch.manual_seed(0)
    layers_of_all = DistributedDataParallel(dense(len(stream.rows)))
    layers_of_all.register_comm_hook(None, fp16_compress_hook)
    model = Model(LocalTables(stream.rows), layers_of_all, list(stream.rows))
    optimizer = torch.optim.SGD(model.dense.parameters(), lr=0.01)
    batches = stream.batches(0)

    def step() -> None:
        optimizer.zero_grad()
        model(next(batches))[0].backward()
        optimizer.step()

    return Run(step, lambda: None)


def collection(stream: Stream) -> EmbeddingCollection:
    return EmbeddingCollection(
        [
            EmbeddingConfig(name=n, num_embeddings=r, embedding_dim=DIM, feature_names=[n])
            for n, r in stream.rows.items()
        ],
        device=torch.device("meta"),
    )


def bags(stream: Stream) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(name=n, num_embeddings=r, embedding_dim=DIM, feature_names=[n])
            for n, r in stream.rows.items()
        ],
        device=torch.device("meta"),
    )


def by_rows(tables: nn.Module) -> ShardingPlan:
    how = {name: row_wise(compute_kernel="fused") for name in tables.embeddings}
    width, world = int(os.environ["LOCAL_WORLD_SIZE"]), dist.get_world_size()
    sharder = EmbeddingCollectionSharder(dict(FUSED))
    plan = construct_module_sharding_plan(tables, how, sharder, local_size=width, world_size=world, device_type="cpu")
    return ShardingPlan({"tables": plan})


def by_torchrec(cluster: Cluster, batch_size: int, sharders: list[Any]) -> Callable[[nn.Module], ShardingPlan]:
    """As its planner decides, which is told how fast the links are."""
    rates = [level.all_to_all.bytes_per_s for level in cluster.levels if level.all_to_all is not None]
    topology = Topology(
        world_size=cluster.world_size,
        compute_device="cpu",
        local_world_size=cluster.ranks_per_node,
        ddr_cap=1 << 34,
        **({"intra_host_bw": rates[0] / 1e3, "inter_host_bw": rates[-1] / 1e3} if rates else {}),
    )

    def plan(model: nn.Module) -> ShardingPlan:
        planner = EmbeddingShardingPlanner(topology=topology, batch_size=batch_size)
        return planner.collective_plan(model, sharders, dist.group.WORLD)

    return plan


def as_row_wise(plan: Plan, world: int) -> Plan:
    """The same tables, every row with one owner."""
    return replace(
        plan,
        tables={
            name: replace(table, tiers=(Tier("row_wise", world, table.rows, 0, 1.0, None, 0.0, 0.0, 0.0),))
            for name, table in plan.tables.items()
        },
    )


def train(
    dense: Callable[[int], nn.Module], stream: Stream, cluster: Cluster, rounds: int, ways: Sequence[str] = ()
) -> dict[str, Any]:
    """Seconds per step of each way; of all that there are, where none is named."""
    tables, world = stream.tables(), dist.get_world_size()
    plan = solve(tables, cluster, batch_size=stream.batch_size, index_dedup=True)
    profiles = {table.name: table.profile for table in tables}

    def ours(
        planned: Plan, caches: dict[str, float] | None = None, compressed: Mapping[str, Any] | None = None, **how: Any
    ) -> Run:
        sharders = [FlexShardEmbeddingCollectionSharder(dict(FUSED), cache_load_factors=caches)]
        planner = FlexShardPlanner(planned, profiles=profiles)
        plan = partial(planner.collective_plan, sharders=sharders)
        return pipelined(dense, stream, collection(stream), plan, sharders, compressed, **how)

    sequences, pooled = [EmbeddingCollectionSharder(dict(FUSED))], [EmbeddingBagCollectionSharder(dict(FUSED))]
    once = as_row_wise(plan, world)
    split = [name for name, table in plan.tables.items() if table.tiers[-1].group_size == world]
    large = {name: 0.05 for name in split if plan.tables[name].tiers[-1].rows * 0.05 > 4 * stream.batch_size}
    # As EL-Rec has it (its Figure 16): the largest table as a tensor train on every rank.
    largest = max(stream.rows, key=lambda name: stream.rows[name])
    trains = {f"tables.{largest}": {"tt_ranks": TT_RANK}}
    beside = replace(plan, tables={name: table for name, table in plan.tables.items() if name != largest})
    how: dict[str, Callable[[], Run]] = {
        "TorchRec, row-wise": lambda: pipelined(
            dense, stream, one := collection(stream), by_rows(one), list[Any](sequences)
        ),
        "TorchRec's planner": lambda: pipelined(
            dense, stream, bags(stream), by_torchrec(cluster, stream.batch_size, list(pooled)), list[Any](pooled)
        ),
        "row-wise, delayed sync": lambda: ours(once, lookahead=2, delayed_sync=True),
        "plan": lambda: ours(plan),
        "plan, lookahead": lambda: ours(plan, lookahead=2),
        "plan, delayed sync": lambda: ours(plan, lookahead=2, delayed_sync=True),
        "plan, cache of 5 %": lambda: ours(plan, large, lookahead=2),
        "plan, cache, tensor train": lambda: ours(
            beside, {name: 0.05 for name in large if name != largest}, trains, lookahead=2
        ),
        "plan, cache, delayed sync": lambda: ours(plan, large, lookahead=2, delayed_sync=True),
        "no exchange": lambda: alone(dense, stream),
    }
    unknown = [name for name in ways if name not in how]
    if unknown:
        raise SystemExit(f"--ways: no way is called {unknown[0]!r}; there are {', '.join(how)}")
    runs = {name: make() for name, make in how.items() if not ways or name in ways}
    gc.collect()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in list(runs.items())[:: -1 if number % 2 else 1]:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(BLOCK):
                run.step()
            run.settle()
            dist.barrier()
            if number:  # the first round warms up
                seconds[name].append((time.perf_counter() - start) / BLOCK)
    found: dict[str, Any] = {
        name: {"step_seconds": statistics.median(times), "rounds": times} for name, times in seconds.items()
    }
    for name, planned in (("row-wise, delayed sync", once), ("plan, delayed sync", plan)):
        if name in runs:
            found[name] |= critical(runs[name], stream, planned)
    tiers = [tier for table in plan.tables.values() for tier in table.tiers]
    sizes = sorted({tier.group_size for tier in tiers})
    rows = {str(size): sum(tier.rows for tier in tiers if tier.group_size == size) for size in sizes}
    return {"ways": found, "tiers": rows, "cached": len(large)}


def critical(run: Run, stream: Stream, plan: Plan) -> dict[str, float]:
    """Rows that travel over all ranks in a step and those that somebody waits for, of this rank, counted over some
    steps and as the closed form has them.
    """
    all_rows, late = [], []
    early = DelayedRows.send_early

    def counted(self: DelayedRows) -> None:
        early(self)
        assert self._of_before is not None
        waited, sent = self._of_before.as_asker
        late.append(int(waited.counts.sum()))
        all_rows.append(int(waited.counts.sum() + sent.counts.sum()))

    with mock.patch.object(DelayedRows, "send_early", counted):
        for _ in range(3 * BLOCK):
            run.step()
    run.settle()
    found = torch.tensor([statistics.fmean(all_rows), statistics.fmean(late)], dtype=torch.float64)
    dist.all_reduce(found)
    asked, waited = expected(stream, plan)
    return {
        "rows": found[0].item(),
        "late": found[1].item(),
        "expected_rows": asked,
        "expected_late": waited,
    }


def expected(stream: Stream, plan: Plan) -> tuple[float, float]:
    """Distinct rows that all ranks ask the owners of rows without copies for, and those that the batch before trained:
    the sums of q and of qQ, where q of n lookups is 1 - (1 - p)^n on one rank and Q the same of all ranks' lookups.
    """
    world, asked, waited = dist.get_world_size(), 0.0, 0.0
    for name, table in plan.tables.items():
        last = table.tiers[-1]
        if last.group_size != world:
            continue
        p: npt.NDArray[np.float64] = stream.shares[name][table.rows - last.rows :]
        own, every = -np.expm1(stream.batch_size * np.log1p(-p)), -np.expm1(world * stream.batch_size * np.log1p(-p))
        asked += world * float(own.sum())
        waited += world * float(own @ every)
    return asked, waited


if __name__ == "__main__":
    main()
