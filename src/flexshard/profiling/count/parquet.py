"""Profiles of Parquet files: batches in, one :class:`AccessProfile` out."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import PurePath

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from flexshard._internal import Chunk, ParquetSource, PathLike, check_finite, check_int, expand, read_chunks
from flexshard.errors import DataError
from flexshard.profiling.count.burst_counter import BurstCounter
from flexshard.profiling.count.counter import IdCounter
from flexshard.profiling.count.id_batches import DistinctBatches, IdBatch, check_column, key_array, key_kind, read_ids
from flexshard.profiling.count.keyed_lengths import KeyedLengths, held_out
from flexshard.profiling.encoding.encoded_by import encoded_by as digest_of_sources
from flexshard.profiling.encoding.encoding import encoded
from flexshard.profiling.encoding.mapping import load_mapping
from flexshard.profiling.hashing import check_hash, hash_to_rows
from flexshard.profiling.holdout import Holdout
from flexshard.profiling.moments import LengthMoments
from flexshard.profiling.profile import AccessProfile

__all__ = [
    "ProgressCallback",
    "check_holdout",
    "check_keys",
    "checked_sources",
    "chunks_with_progress",
    "columns_of",
    "profile_parquet",
    "read_samples",
    "sample_ids",
]

ProgressCallback = Callable[[int, int], None]


def profile_parquet(
    paths: PathLike | Sequence[PathLike],
    *,
    column: str,
    num_rows: int | None,
    hash: str | None,
    mapping: PathLike | None,
    unknown: str,
    sample_key: str | None,
    holdout: float,
    seed: int,
    workers: int | None,
    table: str,
    distinct_batch: int | None,
    progress: ProgressCallback | None,
) -> AccessProfile:
    """See :meth:`AccessProfile.from_parquet`."""
    if mapping is not None:
        if hash is not None:
            raise DataError("ids are mapped to rows or hashed to them, not both; leave out mapping or hash")
        rows_of_mapping = load_mapping(mapping).rows
        with encoded(paths, column, mapping, unknown=unknown) as path:
            return profile_parquet(
                path,
                column=column,
                num_rows=rows_of_mapping if num_rows is None else num_rows,
                hash=None,
                mapping=None,
                unknown="error",
                sample_key=sample_key,
                holdout=holdout,
                seed=seed,
                workers=workers,
                table=table,
                distinct_batch=distinct_batch,
                progress=progress,
            )
    _check_unknown(unknown)
    holdout, seed = check_holdout(holdout, seed)
    if workers is not None:
        workers = check_int(workers, "workers", DataError)
    if distinct_batch is not None:
        distinct_batch = check_int(distinct_batch, "distinct_batch", DataError)
        if sample_key is not None or holdout:
            raise DataError("distinct_batch counts rows of the file; it does not go with sample_key or holdout")
    sources = checked_sources(paths, column)
    by = digest_of_sources(sources, column)
    columns = [column] if sample_key in (None, column) else [column, str(sample_key)]
    if sample_key is not None:
        check_keys(sources, sample_key)
    counter = IdCounter(table, num_rows, hash)
    held = np.zeros(counter.counts.size, np.int64) if holdout else None
    seen, unseen = LengthMoments(), LengthMoments()
    keyed = KeyedLengths(holdout, seed) if sample_key is not None else None
    distinct, bursts = DistinctBatches(distinct_batch or 1), BurstCounter()

    def note(batch: IdBatch, rows: npt.NDArray[np.int64] | None) -> None:
        if rows is not None and sample_key is None:  # rows of a key may lie far apart
            bursts.add(batch.name, rows, batch.lengths)

    for chunk in chunks_with_progress(sources, columns, workers, progress):
        batch = read_ids(chunk, column)
        if distinct_batch is not None:
            for part in distinct.add(batch):
                note(part, counter.add(part))
                seen += part.moments()
            continue
        of_ids = None
        if held is None:
            rows = counter.add(batch)
            seen += batch.moments()
        else:
            apart = held_out(sample_ids(chunk, sample_key), holdout, seed)
            of_ids = apart if batch.lengths is None else np.repeat(apart, batch.lengths)
            rows, held = counter.add_apart(batch, held, of_ids)
            seen += batch.moments(~apart)
            unseen += batch.moments(apart)
        if keyed is not None and sample_key is not None:
            keyed.add(key_array(chunk, sample_key), batch.lengths, rows, of_ids)
        note(batch, rows)
    for part in distinct.rest():
        note(part, counter.add(part))
        seen += part.moments()
    if keyed is not None:  # a sample may be spread over many rows of the files
        seen, unseen = keyed.moments()
    which = None if held is None else Holdout(unseen.num_samples, np.zeros(0, np.int64), holdout, seed)
    profile = counter.profile(
        seen,
        held=held,
        holdout=which,
        sample_key=sample_key,
        sample_keys=keyed,
        bursts=bursts if sample_key is None else None,
    )
    return replace(profile, encoded_by=by)


def check_holdout(holdout: float, seed: int) -> tuple[float, int]:
    """A share of samples to hold out, and its seed; raises DataError."""
    holdout, seed = check_finite(holdout, "holdout", DataError), check_int(seed, "seed", DataError, least=0)
    if not 0 <= holdout < 1:
        raise DataError(f"holdout is a share of the samples, at least 0 and below 1; found {holdout}")
    return holdout, seed


def check_keys(sources: Sequence[ParquetSource], column: str) -> None:
    """Check that a column of keys is of one kind in all files; raises DataError."""
    kinds: dict[str, str] = {}
    for source in sources:
        check_column(source, column, role="key")
        kind = key_kind(source, column)
        if kind is not None:
            kinds.setdefault(kind, source.name)
    if len(kinds) > 1:
        (kind, name), (other, file) = list(kinds.items())[:2]
        raise DataError(f"column {column!r} holds {kind} in {name}, but {other} in {file}; write them alike")


def checked_sources(paths: PathLike | Sequence[PathLike], column: str) -> list[ParquetSource]:
    """Files with a column of ids, and rows; raises DataError."""
    sources = expand(paths)
    for source in sources:
        check_column(source, column)
    if not sum(source.num_rows for source in sources):
        raise DataError(f"{sources[0].name}: no rows in {len(sources)} file(s); there is nothing to count")
    return [source for source in sources if source.num_rows]  # a day without samples, whose types say nothing


def chunks_with_progress(
    sources: Sequence[ParquetSource], columns: Sequence[str], workers: int | None, progress: ProgressCallback | None
) -> Iterator[Chunk]:
    """Chunks of all files, with a call of ``progress`` after each has been used."""
    total, done = sum(source.num_rows for source in sources), 0
    for chunk in read_chunks(sources, columns, workers or min(8, os.cpu_count() or 1)):
        yield chunk
        done += chunk.table.num_rows
        if progress is not None:
            progress(done, total)


def sample_ids(chunk: Chunk, sample_key: str | None) -> pa.ChunkedArray | npt.NDArray[np.uint64]:
    """What tells a chunk's samples apart: their keys, or the file's name and their row in it."""
    if sample_key is not None:
        return key_array(chunk, sample_key)
    rows = np.arange(chunk.first_row, chunk.first_row + chunk.table.num_rows, dtype=np.uint64)
    return rows + (np.uint64(zlib.crc32(PurePath(chunk.source.name).name.encode())) << np.uint64(32))


def _check_unknown(unknown: str) -> None:
    """Whether it is left at its default, where there is no mapping."""
    if unknown != "error":
        raise DataError(f"unknown={unknown!r} is of values that a mapping has not; give mapping, or leave it out")


def read_samples(
    paths: PathLike | Sequence[PathLike],
    column: str,
    *,
    limit: int | None = None,
    sample_key: str | None = None,
    hash: str | None = None,
    mapping: PathLike | None = None,
    unknown: str = "error",
    num_rows: int | None = None,
    encoded_by: str | None = None,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Ids of consecutive samples, and how many each sample has.

    Args:
        paths, column, sample_key, hash, mapping, unknown, num_rows: as for :meth:`AccessProfile.from_parquet`. Samples
            by key come in the order in which their keys first do, and all of the files is read for them.
        limit: most samples to read.
        encoded_by: digest of the mapping that ids have to be of, as a profile's; not checked where files do not say.

    Returns:
        ids, shape (accesses,), and lengths, shape (samples,).

    Raises:
        DataError: as :meth:`AccessProfile.from_parquet`.
    """
    check_hash(hash, num_rows)
    if mapping is not None:
        with encoded(paths, column, mapping, unknown=unknown) as path:
            return read_samples(path, column, limit=limit, sample_key=sample_key, encoded_by=encoded_by)
    _check_unknown(unknown)
    sources = checked_sources(paths, column)
    by = digest_of_sources(sources, column)
    if None not in (by, encoded_by) and by != encoded_by:
        raise DataError(
            f"{sources[0].name}: ids of column {column!r} were encoded by another mapping than those of the profile;"
            " encode the data with the profile's (flexshard encode --mapping)"
        )
    if sample_key is not None:
        check_keys(sources, sample_key)
    ids, lengths, keys, number = [], [], [], 0
    for chunk in read_chunks(sources, [column, *([] if sample_key is None else [sample_key])], 1):
        batch = read_ids(chunk, column)
        sample_lengths = (
            np.ones(batch.num_samples, np.int64) if batch.lengths is None else batch.lengths.astype(np.int64)
        )
        keep = sample_lengths.size
        if sample_key is not None:
            keys.append(key_array(chunk, sample_key))
        elif limit is not None:
            keep = min(keep, limit - number)
        lengths.append(sample_lengths[:keep])
        taken = batch.ids[: int(sample_lengths[:keep].sum())]
        ids.append(taken.astype(np.int64) if hash is None else hash_to_rows(taken, num_rows or 1))
        number += keep
        if number == limit and sample_key is None:
            break
    all_ids = np.concatenate(ids or [np.zeros(0, np.int64)])
    all_lengths = np.concatenate(lengths or [np.zeros(0, np.int64)])
    if sample_key is None:
        return all_ids, all_lengths
    return _by_key(all_ids, all_lengths, pa.chunked_array([part for key in keys for part in key.chunks]), limit)


def columns_of(paths: PathLike | Sequence[PathLike]) -> list[str]:
    """Names of the columns of Parquet files; raises DataError where they cannot be read."""
    return list(expand(paths)[0].schema.names)


def _by_key(
    ids: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], keys: pa.ChunkedArray, limit: int | None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Rows' ids put together by the rows' keys, in the order in which keys first appear."""
    codes = pc.dictionary_encode(keys).combine_chunks().indices.to_numpy()
    order = np.argsort(codes, kind="stable")
    per_sample = np.bincount(codes, weights=lengths).astype(np.int64)
    first = np.cumsum(lengths) - lengths
    starts = np.repeat(first[order] - (np.cumsum(lengths[order]) - lengths[order]), lengths[order])
    gathered = ids[starts + np.arange(len(ids))]
    kept = per_sample[:limit]
    return gathered[: int(kept.sum())], kept
