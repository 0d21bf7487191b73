"""Which columns jobs read: a log of their projections (DPP paper, section 4.2.1)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flexshard._internal import PathLike, check_int, read_text
from flexshard.errors import DataError, OutputError
from flexshard.ingestion.storage.flat_maps import map_of

__all__ = ["ProjectionLog"]

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ProjectionLog:
    """Columns that jobs read, in the order in which the jobs ran.

    As a file, an object of JSON per line: ``{"columns": ["label", "sparse/12"], "runs": 3}``. ``runs`` is how often it
    ran, 1 by default; what else a line says is left aside.

    Attributes:
        projections: columns of each job.
        runs: how often each ran.
    """

    projections: tuple[tuple[str, ...], ...]
    runs: tuple[int, ...]

    @classmethod
    def of(cls, projections: Iterable[Sequence[str]]) -> ProjectionLog:
        """Of jobs that ran once each."""
        found = tuple(tuple(columns) for columns in projections)
        return cls(found, (1,) * len(found))

    @classmethod
    def load(cls, path: PathLike) -> ProjectionLog:
        """Read a file of lines.

        Raises:
            DataError: it cannot be read, or has no jobs; or a line is none; names file and line.
        """
        projections, runs = [], []
        for number, line in enumerate(read_text(path, DataError).removeprefix("\ufeff").split("\n"), 1):
            if line.strip():
                columns, count = _projection(line, f"{path}, line {number}")
                projections.append(columns)
                runs.append(count)
        if not projections:
            raise DataError(f'{path}: no projections; write a line such as {{"columns": ["label"]}} for every job')
        return cls(tuple(projections), tuple(runs))

    @staticmethod
    def append(path: PathLike, columns: Sequence[str]) -> None:
        """Add a job that ran to a file, which is made where there is none.

        Raises:
            OutputError: it cannot be written, or is another file.
        """
        ProjectionLog.check(path)
        line = json.dumps({"columns": list(columns)}, ensure_ascii=False) + "\n"
        try:
            # One write, which jobs that end at once do not tear apart.
            handle = os.open(Path(path), os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                size = os.fstat(handle).st_size
                is_torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"  # an editor leaves the last line open
                os.write(handle, (b"\n" if is_torn else b"") + line.encode())
            finally:
                os.close(handle)
        except OSError as error:
            raise OutputError(f"cannot write {path}: {error.strerror}; choose another path") from error

    @staticmethod
    def check(path: PathLike) -> None:
        """Whether jobs may be added to a file: to one that is not there, is empty, or has them already.

        Raises:
            OutputError: it cannot be written, or is another file.
        """
        place = Path(path)
        try:
            with place.open("r+b") as file:
                first = next((line for line in file if line.strip()), b"")
        except FileNotFoundError:
            if place.parent.is_dir() and os.access(place.parent, os.W_OK):
                return
            raise OutputError(
                f"cannot write {path}: its folder is not there, or not yours; choose another path"
            ) from None
        except OSError as error:
            raise OutputError(f"cannot write {path}: {error.strerror}; choose another path") from error
        try:
            if first:
                _projection(first.decode("utf-8-sig"), str(path))
        except (DataError, UnicodeDecodeError) as error:
            raise OutputError(
                f"{path} exists and is no log of what jobs read, to which a line could be added; choose another path"
            ) from error

    def reads(self, columns: Sequence[str]) -> BoolArray:
        """Which of some columns each job reads; shape (jobs, columns). Others that it names are left aside."""
        place = {column: number for number, column in enumerate(columns)}
        found = np.zeros((len(self.projections), len(columns)), bool)
        for job, projection in enumerate(self.projections):
            found[job, [place[column] for column in projection if column in place]] = True
        return found

    def hit_rates(self, columns: Sequence[str]) -> FloatArray:
        """Share of runs that read each of some columns; shape (columns,)."""
        weights = np.array(self.runs, np.float64)
        rates: FloatArray = weights @ self.reads(columns) / weights.sum()
        return rates

    def in_columns(self, columns: Sequence[str], maps: Sequence[str]) -> ProjectionLog:
        """The log of the same jobs on a dataset with these columns, after ``maps`` were taken apart.

        Who read a map whole reads all of its keys; who read a key of one that is still there reads that.
        """
        known = set(columns)
        of_map = {name: [column for column in columns if map_of(column, maps) == name] for name in maps}

        def now(column: str) -> list[str]:
            if column in known:
                return [column]
            owner = map_of(column, known)
            return of_map.get(column) or [column if owner is None else owner]

        changed = (dict.fromkeys(new for column in job for new in now(column)) for job in self.projections)
        return ProjectionLog(tuple(map(tuple, changed)), self.runs)

    def unknown(self, columns: Sequence[str]) -> list[str]:
        """Columns that jobs name, and that are not among these."""
        known = set(columns)
        return sorted({column for projection in self.projections for column in projection} - known)


def _projection(line: str, where: str) -> tuple[tuple[str, ...], int]:
    try:
        found: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("columns"), list):
        raise DataError(f'{where}: a projection is {{"columns": [...]}}, found {line.strip()[:80]}')
    if not all(isinstance(column, str) for column in found["columns"]):
        raise DataError(f"{where}: columns are texts, found {str(found['columns'])[:80]}")
    return tuple(found["columns"]), check_int(found.get("runs", 1), f"{where}: runs", DataError)
