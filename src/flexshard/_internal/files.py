"""Writing results whole or not at all, and reading text with errors that name the file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from flexshard.errors import FlexShardError, OutputError

__all__ = [
    "PathLike",
    "checked_path",
    "folder_for",
    "make_folder",
    "read_text",
    "reason_of",
    "replacing",
    "replacing_all",
    "write_text",
]

PathLike = str | os.PathLike[str]


def checked_path(path: object, error: type[FlexShardError]) -> str:
    """A path as a text; raises ``error`` for what is none."""
    if not isinstance(path, str | os.PathLike):
        raise error(f"a file's path is a text or a Path, found {path!r}")
    return os.fspath(path)


def make_folder(path: PathLike) -> Path:
    """Make a folder, and those above it, where they are missing.

    Raises:
        OutputError: it could not be made.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot make the folder {path}: {reason_of(error)}; choose another path with -o") from error
    return Path(path)


@contextmanager
def folder_for(path: PathLike) -> Iterator[Path]:
    """A folder, made where it is missing, and taken away again if the block ends with an error that leaves it empty.

    Raises:
        OutputError: it could not be made.
    """
    missing = not Path(path).exists()
    folder = make_folder(path)
    try:
        yield folder
    except Exception:
        if missing:
            with suppress(OSError):
                folder.rmdir()
        raise


@contextmanager
def replacing(path: PathLike) -> Iterator[Path]:
    """Yield a temporary path beside ``path`` which takes its place when the block ends without an error.

    A reader never sees half a file, and whatever stood at ``path`` stays if writing fails.

    Raises:
        OutputError: the folder is missing or not writable, or the disk is full.
    """
    target = _target(path)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=target.suffix, dir=target.parent)
        os.close(handle)
    except OSError as error:
        raise _unwritable(path, reason_of(error)) from error
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(target)
    except OSError as error:
        if isinstance(error, OutputError) and temporary.name not in str(error):  # of another file
            raise
        reason = error.reason if isinstance(error, OutputError) else reason_of(error)  # of a draft within a draft
        raise OutputError(f"cannot write {path}: {reason}; free some space or choose another path", reason) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextmanager
def replacing_all(paths: Iterable[PathLike]) -> Iterator[list[Path]]:
    """As :func:`replacing`, of several: nothing is replaced before everything is written."""
    with ExitStack() as stack:
        yield [stack.enter_context(replacing(path)) for path in paths]


def _target(path: PathLike) -> Path:
    """What a path's links, which stay, lead to; raises OutputError where no file can be."""
    given, circle = Path(checked_path(path, OutputError)), "its links lead in a circle"
    try:
        target = given.resolve()  # of a pipe it is no path
        is_other = given.exists() and not given.is_file()
    except RuntimeError as error:  # before Python 3.13
        raise _unwritable(path, circle) from error
    except OSError as error:
        raise _unwritable(path, reason_of(error)) from error
    if target.is_symlink():
        raise _unwritable(path, circle)
    if is_other:
        raise _unwritable(path, f"it is {'a folder' if given.is_dir() else 'not a regular file'}")
    return target


def _unwritable(path: PathLike, reason: str) -> OutputError:
    return OutputError(f"cannot write {path}: {reason}; choose another path with -o")


def write_text(path: PathLike, text: str) -> None:
    """Write a text file whole or not at all.

    Raises:
        OutputError: it could not be written.
    """
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_text(path: PathLike, error_type: type[FlexShardError]) -> str:
    """The text of a file, or ``error_type`` with one line that names it."""
    try:
        return Path(checked_path(path, error_type)).read_text(encoding="utf-8")
    except (UnicodeDecodeError, ValueError) as error:
        if not isinstance(error, UnicodeDecodeError):
            raise error_type(f"{path}: not a path that can be read: {error}") from error
        raise error_type(f"{path}: not a text file (byte {error.start} is not UTF-8)") from error
    except OSError as error:
        raise error_type(f"{path}: cannot be read: {reason_of(error)}") from error


def reason_of(error: OSError) -> str:
    """What the system says, in lower case."""
    # Arrow wraps the system's error in a sentence of its own and keeps only its number.
    return (os.strerror(error.errno) if error.errno else error.strerror or str(error)).lower()


def _umask() -> int:
    # The process's umask can only be read by setting it.
    mask = os.umask(0)
    os.umask(mask)
    return mask
