"""One rank: trains a whole model under every plan in turn."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
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
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    placement,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan

from benchmarks.cluster.models import MODELS, Model
from flexshard import Cluster, FlexShardEmbeddingCollectionSharder, FlexShardPlanner, Plan, Problem, Table, solve
from flexshard._internal import write_text
from flexshard.calibration.dense_tables import DenseShape, dense_table
from flexshard.costmodels import (
    Cost,
    LocalRates,
    PooledCosts,
    PooledOption,
    StepWork,
    fit_rates,
    step_phases,
    step_seconds,
)
from flexshard.executors import Observer
from flexshard.planner.baselines.torchrec_choices import TorchRecChoice, price_choices, torchrec_choices
from flexshard.planner.whole_model.longest_first import table_wise_ranks

FUSED = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05}
SHARDERS = (EmbeddingBagCollectionSharder(dict(FUSED)), EmbeddingCollectionSharder(dict(FUSED)))


@dataclass(frozen=True)
class Planned:
    """A plan: what it costs, how TorchRec takes it, and what runs it."""

    cost: Cost
    plan: ShardingPlan
    sharders: Sequence[Any]
    words: str


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cluster", type=Path)
    parser.add_argument("--model", choices=list(MODELS), required=True)
    parser.add_argument("--memory", type=float, required=True, help="bytes of a rank")
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cluster = replace(Cluster.load(args.cluster), hbm_bytes=args.memory)
    results = train(MODELS[args.model](), cluster, args.rounds)
    if dist.get_rank() == 0:
        write_text(args.result, json.dumps(results))
    dist.barrier()
    os._exit(0)  # without the wait of groups for each other's sockets


class Network(nn.Module):
    """Looks everything up, and a small network on top: what is measured is the embeddings."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        meta = torch.device("meta")
        pooled = [name for name in model.rows if name not in model.sequences]
        self.pooled = EmbeddingBagCollection(
            device=meta,
            tables=[
                EmbeddingBagConfig(
                    name=name, num_embeddings=model.rows[name], embedding_dim=model.dims[name], feature_names=[name]
                )
                for name in pooled
            ],
        )
        if model.sequences:
            self.sequences = EmbeddingCollection(
                device=meta,
                tables=[
                    EmbeddingConfig(
                        name=name, num_embeddings=model.rows[name], embedding_dim=model.dims[name], feature_names=[name]
                    )
                    for name in model.sequences
                ],
            )
        self.top = nn.Linear(sum(model.dims[name] for name in pooled), 1)

    def forward(self, features: dict[bool, KeyedJaggedTensor]) -> Tensor:
        """A loss."""
        loss = self.top(self.pooled(features[True]).values()).square().mean()
        if False in features:
            for found in self.sequences(features[False]).values():
                loss = loss + found.values().square().mean()
        return loss


