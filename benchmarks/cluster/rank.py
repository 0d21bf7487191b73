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

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan

from benchmarks.cluster.workloads import WORKLOADS, Workload
from flexshard import Cluster, FlexShardEmbeddingCollectionSharder, FlexShardPlanner, Plan, Problem, Table, solve
from flexshard._internal import write_text
from flexshard.calibration import measure_cluster
from flexshard.calibration.dense_tables import DenseShape, dense_table
from flexshard.costmodels import Cost, LocalRates, StepWork, fit_rates, step_seconds
from flexshard.executors import Observation, Observer
from flexshard.planner import Tier
from flexshard.planner.reductions import cost_with_reductions
from flexshard.planner.solver.deduplication import Variants

DIM = 32
ROW_WISE, ROW_WISE_OURS, ROW_WISE_ONCE = "row-wise (TorchRec)", "row-wise (dealt by id)", "row-wise, ids once"
FITTED = "paper, 2 tiers"
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
            name="namespaces", memory_bytes=1e9, reserve_bytes=0.0, ranks_per_node=width, sizes=args.sizes, repeats=3
        )
        # Ranks of a node share its link.
        if dist.get_rank() == 0:
            replace(found, ranks_per_link=width).save(args.cluster)
    else:
        results = train(WORKLOADS[args.workload](), Cluster.load(args.cluster), args.rounds)
        if dist.get_rank() == 0:
            write_text(args.result, json.dumps(results))
    dist.barrier()
    os._exit(0)  # without the wait of groups for each other's sockets


def measured_rates(rows: int) -> LocalRates:
    """How fast rows are looked up and updated while all ranks of the machine do so: the slowest rank's rates."""
    table = dense_table(DenseShape(rows, DIM, 1.0), pooled=False, device="cpu")
    work, forward, backward = [], [], []
    for number in (4_000, 20_000, 60_000):
        ids = torch.from_numpy(np.random.default_rng(dist.get_rank()).integers(0, rows, number))
        offsets, times = torch.arange(number + 1), []
        for _ in range(6):
            dist.barrier()
            start = time.perf_counter()
            found = table(ids, offsets)
            middle = time.perf_counter()
            found.backward(torch.ones_like(found))
            times.append((middle - start, time.perf_counter() - middle))
        work.append([1.0, number])
        forward.append(statistics.median(one for one, _ in times[1:]))
        backward.append(statistics.median(one for _, one in times[1:]))
    fitted = torch.tensor([*fit_rates(work, forward), *fit_rates(work, backward)], dtype=torch.float64)
    dist.all_reduce(fitted, op=dist.ReduceOp.MAX)
    a, b, c, d = fitted.tolist()
    return LocalRates((a, b, 0.0), (c, d, 0.0), 0.0, "measured, all ranks at once")


