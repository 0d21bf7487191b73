"""Rows that this rank holds: those that have copies elsewhere (dense gradients), and those that do not (FBGEMM)."""

from __future__ import annotations

import abc
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn

from flexshard.executors._collectives import Label, Pending, all_gather, all_reduce
from flexshard.executors._optimizers import OptimizerSpec, apply_update, new_state

__all__ = ["Gate", "ReplicatedStore", "RowStore", "ShardedStore"]

_PRECISION = {torch.float32: SparseType.FP32, torch.float16: SparseType.FP16, torch.bfloat16: SparseType.BF16}


class Gate:
    """Stands between a lookup and its gradient, which comes from other ranks: hands it over once it is here."""

    def __init__(self) -> None:
        self._pending: Pending | None = None
        self._gradient: Any = None
        self.scale = 1.0

    def expect(self, pending: Pending | None, gradient: Any, scale: float) -> None:
        """``gradient()`` gives it once ``pending`` is over; it still has to be multiplied by ``scale``."""
        self._pending, self._gradient, self.scale = pending, gradient, scale

    def take(self) -> torch.Tensor:
        """The gradient of the looked-up rows before it is scaled, shape (R, D)."""
        if self._pending is not None:
            self._pending.wait()
        gradient: torch.Tensor = self._gradient()
        self._pending = self._gradient = None
        return gradient


class RowStore(nn.Module, abc.ABC):
    """Rows of one level on this rank.

    Attributes:
        group_size: g.
        spec: their optimizer.
    """

    def __init__(self, group_size: int, spec: OptimizerSpec) -> None:
        super().__init__()
        self.group_size, self.spec = group_size, spec

    @abc.abstractmethod
    def rows(self, slots: torch.Tensor, gate: Gate) -> torch.Tensor:
        """Rows at slots (shape (R,)), shape (R, D), whose gradient is the gate's."""

    @property
    @abc.abstractmethod
    def values(self) -> torch.Tensor:
        """Weights, shape (slots, D); writing to it changes them."""

    @abc.abstractmethod
    def states(self) -> dict[str, torch.Tensor]:
        """Optimizer state by TorchRec's names, shape (slots, 1) or (slots, D) each; writing changes it."""

    def part(self, name: str) -> torch.Tensor:
        """Weights ("weight") or a state by its name; writing changes it."""
        return self.values if name == "weight" else self.states()[name]

    @abc.abstractmethod
    def set_learning_rate(self, learning_rate: float) -> None:
        """From the next update on."""

    @abc.abstractmethod
    def begin_step(self, step: int) -> None:
        """The rows that are looked up next will be updated for the ``step``-th time (1 for the first)."""


