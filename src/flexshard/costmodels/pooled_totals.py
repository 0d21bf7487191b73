"""What pooled tables cost together, once each has an option and a rank for every shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexshard._internal import plain_sum
from flexshard.costmodels.cost import Collective, Cost
from flexshard.costmodels.overlap import hidden_share
from flexshard.costmodels.pooled import PooledCosts
from flexshard.costmodels.pooled_options import POOLED_LOADS, Channel, PooledOption, load_of

__all__ = ["pooled_cost"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class _RankLoads:
    """What every rank has of pooled tables; arrays of shape (ranks,) unless they say otherwise.

    Attributes:
        moved: bytes by kind of load (of :data:`POOLED_LOADS`, its position) and channel.
        local_seconds: of lookups and updates; shape (2, ranks).
        static_bytes, dynamic_bytes, host_bytes: as of :class:`PooledOption`.
        ids: looked up.
        seconds: of each kind of :data:`POOLED_LOADS`, without latencies; shape (loads, ranks). Of what ranks carry
            together, as bytes, each has the mean.
    """

    moved: Mapping[tuple[int, Channel], FloatArray]
    local_seconds: FloatArray
    static_bytes: FloatArray
    dynamic_bytes: FloatArray
    host_bytes: FloatArray
    ids: FloatArray
    seconds: FloatArray


def _rank_loads(
    costs: PooledCosts, placed: Sequence[tuple[PooledOption, Sequence[int]]], received_bytes: float = 0.0
) -> _RankLoads:
    """Add shards up by rank.

    Args:
        costs: of the cluster.
        placed: of each table an option, and the rank of each of its shards.
        received_bytes: of sums that every rank has of its own samples, of all tables.
    """
    world = costs.cluster.world_size

    everywhere = np.arange(world)
    sharing = [costs.sharing(load) for load in POOLED_LOADS]
    moved: dict[tuple[int, Channel], FloatArray] = {}
    local, seconds = np.zeros((2, world)), np.zeros((len(POOLED_LOADS), world))
    sums = {name: np.zeros(world) for name in ("static_bytes", "dynamic_bytes", "host_bytes", "ids")}
    for option, where in placed:
        ranks = None if np.array_equal(where, everywhere) else np.asarray(where, np.int64)
        for channel, nbytes in option.moved.items():
            load = load_of(option.shared_calls, channel[2])
            before = moved.get((load, channel), np.zeros(world))
            moved[load, channel] = before + _by_rank(ranks, nbytes, world, sharing[load])
        local += [_by_rank(ranks, each, world) for each in option.local_seconds]
        of_loads = costs.seconds(option)
        for load in np.flatnonzero(of_loads.any(axis=1)).tolist():
            seconds[load] += _by_rank(ranks, of_loads[load], world, sharing[load])
        for name, total in sums.items():
            total += _by_rank(ranks, getattr(option, name), world)
    sums["dynamic_bytes"] += received_bytes
    return _RankLoads(moved, local, seconds=seconds, **sums)


def _by_rank(ranks: IntArray | None, values: FloatArray, world: int, together: int = 1) -> FloatArray:
    """What shards bring each rank; ``ranks`` of None are of a shard for every one. Of what ranks carry together, each
    has the mean.
    """
    found: FloatArray = values if ranks is None else np.asarray(np.bincount(ranks, values, world), np.float64)
    return found if together == 1 else found.reshape(-1, together).mean(axis=1).repeat(together)


def pooled_cost(
    costs: PooledCosts, placed: Sequence[tuple[PooledOption, Sequence[int]]], received_bytes: float = 0.0
) -> Cost:
    """The metrics of pooled tables; arguments as of :func:`_rank_loads`.

    Memory is the fullest rank's. Of every kind of load, collectives and local work have what the rank that is busiest
    with it has, so that seconds add up to what ranks wait for.
    """
    loads = _rank_loads(costs, placed, received_bytes)
    busiest = loads.seconds.argmax(axis=1)
    fullest = int((loads.static_bytes + loads.dynamic_bytes).argmax())
    calls: dict[Channel, int] = {}
    for shared in dict.fromkeys(option.shared_calls for option, _ in placed):
        for channel, number in costs.calls(shared).items():
            calls[channel] = calls.get(channel, 0) + number
    collectives = []
    for channel in sorted({channel for _, channel in loads.moved}):
        kind, size, content = channel
        number, rate = calls.get(channel, 1), costs.rate(channel)
        parts = [(load, nbytes) for (load, each), nbytes in loads.moved.items() if each == channel]
        mean = plain_sum(float(nbytes.mean()) for _, nbytes in parts)
        most = plain_sum(float(nbytes[busiest[load]]) for load, nbytes in parts)
        collectives.append(
            Collective(
                kind,
                size,
                number,
                mean / number,
                rate.alpha_seconds,
                rate.bytes_per_s,
                hidden_share(costs.overlap, kind, size, content),
                content,
                (most - mean) / number,
            )
        )
    look_up, update = (busiest[POOLED_LOADS.index(load)] for load in ("look up", "update"))
    return Cost(
        static_memory_bytes=float(loads.static_bytes[fullest]),
        dynamic_memory_bytes=float(loads.dynamic_bytes[fullest]),
        input_ids=plain_sum(float(one.ids.sum()) for one, _ in placed if one.sends_ids) / costs.cluster.world_size,
        rows_read=float(loads.ids.max()),
        collectives=tuple(collectives),
        dynamic_memory_sigma_bytes=None,
        look_up_seconds=float(loads.local_seconds[0, look_up]),
        update_seconds=float(loads.local_seconds[1, update]),
        host_memory_bytes=float(loads.host_bytes.max()),
    )
