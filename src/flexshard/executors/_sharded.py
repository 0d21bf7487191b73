"""TorchRec's ``EmbeddingCollection`` under a FlexShard plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from flexshard.executors._exchange import Counts, Dispatch, Rows
from flexshard.executors._fused import FlexShardFusedOptimizer
from flexshard.executors._group import TableGroup
from flexshard.executors._logical import from_logical, to_logical
from flexshard.executors._pending import FlexShardContext, PendingOutput, WaitForCounts
from flexshard.executors._translation import CodeBook, Translator, extremes_of, outside_message, outside_of

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
    ShardedEmbeddingModule[KJTList, list[Rows], dict[str, JaggedTensor], FlexShardContext],
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
        stock: ShardedEmbeddingCollection | None = None,
        module_sharding_plan: Any = None,
    ) -> None:
        super().__init__()
        self.groups, self.fingerprint = list(groups), fingerprint
        self.module_sharding_plan = module_sharding_plan
        self._device, self._need_indices, self.translated_ids = device, need_indices, translated_ids
        self._configs = list(configs)
        self.embeddings = nn.ModuleDict()
        self._register_tables()
        if stock is not None:
            self.stock = stock
        self._stock = [stock] if stock is not None else []
        self._lookups_of, self._stock_lookups = self._find_lookups()
        self._optimizer = FlexShardFusedOptimizer(self.groups)

    def _register_tables(self) -> None:
        """Parameters by the names that the unsharded module has."""
        for group in self.groups:
            for index, table in enumerate(group.layout.tables):
                self.embeddings[table] = _TableRows(group.own_rows(index))

    def _find_lookups(self) -> tuple[list[_Lookup], list[tuple[str, str]]]:
        """Features of planned tables, and (output name, feature) of the others."""
        places = {
            name: (index, table)
            for index, group in enumerate(self.groups)
            for table, name in enumerate(group.layout.tables)
        }
        ours, theirs = [], []
        for config, names in zip(self._configs, get_embedding_names_by_table(self._configs), strict=True):
            for feature, name in zip(config.feature_names, names, strict=True):
                if config.name in places:
                    ours.append(_Lookup(name, feature, *places[config.name]))
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
            batches, error = self._dispatch(features)
        awaitables: list[Any] = [WaitForCounts(self, batches, error)]
        ctx.sharding_contexts = [None]
        for stock in self._stock:
            ctx.stock = stock.create_context()
            request = stock.input_dist(ctx.stock, features)
            awaitables += request.awaitables
            ctx.sharding_contexts += ctx.stock.sharding_contexts
        return KJTListSplitsAwaitable(awaitables, ctx)

    def _dispatch(self, features: KeyedJaggedTensor) -> tuple[list[tuple[Dispatch, Counts]], str | None]:
        keys, ends, values = features.keys(), features.offset_per_key(), features.values()
        place = {key: index for index, key in enumerate(keys)}
        lookups: list[list[tuple[int, torch.Tensor]]] = [[] for _ in self.groups]
        status, error = [0] * len(self.groups), None
        extremes = extremes_of([values[start:end] for start, end in pairwise(ends)])
        for lookup in self._lookups_of:
            book = self.groups[lookup.group].books[lookup.table]
            if lookup.feature not in place:
                status[lookup.group] = status[lookup.group] or -(lookup.table + 1)
                error = error or (
                    f"rank {dist.get_rank()}: the batch has no feature {lookup.feature!r}, which table {book.table!r}"
                    f" is looked up by; it has {', '.join(keys)}"
                )
                continue
            index = place[lookup.feature]
            ids = values[ends[index] : ends[index + 1]]
            found = self._problem(lookup.feature, book, ids.dtype, extremes[index])
            if found is not None:
                status[lookup.group] = status[lookup.group] or lookup.table + 1
                error = error or f"rank {dist.get_rank()}: {found}"
                ids = torch.zeros_like(ids, dtype=torch.long)  # the other ranks wait for an answer
            lookups[lookup.group].append((lookup.table, ids if ids.numel() else ids.long()))
        batches = []
        for group, parts, word in zip(self.groups, lookups, status, strict=True):
            codes = torch.cat([ids for _, ids in parts]) if self.translated_ids and parts else group.codes(parts)
            batch = group.dispatch(codes)
            batches.append((batch, group.start(batch, word)))
        return batches, error

    def _problem(
        self, feature: str, book: CodeBook, dtype: torch.dtype, extremes: tuple[float, float] | None
    ) -> str | None:
        """What is wrong with a feature's ids of these extremes (None if it has no ids), if anything is."""
        if extremes is None:
            return None
        if dtype.is_floating_point or dtype == torch.bool:
            return f"feature {feature!r}: ids of table {book.table!r} must be whole numbers, found {dtype}"
        outside = outside_of(extremes, book.num_codes if self.translated_ids else book.num_rows)
        if outside is None:
            return None
        if self.translated_ids:
            return (
                f"feature {feature!r}: {outside} is no place of table {book.table!r}; translate its ids with this"
                " module's translator()"
            )
        return outside_message(feature, book, outside)

    def raise_for(self, group: TableGroup, status: Sequence[int]) -> None:
        """Every rank stops where one of them had an id outside a table.

        Raises:
            DataError: naming rank and table.
        """
        for rank, word in enumerate(status):
            if word:
                what = "bad ids of" if word > 0 else "no feature for"
                raise DataError(
                    f"rank {dist.get_rank()}: rank {rank} has {what} table {group.layout.tables[abs(word) - 1]!r};"
                    " its own message names it"
                )

    # -- output

    def compute(self, ctx: FlexShardContext, dist_input: KJTList) -> list[Rows]:  # noqa: ARG002 - TorchRec's interface
        self._optimizer.step()  # a scheduler may have set another learning rate
        for group in self.groups:
            group.begin_step()
        return [exchange.start() for exchange in dist_input[0].exchanges]

    def output_dist(self, ctx: FlexShardContext, output: list[Rows]) -> LazyAwaitable[dict[str, JaggedTensor]]:
        assert ctx.features is not None
        return PendingOutput(self, ctx.features, output, None)

    def compute_and_output_dist(self, ctx: FlexShardContext, input: KJTList) -> LazyAwaitable[dict[str, JaggedTensor]]:
        assert ctx.features is not None
        rows = self.compute(ctx, input)
        stock = None
        for module in self._stock:
            stock = module.compute_and_output_dist(ctx.stock, KJTList(list(input)[1:]))
        return PendingOutput(self, ctx.features, rows, stock)

    def assemble(
        self,
        features: KeyedJaggedTensor,
        rows: Sequence[torch.Tensor],
        stock: LazyAwaitable[dict[str, JaggedTensor]] | None,
    ) -> dict[str, JaggedTensor]:
        """The module's output from the rows of each group's lookups."""
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
        if stock is not None:
            found = stock.wait()
            for name, feature in self._stock_lookups:
                # Without our tables, a feature that they share with TorchRec's goes by its own name.
                output[name] = found[name] if name in found else found[feature]
        return output

    # -- ahead of the module

    def translator(self) -> Translator:
        """Translates ids on the host ahead of the module, for one sharded with ``translated_ids=True``.

        Raises:
            DataError: a feature is looked up in several tables, so that it has no one translation.
        """
        books: dict[str, CodeBook] = {}
        for lookup in self._lookups_of:
            if lookup.feature in books:
                raise DataError(
                    f"feature {lookup.feature!r} is looked up in several tables, so its ids cannot be translated"
                    " ahead; give each table a feature of its own"
                )
            books[lookup.feature] = self.groups[lookup.group].books[lookup.table].to(torch.device("cpu"))
        return Translator(books)

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
        if not self._stock:
            return self._optimizer
        return CombinedOptimizer([("", self._optimizer), ("", self._stock[0].fused_optimizer)])

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
        found = {} if destination is None else destination
        for group in self.groups:
            for index, table in enumerate(group.layout.tables):
                found[f"{prefix}embeddings.{table}.weight"] = to_logical(group, index, "weight")
        for stock in self._stock:
            stock.state_dict(destination=found, prefix=prefix, keep_vars=keep_vars)
        return found

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
        for stock in self._stock:
            more = stock.load_state_dict(left, strict=strict)
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
