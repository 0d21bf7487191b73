"""What sharded collections have in common whose rows live where a plan puts them."""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import KJTList, ShardedEmbeddingModule
from torchrec.distributed.types import Awaitable, LazyAwaitable
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.optim.fused import EmptyFusedOptimizer, FusedOptimizerModule
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from flexshard._internal import of_keys, with_flat_lengths
from flexshard.errors import CheckpointError
from flexshard.executors.sharding.awaitables import EmbeddingsAwaitable, FlexShardContext, LookedUpRows, SplitsAwaitable
from flexshard.executors.sharding.batches import (
    BatchPart,
    BatchProblem,
    Lookup,
    OutsideIds,
    ids_of_tables,
    outside_ids,
    version_of,
    versions_of,
)
from flexshard.executors.sharding.joint import JointModules
from flexshard.executors.sharding.sharded_tables import ShardedTables, TableGroup
from flexshard.executors.sharding.table_rows import TableRows
from flexshard.executors.sharding.translation import Translator
from flexshard.executors.state.fused_optimizer import FlexShardFusedOptimizer
from flexshard.executors.state.logical import LogicalTables, check_keys

__all__ = ["ShardedRowsModule"]


class ShardedRowsModule(ShardedEmbeddingModule[KJTList, LookedUpRows, Any, FlexShardContext], FusedOptimizerModule):
    """A collection whose rows live where a plan puts them.

    Takes and gives what the unsharded module does. Its parameters are this rank's rows, one for each table, rows with
    copies on every rank that has one; :func:`flexshard.executors.table_norms` counts each row once. Where ranks hold
    unequal numbers of a tier's rows, those with fewer have a row of zeros in their parameter that no id leads to.

    ``state_dict`` and ``load_state_dict`` hold whole tables in order of id and are collective operations: every rank
    must call them. What is written to a ``state_dict`` in place counts from the next batch on, as with TorchRec's, if
    no training step lies between.

    Attributes:
        container: the unsharded module's attribute that holds its tables.
        tables: those under the plan.
        fingerprint: of the plan.
        joint: with which modules its batches are exchanged.
        index: of the module among them.
        lookups: of the planned tables, in their order.
    """

    container: ClassVar[str]

    def __init__(
        self,
        configs: Sequence[BaseEmbeddingConfig],
        tables: ShardedTables,
        *,
        fingerprint: str,
        device: torch.device,
        joint: JointModules,
        torchrec_collection: Any = None,
        module_sharding_plan: Any = None,
    ) -> None:
        super().__init__()
        self.tables, self.fingerprint = tables, fingerprint
        self.module_sharding_plan = module_sharding_plan
        self._device = device
        self._configs = list(configs)
        self._names = [name for of_table in get_embedding_names_by_table(self._configs) for name in of_table]
        self._torchrec = [] if torchrec_collection is None else [torchrec_collection]
        self._logical = LogicalTables(tables, self.container)
        self.joint, self.index = joint, joint.add(tables)
        setattr(self, self.container, nn.ModuleDict())
        self._register_tables()
        self.lookups, self._torchrec_lookups = self._find_lookups()
        self._torchrec_features = list(dict.fromkeys(feature for _, feature in self._torchrec_lookups))
        self._optimizer = FlexShardFusedOptimizer(self._logical)

    @property
    def groups(self) -> list[TableGroup]:
        """Tables under the plan, by dimension, type and optimizer."""
        return self.tables.groups

    @property
    def translated_ids(self) -> bool:
        """Whether ids come as locations, from :meth:`translator`."""
        return self.tables.options.translated_ids

    def _register_tables(self) -> None:
        """Parameters by the names that the unsharded module has, in its order, whoever shards a table."""
        planned = {name: index for index, name in enumerate(self.tables.names)}
        for config in self._configs:
            if config.name in planned:
                rows = self.tables.parameter(planned[config.name])
                rows._in_backward_optimizers = [EmptyFusedOptimizer()]
            else:  # marked by TorchRec, or stepped by an optimizer of the user's, as its data-parallel tables are
                rows = getattr(self._torchrec[0], self.container)[config.name].weight
            getattr(self, self.container)[config.name] = TableRows(rows)

    def _find_lookups(self) -> tuple[list[Lookup], list[tuple[str, str]]]:
        """Features of planned tables in the tables' order, and (output name, feature) of the others."""
        planned = {
            self.tables.names[table]: (table, index)
            for index, group in enumerate(self.groups)
            for table in group.tables
        }
        ours, theirs = [], []
        for config, names in zip(self._configs, get_embedding_names_by_table(self._configs), strict=True):
            for feature, name in zip(config.feature_names, names, strict=True):
                if config.name in planned:
                    ours.append(Lookup(name, feature, *planned[config.name]))
                else:
                    theirs.append((name, feature))
        return sorted(ours, key=lambda lookup: lookup.table), theirs

    forward = torch.compiler.disable(ShardedEmbeddingModule.forward)  # which rows are exchanged depends on the ids

    # -- input

    def create_context(self) -> FlexShardContext:
        return FlexShardContext()

    def input_dist(self, ctx: FlexShardContext, features: KeyedJaggedTensor | Any) -> Awaitable[Awaitable[KJTList]]:
        """Translate the batch's ids and start sending them.

        Args:
            features: a ``KeyedJaggedTensor``, or a ``TensorDict`` of jagged features.

        Raises:
            DataError: a feature is missing, or an id lies outside its table, or features of a batch have sizes of their
                own without inverse indices, or where TorchRec, which has some of the tables, would not train them;
                then on every rank, when the first wait ends.
        """
        batch = self.joint.started(self.index, features)
        if batch is None:
            batch = self.joint.join(self.index, self.part_of(maybe_td_to_kjt(features), features))
        part = batch.parts[self.index]
        ctx.features = features = part.batch
        awaitables: list[Any] = [SplitsAwaitable(batch)]
        ctx.sharding_contexts = [None]
        for collection in self._torchrec:
            ctx.torchrec = collection.create_context()
            try:
                request = collection.input_dist(ctx.torchrec, self._of_torchrec(features, part.problem))
            except Exception:
                batch.begin()  # other ranks wait for it
                raise
            awaitables += request.awaitables
            ctx.sharding_contexts += ctx.torchrec.sharding_contexts
        return KJTListSplitsAwaitable(awaitables, ctx)

    @torch.no_grad()
    def part_of(self, features: KeyedJaggedTensor, given: object) -> BatchPart:
        """The module's part of a batch, translated; ``given`` is what the module is given."""
        tables, translated, features = self.tables, self.translated_ids, with_flat_lengths(features)
        wanted = (features, self.lookups, tables.location_tables)
        variable = not self._torchrec or self._device.type != "cpu"
        ids, problem = ids_of_tables(*wanted, translated=translated, variable=variable)
        locations, counts, once, table = tables.locations(ids)
        refused: BatchProblem | OutsideIds | None = self.joint.take_failure(tables) or problem
        if refused is None and table is not None:
            refused = OutsideIds(table, partial(outside_ids, *wanted, translated=translated))
        return BatchPart(self, locations, counts, once, refused, given, features, versions_of(features))

    def _of_torchrec(self, features: KeyedJaggedTensor, problem: object) -> KeyedJaggedTensor:
        """Features of the tables that TorchRec shards, in the same order in every batch, since it goes by that of the
        first. If our part of the batch is refused, theirs is empty: it starts on every rank all the same.
        """
        keys = self._torchrec_features
        if isinstance(problem, BatchProblem):
            device = features.device()
            lengths = torch.zeros(len(keys) * features.stride(), dtype=torch.int32, device=device)
            ids = torch.zeros(0, dtype=features.values().dtype, device=device)
            weights = None if features.weights_or_none() is None else torch.zeros(0, device=device)
            return KeyedJaggedTensor(keys, ids, weights, lengths=lengths)
        if features.keys() == keys:
            return features
        return of_keys(features, keys)

    def prefetch(self, dist_input: KJTList, forward_stream: Any = None, ctx: FlexShardContext | None = None) -> None:
        """Of tables that TorchRec shards, what it keeps in a cache; ours are told otherwise."""
        for collection in self._torchrec:
            theirs = KJTList(list(dist_input)[1:])
            collection.prefetch(theirs, forward_stream, None if ctx is None else ctx.torchrec)

    def drained(self) -> bool:
        """Wait until the caches of this rank have taken up what they were told of; whether there was room for it."""
        return False not in [group.store.drained() for group in self.groups]  # each is waited for

    # -- output

    def compute(self, ctx: FlexShardContext, dist_input: KJTList) -> LookedUpRows:
        rows = LookedUpRows(dist_input[0].batch, self.index)
        rows.batch.look_up(self.index)
        for collection in self._torchrec:
            ctx.torchrec_output = collection.compute(ctx.torchrec, KJTList(list(dist_input)[1:]))
        return rows

    def before_look_up(self, *, train: bool) -> None:
        """The rows are looked up next, to be updated perhaps if ``train``."""
        self._logical.check_nothing_written()
        if train:
            self.tables.begin_step()

    def looked_up(self, look_up: object, *, train: bool) -> None:
        """They were, by something that lives for as long as they may be updated."""
        if train:
            self._logical.rows_change()
            self.tables.looked_up(look_up)

    def rows_mark(self) -> tuple[Any, ...]:
        """What changes when somebody writes to rows or to tensors of a ``state_dict``, or sets learning rates; torch
        does not count writes through ``data``. Caches write to rows themselves, and see to others' writes.
        """
        rates = [rate for _, rate in self.tables.moments()]
        stores = (group.store for group in self.groups)
        return (self.written(), *rates, *(-1 if store.ahead else version_of(store.flat) for store in stores))

    def written(self) -> int:
        """Whether somebody wrote to parameters, or to tensors of a ``state_dict``, and to a current one."""
        return self._logical.written() or int(self.tables.copies_written())

    def output_dist(self, ctx: FlexShardContext, output: LookedUpRows) -> LazyAwaitable[Any]:
        assert ctx.features is not None
        others = None
        for collection in self._torchrec:
            others = collection.output_dist(ctx.torchrec, ctx.torchrec_output)
        return EmbeddingsAwaitable(output, partial(self._assemble, ctx.features, others))

    def compute_and_output_dist(self, ctx: FlexShardContext, input: KJTList) -> LazyAwaitable[Any]:
        assert ctx.features is not None
        rows, others = LookedUpRows(input[0].batch, self.index), None
        rows.batch.look_up(self.index)
        for collection in self._torchrec:
            others = collection.compute_and_output_dist(ctx.torchrec, KJTList(list(input)[1:]))
        return EmbeddingsAwaitable(rows, partial(self._assemble, ctx.features, others))

    @abstractmethod
    def _assemble(
        self, features: KeyedJaggedTensor, others: LazyAwaitable[Any] | None, rows: Sequence[torch.Tensor]
    ) -> Any:
        """The module's output from the rows of each group's lookups, and that of the tables that TorchRec shards."""

    def _of_others(self, others: LazyAwaitable[Any] | None, as_dict: Callable[[Any], Any]) -> dict[str, Any]:
        """Outputs of the tables that TorchRec shards, by name; ``as_dict`` of what its collection gives."""
        if others is None:
            return {}
        known = as_dict(others.wait())
        # Without our tables, a feature that they share with TorchRec's goes by its own name.
        return {name: known[name if name in known else feature] for name, feature in self._torchrec_lookups}

    # -- ahead of the module

    def translator(self) -> Translator:
        """Translates ids on the host ahead of the module, for one sharded with ``translated_ids=True``.

        Raises:
            DataError: a feature is looked up in several tables, so that it has no one translation.
        """
        return Translator.of((lookup.feature, self.tables.location_tables[lookup.table]) for lookup in self.lookups)

    # -- resharding

    def configs_of_planned(self) -> list[Any]:
        """Configurations of the planned tables."""
        return [config for config in self._configs if config.name in self.tables.names]

    def finish_writes(self) -> None:
        """Take over what was written to parameters, or to a ``state_dict`` in place; every rank must call it."""
        self._logical.take_written()

    def replace_tables(self, tables: ShardedTables, fingerprint: str) -> None:
        """Put the same tables in another layout in the present ones' place."""
        tables.restore(self.tables.moments())
        self.tables = self._logical.tables = tables
        self.joint.replace(self.index, tables)
        self._register_tables()
        self.fingerprint = fingerprint
        self._optimizer.reset_rows()

    # -- TorchRec's plumbing

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        if not self._torchrec:
            return self._optimizer
        return CombinedOptimizer([("", self._optimizer), ("", self._torchrec[0].fused_optimizer)])

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        for name, _ in self.named_parameters(prefix):
            yield name

    def reset_parameters(self) -> None:
        """Draw all rows anew, by their tables' ``init_fn``, as TorchRec's; optimizer states stay, as there. Every rank
        must call it, where TorchRec asks for that of data-parallel tables alone.
        """
        for config in self.configs_of_planned():
            assert config.init_fn is not None
            self._logical.draw(self.tables.names.index(config.name), config.init_fn)
        for collection in self._torchrec:
            collection.reset_parameters()

    def train(self, mode: bool = True) -> ShardedRowsModule:
        super().train(mode)
        self.tables.train(mode)
        for collection in self._torchrec:
            collection.train(mode)
        return self

    def collections(self) -> list[list[str]]:
        """Tables that share collectives, as :func:`flexshard.executors.replay` takes them."""
        return [list(self.tables.names)]

    # -- checkpoints

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self._logical.wait_for_all("state_dict()")
        for config in self.configs_of_planned():  # in the unsharded module's order
            index = self.tables.names.index(config.name)
            destination[prefix + self._logical.parameter_name(config.name)] = self._logical.hand_out(index, "weight")
        for collection in self._torchrec:
            collection.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)

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
        left, errors = OrderedDict(state_dict), list[str]()
        keys = _IncompatibleKeys([], [])
        for hook in self._load_state_dict_pre_hooks.values():
            hook(left, "", {}, strict, keys.missing_keys, keys.unexpected_keys, errors)
        keys.missing_keys.extend(self._load_tables(left, ""))
        for collection in self._torchrec:
            more = collection.load_state_dict(left, strict=False)
            keys.missing_keys.extend(more.missing_keys)
            left = OrderedDict.fromkeys(more.unexpected_keys)
        keys.unexpected_keys.extend(left)
        for after in self._load_state_dict_post_hooks.values():
            after(self, keys)
        if errors:
            raise CheckpointError(errors[0])
        if strict:
            check_keys(keys.missing_keys, keys.unexpected_keys)
        return keys

    def _load_tables(self, state_dict: dict[str, Any], prefix: str) -> list[str]:
        """Take what is there out of the mapping; which keys were missing."""
        keys = [prefix + self._logical.parameter_name(table) for table in self.tables.names]
        missing = [key for key in keys if key not in state_dict]
        for index, key in enumerate(keys):
            if key not in missing:
                self._logical.take(index, "weight", state_dict.pop(key))
        return missing

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        """As part of a plain module's ``load_state_dict``; the tables that TorchRec shards load themselves."""
        _metadata, _strict, missing_keys, _unexpected_keys, error_msgs = rest
        for hook in self._load_state_dict_pre_hooks.values():
            hook(state_dict, prefix, *rest)
        try:
            missing_keys += self._load_tables(dict(state_dict), prefix)
        except CheckpointError as error:
            error_msgs.append(str(error))
        for collection in self._torchrec:
            theirs = {key: state_dict[prefix + key] for key in collection.state_dict() if prefix + key in state_dict}
            missing = collection.load_state_dict(theirs, strict=False).missing_keys
            missing_keys += [prefix + name for name in missing]
