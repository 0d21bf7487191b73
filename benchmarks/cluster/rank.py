"""One rank: measures the cluster, or trains a workload under every plan in turn."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan

from benchmarks.cluster.workloads import WORKLOADS, Workload
from flexshard import Cluster, FlexShardEmbeddingCollectionSharder, FlexShardPlanner, Plan, Table, solve
from flexshard._internal import write_text
from flexshard.calibration import measure_cluster
from flexshard.costmodels import Cost
from flexshard.executors import Observation, Observer
from flexshard.planner import Tier

DIM = 32
INPUTS = ("ids", "other ids", "counts")
ROW_WISE, ROW_WISE_OURS = "row-wise (TorchRec)", "row-wise (dealt by rank)"
FUSED = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["measure", "train"])
    parser.add_argument("cluster", type=Path)
    parser.add_argument("--workload", choices=list(WORKLOADS))
    parser.add_argument("--sizes", type=int, nargs="*", help="bytes of the messages that are timed")
    parser.add_argument("--result", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if args.what == "measure":
        width = int(os.environ["LOCAL_WORLD_SIZE"])
        found = measure_cluster(
            name="namespaces", memory_bytes=1e9, reserve_bytes=0.0, ranks_per_node=width, sizes=args.sizes, repeats=5
        )
        if dist.get_rank() == 0:
            found.save(args.cluster)
    else:
        results = train(WORKLOADS[args.workload](), Cluster.load(args.cluster), args.rounds)
        if dist.get_rank() == 0:
            write_text(args.result, json.dumps(results))
    dist.barrier()
    os._exit(0)  # without the wait of groups for each other's sockets


def plans_of(workload: Workload, cluster: Cluster) -> dict[str, Plan]:
    """The paper's, ours, and ours with gathered rows where the model says that they pay, and everywhere."""
    tables = [Table("t", workload.rows, DIM, workload.profile)]
    how: dict[str, Any] = {"batch_size": workload.batch_size, "index_dedup": False}
    optimal = solve(tables, cluster, **how)
    whole = Tier("row_wise", cluster.world_size, workload.rows, 0, 1.0, None, 0.0, 0.0, 0.0)
    row_wise_plan = replace(optimal, tables={"t": replace(optimal.tables["t"], tiers=(whole,))})
    return {
        ROW_WISE_OURS: replace(row_wise_plan, predicted=optimal.baselines["row_wise"]),
        "paper, 2 tiers": solve(tables, cluster, tiers=2, method="paper", **how),
        "paper, 3 tiers": solve(tables, cluster, tiers=3, method="paper", **how),
        "optimal": optimal,
        "optimal, all sparse": solve(tables, cluster, reduction="sparse", **how),
    }


def train(workload: Workload, cluster: Cluster, rounds: int) -> dict[str, Any]:
    """Every plan's steps and communication; then once more, planned for what was seen to overlap."""
    plans = plans_of(workload, cluster)
    models = {ROW_WISE: row_wise_model(workload)}
    models |= {name: planned_model(workload, plan) for name, plan in plans.items()}
    costs = {ROW_WISE: plans["optimal"].baselines["row_wise"]} | {name: plan.predicted for name, plan in plans.items()}
    results = run(models, costs, plans, workload, rounds)
    # A plan's rows are dealt in turn by rank, so that all serve as much; TorchRec's are blocks of ids, which do not.
    busiest = workload.busiest_node(cluster.nodes, cluster.ranks_per_node)
    for key in ("predicted_comm_seconds", "predicted_bottleneck_seconds"):
        results[ROW_WISE][key] *= busiest
    hidden = {name: share for name, share in overlap_of(results["paper, 3 tiers"]).items() if share > 0}
    table = Table("t", workload.rows, DIM, workload.profile)
    again = {
        f"optimal ({reduction}), overlap": solve(
            [table],
            cluster,
            batch_size=workload.batch_size,
            overlap=hidden,
            reduction=reduction,
            index_dedup=False,
        )
        for reduction in ("dense", "auto")
    }
    models = {name: planned_model(workload, plan) for name, plan in again.items()}
    return results | run(models, {name: plan.predicted for name, plan in again.items()}, again, workload, rounds)


