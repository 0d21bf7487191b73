"""Which keys maps have: read from the column of the keys alone."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from flexshard._internal import ParquetSource, first_line
from flexshard.errors import DataError
from flexshard.ingestion.storage.column_chunks import leaves_of
from flexshard.ingestion.storage.flat_maps import feature_name

__all__ = ["key_columns", "keys_of"]

_BATCH_ROWS = 1 << 14


def key_columns(column: str, keys: pa.Array) -> list[str]:
    """Names of the columns that keys of a map become, in their order."""
    try:
        return [feature_name(column, key) for key in keys.to_pylist()]
    except UnicodeDecodeError as error:
        raise DataError(f"column {column!r} has keys that are no text: {error}") from error


def keys_of(sources: Sequence[ParquetSource], maps: Sequence[str]) -> dict[str, pa.Array]:
    """Keys of each column of maps in all files, ascending.

    Raises:
        DataError: values that cannot be read; names the file.
    """
    found: dict[str, pa.Array] = {}
    for column in maps:
        kind = sources[0].schema.field(column).type.key_type
        keys = pa.array([], kind)
        for source in sources:
            try:
                keys = _with_keys(keys, source, column)
            except (pa.ArrowException, OSError) as error:
                why = f"cannot be read: {first_line(error)}"
                raise DataError(f"{source.name}: keys of column {column!r} {why}; write the file again") from error
        found[column] = keys.take(pc.array_sort_indices(keys))
    return found


def _with_keys(keys: pa.Array, source: ParquetSource, column: str) -> pa.Array:
    with pq.ParquetFile(source.path, filesystem=source.filesystem, pre_buffer=False) as file:
        leaf = file.schema.column(leaves_of(file.schema_arrow)[column][0]).path  # a map's first is its keys
        for batch in file.iter_batches(_BATCH_ROWS, columns=[leaf], use_threads=False):
            here = pc.unique(pc.struct_field(batch.column(column).flatten(), 0))
            keys = pc.unique(pa.concat_arrays([keys, here.cast(keys.type)]))
    return keys