class _Gated(torch.autograd.Function):
    """Rows in the type in which they are sent; their gradient is the gate's, in the kernel's own."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, gate: Gate, dtype: torch.dtype) -> torch.Tensor:
        ctx.gate, ctx.kernel_dtype = gate, rows.dtype
        return rows.to(dtype) if rows.dtype != dtype else rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[torch.Tensor, None, None]:
        gradient = ctx.gate.take().to(ctx.kernel_dtype)
        return gradient * ctx.gate.scale, None, None


class ShardedStore(RowStore):
    """Rows without copies, in FBGEMM's table-batched embedding: looked up by one kernel, updated inside backward."""

    def __init__(
        self, group_size: int, spec: OptimizerSpec, slots: int, dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(group_size, spec)
        cuda = device.type == "cuda"
        place = EmbeddingLocation.DEVICE if cuda else EmbeddingLocation.HOST
        self._dtype = dtype
        given = {name: value for name, value in spec.fused_params.items() if name != "output_dtype"}
        # All tables of the level are one to FBGEMM: a slot already says which.
        self._kernel = SplitTableBatchedEmbeddingBagsCodegen(
            [(slots, dim, place, ComputeDevice.CUDA if cuda else ComputeDevice.CPU)],
            pooling_mode=PoolingMode.NONE,
            weights_precision=_PRECISION[dtype],
            output_dtype=SparseType.FP32,  # and so its gradients: FBGEMM sums them as they come
            device=device,
            **given,
        )

    def rows(self, slots: torch.Tensor, gate: Gate) -> torch.Tensor:
        slots = slots.long()
        found = self._kernel(slots, slots.new_tensor([0, slots.numel()]))
        gated: torch.Tensor = _Gated.apply(found, gate, self._dtype)
        return gated

    @property
    def values(self) -> torch.Tensor:
        weights: torch.Tensor = self._kernel.split_embedding_weights()[0]
        return weights.detach()

    def states(self) -> dict[str, torch.Tensor]:
        if not self.spec.state_names:
            return {}
        rows = self.values.shape[0]
        return {
            name: state.detach().view(rows, -1)
            for name, state in zip(self.spec.state_names, self._kernel.split_optimizer_states()[0], strict=True)
        }

    def set_learning_rate(self, learning_rate: float) -> None:
        self._kernel.set_learning_rate(learning_rate)

    def begin_step(self, step: int) -> None:
        if self.spec.name == "adam":  # FBGEMM counts every forward, evaluations too; updates are what Adam has to count
            self._kernel.iter.fill_(step - 1)
            self._kernel.iter_cpu.fill_(step - 1)


class _ReplicatedLookup(torch.autograd.Function):
    """Rows of a replicated store; its backward keeps their gradients in the store instead of ``weight.grad``."""

    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, slots: torch.Tensor, store: ReplicatedStore, gate: Gate
    ) -> torch.Tensor:
        ctx.store, ctx.gate = store, gate
        ctx.save_for_backward(slots)
        return weight.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[None, None, None, None]:
        (slots,) = ctx.saved_tensors
        ctx.store.reduce(slots, ctx.gate.take(), ctx.gate.scale)
        return None, None, None, None


class ReplicatedStore(RowStore):
    """Rows that U/g ranks hold copies of. Gradients are summed over the copies during backward, and every copy is then
    updated alike, before backward ends: as a fused optimizer does it.

    Tiers marked dense reduce all their rows (one all-reduce); tiers marked sparse gather those that were touched (one
    all-gather of slots with gradients, after one of how many).
    """

    def __init__(
        self,
        group_size: int,
        spec: OptimizerSpec,
        slots: int,
        whole_slots: int,
        dim: int,
        dtype: torch.dtype,
        device: torch.device,
        across: Any,
        tables: tuple[str, ...],
    ) -> None:
        super().__init__(group_size, spec)
        self.weight = nn.Parameter(torch.zeros(slots, dim, dtype=dtype, device=device))
        self._state = new_state(spec, slots, dim, device)
        self._across, self._tables, self._whole = across, tables, whole_slots
        self._learning_rate, self._step = spec.learning_rate, 0
        self._gradient: torch.Tensor | None = None
        self._open: tuple[Pending | None, _TouchedRows | None] | None = None

    def rows(self, slots: torch.Tensor, gate: Gate) -> torch.Tensor:
        slots = slots.long()  # index_add is several times slower with int32
        found: torch.Tensor = _ReplicatedLookup.apply(self.weight, slots, self, gate)
        return found

    @property
    def values(self) -> torch.Tensor:
        return self.weight.detach()

    def states(self) -> dict[str, torch.Tensor]:
        return self._state

    def set_learning_rate(self, learning_rate: float) -> None:
        self._learning_rate = learning_rate

    def begin_step(self, step: int) -> None:
        self._step = step

    # -- backward

    def reduce(self, slots: torch.Tensor, gradient: torch.Tensor, scale: float) -> None:
        """Start bringing the copies' gradients together; the update follows when backward ends."""
        self.finish()  # a model that looks up twice updates twice, as with FBGEMM
        dense, touched = None, None
        if self._whole:
            if self._gradient is None:
                self._gradient = torch.zeros_like(self.weight[: self._whole])
            self._accumulate(slots, gradient, scale)
            dense = all_reduce(self._gradient, self._across, self._label("replicas"))
        if self._whole < self.weight.shape[0]:
            cold = slots >= self._whole
            touched = _TouchedRows(slots[cold], gradient[cold], scale, self._across, self._label)
        self._open = dense, touched
        torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def _accumulate(self, slots: torch.Tensor, gradient: torch.Tensor, scale: float) -> None:
        assert self._gradient is not None
        if self._whole < self.weight.shape[0]:
            hot = slots < self._whole
            slots, gradient = slots[hot], gradient[hot]
        if gradient.dtype == torch.float32:
            self._gradient.index_add_(0, slots, gradient, alpha=scale)
        else:  # sums of 16-bit numbers lose too much; only their result is kept in 16 bits
            distinct, sums = _sum_by_slot(slots, gradient)
            self._gradient.index_copy_(0, distinct, (sums * scale).to(gradient.dtype))

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the copies' gradients and update the rows."""
        if self._open is None:
            return
        (dense, touched), self._open = self._open, None
        if dense is not None:
            assert self._gradient is not None
            dense.wait()
            self._update(slice(0, self._whole), self._gradient)
            self._gradient.zero_()
        if touched is not None:
            slots, gradient = touched.wait()
            self._update(slots, gradient)

    def _update(self, where: slice | torch.Tensor, gradient: torch.Tensor) -> None:
        weight = self.weight.detach()[where]
        state = {name: values[where] for name, values in self._state.items()}
        rate, step = self._learning_rate, self._step
        apply_update(self.spec, weight, gradient, state, learning_rate=rate, step=step, seed=self.group_size)
        if isinstance(where, torch.Tensor):  # indexing made copies
            self.weight.detach().index_copy_(0, where, weight)
            for name, values in state.items():
                self._state[name].index_copy_(0, where, values)

    def _label(self, content: str) -> Label:
        return Label(self.group_size, content, self._tables)


