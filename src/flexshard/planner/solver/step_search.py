"""The placement whose training step is shortest, where links work at once.

A phase takes as long as its slowest link, which is the largest weighted sum of its links' times with weights that add
up to 1. With given weights a step is a sum over rows again, as if the rest of every link's time were hidden; the least
such sum bounds every step from below. The weights with the greatest bound are found by cutting planes: every placement
met so far says what its links take under any weights (Kelley's method). The best step among these is the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from flexshard.costmodels import (
    CollectiveKind,
    Cost,
    LocalRates,
    Overlap,
    StepWork,
    hidden_share,
    phase_of,
    row_wise_gradients,
    step_seconds,
)
from flexshard.planner.reductions import Reduction, cost_of_reduced
from flexshard.planner.solver.build import ToPlan
from flexshard.planner.solver.deadline import is_enough
from flexshard.planner.solver.deduplication import Variants
from flexshard.planner.solver.instance import Instance, memory_limit
from flexshard.planner.solver.local_work import LocalShares
from flexshard.planner.solver.solution import Solution
from flexshard.planner.translations import Translation
from flexshard.tables import Table
from flexshard.topologies import Cluster

__all__ = ["ShortestStep", "bounding_view", "communication_view", "solve_step", "weighted_view"]

FloatArray = npt.NDArray[np.float64]

_PHASES = ("ids", "embeddings", "gradients")
_ROWS, _GRADIENTS = _PHASES.index("embeddings"), _PHASES.index("gradients")
# Behind links: what a rank does meanwhile; and of gradients, what it does after those of row-wise rows are there.
_CHAINS = 2
_MEANWHILE, _AFTERWARDS = -2, -1
_ROUNDS, _CLOSE = 10, 1e-4
_MANY_COUNTS, _CLOSE_OF_MANY = 1_000_000, 3e-3
_NOTHING = StepWork(0.0)
_FEW_TABLES = 24  # of which each may send its ids otherwise in the end


@dataclass(frozen=True, eq=False)
class _Met:
    """A placement: its step, the problem that it is of and its weights (None without any), what its links and the rank
    take in each phase (as weights of shape (phases, links + 2)), and all else; and a bound of all steps, minus infinity
    where the problem's links come one after another.
    """

    seconds: float
    view: Variants
    weights: FloatArray | None
    instance: Instance
    solution: Solution
    links: FloatArray
    rest: float
    bound: float


@dataclass(frozen=True, eq=False)
class ShortestStep:
    """The placement within a budget with the shortest step.

    Attributes:
        instance: the problem under the weights with which it was found.
        solution: the placement; its seconds and bound are of a step but for dense work.
        weights: under which steps are bounded best; None where links and ranks have nothing to do at once.
        within: seconds of the placement under the weights with which this one was found, within another budget.
    """

    instance: Instance
    solution: Solution
    weights: FloatArray | None
    within: Callable[[float], float]


def solve_step(
    variants: Variants,
    limit_bytes: float,
    tiers: int,
    *,
    weights: FloatArray | None = None,
    enough: float = np.inf,
    close: float = 0.0,
) -> ShortestStep:
    """The placement within a budget with the shortest step but for dense work.

    Args:
        variants, limit_bytes, tiers: the problem, the budget, and how many group sizes there may be.
        weights: of a problem much like this one, on the same cluster, to start from.
        enough: seconds; once it is known that no step is shorter, the best so far will do.
        close: share of the bound within which the best so far will do, too; 1e-4 at least.

    Raises:
        BudgetError: nothing fits; its ``least_bytes`` would.
    """
    found, bound = _search(variants, limit_bytes, tiers, weights, enough, close)
    best, highest = min(found, key=lambda one: one.seconds), max(found, key=lambda one: one.bound)
    if variants.are_chosen and len(variants.problem.tables) <= _FEW_TABLES and best.seconds > bound * (1 + _CLOSE):
        best = _with_other_ids(variants, best, memory_limit(limit_bytes))
    solution = replace(best.solution, seconds=best.seconds, lower_bound_seconds=min(best.seconds, bound))
    price = solution.price or None

    def within(limit: float) -> float:
        cost = _cost(variants, *best.view.solve(limit, tiers, start_price=price))
        return step_seconds(cost, variants.problem.cluster.world_size, _NOTHING)

    return ShortestStep(best.instance, solution, highest.weights, within)


def _with_other_ids(variants: Variants, best: _Met, limit: float) -> _Met:
    """The placement, or one with the same tiers that sends other tables' ids once and takes less time: what is chosen
    under weights that are fixed need not be what is best for a step.
    """
    shorter: _Met | None = best
    while shorter is not None:
        best, shorter = shorter, None
        for table in range(len(variants.problem.tables)):
            flipped = best.instance.deduplicated.copy()
            flipped[table] ^= True
            instance = best.view.of(flipped)
            if instance.memory_bytes(best.solution.allocation) > limit:
                continue
            cost = _cost(variants, instance, best.solution)
            seconds = step_seconds(cost, variants.problem.cluster.world_size, _NOTHING)
            if seconds < (best if shorter is None else shorter).seconds * (1 - _CLOSE):
                shorter = replace(best, seconds=seconds, instance=instance)
    return best


def bounding_view(variants: Variants, limit_bytes: float, tiers: int) -> Variants:
    """The weighted problem whose placements bound steps best, of those that are met within a budget: what a placement
    takes under its weights, no step that has it is shorter than. Raises as :func:`solve_step`.
    """
    found, _ = _search(variants, limit_bytes, tiers)
    return max(found, key=lambda one: one.bound).view


def weighted_view(variants: Variants, weights: FloatArray) -> Variants:
    """The problem under the weights of a step search on the same cluster, which bounds its steps as
    :func:`bounding_view` does.
    """
    sizes = [size for size in variants.plain.group_sizes.tolist() if size > 1]
    ordered = _in_order(_exposed_per_read(variants.plain, variants.problem), weights)
    return Variants(_under(variants.problem, sizes, ordered), variants.plain.level_order, variants)


def communication_view(variants: Variants) -> Variants:
    """The problem with neither weights nor lookups and updates: what its placements expose."""
    return Variants(_Weighted.of(variants.problem, rates=None), variants.plain.level_order, variants)


def _search(
    variants: Variants,
    limit_bytes: float,
    tiers: int,
    start: FloatArray | None = None,
    enough: float = np.inf,
    close: float = 0.0,
) -> tuple[list[_Met], float]:
    """The placements met, and a bound of all steps; arguments as of :func:`solve_step`."""
    problem, world = variants.problem, variants.problem.cluster.world_size
    sizes = [size for size in variants.plain.group_sizes.tolist() if size > 1]
    found: list[_Met] = []

    def keep(view: Variants, weights: FloatArray | None, *, bounds: bool) -> None:
        price = found[-1].solution.price if found else 0.0
        instance, solution = view.solve(limit_bytes, tiers, start_price=price or None)
        cost = _cost(variants, instance, solution)
        bound = solution.lower_bound_seconds if bounds else -np.inf
        seconds = step_seconds(cost, world, _NOTHING)
        found.append(_Met(seconds, view, weights, instance, solution, *_by_link(cost, sizes, world), bound))

    # As if one link came after another: the shortest step that is not the least communication is shorter still.
    several = len(sizes) > 1 or (len(sizes) == 1 and problem.rates is not None)
    weights = np.zeros((len(_PHASES), len(sizes) + _CHAINS))
    if sizes:
        weights[:, len(sizes) - 1] = 1.0
    if several and start is not None:
        weights = start
    else:
        keep(variants, None, bounds=not several)
    close = max(close, _CLOSE if variants.plain.reads.size < _MANY_COUNTS else _CLOSE_OF_MANY)
    exposed = _exposed_per_read(variants.plain, problem)
    for _ in range(_ROUNDS if several else 0):
        if any(np.isfinite(one.bound) for one in found) and is_enough():
            break
        weights = _in_order(exposed, weights)
        met = [one.weights for one in found if one.weights is not None]
        if any(np.allclose(weights, one, rtol=0.0, atol=1e-9) for one in met):
            break  # the gap is of the placement under these weights, and no others are better
        view = Variants(_under(problem, sizes, weights), variants.plain.level_order, variants)
        keep(view, weights, bounds=True)
        if found[-1].bound >= enough:
            break
        highest = _highest(found, weights.shape, exposed, after=sizes[-1] == world)
        if highest is None:
            break
        weights, most = highest
        if min(most, *(one.seconds for one in found)) <= max(one.bound for one in found) * (1 + close):
            break
    return found, max(one.bound for one in found)


def _cost(variants: Variants, instance: Instance, solution: Solution) -> Cost:
    """What a placement costs without weights."""
    plain = variants.of(instance.deduplicated)
    return cost_of_reduced(plain, solution.allocation, variants.problem.reduction)


@dataclass(frozen=True, eq=False)
class _Weighted:
    """A problem of which some costs are others; fields as of :class:`ToPlan`."""

    tables: tuple[Table, ...]
    cluster: Cluster
    batch_size: int
    hidden: Overlap
    translation: Translation
    index_dedup: bool | str
    index_dedup_seconds_per_id: float
    rates: LocalRates | None
    objective: str
    reduction: Reduction
    local_shares: LocalShares

    @classmethod
    def of(cls, problem: ToPlan, **other: Any) -> _Weighted:
        """A problem but for some of its fields."""
        return cls(**{one.name: getattr(problem, one.name) for one in fields(cls)} | other)


def _under(problem: ToPlan, sizes: Sequence[int], weights: FloatArray) -> _Weighted:
    """The problem where this counts of each phase, shape (phases, links + 2)."""
    (look_up, _), (update, after) = weights[[_ROWS, _GRADIENTS], _MEANWHILE:].tolist()
    shares = LocalShares(look_up, update, min(update + after, 1.0))
    return _Weighted.of(problem, hidden=_weighted(problem, sizes, weights), local_shares=shares)


def _by_link(cost: Cost, sizes: Sequence[int], world: int) -> tuple[FloatArray, float]:
    """Seconds of each phase with several links on each of them, and on the rank, shape (phases, links + 2); and of
    everything else.
    """
    seconds = np.zeros((len(_PHASES), len(sizes) + _CHAINS))
    seconds[_ROWS, _MEANWHILE] = cost.overlapped_look_up_seconds
    seconds[_GRADIENTS, _MEANWHILE:] = cost.row_wise_update_seconds
    seconds[_GRADIENTS, _MEANWHILE] += cost.overlapped_update_seconds
    seconds[_GRADIENTS, _AFTERWARDS] += row_wise_gradients(cost, world)
    rest = cost.index_dedup_seconds + cost.look_up_seconds + cost.update_seconds
    for one in cost.collectives:
        if phase_of(one) in _PHASES:
            seconds[_PHASES.index(phase_of(one)), sizes.index(one.link(world))] += one.exposed_seconds
        else:
            rest += one.exposed_seconds
    return seconds, rest


# Contents of a step's collectives; those of the second are one phase of them.
_CONTENTS: tuple[tuple[CollectiveKind, str, str | None], ...] = (
    ("all_to_all", "counts", None),
    ("all_to_all", "ids", "ids"),
    ("all_to_all", "embeddings", "embeddings"),
    ("all_to_all", "gradients", "gradients"),
    ("all_reduce", "replicas", "gradients"),
    ("all_reduce", "touched", "gradients"),
    ("all_gather", "touched_rows", "gradients"),
)


def _weighted(
    problem: ToPlan, sizes: Sequence[int], weights: FloatArray
) -> dict[tuple[CollectiveKind, int, str], float]:
    """What is hidden of each collective, where each link's weight is the share of its time that counts."""
    shares = {}
    for kind, content, phase in _CONTENTS:
        for size in problem.cluster.group_sizes:
            link = size if kind == "all_to_all" else problem.cluster.world_size
            if link > 1:
                weight = 1.0 if phase is None else float(weights[_PHASES.index(phase), sizes.index(link)])
                if (kind, size, content) == ("all_to_all", problem.cluster.world_size, "gradients"):
                    weight = min(weight + float(weights[_GRADIENTS, _AFTERWARDS]), 1.0)
                shares[kind, size, content] = 1 - weight * (1 - hidden_share(problem.hidden, kind, size, content))
    return shares


