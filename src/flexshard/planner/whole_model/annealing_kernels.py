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

__all__ = ["anneal_moves", "lay"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
_RATING = 3.0  # weight of the rating beyond the one asked for beside ranks' loads, both relative


@compiled
def _draw(random: IntArray) -> float:
    """A number between 0 and 1, neither included."""
    random[0] = random[0] * 48271 % 2147483647
    return float(random[0] / 2147483647.0)


@compiled
def _excess(fill: FloatArray, limit: FloatArray, per_unit: FloatArray, sharing: IntArray, rank: int) -> float:
    """How far a rank is beyond its limits."""
    total = 0.0
    for kind in range(fill.shape[0]):
        place = rank // sharing[kind]
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
def _slowest(fill: FloatArray, loads: int) -> float:
    """Of each kind of load that of the rank that has most, added up."""
    total = 0.0
    for load in range(loads):
        total += fill[load].max()
    return total


@compiled
def _badness(
    fill: FloatArray, limit: FloatArray, per_unit: FloatArray, loads: int, paid: float, asked: FloatArray, one: bool
) -> float:
    """How far a state is from what is asked for; where there are several kinds of load, by how much its rating is, too,
    which ranks beyond their limits alone do not tell.
    """
    total = _energy(fill, limit, per_unit)
    if not one:
        total += _RATING * max(_slowest(fill, loads) + paid - asked[0], 0.0) / asked[0]
    return total


@compiled
def _ask_for(
    fill: FloatArray, limit: FloatArray, per_unit: FloatArray, loads: int, paid: float, found: float, target: float
) -> None:
    """Limit loads to what they are in the plan found, less what it is to improve by."""
    left = target - paid
    for load in range(loads - 1, -1, -1):
        share = fill[load].max() * (target - paid) / (found - paid) if load and found > paid else left
        limit[load, :] = max(share, 0.0)
        left -= share
        per_unit[load] = 1.0 / target


@compiled
def _add(weights: FloatArray, sharing: IntArray, shard: int, fill: FloatArray, rank: int, sign: float) -> None:
    for kind in range(fill.shape[0]):
        fill[kind, rank // sharing[kind]] += sign * weights[kind, shard]


@compiled
def _harm(
    weights: FloatArray,
    sharing: IntArray,
    shard: int,
    fill: FloatArray,
    limit: FloatArray,
    per_unit: FloatArray,
    rank: int,
) -> float:
    """How much worse a rank becomes by a shard; how full it gets, where nothing is beyond its limit."""
    total = 0.0
    for kind in range(fill.shape[0]):
        place = rank // sharing[kind]
        before = fill[kind, place]
        after = before + weights[kind, shard]
        total += (max(after - limit[kind, place], 0.0) - max(before - limit[kind, place], 0.0)) * per_unit[kind]
        total += 1e-3 * after * per_unit[kind]
    return total


@compiled
def lay(
    spread: int,
    first: int,
    count: int,
    weights: FloatArray,
    sharing: IntArray,
    slot: int,
    group: int,
    ranks: IntArray,
    hosts: IntArray,
    fill: FloatArray,
    limit: FloatArray,
    per_unit: FloatArray,
    per_host: int,
    noise: float,
    random: IntArray,
) -> None:
    """Lay an option's shards where they do least harm, up to ``noise``, one after another."""
    world = fill.shape[1]
    if spread == 0:
        for shard in range(count):
            ranks[slot + shard] = shard
            _add(weights, sharing, first + shard, fill, shard, 1.0)
        return
    begin, end = 0, world
    if spread != 3:
        number = world // per_host
        blocks = count // per_host if spread == 1 else 1
        taken = np.zeros(number, np.int64)
        for block in range(blocks):
            chosen, least = 0, np.inf
            for host in range(number):
                if taken[host] > block // number or (group >= 0 and hosts[group] >= 0 and hosts[group] != host):
                    continue  # no host has two blocks before every host has one
                harm = 0.0
                for local in range(per_host):
                    shard = first + block * per_host + local if spread == 1 else first + local % count
                    harm += _harm(weights, sharing, shard, fill, limit, per_unit, host * per_host + local)
                harm *= 1 + noise * _draw(random)
                if harm < least:
                    chosen, least = host, harm
            taken[chosen] += 1
            if group >= 0:
                hosts[group] = chosen
            if spread == 1:
                for local in range(per_host):
                    shard = block * per_host + local
                    ranks[slot + shard] = chosen * per_host + local
                    _add(weights, sharing, first + shard, fill, chosen * per_host + local, 1.0)
            begin, end = chosen * per_host, (chosen + 1) * per_host
        if spread == 1:
            return
    for shard in range(count):
        chosen, least = begin, np.inf
        for rank in range(begin, end):
            harm = _harm(weights, sharing, first + shard, fill, limit, per_unit, rank) * (1 + noise * _draw(random))
            if harm < least:
                chosen, least = rank, harm
        ranks[slot + shard] = chosen
        _add(weights, sharing, first + shard, fill, chosen, 1.0)


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
    table = int(_draw(random) * tables)
    if _draw(random) < 0.5:
        return table
    begin = int(_draw(random) * world)
    rank = begin
    for further in range(world):
        rank = (begin + further) % world
        if _excess(fill, limit, per_unit, sharing, rank) > 0:
            break
    for _ in range(10):
        for shard in range(slot[table], slot[table] + count[choice[table]]):
            if ranks[shard] == rank:
                return table
        table = int(_draw(random) * tables)
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
    energy = _badness(fill, limit, per_unit, loads, paid, asked, one)
    new_fill, new_ranks, new_hosts = fill.copy(), ranks.copy(), hosts.copy()
    for move in range(moves + 1):
        if (energy <= 0 or not one) and _slowest(fill, loads) + paid < found and _within_memory(fill, limit, loads):
            found = _slowest(fill, loads) + paid
            copy_into(best_choice, choice)
            copy_into(best_ranks, ranks)
            copy_into(best_hosts, hosts)
            if found <= floor:
                break
            target = max(found * (1 - step), floor)
            if paid < target < asked[0]:
                _ask_for(fill, limit, per_unit, loads, paid, found, target)
                asked[0], asked[1] = target, paid
            energy = _badness(fill, limit, per_unit, loads, paid, asked, one)
        if move == moves:
            break
        if not one and (done + move) % 100 == 0 and asked[0] > paid:
            # Shares of the rating asked for follow what there is, so that one may grow as another falls.
            asked[1] = paid
            _ask_for(fill, limit, per_unit, loads, paid, _slowest(fill, loads) + paid, asked[0])
            energy = _badness(fill, limit, per_unit, loads, paid, asked, one)
        table = _busy_table(count, slot, choice, ranks, fill, limit, per_unit, sharing, random)
        option = choice[table]
        at, how, shards = slot[table], spread[option], count[option]
        kind = _draw(random)
        new_option, other, new_paid = option, -1, paid
        if kind < 0.35 and how >= 2:  # one shard to another rank
            shard = int(_draw(random) * shards)
            old = ranks[at + shard]
            new = int(_draw(random) * (world if how == 3 else per_host))
            if how == 2:
                new += old // per_host * per_host
            if new == old:
                continue
            copy_into(new_fill, fill)
            _add(weights, sharing, first[option] + shard, new_fill, old, -1.0)
            _add(weights, sharing, first[option] + shard, new_fill, new, 1.0)
            new_ranks[at + shard] = new
        elif kind < 0.6 and how == 3:  # two shards change places
            other = int(_draw(random) * tables)
            partner = choice[other]
            shard, other_shard = int(_draw(random) * shards), int(_draw(random) * count[partner])
            if other == table or spread[partner] < 2:
                continue
            old, new = ranks[at + shard], ranks[slot[other] + other_shard]
            if old == new or (spread[partner] == 2 and old // per_host != new // per_host):
                continue
            copy_into(new_fill, fill)
            _add(weights, sharing, first[option] + shard, new_fill, old, -1.0)
            _add(weights, sharing, first[option] + shard, new_fill, new, 1.0)
            _add(weights, sharing, first[partner] + other_shard, new_fill, new, -1.0)
            _add(weights, sharing, first[partner] + other_shard, new_fill, old, 1.0)
            new_ranks[at + shard], new_ranks[slot[other] + other_shard] = new, old
        elif kind < 0.7 and group[table] >= 0:  # a group of tables to another host
            copy_into(new_fill, fill)
            new_hosts[group[table]] = int(_draw(random) * (world // per_host))
            for member in range(tables):
                if group[member] == group[table]:
                    for shard in range(count[choice[member]]):
                        at_shard = first[choice[member]] + shard
                        _add(weights, sharing, at_shard, new_fill, ranks[slot[member] + shard], -1.0)
            for member in range(tables):
                if group[member] == group[table]:
                    chosen = choice[member]
                    lay(
                        spread[chosen], first[chosen], count[chosen], weights, sharing, slot[member], group[member],
                        new_ranks, new_hosts, new_fill, limit, per_unit, per_host, 0.3, random,
                    )  # fmt: skip
        else:  # another option, or the same one elsewhere
            new_option = begin[table] + int(_draw(random) * (begin[table + 1] - begin[table]))
            if new_option == option and how == 0:
                continue
            if charge[new_option] != charge[option]:
                new_paid += charges[charge[new_option]] if used[charge[new_option]] == 0 else 0.0
                new_paid -= charges[charge[option]] if used[charge[option]] == 1 else 0.0
            copy_into(new_fill, fill)
            for shard in range(shards):
                _add(weights, sharing, first[option] + shard, new_fill, ranks[at + shard], -1.0)
            lay(
                spread[new_option], first[new_option], count[new_option], weights, sharing, at, group[table],
                new_ranks, new_hosts, new_fill, limit, per_unit, per_host, 0.3, random,
            )  # fmt: skip
        new_energy = _badness(new_fill, limit, per_unit, loads, new_paid, asked, one)
        accepted = new_energy <= energy
        if not accepted:
            temperature = hot * (cold / hot) ** ((done + move) / all_moves)
            accepted = _draw(random) < np.exp((energy - new_energy) / temperature)
        if accepted:
            copy_into(fill, new_fill)
            used[charge[option]] -= 1
            used[charge[new_option]] += 1
            choice[table], energy, paid = new_option, new_energy, new_paid
            _agree(slot, table, other, group, new_ranks, new_hosts, ranks, hosts)
        else:
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
