"""Rows without copies, in FBGEMM's table-batched embedding."""

from __future__ import annotations

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from flexshard.executors.comm.deferred_gradient import DeferredGradient
from flexshard.executors.stores.base import RowStore, with_deferred_gradient
from flexshard.executors.stores.updates import OptimizerSpec
from flexshard.tables import DATA_TYPES

__all__ = ["ShardedStore"]


class ShardedStore(RowStore):
    """Rows without copies: looked up by one kernel, updated inside backward."""

    def __init__(
        self, group_size: int, spec: OptimizerSpec, slots: int, dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(group_size, spec)
        cuda = device.type == "cuda"
        location = EmbeddingLocation.DEVICE if cuda else EmbeddingLocation.HOST
        self._dtype = dtype
        precision = DATA_TYPES[str(dtype).removeprefix("torch.")].fbgemm
        given = {name: value for name, value in spec.fused_params.items() if name != "output_dtype"}
        # All tables of the level are one to FBGEMM: a slot already says which.
        self._kernel = SplitTableBatchedEmbeddingBagsCodegen(
            [(slots, dim, location, ComputeDevice.CUDA if cuda else ComputeDevice.CPU)],
            pooling_mode=PoolingMode.NONE,
            weights_precision=SparseType[precision],
            output_dtype=SparseType.FP32,  # and so its gradients: FBGEMM sums them as they come
            device=device,
            **given,
        )

    def rows(self, slots: torch.Tensor, gradient: DeferredGradient) -> torch.Tensor:
        slots = slots.long()
        result = self._kernel(slots, slots.new_tensor([0, slots.numel()]))
        return with_deferred_gradient(result, gradient, self._dtype)

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
        if self.spec.optimizer.counts_steps:  # FBGEMM counts every forward, evaluations too; updates are what counts
            self._kernel.iter.fill_(step - 1)
            self._kernel.iter_cpu.fill_(step - 1)
