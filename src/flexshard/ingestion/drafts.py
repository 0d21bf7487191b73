"""Datasets that are written beside their place, and take it when they are whole."""

from __future__ import annotations

import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flexshard._internal import PathLike, make_folder
from flexshard.errors import OutputError

__all__ = ["draft_folder", "free_target", "put_in_place"]


def free_target(output: PathLike) -> Path:
    """The folder that a dataset may be made at; raises OutputError where it may not."""
    if "://" in os.fspath(output):
        raise OutputError(f"cannot write {output}: datasets are made on this machine; choose another path with -o")
    target = Path(output).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise OutputError(f"cannot write {target}: it exists and is not an empty folder; choose another path with -o")
    return target


@contextmanager
def draft_folder(target: Path) -> Iterator[Path]:
    """A folder beside the target, gone when the block ends; what an interrupted run left there is removed first."""
    make_folder(target.parent)
    prefix = f".{target.name}.draft-"
    for left in target.parent.glob(f"{glob.escape(prefix)}*"):
        process = left.name.removeprefix(prefix).partition("-")[0]
        if process.isdigit() and not _is_running(process):
            shutil.rmtree(left, ignore_errors=True)
    try:
        draft = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=target.parent))
    except OSError as error:
        raise OutputError(f"cannot write {target}: {error.strerror}; choose another path with -o") from error
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def put_in_place(data: Path, target: Path) -> None:
    """Move a whole dataset from a draft to its path; raises OutputError."""
    try:
        with suppress(FileNotFoundError):
            target.rmdir()  # an empty folder may stand there
        data.replace(target)
    except OSError as error:
        raise OutputError(f"cannot write {target}: {error.strerror}; choose another path with -o") from error


def _is_running(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except (ValueError, ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
