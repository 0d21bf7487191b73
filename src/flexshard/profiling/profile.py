"""How often each row of a table is read: the access profile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flexshard._internal import PathLike, bound, check_int
from flexshard.errors import ProfileError
from flexshard.profiling.bursts import Bursts
from flexshard.profiling.counted_accesses import CountedAccesses
from flexshard.profiling.drift_point import DriftPoint
from flexshard.profiling.histograms import checked_histogram, counts_of_probabilities
from flexshard.profiling.holdout import Holdout
from flexshard.profiling.moments import LengthMoments
from flexshard.profiling.row_counts import RowCounts, check_index, checked_whole, histogram

__all__ = ["AccessProfile"]

Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False, repr=False)
class AccessProfile(CountedAccesses):
    """How often each row of a table is read, in frequency-of-frequency form.

    Rows of equal count are interchangeable, so a profile is the distinct counts and how many rows have each (K
    pairs). Which rows those are is known where the profile was built from ids (:attr:`ranked_rows`). Its fields are
    those of :class:`CountedAccesses`.

    Raises:
        ProfileError: the fields contradict each other.
    """

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
            counts: number of accesses of row 0, 1, ...; shape (rows,), whole numbers of at least 0. A pandas Series
                has to be indexed so.
            num_samples: samples in which they were counted.
            num_rows: rows of the table, where it has more than ``counts`` (the others are never read).
            lengths: moments of the number of ids per sample, for memory quantiles.
            table: name, for messages.

        Raises:
            ProfileError: NaN, negative or fractional counts, no accesses, no samples, or fewer rows than counts.
        """
        check_index(counts)
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
        values, numbers, given_rows = checked_histogram(counts, rows)
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
        counts, numbers, samples = counts_of_probabilities(probabilities, rows, table)
        return cls.from_histogram(
            counts, numbers, samples, int(numbers.sum()) if num_rows is None else num_rows, table=table
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
        samples: RowCounts | None = None,
        holdout: Holdout | None = None,
        table: str = "",
        path: str | None = None,
        sample_key: str | None = None,
        sample_keys: Any = None,
        bursts: Bursts | None = None,
    ) -> AccessProfile:
        """A profile whose row ids are known; ``held`` are the counts of the same rows in held-out samples, and
        ``holdout`` says which samples those are (its ``accesses`` are found here); ``samples`` how many samples contain
        each row, where that is not its count.
        """
        counts, rows = histogram(row_counts.counts)
        num_rows = check_int(num_rows, "num_rows", ProfileError, least=0)
        if row_counts.size > num_rows:
            raise ProfileError(f"table {table!r}: num_rows is {num_rows}, but counts are given for {row_counts.size}")
        if held is not None and holdout is not None:
            holdout = replace(holdout, accesses=row_counts.accesses_by_count(held, counts))
            row_counts = replace(row_counts, held=held)
        containing = None
        if samples is not None:
            containing = row_counts.accesses_by_count(samples, counts)[:-1]
            if np.array_equal(containing, counts * rows):  # nothing repeats
                samples = containing = None
            row_counts = replace(row_counts, samples=samples)
        return cls(
            counts,
            rows,
            num_rows,
            num_samples,
            lengths,
            holdout,
            table,
            path,
            sample_key,
            row_counts,
            sample_keys,
            samples=containing,
            bursts=bursts,
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
        make = bound("flexshard.profiling", "AccessProfile.from_ids")
        profile: AccessProfile = make(ids, lengths, num_rows=num_rows, hash=hash, table=table)
        return replace(profile, hash=hash)

    @classmethod
    def from_parquet(
        cls,
        paths: PathLike | Sequence[PathLike],
        *,
        column: str,
        num_rows: int | None = None,
        hash: str | None = None,
        mapping: PathLike | None = None,
        unknown: str = "error",
        sample_key: str | None = None,
        holdout: float = 0.0,
        seed: int = 0,
        workers: int | None = None,
        table: str | None = None,
        distinct_batch: int | None = None,
        progress: Progress | None = None,
    ) -> AccessProfile:
        """A profile from Parquet files, streamed: memory is bounded by ``num_rows``, not by the data.

        Args:
            paths: files, globs, folders, or URLs (s3://, gs://, or any that fsspec knows).
            column: a column of integers (one id per row of the file) or of lists of integers. A null list is an
                empty one; a null id is an error.
            num_rows: rows of the table; by default one above the largest id, which is then found on the way.
            hash: "splitmix64" to fold raw 64-bit ids into ``num_rows``.
            mapping: file that :func:`flexshard.profiling.encode` saved, by which values of any kind are mapped to rows;
                data may be CSV or JSON then.
            unknown: what becomes of values that the mapping has not: "error", or "drop" to leave them out.
            sample_key: column whose distinct values are the samples (a session, a user); by default a sample is a
                row of the file. Lengths per key are kept in memory while counting.
            holdout: share of the samples to keep unseen, by a hash of their key or row, and to measure on.
            seed: of that hash.
            workers: files or row groups decoded at once; by default the number of processors, at most 8.
            table: name of the profile; the column's by default.
            distinct_batch: count each distinct list once per so many rows of the file, as deduplicated batches of this
                size look it up; p is then of these reads, and the table's ``dedup_factor`` stays 1.
            progress: called with (rows read, rows in all).

        Raises:
            DataError: unreadable files, a missing column, ids of another type, null or out of range, no data.
        """
        profile: AccessProfile = bound("flexshard.profiling", "AccessProfile.from_parquet")(
            paths,
            column=column,
            num_rows=num_rows,
            hash=hash,
            mapping=mapping,
            unknown=unknown,
            sample_key=sample_key,
            holdout=holdout,
            seed=seed,
            distinct_batch=distinct_batch,
            workers=workers,
            table=column if table is None else table,
            progress=progress,
        )
        mapped = None if mapping is None else str(Path(mapping).absolute())
        return replace(profile, hash=hash, mapping=mapped, distinct_batch=distinct_batch)

    @classmethod
    def from_frame(
        cls, frame: Any, *, column: str, num_rows: int | None = None, hash: str | None = None, table: str | None = None
    ) -> AccessProfile:
        """A profile of a column of a pandas, polars or Arrow table: ids, or lists of ids, one row a sample.

        Whole numbers that pandas made floats are ids again; an id that is null is an error, a list that is null empty.

        Raises:
            DataError: as :meth:`from_parquet`.
        """
        make = bound("flexshard.profiling", "AccessProfile.from_frame")
        profile: AccessProfile = make(frame, column=column, num_rows=num_rows, hash=hash, table=table or column)
        return replace(profile, hash=hash)

    def to_frame(self) -> Any:
        """An Arrow table of rows by how often they are read, hottest first: ``position``, ``row`` (null where only
        counts are known), ``count`` and ``reads_per_sample``; ``.to_pandas()`` makes a pandas one. Rows that are never
        read are left out.
        """
        return bound("flexshard.profiling", "AccessProfile.to_frame")(self)

    @classmethod
    def from_parquet_by(
        cls,
        paths: PathLike | Sequence[PathLike],
        *,
        column: str,
        by: str,
        num_rows: Mapping[str, int] | int | None = None,
        hash: str | None = None,
        sample_key: str | None = None,
        holdout: float = 0.0,
        seed: int = 0,
        workers: int | None = None,
        progress: Progress | None = None,
    ) -> dict[str, AccessProfile]:
        """One profile per table from Parquet files that hold the lookups of many, told apart by the column ``by``.

        Every row of the files, or every value of ``sample_key``, is a sample of every table. Other arguments and errors
        are as of :meth:`from_parquet`.
        """
        make = bound("flexshard.profiling", "AccessProfile.from_parquet_by")
        profiles: dict[str, AccessProfile] = make(
            paths,
            column=column,
            by=by,
            num_rows=num_rows,
            hash=hash,
            sample_key=sample_key,
            holdout=holdout,
            seed=seed,
            workers=workers,
            progress=progress,
        )
        return {name: replace(profile, hash=hash) for name, profile in profiles.items()}

    @classmethod
    def from_reuse_histogram(
        cls, path: PathLike, *, num_rows: int | None = None, batch: int = 0, table: str | None = None
    ) -> AccessProfile:
        """A profile from Meta's statistics of embedding lookups: shares of rows and of lookups by lookups per row.

        See :func:`flexshard.profiling.read_reuse_histogram`.
        """
        make = bound("flexshard.profiling", "AccessProfile.from_reuse_histogram")
        profile: AccessProfile = make(path, num_rows=num_rows, batch=batch, table=table)
        return profile

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

        Every row of the dataset is a sample; samples by key and held-out samples need files (:meth:`from_parquet`), and
        so do bursts, which are of an order.

        Raises:
            MissingDependencyError: Ray is not installed (extra "ray").
            DataError: as :meth:`from_parquet`.
        """
        make = bound("flexshard.profiling", "AccessProfile.from_ray")
        profile: AccessProfile = make(dataset, column=column, num_rows=num_rows, hash=hash, table=table or column)
        return replace(profile, hash=hash)

    # -- what one does with it

    def __add__(self, other: AccessProfile) -> AccessProfile:
        """The profile of both data together, the same bytes as if it had been built from them at once.

        Raises:
            ProfileError: other table sizes, or only one of them with row ids, lengths or held-out samples.
        """
        if not isinstance(other, AccessProfile):
            return NotImplemented
        both: AccessProfile = bound("flexshard.profiling", "AccessProfile.__add__")(self, other)
        return both

    def drift(self, other: AccessProfile, cuts: Sequence[float] = (0.0001, 0.001, 0.01, 0.1)) -> tuple[DriftPoint, ...]:
        """How much of ``other``'s accesses this profile's hottest rows still cover.

        Args:
            other: a later profile of the same table.
            cuts: shares of the table's rows.

        Raises:
            ProfileError: other table sizes, a profile without row ids, or ids that were mapped or hashed otherwise.
        """
        points: tuple[DriftPoint, ...] = bound("flexshard.profiling", "AccessProfile.drift")(self, other, cuts)
        return points

    def save(self, path: PathLike) -> None:
        """Write the profile as Parquet (docs/files.md), whole or not at all.

        Raises:
            OutputError: it could not be written.
        """
        bound("flexshard.profiling", "AccessProfile.save")(self, path)

    @classmethod
    def load(cls, path: PathLike) -> AccessProfile:
        """Read a profile that :meth:`save` wrote.

        Raises:
            ProfileError: not a profile, of another version, or broken; names file and column.
        """
        profile: AccessProfile = bound("flexshard.profiling", "AccessProfile.load")(path)
        return profile