def _exposed_per_read(instance: Instance, problem: ToPlan) -> FloatArray:
    """Seconds of a lookup of each class of rows in each phase and on each link, in the instance's order of levels, less
    what is hidden anyway; shape (classes, phases, links).
    """
    levels = [instance.cluster.level(size) for size in instance.group_sizes.tolist() if size > 1]
    seconds = np.zeros((len(instance.widths), len(_PHASES), len(levels)))
    for link, level in enumerate(levels):
        assert level.all_to_all is not None
        for phase, name in enumerate(_PHASES):
            shown = 1.0 - hidden_share(problem.hidden, "all_to_all", level.group_size, name)
            for index, one in enumerate(instance.widths):
                nbytes = (instance.id_bytes, one.row_bytes, one.gradient_bytes)[phase]
                seconds[index, phase, link] = shown * nbytes / level.all_to_all.bytes_per_s
    return seconds


def _in_order(exposed: FloatArray, weights: FloatArray) -> FloatArray:
    """Weights under which a lookup takes no longer at a level than at the next, which tiers in order of time need; less
    weight on a link only makes the bound less.

    Args:
        exposed: of :func:`_exposed_per_read`.
        weights: of each phase, shape (phases, links + 2).
    """
    ordered = weights.copy()
    for link in range(weights.shape[1] - _CHAINS - 2, -1, -1):
        mine, next_ = (exposed[:, :, at] @ ordered[:, at] for at in (link, link + 1))
        ratios = next_[mine > 0] / mine[mine > 0]
        ordered[:, link] *= min(1.0, float(ratios.min(initial=1.0)))
    return ordered


