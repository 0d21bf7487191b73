"""Which tables to compress, to which rank: the least predicted step within a budget, by a mixed-integer program.

Every table is one of its tensor trains, or tiers of rows. What tiers of rows cost at different prices of memory are
the corners of a convex curve, so a table's share of them is linear between two corners and the program needs integers
for tensor trains alone. Latencies are paid per level that is used, so each subset of levels is a program of its own,
as in :mod:`flexshard.planner._solver`. The tables that stay are then planned exactly, row by row. A Lagrangian bound
says how far any choice could be below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexshard import units
from flexshard._values import finite, whole
from flexshard.costmodels import OverlapLike, Table, TTRates, TTReads, tensor_train_cost
from flexshard.errors import BudgetError, JobError, SolverError
from flexshard.planner._compression import CompressionPlan, TableChoice, TableOption, TTOption
from flexshard.planner._instance import Instance, build_instance, memory_limit
from flexshard.planner._plan import Plan
from flexshard.planner._solve import budget_bytes, per_table, solve
from flexshard.planner._thresholds import allocate, crossing_prices
from flexshard.topologies import Cluster

__all__ = ["plan_compression"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

Choice = tuple[int, ...]  # of each table: a place among all options, or -1

_CUTS = 50  # choices that fit the solver's tolerance only, before giving up
_PRICES = 32  # corners of a table's curve to look at, per pair of levels


@dataclass(frozen=True, eq=False)
class _Options:
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
class _Problem:
    """All that the choice depends on.

    Attributes:
        instance: of all tables, as if none were compressed.
        options: tensor trains.
        lookups: compute of each table as tiers of rows; shape (T,).
        held: memory of each table in every placement of its rows; shape (T,).
        latency: of the all-reduce of cores, if there are any.
        limit: bytes per rank.
        loss_limit: most loss of all together; infinite for any.
    """

    instance: Instance
    options: _Options
    lookups: FloatArray
    held: FloatArray
    latency: float
    limit: float
    loss_limit: float

    def tiers(self, levels: IntArray, price: float) -> tuple[FloatArray, FloatArray]:
        """Seconds (lookups, communication) and memory of each table as tiers of rows at a price; shape (T,) each."""
        seconds, memory = per_table(self.instance, allocate(self.instance, levels, price)[0])
        return seconds + self.lookups, memory + self.held


def plan_compression(
    tables: Sequence[Table],
    cluster: Cluster,
    *,
    options: Mapping[str, Sequence[TTOption]],
    rates: TTRates,
    batch_size: int,
    budget: str | float = "neutral",
    loss_limit: float | None = None,
    hashed: bool = False,
    tiers: int = 3,
    overlap: OverlapLike = None,
    index_dedup: bool = False,
    reduction: str = "dense",
    translation: str = "loader",
    time_limit_seconds: float = 60.0,
) -> CompressionPlan:
    """Choose which tables become tensor trains, so that the model fits a budget at the least predicted step time.

    A step is the lookups of all tables, with backward and update, and exposed communication. Where options of a table
    differ in rank alone, the least rank is the fastest and the smallest: offer ranks that you accept, or give their
    losses and a limit.

    Args:
        tables, cluster, batch_size, budget, tiers, overlap, index_dedup, reduction, translation: as for :func:`solve`.
            "neutral" is what row-wise needs without compression.
        options: tensor trains by table; tables that are not named stay as they are.
        rates: of the machine, from ``flexshard calibrate``.
        loss_limit: most that the losses of all chosen options may add up to.
        hashed: compressed tables are numbered anyhow; by default by how often their rows are read.
        time_limit_seconds: for each program.

    Raises:
        JobError: an option of a table that is not there, or of another shape than its table; or as :func:`solve`.
        BudgetError: no choice fits; its ``least_bytes`` would.
        SolverError: no choice keeps the losses within their limit, or none was found in time.
    """
    instance = build_instance(
        tables, cluster, batch_size=batch_size, overlap=overlap, index_dedup=index_dedup, translation=translation
    )
    tiers = whole(tiers, "tiers", JobError)
    if finite(time_limit_seconds, "time_limit_seconds", JobError) <= 0:
        raise JobError(f"time_limit_seconds must be above 0, found {time_limit_seconds}")
    if loss_limit is not None:
        loss_limit = finite(loss_limit, "loss_limit", JobError)
        if loss_limit < 0:
            raise JobError(f"loss_limit must be at least 0, found {loss_limit}")
    problem = _problem(instance, options, rates, hashed, budget_bytes(budget, instance), loss_limit)
    subsets = _feasible(problem, tiers)
    choices = {_best_choice(problem, levels, time_limit_seconds) for levels in subsets}

    def settled(choice: Choice) -> tuple[float, float, Plan | None]:
        """Seconds, memory and the plan of the tables that stay."""
        taken = np.array([c for c in choice if c >= 0], np.int64)
        stay = [t for t, c in enumerate(choice) if c < 0]
        seconds = float(problem.options.seconds[taken].sum() + problem.lookups[stay].sum())
        seconds += problem.latency if taken.size else 0.0
        memory, plan = float(problem.options.memory[taken].sum()), None
        if stay:
            plan = solve(
                [instance.tables[t] for t in stay],
                cluster,
                batch_size=batch_size,
                budget=problem.limit - memory - _row_wise_bytes(instance, stay),
                tiers=tiers,
                overlap=overlap,
                index_dedup=index_dedup,
                reduction=reduction,
                translation=translation,
            )
            seconds += plan.predicted.exposed_seconds
            memory += plan.predicted.memory_bytes
        return seconds, memory, plan

    ends = {choice: settled(choice) for choice in sorted(c for c in choices if c is not None)}
    if not ends:
        raise SolverError(
            f"no choice keeps the losses within {loss_limit} and memory within {units.format_bytes(problem.limit)};"
            " raise one of them, or offer other ranks"
        )
    choice = min(ends, key=lambda c: (ends[c][0], c))
    seconds, memory, plan = ends[choice]
    bounds = [_bound(problem, levels) for levels in subsets]
    price, levels = _price_of(problem, subsets, bounds, plan)
    return CompressionPlan(
        tables=_choices(problem, options, choice, price, levels, plan),
        plan=plan,
        budget_bytes=problem.limit,
        memory_bytes=memory,
        step_seconds=seconds,
        lower_bound_seconds=min(seconds, *(bound for bound, _ in bounds)),
        memory_price_seconds_per_gib=price * units.GIB,
        loss=float(problem.options.loss[[c for c in choice if c >= 0]].sum()),
        loss_limit=loss_limit,
    )


def _row_wise_bytes(instance: Instance, stay: Sequence[int]) -> float:
    """What "neutral" is for some of the tables alone."""
    allocation = instance.uniform(instance.cluster.world_size)
    own = np.zeros_like(allocation)
    own[stay] = allocation[stay]
    _, memory = per_table(instance, own)
    held = sum(instance.tables[t].translation_bytes for t in stay) if instance.held_bytes else 0
    return float(memory[stay].sum()) + held


def _problem(
    instance: Instance,
    options: Mapping[str, Sequence[TTOption]],
    rates: TTRates,
    hashed: bool,
    limit: float,
    loss_limit: float | None,
) -> _Problem:
    places = {table.name: index for index, table in enumerate(instance.tables)}
    of, memory, compute, comm, loss = [], [], [], [], []
    for name, offered in options.items():
        if name not in places:
            raise JobError(f"options are given for table {name!r}, which is not there; there are {', '.join(places)}")
        table = instance.tables[places[name]]
        if isinstance(offered, TTOption) or not all(isinstance(option, TTOption) for option in offered):
            raise JobError(f"options of table {name!r} must be a list of TTOption, found {offered!r}")
        for option in offered:
            shape = option.shape
            if (shape.num_embeddings, shape.embedding_dim) != (table.rows, table.dim):
                raise JobError(
                    f"table {name!r} has {table.rows:,} rows of {table.dim}, an option is for"
                    f" {shape.num_embeddings:,} rows of {shape.embedding_dim}"
                )
            reads = TTReads.expected(table, instance.batch_size, shape, hashed=hashed)
            cost = tensor_train_cost(table, instance.cluster, shape, reads, overlap=instance.overlap)
            of.append(places[name])
            memory.append(cost.memory_bytes)
            compute.append(rates.step_seconds(shape, reads))
            comm.append(sum((1.0 - c.overlap) * c.nbytes / c.bytes_per_s for c in cost.collectives))
            loss.append(option.loss)
    reads_of = instance.total_reads
    lookups = [rates.dense_seconds(float(n), t.dim) for n, t in zip(reads_of, instance.tables, strict=True)]
    held = [t.translation_bytes if instance.held_bytes else 0 for t in instance.tables]
    all_reduce = instance.cluster.level(1).all_reduce
    hidden = instance.overlap.get(("all_reduce", 1), 0.0)
    return _Problem(
        instance,
        _Options(np.array(of, np.int64), *(np.array(v, np.float64) for v in (memory, compute, comm, loss))),
        np.array(lookups),
        np.array(held, np.float64),
        0.0 if all_reduce is None else (1.0 - hidden) * all_reduce.alpha_seconds,
        limit,
        np.inf if loss_limit is None else loss_limit,
    )


def _feasible(problem: _Problem, tiers: int) -> list[IntArray | None]:
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
    return [own for own, memory in zip(subsets, least, strict=True) if memory <= memory_limit(problem.limit)]


def _least_memory(problem: _Problem, levels: IntArray | None) -> FloatArray:
    """Of each table, compressed or in tiers of some levels (None: compressed); shape (T,)."""
    count = len(problem.instance.tables)
    least = np.full(count, np.inf) if levels is None else problem.tiers(levels, np.inf)[1]
    np.minimum.at(least, problem.options.table, problem.options.memory)
    return least


def _best_choice(problem: _Problem, levels: IntArray | None, time_limit_seconds: float) -> Choice | None:
    """For each table its tensor train (a place among all options), or -1; None if nothing fits.

    Args:
        levels: that tiers of rows may use; None where every table is compressed.
    """
    import pulp  # takes longer to import than everything else of the planner

    instance, options = problem.instance, problem.options
    count = len(instance.tables)
    corners: list[FloatArray] = [np.empty((0, 2))] * count
    latency, least = 0.0, np.zeros(count)
    if levels is not None:
        prices = crossing_prices(instance, levels, _PRICES)
        curves = np.stack([np.stack(problem.tiers(levels, price), axis=1) for price in prices])  # (prices, T, 2)
        corners = [_lower_hull(curves[:, t]) for t in range(count)]
        latency, least = float(instance.alpha_seconds[levels].sum()), curves[:, :, 1].min(axis=0)
    # The solver's tolerances are absolute: work in shares of one step, of the limit, and of the loss allowed.
    scale = float(sum(c[:, 0].max(initial=0.0) for c in corners) + options.seconds.sum()) or 1.0
    memory_scale = max(abs(problem.limit), 1.0)
    loss_scale = problem.loss_limit or 1.0
    model = pulp.LpProblem("compression", pulp.LpMinimize)
    allowed = options.loss <= problem.loss_limit
    taken = [model.add_variable(f"x_{n}", cat="Binary", upBound=int(allowed[n])) for n in range(options.table.size)]
    some = model.add_variable("z", lowBound=0, upBound=1)
    shares = [[model.add_variable(f"w_{t}_{v}", lowBound=0) for v in range(len(c))] for t, c in enumerate(corners)]
    time = [(x, s / scale) for x, s in zip(taken, options.seconds.tolist(), strict=True)]
    memory = [(x, m / memory_scale) for x, m in zip(taken, options.memory.tolist(), strict=True)]
    for own, corner in zip(shares, corners, strict=True):
        time += [(w, s / scale) for w, s in zip(own, corner[:, 0].tolist(), strict=True)]
        memory += [(w, m / memory_scale) for w, m in zip(own, corner[:, 1].tolist(), strict=True)]
    model += pulp.LpAffineExpression([*time, (some, problem.latency / scale)]) + latency / scale
    model += pulp.LpAffineExpression(memory) <= memory_limit(problem.limit) / memory_scale
    if np.isfinite(problem.loss_limit):
        lost = [(x, v / loss_scale) for x, v in zip(taken, options.loss.tolist(), strict=True)]
        model += pulp.LpAffineExpression(lost) <= problem.loss_limit / loss_scale
    for t in range(count):
        mine = [taken[n] for n in np.flatnonzero(options.table == t)]
        model += pulp.lpSum([*mine, *shares[t]]) == 1
        for x in mine:
            model += x <= some
    for _ in range(_CUTS):
        model.solve(pulp.HiGHS(msg=False, gapRel=1e-7, timeLimit=time_limit_seconds, threads=1))
        if pulp.LpStatus[model.status] == "Infeasible":
            return None
        values = np.array([x.value() or 0.0 for x in taken])
        sums = np.array([sum(w.value() or 0.0 for w in own) for own in shares])
        np.add.at(sums, options.table, values)
        whole_ones = np.abs(values - values.round()).max(initial=0) < 1e-4 and np.allclose(sums, 1.0, atol=1e-4)
        if pulp.LpStatus[model.status] not in ("Optimal", "Not Solved") or not whole_ones:
            raise SolverError(
                f"HiGHS found no choice of tables in {time_limit_seconds:g} s (status {pulp.LpStatus[model.status]});"
                " raise the time limit"
            )
        picked = np.flatnonzero(values > 0.5)
        choice = np.full(count, -1, np.int64)
        choice[options.table[picked]] = picked
        needed = float(options.memory[picked].sum() + least[choice < 0].sum())
        lost_in_all = float(options.loss[picked].sum())
        if needed <= memory_limit(problem.limit) and lost_in_all <= problem.loss_limit * (1 + 1e-12):
            return tuple(choice.tolist())
        # Within the solver's tolerance, but not within the limit: any choice but this one.
        others = [x for n, x in enumerate(taken) if n not in set(picked.tolist())]
        model += pulp.lpSum([1 - taken[n] for n in picked]) + pulp.lpSum(others) >= 1
    return None


def _lower_hull(points: FloatArray) -> FloatArray:
    """Corners of the lower left of (seconds, memory) points, least memory first; shape (n, 2)."""
    kept: list[FloatArray] = []
    for point in points[np.lexsort((points[:, 0], points[:, 1]))]:
        if kept and point[0] >= kept[-1][0]:
            continue
        while len(kept) > 1:
            (s0, m0), (s1, m1) = kept[-2], kept[-1]
            if (s1 - s0) * (point[1] - m0) >= (point[0] - s0) * (m1 - m0):
                kept.pop()  # not below the line from the one before to the new one
            else:
                break
        kept.append(point)
    return np.array(kept)


def _bound(problem: _Problem, levels: IntArray | None) -> tuple[float, float]:
    """No choice with tiers of these levels takes less than this; the price of memory at which that shows."""
    prices = _all_prices(problem, levels)
    values = [_dual(problem, levels, price) for price in prices]
    best = int(np.argmax(values))
    low, high = prices[max(best - 1, 0)], prices[min(best + 1, len(prices) - 1)]
    price, value = _ternary(lambda p: _dual(problem, levels, p), low, high)
    if values[best] >= value:
        price, value = prices[best], values[best]
    latency = problem.latency if levels is None else float(problem.instance.alpha_seconds[levels].sum())
    return value + latency, price


def _price_of(
    problem: _Problem, subsets: Sequence[IntArray | None], bounds: Sequence[tuple[float, float]], plan: Plan | None
) -> tuple[float, IntArray]:
    """The price of memory among the levels that a plan uses, and these levels (all of them if there is no plan)."""
    sizes = problem.instance.group_sizes
    every = np.arange(sizes.size)
    if plan is None:
        known = [price for own, (_, price) in zip(subsets, bounds, strict=True) if own is None]
        return known[0], every
    used = {tier.group_size for table in plan.tables.values() for tier in table.tiers}
    levels = np.flatnonzero([size in used for size in sizes.tolist()])
    known = [
        price
        for own, (_, price) in zip(subsets, bounds, strict=True)
        if own is not None and np.array_equal(own, levels)
    ]
    return known[0] if known else _bound(problem, levels)[1], levels


def _all_prices(problem: _Problem, levels: IntArray | None) -> list[float]:
    """Prices at which some table may change its mind, from none to where memory alone counts; ascending."""
    prices = set()
    if levels is not None:
        prices = {p for p in crossing_prices(problem.instance, levels, _PRICES) if np.isfinite(p)}
    span = problem.options.seconds.max(initial=0.0) / max(problem.options.memory.min(initial=np.inf), 1.0)
    return [0.0, *sorted({*prices, *(span * 10.0 ** np.arange(-12.0, 4.0)).tolist()} - {0.0})]


def _dual(problem: _Problem, levels: IntArray | None, price: float) -> float:
    """Least time of all tables plus priced memory beyond the limit: below every choice that fits."""
    least = np.full(len(problem.instance.tables), np.inf)
    if levels is not None:
        seconds, memory = problem.tiers(levels, price)
        least = seconds + price * memory
    np.minimum.at(least, problem.options.table, problem.options.seconds + price * problem.options.memory)
    return float(least.sum() - price * problem.limit)


def _ternary(value: Callable[[float], float], low: float, high: float, steps: int = 60) -> tuple[float, float]:
    """Where a concave function is greatest, and how great."""
    for _ in range(steps):
        third = (high - low) / 3
        if value(low + third) < value(high - third):
            low += third
        else:
            high -= third
    middle = (low + high) / 2
    return middle, value(middle)


def _choices(
    problem: _Problem,
    offered: Mapping[str, Sequence[TTOption]],
    choice: Choice,
    price: float,
    levels: IntArray,
    plan: Plan | None,
) -> dict[str, TableChoice]:
    """What every table's options cost: tiers of rows as planned, or as they would be at the price of memory."""
    instance, options = problem.instance, problem.options
    seconds, memory = problem.tiers(levels, price if price > 0 else 1e-30)
    if plan is not None:
        planned = np.zeros((len(instance.tables), instance.group_sizes.size), np.int64)
        for t, table in enumerate(instance.tables):
            for tier in plan.tables[table.name].tiers if table.name in plan.tables else ():
                planned[t, instance.group_sizes == tier.group_size] = tier.rows
        own_seconds, own_memory = per_table(instance, planned)
        stays = planned.any(axis=1)
        seconds = np.where(stays, own_seconds + problem.lookups, seconds)
        memory = np.where(stays, own_memory + problem.held, memory)
    found = {}
    for t, table in enumerate(instance.tables):
        own = np.flatnonzero(options.table == t)
        lookups = float(problem.lookups[t])
        rows = TableOption(
            None, float(memory[t]), lookups, float(seconds[t]) - lookups, 0.0, float(seconds[t] + price * memory[t])
        )
        trains = [
            TableOption(
                option.shape,
                float(options.memory[n]),
                float(options.compute[n]),
                float(options.comm[n]),
                option.loss,
                float(options.seconds[n] + price * options.memory[n]),
            )
            for n, option in zip(own, offered.get(table.name, ()), strict=True)
        ]
        place = 0 if choice[t] < 0 else 1 + int(np.flatnonzero(own == choice[t])[0])
        found[table.name] = TableChoice(table.name, table.rows, table.dim, (rows, *trains), place)
    return found
