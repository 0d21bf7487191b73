"""Where the tables of an exchange are, and how they are reached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from flexshard._internal import LevelGroups
from flexshard.costmodels import Layout, StepCollective
from flexshard.executors.comm.collectives import Collectives
from flexshard.executors.comm.wire import Wire
from flexshard.executors.stores.base import RowStore
from flexshard.executors.stores.replicas import ReplicaReduction

__all__ = ["ExchangeContext"]


@dataclass(frozen=True)
class ExchangeContext:
    """Where tables are, and how they are reached.

    Attributes:
        layout: where every row lives.
        collectives: of a step, as started.
        groups: process groups by group size.
        stores: this rank's rows, of each class of tables.
        class_slots: first slot of each class, and the number of a rank's slots.
        modules: classes of each module.
        replicas: what sums gradients over copies of some modules' rows, of each level; None for one without copies.
        transport: what carries tensors.
        forward, backward: in what form rows and gradients travel.
        gathered_dtypes: of rows where they are looked up, of each class.
        on_update: called with a module, and what its rows were looked up by, before they are updated.
        check: raises where rows have moved elsewhere since.
        device: of the rows.
    """

    layout: Layout
    collectives: Sequence[StepCollective]
    groups: dict[int, LevelGroups]
    stores: Sequence[RowStore]
    class_slots: tuple[int, ...]
    modules: Sequence[range]
    replicas: Callable[[tuple[int, ...]], Sequence[ReplicaReduction | None]]
    transport: Collectives
    forward: Wire
    backward: Wire
    gathered_dtypes: Sequence[torch.dtype]
    on_update: Callable[[int, object], None]
    check: Callable[[], None]
    device: torch.device

    @cached_property
    def bundles(self) -> list[tuple[int, ...]]:
        """Classes whose rows travel in one buffer; each by itself where rows do not travel."""
        rows = [collective for collective in self.collectives if collective.content == "embeddings"]
        found = [collective.classes for collective in rows if collective.group_size == rows[0].group_size]
        return found or [(index,) for index in range(len(self.stores))]

    @cached_property
    def anchor(self) -> torch.Tensor:
        """A zero that every batch's look-up hangs on, for there to be a backward pass; it never gets a gradient."""
        with torch.inference_mode(False):
            return torch.zeros((), device=self.device, requires_grad=True)
