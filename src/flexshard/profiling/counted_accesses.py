"""What an access profile holds, and what it says of a table."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from flexshard._internal import check_finite, check_int
from flexshard.errors import ProfileError
from flexshard.profiling.bursts import Bursts
from flexshard.profiling.holdout import Holdout
from flexshard.profiling.moments import LengthMoments
from flexshard.profiling.row_counts import RowCounts

__all__ = ["CountedAccesses"]

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class CountedAccesses:
    """How often each row of a table is read, in frequency-of-frequency form: what a profile holds and says.

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
        hash: how raw ids were folded into the table; None where ids are rows.
        mapping: file by which values were mapped to rows, as :func:`flexshard.profiling.encode` saves it; None where
            ids are rows.
        encoded_by: digest of the mapping that numbered the values, if the data say so.
        samples: how many samples contain the rows of each count, summed over these rows; shape (K,). None where no
            sample reads a row twice, or where that is not known and taken to be so.
        bursts: the hottest rows of consecutive samples; None where their order is not known.
        distinct_batch: rows of the file in which each distinct list was counted once; None where every one counts.

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
    hash: str | None = None
    mapping: str | None = None
    samples: IntArray | None = None
    bursts: Bursts | None = field(default=None, repr=False)
    distinct_batch: int | None = None
    encoded_by: str | None = None

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(table={self.table!r}, num_rows={self.num_rows:,}, rows_read={self.rows_read:,},"
            f" distinct_counts={self.counts.size:,}, num_samples={self.num_samples:,},"
            f" avg_length={self.avg_length:.6g})"
        )

    def __post_init__(self) -> None:
        if not isinstance(self.table, str):
            raise ProfileError(f"table is the name of a profile, a text, found {self.table!r}")
        for name in ("num_rows", "num_samples"):
            where = f"table {self.table!r}: {name}" if self.table else name
            object.__setattr__(self, name, check_int(getattr(self, name), where, ProfileError, least=0))
        _check(self)
        for array in (self.counts, self.rows):
            array.flags.writeable = False

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

    @cached_property
    def sample_share(self) -> npt.NDArray[np.float64]:
        """c: share of the samples that contain a row, on average over the rows of each count; shape (K,). Below
        :attr:`counts` / :attr:`num_samples` where samples repeat rows.
        """
        if self.samples is None:
            return np.minimum(self.counts / self.num_samples, 1.0)
        return self.samples / (self.rows * float(self.num_samples))

    def covered(self, rows: float) -> float:
        """Share of the accesses that go to the hottest ``rows`` rows, in [0, 1]; raises ProfileError for no number."""
        rows = check_finite(rows, "rows", ProfileError)
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

    def hottest_rows(self, number: int) -> IntArray:
        """The first of :attr:`ranked_rows`, without ranking the others; shape (number,) or fewer."""
        within = int(np.searchsorted(self._cumulative[0], number, side="right")) - 1
        return self._known_rows().hottest(number, int(self.counts[within]) if within < self.counts.size else 1)

    def dense_counts(self) -> IntArray:
        """Access count of every row by id; shape (num_rows,). Raises as :attr:`ranked_rows`."""
        return self._known_rows().to_dense(self.num_rows)

    def share_in_blocks(self, block: int, number: int) -> npt.NDArray[np.float64]:
        """Share of the accesses that go to each of the first ``number`` blocks of so many consecutive rows; shape
        (number,). Raises as :attr:`ranked_rows`.
        """
        return np.asarray(self._known_rows().in_blocks(block, number) / self.num_accesses)

    def _known_rows(self) -> RowCounts:
        if self.row_counts is None:
            raise ProfileError(
                f"table {self.table!r}: this profile is a histogram and does not know which rows were read;"
                " build it from ids (from_parquet, from_counts)"
            )
        return self.row_counts

    @cached_property
    def digest(self) -> str:
        """SHA-256 of what the profile says of rows and lengths (not of where it lies, nor of the order of samples), in
        hexadecimal.
        """
        sha = hashlib.sha256()
        if self.row_counts is not None:
            sha.update(self.row_counts.digest())
        moments = (
            None if self.lengths is None else (self.lengths.total, self.lengths.total_squares, self.lengths.maximum)
        )
        sha.update(repr((self.num_rows, self.num_samples, self.counts.size, moments)).encode())
        sha.update(np.ascontiguousarray(self.counts, "<i8").data)
        sha.update(np.ascontiguousarray(self.rows, "<i8").data)
        if self.samples is not None:
            sha.update(b"samples")
            sha.update(np.ascontiguousarray(self.samples, "<i8").data)
        if self.holdout is not None:
            sha.update(repr(self.holdout.num_samples).encode())
            sha.update(np.ascontiguousarray(self.holdout.accesses, "<i8").data)
        return sha.hexdigest()


def _check(profile: CountedAccesses) -> None:
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
    samples = profile.samples
    if samples is not None:
        if samples.shape != profile.counts.shape:
            raise ProfileError(f"{name}samples must be given for each of the {profile.counts.size} distinct counts")
        most = np.minimum(profile.counts, profile.num_samples)
        wrong = np.flatnonzero((samples < profile.rows) | (samples.astype(np.float64) / profile.rows > most))
        if wrong.size:
            at = int(wrong[0])
            raise ProfileError(
                f"{name}{samples[at]:,} samples cannot contain {profile.rows[at]:,} rows of count"
                f" {profile.counts[at]:,} in {profile.num_samples:,} samples"
            )
    if int(profile.rows.sum()) > profile.num_rows:
        raise ProfileError(
            f"{name}num_rows is {profile.num_rows:,}, but {int(profile.rows.sum()):,} rows were read; raise num_rows"
        )