def measured_rates() -> LocalRates:
    """How fast rows are looked up, summed and updated while all ranks of the machine do so: the slowest rank's rates,
    of a lookup with pooling.
    """
    work, forward, backward = [], [], []
    for dim in (16, 64, 128):
        table = dense_table(DenseShape(20_000, dim, 1.0), pooled=True, device="cpu")
        for bags, length in ((1_000, 2), (1_000, 20), (4_000, 10)):
            random = np.random.default_rng(dist.get_rank())
            ids, took = torch.from_numpy(random.zipf(1.2, bags * length) % 20_000), []
            offsets = torch.arange(0, bags * length + 1, length)
            for _ in range(5):
                dist.barrier()
                start = time.perf_counter()
                found = table(ids, offsets)
                middle = time.perf_counter()
                found.backward(torch.ones_like(found))
                took.append((middle - start, time.perf_counter() - middle))
            work.append([1.0, bags * length, bags * length * dim * 4])
            forward.append(statistics.median(one for one, _ in took[1:]))
            backward.append(statistics.median(one for _, one in took[1:]))
    times = torch.tensor([forward, backward], dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    (a, b, c), (d, e, f) = (fit_rates(work, one) for one in times.tolist())
    return LocalRates((a, b, c), (d, e, f), 0.0, "measured, all ranks at once")


def plans_of(model: Model, cluster: Cluster, rates: LocalRates) -> dict[str, Planned]:
    """TorchRec's, ours, and what people write by hand."""
    problem = Problem(
        model.tables(),
        cluster,
        batch_size=model.batch_size,
        budget=f"{cluster.hbm_bytes!r} B",
        index_dedup=False,
        step=StepWork(0.0, rates),
        timeout_seconds=20.0,
    )
    network = Network(model)
    plan, choices = on_first_rank(lambda: decided(problem))
    found = {
        name: Planned(
            evenly(problem, price_choices(problem, one), one),
            sharding_plan(network, problem, one),
            SHARDERS,
            said(one),
        )
        for name, one in choices.items()
    }
    ours = [FlexShardEmbeddingCollectionSharder(dict(FUSED)), SHARDERS[0]]
    planner = FlexShardPlanner(plan, profiles={table.name: table.profile for table in problem.sequence_tables})
    kinds = [table.sharding_type for table in plan.pooled.values()]
    words = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    words += "".join(
        f", {name} " + " ".join(f"{tier.group_size}:{tier.rows}" for tier in table.tiers)
        for name, table in plan.tables.items()
    )
    chosen = {
        name: TorchRecChoice(
            one.sharding_type, (), one.compute_kernel, tuple(s.rank for s in one.shards), one.shards[0].columns
        )
        for name, one in plan.pooled.items()
    }
    in_tiers = TorchRecChoice("row_wise")  # of which every rank has as much local work as it asks for
    cost = evenly(problem, plan.predicted, [chosen.get(table.name, in_tiers) for table in problem.tables])
    return found | {"ours": Planned(cost, planner.collective_plan(network, ours), ours, words)}


def decided(problem: Problem) -> tuple[Plan, dict[str, list[TorchRecChoice]]]:
    """Our plan, and others' choices."""
    choices = {
        "TorchRec's planner": torchrec_choices(problem),
        "table-wise": whole_tables(problem),
        "row-wise": [_everywhere(problem) if t.is_pooled else TorchRecChoice("row_wise") for t in problem.tables],
    }
    # Local work is the same whichever rank has it, since ranks share processors; see ``evenly``.
    return solve(replace(problem, step=StepWork(0.0))), choices


def on_first_rank(work: Callable[[], Any]) -> Any:
    """What the first rank finds, on all; they share a machine's processors."""
    found = [work() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return found[0]


def evenly(problem: Problem, cost: Cost, choices: Sequence[TorchRecChoice]) -> Cost:
    """The cost where ranks share the processors of one machine, as these do: local work takes what it takes a rank on
    average, whichever rank has it.
    """
    assert problem.rates is not None
    costs, total = PooledCosts(problem.cluster, problem.batch_size, problem.hidden, problem.rates), np.zeros(2)
    for table, choice in zip(problem.tables, choices, strict=True):
        if table.is_pooled:
            total += option_of(costs, table, choice).local_seconds.sum(axis=1) / problem.cluster.world_size
        else:
            reads = float(table.reads(problem.batch_size) @ table.profile.rows)
            total += [reads * (own[1] + own[2] * table.row_bytes) for own in problem.rates.of(table)]
    return replace(cost, look_up_seconds=float(total[0]), update_seconds=float(total[1]))


def option_of(costs: PooledCosts, table: Table, choice: TorchRecChoice) -> PooledOption:
    """A choice as our costs know it."""
    least = choice.columns or None
    (option,) = costs.options(
        table, sharding_types=[choice.sharding_type], compute_kernels=["fused"], min_partition=least
    )
    return option


def _everywhere(problem: Problem) -> TorchRecChoice:
    return TorchRecChoice("row_wise", ranks=tuple(range(problem.cluster.world_size)))


def whole_tables(problem: Problem) -> list[TorchRecChoice]:
    """Every table on one rank, the one that takes longest first to the rank that is least busy."""
    costs = PooledCosts(problem.cluster, problem.batch_size, problem.hidden, problem.rates)
    options = [costs.options(replace(t, pooling="sum"), sharding_types=["table_wise"])[0] for t in problem.tables]
    ranks = table_wise_ranks(costs, options, problem.cluster.world_size)
    return [
        TorchRecChoice("table_wise", ranks=(rank,), columns=table.dim)
        if table.is_pooled
        else TorchRecChoice("table_wise", ((rank, 1.0),))
        for table, rank in zip(problem.tables, ranks, strict=True)
    ]


def said(choices: Sequence[TorchRecChoice]) -> str:
    kinds = [choice.sharding_type for choice in choices]
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))


