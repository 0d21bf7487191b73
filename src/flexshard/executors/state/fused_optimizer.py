"""The optimizer of planned tables as TorchRec's loops and checkpoints see it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrec.optim.fused import FusedOptimizer

from flexshard.errors import TableError
from flexshard.executors.sharding.sharded_tables import ShardedTables
from flexshard.executors.state.logical import LogicalTables

__all__ = ["FlexShardFusedOptimizer"]

_OTHER_PARAMETERS = ("eps", "beta1", "beta2", "weight_decay", "lower_bound")  # that FBGEMM takes on the way


class _LogicalState:
    """A state in a checkpoint: gathered when it is saved, split when it is loaded."""

    def __init__(self, logical: LogicalTables, table: int, name: str, *, first: bool) -> None:
        self._logical, self._table, self._name, self._first = logical, table, name, first

    def state_dict(self) -> Any:
        if self._first:
            self._logical.wait_for_all("the optimizer's state_dict()")
        return self._logical.hand_out(self._table, self._name)

    def load_state_dict(self, value: Any) -> None:
        self._logical.take(self._table, self._name, value)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a table under a FlexShard plan has no {name} of a state here; its values are in the optimizer's"
            " state_dict()['state']"
        )


class FlexShardFusedOptimizer(FusedOptimizer):
    """Updates happen during backward; ``step`` and ``zero_grad`` only pass changed learning rates on, which rows that
    are looked up from then on are updated at, as TorchRec's do.

    Its parameters are this rank's rows. ``state_dict`` holds every state by table and original id; it is a collective
    operation, as loading is.
    """

    def __init__(self, logical: LogicalTables) -> None:
        self._logical = logical
        params: dict[str, Any] = {}
        state: dict[Any, Any] = {}
        param_groups = []
        first = True
        for group in logical.tables.groups:
            keys = []
            for table in group.tables:
                name = logical.tables.names[table]
                # TorchRec's need no gradient either: what fills gradients in, such as init_state, leaves them out.
                key = logical.tables.parameter(table).detach()
                params[logical.parameter_name(name)] = key
                keys.append(key)
                state[key] = {}
                for one in group.traits.spec.state_names:
                    state[key][f"{name}.{one}"] = _LogicalState(logical, table, one, first=first)
                    first = False
                if group.traits.spec.optimizer.counts_steps:
                    state[key][f"{name}.step"] = logical.tables.steps
            param_groups.append({"params": keys, "lr": group.traits.spec.learning_rate})
        super().__init__(params, state, param_groups)

    @property
    def tables(self) -> ShardedTables:
        """Whose rows they are."""
        return self._logical.tables

    @property
    def kinds(self) -> dict[str, str]:
        """Names of the optimizers, by those of their parameters."""
        groups = self.tables.groups
        return {
            self._logical.parameter_name(self.tables.names[table]): group.traits.spec.name
            for group in groups
            for table in group.tables
        }

    def reset_rows(self) -> None:
        """The tables have another layout: let the parameters be their rows there."""
        for table, name in enumerate(self.tables.names):
            self.params[self._logical.parameter_name(name)].data = self.tables.parameter(table).detach()

    def step(self, closure: Any = None) -> None:  # noqa: ARG002 - the base class names it
        """Pass the learning rates of ``param_groups`` on."""
        for group, options in zip(self.tables.groups, self.param_groups, strict=True):
            group.store.set_learning_rate(float(options["lr"]))

    def update_hyper_parameters(self, params_dict: Mapping[str, Any]) -> None:
        """Set learning rates, until ``step`` or ``zero_grad`` pass those of ``param_groups`` on, as TorchRec's does.

        Raises:
            TableError: for the other hyper-parameters that FBGEMM changes.
            NotImplementedError: for those that it has none of either.
        """
        for name in params_dict:
            if name in _OTHER_PARAMETERS:
                raise TableError(
                    f"{name} of tables under a FlexShard plan cannot change while they train; give it in fused_params,"
                    " and go on from a checkpoint with another"
                )
            if name != "lr":
                raise NotImplementedError(f"Setting hyper-parameter {name} is not supported")
        if "lr" in params_dict:
            for group in self.tables.groups:
                group.store.set_learning_rate(float(params_dict["lr"]))

    def set_optimizer_step(self, step: int) -> None:
        """Let so many steps have been trained, as optimizers count them that correct for it."""
        self.tables.steps[0] = step

    def zero_grad(self, set_to_none: bool = False) -> None:  # noqa: ARG002 - the base class names it
        """Nothing: gradients do not outlive backward; but learning rates that a scheduler has set count from here."""
        self.step()
