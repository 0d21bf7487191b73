"""How much deduplication saves: RecD's analytical model (RecD paper, section 4.2)."""

from __future__ import annotations

from collections.abc import Sequence

from flexshard.errors import DataError

__all__ = ["combined_dedup_factor", "dedup_factor", "dedup_len"]


def dedup_len(avg_length: float, batch_size: float, samples_per_session: float, same: float) -> float:
    """Ids of a feature that a deduplicated batch keeps: ``l·B·(1 - (S - 1)/S·d)``.

    Args:
        avg_length: l, ids per sample.
        batch_size: B, samples.
        samples_per_session: S, of one batch.
        same: d, the probability that the feature stays the same from one row of a session to the next.

    Raises:
        DataError: S below 1, d outside [0, 1], or a negative number.
    """
    if samples_per_session < 1:
        raise DataError(f"a session has at least one sample, found {samples_per_session}")
    if not 0 <= same <= 1:
        raise DataError(f"d is a probability, found {same}")
    if avg_length < 0 or batch_size < 0:
        raise DataError(f"length and batch size are not negative, found {avg_length} and {batch_size}")
    return avg_length * batch_size * (1 - (samples_per_session - 1) / samples_per_session * same)


def dedup_factor(samples_per_session: float, same: float) -> float:
    """Ids of the whole batch per id that is kept: ``l·B / DedupLen``, of any l and B.

    Raises:
        DataError: as :func:`dedup_len`.
    """
    return 1.0 / dedup_len(1.0, 1.0, samples_per_session, same)


def combined_dedup_factor(factors: Sequence[float], avg_lengths: Sequence[float]) -> float:
    """DedupFactor of all ids of several features, such as those of one table.

    Args:
        factors: of each feature; at least 1.
        avg_lengths: l of each feature.

    Raises:
        DataError: factors below 1, negative lengths, or not as many of one as of the other.
    """
    if len(factors) != len(avg_lengths):
        raise DataError(f"every feature has a factor and a length, found {len(factors)} and {len(avg_lengths)}")
    if any(factor < 1 for factor in factors) or any(length < 0 for length in avg_lengths):
        raise DataError("factors are at least 1 and lengths at least 0")
    kept = sum(length / factor for factor, length in zip(factors, avg_lengths, strict=True))
    return sum(avg_lengths) / kept if kept else 1.0
