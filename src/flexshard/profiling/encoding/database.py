"""The database that encodes: where it spills, and what its errors are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flexshard import units
from flexshard._internal import changed_data, stamp_of
from flexshard.errors import DataError, OutputError

__all__ = ["failures", "open_database", "unchanged"]


def open_database(scratch: str, limit: int | None) -> Any:
    """A database in a folder, where it spills; ``limit`` of its memory in bytes."""
    import duckdb

    settings: dict[str, Any] = {"temp_directory": str(Path(scratch) / "spill")}
    if limit is not None:
        settings["memory_limit"] = f"{limit // 1000}KB"
    return duckdb.connect(str(Path(scratch) / "work.duckdb"), config=settings)


@contextmanager
def failures(target: Path, limit: int | None) -> Iterator[None]:
    """DuckDB's errors while a file is made, as errors of ours that say what to do."""
    import duckdb

    try:
        yield
    except duckdb.OutOfMemoryException as error:
        most = "DuckDB's default" if limit is None else units.format_bytes(limit)
        raise OutputError(f"encoding needs more memory than {most}; give it more with --memory") from error
    except duckdb.Error as error:
        if "No space left" in str(error):
            raise OutputError(f"cannot write {target}: its disk is full; free some space, or choose another") from error
        if isinstance(error, duckdb.IOException):
            raise OutputError(f"cannot write {target}: {str(error).splitlines()[0]}") from error
        raise DataError(f"the data cannot be encoded: {str(error).splitlines()[0]}") from error


@contextmanager
def unchanged(files: Sequence[str]) -> Iterator[None]:
    """While files are read, more than once.

    Raises:
        ChangedDataError: one is another at the end, or no longer there, whatever else went wrong.
    """
    before = {file: stamp_of(file, file) for file in files}

    def check() -> None:
        for file, stamp in before.items():
            if stamp_of(file, file) != stamp:
                raise changed_data(file)

    try:
        yield
    except Exception:
        check()
        raise
    check()
