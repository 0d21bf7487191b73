"""How long planning takes where rows may be kept on the host, beside planning without, and what memory buys."""

from __future__ import annotations

import time

from benchmarks.solver import large_model
from flexshard import Cluster, Plan, Problem, Table, solve
from flexshard._internal import as_text, new_grid
from flexshard.errors import BudgetError

__all__ = ["main"]

_SHARES = (1.0, 0.5, 0.25, 0.1)


def _timed(problem: Problem) -> tuple[float, Plan]:
    start = time.perf_counter()
    plan = solve(problem)
    return time.perf_counter() - start, plan


def _model(tables: int) -> tuple[list[Table], Cluster]:
    return large_model(tables, 10**7 * tables), Cluster.preset("dgx-h100", nodes=128 if tables == 1000 else 4)


def main() -> None:
    grid = new_grid(
        "Plans with 1 TiB of host memory per rank; memory as a share of what row-wise needs",
        ["tables"],
        ["memory", "planned in", "without caches in", "gap", "exposed", "row-wise", "cached tables", "on the host"],
    )
    for number in (10, 100, 1000):
        tables, cluster = _model(number)
        seconds, without = _timed(Problem(tables, cluster, 1024))
        neutral = without.settings.budget_bytes
        row_wise = without.baselines["row_wise"].exposed_seconds
        for share in _SHARES:
            budget = f"{share * neutral + cluster.reserve_bytes!r} B"
            try:
                took, plan = _timed(Problem(tables, cluster, 1024, budget, host_memory="1TiB"))
            except BudgetError as error:
                least = error.least_bytes / neutral
                grid.add_row(str(number), f"{share:.0%}", f"nothing fits below {least:.0%}", *[""] * 6)
                continue
            cost = plan.predicted
            grid.add_row(
                str(number),
                f"{share:.0%}",
                f"{took:.2f} s",
                f"{seconds:.2f} s",
                f"{1 - plan.lower_bound_seconds / cost.exposed_seconds:.1e}",
                f"{cost.exposed_seconds * 1e3:.2f} ms",
                f"{row_wise * 1e3:.2f} ms",
                str(sum(table.cache is not None for table in plan.tables.values())),
                f"{cost.host_memory_bytes / 2**30:.1f} GiB",
            )
    print(as_text(grid))
