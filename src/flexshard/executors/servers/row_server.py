"""One embedding server: the rows of tables that fall to it, in its memory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from flexshard.errors import CacheError

__all__ = ["Column", "RowServer", "Wanted"]

Column = tuple[int, str]  # numbers per row, and their type
Wanted = Sequence[tuple[str, npt.NDArray[np.int64]]]


class RowServer:
    """Of ``servers`` servers the one with rows ``number``, ``number + servers``, ... of every table, whose places here
    are 0, 1, ... It does what it is asked for in order, one thing after the other.
    """

    def __init__(self, number: int, servers: int) -> None:
        self._number, self._servers = number, servers
        self._tables: dict[str, dict[str, npt.NDArray[np.generic]]] = {}

    def pid(self) -> int:
        """Of its process."""
        return os.getpid()

    def make(self, table: str, rows: int, columns: Mapping[str, Column]) -> None:
        """Take a table in, all zeros."""
        own = len(range(self._number, rows, self._servers))
        try:
            self._tables[table] = {name: np.zeros((own, width), kind) for name, (width, kind) in columns.items()}
        except MemoryError as error:
            nbytes = sum(own * width * np.dtype(kind).itemsize for width, kind in columns.values())
            name = table.partition("/")[2]
            raise CacheError(
                f"table {name!r}: no memory for its {own:,} rows of {nbytes:,} bytes; take more servers"
            ) from error

    def read(self, wanted: Wanted, names: Sequence[str]) -> dict[str, npt.NDArray[np.generic]]:
        """Rows at places of tables of the same columns, one table's after the other's; shape (n, width) by name."""
        found = {
            name: [np.take(self._tables[table][name], places, axis=0) for table, places in wanted] for name in names
        }
        return {name: parts[0] if len(parts) == 1 else np.concatenate(parts) for name, parts in found.items()}

    def write(self, wanted: Wanted, rows: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """Let distinct rows at places be these, shape (n, width) by name."""
        first = 0
        for table, places in wanted:
            for name, values in rows.items():
                self._tables[table][name][places] = values[first : first + places.size]
            first += places.size

    def drop(self, prefixes: Sequence[str]) -> None:
        """Forget the tables whose names begin so."""
        for table in [table for table in self._tables if table.startswith(tuple(prefixes))]:
            del self._tables[table]

    def nbytes(self) -> int:
        """Of all tables."""
        return sum(values.nbytes for columns in self._tables.values() for values in columns.values())
