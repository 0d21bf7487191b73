"""Where rows go within a problem's budget, and what that costs: a plan before it is written down."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from flexshard import units
from flexshard.costmodels import Cost, StepWork, step_seconds
from flexshard.errors import BudgetError, JobError
from flexshard.planner.assembly import closed_form_baselines, table_plans, with_fullest_rank
from flexshard.planner.baselines.two_stages import once_per_node
from flexshard.planner.methods import Placement
from flexshard.planner.plan import Settings, TablePlan
from flexshard.planner.problem import Problem
from flexshard.planner.reductions import cost_of_reduced, cost_with_reductions
from flexshard.planner.solver.deduplication import Variants
from flexshard.planner.solver.instance import Allocation, Instance, memory_limit
from flexshard.planner.solver.loads import fullest_rank_bytes, held_beside_rows

__all__ = ["Decision", "checked_limit", "decide", "dense_seconds", "limit_of", "objective_seconds", "settings_of"]

_ROUNDS, _CLOSE = 12, 1e-4
_LESS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)  # of the limit of the mean


def limit_of(problem: Problem, instance: Instance) -> float:
    """Bytes per rank that a problem's budget comes to.

    Raises:
        BudgetError: more than a rank of the cluster has.
    """
    return checked_limit(problem, bounded_memory(problem, instance, instance.uniform(problem.cluster.world_size)))


def checked_limit(problem: Problem, neutral: float) -> float:
    """The same where row-wise needs ``neutral`` bytes; raises as :func:`limit_of`."""
    cluster = problem.cluster
    limit = problem.budget.limit_bytes(neutral, cluster)
    available = cluster.hbm_bytes - cluster.reserve_bytes
    if limit > memory_limit(available):
        show = units.format_bytes
        raise BudgetError(
            f"budget {problem.budget.name!r} comes to {show(limit)} per rank (row-wise needs {show(neutral)}); a rank"
            f" of cluster {cluster.name!r} has but {show(available)} ({show(cluster.hbm_bytes)} less a reserve of"
            f" {show(cluster.reserve_bytes)}); take a larger cluster, or a limit within its memory",
            neutral,
        )
    return limit


def bounded_memory(problem: Problem, instance: Instance, allocation: Allocation) -> float:
    """Memory per rank, as far as the problem's budget bounds it."""
    if problem.memory == "mean":
        return instance.memory_bytes(allocation)
    dynamic = fullest_rank_bytes(instance, allocation, in_order=problem.in_order)
    assert dynamic is not None
    return instance.cost(allocation).static_memory_bytes + dynamic


@dataclass(frozen=True, eq=False)
class Decision:
    """Where rows go, and what that costs.

    Attributes:
        problem: what was asked for.
        variants: the problem as arrays, deduplicated or not.
        limit_bytes: what its budget comes to, per rank.
        mean_bytes: mean memory within which the placement stays.
        placement: what the method found.
        sparse: tiers whose gradients are gathered; shape (T, G).
        predicted: the six metrics.
    """

    problem: Problem
    variants: Variants
    limit_bytes: float
    mean_bytes: float
    placement: Placement
    sparse: npt.NDArray[np.bool_]
    predicted: Cost

    @property
    def dense_seconds(self) -> float:
        """Dense work of a step, where steps are planned."""
        return dense_seconds(self.problem)

    @property
    def seconds(self) -> float:
        """What the problem's objective is of the placement."""
        return objective_seconds(self.problem, self.predicted, self.dense_seconds)

    def table_plans(self) -> dict[str, TablePlan]:
        """Tiers of every table."""
        return table_plans(self.placement.instance, self.placement.allocation, self.sparse, self.placement.alternatives)

    def baselines(self) -> dict[str, Cost]:
        """Costs of the closed-form ones."""
        found = closed_form_baselines(self.variants, self.mean_bytes, in_order=self.problem.in_order)
        per_node = once_per_node(self.problem, self.placement.instance, self.placement.allocation, self.predicted)
        return found if per_node is None else found | {"once_per_node": per_node}

    def settings(self) -> Settings:
        """What was asked for, as a plan keeps it."""
        return settings_of(self.problem, self.limit_bytes)


def settings_of(problem: Problem, limit_bytes: float) -> Settings:
    """What was asked for, as a plan keeps it; ``limit_bytes`` is what the budget comes to."""
    return Settings(
        batch_size=problem.batch_size,
        budget=problem.budget.name,
        budget_bytes=limit_bytes,
        tiers=problem.tiers,
        method=problem.method.name,
        index_dedup=problem.index_dedup,
        overlap=tuple((f"{kind}@{size}", share) for (kind, size), share in sorted(problem.hidden.items())),
        reduction=problem.reduction.name,
        translation=problem.translation.name,
        index_dedup_seconds_per_id=problem.index_dedup_seconds_per_id,
        memory=problem.memory,
        sample_order=problem.sample_order,
        objective=problem.objective,
        dense_seconds=None if problem.step is None else problem.step.dense_seconds,
        rates=None if problem.step is None else problem.step.rates,
        host_memory=problem.host_memory,
        gap=problem.gap if problem.is_whole_model else 0.002,
        constraints=tuple(f"{name}: {words}" for name, one in problem.constraints.items() if (words := str(one))),
    )


