"""A plan for newer access profiles beside the one that runs: what moves, what that costs, what it saves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flexshard._internal import PathLike, plain_sum
from flexshard.costmodels import Cost, Layout, StepWork, rows_with_places
from flexshard.embeddings import IndexBijection
from flexshard.errors import PlanError
from flexshard.planner.plan import Plan, TablePlan
from flexshard.planner.problem import Problem
from flexshard.planner.solver.deduplication import Variants
from flexshard.planner.solver.gathered import gathered_of_tiers
from flexshard.planner.solver.instance import Allocation, Instance, memory_limit
from flexshard.planner.solver.loads import fullest_rank_bytes
from flexshard.planner.solving import solve
from flexshard.profiling import AccessProfile, check_same_ids
from flexshard.tables import OPTIMIZERS, Table, expected_distinct
from flexshard.topologies import Cluster

__all__ = ["Replan", "TableMoves", "kept_by_holder", "moving_seconds", "replan", "row_moves"]

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

_PART = 1 << 22
_WORTH = 0.1  # of a tier's copies, that are to stay for it to begin with another rank


@dataclass(frozen=True)
class TableMoves:
    """What moves of a table, over all ranks.

    Attributes:
        table: its name.
        moved, kept: copies of rows that come from another rank, and that the rank has already.
        nbytes: weights and optimizer states of the former, as they travel (float32).
    """

    table: str
    moved: int
    kept: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class Replan:
    """Another plan, and whether to move to it.

    Attributes:
        before: the plan that runs.
        after: the plan for the newer profiles, under the same budget and settings.
        cost_before, cost_after: of both under the newer profiles, their mean memory among it.
        moves: of each table.
        moving_seconds: to move them over the cluster's links.
    """

    before: Plan
    after: Plan
    cost_before: Cost
    cost_after: Cost
    moves: tuple[TableMoves, ...]
    moving_seconds: float

    @property
    def seconds_before(self) -> float:
        """What the settings' objective is of the plan that runs, under the newer profiles."""
        return self.before.objective_seconds(self.cost_before)

    @property
    def seconds_after(self) -> float:
        """The same of the plan for them."""
        return self.after.objective_seconds(self.cost_after)

    @property
    def saved_seconds(self) -> float:
        """Per step, once all rows are where the new plan has them; below 0 where it is no better."""
        return self.seconds_before - self.seconds_after

    @property
    def steps_to_pay(self) -> float:
        """Steps after which what was saved is what moving took; infinite where nothing is saved."""
        return self.moving_seconds / self.saved_seconds if self.saved_seconds > 0 else float("inf")

    @property
    def nbytes(self) -> int:
        """That move, over all ranks."""
        return plain_sum(table.nbytes for table in self.moves)

    def document(self) -> dict[str, Any]:
        """For machines."""
        return {
            "seconds_before": self.seconds_before,
            "seconds_after": self.seconds_after,
            "saved_seconds_per_step": self.saved_seconds,
            "moving_seconds": self.moving_seconds,
            "moved_bytes": self.nbytes,
            "steps_to_pay": self.steps_to_pay if np.isfinite(self.steps_to_pay) else None,
            "memory_bytes_before": self.cost_before.memory_bytes,
            "memory_bytes_after": self.cost_after.memory_bytes,
            "budget_bytes_before": self.before.settings.budget_bytes,
            "budget_bytes_after": self.after.settings.budget_bytes,
            "tables": [vars(table) for table in self.moves],
            "before": self.before.fingerprint,
            "after": self.after.fingerprint,
        }


