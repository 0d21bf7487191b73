"""Why a table's tiers end where they do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flexshard import units
from flexshard._internal import deprecated_attribute, with_names
from flexshard.costmodels import (
    Overlap,
    RowWidths,
    cached_share,
    idle_seconds,
    overlap_of,
    row_lines,
    row_reduction_seconds,
    strategy_name,
)
from flexshard.errors import PlanError
from flexshard.planner.explanations.plan_text import cache_line, table_heading, worth_of_memory
from flexshard.planner.explanations.pooled_text import PooledExplanation, asked_of, explain_pooled
from flexshard.planner.plan import Alternative, Plan, TablePlan, Tier
from flexshard.planner.plan_file import FIELDS
from flexshard.planner.problem import Problem
from flexshard.planner.solver.cached_sums import SLACK
from flexshard.planner.solving import solve
from flexshard.tables import expected_distinct

__all__ = ["Boundary", "RowCost", "TableExplanation", "explain"]


@dataclass(frozen=True)
class RowCost:
    """What one row would cost in one tier, per rank and iteration.

    Attributes:
        strategy, group_size: the tier.
        memory_bytes: static and expected dynamic memory.
        exposed_seconds: communication, latencies aside.
        priced_seconds: both together at the plan's price of memory.
    """

    strategy: str
    group_size: int
    memory_bytes: float
    exposed_seconds: float
    priced_seconds: float


@dataclass(frozen=True)
class Boundary:
    """The last row of a tier, and what it costs there and elsewhere.

    Attributes:
        position: of the row in the table's order of popularity, from 0.
        p: its expected appearances in one sample.
        chosen: what it costs where it is.
        others: what it would cost elsewhere, cheapest first.
    """

    position: int
    p: float
    chosen: RowCost
    others: tuple[RowCost, ...]

    rank = deprecated_attribute("rank", "position")


@dataclass(frozen=True)
class TableExplanation:
    """Why a table is placed as it is.

    Attributes:
        table: the table's part of the plan.
        boundaries: last row of each tier.
        memory_price_seconds_per_gib, next_gib_seconds_saved: what memory is worth to the whole plan.
        text: all of it in sentences.
    """

    table: TablePlan
    boundaries: tuple[Boundary, ...]
    memory_price_seconds_per_gib: float
    next_gib_seconds_saved: float | None
    text: str

    def document(self) -> dict[str, Any]:
        """The explanation as a mapping for machines, with the names of a plan's file."""
        document: dict[str, Any] = with_names(asdict(self), FIELDS | {"position": "rank"})
        return document


def explain(plan: Plan | Problem, name: str | None = None) -> TableExplanation | PooledExplanation:
    """Explain one table of a plan (its only one by default), from the plan alone; a problem is solved first.

    Raises:
        PlanError: the plan has no such table, or several and none is named.
    """
    if isinstance(plan, Problem):
        plan = solve(plan)
    if not isinstance(plan, Plan):
        raise PlanError(f"what is explained is a Plan or a Problem, found {type(plan).__name__}")
    names = [*plan.tables, *plan.pooled]
    if name is None and len(names) > 1:
        raise PlanError(f"which of the plan's {len(names)} tables? name one")
    name = names[0] if name is None else name
    if isinstance(name, str) and name in plan.pooled:
        return explain_pooled(plan, plan.pooled[name])
    table = plan.table(name)
    boundaries = _boundaries(plan, table)
    saved = None if plan.next_gib_seconds is None else plan.objective_seconds(plan.predicted) - plan.next_gib_seconds
    lines = [table_heading(table), "", *_tier_lines(plan, table, boundaries), "", *_rest(plan, table, saved)]
    text = "\n".join([*lines, *asked_of(plan, table.name)])
    return TableExplanation(table, boundaries, plan.memory_price_seconds_per_gib, saved, text)


