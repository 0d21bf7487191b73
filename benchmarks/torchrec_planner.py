"""100 tables on 128 ranks: TorchRec's default planner beside ours, in the same run, on the same tables.

make bench-torchrec
"""

from __future__ import annotations

import logging
import sys
import time
import warnings

import numpy as np

from benchmarks.solver import large_model
from benchmarks.timing import machine, median_seconds
from flexshard import Cluster, solve
from flexshard._internal import as_text, new_grid
from flexshard.planner import Problem, whole_table_cost
from flexshard.planner.baselines.torchrec_choices import price_choices, torchrec_choices


def main(tables: int, nodes: int) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    cluster = Cluster.preset("dgx-h100", nodes=nodes)
    model = large_model(tables, tables * 10**6)
    batch = 512
    print(
        f"{len(model)} tables, {sum(t.rows for t in model):,} rows, {cluster.world_size} ranks; {machine()}", flush=True
    )
    plan = solve(model, cluster, batch_size=batch, index_dedup=False)
    ours = median_seconds(lambda: solve(model, cluster, batch_size=batch, index_dedup=False), 9)
    print(f"flexshard: median {ours:.4f} s (solver and baselines)", flush=True)
    start = time.perf_counter()
    choices = torchrec_choices(Problem(model, cluster, batch))
    theirs = time.perf_counter() - start
    print(f"TorchRec's EmbeddingShardingPlanner, defaults: {theirs:.1f} s, {theirs / ours:,.0f} times as long\n")
    kinds, numbers = np.unique([choice.sharding_type for choice in choices], return_counts=True)
    print("it chose " + ", ".join(f"{kind} {n}" for kind, n in zip(kinds, numbers, strict=True)))
    costs = {
        "flexshard": plan.predicted,
        **plan.baselines,
        "whole_table": whole_table_cost(model, cluster, batch_size=batch),
        "torchrec": price_choices(Problem(model, cluster, batch), choices),
    }
    grid = new_grid("Both plans under our cost model", [""], ["exposed ms", "memory GiB", "time / ours"])
    for name, cost in costs.items():
        seconds = cost.exposed_seconds
        ratio = seconds / plan.predicted.exposed_seconds
        grid.add_row(name, f"{1e3 * seconds:.2f}", f"{cost.memory_bytes / 2**30:.2f}", f"{ratio:.2f}")
    print(as_text(grid))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100, int(sys.argv[2]) if len(sys.argv) > 2 else 16)