def sharding_plan(network: Network, problem: Problem, choices: Sequence[TorchRecChoice]) -> ShardingPlan:
    """Choices as TorchRec's sharders take them."""
    local, world = problem.cluster.ranks_per_node, problem.cluster.world_size
    modules: dict[str, EmbeddingModuleShardingPlan] = {}
    pooled = EmbeddingModuleShardingPlan()
    costs = PooledCosts(problem.cluster, problem.batch_size)
    others: dict[str, Any] = {}
    for table, choice in zip(problem.tables, choices, strict=True):
        if not table.is_pooled:
            others[table.name] = _of_sequence(choice, table.dim)
        elif choice.sharding_type == "data_parallel":
            pooled[table.name] = ParameterSharding("data_parallel", "dense", list(range(world)))
        else:
            option = option_of(costs, table, choice)
            shards = [
                ShardMetadata(list(offset), list(size), placement("cpu", rank, local))
                for offset, size, rank in zip(option.offsets, option.sizes, choice.ranks, strict=True)
            ]
            spec = EnumerableShardingSpec(shards)
            pooled[table.name] = ParameterSharding(choice.sharding_type, "fused", list(choice.ranks), spec)
    modules["pooled"] = pooled
    if others:
        modules["sequences"] = construct_module_sharding_plan(
            network.sequences, others, SHARDERS[1], local_size=local, world_size=world, device_type="cpu"
        )
    return ShardingPlan(modules)


def _of_sequence(choice: TorchRecChoice, dim: int) -> Any:
    ranks = [rank for rank, _ in choice.shards]
    if choice.sharding_type == "table_wise":
        return table_wise(rank=ranks[0], compute_kernel="fused")
    if choice.sharding_type == "column_wise":
        return column_wise(size_per_rank=[round(share * dim) for _, share in choice.shards], ranks=ranks)
    return row_wise(compute_kernel="fused") if choice.sharding_type == "row_wise" else data_parallel()


def train(model: Model, cluster: Cluster, rounds: int) -> dict[str, Any]:
    """Steps of every plan on the same batches."""
    rates = measured_rates()
    batches = model.batches(dist.get_rank(), 2)
    results: dict[str, Any] = {}
    networks = {}
    plans = plans_of(model, cluster, rates)
    for name, planned in plans.items():
        networks[name] = DistributedModelParallel(
            Network(model), plan=planned.plan, sharders=list(planned.sharders), device=torch.device("cpu")
        )
    seconds: dict[str, list[float]] = {name: [] for name in networks}
    alone: dict[str, list[float]] = {name: [] for name in networks}
    observers = {name: Observer(blocking=True) for name in networks}
    for number in range(rounds + 2):
        for name, network in networks.items():
            one = step(network, batches[number % 2])
            with observers[name] as observer:
                other = step(network, batches[number % 2])
                observer.step()
            if number > 1:  # the first rounds warm up
                seconds[name].append(one)
                alone[name].append(other)
    world = dist.get_world_size()
    for name, planned in plans.items():
        observed = observers[name].result(skip=2)
        results[name] = {
            "step_seconds": statistics.median(seconds[name]),
            "blocking_step_seconds": statistics.median(alone[name]),
            "predicted_step_seconds": step_seconds(planned.cost, world, StepWork(0.0)),
            "phases": {phase.name: phase.seconds for phase in step_phases(planned.cost, world, StepWork(0.0))},
            "observed": asdict(observed)["collectives"],
            "predicted": [asdict(c) | {"seconds": c.seconds} for c in planned.cost.collectives],
            "words": planned.words,
            "memory_bytes": planned.cost.memory_bytes,
        }
    return results


def step(network: nn.Module, batch: Mapping[bool, KeyedJaggedTensor]) -> float:
    """Seconds of forward and backward, until the slowest rank is done."""
    dist.barrier()
    start = time.perf_counter()
    network(batch).backward()
    dist.barrier()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
