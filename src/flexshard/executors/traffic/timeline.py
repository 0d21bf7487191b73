"""A step as a trace that Perfetto and chrome://tracing open: phases per rank and link, predicted and observed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from flexshard._internal import PathLike, plain_sum, write_json
from flexshard.costmodels import Collective, Cost, Phase
from flexshard.executors.traffic.observation import Observation
from flexshard.executors.traffic.predicted import check_observed
from flexshard.planner import Plan

__all__ = ["save_timeline", "timeline"]

Event = dict[str, Any]


def timeline(plan: Plan, observed: Observation | None = None) -> dict[str, Any]:
    """A step's trace events.

    Predicted are the average rank and the busiest one, which has each level's hottest row (the average one is given its
    lookups, too): a track for what the rank does itself and one per link. Observed is every rank's median step: a track
    per kind of collective and level, and one of the times in which Python stood waiting. Clocks of ranks start at the
    beginning of their own step.

    Args:
        observed: of the plan; from :meth:`Observer.result`, whose ``calls`` it shows.

    Raises:
        DataError: the observation is of another plan.
    """
    if observed is not None:
        check_observed(plan, observed)
    events = [
        *_predicted(0, "predicted, average rank", plan, _without_excess(plan.predicted)),
        *_predicted(1, "predicted, busiest rank", plan, plan.predicted),
    ]
    if observed is not None:
        events += _observed(observed)
    return {
        "format": "flexshard.timeline",
        "displayTimeUnit": "ms",
        "traceEvents": events,
        "metadata": {
            "plan": plan.fingerprint,
            "predicted_step_seconds": plain_sum(phase.seconds for phase in plan.phases),
        },
    }


def save_timeline(path: PathLike, plan: Plan, observed: Observation | None = None) -> None:
    """Write the trace; raises as :func:`timeline`, and OutputError where it could not be written."""
    write_json(path, timeline(plan, observed))


def _without_excess(cost: Cost) -> Cost:
    return replace(cost, collectives=tuple(replace(one, excess_bytes=0.0) for one in cost.collectives))


def _predicted(process: int, name: str, plan: Plan, cost: Cost) -> Iterator[Event]:
    phases = plan.phases_of(cost)
    tracks = ["phase", "rank", *sorted({link for phase in phases for link in phase.links if link != "rank"})]
    yield from _named(process, name, tracks)
    world, start = plan.cluster.world_size, 0.0
    for phase in phases:
        yield _event(process, tracks.index("phase"), phase.name, start, phase.seconds, {})
        yield from _of_phase(process, tracks, phase, start, world)
        start += phase.seconds


# What a rank does in phases that are named after what is on its way.
_BESIDE_LINKS = {
    "embeddings": "look up rows that are not row-wise",
    "gradients": "add up gradients, update row-wise rows",
}


def _of_phase(process: int, tracks: list[str], phase: Phase, start: float, world: int) -> Iterator[Event]:
    if "rank" in phase.links:
        work = _BESIDE_LINKS.get(phase.name, phase.name)
        yield _event(process, tracks.index("rank"), work, start, phase.links["rank"], {})
    ends: dict[str, float] = {}
    for one in phase.collectives:
        link = f"links@{one.link(world)}"
        if link not in phase.links:  # of a phase whose calls wait for one another, whichever links they are on
            (link,) = (name for name in phase.links if name != "rank")
        begins = ends.get(link, start)
        ends[link] = begins + one.exposed_seconds
        yield _event(process, tracks.index(link), _name_of(one), begins, one.exposed_seconds, _facts(one))


def _name_of(one: Collective) -> str:
    return f"{one.name} {one.content}".rstrip()


def _facts(one: Collective) -> Mapping[str, Any]:
    return {
        "calls": one.calls,
        "bytes": one.calls * (one.nbytes + one.excess_bytes),
        "latency_us": 1e6 * one.calls * one.alpha_seconds,
        "hidden": one.overlap,
    }


def _observed(observed: Observation) -> Iterator[Event]:
    tracks = sorted({f"{call.kind}@{call.group_size}" for call in observed.calls})
    for rank in range(observed.world_size):
        process = 2 + rank
        yield from _named(process, f"observed, rank {rank}", ["waiting", *tracks])
        for call in observed.calls:
            if call.rank != rank:
                continue
            name = f"{call.kind}@{call.group_size}"
            facts = {"bytes": call.bytes}
            track = 1 + tracks.index(name)
            yield _event(process, track, f"{name} {call.content}", call.start_seconds, call.seconds, facts)
            for begin, seconds in call.waits:
                yield _event(process, 0, f"wait for {name} {call.content}", begin, seconds, {})


def _named(process: int, name: str, tracks: list[str]) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "tid": 0, "args": {"sort_index": process}}
    for thread, track in enumerate(tracks):
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": track}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": thread, "args": {"sort_index": thread}}


def _event(process: int, thread: int, name: str, start: float, seconds: float, facts: Mapping[str, Any]) -> Event:
    times = {"ts": round(1e6 * start, 3), "dur": round(1e6 * seconds, 3)}
    return {"ph": "X", "name": name, "cat": "step", "pid": process, "tid": thread, **times, "args": dict(facts)}
