"""How often each row of a table is read: the access profile."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from flexshard._values import whole
from flexshard.errors import ProfileError
from flexshard.profiling._moments import LengthMoments
from flexshard.profiling._ranking import RowCounts, checked_whole, histogram

if TYPE_CHECKING:
    from flexshard.profiling._drift import DriftPoint
    from flexshard.profiling._parquet import ProgressCallback

__all__ = ["AccessProfile", "Holdout"]

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Holdout:
    """Accesses in samples that the counts have not seen.

    Attributes:
        num_samples: samples held out.
        accesses: held-out accesses of the rows of each in-sample count, then of the rows never read in sample;
            shape (K + 1,).
        share, seed: which samples they are; profiles add up only where these agree.
    """

    num_samples: int
    accesses: IntArray
    share: float = 0.0
    seed: int = 0


@dataclass(frozen=True, eq=False)
class AccessProfile:
    """How often each row of a table is read, in frequency-of-frequency form.

    Rows of equal count are interchangeable, so a profile is the distinct counts and how many rows have each (K
    pairs). Which rows those are is known where the profile was built from ids (:attr:`ranked_rows`).

    Attributes:
        counts: distinct access counts, strictly descending, above 0; shape (K,).
        rows: how many rows have each count; shape (K,).
        num_rows: E, rows of the table, those never read included.
        num_samples: samples that were counted.
        lengths: moments of the number of ids per sample; None where only counts are known.
        holdout: accesses in unseen samples; None where none were kept.
        table: name of the table, for messages.
        path: file that the profile was read from, if any.
        sample_key: column whose distinct values are the samples; None where they are rows.

    Raises:
        ProfileError: the fields contradict each other.
    """

    counts: IntArray
    rows: IntArray
    num_rows: int
    num_samples: int
    lengths: LengthMoments | None = None
    holdout: Holdout | None = None
    table: str = ""
    path: str | None = None
    sample_key: str | None = None
    row_counts: RowCounts | None = field(default=None, repr=False)
    sample_keys: Any = field(default=None, repr=False)

    def __repr__(self) -> str:
        return (
            f"AccessProfile(table={self.table!r}, num_rows={self.num_rows:,}, rows_read={self.rows_read:,},"
            f" distinct_counts={self.counts.size:,}, num_samples={self.num_samples:,},"
            f" avg_length={self.avg_length:.6g})"
        )

    def __post_init__(self) -> None:
        for name in ("num_rows", "num_samples"):
            where = f"table {self.table!r}: {name}" if self.table else name
            object.__setattr__(self, name, whole(getattr(self, name), where, ProfileError, least=0))
        _check(self)
        for array in (self.counts, self.rows):
            array.flags.writeable = False

    # -- construction

    @classmethod
    def from_counts(
        cls,
        counts: npt.ArrayLike,
        num_samples: int,
        num_rows: int | None = None,
        *,
        lengths: LengthMoments | None = None,
        table: str = "",
    ) -> AccessProfile:
        """A profile from the access count of every row.

        Args:
            counts: number of accesses of row 0, 1, ...; shape (rows,), whole numbers of at least 0.
            num_samples: samples in which they were counted.
            num_rows: rows of the table, where it has more than ``counts`` (the others are never read).
            lengths: moments of the number of ids per sample, for memory quantiles.
            table: name, for messages.

        Raises:
            ProfileError: NaN, negative or fractional counts, no accesses, no samples, or fewer rows than counts.
        """
        dense = checked_whole(counts, "counts", least=0)
        return cls.from_row_counts(
            RowCounts.dense(dense), num_samples, dense.size if num_rows is None else num_rows, lengths, table=table
        )

    @classmethod
    def from_histogram(
        cls,
        counts: npt.ArrayLike,
        rows: npt.ArrayLike,
        num_samples: int,
        num_rows: int | None = None,
        *,
        lengths: LengthMoments | None = None,
        table: str = "",
    ) -> AccessProfile:
        """A profile from distinct counts and how many rows have each, in any order.

        Args:
            counts: distinct access counts, whole numbers of at least 0; shape (K,).
            rows: how many rows have each; shape (K,).
            num_samples, num_rows, lengths, table: as in :meth:`from_counts`.

        Raises:
            ProfileError: as :meth:`from_counts`; or a count that is given twice, or arrays of different length.
        """
        values = checked_whole(counts, "counts", least=0)
        numbers = checked_whole(rows, "rows", least=0)
        if values.shape != numbers.shape:
            raise ProfileError(f"counts and rows differ in length: {values.size} and {numbers.size}")
        if float(numbers.sum(dtype=np.float64)) >= 2**62:
            raise ProfileError("more than 2^62 rows; check the histogram")
        given_rows = int(numbers.sum())
        kept = (values > 0) & (numbers > 0)
        values, numbers = values[kept], numbers[kept]
        if values.size > 1 and not np.all(values[:-1] > values[1:]):
            order = np.argsort(-values, kind="stable")
            values, numbers = values[order], numbers[order]
            twice = np.flatnonzero(values[:-1] == values[1:])
            if twice.size:
                raise ProfileError(f"count {values[twice[0]]} is given twice; add up its rows")
        return cls(values, numbers, given_rows if num_rows is None else num_rows, num_samples, lengths, table=table)

    @classmethod
    def from_probabilities(
        cls,
        probabilities: npt.ArrayLike,
        rows: npt.ArrayLike | None = None,
        num_rows: int | None = None,
        *,
        table: str = "",
    ) -> AccessProfile:
        """A profile from per-row probabilities (expected appearances in one sample), in descending order.

        They are kept as counts in a number of samples (a power of two) that is as large as 64-bit sums allow.

        Args:
            probabilities: p of the rows, hottest first; shape (K,).
            rows: how many rows have each; one by default.
            num_rows: rows of the table; the others are never read.

        Raises:
            ProfileError: NaN, negative or unsorted probabilities.
        """
        p = np.asarray(probabilities, dtype=np.float64)
        numbers = np.ones(p.shape, np.int64) if rows is None else checked_whole(rows, "rows", least=0)
        if p.ndim != 1 or p.shape != numbers.shape:
            raise ProfileError(f"probabilities and rows must be of one length, found shapes {p.shape}, {numbers.shape}")
        bad = np.flatnonzero(~np.isfinite(p) | (p < 0))
        if bad.size:
            raise ProfileError(f"probability {bad[0]} is {p[bad[0]]}; expected a finite number of at least 0")
        unsorted = np.flatnonzero(p[:-1] < p[1:])
        if unsorted.size:
            k = int(unsorted[0])
            raise ProfileError(f"probabilities must not ascend, but {k + 1} is {p[k + 1]} after {p[k]}; sort them")
        with np.errstate(over="ignore"):
            expected = float(p @ numbers)
        if expected >= 2**60:
            raise ProfileError(
                f"probabilities add up to {expected:.3g} reads per sample; they are expected appearances"
            )
        if expected <= 0:
            raise ProfileError(f"table {table!r} is never read; all its probabilities are 0")
        samples = 1 << int(np.clip(62 - np.ceil(np.log2(expected)), 1, 52))
        counts = np.rint(p * samples).astype(np.int64)
        starts = np.flatnonzero(np.concatenate([[True], counts[:-1] != counts[1:]]))
        return cls.from_histogram(
            counts[starts],
            np.add.reduceat(numbers, starts),
            samples,
            int(numbers.sum()) if num_rows is None else num_rows,
            table=table,
        )

    @classmethod
    def from_row_counts(
        cls,
        row_counts: RowCounts,
        num_samples: int,
        num_rows: int,
        lengths: LengthMoments | None = None,
        *,
        held: RowCounts | None = None,
        holdout: Holdout | None = None,
        table: str = "",
        path: str | None = None,
        sample_key: str | None = None,
        sample_keys: Any = None,
    ) -> AccessProfile:
        """A profile whose row ids are known; ``held`` are the counts of the same rows in held-out samples, and
        ``holdout`` says which samples those are (its ``accesses`` are found here).
        """
        counts, rows = histogram(row_counts.counts)
        if row_counts.size > num_rows:
            raise ProfileError(f"table {table!r}: num_rows is {num_rows}, but counts are given for {row_counts.size}")
        if held is not None and holdout is not None:
            holdout = replace(holdout, accesses=row_counts.accesses_by_count(held, counts))
            row_counts = replace(row_counts, held=held)
        return cls(
            counts, rows, num_rows, num_samples, lengths, holdout, table, path, sample_key, row_counts, sample_keys
        )

    @classmethod
    def from_ids(
        cls,
        ids: npt.ArrayLike,
        *,
        num_rows: int | None = None,
        lengths: npt.ArrayLike | None = None,
        hash: str | None = None,
        table: str = "",
    ) -> AccessProfile:
        """A profile from arrays of ids.

        Args:
            ids: row ids, all samples one after the other; shape (accesses,).
            num_rows: rows of the table; one above the largest id by default.
            lengths: number of ids of each sample; 1 each by default.
            hash: "splitmix64" to fold raw 64-bit ids into ``num_rows``.

        Raises:
            DataError: ids of another type, or outside [0, num_rows).
        """
        from flexshard.profiling._parquet import profile_arrays

        return profile_arrays(ids, lengths, num_rows=num_rows, hash=hash, table=table)

    @classmethod
    def from_parquet(
        cls,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        column: str,
        num_rows: int | None = None,
        hash: str | None = None,
        sample_key: str | None = None,
        holdout: float = 0.0,
        seed: int = 0,
        workers: int | None = None,
        table: str | None = None,
        distinct_batch: int | None = None,
        progress: ProgressCallback | None = None,
    ) -> AccessProfile:
        """A profile from Parquet files, streamed: memory is bounded by ``num_rows``, not by the data.

        Args:
            paths: files, globs, folders, or URLs (s3://, gs://, or any that fsspec knows).
            column: a column of integers (one id per row of the file) or of lists of integers. A null list is an
                empty one; a null id is an error.
            num_rows: rows of the table; by default one above the largest id, which is then found on the way.
            hash: "splitmix64" to fold raw 64-bit ids into ``num_rows``.
            sample_key: column whose distinct values are the samples (a session, a user); by default a sample is a
                row of the file. Lengths per key are kept in memory while counting.
            holdout: share of the samples to keep unseen, by a hash of their key or place, and to measure on.
            seed: of that hash.
            workers: files or row groups decoded at once; by default the number of processors, at most 8.
            table: name of the profile; the column's by default.
            distinct_batch: count each distinct list once per so many rows of the file, as deduplicated batches of this
                size look it up; p is then of these reads, and the table's ``dedup_factor`` stays 1.
            progress: called with (rows read, rows in all).

        Raises:
            DataError: unreadable files, a missing column, ids of another type, null or out of range, no data.
        """
        from flexshard.profiling._parquet import profile_parquet

        return profile_parquet(
            paths,
            column=column,
            num_rows=num_rows,
            hash=hash,
            sample_key=sample_key,
            holdout=holdout,
            seed=seed,
            distinct_batch=distinct_batch,
            workers=workers,
            table=column if table is None else table,
            progress=progress,
        )

    @classmethod
    def from_parquet_by(
        cls,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        column: str,
        by: str,
        num_rows: Mapping[str, int] | int | None = None,
        workers: int | None = None,
        progress: ProgressCallback | None = None,
    ) -> dict[str, AccessProfile]:
        """One profile per table from Parquet files that hold the lookups of many, told apart by the column ``by``.

        Every row of the files is a sample of every table. Raises as :meth:`from_parquet`.
        """
        from flexshard.profiling._parquet import profile_parquet_by

        return profile_parquet_by(paths, column=column, by=by, num_rows=num_rows, workers=workers, progress=progress)

    @classmethod
    def from_reuse_histogram(
        cls, path: str | os.PathLike[str], *, num_rows: int | None = None, batch: int = 0, table: str | None = None
    ) -> AccessProfile:
        """A profile from Meta's statistics of embedding lookups: shares of rows and of lookups by lookups per row.

        See :func:`flexshard.profiling.read_reuse_histogram`.
        """
        from flexshard.profiling._reuse import read_reuse_histogram

        return read_reuse_histogram(path, num_rows=num_rows, batch=batch, table=table)

    @classmethod
    def from_ray(
        cls,
        dataset: Any,
        *,
        column: str,
        num_rows: int,
        hash: str | None = None,
        table: str | None = None,
    ) -> AccessProfile:
        """A profile of a Ray dataset: partial profiles of its blocks, made where they lie, merged here.

        Every row of the dataset is a sample; samples by key and held-out samples need files (:meth:`from_parquet`).

        Raises:
            MissingDependencyError: Ray is not installed (extra "ray").
            DataError: as :meth:`from_parquet`.
        """
        from flexshard.profiling._ray import profile_ray

        return profile_ray(dataset, column=column, num_rows=num_rows, hash=hash, table=table or column)

    # -- what it says

    @cached_property
    def num_accesses(self) -> int:
        """Accesses counted."""
        return int(self.counts @ self.rows)

    @property
    def avg_length(self) -> float:
        """L: expected rows read per sample."""
        return self.num_accesses / self.num_samples

    @property
    def rows_read(self) -> int:
        """Rows that were read at all."""
        return int(self.rows.sum())

    @cached_property
    def _cumulative(self) -> tuple[IntArray, IntArray]:
        """Rows and accesses of the hottest k counts, k = 0 ... K; shape (K + 1,) each."""
        zero = np.zeros(1, np.int64)
        return (
            np.concatenate([zero, np.cumsum(self.rows)]),
            np.concatenate([zero, np.cumsum(self.rows * self.counts)]),
        )

    def covered(self, rows: float) -> float:
        """Share of the accesses that go to the hottest ``rows`` rows, in [0, 1]."""
        cumulative_rows, accesses = self._cumulative
        return float(np.interp(rows, cumulative_rows, accesses)) / self.num_accesses

    def covered_held_out(self, rows: float) -> float | None:
        """Share of the held-out accesses that go to those rows; None where no samples were held out."""
        if self.holdout is None:
            return None
        total = int(self.holdout.accesses.sum())
        cumulative_rows = np.append(self._cumulative[0], max(self.num_rows, self.rows_read))
        accesses = np.concatenate([[0], np.cumsum(self.holdout.accesses)])
        return float(np.interp(rows, cumulative_rows, accesses)) / total if total else None

    @property
    def ranked_rows(self) -> IntArray:
        """Ids of the rows that were read, by descending count, then by id; shape (rows_read,).

        Raises:
            ProfileError: the profile is a histogram and knows no ids.
        """
        return self._known_rows().ranked()[0]

    def dense_counts(self) -> IntArray:
        """Access count of every row by id; shape (num_rows,). Raises as :attr:`ranked_rows`."""
        return self._known_rows().to_dense(self.num_rows)

    def _known_rows(self) -> RowCounts:
        if self.row_counts is None:
            raise ProfileError(
                f"table {self.table!r}: this profile is a histogram and does not know which rows were read;"
                " build it from ids (from_parquet, from_counts)"
            )
        return self.row_counts

    @cached_property
    def digest(self) -> str:
        """SHA-256 of what the profile says (not of where it lies), in hexadecimal."""
        sha = hashlib.sha256()
        if self.row_counts is not None:
            sha.update(self.row_counts.digest())
        moments = (
            None if self.lengths is None else (self.lengths.total, self.lengths.total_squares, self.lengths.maximum)
        )
        sha.update(repr((self.num_rows, self.num_samples, self.counts.size, moments)).encode())
        sha.update(np.ascontiguousarray(self.counts, "<i8").data)
        sha.update(np.ascontiguousarray(self.rows, "<i8").data)
        if self.holdout is not None:
            sha.update(repr(self.holdout.num_samples).encode())
            sha.update(np.ascontiguousarray(self.holdout.accesses, "<i8").data)
        return sha.hexdigest()

    # -- what one does with it

    def __add__(self, other: AccessProfile) -> AccessProfile:
        """The profile of both data together, the same bytes as if it had been built from them at once.

        Raises:
            ProfileError: other table sizes, or only one of them with row ids, lengths or held-out samples.
        """
        from flexshard.profiling._merge import merge

        if not isinstance(other, AccessProfile):
            return NotImplemented
        return merge(self, other)

    def drift(self, other: AccessProfile, cuts: Sequence[float] = (0.0001, 0.001, 0.01, 0.1)) -> tuple[DriftPoint, ...]:
        """How much of ``other``'s accesses this profile's hottest rows still cover.

        Args:
            other: a later profile of the same table.
            cuts: shares of the table's rows.

        Raises:
            ProfileError: other table sizes, or a profile without row ids.
        """
        from flexshard.profiling._drift import drift

        return drift(self, other, cuts)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile as Parquet (docs/files.md), whole or not at all.

        Raises:
            OutputError: it could not be written.
        """
        from flexshard.profiling._file import save_profile

        save_profile(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> AccessProfile:
        """Read a profile that :meth:`save` wrote.

        Raises:
            ProfileError: not a profile, of another version, or broken; names file and column.
        """
        from flexshard.profiling._file import load_profile

        return load_profile(path)


def _check(profile: AccessProfile) -> None:
    if np.any(profile.counts[1:] >= profile.counts[:-1]) or np.any(profile.counts <= 0) or np.any(profile.rows <= 0):
        raise ProfileError("counts must strictly descend and be above 0, and so must the rows that have them")
    name = f"table {profile.table!r}: " if profile.table else ""
    if profile.num_samples < 1:
        raise ProfileError(f"{name}num_samples must be at least 1, found {profile.num_samples}; is the data empty?")
    if profile.counts.size == 0:
        raise ProfileError(
            f"{name}no row was read in {profile.num_samples:,} samples; check the column, or leave the table out"
        )
    if float(profile.counts.astype(np.float64) @ profile.rows.astype(np.float64)) >= 2**63:
        raise ProfileError(f"{name}more than 2^63 accesses; divide counts and num_samples by a common factor")
    if int(profile.rows.sum()) > profile.num_rows:
        raise ProfileError(
            f"{name}num_rows is {profile.num_rows:,}, but {int(profile.rows.sum()):,} rows were read; raise num_rows"
        )
