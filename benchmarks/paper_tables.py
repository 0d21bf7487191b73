"""Tables 5 and 6 of the FlexShard paper, published beside reproduced.

python -m benchmarks.paper_tables
"""

from __future__ import annotations

import numpy as np

from benchmarks.published import MODELS, PUBLISHED, published_table
from flexshard import Cluster, Plan, solve
from flexshard._grids import as_text, new_grid

SHARDINGS = {"two_tier": 2, "three_tier": 3}


def plan_of(model: str, tiers: int, method: str = "paper", overlap: str | None = None) -> Plan:
    tables, cluster = [published_table(model)], Cluster.preset("a100-4x8-roce")
    return solve(tables, cluster, batch_size=PUBLISHED["batch_size"], tiers=tiers, method=method, overlap=overlap)


def rows_table() -> str:
    grid = new_grid("Table 5: rows per tier", ["model", "sharding"], ["tier", "published", "ours", "error"])
    for model, spec in MODELS.items():
        for sharding, tiers in SHARDINGS.items():
            plan = plan_of(model, tiers)
            ours = {tier.strategy: tier.rows for tier in plan.tables[model].tiers}
            for tier, (rows, _) in spec[sharding].items():
                error = ours[tier] / rows - 1
                grid.add_row(model, sharding, tier, f"{rows:,}", f"{ours[tier]:,}", f"{error:+.2%}")
            more = plan.predicted.memory_bytes - plan.baselines["row_wise"].memory_bytes
            grid.add_row(model, sharding, "memory beyond row-wise", "0 B", f"{more:+,.0f} B", "")
    return as_text(grid)


def times_table() -> str:
    """Times of the published sizes under the preset's alpha and beta, fitted to these very times."""
    levels = Cluster.preset("a100-4x8-roce").levels
    node, world, replica = levels[1], levels[2], levels[0]
    assert None not in (node.all_to_all, node.all_reduce, world.all_to_all, replica.all_reduce)
    row_bytes = 4 * PUBLISHED["dim"]
    grid = new_grid("Table 6: times", ["model", "collective"], ["published ms", "ours ms", "error"])
    worst: dict[str, float] = {}

    def add(model: str, name: str, published: float, seconds: float) -> None:
        error = 1e3 * seconds / published - 1
        kind = name.split(",")[0]
        worst[kind] = max(worst.get(kind, 0.0), abs(error))
        grid.add_row(model, name, f"{published}", f"{1e3 * seconds:.1f}", f"{error:+.1%}")

    for model, spec in MODELS.items():
        for sharding, (elements, ms) in spec["all_to_all"].items():
            add(model, f"global all-to-all, {sharding}", ms, 2 * world.all_to_all.seconds(4 * elements))
        flex_rows, covered = spec["three_tier"]["flex"]
        sent = 4 * spec["all_to_all"]["row_wise"][0] * covered
        add(model, "intra-node all-to-all", spec["intra_all_to_all_ms"], 2 * node.all_to_all.seconds(sent))
        reduced = flex_rows * row_bytes / node.group_size
        add(model, "cross-node all-reduce", spec["cross_all_reduce_ms"], node.all_reduce.seconds(reduced))
        for sharding in SHARDINGS:
            nbytes = spec[sharding]["data_parallel"][0] * row_bytes
            published = spec["global_all_reduce_ms"][sharding]
            add(model, f"global all-reduce, {sharding}", published, replica.all_reduce.seconds(nbytes))
    lines = [f"largest error of {kind}: {error:.1%}" for kind, error in worst.items()]
    return as_text(grid) + "\n" + "\n".join(lines)


def fits_table() -> str:
    """The least-squares lines that the preset's figures come from, recomputed."""
    row_bytes = 4 * PUBLISHED["dim"]
    global_points = [
        (spec[s]["data_parallel"][0] * row_bytes, spec["global_all_reduce_ms"][s])
        for spec in MODELS.values()
        for s in SHARDINGS
    ]
    cross_points = [
        (spec["three_tier"]["flex"][0] * row_bytes / 8, spec["cross_all_reduce_ms"]) for spec in MODELS.values()
    ]
    lines = []
    for name, points in (("global all-reduce", global_points), ("cross-node all-reduce", cross_points)):
        x, y = np.array(points, dtype=np.float64).T
        slope, intercept = np.polyfit(x, y / 1e3, 1)
        lines.append(f"fit of {name}: alpha {1e3 * intercept:.2f} ms, beta {1 / slope / 1e9:.4g} GB/s")
    return "\n".join(lines)


def optimal_table(overlap: str | None = None) -> str:
    grid = new_grid(
        f"The paper's plans beside the optimal ones: exposed time, same memory, {overlap or 'no'} overlap",
        ["model"],
        ["row-wise", "paper 2-tier", "paper 3-tier", "optimal", "bound", "less than 2-tier", "less than 3-tier"],
    )
    for model in MODELS:
        plan = plan_of(model, 3, "optimal", overlap)
        b, ours = plan.baselines, plan.predicted.exposed_seconds
        two, three = b["paper_2_tier"].exposed_seconds, b["paper_3_tier"].exposed_seconds
        times = [b["row_wise"].exposed_seconds, two, three, ours, plan.lower_bound_seconds]
        grid.add_row(model, *(f"{1e3 * t:.2f} ms" for t in times), f"{1 - ours / two:.1%}", f"{1 - ours / three:.1%}")
    return as_text(grid)


if __name__ == "__main__":
    for part in (rows_table(), times_table(), fits_table(), optimal_table(), optimal_table("paper")):
        print(part, end="\n\n")
