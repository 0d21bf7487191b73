"""Where the columns of a Parquet file lie in it, row group by row group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

__all__ = ["ColumnChunks", "leaves_of"]

IntArray = npt.NDArray[np.int64]
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 8}


@dataclass(frozen=True)
class ColumnChunks:
    """Stretches of a file that hold some columns.

    Attributes:
        starts, sizes: in bytes of the file; shape (row groups, leaves of the columns).
        columns: the column that each leaf is of, by its place among those asked for; shape (leaves,).
        unpacked: bytes of all of a row group once decoded; shape (row groups,).
    """

    starts: IntArray
    sizes: IntArray
    columns: IntArray
    unpacked: IntArray

    @classmethod
    def of(cls, metadata: Any, schema: pa.Schema, columns: Sequence[str]) -> ColumnChunks:
        """From a file's footer and its schema."""
        groups, where = metadata.num_row_groups, leaves_of(schema)
        held = [(leaf, number) for number, column in enumerate(columns) for leaf in where.get(column, ())]
        leaves, owners = [leaf for leaf, _ in sorted(held)], [number for _, number in sorted(held)]
        starts: IntArray = np.zeros((groups, len(leaves)), np.int64)
        sizes, unpacked = np.zeros_like(starts), np.zeros(groups, np.int64)
        for group in range(groups):
            found = metadata.row_group(group)
            for place_of, leaf in enumerate(leaves):
                chunk = found.column(leaf)
                starts[group, place_of], sizes[group, place_of] = _start(chunk), chunk.total_compressed_size
                unpacked[group] += _unpacked_bytes(chunk)
        return cls(starts, sizes, np.array(owners, np.int64), unpacked)


def leaves_of(schema: pa.Schema) -> dict[str, range]:
    """Numbers of the columns that a file stores for each column of its schema. Paths do not tell: names have dots."""
    found, first = {}, 0
    for field in schema:
        found[field.name] = range(first, first := first + _leaves(field.type))
    return found


def _leaves(kind: pa.DataType) -> int:
    if isinstance(kind, pa.BaseExtensionType):
        return _leaves(kind.storage_type)
    if not pt.is_nested(kind):
        return 1
    return sum(_leaves(kind.field(number).type) for number in range(kind.num_fields))


def _start(chunk: Any) -> int:
    """Its first page: that of the dictionary, where there is one."""
    dictionary = chunk.dictionary_page_offset
    data = chunk.data_page_offset
    return int(dictionary if dictionary and dictionary < data else data)


def _unpacked_bytes(chunk: Any) -> int:
    """Of one column of a row group, once decoded."""
    width = _WIDTHS.get(chunk.physical_type)
    if width is None:  # texts, which a dictionary may hold once: some bytes each, and where they end
        return int(chunk.total_uncompressed_size + 12 * chunk.num_values)
    return int(width * chunk.num_values)
