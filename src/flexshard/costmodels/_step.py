"""What a training step takes with deduplicated batches, from the phases of one without (RecD paper, section 6.2)."""

from __future__ import annotations

from dataclasses import dataclass

from flexshard.errors import DataError

__all__ = ["PhaseLine", "StepModel"]


@dataclass(frozen=True)
class PhaseLine:
    """Time of one phase of a step: what it takes at all, and per row.

    Attributes:
        fixed_seconds: whatever the batch.
        row_seconds: per row (a sample, or a distinct list).
    """

    fixed_seconds: float
    row_seconds: float

    @classmethod
    def through(cls, small: tuple[float, float], large: tuple[float, float]) -> PhaseLine:
        """The line through two measurements, (rows, seconds) each; its fixed part is not negative.

        Raises:
            DataError: no rows, or the second has no more of them than the first.
        """
        (few, short), (many, long) = small, large
        if not 0 < few < many:
            raise DataError(f"a line needs two different numbers of rows, found {few} and {many}")
        per_row = max((long - short) / (many - few), 0.0)
        fixed = max(short - per_row * few, 0.0)
        return cls(fixed, max((long - fixed) / many, 0.0))

    def seconds(self, rows: float) -> float:
        """At so many rows."""
        return self.fixed_seconds + self.row_seconds * rows


@dataclass(frozen=True)
class StepModel:
    """A step as the sum of its phases, as measured without deduplication.

    Attributes:
        lookup: lookups and the communication of ids, rows and gradients; by lists looked up.
        compute: pooling and attention over sequences; by lists.
        rest: everything else; by samples.
        expand: index select of what is deduplicated but not computed on so (O6); by samples.
    """

    lookup: PhaseLine
    compute: PhaseLine
    rest: PhaseLine
    expand: PhaseLine = PhaseLine(0.0, 0.0)

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
