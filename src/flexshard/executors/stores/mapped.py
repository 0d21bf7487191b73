"""Rows in the host's memory, of which those that batches under way read are in a cache on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch

from flexshard._internal import continued_on, current_stream, to_device
from flexshard.errors import CacheError
from flexshard.executors.stores.base import RowStore
from flexshard.executors.stores.cached import CachedStore
from flexshard.executors.stores.copied_slots import CopiedSlots
from flexshard.executors.stores.memory import MemoryStore
from flexshard.executors.stores.updates import OptimizerSpec

__all__ = ["MappedStore"]


def _mapped_zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Page-locked memory of the host, as a tensor of the GPU that reads and writes it."""
    if device.type == "cpu":
        return torch.zeros(*shape, dtype=dtype)
    like = torch.empty(0, dtype=dtype, device=device)
    number = prod(shape)
    try:
        memory: torch.Tensor = torch.ops.fbgemm.new_unified_tensor(like, [max(number, 1)], True)
    except RuntimeError as error:
        nbytes = number * dtype.itemsize
        raise CacheError(
            f"{nbytes:,} bytes of rows do not fit into the host's page-locked memory"
            f" ({str(error).splitlines()[0]}); leave fewer tables behind caches, or use more ranks"
        ) from error
    return memory[:number].zero_().view(*shape)


class MappedStore(CachedStore):
    """As :class:`CachedStore`, on a GPU: rows without copies are in page-locked memory of the host, which the GPU
    reads and writes; rows with copies are on the GPU.

    Its parameters are the host's rows, tensors of the GPU as those of TorchRec's ``fused_uvm_caching`` are. Rows with
    copies are there as old as the last :meth:`flush`, as rows in the cache are. :meth:`release` lets go of what is on
    the GPU alone.
    """

    new_zeros = staticmethod(_mapped_zeros)

    def __init__(
        self,
        spec: OptimizerSpec,
        slots: int,
        dim: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        cache_rows: int,
        cache: Callable[..., RowStore],
        label: str,
        ranges: Sequence[range],
    ) -> None:
        """As :class:`CachedStore`; ``ranges`` of slots without copies, which ascend."""
        super().__init__(spec, slots, dim, dtype, device, cache_rows=cache_rows, cache=cache, label=label)
        self._copied = CopiedSlots(slots, ranges, device)
        self._near = MemoryStore(spec, len(self._copied), dim, dtype, device)
        self._near_newer = False  # than the host's
        self._copied_slots = to_device(self._copied.all(), device)
        self._steps_on = current_stream(device)

    def rows_at(self, slots: torch.Tensor) -> torch.Tensor:
        self._take_writes()
        return self._near.rows_at(self._copied.among(slots))

    def update_rows(
        self, where: slice | torch.Tensor, gradient: torch.Tensor, *, seed: int = 0, read: torch.Tensor | None = None
    ) -> None:
        self._near_changes().update_rows(self._copied[where], gradient, seed=seed, read=read)

    def update_copies(
        self, where: slice | torch.Tensor, gradient: torch.Tensor, *, seed: int = 0, read: torch.Tensor | None = None
    ) -> None:
        self._near_changes().update_copies(self._copied[where], gradient, seed=seed, read=read)

    def _near_changes(self) -> MemoryStore:
        """Rows with copies, to be updated."""
        self._take_writes()
        self._near_newer = True
        return self._near

    def set_learning_rate(self, learning_rate: float) -> None:
        super().set_learning_rate(learning_rate)
        self._near.set_learning_rate(learning_rate)

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        self._near.begin_step(step)
        self._steps_on = current_stream(self._copied_slots.device)

    def flush(self) -> None:
        with continued_on(self._steps_on):
            super().flush()
            if self._near_newer:
                for name, rows in self._parameters_and_states().items():
                    rows.index_copy_(0, self._copied_slots, self._near.part(name))
                self._near_newer = False

    def rows_written(self) -> None:
        with continued_on(self._steps_on):
            super().rows_written()
            self._read_copies()

    def release(self) -> None:
        self.flush()
        self._near.release()
        self._cache.release()

    def _take_writes(self) -> None:
        if self._flat._version != self._version:
            # Somebody wrote beside the steps; a batch may be begun on a stream that has not waited for these.
            with continued_on(self._steps_on):
                self._moves.reload(unless_newer=True, newer=self._near_newer)
                self._version = self._flat._version
                self._read_copies()

    @torch.no_grad()
    def _read_copies(self) -> None:
        """Let rows with copies be the host's."""
        for name, rows in self._parameters_and_states().items():
            torch.index_select(rows, 0, self._copied_slots, out=self._near.part(name))
        self._near_newer = False
