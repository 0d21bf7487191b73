"""Which tables of a whole model become tensor trains: further options of theirs in its problem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from flexshard import units
from flexshard._internal import plain_sum, there_are
from flexshard.costmodels import PooledCosts, PooledOption, StepWork, TTRates, TTReads, pooled_cost
from flexshard.errors import BudgetError, JobError, SolverError
from flexshard.planner.budget import Limit
from flexshard.planner.compression.decision import CompressionPlan, TableChoice, TableOption, TTOption
from flexshard.planner.constraints import TableConstraints, is_sharded
from flexshard.planner.deciding import dense_seconds, objective_seconds
from flexshard.planner.plan import Plan
from flexshard.planner.problem import Problem
from flexshard.planner.solver.deduplication import Variants
from flexshard.planner.solver.dual_search import cheapest_tables
from flexshard.planner.solver.instance import Allocation, Instance
from flexshard.planner.solver.thresholds import allocate
from flexshard.planner.solving import solve
from flexshard.planner.whole_model.assembly import plan_decided
from flexshard.planner.whole_model.joint import WholeDecision, decide_whole
from flexshard.planner.whole_model.pooled_menus import HBM
from flexshard.tables import Table

__all__ = ["compress_whole"]

IntArray = npt.NDArray[np.int64]


def compress_whole(
    problem: Problem,
    options: Mapping[str, Sequence[TTOption]],
    rates: TTRates,
    loss_limit: float | None,
    *,
    hashed: bool,
) -> CompressionPlan:
    """Choose sharding types, ranks, tiers of rows and tensor trains of all tables at once: the shortest step within the
    budget. Arguments, and errors, as of :func:`plan_compression`.
    """
    _check_options(problem.tables, options)
    for name, offered in options.items():
        partners = [*problem.constraints.get(name, TableConstraints()).with_tables]
        partners += [other for other, one in problem.constraints.items() if name in one.with_tables]
        if offered and partners:
            raise JobError(
                f"table {name!r} is to be with {partners[0]!r}, which it could not be as a tensor train; offer none, or"
                " leave 'with' out"
            )
    dense = dense_seconds(problem)
    problem = replace(problem, step=StepWork(dense, rates.local), objective="step")
    costs = PooledCosts(problem.cluster, problem.batch_size, problem.hidden, problem.rates)
    trains = {
        table.name: [_train(costs, table, option, rates, hashed=hashed) for option in options.get(table.name, ())]
        for table in problem.tables
    }
    try:
        decision = decide_whole(problem, trains, loss_limit)
    except BudgetError as error:
        try:
            if loss_limit is None:
                raise
            decide_whole(problem, trains)
        except BudgetError:  # losses are not what stands in the way
            raise _nothing_fits(problem, trains, costs, error) from error
        raise SolverError(
            f"no choice keeps the losses within {loss_limit} and memory within budget {problem.budget.name!r}; raise"
            " one of them, or offer other ranks"
        ) from None
    received = decision.menus.received_bytes
    whole = pooled_cost(costs, decision.pooled, received)
    if decision.sequences is not None:
        whole = decision.sequences.predicted + whole
    seconds, lower = objective_seconds(problem, whole, dense), decision.lower_bound_seconds
    plan = _rest(decision, seconds)
    price = decision.prices.get(HBM, 0.0)
    chosen = {table.name: option for table, (option, _) in zip(decision.menus.tables, decision.pooled, strict=True)}
    planned = _planned_tiers(decision, price)
    return CompressionPlan(
        tables={
            table.name: _choice(
                decision,
                table,
                chosen.get(table.name),
                list(zip(options.get(table.name, ()), trains[table.name], strict=True)),
                planned.get(table.name),
                price,
            )
            for table in problem.tables
        },
        plan=plan,
        budget_bytes=decision.limit_bytes,
        memory_bytes=whole.memory_bytes,
        step_seconds=seconds,
        lower_bound_seconds=min(lower, seconds),
        memory_price_seconds_per_gib=price * units.GIB,
        loss=plain_sum((option.loss for option, _ in decision.pooled), start=0.0),
        loss_limit=loss_limit,
    )


def _check_options(tables: Sequence[Table], options: Mapping[str, Sequence[TTOption]]) -> None:
    """Whether options are of tables that there are.

    Raises:
        JobError: one is of a table that is not there, or of another shape.
    """
    known = {table.name: table for table in tables}
    for name, offered in options.items():
        if name not in known:
            raise JobError(f"options are given for table {name!r}, which is not there; {there_are(known)}")
        table = known[name]
        if isinstance(offered, TTOption) or not all(isinstance(option, TTOption) for option in offered):
            raise JobError(f"options of table {name!r} must be a list of TTOption, found {offered!r}")
        for shape in (option.shape for option in offered):
            if (shape.num_embeddings, shape.embedding_dim) != (table.rows, table.dim):
                raise JobError(
                    f"table {name!r} has {table.rows:,} rows of {table.dim}, an option is for"
                    f" {shape.num_embeddings:,} rows of {shape.embedding_dim}"
                )


def _nothing_fits(
    problem: Problem, trains: Mapping[str, Sequence[PooledOption]], costs: PooledCosts, error: BudgetError
) -> BudgetError:
    """Why no choice does, and what would; of whole models as far as their search knows."""
    advice = "raise the budget, or offer smaller ranks"
    if problem.sharded_tables:
        return BudgetError(
            f"no choice of tensor trains, tiers and shards fits budget {problem.budget.name!r}: {error}; {advice}",
            error.least_bytes,
            error.by_sums,
        )
    variants = Variants(problem.of_rows(problem.tables))
    compressed = np.array(
        [
            min((float((one.static_bytes + one.dynamic_bytes)[0]) for one in trains[table.name]), default=np.inf)
            + costs.received_bytes(table)
            for table in problem.tables
        ]
    )

    def least_of(levels: IntArray) -> float:
        in_tiers = [cheapest_tables(side, levels, np.inf)[1] + side.table_held_bytes for side in variants.sides]
        return float(np.min([compressed, *in_tiers], axis=0).sum())

    least = min(map(least_of, variants.plain.level_subsets(problem.tiers)))
    return BudgetError(
        f"no choice of tensor trains and tiers fits budget {problem.budget.name!r}; the least is"
        f" {units.format_bytes(least)} ({np.ceil(least):,.0f} bytes) per rank: {advice}",
        least,
    )


def _train(costs: PooledCosts, table: Table, option: TTOption, rates: TTRates, *, hashed: bool) -> PooledOption:
    reads = TTReads.expected(table, costs.batch_size, option.shape, hashed=hashed)
    return costs.tensor_train(table, option.shape, reads, rates.step_seconds(option.shape, reads), option.loss)


def _rest(decision: WholeDecision, seconds: float) -> Plan | None:
    """The plan of the tables that stay; ``seconds`` is what all take."""
    problem, menus = decision.problem, decision.menus
    sharded = [tuple(one for one in menu if not one.is_tensor_train) for menu in menus.options]
    menus = replace(menus, options=tuple(sharded))
    tables = menus.tables
    stays = [not option.is_tensor_train for option, _ in decision.pooled]
    if all(stays):
        return plan_decided(replace(decision, menus=menus))
    gone = {table.name for table, stay in zip(tables, stays, strict=True) if not stay}
    held = sum(
        float((option.static_bytes + option.dynamic_bytes)[0]) + menus.costs.received_bytes(table)
        for table, (option, _) in zip(tables, decision.pooled, strict=True)
        if table.name in gone
    )
    left = decision.limit_bytes - held
    if not any(stays):
        if decision.sequences is None:
            return None
        budget = Limit(left + problem.cluster.reserve_bytes, problem.budget.name)
        return solve(replace(decision.sequences.problem, budget=budget))
    kept = [index for index, stay in enumerate(stays) if stay]
    rest = replace(
        problem,
        tables=tuple(table for table in problem.tables if table.name not in gone),
        constraints={name: _among(one, gone) for name, one in problem.constraints.items() if name not in gone},
    )
    plan = plan_decided(
        replace(
            decision,
            problem=rest,
            limit_bytes=left,
            menus=replace(
                menus,
                tables=tuple(menus.tables[index] for index in kept),
                options=tuple(menus.options[index] for index in kept),
            ),
            pooled=tuple(decision.pooled[index] for index in kept),
            row_wise=tuple(decision.row_wise[index] for index in kept),
        )
    )
    # No plan of these tables is better than what the bound leaves them beside these tensor trains, which may start the
    # reduction of copies that another plan of them would not need.
    lower = decision.lower_bound_seconds - (seconds - plan.objective_seconds(plan.predicted))
    lower -= menus.costs.latency("data_parallel")
    return replace(plan, lower_bound_seconds=min(max(lower, 0.0), plan.lower_bound_seconds))


def _among(asked: TableConstraints, gone: set[str]) -> TableConstraints:
    """Constraints without tables that are no longer there."""
    return replace(
        asked,
        with_tables=[name for name in asked.with_tables if name not in gone],
        apart=[name for name in asked.apart if name not in gone],
    )


def _choice(
    decision: WholeDecision,
    table: Table,
    chosen: PooledOption | None,
    trains: Sequence[tuple[TTOption, PooledOption]],
    planned: TableOption | None,
    price: float,
) -> TableChoice:
    """A table's options: the one that it has, or the best that is none of its tensor trains, and these. ``chosen`` is
    None of a table in tiers of rows, which are ``planned``.
    """
    costs, tables = decision.menus.costs, decision.menus.tables

    def of(option: PooledOption, given: TTOption | None) -> TableOption:
        world = costs.cluster.world_size
        memory = float((option.static_bytes + option.dynamic_bytes).sum()) / world + costs.received_bytes(table)
        compute, whole = float(option.local_seconds.sum()) / world, float(costs.seconds(option).sum()) / world
        held = "" if option.dtype == table.dtype else f" in {option.dtype}"
        shape, sharding = (None, option.name + held) if given is None else (given.shape, "")
        priced = whole + price * memory
        return TableOption(shape, memory, compute, whole - compute, option.loss, priced, sharding)

    menu = decision.menus.options[tables.index(table)] if chosen is not None else ()
    others = [option for option in menu if not option.is_tensor_train]
    if others:
        sharded = [of(option, None) for option in others]
        best = min(range(len(others)), key=lambda index: sharded[index].priced_seconds)
        stays: TableOption | None = sharded[
            next((index for index, option in enumerate(others) if option is chosen), best)
        ]
    elif planned is not None or not is_sharded(table, decision.problem.constraints.get(table.name)):
        stays = planned or _lone_tiers(decision, table, price)
    else:  # constraints leave nothing but tensor trains
        stays = None
    first = () if stays is None else (stays,)
    taken = next((len(first) + index for index, (_, option) in enumerate(trains) if option is chosen), 0)
    rest = tuple(of(option, given) for given, option in trains)
    return TableChoice(table.name, table.rows, table.dim, (*first, *rest), taken)


def _planned_tiers(decision: WholeDecision, price: float) -> dict[str, TableOption]:
    """Tables in tiers of rows, as planned."""
    decided = decision.sequences
    if decided is None:
        return {}
    # The instance that was solved weighs times by what of them counts in a step.
    instance = Variants(decided.problem).of(decided.placement.instance.deduplicated)
    return _in_tiers(instance, decided.placement.allocation, price)


def _lone_tiers(decision: WholeDecision, table: Table, price: float) -> TableOption:
    """A tensor train, as it would be in tiers at the price of memory."""
    instance = Variants(decision.problem.of_rows([table])).fixed
    levels = max(instance.level_subsets(decision.problem.tiers), key=len)
    return _in_tiers(instance, allocate(instance, levels, price)[0], price)[table.name]


def _in_tiers(instance: Instance, allocation: Allocation, price: float) -> dict[str, TableOption]:
    """An instance's tables, by name."""
    seconds, memory = instance.per_table(allocation)
    memory = memory + instance.table_held_bytes
    compute = instance.local_seconds
    figures = np.stack([memory, compute, seconds, seconds + compute + price * memory]).T.tolist()
    return {
        table.name: TableOption(None, needed, busy, sent, 0.0, priced)
        for table, (needed, busy, sent, priced) in zip(instance.tables, figures, strict=True)
    }
