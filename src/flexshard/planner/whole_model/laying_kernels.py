"""Compiled loops that lay shards on ranks, and keep count of what that changes.

A move changes what ranks hold at the places that it touches, and what it does there to the loads of the busiest ranks
and to what is beyond limits is kept count of, so that its price does not grow with the cluster; an ``Account``
remembers what there was before, for moves that are not accepted. Arrays are those of ``annealing_kernels``. Loops over
shards are inside of these functions: a call of one with so many arrays takes longer than what it does for a shard.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from flexshard.planner.whole_model.compiled import compiled, copy_into

__all__ = ["Account", "add", "draw", "lay", "look_again", "new_account", "place_of", "take_back"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
# Of each kind of load the most that a rank has, and 1 where that must be looked for; places in ``fill`` that a move
# changed, what was there, and how many they are.
Account: TypeAlias = "tuple[FloatArray, IntArray, IntArray, FloatArray, IntArray]"
_CANDIDATES = 256  # ranks, or hosts, that a shard, or a block, is tried at while annealing


@compiled
def draw(random: IntArray) -> float:
    """A number between 0 and 1, neither included."""
    random[0] = random[0] * 48271 % 2147483647
    return float(random[0] / 2147483647.0)


@compiled
def place_of(rank: int, sharing: int) -> int:
    """Where what a rank has counts; divisions take as long as all else of a look at it."""
    return rank if sharing == 1 else rank // sharing


def new_account(loads: int, places: int) -> Account:
    """For moves that change so many places at most."""
    return (
        np.zeros(loads),
        np.zeros(loads, np.int64),
        np.zeros(places, np.int64),
        np.zeros(places),
        np.zeros(1, np.int64),
    )


@compiled
def add(
    weights: FloatArray,
    sharing: IntArray,
    shard: int,
    count: int,
    fill: FloatArray,
    limit: FloatArray,
    per_unit: FloatArray,
    ranks: IntArray,
    slot: int,
    sign: float,
    account: Account,
) -> float:
    """Put shards on their ranks, or take them away; by how much more is beyond limits."""
    tops, stale, at, before, changed = account
    loads, kinds, world = tops.shape[0], fill.shape[0], fill.shape[1]
    number, more = changed[0], 0.0
    for further in range(count):
        rank = ranks[slot + further]
        for kind in range(kinds):
            weight = weights[shard + further, kind]
            if weight == 0:
                continue
            place = place_of(rank, sharing[kind])
            old = fill[kind, place]
            new = old + sign * weight
            fill[kind, place] = new
            at[number], before[number] = kind * world + place, old
            number += 1
            more += (max(new - limit[kind, place], 0.0) - max(old - limit[kind, place], 0.0)) * per_unit[kind]
            if kind < loads:
                if new > tops[kind]:
                    tops[kind] = new
                elif sign < 0 and old >= tops[kind]:
                    stale[kind] = 1
    changed[0] = number
    return more


@compiled
def look_again(fill: FloatArray, account: Account) -> float:
    """The rating's loads, once those are looked for that a move made less."""
    tops, stale = account[:2]
    total = 0.0
    for load in range(tops.shape[0]):
        if stale[load] > 0:
            tops[load] = fill[load].max()
            stale[load] = 0
        total += tops[load]
    return total


@compiled
def take_back(fill: FloatArray, tops_before: FloatArray, account: Account) -> None:
    """As it was before the move."""
    tops, _, at, before, changed = account
    places = fill.reshape(-1)
    for number in range(changed[0] - 1, -1, -1):
        places[at[number]] = before[number]
    copy_into(tops, tops_before)


@compiled
def _harm(
    weights: FloatArray,
    sharing: IntArray,
    first: int,
    count: int,
    fill: FloatArray,
    limit: FloatArray,
    per_unit: FloatArray,
    rank: int,
    ranks: int,
) -> float:
    """How much worse consecutive ranks become by a shard each, of ``count`` in turn; how full they get, where nothing
    is beyond its limit.
    """
    total = 0.0
    for local in range(ranks):
        shard = first + local % count if count > 1 else first
        for kind in range(fill.shape[0]):
            place = place_of(rank + local, sharing[kind])
            before = fill[kind, place]
            after = before + weights[shard, kind]
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
    account: Account,
) -> float:
    """Lay an option's shards where they do least harm, up to ``noise``, one after another; by how much more is beyond
    limits. Where there is noise, not every place of a large cluster is looked at.
    """
    world, more = fill.shape[1], 0.0
    if spread == 0:
        for shard in range(count):
            ranks[slot + shard] = shard
        return add(weights, sharing, first, count, fill, limit, per_unit, ranks, slot, 1.0, account)
    begin, end = 0, world
    if spread != 3:
        number = world // per_host
        blocks = count // per_host if spread == 1 else 1
        taken = np.zeros(number, np.int64)
        some = noise > 0 and number > _CANDIDATES and blocks == 1 and group < 0
        for block in range(blocks):
            chosen, least = 0, np.inf
            for candidate in range(_CANDIDATES if some else number):
                host = int(draw(random) * number) if some else candidate
                if taken[host] > block // number or (group >= 0 and hosts[group] >= 0 and hosts[group] != host):
                    continue  # no host has two blocks before every host has one
                # Of blocks each rank has a shard; else what all would have if shards went round.
                shard, shards = (first + block * per_host, per_host) if spread == 1 else (first, count)
                harm = _harm(weights, sharing, shard, shards, fill, limit, per_unit, host * per_host, per_host)
                harm *= 1 + noise * draw(random)
                if harm < least:
                    chosen, least = host, harm
            taken[chosen] += 1
            if group >= 0:
                hosts[group] = chosen
            if spread == 1:
                at = block * per_host
                for local in range(per_host):
                    ranks[slot + at + local] = chosen * per_host + local
                more += add(
                    weights, sharing, first + at, per_host, fill, limit, per_unit, ranks, slot + at, 1.0, account
                )
            begin, end = chosen * per_host, (chosen + 1) * per_host
        if spread == 1:
            return more
    some = noise > 0 and end - begin > _CANDIDATES
    for shard in range(count):
        chosen, least = begin, np.inf
        for candidate in range(_CANDIDATES if some else end - begin):
            rank = begin + (int(draw(random) * (end - begin)) if some else candidate)
            harm = _harm(weights, sharing, first + shard, 1, fill, limit, per_unit, rank, 1)
            harm *= 1 + noise * draw(random)
            if harm < least:
                chosen, least = rank, harm
        ranks[slot + shard] = chosen
        more += add(weights, sharing, first + shard, 1, fill, limit, per_unit, ranks, slot + shard, 1.0, account)
    return more
