"""Tables that may be tensor trains or tiers of rows, as arrays: what every option costs, and what fits at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from flexshard import units
from flexshard.costmodels import TTRates, TTReads, hidden_share, tensor_train_cost
from flexshard.errors import BudgetError, JobError
from flexshard.planner.compression.decision import TTOption
from flexshard.planner.solver.instance import Allocation, Instance, memory_limit
from flexshard.planner.solver.thresholds import allocate
from flexshard.tables import Table

__all__ = ["ChoiceProblem", "Options", "check_options", "choice_problem", "feasible_subsets"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Options:
    """Tensor trains of all tables, one after the other; shape (n,) each.

    Attributes:
        table: of each.
        memory, compute, comm, loss: what it costs.
    """

    table: IntArray
    memory: FloatArray
    compute: FloatArray
    comm: FloatArray
    loss: FloatArray

    @property
    def seconds(self) -> FloatArray:
        """Compute and communication."""
        return self.compute + self.comm


@dataclass(frozen=True, eq=False)
class ChoiceProblem:
    """All that the choice depends on.

    Attributes:
        instance: of all tables, as if none were compressed.
        options: tensor trains.
        lookups: compute of each table as tiers of rows; shape (T,).
        latency: of the all-reduce of cores, if there are any.
        limit: bytes per rank.
        loss_limit: most loss of all together; infinite for any.
    """

    instance: Instance
    options: Options
    lookups: FloatArray
    latency: float
    limit: float
    loss_limit: float

    def tiers(self, levels: IntArray, price: float) -> tuple[FloatArray, FloatArray]:
        """Seconds (lookups, communication) and memory of each table as tiers of rows at a price; shape (T,) each."""
        return self.placed(allocate(self.instance, levels, price)[0])

    def placed(self, allocation: Allocation) -> tuple[FloatArray, FloatArray]:
        """Seconds and memory of each table, as for :meth:`tiers`, as some allocation places it; shape (T,) each."""
        seconds, memory = self.instance.per_table(allocation)
        return seconds + self.lookups, memory + self.instance.table_held_bytes

    @cached_property
    def row_wise_bytes(self) -> FloatArray:
        """Memory of each table row-wise: what "neutral" is; shape (T,)."""
        return self.placed(self.instance.uniform(self.instance.cluster.world_size))[1]


def check_options(tables: Sequence[Table], options: Mapping[str, Sequence[TTOption]]) -> None:
    """Whether options are of tables that there are.

    Raises:
        JobError: one is of a table that is not there, or of another shape.
    """
    known = {table.name: table for table in tables}
    for name, offered in options.items():
        if name not in known:
            raise JobError(f"options are given for table {name!r}, which is not there; there are {', '.join(known)}")
        table = known[name]
        if isinstance(offered, TTOption) or not all(isinstance(option, TTOption) for option in offered):
            raise JobError(f"options of table {name!r} must be a list of TTOption, found {offered!r}")
        for shape in (option.shape for option in offered):
            if (shape.num_embeddings, shape.embedding_dim) != (table.rows, table.dim):
                raise JobError(
                    f"table {name!r} has {table.rows:,} rows of {table.dim}, an option is for"
                    f" {shape.num_embeddings:,} rows of {shape.embedding_dim}"
                )


def choice_problem(
    instance: Instance,
    options: Mapping[str, Sequence[TTOption]],
    rates: TTRates,
    hashed: bool,
    limit: float,
    loss_limit: float | None,
) -> ChoiceProblem:
    """All options of all tables; arguments as for :func:`plan_compression`.

    Raises:
        JobError: options of a table that is not there, or of another shape.
    """
    check_options(instance.tables, options)
    index_of = {table.name: index for index, table in enumerate(instance.tables)}
    of, memory, compute, comm, loss = [], [], [], [], []
    for name, offered in options.items():
        table = instance.tables[index_of[name]]
        for option in offered:
            shape = option.shape
            reads = TTReads.expected(table, instance.batch_size, shape, hashed=hashed)
            cost = tensor_train_cost(table, instance.cluster, shape, reads, overlap=instance.overlap)
            of.append(index_of[name])
            memory.append(cost.memory_bytes)
            compute.append(rates.step_seconds(shape, reads))
            comm.append(sum((1.0 - c.overlap) * c.nbytes / c.bytes_per_s for c in cost.collectives))
            loss.append(option.loss)
    reads_of = instance.total_reads
    lookups = [
        rates.dense_seconds(float(n), t.dim, t.rows, dtype=t.dtype, optimizer=t.optimizer, length=t.profile.avg_length)
        for n, t in zip(reads_of, instance.tables, strict=True)
    ]
    all_reduce = instance.cluster.level(1).all_reduce
    hidden = hidden_share(instance.overlap, "all_reduce", 1, "replicas")
    return ChoiceProblem(
        instance,
        Options(np.array(of, np.int64), *(np.array(v, np.float64) for v in (memory, compute, comm, loss))),
        np.array(lookups),
        0.0 if all_reduce is None else (1.0 - hidden) * all_reduce.alpha_seconds,
        limit,
        np.inf if loss_limit is None else loss_limit,
    )


def feasible_subsets(problem: ChoiceProblem, tiers: int) -> list[IntArray | None]:
    """Subsets of levels with which some choice fits, losses aside; None stands for all tables compressed."""
    subsets: list[IntArray | None] = [*problem.instance.level_subsets(tiers), None]
    least = [float(_least_memory(problem, levels).sum()) for levels in subsets]
    if min(least) > memory_limit(problem.limit):
        raise BudgetError(
            f"no choice of tensor trains and tiers fits {units.format_bytes(problem.limit)} per rank; the least is"
            f" {units.format_bytes(min(least))} ({np.ceil(min(least)):,.0f} bytes): raise the budget, or offer smaller"
            " ranks",
            min(least),
        )
    return [subset for subset, memory in zip(subsets, least, strict=True) if memory <= memory_limit(problem.limit)]


def _least_memory(problem: ChoiceProblem, levels: IntArray | None) -> FloatArray:
    """Of each table, compressed or in tiers of some levels (None: compressed); shape (T,)."""
    count = len(problem.instance.tables)
    least = np.full(count, np.inf) if levels is None else problem.tiers(levels, np.inf)[1]
    np.minimum.at(least, problem.options.table, problem.options.memory)
    return least
