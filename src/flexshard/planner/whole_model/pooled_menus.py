"""Tables that TorchRec shards under our costs as menus of the master problem, with what is asked of them."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from flexshard._internal import plain_sum
from flexshard.costmodels import POOLED_LOADS, POOLED_TYPES, SHARED_CALLS, PooledCosts, PooledOption
from flexshard.errors import JobError
from flexshard.planner.constraints import TableConstraints
from flexshard.planner.solver.instance import memory_limit
from flexshard.planner.whole_model.menus import HBM, Menus, Option, Spread
from flexshard.planner.whole_model.watching import watching
from flexshard.tables import Table

__all__ = ["HBM", "HOST", "Choice", "PooledMenus", "pooled_menus", "table_options"]

FloatArray = npt.NDArray[np.float64]
Choice = tuple[PooledOption, tuple[int, ...]]  # an option, and the rank of each shard

_SPREADS = {
    "data_parallel": Spread.EVERY_RANK,
    "row_wise": Spread.EVERY_RANK,
    "table_row_wise": Spread.HOST_BLOCKS,
    "grid_shard": Spread.HOST_BLOCKS,
    "table_column_wise": Spread.ONE_HOST,
    "table_wise": Spread.ANY_RANK,
    "column_wise": Spread.ANY_RANK,
}
_ASKED = ("sharding_types", "compute_kernels", "min_partition", "cache_load_factors", "dtypes", "forbid")
HOST, LOSS = "host memory", "loss"
_ALL_LOSS = 1 + 1e-9  # of shares that may add up to 1, as float64


@dataclass(frozen=True, eq=False)
class PooledMenus:
    """Menus, and what their options stand for.

    Attributes:
        costs: of the cluster.
        tables: in the problem's order.
        options: those that each table may have, as pins and company leave them.
        menus: of the tables, those that are sharded alike as one.
        members: of each menu, the tables in it.
        meant: of each menu by ``Option.source``, an option for each member.
        pinned: of each menu, ranks of its shards where they are given.
    """

    costs: PooledCosts
    tables: tuple[Table, ...]
    options: tuple[tuple[PooledOption, ...], ...]
    menus: Menus
    members: tuple[tuple[int, ...], ...]
    meant: tuple[tuple[tuple[PooledOption, ...], ...], ...]
    pinned: tuple[tuple[int, ...], ...]

    @property
    def received_bytes(self) -> float:
        """Of sums that every rank has of its own samples."""
        return plain_sum(self.costs.received_bytes(table) for table in self.tables)

    def chosen(self, choice: Sequence[int], ranks: Sequence[Sequence[int]]) -> list[Choice]:
        """Options and ranks of all tables, in their order, from those of the menus."""
        found: dict[int, Choice] = {}
        for menu, (source, where) in enumerate(zip(choice, ranks, strict=True)):
            for table, option in zip(self.members[menu], self.meant[menu][source], strict=True):
                found[table] = (option, tuple(where) if option.is_tensor_train else self.pinned[menu] or tuple(where))
        return [found[table] for table in range(len(self.tables))]


def pooled_menus(
    tables: Sequence[Table],
    costs: PooledCosts,
    constraints: Mapping[str, TableConstraints],
    offered: Mapping[str, Sequence[PooledOption]],
    *,
    hbm_bytes: float,
    host_bytes: float | None,
    loss_limit: float | None = None,
) -> PooledMenus:
    """Menus of tables that TorchRec shards.

    Args:
        tables: them.
        costs: of the cluster.
        constraints: by table.
        offered: of each table all options that constraints leave it; see :func:`table_options`. Tensor trains last, of
            which the constraints on company and ranks are not.
        hbm_bytes: that they may take of a rank's memory in all.
        host_bytes: of host memory per rank; None where there is none.
        loss_limit: of all options chosen together; None for any.

    Raises:
        JobError: constraints leave a table no option.
    """
    asked = [constraints.get(table.name, TableConstraints()) for table in tables]
    options = [list(offered[table.name]) for table in tables]
    positions = {table.name: index for index, table in enumerate(tables)}
    groups = _groups(asked, positions)
    apart = sorted({tuple(sorted((index, positions[other]))) for index, one in enumerate(asked) for other in one.apart})
    for one, other in apart:
        if any(one in group and other in group for group in groups):
            raise JobError(
                f"tables {tables[one].name!r} and {tables[other].name!r} are to be apart and with one another"
            )
    menus, meant, pinned, world = [], [], [], costs.cluster.world_size
    for group in groups:
        alike = _alike([options[index] for index in group])
        pins = list(dict.fromkeys(asked[index].pin for index in group if asked[index].pin))
        names = " and ".join(repr(tables[index].name) for index in group)
        if not alike:
            raise JobError(f"tables {names} are to be with one another, and have no way of sharding in common")
        if len(pins) > 1:
            raise JobError(f"tables {names} are to be with one another, and are pinned to other ranks each")
        kept = [each for each in alike if not pins or each[0].is_tensor_train or _can_be_at(each[0], pins[0], costs)]
        if not kept:
            raise JobError(
                f"table {names}: pin {list(pins[0])} leaves no option; shards of those there are cannot lie so:"
                f" {', '.join(f'{each[0].name} has {each[0].shards}' for each in alike)}"
            )
        meant.append(tuple(kept))
        beside = any(index in pair for pair in apart for index in group)  # others, with which it shares no rank
        for place, index in enumerate(group):
            own = dict.fromkeys(each[place] for each in kept)
            everywhere = {one for one in own if beside and one.shards == world and not one.is_tensor_train}
            options[index] = [one for one in own if one not in everywhere]
        pinned.append(tuple(pins[0]) if pins else ())
        marks = np.array([[len({one, other} & set(group)) for one, other in apart]], np.float64).T
        menus.append(
            tuple(_menu_option(costs, each, pinned[-1], marks, number, loss_limit) for number, each in enumerate(kept))
        )
    received = plain_sum(costs.received_bytes(table) for table in tables)
    left = memory_limit(hbm_bytes) - received
    room = [left, 0.0 if host_bytes is None else host_bytes, *[1.0] * len(apart)]
    # As if memory of its own kind, of which an option takes as much from every rank: all ranks have the same of it.
    room += [] if loss_limit is None else [_ALL_LOSS]
    capacity = np.repeat(np.array(room)[:, None], world, axis=1)
    whole = Menus(
        tables=tuple(" + ".join(tables[index].name for index in group) for group in groups),
        options=tuple(menus),
        capacity=np.maximum(capacity, 0.0),
        kinds=(
            *(HBM, HOST),
            *(f"{tables[a].name} apart from {tables[b].name}" for a, b in apart),
            *(() if loss_limit is None else (LOSS,)),
        ),
        ranks_per_host=costs.cluster.ranks_per_node,
        loads=POOLED_LOADS,
        sharing=tuple(costs.sharing(load) for load in POOLED_LOADS),
        charges=tuple(costs.latency(one) for one in SHARED_CALLS),
        received=(received, max(-left, 0.0)),
    )
    return PooledMenus(
        costs,
        tuple(tables),
        tuple(map(tuple, options)),
        watching(_needed(whole, host=host_bytes is not None)),
        tuple(groups),
        tuple(meant),
        tuple(pinned),
    )


def table_options(table: Table, costs: PooledCosts, asked: TableConstraints, *, host: bool) -> list[PooledOption]:
    """What a table may be by itself where TorchRec shards it; ``host`` is whether there is host memory.

    Raises:
        JobError: constraints leave nothing.
    """

    def under(asked: TableConstraints) -> list[PooledOption]:
        found = [
            option
            for dtype in dict.fromkeys(asked.dtypes or (table.dtype,))
            for option in costs.options(
                replace(table, dtype=dtype),
                sharding_types=POOLED_TYPES if asked.sharding_types is None else asked.torchrec_types,
                compute_kernels=asked.kernels(host_memory=host),
                min_partition=asked.min_partition,
                cache_load_factors=asked.cache_load_factors,
            )
        ]
        allowed = [one for one in found if not asked.forbids(one.sharding_type, one.compute_kernel)]
        # On CPUs, FBGEMM 1.8 crashes at times where a rank has no rows of a table that is cut by rows.
        return [one for one in allowed if one.cuts[:, 0].all()] or allowed

    default = TableConstraints()
    given = [name for name in _ASKED if getattr(asked, name) != getattr(default, name)]
    found = under(asked)
    if not found:
        without = [name for name in given if under(replace(asked, **{name: getattr(default, name)}))]
        named = " and ".join(without or given)
        raise JobError(
            f"table {table.name!r}: {named} leave{'s' if len(without or given) == 1 else ''} no way of sharding its"
            f" {table.rows:,} rows of {table.dim} on {costs.cluster.world_size} ranks; allow others"
        )
    # Of tables without pooling, types decide that their rows are not in tiers.
    for name in given if table.is_pooled else [name for name in given if name != "sharding_types"]:
        other = under(replace(asked, **{name: getattr(default, name)}))
        if len(other) == len(found) and all(_same(*each) for each in zip(other, found, strict=True)):
            warnings.warn(f"table {table.name!r}: constraint {name} decides nothing", UserWarning, stacklevel=2)
    return found


def _same(one: PooledOption, other: PooledOption) -> bool:
    return _key(one) == _key(other) and np.array_equal(one.cuts[:, :2], other.cuts[:, :2])


def _key(option: PooledOption) -> tuple[str, str]:
    """Of a table's options with as many shards, what tells one from another."""
    return option.name, option.dtype


