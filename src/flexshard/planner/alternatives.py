"""What else each table could have, everything else as planned."""

from __future__ import annotations

import numpy as np

from flexshard.planner.plan import Alternative
from flexshard.planner.solver.instance import Allocation, Instance
from flexshard.planner.solver.thresholds import allocate

__all__ = ["alternatives_of"]


def alternatives_of(
    instance: Instance, allocation: Allocation, limit: float, price: float, tiers: int, keep: int = 3
) -> list[tuple[Alternative, ...]]:
    """For each table, the next best sets of group sizes at the plan's price of memory."""
    chosen_seconds, chosen_memory = instance.per_table(allocation)
    spare_bytes = limit - instance.held_bytes - float(chosen_memory.sum())
    used = allocation.any(axis=0)
    elsewhere = (allocation > 0).sum(axis=0) - (allocation > 0) > 0
    choices: list[dict[tuple[int, ...], Alternative]] = [{} for _ in instance.tables]
    for levels in instance.level_subsets(tiers):
        other, _ = allocate(instance, levels, price if price > 0 else 1e-30)
        seconds, memory = instance.per_table(other)
        # Collectives that no other table uses come and go with this one, and their latency with them.
        after = elsewhere | (other > 0)
        added_seconds = seconds - chosen_seconds + (after.astype(np.int64) - used) @ instance.alpha_seconds
        added_memory = memory - chosen_memory
        fits = added_memory <= spare_bytes
        differs = ((other > 0) != (allocation > 0)).any(axis=1) & (after.sum(axis=1) <= tiers)
        for index in np.flatnonzero(differs).tolist():
            sizes = tuple(int(g) for g in instance.group_sizes[other[index] > 0])
            priced = float(added_seconds[index] + price * added_memory[index])
            best = choices[index].get(sizes)
            if best is None or priced < best.priced_seconds:
                choices[index][sizes] = Alternative(
                    sizes, float(added_seconds[index]), float(added_memory[index]), priced, bool(fits[index])
                )
    return [
        tuple(sorted(entries.values(), key=lambda entry: (entry.priced_seconds, entry.group_sizes))[:keep])
        for entries in choices
    ]