def run(
    models: dict[str, Any], costs: dict[str, Cost], plans: dict[str, Plan], workload: Workload, rounds: int
) -> dict[str, Any]:
    """Steps of every model in turn on the same batches: as they are, and with every collective by itself."""
    seconds: dict[str, list[float]] = {name: [] for name in models}
    blocking: dict[str, list[float]] = {name: [] for name in models}
    free_observers = {name: Observer() for name in models}
    observers = {name: Observer(blocking=True) for name in models}
    for number in range(rounds + 1):
        batch = features(workload, number)
        for name, model in models.items():
            with free_observers[name] as observer:
                free = step(model, batch)
                observer.step()
            with observers[name] as observer:
                alone = step(model, batch)
                observer.step()
            if number:  # the first round warms up
                seconds[name].append(free)
                blocking[name].append(alone)
    free_observed = {name: observer.result(skip=1) for name, observer in free_observers.items()}
    observed = {name: observer.result(skip=1) for name, observer in observers.items()}
    return {
        name: {
            "step_seconds": statistics.median(seconds[name]),
            "blocking_step_seconds": statistics.median(blocking[name]),
            "predicted_comm_seconds": costs[name].comm_seconds,
            "predicted_bottleneck_seconds": costs[name].bottleneck_seconds(dist.get_world_size()),
            "observed_comm_seconds": planned_seconds(observed[name]),
            "observed_exposed_seconds": exposed_seconds(free_observed[name]),
            "observed_input_seconds": input_seconds(observed[name]),
            "predicted": [asdict(c) | {"seconds": c.seconds} for c in costs[name].collectives],
            "observed": asdict(observed[name])["collectives"],
            "free": asdict(free_observed[name])["collectives"],
            "rows": {} if name not in plans else {t.group_size: t.rows for t in plans[name].tables["t"].tiers},
        }
        for name in models
    }


def overlap_of(result: dict[str, Any]) -> dict[str, float]:
    """Share of each collective's own time for which nobody stood waiting, as a job's ``overlap`` names it."""
    alone: dict[str, float] = {}
    waited: dict[str, float] = {}
    for c in result["observed"]:
        name = f"{c['kind']}@{c['group_size']}"
        alone[name] = alone.get(name, 0.0) + c["seconds"]
    for c in result["free"]:
        name = f"{c['kind']}@{c['group_size']}"
        waited[name] = waited.get(name, 0.0) + c["exposed_seconds"]
    return {name: round(min(max(1 - waited[name] / alone[name], 0.0), 1.0), 2) for name in alone}


def exposed_seconds(found: Observation) -> float:
    """In which ranks stood waiting."""
    return sum(c.exposed_seconds for c in found.collectives)


def planned_seconds(found: Observation) -> float:
    """Of all collectives, which a plan's time counts."""
    return found.comm_seconds


def input_seconds(found: Observation) -> float:
    """Of the distribution of the ids."""
    return sum(c.seconds for c in found.collectives if c.content in INPUTS)


def features(workload: Workload, number: int) -> KeyedJaggedTensor:
    ids, lengths = workload.batch(dist.get_rank(), number)
    return KeyedJaggedTensor(["f"], torch.from_numpy(ids), lengths=torch.from_numpy(lengths))


def step(model: Any, batch: KeyedJaggedTensor) -> float:
    """Seconds of forward and backward, until the slowest rank is done."""
    dist.barrier()
    start = time.perf_counter()
    values = model(batch)["f"].values()
    values.backward(torch.full_like(values, 1e-3))
    dist.barrier()
    return time.perf_counter() - start


def collection(workload: Workload) -> EmbeddingCollection:
    config = EmbeddingConfig(name="t", num_embeddings=workload.rows, embedding_dim=DIM, feature_names=["f"])
    return EmbeddingCollection(tables=[config], device=torch.device("meta"))


def row_wise_model(workload: Workload) -> Any:
    model, sharder, world = collection(workload), EmbeddingCollectionSharder(dict(FUSED)), dist.get_world_size()
    plan = construct_module_sharding_plan(
        model,
        {"t": row_wise(compute_kernel="fused")},
        sharder,
        local_size=int(os.environ["LOCAL_WORLD_SIZE"]),
        world_size=world,
        device_type="cpu",
    )
    return parallel(model, ShardingPlan({"": plan}), [sharder])


def planned_model(workload: Workload, plan: Plan) -> Any:
    model, sharders = collection(workload), [FlexShardEmbeddingCollectionSharder(dict(FUSED))]
    planner = FlexShardPlanner(plan, profiles={"t": workload.profile})
    return parallel(model, planner.collective_plan(model, sharders), sharders)


def parallel(model: Any, plan: ShardingPlan, sharders: Sequence[Any]) -> Any:
    return DistributedModelParallel(model, plan=plan, sharders=list(sharders), device=torch.device("cpu"))


if __name__ == "__main__":
    main()
