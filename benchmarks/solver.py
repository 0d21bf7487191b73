"""How long planning takes: a large model on 1,024 ranks, and growth with the number of distinct counts.

python -m benchmarks.solver
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from benchmarks.timing import machine, median_seconds, on_one_core
from flexshard import AccessProfile, Cluster, Table, solve
from flexshard._internal import as_text, new_grid
from flexshard.profiling import LengthMoments


def zipf_table(name: str, rows: int, dim: int, exponent: float, samples: int = 10_000_000) -> Table:
    """A table whose row of rank r was read ``samples · r^-exponent`` times, as distinct counts and their rows."""
    ranks = np.unique(np.round(np.geomspace(1, rows, 20_000)).astype(np.int64))
    counts = (samples * ranks**-exponent).astype(np.int64)
    numbers = np.diff(ranks, append=rows + 1)
    distinct, which = np.unique(counts, return_inverse=True)
    often = np.bincount(which, weights=numbers).astype(np.int64)
    # Samples of nearly even length, so that the memory of the fullest rank is planned too.
    number, over = divmod(int(distinct @ often), samples)
    squares = over * (number + 1) ** 2 + (samples - over) * number**2
    bins = [(number, samples - over), (number + 1, over)]
    histogram = tuple((length, many, length * many) for length, many in bins if many)
    lengths = LengthMoments(samples, int(distinct @ often), squares, number + 1, histogram)
    profile = AccessProfile.from_histogram(distinct, often, samples, rows, lengths=lengths, table=name)
    return Table(name, rows, dim, profile)


def large_model(tables: int = 1000, rows: int = 10**10) -> list[Table]:
    """Tables of 10^5 to 10^8 rows, ``rows`` in all."""
    random = np.random.default_rng(0)
    sizes = np.exp(random.uniform(np.log(1e5), np.log(1e8), tables))
    sizes = np.minimum(sizes * rows / sizes.sum(), 1e8).astype(np.int64)
    sizes[sizes < 1e8] += (rows - sizes.sum()) // int((sizes < 1e8).sum())
    return [
        zipf_table(f"t{k}", int(size), int(random.choice([64, 128, 256])), random.uniform(0.9, 1.2))
        for k, size in enumerate(sizes)
    ]


def repeating_model(tables: int = 1000) -> list[Table]:
    """Small tables of one log, each of which a row of it may read, so that most had better send repeated ids once."""
    random = np.random.default_rng(0)
    reads = random.integers(50, 500, tables)
    made = []
    for k, number in enumerate(reads.tolist()):
        counts = np.bincount(random.zipf(1.3, number) % int(random.integers(10, 100_000)))
        profile = AccessProfile.from_counts(counts, num_samples=int(reads.sum()))
        made.append(Table(f"t{k}", counts.size, 64, profile))
    return made


def main() -> None:
    on_one_core()
    print(f"one core of {machine()}\n")
    cluster = Cluster.preset("dgx-h100", nodes=128)
    tables = large_model()
    start = time.perf_counter()
    plan = solve(tables, cluster, batch_size=1024)
    first = time.perf_counter() - start
    median = median_seconds(lambda: solve(tables, cluster, batch_size=1024))
    once = sum(table.index_dedup for table in plan.tables.values())
    print(
        f"{len(tables):,} tables, {sum(t.rows for t in tables):,} rows,"
        f" {sum(t.profile.counts.size for t in tables):,} distinct counts, {cluster.world_size:,} ranks:"
        f" first {first:.2f} s (hashes the profiles), then median {median:.2f} s; solver, four baselines, next best"
        f" choices of each table, which tables send ids once ({once} do), and the plan with one GiB more."
    )
    gap = plan.predicted.exposed_seconds / plan.lower_bound_seconds - 1
    ratio = plan.baselines["row_wise"].exposed_seconds / plan.predicted.exposed_seconds
    print(f"{ratio:.2f} times less exposed communication than row-wise, within {gap:.1g} of the bound\n")
    start = time.perf_counter()
    step = solve(tables, cluster, batch_size=1024, objective="step")
    seconds = time.perf_counter() - start
    found, saved = step.objective_seconds(step.predicted), step.objective_seconds(step.baselines["row_wise"])
    gap = found / step.lower_bound_seconds - 1
    print(f"objective step: {seconds:.2f} s; {saved / found:.2f} times row-wise's, within {gap:.1g} of the bound\n")
    start = time.perf_counter()
    gathered = solve(tables, cluster, batch_size=1024, reduction="sparse")
    seconds = time.perf_counter() - start
    gap = gathered.predicted.exposed_seconds / gathered.lower_bound_seconds - 1
    print(f"all gradients of copies gathered: {seconds:.2f} s, within {gap:.1g} of the bound\n")
    small = repeating_model()
    start = time.perf_counter()
    often = solve(small, Cluster.preset("dgx-h100", nodes=4), batch_size=4096)
    seconds = time.perf_counter() - start
    once = sum(table.index_dedup for table in often.tables.values())
    gap = often.predicted.exposed_seconds / often.lower_bound_seconds - 1
    print(
        f"{len(small):,} small tables, {sum(t.rows for t in small):,} rows, 32 ranks, {once} of them send ids once:"
        f" {seconds:.2f} s, within {gap:.1g} of the bound\n"
    )
    roomy = replace(cluster, hbm_bytes=1e15)  # every sample reads half of all rows
    grid = new_grid("Growth with distinct counts", [], ["counts", "seconds", "ns each"])
    for count in 10 ** np.arange(4, 9):
        counts, rows = np.arange(count, 0, -1), np.ones(count, np.int64)
        # A new profile each time, so that hashing it is part of what is measured.
        start = time.perf_counter()
        profile = AccessProfile.from_histogram(counts, rows, int(count), int(count))
        solve([Table("t", int(count), 64, profile)], roomy, batch_size=1024)
        seconds = time.perf_counter() - start
        grid.add_row(f"{count:,}", f"{seconds:.3f}", f"{1e9 * seconds / count:.0f}")
    print(as_text(grid))


if __name__ == "__main__":
    main()
