"""What a plan says should go over the wire, beside what did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from flexshard import units
from flexshard._internal import Grid, new_grid, plain_sum
from flexshard.costmodels import Collective, Cost, Layout, StepWork, classes_of, step_collectives
from flexshard.errors import DataError
from flexshard.executors.traffic.observation import Observation
from flexshard.executors.traffic.replaying import together
from flexshard.planner import Plan, TablePlan

__all__ = [
    "Comparison",
    "ComparisonLine",
    "check_observed",
    "compare_observed",
    "overlap_observed",
    "predicted_bytes",
    "step_work",
]

Key = tuple[str, int, str]
_ROWS = ("embeddings", "gradients")
# What plans of format 1 price as one collective.
_TOGETHER = {"all_to_all": _ROWS, "all_reduce": ("replicas",), "all_gather": ("touched", "touched_rows")}


def _of_rows(plan: Plan) -> list[Collective]:
    """What our sharder runs, and observes: not what TorchRec's do for pooled tables."""
    ours = (one for one in plan.predicted.collectives if one.kind != "host")  # which an observer does not see
    return [one for one in ours if not one.content.startswith(("pooled ", "sequence "))]


def predicted_bytes(plan: Plan, *, collections: Sequence[Sequence[str]] | None = None) -> dict[Key, float]:
    """Bytes per rank and step of every (kind, group size, content), expected from the plan's profiles.

    Args:
        collections: tables that share collectives; see :func:`flexshard.executors.replay`.
    """
    totals: dict[Key, float] = {}

    def add(kind: str, size: int, content: str, nbytes: float) -> None:
        totals[kind, size, content] = totals.get((kind, size, content), 0.0) + nbytes

    world = plan.cluster.world_size
    for tables in together(plan, collections):
        layout, classes = Layout.of_tables({t.name: t for t in tables}, world), classes_of(tables)
        reads = {
            size: np.array([plain_sum(_reads(tables[index], size) for index in one.tables) for one in classes])
            for size in layout.group_sizes
        }
        for call in step_collectives(layout, classes):
            if call.fixed_bytes is not None:
                add(call.kind, call.group_size, call.content, call.fixed_bytes)
            elif call.kind == "all_to_all":
                carried = reads[call.group_size][list(call.classes)] @ np.array(call.item_bytes)
                add(call.kind, call.group_size, call.content, float(carried))
    for collective in _of_rows(plan):
        if collective.kind == "all_gather":
            add("all_gather", collective.group_size, "touched_rows", collective.nbytes)
    return totals


def _reads(table: TablePlan, size: int) -> float:
    """Expected lookups of a table's rows at a level, per rank and step."""
    tier = table.tier(size)
    return 0.0 if tier is None else tier.reads


@dataclass(frozen=True)
class ComparisonLine:
    """One figure, predicted and observed.

    Attributes:
        name: such as "all_to_all@8 embeddings".
        unit: "bytes" or "seconds", per rank and step.
        predicted, observed: None where there is none.
    """

    name: str
    unit: str
    predicted: float | None
    observed: float | None

    @property
    def error(self) -> float | None:
        """Observed over predicted, less 1."""
        if self.predicted is None or self.observed is None or self.predicted == 0:
            return None
        return self.observed / self.predicted - 1


@dataclass(frozen=True)
class Comparison:
    """A plan beside what ran.

    Attributes:
        lines: bytes of every collective, then seconds of each, then their sum.
        overlap: share of each collective's time in which Python did not stand waiting: what the plan's ``overlap``
            may be set to.
        reduction_predicted, reduction_observed: share of row-wise's global all-to-all bytes that the plan saves (the
            paper's Figure 6); row-wise as predicted, or as observed where that was given.
    """

    lines: tuple[ComparisonLine, ...]
    overlap: dict[str, float]
    reduction_predicted: float
    reduction_observed: float

    def document(self) -> dict[str, Any]:
        """For machines."""
        lines = [asdict(line) | {"error": line.error} for line in self.lines]
        return asdict(self) | {"lines": lines}

    def grid(self) -> Grid:
        """For people."""
        grid = new_grid("Predicted and observed, per rank and step", [""], ["predicted", "observed", "error"])
        for line in self.lines:
            show = units.format_bytes if line.unit == "bytes" else units.format_seconds
            cells = ["-" if value is None else show(value) for value in (line.predicted, line.observed)]
            grid.add_row(line.name, *cells, "-" if line.error is None else _shown(line.error))
        hidden = ", ".join(f"{name}: {share:.2f}" for name, share in self.overlap.items())
        grid.caption = (
            f"Global all-to-all traffic against row-wise: {self.reduction_predicted:.1%} less predicted,"
            f" {self.reduction_observed:.1%} less observed.\nHidden behind other work (the job's overlap): {{{hidden}}}"
        )
        return grid


def _shown(error: float) -> str:
    """As a percentage, or as a factor where that would be a long one."""
    return f"{error:+.1%}" if abs(error) < 10 else f"{1 + error:,.0f}x"