def decide(problem: Problem) -> Decision:
    """Place the rows of a problem; raises as :func:`solve`."""
    possible = problem.method.tiers
    if possible is not None and problem.tiers not in possible:
        text = " or ".join(map(str, possible))
        raise JobError(f"tiers must be {text} for method {problem.method.name!r}, found {problem.tiers}")
    variants = Variants(problem)
    limit = limit_of(problem, variants.plain)
    placement, mean = _within(problem, variants, limit)
    instance = variants.of(placement.instance.deduplicated)
    sparse = problem.reduction.sparse_tiers(instance, placement.allocation)
    predicted = with_fullest_rank(
        cost_with_reductions(instance, placement.allocation, sparse),
        instance,
        placement.allocation,
        in_order=problem.in_order,
    )
    return Decision(problem, variants, limit, mean, placement, sparse, predicted)


def _within(problem: Problem, variants: Variants, limit: float) -> tuple[Placement, float]:
    """The best placement whose memory stays within the limit, and the mean memory that it may have so.

    What a quantile is above the mean depends on the placement: the mean's limit is moved between one that fits and one
    that does not. The bound is that of the limit less what every placement's is above at least, since no rank's
    quantile is below its own mean, that of backward included.
    """
    if problem.memory == "mean":
        return problem.method.place(variants, limit, problem.tiers), limit
    most = limit - min(held_beside_rows(side) for side in variants.sides)
    try:
        first = problem.method.place(variants, most, problem.tiers)
    except BudgetError as error:  # nothing will be found; but what comes nearest is said
        most = memory_limit(error.least_bytes)
        first = problem.method.place(variants, most, problem.tiers)
    found: list[tuple[float, float, Placement]] = []
    least = np.inf

    def above(placement: Placement, within: float) -> float:
        """By how much a placement is above the limit; it is kept if it is not."""
        nonlocal least
        nbytes = bounded_memory(problem, placement.instance, placement.allocation)
        least = min(least, nbytes)
        if nbytes <= memory_limit(limit):
            instance = variants.of(placement.instance.deduplicated)
            cost = cost_of_reduced(instance, placement.allocation, problem.reduction)
            found.append((objective_seconds(problem, cost), within, placement))
        return nbytes - limit

    low, high, within, placement = -np.inf, most, most, first
    for _ in range(_ROUNDS):
        more = above(placement, within)
        if more <= memory_limit(limit) - limit:
            low = max(low, within)
            if low == most or placement.price == 0:
                break
        else:
            high = min(high, within)
        if high - low <= _CLOSE * limit:
            break
        # As much more above the mean as here.
        moved = placement.instance.memory_bytes(placement.allocation) - more
        if not low < moved < high:
            moved = (low + high) / 2 if np.isfinite(low) else within - abs(more)
        try:
            within, placement = moved, problem.method.place(variants, moved, problem.tiers)
        except BudgetError as error:
            if not moved < error.least_bytes < high:
                break
            within = memory_limit(error.least_bytes)
            placement = problem.method.place(variants, within, problem.tiers)
            low = max(low, moved)  # nothing fits below
    # Where gradients may be gathered, what is less on average may be more here.
    for share in () if found or problem.reduction.name == "dense" else _LESS:
        try:
            placement = problem.method.place(variants, share * most, problem.tiers)
        except BudgetError:
            break
        above(placement, share * most)
    if problem.method.tiers is None:
        for size in (1, problem.cluster.world_size):
            whole = variants.fixed.uniform(size)
            none = ((),) * len(problem.tables)
            above(replace(first, allocation=whole, instance=variants.fixed, price=0.0, alternatives=none), most)
    if not found:
        raise BudgetError(
            f"budget {problem.budget.name!r}: method {problem.method.name!r} found no placement whose fullest rank"
            f" stays within {units.format_bytes(limit)}, the least was {units.format_bytes(least)}; raise the budget,"
            " lower the batch size, or let it bound the mean",
            least,
        )
    seconds, within, best = min(found, key=lambda one: one[0])
    return replace(best, lower_bound_seconds=min(first.lower_bound_seconds, seconds)), within


def dense_seconds(problem: Problem) -> float:
    """Dense work of a step, where it is known."""
    return 0.0 if problem.step is None else problem.step.dense_seconds


def objective_seconds(problem: Problem, cost: Cost, dense_seconds: float = 0.0) -> float:
    """What the problem's objective is of a placement that costs this."""
    if problem.objective == "communication":
        return cost.exposed_seconds
    return step_seconds(cost, problem.cluster.world_size, StepWork(dense_seconds))
