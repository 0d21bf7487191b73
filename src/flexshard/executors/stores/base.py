"""Rows of some tables on one rank: what every store of them offers."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn
from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice

from flexshard._internal import has_triton, used_here
from flexshard.errors import FlexShardError
from flexshard.executors.stores.updates import OptimizerSpec, apply_update

__all__ = ["AnnouncedRows", "LookedUp", "RowStore", "at_moments"]


@dataclass(frozen=True)
class LookedUp:
    """Rows of a batch.

    Attributes:
        rows: in the weights' type, outside of any graph; shape (R, D).
        update: takes their gradients, shape (R, D), float32, and updates the store.
    """

    rows: torch.Tensor
    update: Callable[[torch.Tensor], None]


class AnnouncedRows:
    """Rows that a batch will read, and perhaps train: all at once, or some of its lookups after others."""

    def __init__(self, store: RowStore, slots: torch.Tensor) -> None:
        """``slots`` of its lookups; shape (R,), int64."""
        self._store, self._slots = store, slots

    def __call__(self) -> LookedUp:
        """Look them up, all at once."""
        used_here(self._slots)
        return self._store.look_up(self._slots)

    def begin(self) -> None:
        """They are looked up now, to be trained, though some may have been read before."""

    def rows(self, which: torch.Tensor) -> torch.Tensor:
        """Rows of some lookups (indices, shape (n,)) as they are now, in the weights' type; shape (n, D)."""
        used_here(self._slots)
        return self._store.values.index_select(0, self._slots.index_select(0, which))

    def update(self, which: torch.Tensor, gradient: torch.Tensor, moment: tuple[int, float]) -> None:
        """Update the rows of some lookups by their gradients, shape (n, D), float32; no other lookup may have the same.

        Args:
            moment: of which step's the update is one, and its learning rate.
        """
        used_here(self._slots)
        with self._store.as_of(*moment), torch.enable_grad():
            self._store.look_up(self._slots.index_select(0, which)).update(gradient)

    def finish(self, *, trained: bool) -> None:
        """All updates are over, or none will come."""


