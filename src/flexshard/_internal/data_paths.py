"""Which files paths, patterns, folders and URLs name."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import takewhile
from pathlib import Path

import pyarrow as pa
import pyarrow.fs as pafs

from flexshard.errors import DataError, MissingDependencyError

__all__ = ["files_below", "first_line", "hidden_part", "is_glob", "match_local", "match_url", "matching"]

_NATIVE_SCHEMES = ("s3", "gs", "gcs", "hdfs", "file")


def first_line(error: BaseException) -> str:
    """What an error says, in one line without a full stop; its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def is_glob(text: str) -> bool:
    """Whether a path is a pattern."""
    return any(mark in text for mark in "*?[")


def match_local(text: str) -> list[str]:
    """Files of this machine that a path, a pattern or a folder names; raises DataError."""
    try:
        path = Path(text).expanduser()
        if path.is_dir():
            return [str(file) for file in files_below(path) if file.suffix == ".parquet"]
        if path.exists() or not is_glob(text):
            return [str(path)]
        return [file for file in matching(path) if Path(file).is_file()]
    except DataError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        raise DataError(f"{text}: not a path that can be read: {first_line(error)}") from error


def _is_data(path: str) -> bool:
    """Whether a file below a folder is data.

    Spark and others leave notes, and what they have not finished, under names that start with a dot or an underscore;
    a partition's folder has an equals sign in its name.
    """
    return path.endswith(".parquet") and hidden_part(path) is None


def matching(pattern: Path) -> list[str]:
    """The files and folders of this machine that a pattern fits.

    Raises:
        DataError: a link to nothing, whose rows would be missing.
    """
    found = glob.glob(str(pattern), recursive=True)
    for path in found:
        _check_leads_somewhere(path)
    return found


def files_below(folder: Path) -> list[Path]:
    """The files of a folder and those in it, through links too, but for those that are hidden (:func:`hidden_part`); a
    folder that has several names is read by one, its own before a link's.

    Raises:
        DataError: a link to nothing, whose rows would be missing.
    """
    found: list[Path] = []
    seen: set[str] = set()
    waiting = [folder]
    links: list[Path] = []
    while waiting or links:
        here = waiting.pop() if waiting else links.pop(0)
        real = os.path.realpath(here)
        if real in seen:
            continue
        seen.add(real)
        for entry in sorted(os.scandir(here), key=lambda entry: entry.name):
            if hidden_part(entry.name) is not None:
                continue
            if entry.is_dir():
                (links if entry.is_symlink() else waiting).append(Path(entry.path))
            elif entry.is_file():
                found.append(Path(entry.path))
            else:
                _check_leads_somewhere(entry.path)
    return found


def _check_leads_somewhere(path: str) -> None:
    link = Path(path)
    if link.is_symlink() and not link.exists():
        raise DataError(f"{path}: a link to {link.readlink()}, which is not there; mend it, or remove it")


def hidden_part(path: str) -> str | None:
    """The first name in a path below a folder for which it is not read as data, if there is one."""
    return next((part for part in path.split("/") if part.startswith((".", "_")) and "=" not in part), None)


def match_url(url: str) -> tuple[pafs.FileSystem, list[str]]:
    """A file system, and paths in it that a URL of a file, a pattern or a folder names; raises DataError."""
    scheme = url.split("://")[0]
    try:
        if scheme in _NATIVE_SCHEMES:
            base = url if not is_glob(url) else url[: url.rindex("/", 0, _first_mark(url))]
            filesystem, path = pafs.FileSystem.from_uri(base)
            pattern = path if base == url else path + url[len(base) :]
        else:
            filesystem, pattern = _fsspec(url)
            path = pattern if not is_glob(pattern) else pattern[: pattern.rindex("/", 0, _first_mark(pattern))]
        if pattern != path:
            selector = pafs.FileSelector(path, recursive=True)
            files = [info.path for info in filesystem.get_file_info(selector) if info.is_file]
            return filesystem, [file for file in files if _fits(file.split("/"), pattern.split("/"))]
        info = filesystem.get_file_info(path)
        if info.type == pafs.FileType.Directory:
            entries = filesystem.get_file_info(pafs.FileSelector(path, recursive=True))
            root = path.rstrip("/") + "/"
            return filesystem, [
                entry.path for entry in entries if entry.is_file and _is_data(entry.path.removeprefix(root))
            ]
        return filesystem, [path] if info.type == pafs.FileType.File else []
    except (OSError, pa.ArrowException, ValueError) as error:
        raise DataError(f"{url}: cannot be read: {str(error).splitlines()[0]}") from error


def _fits(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether folders and a file are what a pattern says, name by name, as :func:`glob.glob` has it: ``**`` is any
    number of names, and no wildcard is a name that starts with a dot.
    """
    if not pattern:
        return not names
    if pattern == ["**"]:  # at the end, where no name is a folder
        return bool(names) and not any(name.startswith(".") for name in names)
    if pattern[0] == "**":
        skipped = takewhile(lambda end: end == 0 or not names[end - 1].startswith("."), range(len(names) + 1))
        return any(_fits(names[end:], pattern[1:]) for end in skipped)
    if not names or (names[0].startswith(".") and not pattern[0].startswith(".")):
        return False
    return fnmatchcase(names[0], pattern[0]) and _fits(names[1:], pattern[1:])


def _first_mark(text: str) -> int:
    return min(text.index(mark) for mark in "*?[" if mark in text)


def _fsspec(url: str) -> tuple[pafs.FileSystem, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise MissingDependencyError(f"{url}: this kind of URL needs fsspec; pip install 'flexshard[cloud]'") from error
    try:
        filesystem, path = url_to_fs(url)
    except ImportError as error:
        raise MissingDependencyError(f"{url}: this kind of URL needs another package: {error}") from error
    return pafs.PyFileSystem(pafs.FSSpecHandler(filesystem)), path
