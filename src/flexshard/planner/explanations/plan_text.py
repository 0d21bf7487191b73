"""A plan as tables that a person reads."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from flexshard import units
from flexshard._internal import Grid, as_text, new_grid, plain_sum
from flexshard.costmodels import Cost
from flexshard.planner.explanations.pooled_text import at_the_margin, pooled_grid
from flexshard.planner.plan import Plan, TablePlan, Tier
from flexshard.planner.solver.cached_sums import BATCHES

__all__ = [
    "cache_line",
    "calls_grid",
    "costs_grid",
    "phases_grid",
    "plan_renderable",
    "plan_text",
    "table_heading",
    "worth_of_memory",
]

_MOST_TABLES = 40


def plan_text(plan: Plan) -> str:
    """A plan as text."""
    return as_text(plan_renderable(plan))


def plan_renderable(plan: Plan) -> RenderableType:
    """Tiers of the tables, costs beside the baselines, and the proof."""
    parts: list[RenderableType] = [_heading(plan)]
    parts += [_tiers_grid(plan)] if plan.tables else []
    parts += [pooled_grid(plan)] if plan.pooled else []
    parts.append(costs_grid(plan))
    if any(one.content for one in plan.predicted.collectives):
        parts.append(calls_grid(plan))
    if plan.settings.objective == "step":
        parts.append(phases_grid(plan))
    if any(table.undeduplicated for table in plan.tables.values()):
        parts.append(_dedup_grid(plan))
    return Group(*parts, *_proof(plan))


def _dedup_grid(plan: Plan) -> Grid:
    """Tiers with deduplicated batches and without; what they cost stands among the baselines."""
    grid = new_grid("What deduplication changes", ["table"], ["DedupFactor", "rows by group without", "with"])
    for table in list(plan.tables.values())[:_MOST_TABLES]:
        now = tuple((tier.group_size, tier.rows) for tier in table.tiers)
        cells = (" + ".join(f"{rows:,} ({size})" for size, rows in tiers) for tiers in (table.undeduplicated, now))
        grid.add_row(table.name, f"{table.dedup_factor:.2f}", *cells)
    before, after = plan.baselines["without_deduplication"], plan.predicted
    memory = units.format_bytes(abs(before.memory_bytes - after.memory_bytes))
    grid.caption = (
        f"{memory} per rank {'less' if after.memory_bytes <= before.memory_bytes else 'more'}, exposed communication"
        f" {units.format_seconds(before.exposed_seconds)} without, {units.format_seconds(after.exposed_seconds)} with"
    )
    budget = plan.settings.budget.strip()
    if budget == "neutral" or budget[0] in "+-":
        grid.caption += "; each within its own budget, since row-wise needs less memory with it"
    return grid


def _heading(plan: Plan) -> Text:
    s, c = plan.settings, plan.cluster
    budget = f"{s.budget}{_less_reserve(plan)} = {units.format_bytes(s.budget_bytes)}"
    return Text(
        f"{_tables(plan)} on {c.name} ({c.nodes} nodes x {c.ranks_per_node} ranks),"
        f" batch {s.batch_size:,} per rank, budget {budget} per rank{' (p99.9)' if s.memory == 'p99.9' else ''},"
        f" method {s.method}, at most {s.tiers} tiers"
        + _once(plan)
        + (f", overlap {', '.join(f'{n} {v:.0%}' for n, v in s.overlap)}" if s.overlap else "")
    )


def _tables(plan: Plan) -> str:
    if not plan.pooled:
        return f"{len(plan.tables)} table(s)"
    pooled = sum(table.pooling != "none" for table in plan.pooled.values())
    others = len(plan.tables) + len(plan.pooled) - pooled
    return f"{pooled} pooled table(s)" + (f" and {others} without pooling" if others else "")


def _once(plan: Plan) -> str:
    once = sum(table.index_dedup for table in plan.tables.values())
    if not once:
        return ""
    return ", repeated ids sent once" + ("" if once == len(plan.tables) else f" ({once} of the tables)")


def _less_reserve(plan: Plan) -> str:
    budget = plan.settings.budget.strip()
    if budget == "neutral" or budget[0] in "+-" or not plan.cluster.reserve_bytes:
        return ""
    return f" less {units.format_bytes(plan.cluster.reserve_bytes)} reserve"


def _tiers_grid(plan: Plan) -> Grid:
    held_out = any(tier.covered_held_out is not None for table in plan.tables.values() for tier in table.tiers)
    numbers = ("group", "rows", "of table", "accesses", *(["held out"] if held_out else []), "reads/sample")
    details = ("reads/sample", "of table", "held out")
    grid = new_grid("Where the rows live", ["table", "strategy"], numbers, details)
    for table in list(plan.tables.values())[:_MOST_TABLES]:
        for index, tier in enumerate(table.tiers):
            cells = [
                table.name if index == 0 else "",
                tier.strategy + _behind(plan, table, tier),
                str(tier.group_size),
                f"{tier.rows:,}",
                f"{tier.rows / table.rows:.2%}",
                f"{tier.covered:.1%}",
            ]
            if held_out:
                cells.append("" if tier.covered_held_out is None else f"{tier.covered_held_out:.1%}")
            grid.add_row(*cells, f"{tier.coldest_p:.3g}")
    grid.caption = (
        "group: ranks that hold a row once between them; reads/sample: of the last row, on average; accesses: share of"
        " all reads" + (", held out: of samples that were not counted." if held_out else ".")
    )
    if len(plan.tables) > _MOST_TABLES:
        grid.caption += (
            f"\n... and {len(plan.tables) - _MOST_TABLES} more tables; 'flexshard explain PLAN TABLE' shows one"
        )
    return grid


def _behind(plan: Plan, table: TablePlan, tier: Tier) -> str:
    if table.cache is None or tier.group_size != plan.cluster.world_size:
        return ""
    return f", {table.cache.load_factor:.1%} in a cache"


def costs_grid(plan: Plan) -> Grid:
    """Predicted costs of the plan and of the baselines, per rank and iteration."""
    whole = ("step",) if plan.settings.objective == "step" else ()
    times = ("all-to-all", "all-reduce", "exposed", *whole, "vs row-wise")
    columns = ("memory", "static", "dynamic", "p99.9", "ids sent", *times)
    details = ("ids sent", "static", "dynamic", "all-reduce", "all-to-all")
    grid = new_grid("Predicted per rank and iteration", [""], columns, details)
    for name, cost in plan.costs.items():
        grid.add_row(name, *_cells(plan, cost))
    grid.caption = (
        "static: weights, optimizer states and copies; dynamic: rows, gradients and ids of a step, on average, and"
        " p99.9: at most, on the fullest rank, in 999 steps of 1,000; exposed: communication that other work does not"
        " hide."
    )
    beyond = {
        "cut tables of means by rows, which TorchRec would train wrongly": any(
            table.pooling == "mean" for table in plan.pooled.values()
        ),
        "keep to none of the job's constraints": bool(plan.settings.constraints),
    }
    if any(beyond.values()) and len(plan.costs) > 1:
        may = " and ".join(what for what, is_so in beyond.items() if is_so)
        grid.caption += f" The other lines may {may}, which this plan does not: they may take less than its bound."
    return grid


def calls_grid(plan: Plan) -> Grid:
    """What a step of the plan calls, and what that takes."""
    numbers = ("calls", "bytes", "fullest rank", "latency", "time", "hidden")
    grid = new_grid("What a step calls, per rank", ["collective", "carries"], numbers, ("latency", "hidden"))
    for one in plan.predicted.collectives:
        nbytes = one.calls * one.nbytes
        grid.add_row(
            one.name,
            one.content,
            str(one.calls),
            units.format_bytes(nbytes),
            f"{(one.nbytes + one.excess_bytes) / one.nbytes:.3g}x" if one.nbytes else "-",
            units.format_seconds(one.calls * one.alpha_seconds),
            units.format_seconds(one.seconds),
            f"{one.overlap:.0%}" if one.overlap else "",
        )
    if plan.predicted.index_dedup_seconds:
        found = units.format_seconds(plan.predicted.index_dedup_seconds)
        grid.caption = f"Finding the distinct ids of a batch takes {found} besides."
    return grid


def phases_grid(plan: Plan) -> Grid:
    """What a step takes, phase by phase, under the plan and row-wise."""
    grid = new_grid("A step, links at once in each phase", ["phase"], ["this plan", "waits for", "row_wise"])
    row_wise = {phase.name: phase.seconds for phase in plan.phases_of(plan.baselines["row_wise"])}
    for phase in plan.phases:
        slowest = max(phase.links, key=lambda link: phase.links[link])
        before = units.format_seconds(row_wise.get(phase.name, 0.0))
        grid.add_row(phase.name, units.format_seconds(phase.seconds), slowest, before)
    total = (plain_sum(phase.seconds for phase in plan.phases), plain_sum(row_wise.values()))
    grid.add_row("step", units.format_seconds(total[0]), "", units.format_seconds(total[1]))
    if plan.settings.dense_seconds is None:
        grid.caption = "Dense work is not known, and not in it."
    return grid


def _cells(plan: Plan, cost: Cost) -> list[str]:
    p999 = cost.dynamic_memory_p999_bytes
    seconds, row_wise = (plan.objective_seconds(one) for one in (cost, plan.baselines["row_wise"]))
    faster = row_wise / seconds if seconds else None
    return [
        units.format_bytes(cost.memory_bytes),
        units.format_bytes(cost.static_memory_bytes),
        units.format_bytes(cost.dynamic_memory_bytes),
        "n/a" if p999 is None else units.format_bytes(p999),
        units.format_count(round(cost.input_ids)),
        units.format_seconds(cost.dynamic_comm_seconds),
        units.format_seconds(cost.static_comm_seconds),
        units.format_seconds(cost.exposed_seconds),
        *([units.format_seconds(seconds)] if plan.settings.objective == "step" else []),
        "-" if faster is None else f"{faster:.2f}x",
    ]


def _proof(plan: Plan) -> list[Text]:
    cost = plan.objective_seconds(plan.predicted)
    if plan.settings.objective == "step":
        least = f"a step of less than {_exact(plan.lower_bound_seconds)}"
    else:
        least = f"less than {_exact(plan.lower_bound_seconds)} of exposed communication"
    proof = f"Proof: no plan within the budget has {least}; this one has {_exact(cost)}"
    lines = [f"{proof} (relative gap {plan.proven_gap:.2g})."]  # as a job's gap is meant
    if plan.settings.host_memory is not None and not plan.pooled:
        show = units.format_bytes
        taken = f"{show(plan.predicted.host_memory_bytes)} of {show(plan.settings.host_memory)}"
        lines.append(
            f"Host's memory: {taken} per rank. Rows stay in a cache for one of {len(BATCHES)} numbers of batches"
            f" ({BATCHES[0]} to {BATCHES[-1]:,}), and the proof is of these."
        )
    if plan.pooled or (plan.settings.method == "optimal" and plan.next_gib_seconds is None):
        lines.append(f"Memory: {at_the_margin(plan.memory_price_seconds_per_gib)}.")
    elif plan.settings.method == "optimal":
        saved = cost - (plan.next_gib_seconds if plan.next_gib_seconds is not None else cost)
        lines.append(f"Memory: {worth_of_memory(plan, saved)}.")
    if plan.predicted.fullest_dynamic_bytes is not None:
        show, order = units.format_bytes, plan.settings.sample_order
        samples = "samples shuffled" if order == "shuffled" else "samples in the order that was profiled"
        lines.append(
            f"Fullest rank: {show(plan.predicted.static_memory_bytes)} static, and in 99.9% of steps at most"
            f" {show(plan.predicted.fullest_dynamic_bytes)} of rows, gradients and ids ({samples})."
        )
    usable = plan.cluster.hbm_bytes - plan.cluster.reserve_bytes
    p999 = plan.predicted.dynamic_memory_p999_bytes
    peak = plan.predicted.static_memory_bytes + (plan.predicted.dynamic_memory_bytes if p999 is None else p999)
    if peak > usable:
        lines.append(
            f"Warning: {units.format_bytes(peak)} per rank {'expected' if p999 is None else 'at p99.9'} is more than"
            f" the {units.format_bytes(usable)} that {plan.cluster.name} leaves to embeddings; it may run out."
        )
    return [Text(line) for line in lines]


def worth_of_memory(plan: Plan, saved_by_a_gib: float) -> str:
    """What more memory would save, in words."""
    if saved_by_a_gib <= 1e-9 * plan.objective_seconds(plan.predicted):
        return "one more GiB per rank would save nothing"
    price = plan.memory_price_seconds_per_gib
    margin = f"at the margin {units.format_seconds(price)} per GiB" if price else "a little more would save nothing"
    return f"one more GiB per rank would save {units.format_seconds(saved_by_a_gib)} per iteration ({margin})"


def _exact(seconds: float) -> str:
    return f"{seconds * 1e3:.4f} ms"


def cache_line(plan: Plan, table: TablePlan) -> str:
    """What a table's cache holds and moves, in words."""
    cache, bandwidth = table.cache, plan.cluster.host_bytes_per_s
    assert cache is not None
    assert bandwidth is not None
    row_bytes, world = table.row_bytes * table.kappa_sharded, plan.cluster.world_size
    rows = sum(tier.rows for tier in table.tiers if tier.group_size == world)
    seconds = 2 * row_bytes * cache.fetched / bandwidth
    return (
        f"Rows without copies are in the host's memory ({units.format_bytes(row_bytes * rows / world)} per rank),"
        f" behind a cache of {cache.rows:,.0f} of them on each rank ({cache.load_factor:.2%}), where a row stays for"
        f" {cache.batches} batches: {cache.fetched:,.0f} rows come and go in a step,"
        f" {units.format_seconds(seconds)} of the host's link."
    )


def table_heading(table: TablePlan) -> str:
    """One line that says what a table is."""
    return (
        f"{table.name}: {table.rows:,} rows x {table.dim} {table.dtype}, {table.optimizer}. A sample reads"
        f" {table.avg_length:.4g} of them on average (L); a copy of a row takes {table.kappa_replicated:.4g} bytes per"
        " byte of its weights, with optimizer state and buffers of gradients (κ)."
    )
