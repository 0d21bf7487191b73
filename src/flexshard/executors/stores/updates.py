"""What an optimizer does to replicated rows, as FBGEMM's fused kernels do it to sharded ones.

FBGEMM updates a row by the sum of its gradients of one backward pass, and leaves rows alone that were not read. For
SGD and both Adagrads a gradient of 0 changes nothing, so all rows can be updated; others have to leave such rows alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from flexshard.errors import TableError
from flexshard.tables import DATA_TYPES, OPTIMIZERS, Optimizer, StepOptions

__all__ = ["OptimizerSpec", "apply_update", "new_state", "rounded"]

_CHUNK_ROWS = 1 << 16
# Options that say how FBGEMM stores and looks up rows, not what an update does to them.
_NEUTRAL = {"bounds_check_mode", "output_dtype", "prefetch_pipeline", "record_cache_metrics", "stochastic_rounding"}


@dataclass(frozen=True)
class OptimizerSpec:
    """A fused optimizer.

    Attributes:
        name: of the optimizer in :data:`flexshard.tables.OPTIMIZERS`.
        learning_rate, eps, beta1, beta2: as FBGEMM's; its defaults.
        options: other options, as text: tables that differ in one do not travel together.
        fused_params: all that was given, for FBGEMM's own kernel.
    """

    name: str
    learning_rate: float = 0.01
    eps: float = 1e-8
    beta1: float = 0.9
    beta2: float = 0.999
    options: tuple[tuple[str, str], ...] = ()
    fused_params: Mapping[str, Any] = field(default_factory=dict, hash=False, compare=False)

    @classmethod
    def of(cls, fused_params: Mapping[str, Any], table: str, device: torch.device) -> OptimizerSpec:
        """From TorchRec's ``fused_params``.

        Raises:
            TableError: an optimizer or option that replicated rows cannot have, or that the device does not offer.
        """
        kind = fused_params.get("optimizer", EmbOptimType.EXACT_SGD)
        if isinstance(kind, str):
            kind = next((known for known in EmbOptimType if known.value == kind), kind)
        runs = {EmbOptimType[one.fbgemm]: one for one in OPTIMIZERS.values() if one.fbgemm is not None}
        if kind not in runs:
            raise TableError(
                f"table {table!r}: optimizer {getattr(kind, 'value', kind)} on {device.type} is not supported under a"
                f" FlexShard plan; use one of {', '.join(one.name for one in runs.values())}"
            )
        name = runs[kind].name
        if not runs[kind].on_cpu and device.type == "cpu":
            raise TableError(
                f"table {table!r}: optimizer {name} is not offered by FBGEMM on {device.type}; train on CUDA or use"
                " another optimizer"
            )
        known = ("learning_rate", "eps", "beta1", "beta2")
        given = {name: float(fused_params[name]) for name in known if name in fused_params}
        others = {name: value for name, value in fused_params.items() if name not in (*known, "optimizer")}
        refused = [name for name, value in others.items() if name not in _NEUTRAL and value]
        if refused:
            raise TableError(
                f"table {table!r}: optimizer {name} on {device.type} with {refused[0]} is not supported under a"
                f" FlexShard plan, whose replicated rows take {', '.join(known)} alone; leave it out"
            )
        options = tuple(sorted((name, str(value)) for name, value in others.items()))
        return cls(name, **given, options=options, fused_params=dict(fused_params) | {"optimizer": kind})

    @property
    def optimizer(self) -> Optimizer:
        """What it does."""
        return OPTIMIZERS[self.name]

    @property
    def rounds_stochastically(self) -> bool:
        """Whether 16-bit weights are, as FBGEMM does it unless told otherwise."""
        return bool(self.fused_params.get("stochastic_rounding", True))

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of its state, as TorchRec's checkpoints have them."""
        return tuple(state.name for state in self.optimizer.states)

    def state_width(self, name: str, dim: int) -> int:
        """Numbers per row of a state."""
        return self.optimizer.state(name).width(dim)


def new_state(spec: OptimizerSpec, rows: int, dim: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Zeros of shape (rows, 1) or (rows, D) each, float32."""
    return {
        name: torch.zeros(rows, spec.state_width(name, dim), dtype=torch.float32, device=device)
        for name in spec.state_names
    }


def apply_update(
    spec: OptimizerSpec,
    weight: torch.Tensor,
    gradient: torch.Tensor,
    state: Mapping[str, torch.Tensor],
    *,
    learning_rate: float,
    step: int,
    seed: int = 0,
) -> None:
    """Update rows in place by their summed gradients.

    Args:
        weight: shape (n, D), any floating type.
        gradient: shape (n, D); not kept.
        state: shape (n, 1) or (n, D) each, float32.
        learning_rate: of this step.
        step: 1 for the first (Adam's bias correction).
        seed: of the rounding of 16-bit weights, with the step: copies that give the same round alike.
    """
    random = torch.Generator(device=weight.device).manual_seed((seed << 40) + step)
    options = StepOptions(spec.eps, spec.beta1, spec.beta2, step)
    for start in range(0, weight.shape[0], _CHUNK_ROWS):  # bounds the memory of what follows
        part = slice(start, start + _CHUNK_ROWS)
        grad = gradient[part].float()
        local = {name: values[part] for name, values in state.items()}
        values = weight[part].float()
        updated = values - learning_rate * spec.optimizer.change(grad, values, local, options)
        # FBGEMM does so on CUDA alone.
        by_chance = spec.rounds_stochastically and weight.device.type == "cuda"
        weight[part] = rounded(updated, weight.dtype, random if by_chance else None)


def rounded(values: torch.Tensor, dtype: torch.dtype, random: torch.Generator | None) -> torch.Tensor:
    """As 16-bit numbers, up or down by chance, so that many small updates are not lost; float32 stays as it is."""
    if dtype == torch.float32 or random is None:
        return values.to(dtype)
    bits = DATA_TYPES[str(dtype).removeprefix("torch.")].dropped_bits
    noise = torch.randint(0, 1 << bits, values.shape, generator=random, dtype=torch.int32, device=values.device)
    return ((values.view(torch.int32) + noise) & -(1 << bits)).view(torch.float32).to(dtype)
