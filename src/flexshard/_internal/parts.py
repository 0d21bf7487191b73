"""Long ranges of rows in parts that bound the memory of what is done to each."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["parts_by_bytes"]

_PART_BYTES = 32 << 20


def parts_by_bytes(length: int, row_bytes: int) -> Iterator[slice]:
    """Parts of a range, none of more than 32 MiB."""
    rows = max(_PART_BYTES // max(row_bytes, 1), 1)
    for start in range(0, length, rows):
        yield slice(start, min(start + rows, length))
