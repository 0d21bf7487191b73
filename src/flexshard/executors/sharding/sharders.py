"""The sharders that carry plans of rows out, for TorchRec's ``DistributedModelParallel``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import BaseEmbeddingSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import CommOp, ParameterSharding, QuantizedCommCodecs, ShardedModule, ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from flexshard.costmodels import apart
from flexshard.errors import PlanError, TableError
from flexshard.executors.comm.collectives import Collectives
from flexshard.executors.servers.embedding_servers import EmbeddingServers
from flexshard.executors.sharding.pooled import ShardedFlexShardEmbeddingBagCollection
from flexshard.executors.sharding.row_sharding import RowSharding, check_environment, check_world
from flexshard.executors.sharding.sequences import ShardedFlexShardEmbeddingCollection
from flexshard.executors.sharding.sharded_tables import ShardedTables
from flexshard.executors.stores.base import RowStore
from flexshard.executors.stores.fused import FusedStore
from flexshard.planner import FlexShardParameterSharding, bag_part_of, part_of

__all__ = ["FlexShardEmbeddingBagCollectionSharder", "FlexShardEmbeddingCollectionSharder"]


class FlexShardEmbeddingCollectionSharder(BaseEmbeddingSharder[EmbeddingCollection]):
    """Shards every ``EmbeddingCollection``: tables of a FlexShard plan as it says, others as TorchRec does.

    Put it into ``DistributedModelParallel``'s sharders in place of TorchRec's ``EmbeddingCollectionSharder``.

    Args:
        fused_params: as TorchRec's: optimizer, learning rate and so on, for all rows whatever their tier.
        qcomm_codecs_registry: as TorchRec's; its codecs for sequence all-to-alls are used.
        use_index_dedup: for tables that TorchRec shards; a plan's own tables follow the plan.
        translated_ids: whether batches come from :meth:`ShardedFlexShardEmbeddingCollection.translator`.
        sharded_store: makes the store of rows without copies; FBGEMM's by default, :class:`MemoryStore` where FBGEMM
            has no kernels.
        collectives: what carries tensors to other ranks.
        cache_load_factors: tables whose rows without copies are kept in the host's memory, behind a cache of so many of
            them as a share (above 0, at most 1), as TorchRec's ``CacheParams.load_factor``; by default those of the
            plan. What leaves the cache and what comes follows from the batches that are known ahead: train with
            :class:`LookaheadPipeline`.
        servers: embedding servers, where the rows of tables behind caches are kept instead of in this process's memory.
    """

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        *,
        use_index_dedup: bool = False,
        translated_ids: bool = False,
        sharded_store: Callable[..., RowStore] = FusedStore,
        collectives: Collectives | None = None,
        cache_load_factors: Mapping[str, float] | None = None,
        servers: EmbeddingServers | None = None,
    ) -> None:
        super().__init__(fused_params, qcomm_codecs_registry)
        self._torchrec_sharder = EmbeddingCollectionSharder(fused_params, qcomm_codecs_registry, use_index_dedup)
        self._rows = RowSharding(
            translated_ids=translated_ids,
            sharded_store=sharded_store,
            collectives=collectives,
            cache_load_factors=cache_load_factors,
            servers=servers,
        )

    carries_out_plans = True  # which FlexShardPlanner asks for

    @property
    def cache_load_factors(self) -> Mapping[str, float]:
        """As given."""
        return self._rows.cache_load_factors

    @property
    def module_type(self) -> type[EmbeddingCollection]:
        return EmbeddingCollection

    def shardable_parameters(self, module: EmbeddingCollection) -> dict[str, nn.Parameter]:
        return self._torchrec_sharder.shardable_parameters(module)

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """TorchRec's own; a plan's sharding type is none that TorchRec's planner could choose."""
        return self._torchrec_sharder.sharding_types(compute_device_type)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return self._torchrec_sharder.compute_kernels(sharding_type, compute_device_type)

    def shard(
        self,
        module: EmbeddingCollection,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedModule[Any, Any, Any, Any]:
        """Shard one collection; all ranks do so alike.

        Raises:
            PlanError: the plan is for other tables, another number of ranks or nodes, or differs between ranks.
            TableError: an optimizer or dtype that the device does not offer.
        """
        planned = {name: how for name, how in params.items() if isinstance(how, FlexShardParameterSharding)}
        if not planned:
            asked = [name for name in params if name in self._rows.cache_load_factors]
            if asked:
                raise PlanError(
                    f"table {asked[0]!r} is named in cache_load_factors, and no FlexShard plan has it; plan with"
                    " FlexShardPlanner"
                )
            return self._torchrec_sharder.shard(module, dict(params), env, device, module_fqn)
        device = torch.device("cpu") if device is None else device
        check_environment(env)
        self._rows.compared(env)
        check_world(planned, env.process_group, module_fqn)
        part = None
        configs = {config.name: config for config in module.embedding_configs()}
        shared = self._rows.shard(
            planned,
            configs,
            {name: module.embeddings[name].weight for name in planned},
            env,
            device,
            module_fqn=module_fqn,
            fused_params=self.fused_params,
            codecs=(self.qcomm_codecs_registry or {}).get(CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.name),
            params=params,
        )
        others = [config for name, config in configs.items() if name not in planned]
        if others:  # TorchRec's own sharding of the tables that the plan leaves out, as a collection of theirs alone
            left = part_of(module, others)
            theirs = {config.name: params[config.name] for config in others}
            part = self._torchrec_sharder.shard(left, theirs, env, device, module_fqn)
        return ShardedFlexShardEmbeddingCollection(
            list(configs.values()),
            need_indices=module.need_indices(),
            torchrec_collection=part,
            module_sharding_plan=dict(params),
            **shared,
        )


def _check_stock_optimizer(tables: ShardedTables, other: str, device: torch.device) -> None:
    """Whether FBGEMM has the optimizer for pooled tables too, which only the ranks that have some would find out."""
    for group in tables.groups:
        optimizer = group.traits.spec
        if device.type == "cpu" and not optimizer.optimizer.on_cpu:
            raise TableError(
                f"table {other!r}: FBGEMM has no {optimizer.name} for pooled tables on CPUs; name it in"
                " cache_load_factors too, or take another optimizer"
            )


@dataclass(frozen=True)
class _AllRows:
    """All rows of a table, dealt to all ranks."""

    rows: int
    group_size: int
    first_position: int = 0
    reduction: str = "dense"
    first_holder: int = 0


@dataclass(frozen=True)
class _RowWiseTable:
    """A table as a plan has it, whose rows have no copies."""

    rows: int
    dim: int
    tiers: tuple[_AllRows]
    optimizer: str = ""
    cache: None = None


def _row_wise(config: EmbeddingBagConfig, world_size: int, number: int) -> _RowWiseTable:
    rows, holder = config.num_embeddings, apart(number, world_size)
    return _RowWiseTable(rows, config.embedding_dim, (_AllRows(rows, world_size, first_holder=holder),))


@dataclass(frozen=True)
class _RowWise:
    """How a pooled table is sharded whose rows are behind a cache."""

    table: _RowWiseTable
    fingerprint: str
    index_dedup: bool  # once to each rank; one alone sends nothing
    ranked_rows: None = None


class FlexShardEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder):
    """Shards every ``EmbeddingBagCollection`` as TorchRec does, but for tables whose rows are kept on the host.

    Put it into ``DistributedModelParallel``'s sharders in place of TorchRec's ``EmbeddingBagCollectionSharder``.

    Args:
        fused_params, qcomm_codecs_registry: as TorchRec's. Rows of tables behind a cache travel with the codecs of
            pooled all-to-alls.
        cache_load_factors: tables whose rows are kept in the host's memory, behind a cache of so many of them as a
            share (above 0, at most 1); see :class:`FlexShardEmbeddingCollectionSharder`. Whatever the plan has them as,
            their rows are dealt to all ranks; a batch's come to the ranks that ask for them, each once, and are added
            up there.
        sharded_store, collectives, servers: as of :class:`FlexShardEmbeddingCollectionSharder`.
    """

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        *,
        cache_load_factors: Mapping[str, float] | None = None,
        sharded_store: Callable[..., RowStore] = FusedStore,
        collectives: Collectives | None = None,
        servers: EmbeddingServers | None = None,
    ) -> None:
        super().__init__(fused_params, qcomm_codecs_registry)
        self._rows = RowSharding(
            sharded_store=sharded_store,
            collectives=collectives,
            cache_load_factors=cache_load_factors,
            servers=servers,
        )
        self._unknown = set(self._rows.cache_load_factors)
        if servers is not None and not self._unknown:
            raise TableError("servers were given, and no pooled table for them; name some in cache_load_factors")

    @property
    def cache_load_factors(self) -> Mapping[str, float]:
        """As given."""
        return self._rows.cache_load_factors

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        """Shard one collection; all ranks do so alike.

        Raises:
            PlanError: ranks differ in which tables are behind caches.
            TableError: means of weighted ids, an optimizer or dtype that the device does not offer.
        """
        factors = self._rows.cache_load_factors
        configs = {config.name: config for config in module.embedding_bag_configs()}
        cached = [name for name in configs if name in factors]
        fingerprint = self._rows.compared(env)
        self._unknown -= set(cached)
        if not cached:
            stock = super().shard(module, params, env, device, module_fqn)
            return self._checked(stock) if self._unknown else stock
        check_environment(env)
        for name in cached:
            if module.is_weighted() and configs[name].pooling == PoolingType.MEAN:
                raise TableError(
                    f"table {name!r}: means of weighted ids are not defined (torch's EmbeddingBag has none either);"
                    " pool by sums"
                )
        device = torch.device("cpu") if device is None else device
        planned = {
            name: _RowWise(
                _row_wise(configs[name], env.world_size, sorted(factors).index(name)),
                fingerprint,
                index_dedup=env.world_size > 1,
            )
            for name in cached
        }
        shared = self._rows.shard(
            planned,
            configs,
            {name: module.embedding_bags[name].weight for name in planned},
            env,
            device,
            module_fqn=module_fqn,
            fused_params=self.fused_params,
            codecs=(self.qcomm_codecs_registry or {}).get(CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL.name),
            params=params,
        )
        others, part = [config for name, config in configs.items() if name not in planned], None
        if others:
            _check_stock_optimizer(shared["tables"], others[0].name, device)
            theirs = {config.name: params[config.name] for config in others}
            part = super().shard(bag_part_of(module, others), theirs, env, device, module_fqn)
        return ShardedFlexShardEmbeddingBagCollection(
            list(configs.values()),
            is_weighted=module.is_weighted(),
            torchrec_collection=part,
            module_sharding_plan=dict(params),
            **shared,
        )

    def _checked(self, collection: Any) -> Any:
        """A collection that has none of the tables that are to be behind caches: when its first batch comes, all
        collections have been sharded, and one of them must have had each.
        """
        input_dist = collection.input_dist

        def first(*args: Any, **kwargs: Any) -> Any:
            if self._unknown:
                raise PlanError(f"cache_load_factors: no pooled table is named {min(self._unknown)!r} in the model")
            del collection.input_dist
            return input_dist(*args, **kwargs)

        collection.input_dist = first
        return collection

    def reshard(self, sharded_module: Any, *args: Any, **kwargs: Any) -> Any:
        """As TorchRec's, of collections without caches.

        Raises:
            PlanError: it has some.
        """
        if isinstance(sharded_module, ShardedFlexShardEmbeddingBagCollection):
            raise PlanError(
                "a collection with tables behind caches cannot be resharded; load a checkpoint under another plan"
            )
        return super().reshard(sharded_module, *args, **kwargs)
