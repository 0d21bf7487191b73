"""Rows of planned tables on this rank: what every sharder here begins with."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import (
    ParameterSharding,
    QuantizedCommCodec,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingEnv2D,
)
from torchrec.distributed.utils import merge_fused_params, optimizer_type_to_emb_opt_type
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig

from flexshard._internal import check_finite, differing_ranks, on_all_ranks
from flexshard.costmodels import Layout, PlacedTable, rows_with_places
from flexshard.embeddings import IndexBijection
from flexshard.errors import PlanError, TableError
from flexshard.executors.comm.collectives import Collectives
from flexshard.executors.servers.embedding_servers import EmbeddingServers
from flexshard.executors.sharding.joint import JointModules
from flexshard.executors.sharding.sharded_tables import GroupOptions, GroupTraits, ShardedTables
from flexshard.executors.state.rows_by_id import draw_rows, fill_rows
from flexshard.executors.state.served_rows import make_on_servers
from flexshard.executors.stores.base import RowStore
from flexshard.executors.stores.fused import FusedStore
from flexshard.executors.stores.updates import OptimizerSpec
from flexshard.planner import FlexShardParameterSharding, TableCache, optimizer_class
from flexshard.tables import data_type_of_torchrec

__all__ = ["PlannedRows", "RowSharding", "check_environment", "check_world", "placement_of"]

# What ParameterConstraints say of a table that holds however its rows are stored.
_OPTIONS = ("bounds_check_mode", "output_dtype", "stochastic_rounding")
_OF_VIRTUAL_TABLES = ("use_virtual_table", "total_num_buckets", "virtual_table_eviction_policy")


class PlannedTable(PlacedTable, Protocol):
    """A table of a plan, as far as sharding it goes."""

    @property
    def dim(self) -> int: ...
    @property
    def optimizer(self) -> str: ...
    @property
    def cache(self) -> TableCache | None: ...


class PlannedRows(Protocol):
    """How a table is sharded row by row, as :class:`FlexShardParameterSharding` says it."""

    @property
    def table(self) -> PlannedTable | None: ...
    @property
    def index_dedup(self) -> bool: ...
    @property
    def ranked_rows(self) -> Any: ...
    @property
    def fingerprint(self) -> str: ...


class RowSharding:
    """Puts rows of tables where they are planned, for a sharder of collections.

    Args:
        translated_ids, sharded_store, collectives, cache_load_factors, servers: as of
            :class:`FlexShardEmbeddingCollectionSharder`.
    """

    def __init__(
        self,
        *,
        translated_ids: bool = False,
        sharded_store: Callable[..., RowStore] = FusedStore,
        collectives: Collectives | None = None,
        cache_load_factors: Mapping[str, float] | None = None,
        servers: EmbeddingServers | None = None,
    ) -> None:
        self._sharded_store, self._collectives = sharded_store, collectives or Collectives()
        if not isinstance(servers, EmbeddingServers | None):
            raise TableError(f"servers must be EmbeddingServers, found {type(servers).__name__}")
        self._servers = servers
        self._translated_ids = translated_ids
        if not isinstance(cache_load_factors or {}, Mapping):
            raise TableError(f"cache_load_factors must be shares by table, found {cache_load_factors!r}")
        self.cache_load_factors = {
            name: check_finite(factor, f"cache_load_factors: {name!r}", TableError)
            for name, factor in (cache_load_factors or {}).items()
        }
        for name, factor in self.cache_load_factors.items():
            if not 0 < factor <= 1:
                raise TableError(f"cache_load_factors: {name!r} must be above 0 and at most 1, found {factor:g}")
        self._latest: tuple[ShardingEnv, tuple[Any, ...], set[str], weakref.ref[JointModules]] | None = None

    def shard(
        self,
        planned: Mapping[str, PlannedRows],
        configs: Mapping[str, BaseEmbeddingConfig],
        weights: Mapping[str, nn.Parameter],
        env: ShardingEnv,
        device: torch.device,
        *,
        module_fqn: str | None,
        fused_params: dict[str, Any] | None,
        codecs: QuantizedCommCodecs | None,
        params: Mapping[str, ParameterSharding],
    ) -> dict[str, Any]:
        """Rows of a module's planned tables on this rank, as :class:`ShardedRowsModule` takes them; all ranks do so
        alike.

        Args:
            planned, configs, weights: of each table, by name.
            env, device, module_fqn: as TorchRec gives them.
            fused_params: as TorchRec's.
            codecs: of embeddings and gradients.
            params: TorchRec's, whose options go before ``fused_params``.

        Raises:
            PlanError, TableError: as of :meth:`FlexShardEmbeddingCollectionSharder.shard`.
        """
        index_dedup = frozenset(name for name, how in planned.items() if how.index_dedup)
        frozen = [name for name in planned if not weights[name].requires_grad]
        if frozen:
            warnings.warn(
                f"tables {', '.join(frozen[:3])}: requires_grad=False is not heeded by fused optimizers, TorchRec's or"
                " these; they are trained, but where they are looked up under torch.no_grad()",
                UserWarning,
                stacklevel=3,
            )
        if codecs is not None:
            _warn_of_loss(codecs.backward, list(planned))
        traits = on_all_ranks(
            lambda: {
                name: self._traits(configs[name], how, weights[name], device, fused_params, params[name])
                for name, how in planned.items()
            },
            PlanError,
            env.process_group,
        )
        if self._servers is not None and all(one.cache_load_factor is None for one in traits.values()):
            warnings.warn(
                f"tables {', '.join(list(planned)[:3])}: servers were given, and none of these is behind a cache; name"
                " those that are to be on servers in cache_load_factors",
                UserWarning,
                stacklevel=3,
            )
        alike = list(dict.fromkeys(traits.values()))
        names = sorted(planned, key=lambda name: alike.index(traits[name]))  # those of one group together
        options = GroupOptions(
            env.process_group,
            device,
            codecs,
            self._translated_ids,
            index_dedup,
            self._collectives,
            self._sharded_store,
            None if self._servers is None else self._servers.tables(env.process_group),
        )
        layout, bijections = placement_of({name: planned[name] for name in names}, env.world_size)
        tables = ShardedTables(layout, [traits[name] for name in names], bijections, options)
        _initialise(tables, [configs[name] for name in names], [weights[name] for name in names])
        fingerprint = next(iter(planned.values())).fingerprint
        joint = self._joint_of(env, (device, fingerprint), module_fqn, planned)
        return {"tables": tables, "fingerprint": fingerprint, "device": device, "joint": joint}

    def compared(self, env: ShardingEnv) -> str:
        """The shares of tables in caches, in words; every rank must ask.

        Raises:
            PlanError: those of other ranks differ.
        """
        here = repr(sorted(self.cache_load_factors.items()))
        words, different = differing_ranks(here, env.process_group)
        if different:
            raise PlanError(
                f"cache_load_factors of rank {different[0]} are {words[different[0]]}, of rank 0 {words[0]}; give every"
                " rank the same"
            )
        return here

    def _joint_of(
        self, env: ShardingEnv, alike: tuple[Any, ...], module_fqn: str | None, planned: Collection[str]
    ) -> JointModules:
        """With which a module's batches may be exchanged: those of the same model, which has one environment.

        Args:
            env: the model's.
            alike: what they must have in common.
            module_fqn: where the module stands in its model; None for one by itself.
            planned: the module's tables; by itself, it has no others.
        """
        if self._latest is not None and module_fqn is not None:
            known_env, known_alike, names, known = self._latest
            joint = known()
            if joint is not None and known_env is env and known_alike == alike and module_fqn not in names:
                names.add(module_fqn)
                return joint
        expected = self.cache_load_factors.keys()
        joint = JointModules(expected if module_fqn is not None else expected & set(planned))
        self._latest = None if module_fqn is None else (env, alike, {module_fqn}, weakref.ref(joint))
        return joint

    def _traits(
        self,
        config: BaseEmbeddingConfig,
        how: PlannedRows,
        weight: nn.Parameter,
        device: torch.device,
        fused_params: dict[str, Any] | None,
        params: ParameterSharding,
    ) -> GroupTraits:
        kind = data_type_of_torchrec(config.data_type.name)
        dtype = None if kind is None else getattr(torch, kind.name)
        if dtype not in (torch.float32, torch.float16):
            raise TableError(
                f"table {config.name!r}: FBGEMM has no kernels that train rows of"
                f" {config.data_type.name}, on CPUs or on CUDA; use FP32 or FP16"
            )
        for option in _OF_VIRTUAL_TABLES:
            if getattr(config, option, None):
                raise TableError(
                    f"table {config.name!r}: {option} is of TorchRec's virtual tables, whose rows are evicted; leave it"
                    " out, or leave the table to TorchRec (torchrec_tables= of FlexShardPlanner)"
                )
        assert how.table is not None
        if (config.num_embeddings, config.embedding_dim) != (how.table.rows, how.table.dim):
            raise PlanError(
                f"table {config.name!r}: the plan is for {how.table.rows:,} rows of {how.table.dim}, this rank's model"
                f" has {config.num_embeddings:,} of {config.embedding_dim}; give every rank the same model, or plan"
                " again"
            )
        # What apply_optimizer_in_backward left on the parameter goes before what the sharder was given.
        kwargs = dict(getattr(weight, "_optimizer_kwargs", [{}])[0])
        kind = optimizer_class(config.name, weight)
        if kind is not None:
            kwargs["optimizer"] = optimizer_type_to_emb_opt_type(kind)
        fused = merge_fused_params(fused_params, kwargs)
        fused.pop("cache_precision", None)
        options = {name: getattr(params, name) for name in _OPTIONS}
        fused |= {name: value for name, value in options.items() if value is not None}
        spec = OptimizerSpec.of(fused, config.name, device)
        if how.table.optimizer not in ("", spec.name):
            warnings.warn(
                f"table {config.name!r}: the plan counts the memory of optimizer {how.table.optimizer}, the model has"
                f" {spec.name}; plan again for its budget to hold",
                UserWarning,
                stacklevel=2,
            )
        given = data_type_of_torchrec(getattr(fused.get("output_dtype"), "name", ""))
        output = torch.float32 if given is None else getattr(torch, given.name)
        planned = how.table.cache
        load_factor = self.cache_load_factors.get(config.name, None if planned is None else planned.load_factor)
        if load_factor is not None and self._servers is not None and device.type != "cpu":
            raise TableError(
                f"table {config.name!r}: caches of rows on embedding servers work on CPUs so far, not on"
                f" {device.type}; leave servers out: its rows are in this process's memory then"
            )
        pooled = isinstance(config, EmbeddingBagConfig)
        return GroupTraits(config.embedding_dim, dtype, spec, output, load_factor, pooled)


def _warn_of_loss(codec: QuantizedCommCodec[Any], tables: Sequence[str]) -> None:
    """Gradients that travel in fewer bits lose what is small or large: say what."""
    kind = getattr(getattr(codec, "_comm_precision", None), "name", "")  # as FBGEMM calls it
    losses = {
        "FP16": "those below 6e-08 become 0, those above 65504 infinite",
        "BF16": "each keeps 8 significant bits",
        "FP8": "each keeps 3 or 4 significant bits",
        "INT8": "each row keeps 8 bits a number, between its least and its largest",
    }
    if kind in losses:
        warnings.warn(
            f"tables {', '.join(tables[:3])}: gradients travel as {kind}, as qcomms asks for: {losses[kind]} before"
            " they add up; backward_precision=CommType.FP32 sends them whole",
            UserWarning,
            stacklevel=3,
        )


def check_environment(env: ShardingEnv) -> None:
    """Whether rows may be sharded there.

    Raises:
        PlanError: in TorchRec's 2D parallelism, which brings replicas together by what it knows of its own modules.
    """
    if isinstance(env, ShardingEnv2D):
        raise PlanError(
            "FlexShard's sharders are not for DMPCollection (2D parallelism); use DistributedModelParallel, where plans"
            " copy the rows that are worth it"
        )


def check_world(
    planned: Mapping[str, FlexShardParameterSharding], process_group: dist.ProcessGroup, fqn: str | None
) -> None:
    """Whether the plan is for this job, and the same on every rank.

    Raises:
        PlanError: it is not.
    """
    world = dist.get_world_size(process_group)
    how = next(iter(planned.values()))
    where = f"collection {fqn!r}" if fqn else "the collection"

    def check_size() -> None:
        local = os.environ.get("LOCAL_WORLD_SIZE", str(how.ranks_per_node))
        if (str(how.world_size), str(how.ranks_per_node)) != (str(world), local):
            raise PlanError(
                f"{where}: the plan is for {how.world_size} ranks, {how.ranks_per_node} per node; the job has"
                f" {world}, {local} per node: plan for this cluster"
            )

    on_all_ranks(check_size, PlanError, process_group)  # nodes may differ
    fingerprints, different = differing_ranks(how.fingerprint, process_group)
    if different:
        raise PlanError(
            f"{where}: rank {different[0]} has plan {fingerprints[different[0]][:12]}, rank 0 has"
            f" {fingerprints[0][:12]} (tables"
            f" {', '.join(list(planned)[:3])}); give every rank the same plan, as FlexShardPlanner.collective_plan does"
        )


def placement_of(planned: Mapping[str, PlannedRows], world_size: int) -> tuple[Layout, list[IndexBijection]]:
    """Where the rows of tables that travel together live, and the order of popularity of each."""
    tables, bijections = {}, []
    for name, how in planned.items():
        assert how.table is not None
        tables[name] = how.table
        ranked = () if how.ranked_rows is None else how.ranked_rows[: rows_with_places(how.table, world_size)]
        bijections.append(IndexBijection(np.array(ranked, np.int64), how.table.rows))
    return Layout.of_tables(tables, world_size), bijections


def _initialise(tables: ShardedTables, configs: Sequence[BaseEmbeddingConfig], weights: Sequence[torch.Tensor]) -> None:
    """Rows of the module as it was built; where that was on the meta device, rows drawn as its tables would be."""
    make_on_servers(tables)
    for table, (config, weight) in enumerate(zip(configs, weights, strict=True)):
        if weight.device.type != "meta":
            fill_rows(tables, table, {"weight": weight.detach()})
        else:
            assert config.init_fn is not None
            draw_rows(tables, table, config.init_fn)