def measured_per_id(workload: Workload) -> float:
    """Seconds per id to find a batch's distinct ones, while all ranks of the machine do so."""
    ids, times = torch.from_numpy(workload.batch(dist.get_rank(), 0)[0]), []
    for _ in range(5):
        dist.barrier()
        start = time.perf_counter()
        torch.unique(ids, return_inverse=True)
        times.append((time.perf_counter() - start) / len(ids))
    found = torch.tensor(statistics.median(times), dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def with_rates(workload: Workload, cluster: Cluster, plan: Plan, rates: LocalRates) -> Cost:
    """What a plan is predicted to cost, with its lookups and updates."""
    table = plan.tables["t"]
    problem = Problem(
        [Table("t", workload.rows, DIM, workload.profile)],
        cluster,
        workload.batch_size,
        step=StepWork(0.0, rates),
        index_dedup_seconds_per_id=plan.settings.index_dedup_seconds_per_id,
    )
    instance = Variants(problem).of(np.array([table.index_dedup]))
    sizes = instance.group_sizes.tolist()
    allocation, sparse = np.zeros((1, len(sizes)), np.int64), np.zeros((1, len(sizes)), bool)
    for tier in table.tiers:
        level = sizes.index(tier.group_size)
        allocation[0, level], sparse[0, level] = tier.rows, tier.reduction == "sparse"
    return cost_with_reductions(instance, allocation, sparse)


def plans_of(workload: Workload, cluster: Cluster, rates: LocalRates) -> dict[str, Plan]:
    """The paper's, ours, and ours with gathered rows where the model says that they pay, and everywhere."""
    tables = [Table("t", workload.rows, DIM, workload.profile)]
    how: dict[str, Any] = {"batch_size": workload.batch_size, "index_dedup": False}
    once = how | {"index_dedup": True, "index_dedup_seconds_per_id": measured_per_id(workload)}
    optimal, deduplicated = solve(tables, cluster, **how), solve(tables, cluster, **once)
    whole = Tier("row_wise", cluster.world_size, workload.rows, 0, 1.0, None, 0.0, 0.0, 0.0)
    row_wise_plan = replace(optimal, tables={"t": replace(optimal.tables["t"], tiers=(whole,))})
    return {
        ROW_WISE_OURS: replace(row_wise_plan, predicted=optimal.baselines["row_wise"]),
        "paper, 2 tiers": solve(tables, cluster, tiers=2, method="paper", **how),
        "paper, 3 tiers": solve(tables, cluster, tiers=3, method="paper", **how),
        "optimal": optimal,
        "optimal, shortest step": solve(tables, cluster, **how, step=StepWork(0.0, rates)),
        ROW_WISE_ONCE: replace(
            deduplicated,
            tables={"t": replace(deduplicated.tables["t"], tiers=(whole,))},
            predicted=deduplicated.baselines["row_wise_dedup"],
        ),
        "optimal, ids once": deduplicated,
        "optimal, all sparse": solve(tables, cluster, reduction="sparse", **how),
    }


def train(workload: Workload, cluster: Cluster, rounds: int) -> dict[str, Any]:
    """Every plan's steps and communication; then once more, planned for what was seen to overlap."""
    rates = measured_rates(workload.rows // dist.get_world_size())
    plans = plans_of(workload, cluster, rates)
    models = {ROW_WISE: row_wise_model(workload)}
    models |= {name: planned_model(workload, plan) for name, plan in plans.items()}
    costs = {name: with_rates(workload, cluster, plan, rates) for name, plan in plans.items()}
    # A plan's rows are dealt in turn by rank, so that all serve as much; TorchRec's are blocks of ids, which do not.
    busiest = workload.busiest_node(cluster.nodes, cluster.ranks_per_node)
    even = with_rates(workload, cluster.under_torchrec, plans[ROW_WISE_OURS], rates)
    scaled = tuple(
        replace(one, excess_bytes=0.0).scaled(1.0 if one.content == "counts" else busiest) for one in even.collectives
    )
    costs = {ROW_WISE: replace(even, collectives=scaled)} | costs
    results = run(models, costs, plans, workload, rounds)
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
    costs = {name: with_rates(workload, cluster, plan, rates) for name, plan in again.items()}
    results |= run(models, costs, again, workload, rounds)
    # What else a step does is fitted to one plan, and all others predicted.
    fitted = results[FITTED]["step_seconds"] - results[FITTED]["predicted_step_seconds"]
    for name, found in results.items():
        found["fitted"] = name == FITTED
        found["predicted_step_seconds"] += fitted
    return results


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
            "predicted_step_seconds": step_seconds(costs[name], dist.get_world_size(), StepWork(0.0)),
            "observed_comm_seconds": planned_seconds(observed[name]),
            "predicted": [asdict(c) | {"seconds": c.seconds} for c in costs[name].collectives],
            "observed": asdict(observed[name])["collectives"],
            "free": asdict(free_observed[name])["collectives"],
            "distinct": 1.0 if name not in plans else _distinct(plans[name]),
            "rows": {} if name not in plans else {t.group_size: t.rows for t in plans[name].tables["t"].tiers},
        }
        for name in models
    }


def _distinct(plan: Plan) -> float:
    """Share of a batch's ids that travel, or are read."""
    table = plan.tables["t"]
    return sum(tier.reads for tier in table.tiers) / (plan.settings.batch_size * table.avg_length)


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


def planned_seconds(found: Observation) -> float:
    """Of all collectives, which a plan's time counts."""
    return found.comm_seconds


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
