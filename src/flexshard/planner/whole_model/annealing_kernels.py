"""Compiled loops of annealing; in Python, and some hundred times as slowly, where numba is not installed.

Arrays are those of ``annealing.Flat`` and ``annealing.State``. ``fill`` is what ranks hold, each kind of load first and
then each kind of memory, ``limit`` what they may hold, both of shape (loads + kinds, ranks); ``per_unit`` is what a
unit beyond the limit counts. What ``sharing`` consecutive ranks share counts at one place for all of them. Random
numbers are Park and Miller's, whose state is one number below 2^31: the same compiled and not.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flexshard.planner.whole_model.compiled import compiled, copy_into
from flexshard.planner.whole_model.laying_kernels import Account, add, draw, lay, look_again, place_of, take_back

__all__ = ["anneal_moves"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
_EXACTLY = 1_000  # moves, after which what was added up is added up anew
_NOTHING = 1e-9  # beyond limits, relative, that may be what adding up leaves
_RATING = 3.0  # weight of the rating beyond the one asked for beside ranks' loads, both relative


@compiled
def _excess(fill: FloatArray, limit: FloatArray, per_unit: FloatArray, sharing: IntArray, rank: int) -> float:
    """How far a rank is beyond its limits."""
    total = 0.0
    for kind in range(fill.shape[0]):
        place = place_of(rank, sharing[kind])
        over = fill[kind, place] - limit[kind, place]
        if over > 0:
            total += over * per_unit[kind]
    return total


@compiled
def _energy(fill: FloatArray, limit: FloatArray, per_unit: FloatArray) -> float:
    """How far all ranks are beyond their limits."""
    total = 0.0
    for kind in range(fill.shape[0]):
        for place in range(fill.shape[1]):
            over = fill[kind, place] - limit[kind, place]
            if over > 0:
                total += over * per_unit[kind]
    return total


@compiled
def _within_memory(fill: FloatArray, limit: FloatArray, loads: int) -> bool:
    """Whether no rank holds more than its memory."""
    for kind in range(loads, fill.shape[0]):
        for rank in range(fill.shape[1]):
            if fill[kind, rank] > limit[kind, rank]:
                return False
    return True


@compiled
def _badness(excess: float, slowest: float, asked: float, one: bool) -> float:
    """How far a state is from what is asked for; where there are several kinds of load, by how much its rating is, too,
    which ranks beyond their limits alone do not tell.
    """
    return excess if one else excess + _RATING * max(slowest - asked, 0.0) / asked


@compiled
def _ask_for(
    tops: FloatArray, limit: FloatArray, per_unit: FloatArray, paid: float, found: float, target: float
) -> None:
    """Limit loads to what they are in the plan found, less what it is to improve by."""
    left = target - paid
    for load in range(tops.shape[0] - 1, -1, -1):
        share = tops[load] * (target - paid) / (found - paid) if load and found > paid else left
        limit[load, :] = max(share, 0.0)
        left -= share
        per_unit[load] = 1.0 / target


@compiled
def _busy_table(
    count: IntArray,
    slot: IntArray,
    choice: IntArray,
    ranks: IntArray,
    fill: FloatArray,
    limit: FloatArray,
    per_unit: FloatArray,
    sharing: IntArray,
    random: IntArray,
) -> int:
    """A table; half of the time one with a shard on a rank that is beyond a limit."""
    tables, world = choice.shape[0], fill.shape[1]
    table = int(draw(random) * tables)
    if draw(random) < 0.5:
        return table
    begin = int(draw(random) * world)
    rank = begin
    for further in range(world):
        rank = (begin + further) % world
        if _excess(fill, limit, per_unit, sharing, rank) > 0:
            break
    for _ in range(10):
        for shard in range(slot[table], slot[table] + count[choice[table]]):
            if ranks[shard] == rank:
                return table
        table = int(draw(random) * tables)
    return table


@compiled
def anneal_moves(
    spread: IntArray,
    first: IntArray,
    count: IntArray,
    weights: FloatArray,
    sharing: IntArray,
    begin: IntArray,
    slot: IntArray,
    group: IntArray,
    per_host: int,
    choice: IntArray,
    ranks: IntArray,
    hosts: IntArray,
    best_choice: IntArray,
    best_ranks: IntArray,
    best_hosts: IntArray,
    fill: FloatArray,
    limit: FloatArray,
    per_unit: FloatArray,
    loads: int,
    charge: IntArray,
    charges: FloatArray,
    used: IntArray,
    asked: FloatArray,
    floor: float,
    found: float,
    done: int,
    moves: int,
    all_moves: int,
    hot: float,
    cold: float,
    step: float,
    random: IntArray,
    account: Account,
) -> float:
    """Try ``moves`` changes after ``done`` of ``all_moves``; the rating of the best plan, which ``best_*`` hold.

    ``used`` is how many tables pay each of ``charges``; ``asked`` the rating asked for, and the charges in it.
    """
    world, tables = fill.shape[1], choice.shape[0]
    one = loads == 1 and charges.shape[0] == 1
    paid = 0.0
    for number in range(used.shape[0]):
        if used[number] > 0:
            paid += charges[number]
    tops, stale, changed = account[0], account[1], account[4]
    stale[:] = 1
    slowest, excess = look_again(fill, account), _energy(fill, limit, per_unit)
    energy = _badness(excess, slowest + paid, asked[0], one)
    new_ranks, new_hosts, tops_before = ranks.copy(), hosts.copy(), tops.copy()
    for move in range(moves + 1):
        if excess <= _NOTHING or (done + move) % _EXACTLY == 0:
            excess = _energy(fill, limit, per_unit)
            energy = _badness(excess, slowest + paid, asked[0], one)
        if (energy <= 0 or not one) and slowest + paid < found and _within_memory(fill, limit, loads):
            found = slowest + paid
            copy_into(best_choice, choice)
            copy_into(best_ranks, ranks)
            copy_into(best_hosts, hosts)
            if found <= floor:
                break
            target = max(found * (1 - step), floor)
            if paid < target < asked[0]:
                _ask_for(tops, limit, per_unit, paid, found, target)
                asked[0], asked[1] = target, paid
            excess = _energy(fill, limit, per_unit)
            energy = _badness(excess, slowest + paid, asked[0], one)
        if move == moves:
            break
        if not one and (done + move) % 100 == 0 and asked[0] > paid:
            # Shares of the rating asked for follow what there is, so that one may grow as another falls.
            asked[1] = paid
            _ask_for(tops, limit, per_unit, paid, slowest + paid, asked[0])
            excess = _energy(fill, limit, per_unit)
            energy = _badness(excess, slowest + paid, asked[0], one)
        table = _busy_table(count, slot, choice, ranks, fill, limit, per_unit, sharing, random)
        option = choice[table]
        at, how, shards = slot[table], spread[option], count[option]
        kind = draw(random)
        new_option, other, new_paid, new_excess = option, -1, paid, excess
        copy_into(tops_before, tops)
        changed[0] = 0
        if kind < 0.35 and how >= 2:  # one shard to another rank
            shard = int(draw(random) * shards)
            old = ranks[at + shard]
            new = int(draw(random) * (world if how == 3 else per_host))
            if how == 2:
                new += old // per_host * per_host
            if new == old:
                continue
            shard_at = first[option] + shard
            new_ranks[at + shard] = new
            for sign, where in ((-1.0, ranks), (1.0, new_ranks)):
                new_excess += add(
                    weights, sharing, shard_at, 1, fill, limit, per_unit, where, at + shard, sign, account
                )
        elif kind < 0.6 and how == 3:  # two shards change places
            other = int(draw(random) * tables)
            partner = choice[other]
            shard, other_shard = int(draw(random) * shards), int(draw(random) * count[partner])
            if other == table or spread[partner] < 2:
                continue
            old, new = ranks[at + shard], ranks[slot[other] + other_shard]
            if old == new or (spread[partner] == 2 and old // per_host != new // per_host):
                continue
            new_ranks[at + shard], new_ranks[slot[other] + other_shard] = new, old
            for sign, where in ((-1.0, ranks), (1.0, new_ranks)):
                new_excess += add(
                    weights, sharing, first[option] + shard, 1, fill, limit, per_unit,
                    where, at + shard, sign, account,
                )  # fmt: skip
                new_excess += add(
                    weights, sharing, first[partner] + other_shard, 1, fill, limit, per_unit,
                    where, slot[other] + other_shard, sign, account,
                )  # fmt: skip
        elif kind < 0.7 and group[table] >= 0:  # a group of tables to another host
            new_hosts[group[table]] = int(draw(random) * (world // per_host))
            for member in range(tables):
                if group[member] == group[table]:
                    gone = choice[member]
                    new_excess += add(
                        weights, sharing, first[gone], count[gone], fill, limit, per_unit,
                        ranks, slot[member], -1.0, account,
                    )  # fmt: skip
            for member in range(tables):
                if group[member] == group[table]:
                    chosen = choice[member]
                    new_excess += lay(
                        spread[chosen], first[chosen], count[chosen], weights, sharing, slot[member], group[member],
                        new_ranks, new_hosts, fill, limit, per_unit, per_host, 0.3, random, account,
                    )  # fmt: skip
        else:  # another option, or the same one elsewhere
            new_option = begin[table] + int(draw(random) * (begin[table + 1] - begin[table]))
            if new_option == option and how == 0:
                continue
            if charge[new_option] != charge[option]:
                new_paid += charges[charge[new_option]] if used[charge[new_option]] == 0 else 0.0
                new_paid -= charges[charge[option]] if used[charge[option]] == 1 else 0.0
            new_excess += add(weights, sharing, first[option], shards, fill, limit, per_unit, ranks, at, -1.0, account)
            new_excess += lay(
                spread[new_option], first[new_option], count[new_option], weights, sharing, at, group[table],
                new_ranks, new_hosts, fill, limit, per_unit, per_host, 0.3, random, account,
            )  # fmt: skip
        new_slowest = look_again(fill, account)
        new_energy = _badness(new_excess, new_slowest + new_paid, asked[0], one)
        accepted = new_energy <= energy
        if not accepted:
            temperature = hot * (cold / hot) ** ((done + move) / all_moves)
            accepted = draw(random) < np.exp((energy - new_energy) / temperature)
        if accepted:
            used[charge[option]] -= 1
            used[charge[new_option]] += 1
            choice[table], energy, paid = new_option, new_energy, new_paid
            excess, slowest = new_excess, new_slowest
            _agree(slot, table, other, group, new_ranks, new_hosts, ranks, hosts)
        else:
            take_back(fill, tops_before, account)
            _agree(slot, table, other, group, ranks, hosts, new_ranks, new_hosts)
    return found


@compiled
def _agree(
    slot: IntArray,
    table: int,
    other: int,
    group: IntArray,
    source: IntArray,
    source_hosts: IntArray,
    target: IntArray,
    target_hosts: IntArray,
) -> None:
    """Make one account of ranks and hosts equal to the other for the tables that a move touched."""
    if group[table] >= 0:
        copy_into(target, source)
        copy_into(target_hosts, source_hosts)
        return
    for place in range(slot[table], slot[table + 1]):
        target[place] = source[place]
    if other >= 0:
        for place in range(slot[other], slot[other + 1]):
            target[place] = source[place]
