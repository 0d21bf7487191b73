"""``OptimalShardingPlanner``: TorchRec's planner with another search, which says how good its plan is."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.perf_models import NoopPerfModel
from torchrec.distributed.planner.types import (
    Enumerator,
    ParameterConstraints,
    PlanLoader,
    PlannerError,
    PlannerErrorType,
    ShardingOption,
    Stats,
    StorageReservation,
)
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from flexshard._internal import on_first_rank
from flexshard.errors import BudgetError, PlanError
from flexshard.planner.gaps import relative_gap
from flexshard.planner.torchrec.distinct_shards import PricedOption, enumerate_options, priced, priced_in_full
from flexshard.planner.torchrec.known_plan import AsPlaced, Loaded, Only, Timed, reserved
from flexshard.planner.torchrec.means import warn_of_means
from flexshard.planner.torchrec.search_space import menus_of
from flexshard.planner.whole_model.master import Assignment, assign
from flexshard.planner.whole_model.menus import Menus
from flexshard.planner.whole_model.reasons import explain_table

__all__ = ["OptimalShardingPlanner"]

logger = logging.getLogger(__name__)

_AFTERWARDS = 0.3  # time that is needed after the search, relative to that before it


class OptimalShardingPlanner(EmbeddingShardingPlanner):  # type: ignore[misc]  # TorchRec has no types
    """``EmbeddingShardingPlanner`` whose plan is proven to be within a gap of the best there is.

    Options, costs, memory limits, checks, reports and the plan's form are TorchRec's: its enumerator and estimators,
    its storage reservation and topology. What it does not have are proposers, a partitioner and a performance model:
    it looks for the plan whose slowest rank, as ``NoopPerfModel`` rates it, costs least, among all options and ranks at
    once, and for a bound that no plan can be better than.

    Args:
        topology, batch_size, enumerator, storage_reservation, stats, constraints, debug, callbacks, plan_loader: as
            ``EmbeddingShardingPlanner`` takes them.
        timeout_seconds: after which the best plan so far is taken. Where it is not reached, every process and machine
            finds the same plan.
        gap: proven, at which the search stops: 0.01 is at most 1 % above the optimum.
        seed: of the search.

    Raises:
        PlanError: an argument that names another search.
    """

    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        enumerator: Enumerator | None = None,
        storage_reservation: StorageReservation | None = None,
        proposer: None = None,
        partitioner: None = None,
        performance_model: None = None,
        stats: Stats | list[Stats] | None = None,
        constraints: dict[str, ParameterConstraints] | None = None,
        debug: bool = True,
        callbacks: list[Callable[[list[ShardingOption]], list[ShardingOption]]] | None = None,
        timeout_seconds: int | None = 60,
        plan_loader: PlanLoader | None = None,
        *,
        gap: float = 0.01,
        seed: int = 0,
    ) -> None:
        named = {"proposer": proposer, "partitioner": partitioner, "performance_model": performance_model}
        for name, value in named.items():
            if value:
                raise PlanError(
                    f"OptimalShardingPlanner takes no {name}: it searches options and ranks by itself; leave it out, or"
                    " use EmbeddingShardingPlanner"
                )
        if not gap >= 0:
            raise PlanError(f"gap must not be negative, but is {gap}")
        super().__init__(
            topology=topology,
            batch_size=batch_size,
            enumerator=enumerator,
            storage_reservation=storage_reservation,
            stats=stats,
            constraints=constraints,
            debug=debug,
            callbacks=callbacks,
            timeout_seconds=timeout_seconds,
            plan_loader=plan_loader,
        )
        self._enumerator: Enumerator  # TorchRec's
        self._gap, self._seed = gap, seed
        self._solved: tuple[Menus, Assignment] | None = None
        self._rating: float | None = None
        self._lower_bound: float | None = None

    @property
    def rating(self) -> float:
        """Cost of the plan's slowest rank, as ``NoopPerfModel`` rates it (milliseconds, by TorchRec's estimators).

        Raises:
            PlanError: nothing is planned yet, or the plan was loaded.
        """
        return self._figure(self._rating)

    @property
    def lower_bound(self) -> float:
        """No plan of these options within this memory has a smaller rating.

        Raises:
            PlanError: nothing is planned yet, or the plan was loaded.
        """
        return self._figure(self._lower_bound)

    @property
    def gap(self) -> float:
        """By what part of the best rating the plan's can exceed it at most.

        Raises:
            PlanError: nothing is planned yet, or the plan was loaded.
        """
        return relative_gap(self.rating, self.lower_bound)

    @property
    def summary(self) -> str:
        """A line that says how far from optimal the plan can be at most."""
        return (
            f"the slowest rank costs {self.rating:.4g} ms by TorchRec's estimators; no plan costs less than"
            f" {self.lower_bound:.4g} ms, so this one is at most {100 * self.gap:.2f} % above the optimum"
        )

    def explain(self, table: str) -> str:
        """Why a table is where it is: its option, what its bytes are worth, the next best options; on rank 0.

        Args:
            table: with its module's full name, such as "sparse.ebc.ads"; its own name where one module has it.

        Raises:
            PlanError: nothing is planned here yet, or there is no such table.
        """
        if self._solved is None:
            raise PlanError("no model was planned in this process yet; call plan, or ask rank 0")
        menus, found = self._solved
        named = [name for name in menus.tables if name == table or name.rpartition(".")[2] == table]
        if len(named) != 1:
            some = "no table" if not named else f"{len(named)} tables"
            raise PlanError(f"there is {some} {table!r} in the plan; its tables are {', '.join(menus.tables)}")
        return explain_table(menus, found, named[0], "ms")

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """Plan a model.

        Raises:
            PlannerError: no plan fits, with the tables and bytes that stand in the way; or as TorchRec's planner.
            PlanError: columns of a table in a key-value store are among the options.
        """
        started = time.perf_counter()
        self._rating = self._lower_bound = self._solved = None
        self._num_proposals = self._num_plans = 0
        loader = self.plan_loader
        if loader is not None and (loaded := loader.load()):
            plan = self._as_torchrec(module, sharders, plan_loader=Loaded(loader, loaded))
            return warn_of_means(module, plan, stacklevel=2)
        topology = self._storage_reservation.reserve(
            topology=self._topology,
            batch_size=self._batch_size,
            module=module,
            sharders=sharders,
            constraints=self._constraints,
        )
        options = enumerate_options(self._enumerator, module, sharders)
        if not options:
            return ShardingPlan({})
        if loader is not None:
            self._loader_plan_validation(self.hash_planner_context_inputs_str(), loader.plan_context_hash())
        # What is left after options were priced; the chosen ones are priced again, and reported on.
        used = (1 + _AFTERWARDS) * (time.perf_counter() - started)
        seconds = max(self._timeout_seconds - used, 0.0) if self._timeout_seconds else np.inf
        found = self._solve(options, topology, seconds)
        chosen = self._chosen(options, found)
        if chosen is None:  # estimators that look at an option's shards together: they are asked for everything
            options = enumerate_options(self._enumerator, module, sharders, whole=True)
            found = self._solve(options, topology, seconds)
            chosen = self._chosen(options, found)
            if chosen is None:
                raise PlanError("the enumerator's estimators price the same options otherwise when asked again")
        self._rating = float(NoopPerfModel(self._topology).rate(chosen))
        only = copy.copy(self._enumerator)
        vars(only)["enumerate"] = lambda module, sharders: chosen  # noqa: ARG005 - called by name
        plan = self._as_torchrec(
            module,
            sharders,
            plan_loader=None,
            _enumerator=only,
            _stats=[Timed(each, time.perf_counter() - started, self._enumerator) for each in self._stats],
            _storage_reservation=reserved(self._storage_reservation, topology),
            _proposers=[Only(chosen)],
            _partitioner=AsPlaced(),
        )
        if self._callbacks:  # which may have changed it
            self._rating = float(NoopPerfModel(self._topology).rate(self._best_plan))
        self._lower_bound = min(found.lower_bound, self._rating)
        logger.info(self.summary)
        return warn_of_means(module, plan, stacklevel=2)

    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """Rank 0's plan, and how good it is, on every rank; every rank must call it.

        Raises:
            PlannerError: as :meth:`plan`, on every rank.
        """
        if pg is None and not dist.is_initialized():
            return cast("ShardingPlan", super().collective_plan(module, sharders, pg))  # which says what to do
        kinds = get_default_sharders() if sharders is None else sharders

        def planned() -> tuple[ShardingPlan, float | None, float | None]:
            return self.plan(module, kinds), self._rating, self._lower_bound

        plan, self._rating, self._lower_bound = on_first_rank(planned, PlannerError, pg)
        return plan

    def _figure(self, value: float | None) -> float:
        if value is None:
            raise PlanError("no model was planned yet; call plan or collective_plan (a loaded plan is not rated)")
        return value

    def _solve(self, options: Sequence[PricedOption], reserved: Topology, seconds: float) -> Assignment:
        """An option and ranks for every table.

        Raises:
            PlannerError: nothing fits.
        """
        menus = menus_of(options, reserved)
        try:
            found = assign(menus, seconds=seconds, gap=self._gap, seed=self._seed)
        except BudgetError as error:
            kind = PlannerErrorType.INSUFFICIENT_STORAGE if error.by_sums else PlannerErrorType.STRICT_CONSTRAINTS
            raise PlannerError(f"no sharding plan fits: {error}", kind) from error
        self._solved = (menus, found)
        return found

    def _chosen(self, options: Sequence[PricedOption], found: Assignment) -> list[ShardingOption] | None:
        """The chosen options with ranks, priced in full; None where that gives other costs than were planned with."""
        chosen = [options[source] for source in found.choice]
        full = priced_in_full(self._enumerator, [each.option for each in chosen])
        for assumed, option, ranks in zip(chosen, full, found.ranks, strict=True):
            actual = priced(option)
            if not np.array_equal(actual.perf, assumed.perf) or not np.array_equal(actual.storage, assumed.storage):
                return None
            for shard, rank in zip(option.shards, ranks, strict=True):
                shard.rank = rank
        return full

    def _as_torchrec(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]], **attributes: Any
    ) -> ShardingPlan:
        """TorchRec's planner with other parts for once: its checks, callbacks and reports of a plan that is known."""
        before = {name: vars(self)[name] for name in attributes}
        for name, value in attributes.items():
            setattr(self, name, value)
        try:
            return cast("ShardingPlan", super().plan(module, sharders))
        finally:
            for name, value in before.items():
                setattr(self, name, value)
