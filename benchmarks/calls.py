"""What plans price beside what a replay counts: calls of every collective, and its bytes for the same batches.

Random jobs: clusters of two to four levels, 1 to 60 tables in 1 to 50 groups (dimension, type and optimizer), some with
repeated ids sent once, some with gathered gradients. No GPU and no process group: a replay counts what executors send,
which the tests compare with live process groups to the byte.

    python -m benchmarks.calls [--jobs 200] [--seed 0]
"""

from __future__ import annotations

import argparse

import numpy as np

from flexshard import AccessProfile, Cluster, Plan, Table, solve
from flexshard._internal import as_text, new_grid
from flexshard.costmodels import Layout, classes_of, priced, rows_with_places, step_collectives
from flexshard.executors import Lookups, replay
from flexshard.executors.traffic.replaying import together
from flexshard.planner import TablePlan
from flexshard.topologies import CollectiveRate, Level

Key = tuple[str, int, str]
STEPS, LENGTH, SAMPLES, BATCH = 3, 6, 600, 64
DIMS, TYPES = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128), ("float32", "float16")
OPTIMIZERS = ("sgd", "rowwise_adagrad", "adagrad", "adam", "partial_rowwise_adam")


NOTE = """\
Rows of several widths share a buffer, each from a multiple of its bytes on. That padding is priced as the mean of all
that it may be: too much where a batch has nothing for many of the ranks."""


def random_cluster(random: np.random.Generator) -> Cluster:
    sizes = np.cumprod([1, *random.choice([2, 3, 4], random.integers(1, 4))]).tolist()
    levels = tuple(
        Level(
            size,
            CollectiveRate(10 ** random.uniform(-6, -4), 10 ** random.uniform(8, 11)) if size > 1 else None,
            CollectiveRate(10 ** random.uniform(-6, -4), 10 ** random.uniform(8, 11)) if size < sizes[-1] else None,
        )
        for size in sizes
    )
    node = int(random.choice(sizes))
    return Cluster("random", sizes[-1] // node, node, 1e12, 0.0, levels)


def random_tables(random: np.random.Generator) -> list[Table]:
    every = [(dim, kind, optimizer) for dim in DIMS for kind in TYPES for optimizer in OPTIMIZERS]
    groups = random.permutation(len(every))[: random.integers(1, 51)]
    tables = []
    for index in range(max(len(groups), int(random.integers(1, 61)))):
        dim, kind, optimizer = every[groups[index % len(groups)]]
        rows = int(random.integers(10, 2000))
        ids = (random.zipf(random.uniform(1.1, 2.0), SAMPLES * LENGTH) % rows).astype(np.int64)
        profile = AccessProfile.from_ids(ids, lengths=np.full(SAMPLES, LENGTH), num_rows=rows)
        tables.append(Table(f"t{index}", rows, dim, profile, kind, optimizer))
    return tables


def random_steps(random: np.random.Generator, plan: Plan) -> list[dict[str, Lookups]]:
    world = plan.cluster.world_size
    steps = []
    for _ in range(STEPS):
        number = world * BATCH * LENGTH
        steps.append(
            {
                name: Lookups(random.zipf(1.3, number) % table.rows, np.repeat(np.arange(world), BATCH * LENGTH))
                for name, table in plan.tables.items()
            }
        )
    return steps


def lookups_of(
    plan: Plan, table: TablePlan, profile: AccessProfile, steps: list[dict[str, Lookups]]
) -> dict[int, float]:
    """Lookups of a rank and step at each level, on average: distinct ones where ids are sent once."""
    world = plan.cluster.world_size
    ends = [tier.first_position + tier.rows for tier in table.tiers]
    places = rows_with_places(table, world)
    tier_of = np.full(table.rows, len(ends) - 1)
    ranked = profile.ranked_rows[:places]
    tier_of[ranked] = np.searchsorted(ends, np.arange(ranked.size), side="right")
    if ranked.size < places:  # rows that were never read follow in order of id
        others = np.setdiff1d(np.arange(table.rows), ranked)[: places - ranked.size]
        tier_of[others] = np.searchsorted(ends, np.arange(ranked.size, places), side="right")
    found = np.zeros(len(ends))
    for step in steps:
        pairs = np.stack([step[table.name].ranks, step[table.name].ids])
        ids = np.unique(pairs, axis=1)[1] if table.index_dedup else pairs[1]
        found += np.bincount(tier_of[ids], minlength=len(ends))
    return {
        tier.group_size: lookups
        for tier, lookups in zip(table.tiers, (found / (world * len(steps))).tolist(), strict=True)
    }


def compared(seed: int) -> tuple[int, bool, dict[Key, tuple[float, float]]]:
    """Groups of a random job, whether all calls are those priced, and (bytes priced, counted) of each collective."""
    random = np.random.default_rng([seed, 14])
    cluster, tables = random_cluster(random), random_tables(random)
    plan = solve(
        tables,
        cluster,
        batch_size=BATCH,
        budget=float(10 ** random.uniform(3, 6)),
        tiers=len(cluster.levels),
        reduction=str(random.choice(["dense", "sparse", "auto"])),
        index_dedup_seconds_per_id=float(10 ** random.uniform(-10, -6)),
    )
    steps = random_steps(random, plan)
    profiles = {table.name: table.profile for table in tables}
    counted = {(t.kind, t.group_size, t.content): t for t in replay(plan, steps, profiles).traffic}
    calls = {one.key: one.calls for one in plan.predicted.collectives}
    same = calls == {key: traffic.calls for key, traffic in counted.items()}
    (grouped,) = together(plan, None)
    layout, classes = Layout.of_tables({t.name: t for t in grouped}, cluster.world_size), classes_of(grouped)
    reads = {size: np.zeros(len(classes)) for size in layout.group_sizes}
    for index, one in enumerate(classes):
        for table in grouped[one.tables.start : one.tables.stop]:
            for size, lookups in lookups_of(plan, table, profiles[table.name], steps).items():
                reads[size][index] += lookups
    listed = [call for call in step_collectives(layout, classes) if call.kind != "all_gather"]
    nbytes = {one.key: one.calls * one.nbytes for one in priced(listed, reads, cluster, None)}
    return len(classes), same, {key: (found, counted[key].mean_bytes) for key, found in nbytes.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    groups: list[int] = []
    same, contents = 0, dict[str, list[float]]()
    for job in range(arguments.jobs):
        number, equal, found = compared(arguments.seed * 100_000 + job)
        groups.append(number)
        same += equal
        for (_, _, content), (planned, counted) in found.items():
            contents.setdefault(content, []).append(counted / planned - 1 if planned else 0.0)
    print(
        f"{arguments.jobs} random jobs of {min(groups)} to {max(groups)} groups: in {same} all calls are those priced"
    )
    grid = new_grid(
        "Bytes counted over bytes priced, less 1", ["content"], ["collectives", "equal", "least", "mean", "most"]
    )
    for content, errors in contents.items():
        values = np.array(errors)
        equal = int((np.abs(values) < 1e-12).sum())
        grid.add_row(
            content,
            str(values.size),
            str(equal),
            *(f"{one:+.2%}" for one in (values.min(), values.mean(), values.max())),
        )
    print(as_text(grid))
    print(NOTE)


if __name__ == "__main__":
    main()
