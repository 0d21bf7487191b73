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
from flexshard.costmodels import Layout, classes_of, priced, rows_with_places, segment_bytes, step_collectives
from flexshard.executors import Lookups, replay
from flexshard.executors.traffic.replaying import together
from flexshard.planner import TablePlan
from flexshard.topologies import CollectiveRate, Level

Key = tuple[str, int, str]
STEPS, LENGTH, SAMPLES, BATCH = 3, 6, 600, 64
DIMS, TYPES = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128), ("float32", "float16")
OPTIMIZERS = ("sgd", "rowwise_adagrad", "adagrad", "adam", "partial_rowwise_adam")


NOTE = """\
Rows of several widths share a buffer, each from a multiple of its bytes on. What each rank asks each for says how much
padding that is; plans, which know the lookups of a rank alone, price the mean of all that it may be: too much where a
batch has nothing for many of the ranks."""


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


def asked_for(plan: Plan, table: TablePlan, profile: AccessProfile, step: Lookups) -> dict[int, np.ndarray]:
    """Rows of a table at each level that each rank asks each of its group for, distinct ones where ids are sent once;
    shape (U, g).
    """
    world = plan.cluster.world_size
    places = rows_with_places(table, world)
    position = np.arange(table.rows)  # rows that were never read follow the others in order of id
    ranked = profile.ranked_rows[:places]
    position[np.concatenate([ranked, np.setdiff1d(np.arange(table.rows), ranked)])] = np.arange(table.rows)
    pairs = np.stack([step.ranks, step.ids])
    ranks, ids = np.unique(pairs, axis=1) if table.index_dedup else pairs
    found = {}
    for tier in table.tiers:
        offset = position[ids] - tier.first_position
        here, size = (offset >= 0) & (offset < tier.rows), tier.group_size
        holder = (offset[here] + tier.first_holder) % size
        asked = np.bincount(ranks[here] * size + holder, minlength=world * size)
        found[size] = asked.reshape(world, size)
    return found


def compared(seed: int) -> tuple[int, bool, dict[Key, tuple[float, float, float]]]:
    """Groups of a random job, whether all calls are those priced, and bytes of each collective: priced for its batches'
    lookups, for what each rank asks each for, and counted by a replay.
    """
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
    world = cluster.world_size
    layout, classes = Layout.of_tables({t.name: t for t in grouped}, world), classes_of(grouped)
    asked = {size: np.zeros((STEPS, world, size, len(classes)), np.int64) for size in layout.group_sizes}
    for index, one in enumerate(classes):
        for table in grouped[one.tables.start : one.tables.stop]:
            for number, step in enumerate(steps):
                for size, rows in asked_for(plan, table, profiles[table.name], step[table.name]).items():
                    asked[size][number, ..., index] += rows
    reads = {size: rows.sum(axis=(0, 1, 2)) / (STEPS * world) for size, rows in asked.items()}
    listed = [call for call in step_collectives(layout, classes) if call.kind != "all_gather"]
    expected = {one.key: one.calls * one.nbytes for one in priced(listed, reads, cluster, None)}
    exact = dict.fromkeys(expected, 0.0)
    for call in listed:
        of = call.fixed_bytes
        if of is None:
            of = segment_bytes(asked[call.group_size][..., call.classes], call.item_bytes).sum() / (STEPS * world)
        exact[call.kind, call.group_size, call.content] += float(of)
    return len(classes), same, {key: (one, exact[key], counted[key].mean_bytes) for key, one in expected.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    groups: list[int] = []
    same, contents = 0, dict[str, list[tuple[float, float]]]()
    for job in range(arguments.jobs):
        number, equal, found = compared(arguments.seed * 100_000 + job)
        groups.append(number)
        same += equal
        for (_, _, content), (expected, exact, counted) in found.items():
            contents.setdefault(content, []).append((excess(counted, expected), excess(counted, exact)))
    print(
        f"{arguments.jobs} random jobs of {min(groups)} to {max(groups)} groups: in {same} all calls are those priced"
    )
    grid = new_grid(
        "Bytes counted over bytes priced, less 1",
        ["content"],
        ["collectives", "equal for what each rank asks each for", "at most", "for all lookups: least", "mean", "most"],
    )
    for content, errors in contents.items():
        expected, exact = np.array(errors).T
        spread = (f"{one:+.2%}" for one in (expected.min(), expected.mean(), expected.max()))
        grid.add_row(content, str(exact.size), str((exact == 0).sum()), f"{np.abs(exact).max():.0e}", *spread)
    print(as_text(grid))
    print(NOTE)


def excess(counted: float, priced: float) -> float:
    """By what part of it what was counted exceeds a price."""
    return counted / priced - 1 if priced else float(counted > 0)


if __name__ == "__main__":
    main()
