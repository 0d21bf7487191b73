"""Whole models under our own costs: the plan, its proven gap, and what other plans cost under the same model.

Pooled tables and sequences are drawn as in benchmarks/whole_model.py, ids by power laws and numbered by popularity, as
``flexshard encode`` does; TorchRec's planner is asked for its plan of the same tables, which our model prices. "Rows
alike" is the plan that we make where profiles do not say which rows are read how often. All of it is predicted: nothing
is run.

    python -m benchmarks.whole_model_costs [--seeds 3] [--large] [--seconds 60]
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings
from dataclasses import replace

import numpy as np

from benchmarks.timing import machine
from flexshard import AccessProfile, Cluster, Problem, Table, solve
from flexshard._internal import as_text, new_grid
from flexshard.costmodels import PooledCosts, StepWork, pooled_cost
from flexshard.errors import SolverError
from flexshard.planner import price_choices, torchrec_choices

BATCH, DENSE = 1_024, StepWork(5e-3)
# Pooled tables, sequences, cluster, budget.
MODELS = (
    (26, 0, "dgx-h100:1", "neutral"),
    (26, 1, "dgx-h100:2", "neutral"),
    (26, 4, "dgx-h100:4", "+1GiB"),
    (26, 2, "a100-4x8-roce", "neutral"),
    (64, 4, "dgx-h100:2", "neutral"),
)
LARGE = (
    (200, 10, "dgx-h100:4", "neutral"),
    (500, 20, "dgx-h100:8", "neutral"),
    (500, 20, "dgx-h100:125", "60GiB"),
    (1_000, 0, "dgx-h100:8", "neutral"),
    (3_000, 0, "dgx-h100:125", "60GiB"),
)


def drawn(pooled: int, sequences: int, seed: int) -> list[Table]:
    """Tables of 10^3 to 10^7 rows, with 1 to 100 ids a sample."""
    rng = np.random.default_rng(seed)
    tables = []
    for index in range(pooled + sequences):
        rows = int(np.exp(rng.uniform(np.log(1e3), np.log(1e7))))
        length, exponent = float(np.exp(rng.uniform(0, np.log(100)))), rng.uniform(0.9, 1.2)
        popular = np.arange(1, min(rows, 200_000) + 1) ** -exponent
        counts = np.maximum(np.round(popular / popular.sum() * length * 20_000), 1).astype(np.int64)
        profile = AccessProfile.from_counts(counts, 20_000, num_rows=rows)
        is_pooled = index < pooled
        dim = int(rng.choice([16, 32, 64, 128, 256])) if is_pooled else 64
        tables.append(Table(f"t{index}", rows, dim, profile, pooling="sum" if is_pooled else "none"))
    return tables


def planned_with_rows_alike(problem: Problem) -> float:
    """Seconds of a step under the plan of the same tables whose profiles are histograms."""
    tables = []
    for table in problem.tables:
        known = table.profile
        alike = AccessProfile.from_histogram(known.counts, known.rows, known.num_samples, known.num_rows)
        tables.append(replace(table, profile=alike))
    plan = solve(replace(problem, tables=tuple(tables)))
    assert plan.pooled_predicted is not None
    costs = PooledCosts(problem.cluster, problem.batch_size, problem.hidden, problem.rates)
    placed = []
    for table in problem.pooled_tables:
        own = plan.pooled[table.name]
        options = costs.options(table, sharding_types=[own.sharding_type])
        option = next(one for one in options if one.shards == len(own.shards))
        placed.append((option, [shard.rank for shard in own.shards]))
    pooled = pooled_cost(costs, placed)
    return plan.objective_seconds(plan.predicted) + sum(
        sign * plan.objective_seconds(cost) for sign, cost in ((1, pooled), (-1, plan.pooled_predicted))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--large", action="store_true", help="up to thousands of tables, one seed each")
    parser.add_argument("--seconds", type=float, default=60.0, help="timeout_seconds of each plan")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    print(
        f"Our costs, steps with {1e3 * DENSE.dense_seconds:g} ms of dense work, batch {BATCH}; {machine()}\n",
        flush=True,
    )
    others = ("row_wise", "table_wise", "paper_3_tier", "TorchRec", "rows alike")
    numbers = ("seed", "seconds", "step", "gap", *others)
    grid = new_grid("Other plans' communication and local work over ours (x: does not fit)", ["model"], numbers)
    ratios, alike = [], []
    runs = [(model, 0) for model in LARGE] if options.large else [(m, s) for m in MODELS for s in range(options.seeds)]
    for (pooled, sequences, name, budget), seed in runs:
        problem = Problem(drawn(pooled, sequences, seed), Cluster.resolve(name), BATCH, budget=budget, step=DENSE)
        problem = replace(problem, timeout_seconds=options.seconds)
        start = time.perf_counter()
        plan = solve(problem)
        seconds = time.perf_counter() - start
        costs = dict(plan.baselines)
        if not options.large:  # TorchRec's planner takes minutes there
            try:
                costs["TorchRec"] = price_choices(problem, torchrec_choices(problem))
            except SolverError as error:
                print(f"{pooled} + {sequences}, seed {seed}: {error}")
        step = plan.objective_seconds(plan.predicted)
        cells = []
        for other in others[:-1]:
            if other not in costs:
                cells.append("-")
                continue
            ratio = (plan.objective_seconds(costs[other]) - DENSE.dense_seconds) / (step - DENSE.dense_seconds)
            fits = costs[other].memory_bytes <= plan.settings.budget_bytes * (1 + 1e-9)
            cells.append(f"{ratio:.2f}{'' if fits else ' x'}")
            if other == "TorchRec":
                ratios.append(ratio)
        if not options.large:
            alike.append((planned_with_rows_alike(problem) - DENSE.dense_seconds) / (step - DENSE.dense_seconds))
        cells.append("-" if options.large else f"{alike[-1]:.2f}")
        gap = step / plan.lower_bound_seconds - 1
        model = f"{pooled} pooled, {sequences} not, {name}, {budget}"
        grid.add_row(model, str(seed), f"{seconds:.1f}", f"{1e3 * step:.3f} ms", f"{gap:.2%}", *cells)
    print(as_text(grid))
    if alike:
        shown = f"{min(alike):.2f} to {max(alike):.2f}, median {statistics.median(alike):.2f}"
        print(f"Plans of histograms, which know no ids, over ours: {shown}")
    if ratios:
        shown = f"{min(ratios):.2f} to {max(ratios):.2f}, median {statistics.median(ratios):.2f}"
        print(f"TorchRec's plans, which are made for its own costs and all of a rank's memory, over ours: {shown}")


if __name__ == "__main__":
    main()
