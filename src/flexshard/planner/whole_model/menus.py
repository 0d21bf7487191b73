"""What a whole-model plan chooses from: per table a menu of options, whose shards have costs and bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
import numpy.typing as npt

__all__ = ["HBM", "Menus", "Option", "Spread", "Watched", "undominated"]

FloatArray = npt.NDArray[np.float64]

HBM = "HBM"  # the kind of memory that is a rank's own


class Spread(IntEnum):
    """Where an option's shards may lie (what TorchRec calls ``partition_by``).

    Attributes:
        EVERY_RANK: shard i on rank i ("uniform": row-wise, data-parallel).
        HOST_BLOCKS: blocks of as many shards as a host has ranks, shard i of a block on local rank i of its host;
            no host has two before every host has one (table-row-wise: one block; grid).
        ONE_HOST: on any ranks of one host (table-column-wise).
        ANY_RANK: anywhere (table-wise, column-wise).
    """

    EVERY_RANK = 0
    HOST_BLOCKS = 1
    ONE_HOST = 2
    ANY_RANK = 3


@dataclass(frozen=True)
class Option:
    """One way of sharding a table.

    Attributes:
        name: for people, such as "row_wise/fused".
        spread: where its shards may lie.
        perf: cost of each shard, by kind of load, in the unit of the costs at hand; shape (loads, shards), or (shards,)
            where there is one.
        memory: bytes of each shard, by kind of memory; shape (kinds, shards).
        source: position in the list that the menu was made of.
        charge: which of ``Menus.charges`` is paid where it is used; -1 for none.
    """

    name: str
    spread: Spread
    perf: FloatArray
    memory: FloatArray
    source: int = 0
    charge: int = -1

    def __post_init__(self) -> None:
        object.__setattr__(self, "perf", np.atleast_2d(self.perf))

    @property
    def shards(self) -> int:
        """How many."""
        return int(self.perf.shape[1])


@dataclass(frozen=True, eq=False)
class Watched:
    """Averages of ranks that bound a kind of load from below.

    Attributes:
        loads: which kind each bounds; shape (n,).
        weights: of each rank in it, which add up to 1; shape (n, ranks).
    """

    loads: npt.NDArray[np.int64]
    weights: FloatArray

    def of(self, option: Option, ranks_per_host: int) -> FloatArray:
        """What an option brings each average at least, wherever its shards lie; shape (n,)."""
        perf, weights = option.perf[self.loads], self.weights
        if option.spread is Spread.EVERY_RANK:
            return np.asarray((perf * weights).sum(axis=1))
        if option.spread is Spread.HOST_BLOCKS and weights.shape[1] % ranks_per_host == 0:
            shape = (len(perf), -1, ranks_per_host)
            return np.asarray((perf.reshape(shape).sum(axis=1) * weights.reshape(shape).min(axis=1)).sum(axis=1))
        return np.asarray(perf.sum(axis=1) * weights.min(axis=1))


@dataclass(frozen=True)
class Menus:
    """The options of every table, and the ranks to lay them on.

    A plan's rating is, of each kind of load, that of the rank (or of the ranks that share it) that has most, added up;
    and each charge that any option chosen has, once.

    Attributes:
        tables: names.
        options: of each table.
        capacity: bytes of each rank, by kind of memory; shape (kinds, ranks).
        kinds: names of the kinds of memory.
        ranks_per_host: consecutive ranks that make a host.
        together: groups of tables (by position) that must share one host; they have options that lie on one alone.
        loads: names of the kinds of load: what ranks wait for one another after.
        sharing: of each kind of load, how many consecutive ranks of a host carry it together, such as over one link:
            each has the mean of them; 1 by default.
        charges: what is paid once for all options that have it, such as the latency of calls.
        received: bytes of HBM that every rank has besides, whatever the plan, which ``capacity`` is without; and by how
            many that alone is too much.
        watched: averages that programs with ranks added up bound loads by, besides those of all ranks alike.
        averages: of each kind of load in turn, the one that prices bound it by; of all ranks alike by default.
        alone: of each kind of load and table, by how much what the table's heaviest shard has of it bounds it besides,
            which makes 1 with the weights of the average; and of each charge, what part of it each table pays that has
            it, 1 in all. Shape (loads + charges, tables), or (loads, tables); of the first tables, others have none.
    """

    tables: tuple[str, ...]
    options: tuple[tuple[Option, ...], ...]
    capacity: FloatArray
    kinds: tuple[str, ...]
    ranks_per_host: int
    together: tuple[tuple[int, ...], ...] = ()
    loads: tuple[str, ...] = ("cost",)
    charges: tuple[float, ...] = ()
    sharing: tuple[int, ...] = ()
    received: tuple[float, float] = (0.0, 0.0)
    watched: Watched | None = None
    averages: Watched | None = None
    alone: FloatArray | None = None

    def __post_init__(self) -> None:
        if not self.sharing:
            object.__setattr__(self, "sharing", (1,) * len(self.loads))

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return int(self.capacity.shape[1])

    @property
    def hosts(self) -> int:
        """Whole hosts."""
        return self.ranks // self.ranks_per_host

    def added_up(self, table: int, option: Option) -> float:
        """What an option of a table costs all ranks, of all kinds of load, as prices bound them."""
        if self.averages is None:
            return float(option.perf.sum())
        found = float(self.averages.of(option, self.ranks_per_host).sum())
        if self.alone is not None and table < self.alone.shape[1]:
            loads, paid = np.split(self.alone[:, table], [len(self.loads)])
            found += float(self.heaviest(option) @ loads)
            found += self.charge(option) * float(paid[option.charge]) if option.charge >= 0 and paid.size else 0.0
        return self.ranks * found

    def pairs(self) -> Iterator[tuple[int, Option]]:
        """(table, option) of all menus, in order."""
        for table, options in enumerate(self.options):
            for option in options:
                yield table, option

    def dearest(self, option: Option) -> float:
        """What a plan with this option costs at least."""
        return float(self.heaviest(option).sum()) + self.charge(option)

    def heaviest(self, option: Option) -> FloatArray:
        """Of each kind of load what an option brings some rank at least; shape (loads,)."""
        found: FloatArray = option.perf.max(axis=1, initial=0.0)
        for load, together in enumerate(self.sharing):
            if together > 1:
                found[load] /= together
                # Shards that lie side by side in any case.
                if option.spread in (Spread.EVERY_RANK, Spread.HOST_BLOCKS) and option.shards % together == 0:
                    found[load] = option.perf[load].reshape(-1, together).mean(axis=1).max()
        return found

    def charge(self, option: Option) -> float:
        """What is paid once for all options like this one."""
        return self.charges[option.charge] if option.charge >= 0 else 0.0

    def alike(self, name: str, kind: int, seconds: float, nbytes: float = 0.0, source: int = 0) -> Option:
        """An option of which every rank has the same, of one kind of memory; which kind of load it is does not matter
        then.
        """
        perf, memory = np.zeros((len(self.loads), self.ranks)), np.zeros((len(self.kinds), self.ranks))
        perf[0] = seconds
        if nbytes:
            memory[kind] = nbytes
        return Option(name, Spread.EVERY_RANK, perf, memory, source)

    def with_kinds(self, kinds: Sequence[int]) -> Menus:
        """With some of the kinds of memory alone."""
        options = [tuple(replace(one, memory=one.memory[kinds]) for one in menu) for menu in self.options]
        names = tuple(self.kinds[kind] for kind in kinds)
        return replace(self, options=tuple(options), capacity=self.capacity[kinds], kinds=names)

    def with_options(self, options: Sequence[tuple[Option, ...]]) -> Menus:
        """The same tables with other options."""
        return replace(self, options=tuple(options))


def undominated(menus: Menus, *, with_kinds: Collection[str] = ()) -> Menus:
    """Without the options that cannot be placed, those that another one of the table beats shard by shard, and the
    kinds of memory that cannot be exceeded, unless they are among those that stay in any case.

    An option is beaten by one with as many shards, none of which costs or weighs more, and which may lie where this one
    may. On a single host a block is a shard for every rank, and one host is any rank.
    """
    single = menus.ranks == menus.ranks_per_host  # ranks that are left over are of no host
    grouped = set() if single else {table for group in menus.together for table in group}
    room = menus.capacity.max(axis=1, initial=0.0)
    kept = []
    for table, menu in enumerate(menus.options):
        usable = [
            _spread_out(option, single, menus.ranks)
            for option in menu
            if _fits(option, menus, room) and (table not in grouped or _on_one_host(option, menus))
        ]
        kept.append(tuple(option for i, option in enumerate(usable) if not _beaten(i, usable)))
    return _binding(replace(menus, options=tuple(kept), together=() if single else menus.together), with_kinds)


def _binding(menus: Menus, others: Collection[str]) -> Menus:
    """Without the kinds of memory that no rank could run out of if it held everything, but with the others."""
    most = np.zeros(len(menus.kinds))
    for menu in menus.options:
        most += np.max([option.memory.sum(axis=1) for option in menu], axis=0, initial=0.0)
    binding = most > menus.capacity.min(axis=1, initial=np.inf)
    return menus.with_kinds([kind for kind, name in enumerate(menus.kinds) if binding[kind] or name in others])


def _spread_out(option: Option, single_host: bool, ranks: int) -> Option:
    if single_host and option.spread is Spread.ONE_HOST:
        return replace(option, spread=Spread.ANY_RANK)
    if single_host and option.spread is Spread.HOST_BLOCKS and option.shards == ranks:
        return replace(option, spread=Spread.EVERY_RANK)
    return option


def _fits(option: Option, menus: Menus, room: FloatArray) -> bool:
    """Whether there is a place for each of the shards by itself."""
    shards = option.shards
    if not shards:
        return False
    if option.spread is Spread.EVERY_RANK:
        return shards == menus.ranks and bool((option.memory <= menus.capacity).all())
    if option.spread is Spread.HOST_BLOCKS and (menus.hosts == 0 or shards % menus.ranks_per_host):
        return False
    if option.spread is Spread.ONE_HOST and menus.hosts == 0:
        return False
    return bool((option.memory.max(axis=1, initial=0.0) <= room).all())


def _on_one_host(option: Option, menus: Menus) -> bool:
    """Whether an option of a table that must share a host with others lies on one."""
    return option.spread is Spread.ONE_HOST or (
        option.spread is Spread.HOST_BLOCKS and option.shards == menus.ranks_per_host
    )


def _beaten(index: int, menu: Sequence[Option]) -> bool:
    this = menu[index]
    for other_index, other in enumerate(menu):
        if other_index == index or other.shards != this.shards or other.charge not in (-1, this.charge):
            continue
        freer = other.spread is Spread.ANY_RANK and this.spread is Spread.ONE_HOST
        if not freer and other.spread is not this.spread:
            continue
        if (other.perf > this.perf).any() or (other.memory > this.memory).any():
            continue
        # Of equals the first stays.
        same = not freer and other.charge == this.charge
        equal = same and (other.perf == this.perf).all() and (other.memory == this.memory).all()
        if not equal or other_index < index:
            return True
    return False