def _boundaries(plan: Plan, table: TablePlan) -> tuple[Boundary, ...]:
    settings, cluster = plan.settings, plan.cluster
    hidden = overlap_of(dict(settings.overlap) or None, cluster)
    lines = row_lines(table, cluster, hidden)
    price = plan.memory_price_seconds_per_gib / units.GIB
    row_bytes = table.row_bytes
    boundaries = []
    for tier in table.tiers:
        p = tier.coldest_p
        distinct = settings.batch_size / table.dedup_factor
        c = p if tier.coldest_c is None else tier.coldest_c
        w = float(expected_distinct(c, distinct)) if table.index_dedup else p * distinct
        memory = row_bytes * (lines.memory_fixed + lines.memory_per_read * w)
        seconds = row_bytes * (lines.comm_fixed + lines.comm_per_read * w)
        if table.cache is not None:
            row_wise = lines.group_sizes.index(cluster.world_size)
            held = row_bytes * lines.memory_fixed[row_wise]
            places, fetched = cached_share(expected_distinct(c, distinct * cluster.world_size), table.cache.batches)
            memory[row_wise] -= held * (1.0 - min(float(places) * table.cache.held_scale * SLACK, 1.0))
            assert cluster.host_bytes_per_s is not None  # there are caches in the plan
            seconds[row_wise] += 2 * held * float(fetched) * table.cache.fetched_scale / cluster.host_bytes_per_s
        seconds += _saved_by_gathering(plan, table, hidden, c)
        costs = [
            RowCost(strategy_name(size, cluster.world_size), size, float(m), float(c), float(c + price * m))
            for size, m, c in zip(lines.group_sizes, memory, seconds, strict=True)
        ]
        chosen = next(cost for cost in costs if cost.group_size == tier.group_size)
        others = sorted((cost for cost in costs if cost is not chosen), key=lambda cost: cost.priced_seconds)
        boundaries.append(Boundary(tier.first_position + tier.rows - 1, p, chosen, tuple(others)))
    return tuple(boundaries)


def _saved_by_gathering(plan: Plan, table: TablePlan, hidden: Overlap, share: float) -> npt.NDArray[np.float64]:
    """What a row of which this share of samples has any takes more (below 0: less) at each level where gradients of its
    copies are gathered: where those of the table's tier are, or may be; shape (G,).
    """
    cluster, settings, widths = plan.cluster, plan.settings, RowWidths.of_table(table)
    known, more = {tier.group_size: tier.reduction for tier in table.tiers}, []
    for size in cluster.group_sizes:
        reduced, gathered = row_reduction_seconds(cluster, size, widths, hidden)
        touched = float(expected_distinct(min(share, 1.0), settings.batch_size / table.dedup_factor * size))
        longer = gathered * touched - reduced
        how = known.get(size, settings.reduction)
        more.append(0.0 if how == "dense" else longer if how == "sparse" else min(longer, 0.0))
    return np.array(more)


def _tier_lines(plan: Plan, table: TablePlan, boundaries: tuple[Boundary, ...]) -> list[str]:
    lines = []
    unused = _unused(plan)
    for tier, boundary in zip(table.tiers, boundaries, strict=True):
        unseen = "" if tier.covered_held_out is None else f" ({tier.covered_held_out:.1%} in samples not counted)"
        lines.append(
            f"{tier.strategy}, {_where(tier.group_size, plan.cluster.world_size)}: {_which(table, tier)}."
            f" They have {tier.covered:.1%} of all reads{unseen}; a sample reads the first of them {tier.hottest_p:.3g}"
            f" times on average, the last {tier.coldest_p:.3g} times."
        )
        lines.append(f"  Its last row takes {_words(boundary.chosen)} per rank and iteration.")
        lines += [_elsewhere(boundary.chosen, other, plan, unused) for other in boundary.others]
    if table.cache is not None:
        lines.append(cache_line(plan, table))
    if plan.settings.method == "optimal" and plan.memory_price_seconds_per_gib == 0:
        beyond = any(not other.fits and other.priced_seconds < 0 for other in table.alternatives)
        lines.append(
            "A little more memory would save nothing: tiers end where the next one takes less time, whatever its"
            " memory. Much more would, as the choices beyond the budget show."
            if beyond
            else "The budget does not bind: tiers end where the next one takes less time, whatever its memory."
        )
    elif plan.settings.method == "optimal":
        # With pooled tables it is the bound's price, and the plan may have room to spare.
        spent = (
            " here, at the bound's prices" if plan.pooled else " here: at that price the plan just spends its budget"
        )
        lines.append(
            f"A GiB of memory counts as {units.format_seconds(plan.memory_price_seconds_per_gib)}{spent}. A tier ends"
            " where its next row would be as good in the following tier."
        )
    else:
        lines.append(
            "Method 'paper': data_parallel ends at its memory-neutral breakpoint, flex where the memory saved is spent"
            " or at its communication breakpoint (two tiers: data_parallel where its savings are spent)."
        )
    return lines


