"""Why no plan fits."""

from __future__ import annotations

import numpy as np

from flexshard import units
from flexshard.errors import BudgetError
from flexshard.planner.whole_model.menus import HBM, Menus, Spread

__all__ = ["budget_error"]

_NAMED = 3


def budget_error(menus: Menus, *, refuted: bool, timed_out: bool = False) -> BudgetError:
    """The tables, and by how many bytes they are too large, as far as a table or sums over all of them show it.

    Args:
        menus: all that was given.
        refuted: whether sums over all ranks have shown that nothing fits.
        timed_out: whether it was not looked for to the end.
    """
    room, mean = menus.capacity, menus.capacity.mean(axis=1)
    least = [  # of each kind of memory, what each table needs in all
        np.array([min((float(option.memory[kind].sum()) for option in menu), default=0.0) for menu in menus.options])
        for kind in range(len(menus.kinds))
    ]
    by_sums = refuted or any(needs.sum() > room[kind].sum() for kind, needs in enumerate(least))
    # A table all of whose options are, in some kind of memory, larger than all ranks together.
    total = room.sum(axis=1)
    by_sums |= any(menu and all((o.memory.sum(axis=1) > total).any() for o in menu) for menu in menus.options)
    each = {name: float(needs.sum()) / menus.ranks for name, needs in zip(menus.kinds, least, strict=True)}
    (received, lacking), has_hbm = menus.received, HBM in menus.kinds
    besides = (
        f", besides {units.format_bytes(received)} that every rank receives, of which a smaller batch makes less"
        if received
        else ""
    )
    per_rank = each.get(HBM, max(each.values(), default=0.0)) + (received if has_hbm else 0.0)
    for name, menu in zip(menus.tables, menus.options, strict=True):
        if not menu:
            return BudgetError(f"table {name!r} has no option; its constraints leave none", per_rank, by_sums)
        for kind, kind_name in enumerate(menus.kinds):
            shard = min(float(option.memory[kind].max(initial=0.0)) for option in menu)
            beyond = shard - float(room[kind].max(initial=0.0)) + (lacking if kind_name == HBM else 0.0)
            if beyond > 0:
                # Tiers of rows and tensor trains are on every rank in any case.
                alike = all(option.spread is Spread.EVERY_RANK for option in menu)
                other = "" if alike else "; allow it further sharding types, or kernels in host memory"
                of_hbm = kind_name == HBM
                return BudgetError(
                    f"table {name!r}: whatever way it is {'held' if alike else 'sharded'}, a rank needs"
                    f" {units.format_bytes(shard)} of {kind_name} for it{besides if of_hbm else ''},"
                    f" {units.format_bytes(beyond)} more than any has{other}",
                    max(shard + received, per_rank) if of_hbm else shard if not has_hbm else per_rank,
                    by_sums,
                )
    for kind, kind_name in enumerate(menus.kinds):
        of_hbm = kind_name == HBM
        beyond = float(least[kind].sum() - room[kind].sum()) + (lacking * menus.ranks if of_hbm else 0.0)
        if beyond > 0:
            order = np.argsort(-least[kind], kind="stable")[:_NAMED]
            largest = ", ".join(menus.tables[table] for table in order if least[kind][table])
            return BudgetError(
                f"the tables need {units.format_bytes(float(least[kind].sum()))} of {kind_name} at least"
                f"{besides if of_hbm else ''}, {units.format_bytes(beyond)} more than all ranks have; the largest are"
                f" {largest}",
                per_rank,
            )
    if timed_out and not by_sums:
        return BudgetError(
            "no plan that fits was found before time was up, and there may be one; allow more time", per_rank, by_sums
        )
    amounts = " and ".join(
        f"{units.format_bytes(float(mean[kind]) + (received if name == HBM else 0.0))} of {name}"
        for kind, name in enumerate(menus.kinds)
        if _is_held(name)
    )
    return BudgetError(
        f"no choice of options was found that fits {amounts} per rank, though the least that the tables need together, "
        f"{units.format_bytes(per_rank)}, is no more; leave ranks more room, or tables more options",
        per_rank,
        by_sums,
    )


def _is_held(kind: str) -> bool:
    """Whether a kind of memory is one: tables that are to be apart, and losses, count as if they were."""
    return kind != "loss" and " apart from " not in kind
