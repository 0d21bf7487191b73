"""Profiles of many tables at once, from files in which one column names the table of each row."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from flexshard._internal import PathLike
from flexshard.errors import DataError
from flexshard.profiling.count.counter import IdCounter
from flexshard.profiling.count.id_batches import IdBatch, key_array, read_ids
from flexshard.profiling.count.keyed_lengths import KeyedLengths, held_out
from flexshard.profiling.count.parquet import (
    ProgressCallback,
    check_holdout,
    check_keys,
    checked_sources,
    chunks_with_progress,
    sample_ids,
)
from flexshard.profiling.encoding.encoded_by import encoded_by
from flexshard.profiling.holdout import Holdout
from flexshard.profiling.moments import LengthMoments
from flexshard.profiling.profile import AccessProfile

__all__ = ["profile_parquet_by"]


@dataclass
class _Counted:
    """What one table has been read, so far."""

    counter: IdCounter
    keyed: KeyedLengths | None
    held: npt.NDArray[np.int64] | None
    seen: LengthMoments = field(default_factory=LengthMoments)  # of rows of the files that are the table's
    unseen: LengthMoments = field(default_factory=LengthMoments)

    def add(self, batch: IdBatch, apart: npt.NDArray[np.bool_] | None, keys: pa.ChunkedArray | None) -> None:
        """Count some rows, of one id each."""
        if self.held is None or apart is None:
            rows, unseen = self.counter.add(batch), 0
        else:
            rows, self.held = self.counter.add_apart(batch, self.held, apart)
            unseen = int(np.count_nonzero(apart))
        self.seen += _of_one(batch.ids.size - unseen)
        self.unseen += _of_one(unseen)
        if self.keyed is not None and keys is not None:
            self.keyed.add(keys, None, rows, apart)

    @property
    def is_unseen(self) -> bool:
        """Whether all ids were held out."""
        return not self.seen.total and bool(self.unseen.total)

    def profile(
        self,
        rows: int,
        rows_apart: int,
        everybody: KeyedLengths | None,
        sample_key: str | None,
        holdout: Holdout | None,
    ) -> AccessProfile:
        """The table's. Samples are all rows of the files, or all keys, whether they have ids of the table or not."""
        seen = self.seen + LengthMoments(rows - self.seen.num_samples)
        unseen = self.unseen + LengthMoments(rows_apart - self.unseen.num_samples)
        keyed = None
        if self.keyed is not None and everybody is not None:
            keyed = self.keyed.merged(everybody)
            seen, unseen = keyed.moments()
        which = None if holdout is None else replace(holdout, num_samples=unseen.num_samples)
        return self.counter.profile(seen, held=self.held, holdout=which, sample_key=sample_key, sample_keys=keyed)


def profile_parquet_by(
    paths: PathLike | Sequence[PathLike],
    *,
    column: str,
    by: str,
    num_rows: Mapping[str, int] | int | None,
    hash: str | None,
    sample_key: str | None,
    holdout: float,
    seed: int,
    workers: int | None,
    progress: ProgressCallback | None,
) -> dict[str, AccessProfile]:
    """See :meth:`AccessProfile.from_parquet_by`."""
    holdout, seed = check_holdout(holdout, seed)
    sources = checked_sources(paths, column)
    digest = encoded_by(sources, column)
    key_columns = [by] if sample_key is None else [by, sample_key]
    for name in key_columns:
        check_keys(sources, name)
    tables: dict[str, _Counted] = {}
    everybody = None if sample_key is None else KeyedLengths(holdout, seed)
    keys_of: dict[str, object] = {}
    rows = rows_apart = 0
    columns = list(dict.fromkeys([column, *key_columns]))
    for chunk in chunks_with_progress(sources, columns, workers, progress):
        batch = read_ids(chunk, column)
        if batch.lengths is not None:
            raise DataError(
                f"{batch.name}: column {column!r} holds lists; told apart by {by!r}, ids must be one per row"
            )
        names = pc.dictionary_encode(key_array(chunk, by, "column of tables (by)")).combine_chunks()
        apart = held_out(sample_ids(chunk, sample_key), holdout, seed) if holdout else None
        keys = None if sample_key is None else key_array(chunk, sample_key)
        if everybody is not None and keys is not None:
            everybody.add(keys, np.zeros(len(keys), np.int64), None)
        unseen = 0 if apart is None else int(np.count_nonzero(apart))
        rows, rows_apart = rows + batch.ids.size - unseen, rows_apart + unseen
        for key, chosen in _apart(names):
            name = _text(key)
            if keys_of.setdefault(name, key) != key:
                raise DataError(f"column {by!r} has two tables that are written {name!r}; give one another name")
            if name not in tables:
                limit = num_rows.get(name) if isinstance(num_rows, Mapping) else num_rows
                counter = IdCounter(name, limit, hash)
                held = np.zeros(counter.counts.size, np.int64) if holdout else None
                tables[name] = _Counted(counter, None if everybody is None else KeyedLengths(holdout, seed), held)
            tables[name].add(
                IdBatch(batch.ids[chosen], None, batch.name, batch.first_row, chosen),
                None if apart is None else apart[chosen],
                None if keys is None else keys.take(pa.array(chosen)),
            )
    which = Holdout(0, np.zeros(0, np.int64), holdout, seed) if holdout else None
    for name in [name for name, one in tables.items() if one.is_unseen]:
        del tables[name]
        warnings.warn(f"table {name!r} is left out: all that reads it was held out", stacklevel=3)
    return {
        name: replace(tables[name].profile(rows, rows_apart, everybody, sample_key, which), encoded_by=digest)
        for name in sorted(tables, key=_natural)
    }


def _apart(names: pa.DictionaryArray) -> Iterator[tuple[object, npt.NDArray[np.int64]]]:
    """Each table's key, and its rows in order."""
    codes = names.indices.to_numpy()
    order = np.argsort(codes, kind="stable")
    ends = np.searchsorted(codes[order], np.arange(len(names.dictionary)), side="right")
    start = 0
    for code, end in enumerate(ends.tolist()):
        yield names.dictionary[code].as_py(), order[start:end]
        start = end


def _of_one(rows: int) -> LengthMoments:
    return LengthMoments(rows, rows, rows, 1 if rows else 0)


def _text(key: object) -> str:
    return key.decode(errors="backslashreplace") if isinstance(key, bytes) else str(key)


def _natural(name: str) -> tuple[int, int, str]:
    """Numbers in order, then texts."""
    digits = name.lstrip("0")
    return (0, len(digits), digits) if name.isdecimal() else (1, 0, name)
