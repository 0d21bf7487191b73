"""``FlexShardPlanner``: a plan as TorchRec's ``DistributedModelParallel`` takes it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ModuleSharder, ShardingPlan, ShardingPlanner
from torchrec.modules.embedding_configs import DataType, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection

from flexshard import units
from flexshard._together import picklable, raise_together
from flexshard.costmodels import DTYPE_BYTES, OverlapLike, Table
from flexshard.errors import JobError, PlanError
from flexshard.planner._plan import Plan, TablePlan, Tier
from flexshard.planner._sharding import FLEX_SHARD, FlexShardParameterSharding
from flexshard.planner._solve import solve
from flexshard.profiling import AccessProfile
from flexshard.topologies import Cluster

__all__ = ["FlexShardPlanner"]

_DTYPES = {DataType.FP32: "float32", DataType.FP16: "float16", DataType.BF16: "bfloat16"}
_OPTIMIZERS = {
    "sgd": "sgd",
    "exact_sgd": "sgd",
    "adagrad": "adagrad",
    "exact_adagrad": "adagrad",
    "row_wise_adagrad": "rowwise_adagrad",
    "exact_row_wise_adagrad": "rowwise_adagrad",
    "adam": "adam",
    "partial_row_wise_adam": "partial_rowwise_adam",
}
Profiles = Mapping[str, AccessProfile | str | os.PathLike[str]]


class FlexShardPlanner(ShardingPlanner):
    """Plans every table of every ``EmbeddingCollection``; leaves other modules to TorchRec's planner, with the memory
    that is left.

    Args:
        plan: to carry out; or give ``profiles``, ``cluster`` and ``batch_size``, and it is solved for the model.
        profiles: by table (its own name, or the module's full name and its own), or files of them. With a plan they
            only rank rows, and those that the plan names are read where none is given.
        cluster, batch_size, budget, tiers, overlap, index_dedup, reduction: as for :func:`flexshard.solve`, if no plan
            is given; reduction is "auto" here. The translation of ids is counted as on the device.
        dedup_factors: DedupFactor of tables, by name as for ``profiles``; 1 for those not named.
        base: directory that a plan's profile paths are relative to: that of its job file.
        torchrec_planner: for the other modules, with a memory limit of its own; by default TorchRec's with what the
            plan leaves.

    Raises:
        JobError: neither a plan nor all that solving needs.
    """

    def __init__(
        self,
        plan: Plan | None = None,
        *,
        profiles: Profiles | None = None,
        cluster: Cluster | None = None,
        batch_size: int | None = None,
        budget: str | float = "neutral",
        tiers: int = 3,
        overlap: OverlapLike = None,
        index_dedup: bool = False,
        reduction: str = "auto",
        dedup_factors: Mapping[str, float] | None = None,
        base: str | os.PathLike[str] = ".",
        torchrec_planner: ShardingPlanner | None = None,
    ) -> None:
        if plan is None and (profiles is None or cluster is None or batch_size is None):
            raise JobError("FlexShardPlanner needs a plan, or profiles, a cluster and a batch_size to solve one")
        self._plan, self._profiles, self._base = plan, dict(profiles or {}), Path(base)
        self._cluster, self._batch_size = cluster, batch_size
        self._dedup_factors = dict(dedup_factors or {})
        self._how: dict[str, Any] = {
            "budget": budget,
            "tiers": tiers,
            "overlap": overlap,
            "index_dedup": index_dedup,
            "reduction": reduction,
        }
        self._torchrec_planner = torchrec_planner

    @property
    def solved(self) -> Plan | None:
        """The plan that is carried out: given, or solved by ``plan``."""
        return self._plan

    def plan(self, module: nn.Module, sharders: Sequence[ModuleSharder[Any]]) -> ShardingPlan:
        """Shardings of every table that a sharder knows.

        Raises:
            PlanError: the plan is for other tables, rows or dimensions, or names a profile that is not there.
        """
        return self._with_rankings(self._decide(module, sharders))

    def collective_plan(
        self, module: nn.Module, sharders: Sequence[ModuleSharder[Any]], pg: dist.ProcessGroup | None = None
    ) -> ShardingPlan:
        """Rank 0's plan on every rank; every rank must call it.

        Raises:
            PlanError: as ``plan``, on every rank; or another rank was given another plan.
        """
        group = dist.group.WORLD if pg is None else pg
        box: list[Any] = [None]
        if dist.get_rank(group) == 0:
            try:
                box = [(self._decide(module, sharders), self._plan)]
            except Exception as error:  # the others wait for an answer
                box = [picklable(error, PlanError)]
        own = self._plan.fingerprint if self._plan is not None else None
        dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
        if isinstance(box[0], Exception):
            raise box[0]
        decided, plan = box[0]
        words: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(words, own, group=group)
        different = [rank for rank, word in enumerate(words) if word not in (None, plan.fingerprint)]
        if different:
            raise PlanError(
                f"rank {different[0]} was given plan {words[different[0]][:12]}, rank 0 carries out"
                f" {plan.fingerprint[:12]} (tables {', '.join(list(plan.tables)[:3])}); give every rank the same file"
            )
        self._plan = plan
        problem, sharding = None, decided
        try:
            sharding = self._with_rankings(decided)
        except Exception as error:
            problem = error
        raise_together(problem, PlanError, group)
        return sharding

    # -- rank 0

    def _decide(self, module: nn.Module, sharders: Sequence[ModuleSharder[Any]]) -> ShardingPlan:
        kinds = {sharder.module_type: sharder for sharder in sharders}
        collections = {fqn: part for fqn, part in module.named_modules() if type(part) is EmbeddingCollection}
        if collections and not getattr(kinds.get(EmbeddingCollection), "carries_out_plans", False):
            found = type(kinds[EmbeddingCollection]).__name__ if EmbeddingCollection in kinds else "none"
            raise PlanError(
                f"the sharder for EmbeddingCollection is {found}; give FlexShardEmbeddingCollectionSharder in its place"
            )
        tables = {
            (fqn, config.name): config for fqn, part in collections.items() for config in part.embedding_configs()
        }
        if self._plan is None:
            self._plan = self._solve(tables, collections, kinds)
        plan, used, result = self._plan, set(), {}
        for fqn, part in collections.items():
            shardings, named = self._shardings(fqn, part.embedding_configs(), plan)
            used |= named
            result[fqn] = EmbeddingModuleShardingPlan(shardings)
        left = [name for name in plan.tables if name not in used]
        if left:
            raise PlanError(
                f"the plan has table {left[0]!r}, which no EmbeddingCollection of the model has; plan for this model"
            )
        result.update(self._others(module, sharders, tables))
        return ShardingPlan(result)

    def shardings_of(self, fqn: str, configs: Sequence[EmbeddingConfig]) -> dict[str, FlexShardParameterSharding]:
        """Shardings of one collection's tables under the plan, with their rankings.

        Raises:
            PlanError: as :meth:`plan`.
        """
        assert self._plan is not None
        shardings, _ = self._shardings(fqn, configs, self._plan)
        return {name: self._ranked(fqn, name, how) for name, how in shardings.items()}

    def _shardings(
        self, fqn: str, configs: Sequence[EmbeddingConfig], plan: Plan
    ) -> tuple[dict[str, FlexShardParameterSharding], set[str]]:
        """Shardings of a collection's tables, and which of the plan's tables they are."""
        shardings, used = {}, set()
        for config in configs:
            name = self._name(fqn, config.name, plan.tables)
            if name is None:
                warnings.warn(
                    f"table {config.name!r} of {fqn or 'the model'} has no profile in the plan; it is split row-wise"
                    " over all ranks",
                    UserWarning,
                    stacklevel=5,
                )
                table = _row_wise(config, plan)
            else:
                used.add(name)
                table = plan.tables[name]
                _check_table(name, table, config)
            shardings[config.name] = FlexShardParameterSharding(
                sharding_type=FLEX_SHARD,
                compute_kernel="fused",
                ranks=list(range(plan.cluster.world_size)),
                table=table,
                world_size=plan.cluster.world_size,
                ranks_per_node=plan.cluster.ranks_per_node,
                fingerprint=plan.fingerprint,
                index_dedup=plan.settings.index_dedup,
            )
        return shardings, used

    @staticmethod
    def _name(fqn: str, table: str, known: Mapping[str, Any]) -> str | None:
        """How a table is keyed: by the module's full name and its own, or by its own alone."""
        return next((name for name in (f"{fqn}.{table}", table) if name in known), None)

    def _solve(
        self,
        tables: Mapping[tuple[str, str], EmbeddingConfig],
        collections: Mapping[str, EmbeddingCollection],
        kinds: Mapping[Any, Any],
    ) -> Plan:
        assert self._cluster is not None
        assert self._batch_size is not None
        owners: dict[str, list[str]] = {}
        for fqn, table in tables:
            owners.setdefault(table, []).append(fqn)
        problem = []
        for (fqn, name), config in tables.items():
            key = self._name(fqn, name, self._profiles)
            if key is None:
                continue
            problem.append(
                Table(
                    f"{fqn}.{name}" if len(owners[name]) > 1 else name,
                    config.num_embeddings,
                    config.embedding_dim,
                    _profile(self._profiles[key]),
                    dtype=_dtype(config),
                    optimizer=_optimizer(collections[fqn].embeddings[name].weight, kinds[EmbeddingCollection]),
                    features=tuple(config.feature_names),
                    dedup_factor=self._dedup_factors.get(f"{fqn}.{name}", self._dedup_factors.get(name, 1.0)),
                )
            )
        if not problem:
            raise PlanError(
                "none of the model's tables has a profile; profiles were given for"
                f" {', '.join(self._profiles) or 'none'}"
            )
        return solve(problem, self._cluster, batch_size=self._batch_size, translation="device", **self._how)

    def _others(
        self,
        module: nn.Module,
        sharders: Sequence[ModuleSharder[Any]],
        tables: Mapping[tuple[str, str], EmbeddingConfig],
    ) -> dict[str, Any]:
        """TorchRec's plan of all but the collections, within the memory that they leave."""
        others = [sharder for sharder in sharders if sharder.module_type is not EmbeddingCollection]
        kinds = {sharder.module_type for sharder in others}
        if not any(type(part) in kinds for _, part in module.named_modules()):
            return {}
        assert self._plan is not None
        plan, cluster = self._plan, self._plan.cluster
        unplanned = sum(
            config.num_embeddings * config.embedding_dim * DTYPE_BYTES[_dtype(config)] / cluster.world_size
            for (fqn, name), config in tables.items()
            if self._name(fqn, name, plan.tables) is None
        )
        taken = plan.predicted.memory_bytes + unplanned
        left = int(cluster.hbm_bytes - cluster.reserve_bytes - taken)
        if left <= 0:
            raise PlanError(
                f"the plan takes {units.format_bytes(taken)} per rank, which leaves nothing of"
                f" {units.format_bytes(cluster.hbm_bytes - cluster.reserve_bytes)} for the other modules; plan with a"
                " smaller budget"
            )
        planner = self._torchrec_planner
        if planner is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            memory = {"hbm_cap": left} if device == "cuda" else {"ddr_cap": left}
            planner = EmbeddingShardingPlanner(
                topology=Topology(
                    world_size=cluster.world_size,
                    local_world_size=cluster.ranks_per_node,
                    compute_device=device,
                    **memory,
                ),
                batch_size=plan.settings.batch_size,
            )
        return dict(planner.plan(module, others).plan)

    # -- every rank

    def _with_rankings(self, decided: ShardingPlan) -> ShardingPlan:
        """Each rank reads the rankings of its tables' rows itself: they are too long to send along."""
        result = {}
        for fqn, shardings in decided.plan.items():
            result[fqn] = type(shardings)()
            for name, how in shardings.items():
                if isinstance(how, FlexShardParameterSharding):
                    how = self._ranked(fqn, name, how)
                result[fqn][name] = how
        return ShardingPlan(result)

    def _ranked(self, fqn: str, name: str, how: FlexShardParameterSharding) -> FlexShardParameterSharding:
        return replace(how, ranked_rows=self._ranking(fqn, name, how.table))

    def _ranking(self, fqn: str, name: str, table: TablePlan | None) -> Any:
        assert table is not None
        if not table.profile_digest:
            return None
        key = self._name(fqn, name, self._profiles)
        where: Any = self._profiles[key] if key is not None else None
        if where is None and table.profile_path is not None:
            where = self._base / table.profile_path
        if where is None:
            if len(table.tiers) == 1:
                return None  # any dealing will do
            raise PlanError(
                f"table {table.name!r}: the plan does not say which file ranks its rows; give FlexShardPlanner"
                f" profiles={{{table.name!r}: ...}}"
            )
        profile = _profile(where)
        if profile.digest != table.profile_digest:
            shown = f"{where} " if not isinstance(where, AccessProfile) else ""
            raise PlanError(
                f"table {table.name!r}: profile {shown}is not the one that the plan was made from; plan again with it"
            )
        return profile.ranked_rows


def _profile(where: AccessProfile | str | os.PathLike[str]) -> AccessProfile:
    return where if isinstance(where, AccessProfile) else AccessProfile.load(where)


def _dtype(config: EmbeddingConfig) -> str:
    if config.data_type not in _DTYPES:
        raise PlanError(
            f"table {config.name!r}: data type {config.data_type.name} cannot be trained; use FP32, FP16 or BF16"
        )
    return _DTYPES[config.data_type]


def _optimizer(weight: torch.Tensor, sharder: Any) -> str:
    """Our name of the optimizer that a table will have, SGD (FBGEMM's default) where none is set."""
    from torchrec.distributed.utils import optimizer_type_to_emb_opt_type

    (kind,) = getattr(weight, "_optimizer_classes", [None])
    found = optimizer_type_to_emb_opt_type(kind) if kind is not None else (sharder.fused_params or {}).get("optimizer")
    return _OPTIMIZERS.get(getattr(found, "value", found) or "sgd", "rowwise_adagrad")


def _check_table(name: str, table: TablePlan, config: EmbeddingConfig) -> None:
    expected = (table.rows, table.dim, table.dtype)
    found = (config.num_embeddings, config.embedding_dim, _dtype(config))
    for what, planned, has in zip(("rows", "dim", "dtype"), expected, found, strict=True):
        if planned != has:
            raise PlanError(f"table {name!r}: the plan is for {what} {planned}, the model has {has}; plan again")
    if table.features and set(table.features) != set(config.feature_names):
        raise PlanError(
            f"table {name!r}: the plan is for features {', '.join(table.features)}, the model has"
            f" {', '.join(config.feature_names)}; plan again"
        )


def _row_wise(config: EmbeddingConfig, plan: Plan) -> TablePlan:
    """All rows over all ranks."""
    tier = Tier("row_wise", plan.cluster.world_size, config.num_embeddings, 0, 1.0, None, 0.0, 0.0, 0.0)
    return TablePlan(
        name=config.name,
        rows=config.num_embeddings,
        dim=config.embedding_dim,
        dtype=_dtype(config),
        optimizer="",
        features=tuple(config.feature_names),
        kappa_replicated=1.0,
        kappa_sharded=1.0,
        profile_digest="",
        profile_path=None,
        num_samples=0,
        avg_length=0.0,
        tiers=(tier,),
    )
