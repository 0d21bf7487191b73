"""Adding profiles that were built apart."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from flexshard.errors import ProfileError
from flexshard.profiling.count.keyed_lengths import KeyedLengths
from flexshard.profiling.moments import LengthMoments
from flexshard.profiling.profile import AccessProfile
from flexshard.profiling.row_counts import RowCounts

__all__ = ["merge"]


def merge(a: AccessProfile, b: AccessProfile) -> AccessProfile:
    """See :meth:`AccessProfile.__add__`."""
    if a.row_counts is None or b.row_counts is None:
        raise ProfileError(f"table {a.table!r}: only profiles that know their rows add up, and one is a histogram")
    if a.table != b.table:
        raise ProfileError(f"profiles of different tables do not add up: {a.table!r} and {b.table!r}")
    if (a.holdout is None) != (b.holdout is None):
        raise ProfileError(f"table {a.table!r}: one profile holds samples out and the other does not; build both alike")
    if (a.lengths is None) != (b.lengths is None):
        raise ProfileError(f"table {a.table!r}: one profile knows lengths of samples and the other does not")
    # Where the number of rows was found from the data, the larger of the two is what both together would have found.
    num_rows = max(a.num_rows, b.num_rows)
    counts = a.row_counts.to_dense(num_rows)
    counts += b.row_counts.to_dense(num_rows)
    held, holdout = None, a.holdout
    if a.holdout is not None and b.holdout is not None:
        if (a.holdout.share, a.holdout.seed) != (b.holdout.share, b.holdout.seed):
            raise ProfileError(f"table {a.table!r}: profiles that hold out different samples do not add up")
        assert a.row_counts.held is not None
        assert b.row_counts.held is not None
        held_counts = a.row_counts.held.to_dense(num_rows)
        held_counts += b.row_counts.held.to_dense(num_rows)
        held = RowCounts.dense(held_counts)
        holdout = replace(a.holdout, num_samples=a.holdout.num_samples + b.holdout.num_samples)
    lengths, keys = _lengths(a, b)
    if keys is not None and holdout is not None:
        holdout = replace(holdout, num_samples=keys.moments()[1].num_samples)
    samples = _samples_of_rows(a, b, counts, keys)
    known = None not in (a.encoded_by, b.encoded_by)
    if a.encoded_by != b.encoded_by if known else a.mapping != b.mapping:
        raise ProfileError(f"table {a.table!r}: profiles of values that were mapped otherwise do not add up")
    if a.hash != b.hash:
        raise ProfileError(f"table {a.table!r}: profiles of raw ids and of hashed ones do not add up")
    if a.distinct_batch != b.distinct_batch:
        raise ProfileError(
            f"table {a.table!r}: profiles that count each distinct list once per batch add up where batches are of the"
            " same size"
        )
    merged = type(a).from_row_counts(
        RowCounts.dense(counts),
        a.num_samples + b.num_samples if lengths is None else lengths.num_samples,
        num_rows,
        lengths,
        held=held,
        samples=samples,
        holdout=holdout,
        table=a.table,
        sample_key=a.sample_key,
        sample_keys=keys,
        bursts=None if a.bursts is None or b.bursts is None else a.bursts.merged(b.bursts, counts),
    )
    return replace(merged, hash=a.hash, mapping=a.mapping, distinct_batch=a.distinct_batch, encoded_by=a.encoded_by)


def _samples_of_rows(
    a: AccessProfile, b: AccessProfile, counts: npt.NDArray[np.int64], keys: KeyedLengths | None
) -> RowCounts | None:
    """How many samples of both contain each row."""
    if keys is not None:
        return RowCounts.dense(keys.samples(counts))
    if a.samples is None and b.samples is None:
        return None
    samples = np.zeros_like(counts)
    for one in (a.row_counts, b.row_counts):
        assert one is not None
        samples += (one if one.samples is None else one.samples).to_dense(counts.size)
    return RowCounts.dense(samples)


def _samples(profile: AccessProfile) -> str:
    return "rows of the files" if profile.sample_key is None else f"values of {profile.sample_key!r}"


def _lengths(a: AccessProfile, b: AccessProfile) -> tuple[LengthMoments | None, KeyedLengths | None]:
    if a.sample_key != b.sample_key:
        raise ProfileError(
            f"table {a.table!r}: samples are {_samples(a)} in one profile and {_samples(b)} in the other"
        )
    if a.sample_key is None:
        return (None if a.lengths is None or b.lengths is None else a.lengths + b.lengths), None
    if a.sample_keys is None or b.sample_keys is None:
        raise ProfileError(
            f"table {a.table!r}: profiles whose samples are keys can share samples, and a saved one no longer knows"
            " its keys; build the profile from all files at once, or add the profiles before saving"
        )
    keys: KeyedLengths = a.sample_keys.merged(b.sample_keys)
    return keys.moments()[0], keys
