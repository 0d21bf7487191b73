"""TorchRec's training pipeline with more batches under way, so that caches of rows know them ahead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import astuple
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from flexshard._internal import check_int, differing_ranks
from flexshard.errors import CacheError
from flexshard.executors.comm.collectives import Label
from flexshard.executors.lookahead.row_moves import CacheTraffic
from flexshard.executors.sharding.joint import JointModules
from flexshard.executors.sharding.module import ShardedRowsModule
from flexshard.executors.stores.cached import CachedStore

__all__ = ["LookaheadPipeline"]

_MOST = 200  # where more of them save little (BagPipe, Table 3)


class LookaheadPipeline(TrainPipelineSparseDist[Any, Any]):
    """As TorchRec's ``TrainPipelineSparseDist``, with the ids of ``lookahead`` further batches at their owners.

    These learn which rows the batches will read, and fetch them from the host's memory beside the steps. What is
    trained is the same whatever the lookahead and the caches' sizes: rows whose batches are under way stay in the
    cache, where they are updated; the others are newest on the host. A batch for whose rows there is no room waits
    until there is.

    Batches are taken from the iterator ahead of their steps: where to go on is not where the reader is, but behind the
    last batch that was trained.

    Attributes:
        last_batch: that one, as the model got it (``reader.state_dict(pipeline.last_batch)`` of a ``SessionReader``).
        trained: how many were.

    Args:
        model, optimizer, device: as of ``TrainPipelineSparseDist``.
        lookahead: batches known beside the current one, at least 1; the same on every rank. By default as many as the
            caches of every rank have room for when training begins, less two, up to 200; 1 without caches.
        delayed_sync: send rows of the next batch that the current one does not train beside the current step's backward
            pass, and gradients of rows that the next batch does not read beside its forward pass, behind those of the
            layers (BagPipe, section 3.3). The weights are the same to the last bit. Gradients of the last batch may be
            under way between two calls: whatever goes through the model or its ``state_dict`` takes them first, what
            reads ``parameters()`` directly does not see them. Writing to parameters is an error then (to their
            ``data``, it is lost in part). On CPUs only, so far.
        options: the others of ``TrainPipelineSparseDist``.

    Raises:
        CacheError: a lookahead below 1, or that differs between ranks, or an option that pipelines of two batches have.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        *,
        lookahead: int | None = None,
        delayed_sync: bool = False,
        **options: Any,
    ) -> None:
        for name in ("enqueue_batch_after_forward", "clear_data_dist_inputs"):
            if options.get(name):
                raise CacheError(f"LookaheadPipeline: {name} is for pipelines of two batches; leave it out")
        if not options.get("execute_all_batches", True):
            raise CacheError(
                "LookaheadPipeline: execute_all_batches=False would leave out as many batches as are known ahead;"
                " leave it out"
            )
        if delayed_sync and device.type != "cpu":
            raise CacheError(
                f"LookaheadPipeline: delayed_sync works on CPUs so far, not on {device.type}; leave it out"
            )
        super().__init__(model, optimizer, device, **options)
        self._delayed_sync = delayed_sync
        self._lookahead = None if lookahead is None else check_int(lookahead, "lookahead", CacheError)
        self._begun = 0
        self._rewritten = self._compared = False
        self.trained = 0
        self.last_batch: Any = None

    @property
    def lookahead(self) -> int | None:
        """Batches known beside the current one; None before the caches' room has been tried."""
        return self._lookahead

    def traffic(self) -> CacheTraffic:
        """What this rank's caches have done so far, together."""
        stores = [group.store for module in self._ours() for group in module.groups]
        done = [store.traffic for store in stores if isinstance(store, CachedStore)]
        return CacheTraffic(*(sum(numbers) for numbers in zip(*map(astuple, done), strict=True)))

    def _ours(self) -> list[ShardedRowsModule]:
        modules: Any = self._pipelined_modules
        return [module for module in modules if isinstance(module, ShardedRowsModule)]

    def _joint(self) -> list[JointModules]:
        """The modules by those whose batches are exchanged together."""
        return list(dict.fromkeys(module.joint for module in self._ours()))

    def _begin(self) -> None:
        """Tell how many ids of the oldest batch will come whose do not yet."""
        batch, context = self.batches[self._begun], self.contexts[self._begun]
        if self._rewritten:
            self.start_sparse_data_dist(batch, context)
        else:
            self._init_pipelined_modules(batch, context, self._pipelined_forward_type)
            self._rewritten = True
        self._begun += 1

    def attach(self, model: torch.nn.Module | None = None, sparse_dist: bool = True) -> None:
        """As TorchRec's."""
        super().attach(model, sparse_dist)
        self._rewritten = bool(self.contexts)

    def _finish_begun(self) -> None:
        """Wait for what was begun in a step that an exception ended."""
        for context in list(self.contexts)[: self._begun]:
            if context.fused_splits_awaitables:
                self.wait_sparse_data_dist(context)

    def _announce(self) -> None:
        """Let the caches know the batches whose ids are on their way. Nothing waits for their rows."""
        for joint in self._joint():
            joint.announce()

    def fill_pipeline(self, dataloader_iter: Iterator[Any]) -> None:
        """As many batches as are to be known, if there are so many."""
        choosing = self._lookahead is None and self._model.training
        while self._begun <= (self._lookahead or (_MOST if choosing else 1)):
            if len(self.batches) == self._begun and not self.enqueue_batch(dataloader_iter):
                return
            self._begin()
            self.wait_sparse_data_dist(self.contexts[self._begun - 1])
            if not self._compared:
                self._compare()
            if choosing and not self._room_everywhere():
                self._lookahead = max(self._begun - 3, 1)  # room for a batch that comes from elsewhere
        if choosing:
            self._lookahead = self._lookahead or _MOST

    def _compare(self) -> None:
        """Whether every rank was given the same lookahead."""
        self._compared = True
        if not self._ours():
            return
        group = self._ours()[0].tables.process_group
        given, different = differing_ranks(f"lookahead={self._lookahead}, delayed_sync={self._delayed_sync}", group)
        if different:
            raise CacheError(
                f"LookaheadPipeline: rank {different[0]} has {given[different[0]]}, rank 0 {given[0]}; give every rank"
                " the same"
            )
        self._delay_sync()

    def _delay_sync(self) -> None:
        """As this pipeline has it, whatever another one of the same model does."""
        for joint in self._joint():
            joint.delay_sync(self._delayed_sync)

    def _room_everywhere(self) -> bool:
        """Whether the caches of every rank have room for all batches that are under way; not where there are none."""
        ours = self._ours()
        if not any(group.store.ahead for module in ours for group in module.groups):
            return self._begun < 2  # one ahead, as in TorchRec's pipeline
        self._announce()
        room = torch.tensor([int(all(module.drained() for module in ours))], device=self._device)
        tables = ours[0].tables
        label = Label(tables.layout.world_size, "room in caches", tables.names)
        tables.options.collectives.all_reduce(room, tables.process_group, label, dist.ReduceOp.MIN).wait()
        return bool(room.item())

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Train on the oldest batch; what the model gives beside the loss.

        Raises:
            StopIteration: there is none.
        """
        if not self._model_attached:
            self.attach(self._model)
        self._finish_begun()
        if self._compared:
            self._delay_sync()
        self.fill_pipeline(dataloader_iter)
        if not self.batches:
            raise StopIteration
        self._set_module_context(self.contexts[0])
        if self._model.training:
            self._optimizer.zero_grad()
        self._wait_for_batch()
        self._announce()
        begins = None
        known = self._begun <= (self._lookahead or 1) + 1 and (
            self._begun < len(self.batches) or self.enqueue_batch(dataloader_iter)
        )
        self.enqueue_batch(dataloader_iter)
        if known:  # once the iterator cannot fail on this rank alone
            begins = self._begun
            self._begin()
        losses, output = self._model_fwd(self.batches[0])
        if begins is not None:
            self.wait_sparse_data_dist(self.contexts[begins])
        if self._model.training:
            delayed = [joint.sync for joint in self._joint()] if self._delayed_sync else []
            for sync in delayed:
                sync.send_early()
            try:
                self._backward(losses)
            except Exception:
                for sync in delayed:  # others send theirs, if it is this rank alone that fails
                    with suppress(Exception):
                        sync.after_backward(failed=True)
                raise
            for sync in delayed:
                sync.after_backward()
            self.sync_embeddings(self._model, self._dmp_collection_sync_interval_batches, self.contexts[0])
            self._optimizer_step()
            self.trained += 1
        self.last_batch = self.batches[0]
        self.dequeue_batch()
        self._begun -= 1
        return output

    def reset(self) -> None:
        """Let go of all batches."""
        super().reset()
        self._begun = 0
