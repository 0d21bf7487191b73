"""What a training step takes: phases one after the other, in each of which links work at once.

A step finds out who needs which rows (counts, ids), looks rows up, exchanges them, trains everything else, exchanges
gradients and sums those of copies, and updates. What crosses different links runs at once, as the executor starts it:
an all-to-all inside groups of g ranks stays on the links of its level, all else crosses the outermost ones. Row-wise
rows are looked up first, and the others while these are on their way. Gradients of the others are added up while those
of row-wise rows are on their way, and then row-wise rows are updated while copies' gradients are. A phase takes as long
as the link, and on it the rank, that takes longest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from flexshard._internal import check_finite, plain_sum
from flexshard.costmodels.cost import Collective, Cost
from flexshard.costmodels.local_rates import LocalRates
from flexshard.errors import JobError

__all__ = ["PHASES", "Phase", "StepWork", "phase_of", "row_wise_gradients", "step_phases", "step_seconds"]

# Of every content, the phase it belongs to.
PHASES: Mapping[str, str] = {
    "counts": "counts",
    "ids": "ids",
    "embeddings": "embeddings",
    "": "embeddings and gradients",  # in plans of format 1
    "gradients": "gradients",
    "replicas": "gradients",
    "touched": "gradients",
    "touched_rows": "gradients",
    # Of ids sent once a node, each before or after what crosses nodes.
    "node ids": "ids within nodes",
    "node embeddings": "embeddings within nodes",
    "node gradients": "gradients within nodes",
    "cached fetches": "rows from the host",
    "cached writes": "rows to the host",
    "pooled ids": "pooled ids",
    "pooled host reads": "pooled look up",
    "pooled sums": "pooled sums",
    "pooled gradients": "pooled gradients",
    "pooled replicas": "pooled gradients",
    "pooled host writes": "pooled update",
    "sequence ids": "sequence ids",
    "sequence rows": "sequence rows",
    "sequence gradients": "sequence gradients",
    "sequence replicas": "sequence gradients",
}
# Of modules that TorchRec runs, one collective after the other.
_IN_TURN = frozenset(name for content, name in PHASES.items() if content.startswith(("pooled ", "sequence ")))


@dataclass(frozen=True)
class StepWork:
    """What a rank does in a step besides communicating for its embeddings.

    Attributes:
        dense_seconds: forward and backward of all but the embeddings, with what else a step waits for.
        rates: of lookups and updates; None for those of the cluster's memory bandwidth, or for nothing where it is not
            known.
    """

    dense_seconds: float
    rates: LocalRates | None = None

    def __post_init__(self) -> None:
        seconds = check_finite(self.dense_seconds, "dense_seconds", JobError)
        if seconds < 0:
            raise JobError(f"dense_seconds is a time of at least 0 s, found {seconds}")
        object.__setattr__(self, "dense_seconds", seconds)


@dataclass(frozen=True)
class Phase:
    """Part of a step.

    Attributes:
        name: what it does.
        links: seconds of each link by name, or of the rank itself ("rank").
        collectives: those that run in it.
    """

    name: str
    links: Mapping[str, float]
    collectives: tuple[Collective, ...] = ()

    @property
    def seconds(self) -> float:
        """Of the link that takes longest."""
        return max(self.links.values(), default=0.0)


def phase_of(one: Collective) -> str:
    """Name of the phase that a collective belongs to."""
    return PHASES[one.content]


def step_phases(cost: Cost, world_size: int, work: StepWork) -> tuple[Phase, ...]:
    """Phases of a step in the order in which they come; of what other work hides, only what it does not."""
    found: list[Phase] = []
    if cost.index_dedup_seconds:
        found.append(Phase("find distinct ids", {"rank": cost.index_dedup_seconds}))
    of_ids = ("counts", "ids within nodes", "ids", "rows from the host", "pooled ids", "sequence ids", "pooled look up")
    found += _of_collectives(cost, world_size, of_ids)
    found.append(Phase("look up", {"rank": cost.look_up_seconds}))
    of_rows = ("embeddings", "embeddings within nodes", "embeddings and gradients", "pooled sums", "sequence rows")
    found += _of_collectives(cost, world_size, of_rows, {"embeddings": cost.overlapped_look_up_seconds})
    found.append(Phase("dense", {"rank": work.dense_seconds}))
    of_gradients = (
        *("gradients within nodes", "gradients", "rows to the host"),
        *("pooled gradients", "sequence gradients", "pooled update"),
    )
    rank = max(cost.overlapped_update_seconds, row_wise_gradients(cost, world_size)) + cost.row_wise_update_seconds
    updates = cost.overlapped_update_seconds or cost.row_wise_update_seconds
    found += _of_collectives(cost, world_size, of_gradients, {"gradients": rank if updates else 0.0})
    found.append(Phase("update", {"rank": cost.update_seconds}))
    return tuple(phase for phase in found if phase.seconds)


def row_wise_gradients(cost: Cost, world_size: int) -> float:
    """Time of the all-to-all of row-wise rows' gradients, less what other work hides: their updates come after it."""
    key = ("all_to_all", world_size, "gradients")
    return plain_sum(one.exposed_seconds for one in cost.collectives if one.key == key)


def _of_collectives(
    cost: Cost, world: int, names: tuple[str, ...], of_rank: Mapping[str, float] = MappingProxyType({})
) -> list[Phase]:
    """Phases of these names; ``of_rank``: seconds of the rank itself meanwhile."""
    phases = []
    for name in names:
        mine = tuple(one for one in cost.collectives if phase_of(one) == name)
        links: dict[str, float] = {}
        for one in mine:
            link = "links in turn" if name in _IN_TURN else f"links@{one.link(world)}"
            links[link] = links.get(link, 0.0) + one.exposed_seconds
        if of_rank.get(name):
            links["rank"] = of_rank[name]
        phases.append(Phase(name, links, mine))
    return phases


def step_seconds(cost: Cost, world_size: int, work: StepWork) -> float:
    """Of a whole step."""
    return plain_sum(phase.seconds for phase in step_phases(cost, world_size, work))
