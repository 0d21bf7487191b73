"""The paper's end-to-end gains: dense time fitted to the 2-tier run, the 3-tier one predicted.

    python -m benchmarks.step_gain

The paper trains RM-1 1.61 times as fast with two tiers and 1.81 times with three as row-wise. What a step takes besides
its embeddings is fitted to the first figure; the second is predicted from phases with links at once, with the paper's
overlap (the all-to-all within nodes and the all-reduce across them hidden) and without. The preset's rates are fitted
to the paper's Table 6, lookups and updates are at the datasheet's memory bandwidth.
"""

from __future__ import annotations

from benchmarks.published import published_table
from flexshard import Cluster, solve
from flexshard._internal import as_text, new_grid
from flexshard.costmodels import StepWork

GAINS = {2: 1.61, 3: 1.81}


def main() -> None:
    table, cluster = published_table("RM-1"), Cluster.preset("a100-4x8-roce")
    grid = new_grid(
        "RM-1: throughput over row-wise", ["overlap"], ["dense, fitted", "3 tiers, paper", "predicted", "error"]
    )
    for name, overlap in (("of the paper", "paper"), ("none", None)):
        how = {"batch_size": 4096, "index_dedup": False, "overlap": overlap, "objective": "step"}
        plans = {tiers: solve([table], cluster, tiers=tiers, method="paper", **how) for tiers in (2, 3)}
        row_wise = plans[2].objective_seconds(plans[2].baselines["row_wise"])
        two, three = (plans[tiers].objective_seconds(plans[tiers].predicted) for tiers in (2, 3))
        # (row_wise + dense) / (two + dense) is the gain.
        dense = (row_wise - GAINS[2] * two) / (GAINS[2] - 1)
        predicted = (row_wise + dense) / (three + dense)
        best = solve([table], cluster, **(how | {"step": StepWork(dense)}))
        ours = (row_wise + dense) / best.objective_seconds(best.predicted)
        cells = [f"{1e3 * dense:.0f} ms", f"{GAINS[3]:.2f}", f"{predicted:.2f}", f"{predicted / GAINS[3] - 1:+.1%}"]
        grid.add_row(name, *cells)
        steps = [1e3 * one for one in (row_wise + dense, two + dense, three + dense)]
        shown = ", ".join(f"{one:.0f}" for one in steps)
        print(f"overlap {name}: steps of row-wise, 2 and 3 tiers {shown} ms; the shortest {ours:.2f} times row-wise's")
    print(as_text(grid))


if __name__ == "__main__":
    main()
