"""Optimizer steps of tensor-train cores and of pinned rows, taken within the backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from flexshard._internal import check_finite, host_waits_for
from flexshard.errors import TableError
from flexshard.tables import OPTIMIZERS, StepOptions

__all__ = [
    "FUSED",
    "CoreOptimizer",
    "StepCount",
    "Unscaled",
    "at_least_0",
    "checked_scaler",
    "full_buffer",
    "full_dtype",
    "in_full",
]

# Those whose state a slice of a core can have.
FUSED = ("sgd", "adagrad", "rowwise_adagrad", "adam")
States = Mapping[str, torch.Tensor]


def full_dtype(dtype: torch.dtype) -> torch.dtype:
    """What products and steps of such numbers are computed in: float64 where they are so already, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def in_full(tensor: torch.Tensor) -> torch.Tensor:
    """In the type that :func:`full_dtype` has for it."""
    return tensor.to(full_dtype(tensor.dtype))


def full_buffer(module: nn.Module, name: str, dtype: torch.dtype) -> torch.Tensor:
    """A buffer of a module in this type, contiguous, whatever the module was cast to."""
    now: torch.Tensor = getattr(module, name)
    if now.dtype != dtype or not now.is_contiguous():  # another memory format, say
        setattr(module, name, now.to(dtype).contiguous())
    return getattr(module, name)


