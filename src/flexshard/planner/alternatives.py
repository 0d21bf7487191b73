"""What else each table could have, everything else as planned."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flexshard.planner.plan import Alternative
from flexshard.planner.reductions import Reduction
from flexshard.planner.solver.gathered import saved_of_tiers
from flexshard.planner.solver.instance import Allocation, Instance
from flexshard.planner.solver.thresholds import allocate

__all__ = ["alternatives_of"]


def alternatives_of(
    instance: Instance,
    allocation: Allocation,
    limit: float,
    price: float,
    tiers: int,
    reduction: Reduction,
    keep: int = 3,
) -> list[tuple[Alternative, ...]]:
    """For each table, the next best sets of group sizes at the plan's price of memory."""

    def of_tables(placed: Allocation) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Seconds and memory of each table."""
        seconds, memory = instance.per_table(placed)
        if reduction != "dense":
            sparse = reduction.sparse_tiers(instance, placed)
            seconds = seconds - np.where(sparse, saved_of_tiers(instance, placed), 0.0).sum(axis=1)
        return seconds, memory

    chosen_seconds, chosen_memory = of_tables(allocation)
    spare_bytes = limit - instance.held_bytes - float(chosen_memory.sum())
    used = allocation.any(axis=0)
    elsewhere = (allocation > 0).sum(axis=0) - (allocation > 0) > 0
    hot = instance.hot_seconds_per_read * instance.hottest_reads(allocation)
    excess, hottest_elsewhere = float(hot.max(axis=0).sum()), _largest_of_others(hot)
    choices: list[dict[tuple[int, ...], Alternative]] = [{} for _ in instance.tables]
    for levels in instance.level_subsets(tiers):
        other, _ = allocate(instance, levels, price if price > 0 else 1e-30)
        seconds, memory = of_tables(other)
        # Collectives that no other table uses come and go with this one, and their latency with them.
        after = elsewhere | (other > 0)
        added_seconds = seconds - chosen_seconds + (after.astype(np.int64) - used) @ instance.alpha_seconds
        other_hot = instance.hot_seconds_per_read * instance.hottest_reads(other)
        added_seconds += np.maximum(hottest_elsewhere, other_hot).sum(axis=1) - excess
        added_memory = memory - chosen_memory
        priced_seconds = added_seconds + price * added_memory
        held, fits = other > 0, added_memory <= spare_bytes
        sizes_of = {one.tobytes(): tuple(instance.group_sizes[one].tolist()) for one in np.unique(held, axis=0)}
        differs = (held != (allocation > 0)).any(axis=1) & (after.sum(axis=1) <= tiers)
        columns = (  # numbers of Python, all at once
            values[differs].tolist()
            for values in (np.arange(differs.size), added_seconds, added_memory, priced_seconds, fits)
        )
        for index, more_seconds, more_memory, priced, fit in zip(*columns, strict=True):
            sizes = sizes_of[held[index].tobytes()]
            best = choices[index].get(sizes)
            if best is None or priced < best.priced_seconds:
                choices[index][sizes] = Alternative(sizes, more_seconds, more_memory, priced, fit)
    return [
        tuple(sorted(entries.values(), key=lambda entry: (entry.priced_seconds, entry.group_sizes))[:keep])
        for entries in choices
    ]


def _largest_of_others(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Of each column, the largest value but for the row's own (at least 0); shape as given."""
    first = values.argmax(axis=0)
    rest = values.copy()
    rest[first, np.arange(values.shape[1])] = 0.0
    own = np.arange(len(values))[:, None] == first
    return np.asarray(np.where(own, rest.max(axis=0), values.max(axis=0)))
