"""Whole tables to ranks, the one that takes longest first, as people do by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flexshard.costmodels import PooledCosts, PooledOption

__all__ = ["table_wise_ranks"]


def table_wise_ranks(costs: PooledCosts, options: Sequence[PooledOption], world: int) -> list[int]:
    """A rank for each table: that which is least busy, and of those the one that holds least."""
    seconds = [float(costs.seconds(one).sum()) for one in options]
    nbytes = [float(one.static_bytes.sum()) for one in options]
    busy, held, found = np.zeros(world), np.zeros(world), [0] * len(options)
    for table in sorted(range(len(options)), key=lambda one: (-seconds[one], -nbytes[one], one)):
        rank = int(np.lexsort((np.arange(world), held, busy))[0])
        busy[rank] += seconds[table]
        held[rank] += nbytes[table]
        found[table] = rank
    return found
