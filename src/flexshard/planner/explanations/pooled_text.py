"""Tables of a plan that TorchRec shards in words: where they are, why, and what else they could be."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from flexshard import units
from flexshard._internal import Grid, new_grid, plain_sum
from flexshard.planner.plan import Plan
from flexshard.planner.pooled_plan import PooledAlternative, PooledShard, PooledTablePlan

__all__ = ["PooledExplanation", "asked_of", "at_the_margin", "explain_pooled", "pooled_grid", "ranks_in_words"]

_MOST_TABLES, _RANKS_NAMED = 40, 6
_UNEVEN = 1.2  # times the mean, of shards


@dataclass(frozen=True)
class PooledExplanation:
    """Why a table that TorchRec shards is sharded as it is.

    Attributes:
        table: the table's part of the plan.
        memory_price_seconds_per_gib: what memory is worth to the whole plan.
        text: all of it in sentences.
    """

    table: PooledTablePlan
    memory_price_seconds_per_gib: float
    text: str

    def document(self) -> dict[str, Any]:
        """The explanation as a mapping for machines."""
        return asdict(self)


def pooled_grid(plan: Plan) -> Grid:
    """How tables are sharded that are not in tiers of rows, and where."""
    numbers = ("shards", "memory of a rank", "busy")
    texts = ["table", "sharding type", "kernel", "ranks"]
    pooled = all(table.pooling != "none" for table in plan.pooled.values())
    title = "How pooled tables are sharded" if pooled else "How TorchRec shards tables"
    grid = new_grid(title, texts, numbers, ("shards", "busy", "kernel"))
    for table in list(plan.pooled.values())[:_MOST_TABLES]:
        nbytes, seconds = (_of_fullest_rank(table, what) for what in ("memory_bytes", "seconds"))
        grid.add_row(
            table.name,
            table.sharding_type,
            _kernel(table),
            ranks_in_words(table.ranks, plan.cluster.world_size),
            str(len(table.shards)),
            units.format_bytes(nbytes),
            units.format_seconds(seconds),
        )
    more = len(plan.pooled) - _MOST_TABLES
    captions = [f"... and {more} more tables; 'flexshard explain PLAN TABLE' shows one"] if more > 0 else []
    if plan.pooled_predicted is not None and plan.pooled_predicted.host_memory_bytes:
        held = units.format_bytes(plan.pooled_predicted.host_memory_bytes)
        captions.append(f"{held} of host memory on the fullest rank. Kernels with UVM run on CUDA alone.")
    grid.caption = "\n".join(captions) or None
    return grid


def _of_fullest_rank(table: PooledTablePlan, what: str) -> float:
    """Of all shards of a table that the rank has which has most."""
    found: dict[int, float] = {}
    for shard in table.shards:
        found[shard.rank] = found.get(shard.rank, 0.0) + float(getattr(shard, what))
    return max(found.values())


def explain_pooled(plan: Plan, table: PooledTablePlan) -> PooledExplanation:
    """Explain such a table from the plan alone."""
    world = plan.cluster.world_size
    shards = len(table.shards)
    widest = max(table.shards, key=lambda shard: shard.seconds)
    lines = [
        (
            f"{table.name}: {table.rows:,} rows x {table.dim} {table.dtype}, {table.optimizer},"
            f" {'' if table.pooling == 'none' else f'{table.pooling} of '}L = {table.avg_length:.4g} rows per sample"
        ),
        "",
        (
            f"{table.sharding_type} with kernel {_kernel(table)}: {shards} shard{'s' if shards > 1 else ''} of"
            f" {widest.rows:,} x {widest.columns} on {ranks_in_words(table.ranks, world)}"
        ),
        (
            f"  A shard keeps its rank and links busy for {units.format_seconds(widest.seconds)} of a step and takes"
            f" {units.format_bytes(max(shard.memory_bytes for shard in table.shards))} of its memory"
            f"{_host(max(shard.host_bytes for shard in table.shards))}."
        ),
        *_uneven(table, widest),
        *_company(plan, table),
        "",
    ]
    if table.alternatives:
        lines.append("Next best ways of sharding it, for an average rank:")
        lines += [f"  {_alternative(one)}" for one in table.alternatives]
        if table.alternatives[0].priced_seconds < 0:
            lines.append(
                "  What takes less on average would make the busiest rank busier, not fit beside the other tables'"
                f" shards{', not lie where constraints ask' if plan.settings.constraints else ''}, or start collectives"
                " that no table of the plan needs."
            )
    elif any("flex_shard" in one for one in asked_of(plan, table.name)):
        lines.append(
            "There is no other way of sharding it but tiers of rows, with which the whole plan would take longer, or"
            " not fit."
        )
    else:
        lines.append("There is no other way of sharding it: constraints and the cluster leave this one.")
    price = plan.memory_price_seconds_per_gib
    whole = units.format_seconds(plan.objective_seconds(plan.predicted))
    lines.append(f"For the whole plan of {whole} per iteration, {at_the_margin(price)}.")
    lines += asked_of(plan, table.name)
    return PooledExplanation(table, price, "\n".join(lines))


def _uneven(table: PooledTablePlan, busiest: PooledShard) -> list[str]:
    """That some of its shards are read more than others, where they are."""
    mean = plain_sum(shard.seconds for shard in table.shards) / len(table.shards)
    if busiest.seconds <= _UNEVEN * mean:
        return []
    first, last = busiest.first_row, busiest.first_row + busiest.rows - 1
    words = f"{busiest.seconds / mean:.1f} times the mean of them: its rows are read most"
    return [f"  That is the one of rows {first:,} to {last:,}, {words}."]


def asked_of(plan: Plan, table: str) -> list[str]:
    """Constraints of a table in a sentence, if there are any."""
    asked = [one for one in plan.settings.constraints if one.startswith(f"{table}: ")]
    return [f"Asked of it: {one.removeprefix(f'{table}: ')}." for one in asked]


def ranks_in_words(ranks: tuple[int, ...], world: int) -> str:
    """Such as "rank 3", "ranks 0, 4" or "all 8 ranks"."""
    if len(ranks) == world:
        return f"all {world} ranks" if world > 1 else "the only rank"
    first, last = ranks[0], ranks[-1]
    if len(ranks) > 2 and last - first == len(ranks) - 1:
        return f"ranks {first} to {last}"
    named = ", ".join(map(str, ranks[:_RANKS_NAMED])) + (", ..." if len(ranks) > _RANKS_NAMED else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {named}"


def _kernel(table: PooledTablePlan | PooledAlternative) -> str:
    cached = table.cache_load_factor
    return table.compute_kernel + ("" if cached is None else f" ({cached:.0%} cached)")


def _host(nbytes: float) -> str:
    return f" and {units.format_bytes(nbytes)} of host memory" if nbytes else ""


def _company(plan: Plan, table: PooledTablePlan) -> list[str]:
    """Who shares its rank, where it lies on one alone."""
    if len(table.ranks) > 1:
        return []
    (rank,) = table.ranks
    others = [
        one.name for one in plan.pooled.values() if one.name != table.name and rank in one.ranks and len(one.ranks) == 1
    ]
    busy = plain_sum(shard.seconds for one in plan.pooled.values() for shard in one.shards if shard.rank == rank)
    named = ", ".join(others[:_RANKS_NAMED]) + (", ..." if len(others) > _RANKS_NAMED else "")
    beside = f" beside {named}" if others else ", alone of all whole tables"
    return [f"  On rank {rank}{beside}; TorchRec's tables keep it busy for {units.format_seconds(busy)} in all."]


def _alternative(one: PooledAlternative) -> str:
    def signed(value: float, text: str) -> str:
        return f"{'+' if value >= 0 else '-'}{text}"

    held = "" if one.dtype is None else f" in {one.dtype}"
    return (
        f"{one.sharding_type} with {_kernel(one)}{held}: {signed(one.seconds, units.format_seconds(abs(one.seconds)))},"
        f" {signed(one.memory_bytes, units.format_bytes(abs(one.memory_bytes)))};"
        f" {signed(one.priced_seconds, units.format_seconds(abs(one.priced_seconds)))} at the price of memory"
    )


def at_the_margin(price_seconds_per_gib: float) -> str:
    """What a dual price says of memory, which is no more than of a little of it."""
    if not price_seconds_per_gib:
        return "a little more memory would not lower the bound; much more may"
    price = units.format_seconds(price_seconds_per_gib)
    return f"a little more memory would lower the bound, at a rate of {price} per GiB and rank"