def _groups(asked: Sequence[TableConstraints], positions: Mapping[str, int]) -> list[tuple[int, ...]]:
    """Tables that are to be sharded alike, in order of their first one."""
    group = list(range(len(asked)))
    for index, one in enumerate(asked):
        for other in one.with_tables:
            old, new = sorted((group[index], group[positions[other]]), reverse=True)
            group = [new if each == old else each for each in group]
    return [tuple(i for i, each in enumerate(group) if each == first) for first in dict.fromkeys(group)]


def _alike(menus: Sequence[Sequence[PooledOption]]) -> list[tuple[PooledOption, ...]]:
    """Options that all of the tables have, with as many shards; each table in any of its data types."""
    by_name: list[dict[tuple[str, int], list[PooledOption]]] = []
    for menu in menus:
        by_name.append({})
        for one in menu:
            by_name[-1].setdefault((one.name, one.shards), []).append(one)
    first, *others = by_name
    shared = [key for key in first if all(key in other for other in others)]
    return [each for key in shared for each in itertools.product(*(menu[key] for menu in by_name))]


def _lost(option: PooledOption, limit: float) -> float:
    """Share of what may be lost in all."""
    return option.loss / limit if limit else 2.0 * (option.loss > 0)


def _can_be_at(option: PooledOption, pin: Sequence[int], costs: PooledCosts) -> bool:
    """Whether an option's shards may lie on these ranks."""
    spread, per_host = _SPREADS[option.sharding_type], costs.cluster.ranks_per_node
    if len(pin) != option.shards:
        return False
    if spread is Spread.EVERY_RANK:
        return list(pin) == list(range(costs.cluster.world_size))
    if spread is Spread.ONE_HOST:
        return len({rank // per_host for rank in pin}) == 1
    if spread is Spread.HOST_BLOCKS:
        blocks = np.array(pin).reshape(-1, per_host)
        return bool((blocks == blocks[:, :1] // per_host * per_host + np.arange(per_host)).all())
    return True


def _menu_option(
    costs: PooledCosts,
    members: Sequence[PooledOption],
    pin: Sequence[int],
    marks: FloatArray,
    source: int,
    loss_limit: float | None,
) -> Option:
    """Tables sharded alike as one option; ``marks``, of shape (pairs, 1), keep it apart from others."""
    first = members[0]
    perf = np.sum([costs.seconds(one) for one in members], axis=0)
    held = np.sum([[one.static_bytes + one.dynamic_bytes, one.host_bytes] for one in members], axis=0)
    lost = np.zeros((0, first.shards)) if loss_limit is None else np.full((1, first.shards), _lost(first, loss_limit))
    if first.is_tensor_train:  # which constraints do not look at
        marks, pin = np.zeros_like(marks), ()
    memory = np.concatenate([held, np.repeat(marks, first.shards, axis=1), lost])
    spread = _SPREADS[first.sharding_type]
    if pin:  # as shards of every rank, most of which are nothing
        world = costs.cluster.world_size
        perf, memory = (np.array([np.bincount(pin, row, world) for row in each]) for each in (perf, memory))
        spread = Spread.EVERY_RANK
    return Option(first.name, spread, perf, memory, source, SHARED_CALLS.index(first.shared_calls))


def _needed(menus: Menus, *, host: bool) -> Menus:
    """Without the kinds of load that no option has, and without host memory where there is none. What every option has
    on all ranks alike is of the first kind, whose busiest rank any is.
    """
    of_options = [[one.perf.any(axis=1), _differs(one)] for _, one in menus.pairs()]
    found = np.any(of_options or np.zeros((1, 2, len(menus.loads))), axis=0)
    first = np.arange(len(menus.loads)) == 0
    alike, loads = first | (found[0] & ~found[1]), np.flatnonzero(first | found[1]).tolist()

    def kept(option: Option) -> Option:
        perf = option.perf[loads]
        perf[0] = option.perf[alike].sum(axis=0)
        return replace(option, perf=perf)

    options = tuple(tuple(map(kept, menu)) for menu in menus.options)
    names, sharing = tuple(menus.loads[load] for load in loads), tuple(menus.sharing[load] for load in loads)
    menus = replace(menus, options=options, loads=names, sharing=sharing)
    return menus.with_kinds([kind for kind, name in enumerate(menus.kinds) if host or name != HOST])


def _differs(option: Option) -> npt.NDArray[np.bool_]:
    """Of which kinds of load ranks may have more of an option than others; shape (loads,)."""
    if option.spread is Spread.EVERY_RANK:
        return np.asarray(np.ptp(option.perf, axis=1) > 0)
    return np.asarray(option.perf.any(axis=1))
