"""The optimizer of planned tables as TorchRec's loops and checkpoints see it."""

from __future__ import annotations

from typing import Any

import torch
from torchrec.optim.fused import FusedOptimizer

from flexshard.executors.sharding.table_group import TableGroup
from flexshard.executors.state.logical import from_logical, to_logical

__all__ = ["FlexShardFusedOptimizer"]


class _LogicalState:
    """A state in a checkpoint: gathered when it is saved, split when it is loaded."""

    def __init__(self, groups: list[TableGroup], group: int, table: int, name: str) -> None:
        self._groups, self._group, self._table, self._name = groups, group, table, name

    def state_dict(self) -> Any:
        return to_logical(self._groups[self._group], self._table, self._name)

    def load_state_dict(self, value: Any) -> None:
        from_logical(self._groups[self._group], self._table, self._name, value)


class _Steps:
    """Updates so far, which Adam's bias correction needs."""

    def __init__(self, groups: list[TableGroup], group: int) -> None:
        self._groups, self._group = groups, group

    def state_dict(self) -> torch.Tensor:
        return torch.tensor([self._groups[self._group].steps])

    def load_state_dict(self, value: Any) -> None:
        self._groups[self._group].steps = int(value)


class FlexShardFusedOptimizer(FusedOptimizer):
    """Updates happen during backward; ``step`` only passes a changed learning rate on.

    ``state_dict`` holds every state by table and original id; it is a collective operation, as loading is.
    """

    def __init__(self, groups: list[TableGroup]) -> None:
        """``groups`` is kept, so that resharding may replace them."""
        self._groups = groups
        params: dict[str, Any] = {}
        state: dict[Any, Any] = {}
        param_groups = []
        for number, group in enumerate(groups):
            keys = []
            for index, table in enumerate(group.layout.tables):
                # Stands for the table, whose rows lie in several tensors.
                key = torch.empty(0, device="meta")
                params[f"embeddings.{table}.weight"] = key
                keys.append(key)
                states: dict[str, Any] = {
                    f"{table}.{name}": _LogicalState(groups, number, index, name)
                    for name in group.traits.spec.state_names
                }
                if group.traits.spec.optimizer.counts_steps:
                    states[f"{table}.step"] = _Steps(groups, number)
                state[key] = states
            param_groups.append({"params": keys, "lr": group.traits.spec.learning_rate})
        super().__init__(params, state, param_groups)

    def step(self, closure: Any = None) -> None:  # noqa: ARG002 - the base class names it
        """Pass the learning rates of ``param_groups`` on."""
        for group, options in zip(self._groups, self.param_groups, strict=True):
            group.set_learning_rate(float(options["lr"]))

    def zero_grad(self, set_to_none: bool = False) -> None:  # noqa: ARG002 - the base class names it
        """Nothing: gradients do not outlive backward; but learning rates that a scheduler has set count from here."""
        self.step()
