"""TorchRec's ``EmbeddingCollection`` under a FlexShard plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import KJTList, ShardedEmbeddingModule
from torchrec.distributed.types import Awaitable, LazyAwaitable
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection, get_embedding_names_by_table
from torchrec.optim.fused import EmptyFusedOptimizer, FusedOptimizerModule
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from flexshard.errors import CheckpointError, DataError
from flexshard.executors.comm.exchange import RowsAwaitable
from flexshard.executors.sharding.awaitables import EmbeddingsAwaitable, FlexShardContext, GroupBatch, SplitsAwaitable
from flexshard.executors.sharding.table_group import TableGroup
from flexshard.executors.sharding.translation import (
    LocationTable,
    Translator,
    extremes_of,
    outside_message,
    outside_of,
)
from flexshard.executors.state.fused_optimizer import FlexShardFusedOptimizer
from flexshard.executors.state.logical import from_logical, to_logical

__all__ = ["ShardedFlexShardEmbeddingCollection"]


@dataclass(frozen=True)
class _Lookup:
    """One feature looked up in one table.

    Attributes:
        name: in the output ("feature", or "feature@table" where several tables look it up).
        feature: in the input.
        group, table: which table: index of the group, and within it.
    """

    name: str
    feature: str
    group: int
    table: int


class _TableRows(nn.Module):
    """Stands for a table where parameters are listed: its rows in the largest group, on this rank.

    What they are loaded from is whole tables, which the collection takes.
    """

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(rows)
        self.weight._in_backward_optimizers = [EmptyFusedOptimizer()]

    def _load_from_state_dict(self, *_: Any) -> None:
        pass


class ShardedFlexShardEmbeddingCollection(
    ShardedEmbeddingModule[KJTList, list[RowsAwaitable], dict[str, JaggedTensor], FlexShardContext],
    FusedOptimizerModule,
):
    """An ``EmbeddingCollection`` whose rows live where a plan puts them.

    Takes and gives what the unsharded module does. ``state_dict`` and ``load_state_dict`` hold whole tables in order of
    id and are collective operations: every rank must call them.

    Attributes:
        groups: tables under the plan, by dtype and optimizer.
        fingerprint: of the plan.
    """

    def __init__(
        self,
        configs: Sequence[EmbeddingConfig],
        groups: Sequence[TableGroup],
        *,
        fingerprint: str,
        device: torch.device,
        need_indices: bool = False,
        translated_ids: bool = False,
        torchrec_collection: ShardedEmbeddingCollection | None = None,
        module_sharding_plan: Any = None,
    ) -> None:
        super().__init__()
        self.groups, self.fingerprint = list(groups), fingerprint
        self.module_sharding_plan = module_sharding_plan
        self._device, self._need_indices, self.translated_ids = device, need_indices, translated_ids
        self._configs = list(configs)
        self.embeddings = nn.ModuleDict()
        self._register_tables()
        if torchrec_collection is not None:
            self.torchrec_collection = torchrec_collection
        self._torchrec = [] if torchrec_collection is None else [torchrec_collection]
        self._lookups_of, self._torchrec_lookups = self._find_lookups()
        self._optimizer = FlexShardFusedOptimizer(self.groups)

    def _register_tables(self) -> None:
        """Parameters by the names that the unsharded module has."""
        for group in self.groups:
            for index, table in enumerate(group.layout.tables):
                self.embeddings[table] = _TableRows(group.local_rows(index))

    def _find_lookups(self) -> tuple[list[_Lookup], list[tuple[str, str]]]:
        """Features of planned tables, and (output name, feature) of the others."""
        indices = {
            name: (index, table)
            for index, group in enumerate(self.groups)
            for table, name in enumerate(group.layout.tables)
        }
        ours, theirs = [], []
        for config, names in zip(self._configs, get_embedding_names_by_table(self._configs), strict=True):
            for feature, name in zip(config.feature_names, names, strict=True):
                if config.name in indices:
                    ours.append(_Lookup(name, feature, *indices[config.name]))
                else:
                    theirs.append((name, feature))
        return ours, theirs

    # -- input

    def create_context(self) -> FlexShardContext:
        return FlexShardContext()

    def input_dist(self, ctx: FlexShardContext, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KJTList]]:
        """Translate the batch's ids and start sending them.

        Raises:
            DataError: a feature is missing, or an id lies outside its table (then on every rank, when the first wait
                ends); or the batch has a variable size per feature.
        """
        if features.variable_stride_per_key():
            raise DataError(
                "the batch's features have batch sizes of their own (variable batch), which tables under a FlexShard"
                " plan do not take; expand them to one batch size"
            )
        ctx.features = features
        with torch.no_grad():
            batches, error = self._bucketize(features)
        awaitables: list[Any] = [SplitsAwaitable(dist.get_rank(), batches, error)]
        ctx.sharding_contexts = [None]
        for collection in self._torchrec:
            ctx.torchrec = collection.create_context()
            request = collection.input_dist(ctx.torchrec, features)
            awaitables += request.awaitables
            ctx.sharding_contexts += ctx.torchrec.sharding_contexts
        return KJTListSplitsAwaitable(awaitables, ctx)

    def _bucketize(self, features: KeyedJaggedTensor) -> tuple[list[GroupBatch], str | None]:
        """The batch by group of tables, splits under way; and what is wrong with it on this rank."""
        keys, ends, values = features.keys(), features.offset_per_key(), features.values()
        index_of = {key: index for index, key in enumerate(keys)}
        lookups: list[list[tuple[int, torch.Tensor]]] = [[] for _ in self.groups]
        status, error = [0] * len(self.groups), None
        extremes = extremes_of([values[start:end] for start, end in pairwise(ends)])
        for lookup in self._lookups_of:
            table = self.groups[lookup.group].location_tables[lookup.table]
            if lookup.feature not in index_of:
                status[lookup.group] = status[lookup.group] or -(lookup.table + 1)
                error = error or (
                    f"rank {dist.get_rank()}: the batch has no feature {lookup.feature!r}, which table {table.table!r}"
                    f" is looked up by; it has {', '.join(keys)}"
                )
                continue
            index = index_of[lookup.feature]
            ids = values[ends[index] : ends[index + 1]]
            problem = self._problem(lookup.feature, table, ids.dtype, extremes[index])
            if problem is not None:
                status[lookup.group] = status[lookup.group] or lookup.table + 1
                error = error or f"rank {dist.get_rank()}: {problem}"
                ids = torch.zeros_like(ids, dtype=torch.long)  # the other ranks wait for an answer
            lookups[lookup.group].append((lookup.table, ids if ids.numel() else ids.long()))
        batches = []
        for group, parts, word in zip(self.groups, lookups, status, strict=True):
            translated = self.translated_ids and parts
            batch = group.bucketize(torch.cat([ids for _, ids in parts]) if translated else group.locations(parts))
            splits = group.exchange_splits(batch, word)
            batches.append(GroupBatch(group.layout.tables, batch, splits, group.exchange))
        return batches, error

    def _problem(
        self, feature: str, table: LocationTable, dtype: torch.dtype, extremes: tuple[float, float] | None
    ) -> str | None:
        """What is wrong with a feature's ids of these extremes (None if it has no ids), if anything is."""
        if extremes is None:
            return None
        if dtype.is_floating_point or dtype == torch.bool:
            return f"feature {feature!r}: ids of table {table.table!r} must be whole numbers, found {dtype}"
        outside = outside_of(extremes, table.num_locations if self.translated_ids else table.num_rows)
        if outside is None:
            return None
        if self.translated_ids:
            return (
                f"feature {feature!r}: {outside} is no location of table {table.table!r}; translate its ids with this"
                " module's translator()"
            )
        return outside_message(feature, table, outside)

    # -- output

    def compute(self, ctx: FlexShardContext, dist_input: KJTList) -> list[RowsAwaitable]:  # noqa: ARG002 - TorchRec's interface
        self._optimizer.step()  # a scheduler may have set another learning rate
        for group in self.groups:
            group.begin_step()
        return [exchange.start() for exchange in dist_input[0].exchanges]

    def output_dist(self, ctx: FlexShardContext, output: list[RowsAwaitable]) -> LazyAwaitable[dict[str, JaggedTensor]]:
        assert ctx.features is not None
        return EmbeddingsAwaitable(output, partial(self._assemble, ctx.features, None))

    def compute_and_output_dist(self, ctx: FlexShardContext, input: KJTList) -> LazyAwaitable[dict[str, JaggedTensor]]:
        assert ctx.features is not None
        rows = self.compute(ctx, input)
        others = None
        for collection in self._torchrec:
            others = collection.compute_and_output_dist(ctx.torchrec, KJTList(list(input)[1:]))
        return EmbeddingsAwaitable(rows, partial(self._assemble, ctx.features, others))

    def _assemble(
        self,
        features: KeyedJaggedTensor,
        others: LazyAwaitable[dict[str, JaggedTensor]] | None,
        rows: Sequence[torch.Tensor],
    ) -> dict[str, JaggedTensor]:
        """The module's output from the rows of each group's lookups, and that of the tables that TorchRec shards."""
        lengths = dict(zip(features.keys(), features.length_per_key(), strict=True))
        parts = [
            iter(values.split([lengths[lookup.feature] for lookup in self._lookups_of if lookup.group == index]))
            for index, values in enumerate(rows)
        ]
        output = {}
        for lookup in self._lookups_of:
            jagged = features[lookup.feature]
            output[lookup.name] = JaggedTensor(
                values=next(parts[lookup.group]),
                lengths=jagged.lengths(),
                weights=jagged.values() if self._need_indices else None,
            )
        if others is not None:
            known = others.wait()
            for name, feature in self._torchrec_lookups:
                # Without our tables, a feature that they share with TorchRec's goes by its own name.
                output[name] = known[name] if name in known else known[feature]
        return output

    # -- ahead of the module

    def translator(self) -> Translator:
        """Translates ids on the host ahead of the module, for one sharded with ``translated_ids=True``.

        Raises:
            DataError: a feature is looked up in several tables, so that it has no one translation.
        """
        tables: dict[str, LocationTable] = {}
        for lookup in self._lookups_of:
            if lookup.feature in tables:
                raise DataError(
                    f"feature {lookup.feature!r} is looked up in several tables, so its ids cannot be translated"
                    " ahead; give each table a feature of its own"
                )
            location_table = self.groups[lookup.group].location_tables[lookup.table]
            tables[lookup.feature] = location_table.to(torch.device("cpu"))
        return Translator(tables)

    # -- resharding

    def configs_of(self, group: TableGroup) -> list[EmbeddingConfig]:
        """Configurations of a group's tables."""
        return [config for config in self._configs if config.name in group.layout.tables]

    def replace_group(self, index: int, group: TableGroup, fingerprint: str) -> None:
        """Put a group in another layout in a group's place."""
        self.groups[index] = group
        self._register_tables()
        self.fingerprint = fingerprint
        self._optimizer.step()  # learning rates

    # -- TorchRec's plumbing

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        if not self._torchrec:
            return self._optimizer
        return CombinedOptimizer([("", self._optimizer), ("", self._torchrec[0].fused_optimizer)])

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        return EmbeddingCollection

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        for name, _ in self.named_parameters(prefix):
            yield name

    def reset_parameters(self) -> None:
        """Nothing: rows were set when the module was sharded."""

    def train(self, mode: bool = True) -> ShardedFlexShardEmbeddingCollection:
        super().train(mode)
        for group in self.groups:
            group.train(mode)
        return self

    def collections(self) -> list[list[str]]:
        """Tables that share collectives, as :func:`flexshard.executors.replay` takes them."""
        return [list(group.layout.tables) for group in self.groups]

    # -- checkpoints

    def state_dict(self, *_: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Tables in order of id, as ``DTensor`` of shape (E, D); every rank must call it."""
        state = {} if destination is None else destination
        for group in self.groups:
            for index, table in enumerate(group.layout.tables):
                state[f"{prefix}embeddings.{table}.weight"] = to_logical(group, index, "weight")
        for collection in self._torchrec:
            collection.state_dict(destination=state, prefix=prefix, keep_vars=keep_vars)
        return state

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        assign: bool = False,  # noqa: ARG002 - as of nn.Module
    ) -> _IncompatibleKeys:
        """Take tables as ``state_dict`` gives them, or as whole tensors; every rank must call it.

        Raises:
            CheckpointError: a table is missing (if ``strict``) or has another shape.
        """
        left = dict(state_dict)
        missing = self._load_tables(left, "")
        if missing and strict:
            raise CheckpointError(
                f"the checkpoint has no {missing[0]}; load it with strict=False to keep what is there"
            )
        for collection in self._torchrec:
            more = collection.load_state_dict(left, strict=strict)
            return _IncompatibleKeys(missing + more.missing_keys, more.unexpected_keys)
        if left and strict:
            raise CheckpointError(f"the checkpoint has {min(left)}, which the model has not; strict=False ignores it")
        return _IncompatibleKeys(missing, list(left))

    def _load_tables(self, state_dict: dict[str, Any], prefix: str) -> list[str]:
        """Take what is there out of the mapping; which keys were missing."""
        missing = []
        for group in self.groups:
            for index, table in enumerate(group.layout.tables):
                key = f"{prefix}embeddings.{table}.weight"
                if key in state_dict:
                    from_logical(group, index, "weight", state_dict.pop(key))
                else:
                    missing.append(key)
        return missing

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        _metadata: Any,
        _strict: bool,
        missing_keys: list[str],
        _unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """As part of a plain module's ``load_state_dict``; the tables that TorchRec shards load themselves."""
        try:
            missing_keys += self._load_tables(dict(state_dict), prefix)
        except CheckpointError as error:
            error_msgs.append(str(error))