def _highest(
    found: Sequence[_Met], shape: tuple[int, int], exposed: FloatArray, *, after: bool
) -> tuple[FloatArray, float] | None:
    """The weights in order under which the least of the placements met is greatest, and that least; ``after``: whether
    row-wise rows are the last in order, so that what comes after their gradients may make them dearer. None where times
    are so far apart that the program cannot be solved.
    """
    from scipy.optimize import linprog

    phases, links = shape
    # Maximise t, where t <= rest + weights . seconds of each placement, and a phase's weights add up to 1 at most.
    cuts = np.array([[*(-one.links.ravel()), 1.0] for one in found])
    sums = np.zeros((phases, phases * links + 1))
    for phase in range(phases):
        sums[phase, phase * links : (phase + 1) * links] = 1.0
    pairs = list(product(range(exposed.shape[0]), range(links - _CHAINS - 1)))
    order = np.zeros((len(pairs), phases * links + 1))
    for row, (index, link) in enumerate(pairs):
        for phase in range(phases):
            order[row, phase * links + link] = exposed[index, phase, link]
            order[row, phase * links + link + 1] = -exposed[index, phase, link + 1]
    bounds = np.tile([0.0, 1.0], (phases, links, 1))
    bounds[_GRADIENTS, _AFTERWARDS, 1] = float(after)
    scale = max(float(np.abs(order).max(initial=0.0)), 1e-300)
    result = linprog(
        np.append(np.zeros(phases * links), -1.0),
        A_ub=np.concatenate([cuts, sums, order / scale]),
        b_ub=np.concatenate([[one.rest for one in found], np.ones(phases), np.zeros(len(order))]),
        bounds=[*map(tuple, bounds.reshape(-1, 2)), (None, None)],
        method="highs",
    )
    if result.x is None:
        return None
    return result.x[:-1].reshape(shape), float(result.x[-1])
