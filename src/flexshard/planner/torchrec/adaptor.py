"""``FlexShardPlanner``: a plan as TorchRec's ``DistributedModelParallel`` takes it."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ModuleSharder, ShardingPlan, ShardingPlanner
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from flexshard import units
from flexshard._internal import PathLike, differing_ranks, on_all_ranks, on_first_rank
from flexshard.errors import JobError, PlanError
from flexshard.planner.constraints import TableConstraints
from flexshard.planner.plan import Plan
from flexshard.planner.problem import PlannerOptions, Problem
from flexshard.planner.solving import solve
from flexshard.planner.torchrec.given_names import check_cached, check_names, check_options, name_profiles_of_others
from flexshard.planner.torchrec.left_to_torchrec import (
    left_tables,
    model_of_the_rest,
    modules_to_shard,
    tables_of_others,
)
from flexshard.planner.torchrec.means import warn_of_means
from flexshard.planner.torchrec.model_tables import check_model, check_table, dtype_of, optimizer_of, row_wise_plan
from flexshard.planner.torchrec.optimal import OptimalShardingPlanner
from flexshard.planner.torchrec.parameter_sharding import FLEX_SHARD, FlexShardParameterSharding
from flexshard.planner.torchrec.pooled_shardings import left_pooled, pooled_shardings
from flexshard.planner.torchrec.rankings import Profiles, Rankings, key_of
from flexshard.planner.torchrec.table_constraints import sequence_constraints, table_constraints
from flexshard.tables import DATA_TYPES, Table
from flexshard.topologies import Cluster

__all__ = ["FlexShardPlanner"]


class FlexShardPlanner(ShardingPlanner):
    """Plans every table of every ``EmbeddingCollection``, and the pooled ones of every ``EmbeddingBagCollection`` that
    have profiles, under one memory limit; what is left (pooled tables without profiles, tables that are left to
    TorchRec) under TorchRec's costs, with the memory that is left. TorchRec's sharders run pooled tables.

    Args:
        plan: to carry out, or a :class:`Problem` to solve for the model's tables; or give ``profiles``, ``cluster`` and
            ``batch_size``, and a problem is made of the model.
        profiles: by table (its own name, or the module's full name and its own), or files of them. With a plan they
            only rank rows, and those that the plan names are read where none is given.
        cluster: to train on, if no plan or problem is given.
        dedup_factors: DedupFactor of tables, by name as for ``profiles``; 1 for those not named.
        base: directory that a plan's profile paths are relative to: that of its job file.
        torchrec_planner: for the other modules, with a memory limit of its own; by default
            :class:`OptimalShardingPlanner` with what the plan leaves.
        torchrec_tables: tables of an ``EmbeddingCollection`` (by their own names, or with the module's full name
            before), or whole modules, that are left to that planner too.
        constraints: TorchRec's, by table. Of a table with a profile, sharding types, kernels, ``min_partition`` and the
            load factor of a cache are kept: one without pooling whose constraints name sharding types or kernels of
            TorchRec's is sharded so, or stays in tiers where they name "flex_shard" too. Where they say more, and of
            tables without a profile or beside a plan, it is left to that planner, which gets them all (a planner of
            yours in ``torchrec_planner`` has its own).
        options: as for :func:`flexshard.solve`, with profiles; by default reduction is "auto" here, and the translation
            of ids is counted as on the device.

    Raises:
        JobError: neither a plan nor all that solving needs, or options beside a plan.
    """

    def __init__(
        self,
        plan: Plan | Problem | None = None,
        *,
        profiles: Profiles | None = None,
        cluster: Cluster | None = None,
        dedup_factors: Mapping[str, float] | None = None,
        base: PathLike = ".",
        torchrec_planner: ShardingPlanner | None = None,
        torchrec_tables: Collection[str] = (),
        constraints: Mapping[str, ParameterConstraints] | None = None,
        **options: Unpack[PlannerOptions],
    ) -> None:
        if plan is None and (profiles is None or cluster is None or "batch_size" not in options):
            raise JobError("FlexShardPlanner needs a plan, or profiles, a cluster and a batch_size to solve one")
        check_options(plan, torchrec_tables, {"cluster": cluster, "dedup_factors": dedup_factors, **options})
        known: dict[str, Any] = dict(profiles or {})
        if isinstance(plan, Problem):
            known = {table.name: table.profile for table in plan.tables} | known
        self._plan = plan if isinstance(plan, Plan) else None
        self._problem = plan if isinstance(plan, Problem) else None
        self._given = self._plan is not None
        self._cluster, self._options = cluster, options
        self._rankings = Rankings(known, base)
        self._dedup_factors = dict(dedup_factors or {})
        self._torchrec_planner = torchrec_planner
        self._torchrec_tables, self._constraints = tuple(torchrec_tables), dict(constraints or {})

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
        given = self._plan.fingerprint if self._plan is not None else None
        decided, plan = on_first_rank(lambda: (self._decide(module, sharders), self._plan), PlanError, group)
        assert plan is not None
        same_on_all_ranks(given, plan, group)
        self._plan = plan

        def checked() -> ShardingPlan:
            check_model(_parts_of(module, sharders), decided)
            return self._with_rankings(decided)

        return on_all_ranks(checked, PlanError, group)

    # -- rank 0

    def _decide(self, module: nn.Module, sharders: Sequence[ModuleSharder[Any]]) -> ShardingPlan:
        kinds = {sharder.module_type: sharder for sharder in sharders}
        parts = _parts_of(module, sharders)
        collections = {fqn: part for fqn, part in parts.items() if type(part) is EmbeddingCollection}
        if collections and not getattr(kinds.get(EmbeddingCollection), "carries_out_plans", False):
            sharder_name = type(kinds[EmbeddingCollection]).__name__ if EmbeddingCollection in kinds else "none"
            raise PlanError(
                f"the sharder for EmbeddingCollection is {sharder_name}; give"
                " FlexShardEmbeddingCollectionSharder in its place"
            )
        tables = {
            (fqn, config.name): config for fqn, part in collections.items() for config in part.embedding_configs()
        }
        pooled = {fqn: part for fqn, part in parts.items() if type(part) is EmbeddingBagCollection}
        inside = tables_of_others(parts)
        name_profiles_of_others(inside, parts, kinds, self._rankings.profiles, self._torchrec_tables)
        given = self._given or self._problem is not None
        kept = () if given else self._planned_as_asked(tables)
        bags = {fqn: part.embedding_bag_configs() for fqn, part in pooled.items()}
        outside = [(outer, name) for (_, name), outer in inside.items()]
        others = [*((fqn, config.name) for fqn, configs in bags.items() for config in configs), *inside, *outside]
        check_names(module, self._dedup_factors, self._constraints)
        check_cached(kinds, parts)
        left_out = left_tables(tables, self._torchrec_tables, self._constraints, others, kept)
        ours = {key: config for key, config in tables.items() if key not in left_out}
        left_bags = left_pooled(pooled, self._torchrec_tables, self._constraints, planned=given)
        if self._plan is None:
            self._plan = solve(self._problem or self._problem_of(ours, collections, kinds, pooled, left_bags))
        plan, result = self._plan, {}
        used = {key_of(*key, plan.tables) for key in left_out}
        sequences: dict[str, Sequence[BaseEmbeddingConfig]]
        sequences = {fqn: part.embedding_configs() for fqn, part in collections.items()}
        whole, named = pooled_shardings({**sequences, **bags}, plan, {*left_out, *left_bags})
        used |= named
        for fqn in collections:
            sharded = whole.get(fqn, {})
            rows = [config for key, config in ours.items() if key[0] == fqn and key[1] not in sharded]
            shardings, named = self._shardings(fqn, rows, plan)
            used |= named
            result[fqn] = EmbeddingModuleShardingPlan({**shardings, **sharded})
        result |= {fqn: EmbeddingModuleShardingPlan(whole[fqn]) for fqn in bags if fqn in whole}
        left = [name for name in (*plan.tables, *plan.pooled) if name not in used]
        if left:
            bag = left[0] in plan.pooled and plan.pooled[left[0]].pooling != "none"
            kind = "EmbeddingBagCollection" if bag else "EmbeddingCollection"
            where = next((f" but {outer or 'it'}" for (_, name), outer in inside.items() if name == left[0]), "")
            if hasattr(nn.ModuleDict, left[0]):
                where = " (TorchRec takes no name of a method of nn.ModuleDict: give the table another)"
            raise PlanError(
                f"the plan has table {left[0]!r}, which no {kind} of the model has{where}; plan for this model"
            )
        planned = {fqn: set(whole[fqn]) for fqn in bags if fqn in whole}
        rest = model_of_the_rest(parts, collections, left_out, planned)
        if rest is not None:
            for fqn, shardings in self._others(rest, sharders, ours).items():
                result.setdefault(fqn, type(shardings)()).update(shardings)
        return warn_of_means(module, ShardingPlan(result), stacklevel=3)

    def _asked(self, name: str, config: BaseEmbeddingConfig) -> TableConstraints | None:
        """What a plan that is made here keeps of a sequence's constraints; None where it could not."""
        assert self._cluster is not None
        host = self._options.get("host_memory") is not None
        given = self._constraints.get(name)
        return sequence_constraints(given, config.embedding_dim, self._cluster.world_size, host_memory=host)

    def _planned_as_asked(self, tables: Mapping[tuple[str, str], EmbeddingConfig]) -> set[tuple[str, str]]:
        """Tables with profiles whose constraints a plan can keep, so that TorchRec shards them under it, or may."""
        return {
            key
            for key, config in tables.items()
            if key_of(*key, self._rankings.profiles) is not None
            and (self._asked(key[1], config) or TableConstraints()).torchrec_types
        }

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
        for number, config in enumerate(configs):
            name = key_of(fqn, config.name, plan.tables)
            if name is None:
                warnings.warn(
                    f"table {config.name!r} of {fqn or 'the model'} has no profile in the plan; it is split row-wise"
                    " over all ranks",
                    UserWarning,
                    stacklevel=5,
                )
                table = row_wise_plan(config, plan, number)
            else:
                used.add(name)
                table = plan.tables[name]
                check_table(name, table, config)
            shardings[config.name] = FlexShardParameterSharding(
                sharding_type=FLEX_SHARD,
                compute_kernel="fused",
                ranks=list(range(plan.cluster.world_size)),
                table=table,
                world_size=plan.cluster.world_size,
                ranks_per_node=plan.cluster.ranks_per_node,
                fingerprint=plan.fingerprint,
                index_dedup=table.index_dedup,
            )
        return shardings, used

    def _problem_of(
        self,
        tables: Mapping[tuple[str, str], EmbeddingConfig],
        collections: Mapping[str, EmbeddingCollection],
        kinds: Mapping[Any, Any],
        pooled: Mapping[str, EmbeddingBagCollection],
        left: Collection[tuple[str, str]],
    ) -> Problem:
        """The model's tables that have profiles, under the options that were given."""
        assert self._cluster is not None
        bags = {
            (fqn, config.name): config
            for fqn, part in pooled.items()
            for config in part.embedding_bag_configs()
            if (fqn, config.name) not in left
        }
        whole = [config.name for part in pooled.values() for config in part.embedding_bag_configs()]
        owners = [*(name for _, name in tables), *whole]
        planned, asked = [], {}
        for (fqn, name), config in (*tables.items(), *bags.items()):
            key = key_of(fqn, name, self._rankings.profiles)
            if key is None:
                continue
            is_pooled = (fqn, name) in bags
            module = pooled[fqn].embedding_bags[name] if is_pooled else collections[fqn].embeddings[name]
            sharder = kinds[EmbeddingBagCollection if is_pooled else EmbeddingCollection]
            table = Table(
                f"{fqn}.{name}" if owners.count(name) > 1 else name,
                config.num_embeddings,
                config.embedding_dim,
                self._rankings.profile(key),
                dtype=dtype_of(config),
                optimizer=optimizer_of(name, module.weight, sharder),
                features=tuple(config.feature_names),
                dedup_factor=self._dedup_factors.get(f"{fqn}.{name}", self._dedup_factors.get(name, 1.0)),
                pooling=bags[fqn, name].pooling.value.lower() if is_pooled else "none",
            )
            planned.append(table)
            constraint = table_constraints(self._constraints.get(name)) if is_pooled else self._asked(name, config)
            if constraint is not None and constraint != TableConstraints():
                asked[table.name] = constraint
        if not planned:
            raise PlanError(
                "none of the model's tables that are not left to TorchRec has a profile; profiles were given for"
                f" {', '.join(self._rankings.profiles) or 'none'}"
            )
        options: PlannerOptions = {"reduction": "auto", "translation": "device", **self._options}
        return Problem(planned, self._cluster, **options, constraints=asked)

    def _others(
        self,
        module: nn.Module,
        sharders: Sequence[ModuleSharder[Any]],
        tables: Mapping[tuple[str, str], EmbeddingConfig],
    ) -> dict[str, Any]:
        """Shardings of the rest of the model, within the memory that planned tables leave."""
        assert self._plan is not None
        plan, cluster = self._plan, self._plan.cluster
        unplanned = sum(
            config.num_embeddings * config.embedding_dim * DATA_TYPES[dtype_of(config)].nbytes / cluster.world_size
            for (fqn, name), config in tables.items()
            if key_of(fqn, name, plan.tables) is None
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
            planner = OptimalShardingPlanner(
                topology=Topology(
                    world_size=cluster.world_size,
                    local_world_size=cluster.ranks_per_node,
                    compute_device=device,
                    **memory,
                ),
                batch_size=plan.settings.batch_size,
                constraints=self._constraints or None,
            )
        return dict(planner.plan(module, list(sharders)).plan)

    # -- every rank

    def _with_rankings(self, decided: ShardingPlan) -> ShardingPlan:
        """Each rank reads the rankings of its tables' rows itself: they are too long to send along."""
        result = {}
        for fqn, shardings in decided.plan.items():
            result[fqn] = type(shardings)()
            for name, how in shardings.items():
                result[fqn][name] = self._ranked(fqn, name, how) if isinstance(how, FlexShardParameterSharding) else how
        return ShardingPlan(result)

    def _ranked(self, fqn: str, name: str, how: FlexShardParameterSharding) -> FlexShardParameterSharding:
        assert how.table is not None
        return replace(how, ranked_rows=self._rankings.ranked_rows(fqn, name, how.table, how.world_size))


def _parts_of(module: nn.Module, sharders: Sequence[ModuleSharder[Any]]) -> dict[str, nn.Module]:
    """What sharders take of a model, and collections that need one."""
    return modules_to_shard(module, {EmbeddingCollection, *(sharder.module_type for sharder in sharders)})


def same_on_all_ranks(given: str | None, plan: Plan, group: dist.ProcessGroup) -> None:
    """Check that no rank was given another plan than the one that rank 0 carries out; every rank must call it.

    Raises:
        PlanError: one was.
    """
    mine = plan.fingerprint if dist.get_rank(group) == 0 else given
    fingerprints, different = differing_ranks(mine, group)
    if different:
        raise PlanError(
            f"rank {different[0]} was given plan {fingerprints[different[0]][:12]}, rank 0 carries out"
            f" {plan.fingerprint[:12]} (tables {', '.join(list(plan.tables)[:3])}); give every rank the same file"
        )
