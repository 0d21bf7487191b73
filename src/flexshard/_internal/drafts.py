"""Folders of what is written beside its place, and takes it when it is whole."""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flexshard._internal.files import PathLike, make_folder
from flexshard.errors import OutputError

__all__ = ["draft_folder", "free_target", "put_in_place"]

_LOCK = "lock"


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
    """A folder beside the target, gone when the block ends; what an interrupted run left there is removed first.

    Its name has the machine that writes it, whose kernel lets go of the lock in it when the process ends, however it
    does. Drafts of other machines stay, since their locks need not be seen here.
    """
    make_folder(target.parent)
    prefix = f".{target.name}.draft-{_machine()}-"
    for left in target.parent.glob(f"{glob.escape(prefix)}*"):
        _remove_if_left(left)
    try:
        draft = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
        lock = _locked(draft)
    except OSError as error:
        raise OutputError(f"cannot write {target}: {error.strerror}; choose another path with -o") from error
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        os.close(lock)


def put_in_place(data: Path, target: Path) -> None:
    """Move a whole dataset from a draft to its path; raises OutputError."""
    try:
        with suppress(FileNotFoundError):
            target.rmdir()  # an empty folder may stand there
        data.replace(target)
    except OSError as error:
        raise OutputError(f"cannot write {target}: {error.strerror}; choose another path with -o") from error


def _machine() -> str:
    """Of this boot of this machine: names of machines repeat, and so do numbers of processes, in containers too."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    return f"{uuid.getnode():x}"


def _locked(draft: Path) -> int:
    """A lock on a draft, held until it is closed or this process ends."""
    handle = os.open(draft / f"{_LOCK}.new", os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # storage without locks: its drafts are never removed
        return handle
    (draft / f"{_LOCK}.new").rename(draft / _LOCK)  # there once it is held, so that nobody takes it for left
    return handle


def _remove_if_left(draft: Path) -> None:
    """Remove a draft that nobody holds; one without a lock is being made."""
    try:
        handle = os.open(draft / _LOCK, os.O_RDWR)
    except OSError:
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(draft, ignore_errors=True)
    except OSError:
        pass
    finally:
        os.close(handle)
