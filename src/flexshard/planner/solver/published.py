"""The published algorithm (FlexShard paper, sections 4.3 and 4.5), kept so that results can be compared with it.

Three tiers: rows are replicated (DP) down to the memory-neutral breakpoint, then split within the node (Flex) until
the memory that DP saved is spent or Flex meets its communication breakpoint, then row-wise. Two tiers: DP until its
savings are spent again, or to its communication breakpoint. Rows of all tables are taken as one distribution (section
4.6). Latencies are not considered.

Where the user says nothing of overlap, Flex's breakpoint is the paper's own: it counts the intra-node all-to-all and
the cross-node all-reduce as overlapped (Table 6), so that Flex beats row-wise for any row that is read. Table 5
confirms it: under the fitted times of Table 6 without overlap, RM-2's Flex tier would end at a third of the published
rows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flexshard import units
from flexshard.errors import BudgetError
from flexshard.planner.solver.bisection import bisect_floats, bits_alike
from flexshard.planner.solver.instance import Allocation, Instance, memory_limit
from flexshard.planner.solver.rounding import fill
from flexshard.planner.solver.thresholds import allocation_of_cuts

__all__ = ["solve_published"]

_LEAST_READS = float(np.nextafter(0.0, 1.0))

FloatArray = npt.NDArray[np.float64]


def solve_published(instance: Instance, budget_bytes: float, tiers: int) -> Allocation:
    """The paper's 2-tier or 3-tier sharding within a memory budget.

    Args:
        tiers: 2 for DP and RW; 3 for DP, Flex and RW (as 2 where the cluster is one node, or nodes are one rank).

    Raises:
        BudgetError: even the sharding that saves most memory does not fit.
    """
    sizes = instance.group_sizes.tolist()
    data_parallel, row_wise = sizes.index(1), sizes.index(instance.cluster.world_size)
    node = instance.cluster.ranks_per_node
    flex = sizes.index(node) if tiers == 3 and node not in (1, instance.cluster.world_size) else None
    if data_parallel == row_wise:
        return instance.uniform(1)
    saving = _memory_neutral(instance, data_parallel, row_wise)
    spending = data_parallel if flex is None else flex
    lowest = np.minimum(saving, _communication_neutral(instance, spending, row_wise))
    levels = np.array([data_parallel, row_wise] if flex is None else [data_parallel, flex, row_wise])

    limit = memory_limit(budget_bytes)

    def shard(mark: float) -> Allocation:
        """Spend savings on rows whose w is at least ``mark``."""
        spent_down_to = np.clip(mark, lowest, saving)
        marks = spent_down_to[:, None] if flex is None else np.stack([saving, spent_down_to], axis=1)
        cuts, _ = instance.of_groups(instance.groups_at_least(marks[instance.table_class]))
        return allocation_of_cuts(instance, levels, cuts)

    def fits(allocation: Allocation) -> bool:
        return instance.memory_bytes(allocation) <= limit

    thrifty = shard(np.inf)
    if not fits(thrifty):
        least = instance.memory_bytes(thrifty)
        raise BudgetError(
            f"the paper's sharding needs at least {units.format_bytes(least)} ({np.ceil(least):,.0f} bytes) per rank,"
            f" more than the budget of {units.format_bytes(budget_bytes)}; raise the budget or use more ranks",
            least,
        )
    if fits(shard(0.0)):
        return shard(0.0)
    bits = bits_alike(instance.reads.size)
    low, high = bisect_floats(0.0, float(saving.max()), lambda mark: fits(shard(mark)), bits=bits)
    return fill(instance, shard(high), shard(low), limit)


def _memory_neutral(instance: Instance, level: int, row_wise: int) -> FloatArray:
    """The w at which a level needs as much memory as row-wise, per class; inf if never."""
    above = instance.memory_fixed[:, level] - instance.memory_fixed[:, row_wise]
    gained = instance.memory_per_read[row_wise] - instance.memory_per_read[level]
    return np.where(above <= 0, 0.0, above / gained if gained > 0 else np.inf)


def _communication_neutral(instance: Instance, level: int, row_wise: int) -> FloatArray:
    """The w at which a level takes as long as row-wise, per class; inf if never. Unread rows gain nothing."""
    fixed, per_read = instance.comm_fixed[:, level], instance.comm_per_read[:, level]
    if not instance.overlap and instance.group_sizes[level] > 1:
        fixed = per_read = np.zeros_like(fixed)
    gained = instance.comm_per_read[:, row_wise] - per_read
    crossing = np.divide(fixed, gained, out=np.full_like(fixed, np.inf), where=gained > 0)
    return np.maximum(crossing, _LEAST_READS)