def replan(
    plan: Plan,
    newer: Mapping[str, AccessProfile],
    *,
    older: Mapping[str, AccessProfile] | None = None,
    base: PathLike = ".",
) -> Replan:
    """Plan again with newer profiles, within the same budget, and say what moving there takes and saves.

    A budget that is "neutral", or a difference to that, is what row-wise needs with the newer profiles: fewer reads, or
    other ones, make it other bytes, which the plan that runs may be above.

    Args:
        plan: that runs.
        newer: profiles by table; tables that are not named keep theirs.
        older: the plan's own profiles by table; by default those that it names, from the folder ``base``.

    Raises:
        PlanError: a table that the plan does not have, or a profile that is not the plan's.
        ProfileError: a profile that cannot be read, that is a histogram, or whose ids are not those of the older one.
        BudgetError: with the newer profiles nothing fits.
    """
    plan.refusing_sharded("planning again with newer profiles")
    if plan.settings.host_memory is not None:
        raise PlanError(
            "planning again with newer profiles is of rows in ranks' memory, and the plan may keep some on the host;"
            " plan the job again, and compare both with diff"
        )
    for name in newer:
        plan.table(name)
    old = {name: _older(table, (older or {}).get(name), Path(base)) for name, table in plan.tables.items()}
    for name, profile in newer.items():
        check_same_ids(old[name], profile, name)
    new = old | dict(newer)
    problem = _problem(plan, [_table(table, new[name]) for name, table in plan.tables.items()])
    planned = solve(problem)
    orders = {
        name: (_ranking(table, old[name], plan.cluster), _ranking(planned.tables[name], new[name], plan.cluster))
        for name, table in plan.tables.items()
    }
    after = _with_holders_of(plan, planned, problem, orders)
    moves = []
    for name, table in plan.tables.items():
        then = after.tables[name]
        layouts = [Layout.of_tables({name: one}, plan.cluster.world_size) for one in (table, then)]
        width = table.dim + OPTIMIZERS[table.optimizer].state_bytes(table.dim) // 4
        moves.append(row_moves((layouts[0], 0), (layouts[1], 0), *orders[name], width, table=name))
    costs = _under_newer(plan, problem, old), _under_newer(after, problem, new)
    nbytes = plain_sum(one.nbytes for one in moves)
    return Replan(plan, after, *costs, tuple(moves), moving_seconds(plan.cluster, nbytes))


def moving_seconds(cluster: Cluster, nbytes: float) -> float:
    """Time of so many bytes of rows, of all ranks together, between all ranks, which each move as many."""
    rate = cluster.level(cluster.world_size).all_to_all
    return 0.0 if rate is None or not nbytes else rate.seconds(nbytes / cluster.world_size)


