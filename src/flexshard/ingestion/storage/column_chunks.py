"""Where the columns of a Parquet file lie in it, row group by row group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["ColumnChunks"]

IntArray = npt.NDArray[np.int64]
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 8}


@dataclass(frozen=True)
class ColumnChunks:
    """Stretches of a file that hold some columns.

    Attributes:
        starts, sizes: in bytes of the file; shape (row groups, leaves of the columns).
        columns: the column that each leaf is of, by its place among those asked for; shape (leaves,).
        unpacked: bytes of all of it once decoded.
    """

    starts: IntArray
    sizes: IntArray
    columns: IntArray
    unpacked: int

    @classmethod
    def of(cls, metadata: Any, columns: Sequence[str]) -> ColumnChunks:
        """From a file's footer."""
        groups = metadata.num_row_groups
        leaves, owners = [], []
        if groups:
            place = {column: number for number, column in enumerate(columns)}
            first = metadata.row_group(0)
            for leaf in range(first.num_columns):
                owner = _owner(first.column(leaf).path_in_schema, place)
                if owner is not None:
                    leaves.append(leaf)
                    owners.append(owner)
        starts: IntArray = np.zeros((groups, len(leaves)), np.int64)
        sizes, unpacked = np.zeros_like(starts), 0
        for group in range(groups):
            found = metadata.row_group(group)
            for place_of, leaf in enumerate(leaves):
                chunk = found.column(leaf)
                starts[group, place_of], sizes[group, place_of] = _start(chunk), chunk.total_compressed_size
                unpacked += _unpacked_bytes(chunk)
        return cls(starts, sizes, np.array(owners, np.int64), unpacked)


def _owner(path: str, place: dict[str, int]) -> int | None:
    """The column that a path within the schema belongs to; names of columns may have dots."""
    if path in place:
        return place[path]
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        found = place.get(".".join(parts[:length]))
        if found is not None:
            return found
    return None


def _start(chunk: Any) -> int:
    """Its first page: that of the dictionary, where there is one."""
    dictionary = chunk.dictionary_page_offset
    data = chunk.data_page_offset
    return int(dictionary if dictionary and dictionary < data else data)


def _unpacked_bytes(chunk: Any) -> int:
    """Of one column of a row group, once decoded."""
    width = _WIDTHS.get(chunk.physical_type)
    return int(chunk.total_uncompressed_size if width is None else width * chunk.num_values)
