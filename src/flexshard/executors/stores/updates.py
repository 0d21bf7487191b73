"""What an optimizer does to replicated rows, as FBGEMM's fused kernels do it to sharded ones.

FBGEMM updates a row by the sum of its gradients of one backward pass, and leaves rows alone that were not read. For
SGD and both Adagrads a gradient of 0 changes nothing, so all rows can be updated; momentum and weight decay move rows
that were read and whose gradient is 0, and only those: which rows these are has to be known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode

from flexshard.errors import TableError
from flexshard.tables import DATA_TYPES, OPTIMIZERS, Optimizer, StepOptions

__all__ = ["OptimizerSpec", "apply_update", "new_state", "rounded"]

_CHUNK_ROWS = 1 << 16
# Options that say how FBGEMM stores and looks up rows, not what an update does to them.
_NUMBERS = ("eps", "beta1", "beta2", "momentum", "eta", "weight_decay")
_KNOWN = {"learning_rate", *_NUMBERS, "weight_decay_mode"}
_NO_DEFAULT = ("momentum", "weight_decay")  # where these are given, they are meant
_NEUTRAL = {"bounds_check_mode", "output_dtype", "prefetch_pipeline", "record_cache_metrics", "stochastic_rounding"}


@dataclass(frozen=True)
class OptimizerSpec:
    """A fused optimizer.

    Attributes:
        name: of the optimizer in :data:`flexshard.tables.OPTIMIZERS`.
        learning_rate: at the start.
        step_options: as FBGEMM's; its defaults.
        options: other options, as text: tables that differ in one do not travel together.
        fused_params: all that was given, for FBGEMM's own kernel.
    """

    name: str
    learning_rate: float = 0.01
    step_options: StepOptions = StepOptions()  # noqa: RUF009 - frozen
    options: tuple[tuple[str, str], ...] = ()
    fused_params: Mapping[str, Any] = field(default_factory=dict, hash=False, compare=False)

    @classmethod
    def of(cls, fused_params: Mapping[str, Any], table: str, device: torch.device) -> OptimizerSpec:
        """From TorchRec's ``fused_params``, or what ``apply_optimizer_in_backward`` was given.

        Raises:
            TableError: an optimizer that is not known, or an option that it does not have.
        """
        given = dict(fused_params)
        if "betas" in given:
            given["beta1"], given["beta2"] = given.pop("betas")
        kind = given.get("optimizer", EmbOptimType.EXACT_SGD)
        if isinstance(kind, str):
            kind = next((known for known in EmbOptimType if known.value == kind), kind)
        runs = {EmbOptimType[one.fbgemm]: one for one in OPTIMIZERS.values() if one.fbgemm is not None}
        if kind not in runs:
            raise TableError(
                f"table {table!r}: optimizer {getattr(kind, 'value', kind)} on {device.type} is not supported under a"
                f" FlexShard plan; use one of {', '.join(one.name for one in runs.values())}"
            )
        optimizer = runs[kind]
        others = {name: value for name, value in given.items() if name not in _KNOWN and name != "optimizer"}
        unknown = [name for name, value in others.items() if name not in _NEUTRAL and value]
        unknown += [name for name in _NO_DEFAULT if given.get(name) and name not in optimizer.takes]
        if unknown:
            takes = ", ".join(("learning_rate", *optimizer.takes))
            raise TableError(
                f"table {table!r}: optimizer {optimizer.name} on {device.type} has no {unknown[0]}, which FBGEMM"
                f" ignores or a FlexShard plan does not support; it takes {takes}: leave {unknown[0]} out, or use"
                " another optimizer"
            )
        numbers: dict[str, Any] = {name: float(given[name]) for name in _NUMBERS if name in given}
        mode = _decay_mode(given.get("weight_decay_mode"), optimizer, table, numbers.get("weight_decay", 0.0))
        options = tuple(sorted((name, str(value)) for name, value in others.items()))
        return cls(
            optimizer.name,
            float(given.get("learning_rate", cls.learning_rate)),
            replace(StepOptions(decay_mode=mode), **numbers),
            options,
            given | {"optimizer": kind},
        )

    @property
    def optimizer(self) -> Optimizer:
        """What it does."""
        return OPTIMIZERS[self.name]

    @property
    def moves_at_zero(self) -> bool:
        """Whether a row that was read changes though its gradient is 0."""
        return self.optimizer.moves_at_zero or bool(self.step_options.weight_decay)

    @property
    def rounds_stochastically(self) -> bool:
        """Whether 16-bit weights are, as FBGEMM does it unless told otherwise."""
        return bool(self.fused_params.get("stochastic_rounding", True))

    def rounds_by_chance(self, weight: torch.Tensor) -> bool:
        """Whether an update of these weights rounds so: FBGEMM does on CUDA alone."""
        return self.rounds_stochastically and weight.device.type == "cuda" and weight.dtype != torch.float32

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of its state, as TorchRec's checkpoints have them."""
        return tuple(state.name for state in self.optimizer.states)

    def state_width(self, name: str, dim: int) -> int:
        """Numbers per row of a state."""
        return self.optimizer.state(name).width(dim)