class CoreOptimizer:
    """What an optimizer does to slices of cores (a slice is to it what a row is), and to rows that are pinned.

    Attributes:
        name: "sgd", "adagrad", "rowwise_adagrad" or "adam".
        learning_rate, eps: as usual; they may be changed between steps.
        process_group: over whose ranks gradients are averaged, if any.
        grad_scaler: by which the loss is scaled, if any: its scale is taken off gradients.
        checked: whether gradients on the CPU are looked at, so that none that is not finite gets into the cores.
        updates: steps so far: cores of a lookup must not have been updated before its backward pass.
        is_skipping: whether the step of the backward pass under way is left out, for a scaler.
        lost: what it had before it was pickled, and has to be given again.
    """

    def __init__(
        self,
        name: str,
        learning_rate: float | None = None,
        eps: float | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
        grad_scaler: Any = None,
        checked: bool = True,
    ) -> None:
        """As :class:`TTTable` has them; raises TableError for numbers out of range."""
        if name not in FUSED:
            raise TableError(f"optimizer is one of {', '.join(FUSED)} or None, found {name!r}")
        self.name, self.updates, self.rule, self.is_skipping = name, 0, OPTIMIZERS[name], False
        self.lost: tuple[str, ...] = ()
        self.learning_rate = at_least_0(0.01 if learning_rate is None else learning_rate, "learning_rate")
        self.eps = self.checked_eps(1e-8 if eps is None else eps)
        if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
            raise TableError(f"process_group must be a torch.distributed.ProcessGroup, found {process_group!r}")
        self.process_group, self.grad_scaler, self.checked = process_group, checked_scaler(grad_scaler), checked

    def checked_eps(self, value: float) -> float:
        """Raises TableError for what it cannot be."""
        eps = at_least_0(value, "eps")
        if not eps and self.has_state:
            raise TableError("eps must be above 0: numbers without a gradient yet would be divided by 0")
        return eps

    @classmethod
    def of(cls, name: str | None, checked: bool, **options: Any) -> CoreOptimizer | None:
        """One by that name, if any.

        Raises:
            TableError: options (those that are not None) of none, or out of range.
        """
        if name is not None:
            return cls(name, checked=checked, **options)
        given = [option for option, value in options.items() if value is not None]
        if given:
            raise TableError(
                f"{given[0]} goes with an optimizer of the table's own; name one, or give it to the optimizer that the"
                " cores are given to"
            )
        return None

    @property
    def has_state(self) -> bool:
        """Whether it keeps sums or means of gradients."""
        return bool(self.rule.states)

    def new_states(self, like: torch.Tensor) -> dict[str, torch.Tensor]:
        """Zeros for slices or rows as these: as large, or one number each; in float32, or float64 of such."""
        kind = full_dtype(like.dtype)
        return {
            state.name: torch.zeros(like.shape[:1] if state.per_row else like.shape, dtype=kind, device=like.device)
            for state in self.rule.states
        }

    def __deepcopy__(self, memo: Any) -> CoreOptimizer:
        """A copy averages over the same ranks, and has the same scaler."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        memo[id(self)] = other
        return other

    def __getstate__(self) -> dict[str, Any]:
        """Saved without the ranks and the scaler, which are this process's; they have to be given again."""
        own = {"process_group": self.process_group, "grad_scaler": self.grad_scaler}
        lost = [*self.lost, *(name for name, value in own.items() if value is not None)]
        return {**self.__dict__, "process_group": None, "grad_scaler": None, "lost": tuple(lost)}

    @property
    def is_distributed(self) -> bool:
        """Whether other ranks have gradients of the same table."""
        return self.process_group is not None and dist.get_world_size(self.process_group) > 1

    def averaged(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Gradients, averaged over the ranks in one call."""
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat, group=self.process_group)
        flat /= dist.get_world_size(self.process_group)
        parts = flat.split([gradient.numel() for gradient in gradients])
        return [part.view(gradient.shape) for part, gradient in zip(parts, gradients, strict=True)]

    def check_lookup(self) -> None:
        """Check that a gradient that comes back can be stepped by.

        Raises:
            TableError: other ranks have gradients of their own, or it would be scaled unbeknown.
        """
        if self.lost:
            raise TableError(
                f"the table was pickled with {' and '.join(self.lost)}, which are of the process that saved it; set"
                f" them again, as table.{self.lost[0]} = ..., or to None"
            )
        if self.process_group is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise TableError(
                f"optimizer {self.name!r} updates the cores within backward, where ranks have their own gradients; give"
                " the table process_group=torch.distributed.group.WORLD to average them, or use optimizer=None and an"
                " optimizer after them"
            )
        if self.grad_scaler is None and any(
            torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16
            for device in ("cpu", "cuda")
        ):
            raise TableError(
                f"optimizer {self.name!r} takes its step within backward, where a GradScaler has scaled gradients of"
                " float16; give the table grad_scaler=scaler, or use optimizer=None"
            )

    def unscaled(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """The gradient of a lookup without the scaler's factor; None where a scaler would skip the step. All ranks that
        average agree.

        Raises:
            TableError: numbers that are not finite, and nobody who scaled them.
        """
        scaled = self.grad_scaler is not None and self.grad_scaler.is_enabled()
        if scaled:
            gradient = gradient / self.grad_scaler.get_scale()
        elif not self.checked or gradient.device.type != "cpu":
            return gradient
        finite = gradient.isfinite().all()
        if self.is_distributed:
            flag = finite.to(torch.float32)
            dist.all_reduce(flag, dist.ReduceOp.MIN, self.process_group)
            finite = flag > 0
        if scaled:
            _report(self.grad_scaler, self, finite)
        if bool(finite):
            return gradient
        if scaled:
            return None
        raise TableError(
            "a gradient has numbers that are not finite, which every row would get through the cores; no step has been"
            " taken (validate=False takes it)"
        )

    @torch.no_grad()
    def step(self, values: torch.Tensor, gradient: torch.Tensor, states: States, number: int = 1) -> None:
        """Update slices of a core, or rows, in place; shape (n, ...), states (n, ...) or (n,).

        Args:
            values, gradient, states: of them.
            number: of the step, from 1 on.
        """
        values = values.detach()
        if not self.has_state:
            values.add_(gradient.to(values.dtype), alpha=-self.learning_rate)
            return
        flat, weight = in_full(gradient).flatten(1), in_full(values).flatten(1)
        options = StepOptions(learning_rate=self.learning_rate, eps=self.eps, step=number)
        own = {name: state.unsqueeze(1) if state.dim() == 1 else state.flatten(1) for name, state in states.items()}
        values.sub_(self.rule.change(flat, weight, own, options).view(gradient.shape).to(values.dtype))

    @torch.no_grad()
    def step_at(
        self, values: torch.Tensor, which: torch.Tensor, gradient: torch.Tensor, states: States, number: int = 1
    ) -> None:
        """Update some slices of a core in place; ``which`` of shape (n,) distinct, gradients of shape (n, ...)."""
        values = values.detach()
        if not self.has_state:
            values.index_add_(0, which, gradient.to(values.dtype), alpha=-self.learning_rate)
            return
        own, held = values[which], {name: state[which] for name, state in states.items()}
        self.step(own, gradient, held, number)
        values[which] = own
        for name, state in states.items():
            state[which] = held[name]

    @torch.no_grad()
    def step_of_read(
        self, values: torch.Tensor, read: torch.Tensor, gradient: torch.Tensor, states: States, number: int = 1
    ) -> None:
        """Update the slices that were read in place; ``read`` of shape (all,), bool, gradients of all."""
        if not host_waits_for(values.device):
            which = read.nonzero().flatten()
            self.step_at(values, which, gradient[which], states, number)
            return
        values = values.detach()
        own, held = values.clone(), {name: state.clone() for name, state in states.items()}
        self.step(own, gradient, held, number)
        for before, after in ((values, own), *((state, held[name]) for name, state in states.items())):
            before.copy_(torch.where(read.view(-1, *[1] * (before.dim() - 1)), after, before))


class Unscaled(torch.autograd.Function):
    """Rows of one lookup, whose gradient is looked at, and a scaler's factor taken off it, before anything changes."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, optimizer: CoreOptimizer) -> Any:
        """The rows."""
        ctx.optimizer = optimizer
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Their gradient."""
        optimizer = ctx.optimizer
        own = optimizer.unscaled(gradient)
        optimizer.is_skipping = own is None
        return torch.zeros_like(gradient) if own is None else own, None


class StepCount:
    """How many steps parameters have had. The buffer ``steps`` of their module has the same, where the optimizer
    counts: reading it waits for a device, so it is read where somebody else has written to it alone.

    Attributes:
        numbers: of each.
    """

    def __init__(self, parameters: int) -> None:
        self.numbers = [0] * parameters
        self._version = -1

    def add(self, module: Any, which: int = 0) -> int:
        """Count one more; how many there were then."""
        steps = getattr(module, "steps", None)
        if steps is not None and (self._version != steps._version or not host_waits_for(steps.device)):
            self.numbers = steps.tolist()
        self.numbers[which] += 1
        if steps is not None:
            steps[which] += 1
            self._version = steps._version
        return self.numbers[which]


def checked_scaler(scaler: Any) -> Any:
    """A GradScaler, or None; raises TableError."""
    if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
        raise TableError(f"grad_scaler is a torch.amp.GradScaler, found {type(scaler).__name__}")
    return scaler


def _report(scaler: Any, optimizer: CoreOptimizer, finite: torch.Tensor) -> None:
    """Tell a scaler of a step as its own ``unscale_`` does, so that its scale falls where gradients overflow here."""
    states = getattr(scaler, "_per_optimizer_states", None)
    if states is not None:
        states[id(optimizer)]["found_inf_per_device"][finite.device] = (~finite).to(torch.float32)


def at_least_0(value: float, name: str) -> float:
    """A finite number that is not negative; raises TableError."""
    number = check_finite(value, name, TableError)
    if number < 0:
        raise TableError(f"{name} must be at least 0, found {value}")
    return number