class RowStore(nn.Module, abc.ABC):
    """This rank's rows of tables of one dimension, type and optimizer, with their optimizer states.

    Attributes:
        spec: their optimizer.
        dim: D.
        ahead: whether it makes use of hearing of batches before they are looked up.
        fixed_at_look_up: whether an update's step is that of the lookup, as its learning rate is, or of the update.
        settle: takes updates that are still under way.
    """

    ahead = False
    fixed_at_look_up = False
    settle: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, spec: OptimizerSpec, dim: int) -> None:
        super().__init__()
        self.spec, self.dim = spec, dim
        self._learning_rate, self._step = spec.learning_rate, 0

    @property
    @abc.abstractmethod
    def flat(self) -> torch.Tensor:
        """All weights one after the other, a leaf that requires a gradient; shape (slots * D,)."""

    @abc.abstractmethod
    def states(self) -> dict[str, torch.Tensor]:
        """Optimizer state by TorchRec's names, shape (slots, 1) or (slots, D) each; writing changes it."""

    @abc.abstractmethod
    def look_up(self, slots: torch.Tensor) -> LookedUp:
        """Rows at slots (shape (R,), int64), which this rank alone updates."""

    def announce(self, slots: torch.Tensor) -> AnnouncedRows:
        """Rows that a batch will read, perhaps to be trained, before it is looked up; what looks them up then."""
        return AnnouncedRows(self, slots)

    def rows_written(self) -> None:
        """Somebody wrote to what :meth:`part` gave."""

    def drained(self) -> bool:
        """Whether there was room for all that was announced."""
        return True

    def take_failure(self) -> FlexShardError | None:
        """What went wrong beside the steps, if anything did; some of it is said once."""
        return None

    @property
    def values(self) -> torch.Tensor:
        """Weights, shape (slots, D); writing to it changes them.

        Writes are not counted: FBGEMM keeps the weights for backward, and copies may be updated between a lookup of
        rows without copies and its backward pass.
        """
        return self.flat.data.view(-1, self.dim)

    def rows_at(self, slots: torch.Tensor) -> torch.Tensor:
        """Weights of rows with copies, shape (n, D), at slots, shape (n,), int64."""
        return self.values.index_select(0, slots)

    def part(self, name: str) -> torch.Tensor:
        """Weights ("weight") or a state by its name, as they are now; writing changes it, if :meth:`rows_written` is
        called then.
        """
        self.flush()
        return self.values if name == "weight" else self.states()[name]

    def flush(self) -> None:
        """Let what :meth:`part` gives be as new as what was trained."""
        self.settle()

    def release(self) -> None:
        """Let go of the memory of weights and states; whoever looks at them afterwards gets an error."""
        for name in ("weight", *self.spec.state_names):
            storage = self.part(name).untyped_storage()
            if storage.resizable():  # not what NumPy has had, on the host
                storage.resize_(0)

    def parameter(self, slots: slice) -> nn.Parameter:
        """A range of the rows as TorchRec lists them among a module's parameters."""
        dim, rows = self.dim, slots.stop - slots.start
        return TableBatchedEmbeddingSlice(self.flat, slots.start * dim, slots.stop * dim, rows, dim)

    def set_learning_rate(self, learning_rate: float) -> None:
        """From the next update on."""
        self._learning_rate = learning_rate

    def begin_step(self, step: int) -> None:
        """The rows that are looked up next will be updated for the ``step``-th time (1 for the first)."""
        self._step = step

    @contextmanager
    def as_of(self, step: int, learning_rate: float) -> Iterator[None]:
        """Updates inside are those of another step."""
        now = self._step, self._learning_rate
        try:
            self.set_learning_rate(learning_rate)
            self.begin_step(step)
            yield
        finally:
            self.begin_step(now[0])
            self.set_learning_rate(now[1])

    @property
    def moment(self) -> tuple[int, float]:
        """The step that updates are those of now, and its learning rate."""
        return self._step, self._learning_rate

    @torch.no_grad()
    def update_rows(
        self, where: slice | torch.Tensor, gradient: torch.Tensor, *, seed: int = 0, read: torch.Tensor | None = None
    ) -> None:
        """Update rows (a range, or slots that ascend) by their summed gradients; the rest as for :func:`apply_update`.

        With ``read`` a slot may stand there several times, with one gradient and as read or not.
        """
        weight, states = self.values[where], self.states()
        state = {name: values[where] for name, values in states.items()}
        rate, step = self._learning_rate, self._step
        apply_update(self.spec, weight, gradient, state, learning_rate=rate, step=step, seed=seed, read=read)
        if isinstance(where, slice):
            return
        # Indexing made copies. Of one slot all have to be the same, though each was rounded by a chance of its own.
        first = None if read is None else torch.searchsorted(where, where)
        parts = [(self.values, weight), *((values, state[name]) for name, values in states.items())]
        for values, updated in parts:
            values.index_copy_(0, where, updated if first is None else updated.index_select(0, first))

    @torch.no_grad()
    def update_copies(
        self, where: slice | torch.Tensor, gradient: torch.Tensor, *, seed: int = 0, read: torch.Tensor | None = None
    ) -> None:
        """As :meth:`update_rows`, of a range or of distinct slots: in one kernel where there is one.

        Args:
            read: above 0 where a batch read a row; shape (n,).
        """
        if not _has_kernel(self.spec, self.values):
            self.update_rows(where, gradient, seed=seed, read=None if read is None else read > 0)
            return
        from flexshard.executors.stores.update_kernels import update_rows

        part, slots = (where, None) if isinstance(where, slice) else (slice(None), where)
        state = {name: values[part] for name, values in self.states().items()}
        options = replace(self.spec.step_options, learning_rate=self._learning_rate, step=self._step)
        update_rows(self.spec.name, self.values[part], gradient, state, options, slots=slots, read=read)


def _has_kernel(spec: OptimizerSpec, weights: torch.Tensor) -> bool:
    """Whether Triton has one kernel for an update."""
    if weights.device.type != "cuda" or spec.rounds_by_chance(weights) or not has_triton():
        return False
    from flexshard.executors.stores.update_kernels import KINDS

    return spec.name in KINDS


@contextmanager
def at_moments(stores: Sequence[RowStore], moments: Sequence[tuple[int, float]]) -> Iterator[None]:
    """Updates inside are of these steps, at these learning rates."""
    with ExitStack() as stack:
        for store, moment in zip(stores, moments, strict=True):
            if moment != store.moment:
                stack.enter_context(store.as_of(*moment))
        yield
