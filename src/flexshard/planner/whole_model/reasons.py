"""Why a table of a whole-model plan is where it is."""

from __future__ import annotations

import numpy as np

from flexshard import units
from flexshard.planner.whole_model.lagrangian import lagrangian_bound
from flexshard.planner.whole_model.master import Assignment
from flexshard.planner.whole_model.menus import Menus, Option

__all__ = ["explain_table"]

_RANKS_NAMED = 8
_OTHERS = 3


def explain_table(menus: Menus, plan: Assignment, table: str, unit: str) -> str:
    """The option chosen and its ranks, what its bytes are worth, and the next best options.

    Args:
        menus: what was chosen from.
        plan: of these menus.
        table: one of ``menus.tables``.
        unit: of costs, such as "ms".

    Raises:
        KeyError: there is no such table.
    """
    if table not in menus.tables:
        raise KeyError(table)
    position = menus.tables.index(table)
    menu, ranks = menus.options[position], plan.ranks[position]
    chosen = next(option for option in menu if option.source == plan.choice[position])
    prices = lagrangian_bound(menus).per_byte
    worth = [
        f"a little more {kind} per rank would save {price * 2**30:.3g} {unit} per GiB"
        for price, kind in zip(prices, menus.kinds, strict=True)
        if price > 0
    ]

    def priced(option: Option) -> float:
        return float(option.perf.sum() + prices @ option.memory.sum(axis=1)) / menus.ranks

    lines = [
        f"{table}: {chosen.name} on {_ranks(ranks, menus.ranks)}",
        f"  {_figures(chosen, menus, unit)}",
        f"  at the bound's prices {', '.join(worth)}"
        if worth
        else "  at the bound's prices a little more memory saves nothing; much more may",
    ]
    others: list[Option] = []
    for option in sorted(menu, key=priced):
        if not any(_alike(option, other) for other in (chosen, *others)):
            others.append(option)
    for option in others[:_OTHERS]:
        difference = priced(option) - priced(chosen)
        than = f"{difference:.3g} {unit} more" if difference >= 0 else f"{-difference:.3g} {unit} less"
        lines.append(f"  instead {option.name}: {_figures(option, menus, unit)}; {than} per rank, bytes paid for")
    if len(menu) == 1:
        lines.append("  nothing else was allowed or fits")
    if others and priced(others[0]) < priced(chosen):
        lines.append("  (what is cheaper may not fit beside the other tables' shards, or make a rank the slowest)")
    return "\n".join(lines)


def _ranks(ranks: tuple[int, ...], world: int) -> str:
    distinct = sorted(set(ranks))
    if len(distinct) == world:
        return f"all {world} ranks"
    named = ", ".join(map(str, distinct[:_RANKS_NAMED])) + (", ..." if len(distinct) > _RANKS_NAMED else "")
    return f"rank {named}" if len(distinct) == 1 else f"ranks {named}"


def _figures(option: Option, menus: Menus, unit: str) -> str:
    """Cost and bytes of an option's dearest shard."""
    shards = option.shards
    parts = [f"{option.perf.max(initial=0.0):.4g} {unit}"] + [
        f"{units.format_bytes(float(option.memory[kind].max(initial=0.0)))} of {name}"
        for kind, name in enumerate(menus.kinds)
        if option.memory[kind].any()
    ]
    return f"{', '.join(parts)}" + (f" in each of {shards} shards" if shards > 1 else "")


def _alike(one: Option, other: Option) -> bool:
    """Whether options cost and weigh the same, shard by shard."""
    return np.array_equal(one.perf, other.perf) and np.array_equal(one.memory, other.memory)
