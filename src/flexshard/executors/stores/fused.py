"""Rows in FBGEMM's table-batched embedding, whose kernels look up and update."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch.autograd.graph import get_gradient_edge

from flexshard.executors.stores.base import LookedUp, RowStore
from flexshard.executors.stores.updates import OptimizerSpec
from flexshard.tables import DATA_TYPES

__all__ = ["FusedStore"]


def _saved_as_it_is() -> AbstractContextManager[object]:
    """Against somebody's hooks of saved tensors: those of activation checkpointing would run the forward pass again for
    what the kernel saves, whose backward pass is one of its own.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:  # which only slow a step down
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)


class FusedStore(RowStore):
    """All tables are one to FBGEMM: a slot already says which. One kernel looks rows up, another updates them.

    On CPUs rows are sums of one row each, since FBGEMM's vectorised kernels there are for sums alone (a backward pass
    is 4 to 12 times faster); but these leave out weight decay, without a word, so with it rows are rows.
    """

    fixed_at_look_up = True

    def __init__(self, spec: OptimizerSpec, slots: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, dim)
        cuda = device.type == "cuda"
        location = EmbeddingLocation.DEVICE if cuda else EmbeddingLocation.HOST
        self._dtype = dtype
        precision = DATA_TYPES[str(dtype).removeprefix("torch.")].fbgemm
        # Ids were checked before they became slots.
        given = {"bounds_check_mode": BoundsCheckMode.NONE} | dict(spec.fused_params)
        given.pop("output_dtype", None)
        self._kernel = SplitTableBatchedEmbeddingBagsCodegen(
            [(slots, dim, location, ComputeDevice.CUDA if cuda else ComputeDevice.CPU)],
            pooling_mode=PoolingMode.NONE if cuda or spec.step_options.weight_decay else PoolingMode.SUM,
            weights_precision=SparseType[precision],
            output_dtype=SparseType.FP32,  # and so its gradients: FBGEMM sums them as they come
            device=device,
            **given,
        )
        self._flat = self._kernel.weights_dev if cuda else self._kernel.weights_host

    @property
    def flat(self) -> torch.Tensor:
        return self._flat

    def look_up(self, slots: torch.Tensor) -> LookedUp:
        bags = torch.arange(slots.numel() + 1, dtype=slots.dtype, device=slots.device)
        with _saved_as_it_is():
            result = self._kernel(slots, bags)
        rows = result.detach().to(self._dtype)
        if not result.requires_grad:
            return LookedUp(rows, lambda _: None)
        edge = get_gradient_edge(result)

        def update(gradient: torch.Tensor) -> None:
            # The graph of this one lookup goes with the batch's own, whoever retains that.
            torch.autograd.backward((edge,), (gradient,), retain_graph=True)

        return LookedUp(rows, update)

    def states(self) -> dict[str, torch.Tensor]:
        if not self.spec.state_names:
            return {}
        rows = self.values.shape[0]
        return {
            name: state.data.view(rows, -1)
            for name, state in zip(self.spec.state_names, self._kernel.split_optimizer_states()[0], strict=True)
        }

    def set_learning_rate(self, learning_rate: float) -> None:
        if learning_rate != self._learning_rate:  # a step passes it on, changed or not
            super().set_learning_rate(learning_rate)
            self._kernel.set_learning_rate(learning_rate)

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        if self.spec.optimizer.counts_steps:  # FBGEMM counts every forward, evaluations too; updates are what counts
            self._kernel.iter.fill_(step - 1)
            self._kernel.iter_cpu.fill_(step - 1)
