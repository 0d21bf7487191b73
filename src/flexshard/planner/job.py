"""A planning problem as people keep it in a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flexshard.costmodels import TTRates
from flexshard.planner.compression.choosing import checked_loss_limit, plan_compression
from flexshard.planner.compression.decision import CompressionPlan, TTOption
from flexshard.planner.plan import Plan
from flexshard.planner.problem import Problem
from flexshard.planner.solving import solve
from flexshard.tables import Table
from flexshard.topologies import Cluster

__all__ = ["Job"]


@dataclass(frozen=True, init=False)
class Job(Problem):
    """A :class:`Problem`, and the tensor trains that its tables may become.

    Attributes:
        options: tensor trains by table, and
        loss_limit: as for :func:`plan_compression`; a plan of tiers alone does not look at them.

    Raises:
        JobError: as :class:`Problem`, or a loss limit below 0.
    """

    options: Mapping[str, tuple[TTOption, ...]]
    loss_limit: float | None

    def __init__(
        self,
        tables: Sequence[Table],
        cluster: Cluster,
        batch_size: int,
        *how: Any,
        options: Mapping[str, tuple[TTOption, ...]] | None = None,
        loss_limit: float | None = None,
        **named: Any,
    ) -> None:
        super().__init__(tables, cluster, batch_size, *how, **named)
        object.__setattr__(self, "options", dict(options or {}))
        object.__setattr__(self, "loss_limit", checked_loss_limit(loss_limit))

    def solve(self) -> Plan:
        """The plan; raises as :func:`solve`."""
        return solve(self)

    def compress(self, rates: TTRates, *, hashed: bool = False) -> CompressionPlan:
        """Which tables to compress; raises as :func:`plan_compression`."""
        return plan_compression(self, options=self.options, rates=rates, loss_limit=self.loss_limit, hashed=hashed)
