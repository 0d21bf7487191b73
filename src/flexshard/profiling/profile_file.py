"""Profile files: Parquet that any tool reads, with what the counts mean in its key-value metadata."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from flexshard._internal import DocumentFormat, PathLike, checked_path, first_line, replacing
from flexshard.errors import ProfileError
from flexshard.profiling.bursts import Bursts
from flexshard.profiling.hashing import HASHES
from flexshard.profiling.holdout import Holdout
from flexshard.profiling.moments import LENGTH_BINS, LengthMoments
from flexshard.profiling.profile import AccessProfile
from flexshard.profiling.row_counts import RowCounts

__all__ = ["load_profile", "load_ranking", "save_profile"]

IntArray = npt.NDArray[np.int64]

FORMAT = DocumentFormat(
    "flexshard.profile", 1, "a profile", "profiles", ProfileError, "build one with 'flexshard profile'"
)
_BATCH = 1 << 20


def save_profile(profile: AccessProfile, path: PathLike) -> None:
    """See :meth:`AccessProfile.save`.

    Profiles that know their rows have the columns ``row`` and ``count`` (and ``held_out``), hottest first; rows that
    were never read are left out. Histograms have ``count`` and ``rows`` instead. ``samples`` is there where samples
    repeat rows.
    """
    if profile.row_counts is None:
        columns = {"count": profile.counts, "rows": profile.rows}
        if profile.samples is not None:
            columns["samples"] = profile.samples
    else:
        rows, counts = profile.row_counts.ranked()
        columns = {"row": rows, "count": counts}
        if profile.row_counts.held is not None:
            held = profile.row_counts.held.to_dense(profile.num_rows)
            unseen = np.setdiff1d(np.flatnonzero(held), rows)
            rows = np.concatenate([rows, unseen])
            counts = np.concatenate([counts, np.zeros(unseen.size, np.int64)])
            columns = {"row": rows, "count": counts, "held_out": held[rows]}
        if profile.row_counts.samples is not None:
            columns["samples"] = profile.row_counts.samples.to_dense(profile.num_rows)[rows]
    folder = Path(path).absolute().parent
    schema = pa.schema(
        [(name, pa.int64()) for name in columns], metadata=FORMAT.to_metadata(_metadata(profile, folder))
    )
    with (
        replacing(path) as temporary,
        pq.ParquetWriter(temporary, schema, compression="zstd", write_page_checksum=True) as writer,
    ):
        writer.write_table(pa.table(columns, schema=schema), row_group_size=_BATCH)


def _metadata(profile: AccessProfile, folder: Path) -> dict[str, Any]:
    lengths = profile.lengths
    return {
        "table": profile.table,
        "num_rows": profile.num_rows,
        "num_samples": profile.num_samples,
        "num_accesses": profile.num_accesses,
        "length_total": None if lengths is None else lengths.total,
        "length_total_squares": None if lengths is None else lengths.total_squares,
        "length_maximum": None if lengths is None else lengths.maximum,
        **({} if lengths is None or lengths.histogram is None else {"length_histogram": lengths.histogram}),
        "sample_key": profile.sample_key,
        "held_out_samples": None if profile.holdout is None else profile.holdout.num_samples,
        "held_out_share": None if profile.holdout is None else profile.holdout.share,
        "held_out_seed": None if profile.holdout is None else profile.holdout.seed,
        **({} if profile.hash is None else {"hash": profile.hash}),
        **({} if profile.mapping is None else {"mapping": os.path.relpath(profile.mapping, folder)}),
        **({} if profile.encoded_by is None else {"encoded_by": profile.encoded_by}),
        **({} if profile.distinct_batch is None else {"distinct_batch": profile.distinct_batch}),
        **({} if profile.bursts is None else {"bursts": profile.bursts.encoded()}),
        "digest": profile.digest,
    }


def load_profile(path: PathLike) -> AccessProfile:
    """See :meth:`AccessProfile.load`."""
    name = checked_path(path, ProfileError)
    table, meta = _read(name)
    columns = {field: _column(name, table, field) for field in table.column_names}
    if set(columns) - {"samples"} not in ({"row", "count"}, {"row", "count", "held_out"}, {"count", "rows"}):
        raise ProfileError(f"{name}: expected the columns row and count, or count and rows; found {', '.join(columns)}")
    counts = columns["count"]
    _ordered(name, counts)
    lengths = None
    moments: list[Any] = [meta[field] for field in ("length_total", "length_total_squares", "length_maximum")]
    if any(moment is not None for moment in moments):
        if None in moments or moments[0] != meta["num_accesses"] or min(moments) < 0:
            raise ProfileError(f"{name}: metadata of lengths contradict each other; build the profile again")
        lengths = LengthMoments(meta["num_samples"], moments[0], moments[1], moments[2], _length_histogram(name, meta))
    try:
        if "rows" in columns:
            profile = AccessProfile(
                counts,
                columns["rows"],
                meta["num_rows"],
                meta["num_samples"],
                lengths,
                table=meta["table"],
                path=name,
                samples=columns.get("samples"),
            )
        else:
            profile = _with_rows(name, columns, meta, lengths)
    except ProfileError as error:
        raise error if str(error).startswith(name) else ProfileError(f"{name}: {error}") from None
    if profile.num_accesses != meta["num_accesses"]:
        raise ProfileError(
            f"{name}: counts add up to {profile.num_accesses:,}, but its metadata says {meta['num_accesses']:,};"
            " build the profile again"
        )
    if meta["digest"] not in (None, profile.digest):
        raise ProfileError(f"{name}: its rows and counts are not those of its metadata; build the profile again")
    mapping = meta["mapping"]
    if mapping is not None:
        mapping = os.path.normpath(Path(name).absolute().parent / mapping)
    how = {field: meta[field] for field in ("hash", "distinct_batch", "encoded_by")}
    return replace(profile, **how, mapping=mapping, bursts=_bursts(name, meta))


def _length_histogram(name: str, meta: dict[str, Any]) -> tuple[tuple[int, int, int], ...] | None:
    given = meta["length_histogram"]
    if given is None:
        return None
    try:
        bins = np.array(given, np.int64).reshape(-1, 3)
        whole = all(type(number) is int for one in given for number in one)
    except (TypeError, ValueError, OverflowError):
        bins, whole = np.zeros((0, 3), np.int64), False
    place, samples, total = bins.T
    at, longest = place % LENGTH_BINS.size, np.append(LENGTH_BINS[1:] - 1, 1 << 62)
    if (
        not whole
        or np.any(place[1:] <= place[:-1])
        or np.any((place < 0) | (place >= LENGTH_BINS.size) | (samples <= 0) | (total < 0))
        or np.any((LENGTH_BINS[at] * samples > total) | (total > samples * longest[at]))
        or (int(samples.sum()), int(total.sum())) != (meta["num_samples"], meta["length_total"])
    ):
        raise ProfileError(f"{name}: metadata field 'length_histogram' contradicts the others; build the profile again")
    return tuple((place, samples, total) for place, samples, total in bins.tolist())


def _bursts(name: str, meta: dict[str, Any]) -> Bursts | None:
    if meta["bursts"] is None:
        return None
    try:
        return Bursts.decoded(meta["bursts"], meta["num_rows"])
    except (TypeError, ValueError, OverflowError, zlib.error) as error:
        raise ProfileError(f"{name}: metadata field 'bursts' is damaged ({error}); build the profile again") from None


def load_ranking(path: PathLike, rows: int) -> tuple[str, IntArray]:
    """Digest of a saved profile, and ids of its ``rows`` hottest rows: no more of the file is read than has them.

    Returns:
        The digest, and ids by descending count; fewer than ``rows`` where fewer were read.

    Raises:
        ProfileError: as :meth:`AccessProfile.load`, for what is read.
    """
    name = checked_path(path, ProfileError)
    with _opened(name) as file:
        meta = _checked(name, file.schema_arrow.metadata)
        if meta["digest"] is not None and "row" in file.schema_arrow.names:
            ends = np.cumsum([file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)])
            groups = range(min(int(np.searchsorted(ends, rows)) + 1, file.num_row_groups) if rows else 0)
            table = file.read_row_groups(groups, columns=["row", "count"])
            ids, counts = (_column(name, table, field) for field in ("row", "count"))
            _check_rows(name, ids, counts, meta["num_rows"])
            return meta["digest"], ids[counts > 0][:rows]
    profile = load_profile(name)  # of an earlier release, or a histogram
    return profile.digest, profile.ranked_rows[:rows]


def _check_rows(name: str, rows: IntArray, counts: IntArray, num_rows: int) -> None:
    """Whether rows are distinct ids of the table, hottest first, in order of id where equally hot."""
    outside = np.flatnonzero((rows < 0) | (rows >= num_rows))
    if outside.size:
        raise ProfileError(f"{name}: row id {rows[outside[0]]} at position {outside[0]} is outside [0, {num_rows:,})")
    in_order = np.sort(rows)
    twice = np.flatnonzero(in_order[1:] == in_order[:-1])
    if twice.size:
        raise ProfileError(f"{name}: row id {in_order[twice[0]]} appears more than once")
    _ordered(name, counts)
    ties = np.flatnonzero((counts[:-1] == counts[1:]) & (rows[:-1] > rows[1:]))
    if ties.size:
        raise ProfileError(f"{name}: rows of equal count must ascend, but do not at position {ties[0] + 1}")


def _with_rows(
    name: str, columns: dict[str, Any], meta: dict[str, Any], lengths: LengthMoments | None
) -> AccessProfile:
    rows, counts = columns["row"], columns["count"]
    _check_rows(name, rows, counts, meta["num_rows"])
    return AccessProfile.from_row_counts(
        RowCounts(counts, rows),
        meta["num_samples"],
        meta["num_rows"],
        lengths,
        held=RowCounts(columns["held_out"], rows) if "held_out" in columns else None,
        samples=RowCounts(columns["samples"], rows) if "samples" in columns else None,
        holdout=_holdout(name, columns, meta),
        table=meta["table"],
        path=name,
        sample_key=meta["sample_key"],
    )


def _holdout(name: str, columns: dict[str, Any], meta: dict[str, Any]) -> Holdout | None:
    if "held_out" not in columns:
        return None
    samples, share, seed = meta["held_out_samples"], meta["held_out_share"], meta["held_out_seed"]
    if samples is None or samples < 0 or not isinstance(share, (int, float)) or seed is None:
        raise ProfileError(f"{name}: metadata do not say which samples were held out; build the profile again")
    return Holdout(samples, np.zeros(0, np.int64), float(share), seed)


@contextmanager
def _opened(name: str) -> Iterator[pq.ParquetFile]:
    """A Parquet file; what Arrow finds wrong with it raises a ProfileError."""
    try:
        with pq.ParquetFile(name, page_checksum_verification=True) as file:
            yield file
    except ProfileError:
        raise
    except FileNotFoundError as error:
        raise ProfileError(f"{name}: no such file; build it with 'flexshard profile'") from error
    except Exception as error:  # Arrow raises many kinds on damaged bytes
        raise ProfileError(f"{name}: not a readable Parquet file: {first_line(error)}") from error


def _read(name: str) -> tuple[pa.Table, dict[str, Any]]:
    with _opened(name) as file:
        table = file.read()
    return table, _checked(name, table.schema.metadata)


def _checked(name: str, metadata: dict[bytes, bytes] | None) -> dict[str, Any]:
    """What a file says of itself, every field there, None where it does not say."""
    meta = FORMAT.of_metadata(metadata, name)
    numbers = ("num_rows", "num_samples", "num_accesses")
    lengths = ("length_total", "length_total_squares", "length_maximum")
    optional = (*lengths, "held_out_samples", "held_out_seed", "distinct_batch")
    more = ("held_out_share", "length_histogram", "sample_key", "hash", "mapping", "encoded_by", "bursts", "digest")
    meta = dict.fromkeys((*optional, *more)) | meta
    for field in (*numbers, *optional):
        value = meta.get(field)
        known = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 126
        if not (known or (field in optional and value is None)):
            raise ProfileError(f"{name}: metadata field {field!r} must be a whole number, found {value!r}")
    for field in ("sample_key", "mapping", "encoded_by", "digest"):
        if not isinstance(meta[field], (str, type(None))):
            raise ProfileError(f"{name}: metadata field {field!r} must be a text, found {meta[field]!r}")
    if meta["hash"] not in (None, *HASHES):
        raise ProfileError(f"{name}: metadata field 'hash' must be one of {', '.join(HASHES)}, found {meta['hash']!r}")
    if not isinstance(meta.get("table"), str):
        raise ProfileError(f"{name}: metadata field 'table' must be a text, found {meta.get('table')!r}")
    return meta


def _column(name: str, table: pa.Table, field: str) -> Any:
    column = table.column(field)
    if not pa.types.is_integer(column.type):
        raise ProfileError(f"{name}: column {field!r} holds {column.type}; expected int64")
    if column.null_count:
        raise ProfileError(f"{name}: column {field!r} has {column.null_count} nulls")
    # A private copy: Arrow's memory is read-only and would pin the whole file.
    values = np.array(column.to_numpy(), dtype=np.int64)
    least = 0
    below = np.flatnonzero(values < least)
    if below.size:
        raise ProfileError(
            f"{name}: column {field!r} has {values[below[0]]} at position {below[0]}; expected at least 0"
        )
    return values


def _ordered(name: str, counts: Any) -> None:
    unsorted = np.flatnonzero(counts[:-1] < counts[1:])
    if unsorted.size:
        k = int(unsorted[0])
        raise ProfileError(
            f"{name}: counts must not ascend, but position {k + 1} has {counts[k + 1]} after {counts[k]}; sort the file"
        )