class _TouchedRows:
    """Gradients of the rows that any copy touched, gathered from all copies.

    Every copy sends as many entries as the copy that touched most, slot and gradient of a row side by side.
    """

    def __init__(self, slots: torch.Tensor, gradient: torch.Tensor, scale: float, across: Any, label: Any) -> None:
        self._dim, self._dtype = gradient.shape[1], gradient.dtype
        distinct, sums = _sum_by_slot(slots, gradient)
        most = torch.tensor([distinct.numel()], dtype=torch.int32, device=slots.device)
        all_reduce(most, across, label("touched"), dist.ReduceOp.MAX).wait()
        rows = int(most.item())
        width = 4 + self._dim * gradient.element_size()
        own = torch.zeros(rows, width, dtype=torch.uint8, device=slots.device)
        own[:, :4] = 255  # slot -1: nothing in this entry
        own[: distinct.numel(), :4] = distinct.int().view(-1, 1).view(torch.uint8)
        own[: distinct.numel(), 4:] = (sums * scale).to(self._dtype).view(torch.uint8)
        self._all = own.new_empty(rows * dist.get_world_size(across), width)
        self._own = own
        self._pending = all_gather(self._all, own, across, label("touched_rows"))

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Distinct slots, shape (n,), and their summed gradients, shape (n, D), float32; the same on every copy."""
        self._pending.wait()
        slots = self._all[:, :4].contiguous().view(torch.int32).view(-1)
        gradient = self._all[:, 4:].contiguous().view(self._dtype).view(-1, self._dim)
        there = slots >= 0
        # In a fixed order, unlike index_add on CUDA: copies must stay equal to the last bit.
        sorted_slots, order = torch.sort(slots[there].long(), stable=True)
        distinct, counts = torch.unique_consecutive(sorted_slots, return_counts=True)
        ordered = gradient[there][order].float()
        return distinct, torch.segment_reduce(ordered, "sum", lengths=counts) if len(ordered) else ordered


def _sum_by_slot(slots: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct slots ascending, and the sum of the gradients of each in float32."""
    distinct, inverse = torch.unique(slots, return_inverse=True)
    sums = torch.zeros(distinct.numel(), gradient.shape[1], dtype=torch.float32, device=gradient.device)
    sums.index_add_(0, inverse, gradient.float())
    return distinct.long(), sums