def row_moves(
    before: tuple[Layout, int],
    after: tuple[Layout, int],
    ranking: IndexBijection,
    newer: IndexBijection,
    width: int,
    *,
    table: str,
) -> TableMoves:
    """Copies of rows that come from another rank when a table goes from one layout to another.

    Args:
        before, after: both, and the table's index in them.
        ranking, newer: its rows' order in both, as the executor has it.
        width: numbers of a row, with those of its optimizer's state.
        table: its name.
    """
    world, moved, kept = before[0].world_size, 0, 0
    for (size_before, local_before), (size_after, local_after) in _held(before, after, ranking, newer):
        # Group sizes divide each other: ranks that are both k mod g and l mod h are U / max(g, h), if there are any.
        smaller, larger = np.minimum(size_before, size_after), np.maximum(size_before, size_after)
        both = np.where(local_before % smaller == local_after % smaller, world // larger, 0)
        kept += int(both.sum())
        moved += int((world // size_after - both).sum())
    return TableMoves(table, moved, kept, 4 * moved * width)


def kept_by_holder(
    before: tuple[Layout, int], after: tuple[Layout, int], ranking: IndexBijection, newer: IndexBijection
) -> dict[int, IntArray]:
    """Copies of rows that stay with their rank, by the group size of their tier and the local rank, of so many, that it
    might begin with in the layout ``after``, where all begin with 0; arguments as of :func:`row_moves`.
    """
    world, sizes = before[0].world_size, after[0].group_sizes
    found = {size: np.zeros(size, np.int64) for size in sizes}
    for (size_before, local_before), (size_after, local_after) in _held(before, after, ranking, newer):
        for now, then in product(before[0].group_sizes, sizes):
            rows, smaller = (size_before == now) & (size_after == then), min(now, then)
            turned = np.bincount((local_before[rows] - local_after[rows]) % smaller, minlength=smaller)
            found[then] += np.tile(turned, then // smaller) * (world // max(now, then))
    return found


def _held(
    before: tuple[Layout, int], after: tuple[Layout, int], ranking: IndexBijection, newer: IndexBijection
) -> Iterator[tuple[tuple[IntArray, IntArray], tuple[IntArray, IntArray]]]:
    """Holders of rows before and after, some rows at a time, in order of id."""
    rows = int(before[0].num_rows[before[1]])
    for start in range(0, rows, _PART):
        ids = np.arange(start, min(start + _PART, rows))
        was, will = (
            _holders(*layout, np.asarray(order.positions(ids), np.int64))
            for layout, order in ((before, ranking), (after, newer))
        )
        yield was, will


def _holders(layout: Layout, table: int, positions: IntArray) -> tuple[IntArray, IntArray]:
    """Group size and local rank of each row's holders; shape (n,) each."""
    bucket = np.asarray(layout.locations(table, positions)) // max(layout.num_slots, 1)
    first = np.array(layout.first_bucket)
    level = np.searchsorted(first, bucket, side="right") - 1
    return np.array(layout.group_sizes)[level], bucket - first[level]


def _older(table: TablePlan, given: AccessProfile | None, base: Path) -> AccessProfile:
    if given is None and table.profile_path is None:
        raise PlanError(f"table {table.name!r}: the plan does not say where its profile lies; give it")
    profile = AccessProfile.load(base / str(table.profile_path)) if given is None else given
    if profile.digest != table.profile_digest:
        raise PlanError(f"table {table.name!r}: its older profile is not the one that the plan was made from")
    return replace(profile, path=table.profile_path)


def _table(table: TablePlan, profile: AccessProfile) -> Table:
    kind = table.dtype, table.optimizer
    made = Table(
        table.name, table.rows, table.dim, profile, *kind, features=table.features, dedup_factor=table.dedup_factor
    )
    # The job said so only if it is not what follows from the rest.
    follows = made.kappa_replicated == table.kappa_replicated
    return made if follows else replace(made, replication_multiplier=table.kappa_replicated)


def _problem(plan: Plan, tables: Sequence[Table]) -> Problem:
    """What the plan was asked for, of these tables."""
    asked = plan.settings
    return Problem(
        tables,
        plan.cluster,
        asked.batch_size,
        asked.budget,
        asked.tiers,
        asked.method,
        dict(asked.overlap) or None,
        asked.index_dedup,
        asked.reduction,
        asked.translation,
        asked.index_dedup_seconds_per_id,
        memory="p99.9" if asked.memory == "p99.9" else "mean",
        sample_order="shuffled" if asked.sample_order == "shuffled" else "file",
        objective="step" if asked.objective == "step" else "communication",
        step=None if asked.dense_seconds is None else StepWork(asked.dense_seconds, asked.rates),
    )


def _ranking(table: TablePlan, profile: AccessProfile, cluster: Cluster) -> IndexBijection:
    """Order of a table's rows, as the executor has it."""
    return IndexBijection(profile.hottest_rows(rows_with_places(table, cluster.world_size)), table.rows)


def _with_holders_of(
    plan: Plan, after: Plan, problem: Problem, orders: Mapping[str, tuple[IndexBijection, IndexBijection]]
) -> Plan:
    """The newer plan with each tier beginning where far more of its rows stay than where it begins now, as when it
    begins with another row; or else where all begin now, so that no rows move for that alone; or as it is, where the
    fullest rank would not fit so.
    """
    now, most = {}, {}
    for name, table in after.tables.items():
        begins = {tier.group_size: tier.first_holder for tier in plan.tables[name].tiers}
        stay = _staying(plan.tables[name], table, orders[name], plan.cluster.world_size)
        now[name] = [begins.get(tier.group_size, tier.first_holder) for tier in table.tiers]
        most[name] = [
            int(one.argmax()) if one.max() - one[first] > _WORTH * one.sum() else first
            for one, first in zip((stay[tier.group_size] for tier in table.tiers), now[name], strict=True)
        ]
    for holders in (most, now):
        kept = _beginning(after, holders, problem)
        if kept is not None:
            return kept
    return after


def _staying(
    before: TablePlan, after: TablePlan, orders: tuple[IndexBijection, IndexBijection], world_size: int
) -> dict[int, IntArray]:
    """Of a table, as :func:`kept_by_holder`."""
    from_0 = replace(after, tiers=tuple(replace(tier, first_holder=0) for tier in after.tiers))
    layouts = [Layout.of_tables({before.name: one}, world_size) for one in (before, from_0)]
    return kept_by_holder((layouts[0], 0), (layouts[1], 0), *orders)


def _beginning(after: Plan, holders: Mapping[str, Sequence[int]], problem: Problem) -> Plan | None:
    """The plan with tiers that begin with these local ranks; None where the fullest rank does not fit."""
    tables = {}
    for name, table in after.tables.items():
        tiers = zip(table.tiers, holders[name], strict=True)
        tables[name] = replace(table, tiers=tuple(replace(tier, first_holder=first) for tier, first in tiers))
    kept = replace(after, tables=tables)
    if tables == after.tables or after.predicted.fullest_dynamic_bytes is None:
        return kept
    instance, allocation, _, begins = _as_arrays(kept, problem)
    fullest = fullest_rank_bytes(instance, allocation, in_order=problem.in_order, holders=begins)
    predicted = replace(after.predicted, fullest_dynamic_bytes=fullest)
    if problem.memory == "p99.9" and kept.bounded_bytes(predicted) > memory_limit(kept.settings.budget_bytes):
        return None
    return replace(kept, predicted=predicted)


def _as_arrays(plan: Plan, problem: Problem) -> tuple[Instance, Allocation, npt.NDArray[np.bool_], IntArray]:
    """A plan's placement: the instance of its tables, and of each tier its rows, whether it is gathered, and with which
    local rank it begins; shape (T, G) each.
    """
    instance = Variants(problem).of(np.array([table.index_dedup for table in plan.tables.values()]))
    sizes, shape = instance.group_sizes.tolist(), (len(plan.tables), len(instance.group_sizes))
    allocation, sparse, holders = np.zeros(shape, np.int64), np.zeros(shape, np.bool_), np.zeros(shape, np.int64)
    for index, table in enumerate(plan.tables.values()):
        levels = np.array([sizes.index(tier.group_size) for tier in table.tiers])
        allocation[index, levels] = [tier.rows for tier in table.tiers]
        sparse[index, levels] = [tier.reduction == "sparse" for tier in table.tiers]
        holders[index, levels] = [tier.first_holder for tier in table.tiers]
    return instance, allocation, sparse, holders


def _under_newer(plan: Plan, problem: Problem, old: Mapping[str, AccessProfile]) -> Cost:
    """Cost of the plan's placement when rows are read as the problem's profiles say."""
    instance, allocation, sparse, _ = _as_arrays(plan, problem)
    sizes = instance.group_sizes.tolist()
    reads, hottest = np.zeros(allocation.shape), np.zeros(allocation.shape)
    touched = np.zeros((len(sizes), len(plan.tables), 2))
    for index, (name, table) in enumerate(plan.tables.items()):
        levels = np.array([sizes.index(tier.group_size) for tier in table.tiers])
        found = _reads_of_tiers(instance, index, table, _ranking(table, old[name], plan.cluster))
        reads[index, levels], hottest[index, levels], touched[levels, index] = found
    cost = instance.cost_of(allocation, reads, hottest)
    if not sparse.any():
        return cost
    gathered = gathered_of_tiers(instance, allocation, sparse, touched)
    return replace(cost, collectives=instance.collectives(allocation, reads, sparse, gathered, hottest))


def _reads_of_tiers(
    instance: Instance, index: int, table: TablePlan, ranking: IndexBijection
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Reads of a table's tiers, of the hottest row of each, shape (tiers,) both, and mean and variance of the rows that
    a rank's group touches, shape (tiers, 2), where the order of rows is an older one's.
    """
    now = instance.tables[index]
    profile = now.profile
    first = int(instance.starts[index])
    reads = np.repeat(instance.reads[first : first + profile.counts.size], profile.rows)
    position = np.asarray(ranking.positions(profile.ranked_rows), np.int64)
    tier = np.searchsorted([one.first_position for one in table.tiers], position, side="right") - 1
    hottest = np.zeros(len(table.tiers))
    np.maximum.at(hottest, tier, reads)
    sizes = np.array([one.group_size for one in table.tiers])
    share, samples = np.repeat(profile.sample_share, profile.rows), now.distinct_samples(instance.batch_size) * sizes
    q = expected_distinct(share, samples[tier])

    def summed(values: FloatArray) -> FloatArray:
        return np.asarray(np.bincount(tier, weights=values, minlength=len(table.tiers)), np.float64)

    return summed(reads), hottest, np.stack([summed(q), summed(q * (1 - q))], axis=1) / sizes[:, None]