def compare_observed(plan: Plan, observed: Observation, row_wise: Observation | None = None) -> Comparison:
    """Set a plan's prediction beside an observation of it.

    Args:
        row_wise: an observation of the same model under row-wise sharding, ours or TorchRec's.

    Raises:
        DataError: the observation is of another plan or number of ranks, or the plan has no table in tiers of rows.
    """
    check_observed(plan, observed)
    if row_wise is not None and row_wise.world_size != observed.world_size:
        raise DataError(
            f"row-wise sharding was observed on {row_wise.world_size} ranks, the plan on {observed.world_size}; observe"
            " both on the same"
        )
    if not plan.tables:
        raise DataError("every table of the plan is sharded by TorchRec, of whose collectives nothing is compared")
    return _compared(plan, observed, row_wise)


def step_work(observed: Observation, plan: Plan) -> StepWork:
    """See :meth:`Observation.step_work`."""
    check_observed(plan, observed)
    waited = plain_sum(one.exposed_seconds for one in observed.collectives)
    local = plan.predicted.local_seconds
    # Waits are means over steps, so the step has to be: one slow step may wait longer than a median one takes.
    left = observed.mean_step_seconds - waited - local
    if left < 0:
        raise DataError(
            f"of a step of {units.format_seconds(observed.mean_step_seconds)} ranks waited"
            f" {units.format_seconds(waited)} and looked up and updated {units.format_seconds(local)}; nothing is left"
            " for dense work: give it, or other rates"
        )
    return StepWork(left)


def overlap_observed(observed: Observation, plan: Plan) -> dict[str, float]:
    """See :meth:`Observation.overlap`."""
    check_observed(plan, observed)
    return dict(compare_observed(plan, observed).overlap) if plan.tables else {}  # TorchRec runs pooled ones


def check_observed(plan: Plan, observed: Observation) -> None:
    """Whether an observation is of a plan.

    Raises:
        DataError: it is of another, or of another number of ranks.
    """
    if observed.fingerprint and observed.fingerprint != plan.fingerprint:
        raise DataError(
            f"the observation is of plan {observed.fingerprint[:12]}, this plan is {plan.fingerprint[:12]};"
            " compare it with the plan that ran"
        )
    if observed.world_size != plan.cluster.world_size:
        raise DataError(
            f"the observation is of {observed.world_size} ranks, the plan is for {plan.cluster.world_size}; compare it"
            " with the plan that ran"
        )


def _compared(plan: Plan, observed: Observation, row_wise: Observation | None) -> Comparison:
    expected = predicted_bytes(plan)
    seen = {(c.kind, c.group_size, c.content): c.bytes for c in observed.collectives}
    lines = [
        ComparisonLine(f"{kind}@{size} {content}", "bytes", expected.get(key), seen.get(key))
        for key in sorted(expected.keys() | seen.keys())
        for kind, size, content in [key]
    ]
    shown: dict[str, list[float]] = {}
    total_predicted = total_observed = 0.0
    for collective in _of_rows(plan):
        contents = (collective.content,) if collective.content else _TOGETHER[collective.kind]
        parts = observed.of(collective.kind, collective.group_size, *contents)
        seconds = plain_sum(part.seconds for part in parts)
        name = f"{collective.name} {collective.content}".rstrip()
        lines.append(ComparisonLine(name, "seconds", collective.seconds, seconds if parts else None))
        total_predicted, total_observed = total_predicted + collective.seconds, total_observed + seconds
        both = shown.setdefault(collective.name, [0.0, 0.0])
        both[0] += plain_sum(part.exposed_seconds for part in parts)
        both[1] += plain_sum(part.seconds if part.mean_seconds is None else part.mean_seconds for part in parts)
    overlap = {name: round(max(0.0, 1.0 - part / whole), 2) for name, (part, whole) in shown.items() if whole > 0}
    lines.append(ComparisonLine("all of these", "seconds", total_predicted, total_observed))
    steps = sorted(observed.step_seconds)
    lines.append(ComparisonLine("step (median)", "seconds", None, steps[len(steps) // 2] if steps else None))
    return Comparison(tuple(lines), overlap, *_reductions(plan, observed, row_wise))


def _reductions(plan: Plan, observed: Observation, row_wise: Observation | None) -> tuple[float, float]:
    world = plan.cluster.world_size

    def planned(cost: Cost) -> float:
        collectives = (c for c in cost.collectives if c.name == f"all_to_all@{world}" and c.content in ("", *_ROWS))
        return plain_sum(c.nbytes * c.calls for c in collectives)

    def of(observation: Observation) -> float:
        contents = ("embeddings", "gradients", "other embeddings")
        return plain_sum(c.bytes for c in observation.of("all_to_all", world, *contents))

    baseline = planned(plan.baselines["row_wise"])
    against = baseline if row_wise is None else of(row_wise)
    if not baseline or not against:
        return 0.0, 0.0
    return 1 - planned(plan.predicted) / baseline, 1 - of(observed) / against