def _which(table: TablePlan, tier: Tier) -> str:
    if len(table.tiers) == 1:
        return f"all {tier.rows:,} rows"
    if tier.first_position == 0:
        return f"the {tier.rows:,} rows that are read most"
    if tier.first_position + tier.rows == table.rows:
        return f"the other {tier.rows:,} rows"
    return f"the next {tier.rows:,} rows"


def _where(group_size: int, world_size: int) -> str:
    if group_size == world_size:
        return "each row on one rank alone"
    return "a copy on every rank" if group_size == 1 else f"a copy in every group of {group_size} ranks"


def _elsewhere(chosen: RowCost, other: RowCost, plan: Plan, unused: Mapping[int, str]) -> str:
    more = other.priced_seconds - chosen.priced_seconds
    what = (
        f"  As {other.strategy} ({_where(other.group_size, plan.cluster.world_size)}) it would take {_words(other)}: "
    )
    if abs(more) <= 1e-6 * chosen.priced_seconds:
        return what + "as good, all in all."
    if more > 0:
        return what + f"{units.format_seconds(more)} worse, all in all."
    reason = f", but {unused[other.group_size]}" if other.group_size in unused else ""
    return what + f"{units.format_seconds(-more)} better, all in all{reason}."


def _unused(plan: Plan) -> dict[int, str]:
    """Why a group size that would serve some rows better is not used by any: starting its collectives costs more."""
    settings, cluster = plan.settings, plan.cluster
    used = {tier.group_size for table in plan.tables.values() for tier in table.tiers}
    full = len(used) >= settings.tiers
    return {
        size: f"the plan has its {settings.tiers} group sizes already"
        if full
        else f"the plan has no row there, and the first would add {units.format_seconds(_latency(plan, size))} of"
        " latency"
        for size in cluster.group_sizes
        if size not in used
    }


def _latency(plan: Plan, size: int) -> float:
    """What the first row of a level adds, whatever it is."""
    widths = list(dict.fromkeys(RowWidths.of_table(table) for table in plan.tables.values()))
    hidden = overlap_of(dict(plan.settings.overlap) or None, plan.cluster)
    with_level, without = (idle_seconds(plan.cluster, sizes, widths, hidden) for sizes in ([size], []))
    return with_level - without


def _words(cost: RowCost) -> str:
    return f"{cost.memory_bytes:,.0f} B of memory and {units.format_seconds(cost.exposed_seconds)}"


def _rest(plan: Plan, table: TablePlan, saved: float | None) -> list[str]:
    lines = [_alternative(alternative, plan) for alternative in table.alternatives]
    if lines:
        lines = ["Next best choices for this table, all else as planned:", *lines]
    if saved is not None:
        worth = worth_of_memory(plan, saved)
        if plan.settings.objective == "step":
            lines.append(
                "Seconds of rows are of communication alone; the plan weighs them by the links that steps wait for."
            )
        lines.append(
            f"For the whole plan of {units.format_seconds(plan.objective_seconds(plan.predicted))} per iteration,"
            f" {worth}."
        )
    per_node = plan.baselines.get("once_per_node")
    if per_node is not None:
        more = plan.objective_seconds(per_node) - plan.objective_seconds(plan.predicted)
        memory = units.format_bytes(per_node.memory_bytes - plan.predicted.memory_bytes)
        lines.append(
            f"If rows without copies that are sent once a rank crossed nodes once a node, the plan would take"
            f" {units.format_seconds(abs(more))} {'more' if more >= 0 else 'less'} per iteration, and {memory} more"
            " memory per rank; that is priced, and not run."
        )
    return lines


def _alternative(alternative: Alternative, plan: Plan) -> str:
    names = " + ".join(f"{strategy_name(size, plan.cluster.world_size)} ({size})" for size in alternative.group_sizes)
    seconds, memory, priced = alternative.exposed_seconds, alternative.memory_bytes, alternative.priced_seconds
    weighed = "by the links that the step waits for, " if plan.settings.objective == "step" else ""
    return (
        f"  {names}: {units.format_seconds(abs(seconds))} {'more' if seconds >= 0 else 'less'} exposed communication,"
        f" {units.format_bytes(abs(memory))} {'more' if memory >= 0 else 'less'} memory per rank;"
        f" {weighed}all in all {units.format_seconds(abs(priced))} {'worse' if priced >= 0 else 'better'}"
        f"{_but(alternative)}."
    )


def _but(alternative: Alternative) -> str:
    if not alternative.fits:
        return ", but beyond the budget"
    if alternative.priced_seconds < 0 < alternative.exposed_seconds:
        return ", if the memory that it leaves were worth its price: no row of the plan has a use for all of it"
    return ""