def _decay_mode(given: Any, optimizer: Optimizer, table: str, decay: float) -> str:
    """How weight decay is applied.

    Raises:
        TableError: a mode that copies cannot have, or none where there is a choice.
    """
    if "weight_decay_mode" not in optimizer.takes or not decay:
        return "decoupled"
    modes = {WeightDecayMode.L2: "l2", WeightDecayMode.DECOUPLE: "decoupled"}
    mode = WeightDecayMode.NONE if given is None else WeightDecayMode(given)
    if mode not in modes:
        raise TableError(
            f"table {table!r}: weight_decay={decay:g} with weight_decay_mode {mode.name}, which FBGEMM ignores or a"
            " FlexShard plan does not support; set weight_decay_mode to WeightDecayMode.L2 or DECOUPLE"
        )
    return modes[mode]


def new_state(
    spec: OptimizerSpec,
    rows: int,
    dim: int,
    device: torch.device,
    *,
    zeros: Callable[..., torch.Tensor] = torch.zeros,
) -> dict[str, torch.Tensor]:
    """Zeros of shape (rows, 1) or (rows, D) each, float32."""
    return {
        name: zeros(rows, spec.state_width(name, dim), dtype=torch.float32, device=device) for name in spec.state_names
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
    read: torch.Tensor | None = None,
) -> None:
    """Update rows in place by their summed gradients.

    Args:
        weight: shape (n, D), any floating type.
        gradient: shape (n, D); not kept.
        state: shape (n, 1) or (n, D) each, float32.
        learning_rate: of this step.
        step: 1 for the first (Adam's bias correction).
        seed: of the rounding of 16-bit weights, with the step: copies that give the same round alike.
        read: which rows a batch read, shape (n,), bool; the others stay as they are. None: all.
    """
    random = None
    if spec.rounds_by_chance(weight):
        random = torch.Generator(device=weight.device).manual_seed((seed << 40) + step)
    options = replace(spec.step_options, learning_rate=learning_rate, step=step)
    for start in range(0, weight.shape[0], _CHUNK_ROWS):  # bounds the memory of what follows
        part = slice(start, start + _CHUNK_ROWS)
        grad = gradient[part].float()
        local = {name: values[part] for name, values in state.items()}
        values = weight[part].float()
        before = {} if read is None else {name: state.clone() for name, state in local.items()}
        updated = values - spec.optimizer.change(grad, values, local, options)
        if read is not None:
            here = read[part].view(-1, 1)
            updated = torch.where(here, updated, values)
            for name, old in before.items():
                local[name].copy_(torch.where(here, local[name], old))
        weight[part] = rounded(updated, weight.dtype, random)


def rounded(values: torch.Tensor, dtype: torch.dtype, random: torch.Generator | None) -> torch.Tensor:
    """As 16-bit numbers, up or down by chance, so that many small updates are not lost; float32 stays as it is."""
    if dtype == torch.float32 or random is None:
        return values.to(dtype)
    bits = DATA_TYPES[str(dtype).removeprefix("torch.")].dropped_bits
    noise = torch.randint(0, 1 << bits, values.shape, generator=random, dtype=torch.int32, device=values.device)
    return ((values.view(torch.int32) + noise) & -(1 << bits)).view(torch.float32).to(dtype)
