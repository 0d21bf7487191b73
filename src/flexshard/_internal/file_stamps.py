"""Whether files still are what they were when reading them began."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pyarrow.fs as pafs

from flexshard._internal.data_paths import first_line
from flexshard.errors import ChangedDataError, DataError

__all__ = ["FileStamp", "changed_data", "on_this_machine", "stamp_of"]


@dataclass(frozen=True)
class FileStamp:
    """Size in bytes, time of the last change in nanoseconds and a mark of the version, as the file system has them."""

    size: int
    changed: int
    version: str = ""

    @classmethod
    def of(cls, path: str, filesystem: pafs.FileSystem | None = None) -> FileStamp:
        """A file's now.

        Raises:
            FileNotFoundError, OSError: there is none, or it cannot be asked for.
        """
        if filesystem is None or on_this_machine(filesystem):
            found = os.stat(path)  # noqa: PTH116 (a Path for every chunk takes longer than asking)
            return cls(found.st_size, found.st_mtime_ns, str(found.st_ino))  # copies may keep the time
        info = filesystem.get_file_info(path)
        if info.type != pafs.FileType.File:
            raise FileNotFoundError(path)
        return cls(int(info.size or 0), int(info.mtime_ns or 0), _version_of(path, filesystem))


def on_this_machine(filesystem: pafs.FileSystem | None) -> bool:
    """Whether asking for a file's size takes no time to speak of."""
    return isinstance(filesystem, pafs.LocalFileSystem | None)


def _version_of(path: str, filesystem: pafs.FileSystem) -> str:
    """What fsspec tells versions of a file apart by; many of its file systems have no time of change for Arrow."""
    handler = getattr(filesystem, "handler", None)
    return str(handler.fs.ukey(path)) if isinstance(handler, pafs.FSSpecHandler) else ""


def stamp_of(name: str, path: str, filesystem: pafs.FileSystem | None = None) -> FileStamp:
    """A file's stamp now; ``name`` is what messages call it.

    Raises:
        ChangedDataError: it is no longer there.
        DataError: it cannot be asked for.
    """
    try:
        return FileStamp.of(path, filesystem)
    except FileNotFoundError as error:
        raise ChangedDataError(
            f"{name}: is no longer there; put it back, or start on the files that there are"
        ) from error
    except OSError as error:
        raise DataError(f"{name}: cannot be read: {first_line(error)}") from error


def changed_data(name: str) -> ChangedDataError:
    """What to raise where a file is another."""
    return ChangedDataError(f"{name}: has changed since reading began; start again, on files that stay as they are")
