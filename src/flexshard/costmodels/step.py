"""What a training step takes with deduplicated batches, from the phases of one without (RecD paper, section 6.2)."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

from flexshard.errors import DataError

__all__ = ["PhaseCurve", "StepModel"]


@dataclass(frozen=True)
class PhaseCurve:
    """Time of one phase of a step by its rows (samples, or distinct lists): straight between measured points.

    Attributes:
        points: (rows, seconds), rows ascending; beyond the ends the nearest two go on, never below no time.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        rows = [point[0] for point in self.points]
        if len(rows) < 2 or rows[0] < 0 or any(a >= b for a, b in pairwise(rows)):
            raise DataError(f"a curve needs two or more different numbers of rows, ascending; found {rows}")

    def seconds(self, rows: float) -> float:
        """At so many rows."""
        index = min(max(bisect_left([point[0] for point in self.points], rows), 1), len(self.points) - 1)
        (few, short), (many, long) = self.points[index - 1], self.points[index]
        return max(short + (long - short) * (rows - few) / (many - few), 0.0)


_NOTHING = PhaseCurve(((0.0, 0.0), (1.0, 0.0)))


@dataclass(frozen=True)
class StepModel:
    """A step as the sum of its phases, as measured without deduplication.

    Attributes:
        lookup: lookups and the communication of ids, rows and gradients; by lists looked up.
        compute: pooling and attention over sequences; by lists.
        rest: everything else; by samples.
        expand: index select of what is deduplicated but not computed on so (O6); by samples.
    """

    lookup: PhaseCurve
    compute: PhaseCurve
    rest: PhaseCurve
    expand: PhaseCurve = _NOTHING

    def seconds(self, batch_size: int, *, dedup_factor: float = 1.0, compute: bool = False) -> float:
        """Of a step of ``batch_size`` samples per rank.

        Args:
            batch_size: B.
            dedup_factor: of the sequence features; 1 if they are not deduplicated.
            compute: whether pooling and attention run on distinct lists (O7) or on all.

        Raises:
            DataError: a factor below 1.
        """
        if dedup_factor < 1:
            raise DataError(f"a DedupFactor is at least 1, found {dedup_factor}")
        distinct = batch_size / dedup_factor
        whole = self.lookup.seconds(distinct) + self.rest.seconds(batch_size)
        if compute:
            return whole + self.compute.seconds(distinct)
        expanded = self.expand.seconds(batch_size) if dedup_factor > 1 else 0.0
        return whole + self.compute.seconds(batch_size) + expanded

    def throughput(self, batch_size: int, *, dedup_factor: float = 1.0, compute: bool = False) -> float:
        """Samples per second and rank; arguments as for :meth:`seconds`."""
        return batch_size / self.seconds(batch_size, dedup_factor=dedup_factor, compute=compute)
