"""What an optimizer of a table is: its names, its state, and what it does to a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["Optimizer", "State", "StepOptions"]

_STATE_SCALAR_BYTES = 4  # FBGEMM keeps state in float32 whatever the weights


@dataclass(frozen=True)
class State:
    """One state of an optimizer.

    Attributes:
        name: as TorchRec's checkpoints have it.
        per_row: whether a row has one number, instead of one per element.
    """

    name: str
    per_row: bool

    def width(self, dim: int) -> int:
        """Numbers per row."""
        return 1 if self.per_row else dim


@dataclass(frozen=True)
class StepOptions:
    """What an update depends on besides gradient, weight and state.

    Attributes:
        learning_rate: of this step.
        eps, beta1, beta2, momentum, eta: as FBGEMM's; its defaults.
        weight_decay: of the rows that a batch read; 0 for none.
        decay_mode: what it is added to: "l2" the gradient, "decoupled" the step (Loshchilov and Hutter 2019).
        step: number of the update, 1 for the first.
    """

    learning_rate: float = 1.0
    eps: float = 1e-8
    beta1: float = 0.9
    beta2: float = 0.999
    momentum: float = 0.9
    eta: float = 0.001
    weight_decay: float = 0.0
    decay_mode: str = "decoupled"
    step: int = 1


class Optimizer:
    """An optimizer; each has a file of its own beside this one.

    Attributes:
        name: here, in job files and plans.
        torchrec: values of FBGEMM's ``EmbOptimType`` by which TorchRec's ``fused_params`` name it.
        fbgemm: the member of ``EmbOptimType`` whose kernels update rows without copies; None if plans with it are made
            but not run.
        on_cpu: whether FBGEMM has these kernels on the CPU; elsewhere rows without copies are updated as those with
            copies are.
        takes: options besides the learning rate, as ``fused_params`` name them.
        counts_steps: whether an update depends on its number, as a bias correction does; checkpoints keep it then.
        moves_at_zero: whether a row that was read changes though its gradient is 0, as momentum moves it.
        states: in the order of FBGEMM's ``split_optimizer_states``.
    """

    name: str
    torchrec: tuple[str, ...]
    fbgemm: str | None = None
    on_cpu: bool = True
    takes: tuple[str, ...] = ()
    counts_steps: bool = False
    moves_at_zero: bool = False
    states: tuple[State, ...] = ()

    def state_bytes(self, dim: int) -> int:
        """Bytes of state of a row."""
        return _STATE_SCALAR_BYTES * sum(state.width(dim) for state in self.states)

    @property
    def state_bytes_per_element(self) -> int:
        """Of them, those that grow with the dimension."""
        return _STATE_SCALAR_BYTES * sum(not state.per_row for state in self.states)

    def state(self, name: str) -> State:
        """One state by its name."""
        return next(state for state in self.states if state.name == name)

    def change(
        self, gradient: torch.Tensor, weight: torch.Tensor, state: Mapping[str, torch.Tensor], options: StepOptions
    ) -> torch.Tensor:
        """What is taken off rows that a batch read; the state is updated in place.

        Args:
            gradient: of some rows, summed over a batch, float32; shape (n, D).
            weight: of these rows before the update, float32; shape (n, D). Not changed.
            state: float32; shape (n, 1) or (n, D) each.
            options: of this step.

        Returns:
            shape (n, D); may be a state.
        """
        raise NotImplementedError(f"plans with {self.name} are made, not run")
