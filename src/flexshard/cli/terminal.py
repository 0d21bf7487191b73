"""What all commands share: consoles, progress bars, machine output, and errors in one line."""

from __future__ import annotations

import codecs
import io
import json
import os
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from flexshard.errors import FlexShardError

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["counting_progress", "emit", "run", "say", "show_wide", "working"]


_shown = {"wide": False}  # whether all columns are, whatever room the terminal has


def show_wide(wanted: bool) -> None:
    """Show all columns of tables from now on, or those for which the terminal has room."""
    _shown["wide"] = wanted


def say(text: RenderableType) -> None:
    """Print for a person, on standard output: to a terminal's width, and whole lines where there is no terminal."""
    from rich.console import Console

    from flexshard._internal import UNLIMITED, as_text

    if not sys.stdout.isatty():
        sys.stdout.write(as_text(text, UNLIMITED) + "\n")
        return
    width = UNLIMITED if _shown["wide"] else max(shutil.get_terminal_size().columns, _LEAST_WIDTH)
    # Names come from users, and must not be taken for markup.
    Console(width=width, highlight=False, markup=False, emoji=False).print(text, crop=False)


def emit(document: Any, *, as_json: bool, text: RenderableType) -> None:
    """Print a result for a machine or for a person."""
    if as_json:
        sys.stdout.write(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    else:
        say(text)


_heard = {"interrupt": False}


def _hear(*_: object) -> NoReturn:
    _heard["interrupt"] = True
    raise KeyboardInterrupt


def _answer() -> None:
    """Raise an interrupt again, if one came: compiled code that imports a module may have swallowed it."""
    if _heard["interrupt"]:
        raise KeyboardInterrupt


_SPELT = "flexshard.spelt"
_SPELLINGS = str.maketrans({"\N{MICRO SIGN}": "u", "κ": "kappa", "×": "x", "·": "*", "…": "...", "≤": "<="})


def _spell(error: UnicodeError) -> tuple[str | bytes, int]:
    """Letters for what an encoding lacks: lines of tables, and signs that have names."""
    assert isinstance(error, UnicodeEncodeError)
    missing = error.object[error.start : error.end]
    lines = "".join("-" if "\u2500" <= letter <= "\u257f" else letter for letter in missing)
    return lines.translate(_SPELLINGS).encode("ascii", "backslashreplace").decode(), error.end


codecs.register_error(_SPELT, _spell)


def _at_home(argument: str) -> str:
    """An argument whose path begins with ``~/``, which a shell leaves as it is behind an equals sign, as meant."""
    option, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    if not value.startswith("~/"):
        return argument
    return option + equals + os.path.expanduser(value)  # noqa: PTH111 - a path for whoever reads arguments


_LEAST_WIDTH = 60
_INTERRUPTED = 130

# click.UsageError, wherever the installed typer keeps its click.
_USAGE_ERROR: Any = typer.BadParameter.__bases__[0]


@contextmanager
def counting_progress(title: str, unit: str = "rows") -> Iterator[Callable[..., None]]:
    """A bar with rate and remaining time on standard error; nothing where that is not a terminal.

    What it yields takes how much is done, of how much, and what else to say.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(show_speed=False),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=None, rate="")

        start = time.perf_counter()

        def update(done: int, total: int, note: str = "") -> None:
            _answer()
            rate = f"{done / (time.perf_counter() - start):,.0f} {unit}/s"
            progress.update(task, completed=done, total=total, rate=rate, description=note or title)

        yield update
    _answer()


@contextmanager
def working(title: str) -> Iterator[None]:
    """A sign of life on standard error while something takes its time; nothing where that is not a terminal."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if console.is_terminal:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            progress.add_task(title, total=None)
            yield
    else:
        yield
    _answer()


def run(app: typer.Typer) -> None:
    """Run the application; an error that FlexShard or the parser of arguments raises becomes one line and exit 2."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123 - for as long as the command runs
    if sys.stdout is None:
        _fail("standard output is closed; send it to a file, or to /dev/null")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_SPELT)  # a terminal that lacks a letter is no reason to stop
    others = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], filename: str, *where: Any, **file: Any) -> None:
        if category is UserWarning and "flexshard" in filename:
            sys.stderr.write(f"flexshard: note: {' '.join(str(message).split())}\n")
        else:
            others(message, category, filename, *where, **file)

    warnings.showwarning = show
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _hear)
    try:
        try:
            code = app(args=[_at_home(argument) for argument in sys.argv[1:]], standalone_mode=False)
        except Exception:
            _answer()  # whatever it has become
            raise
        if code == _INTERRUPTED:  # typer makes Ctrl-C a code
            raise KeyboardInterrupt
        sys.stdout.flush()
    except FlexShardError as error:
        _fail(str(error))
    except MemoryError as error:
        _fail(f"not enough memory: {error}; use fewer rows, or a larger machine")
    except _USAGE_ERROR as error:
        if not error.format_message():  # no command at all: the help has been printed
            sys.exit(0)
        context = getattr(error, "ctx", None)
        what = error.format_message().replace("Value error, ", "").rstrip(".")
        _fail(f"{what}; see '{context.command_path if context else 'flexshard'} --help'")
    except (KeyboardInterrupt, typer.Abort):
        sys.stderr.write("flexshard: interrupted\n")
        sys.exit(_INTERRUPTED)
    except BrokenPipeError:  # whoever read our output has had enough
        _silence_stdout()
        sys.exit(0)
    except OSError as error:
        if error.filename is not None:
            _fail(f"{error.filename}: {error.strerror}")
        if isinstance(error, ConnectionError):
            _fail(str(error) or type(error).__name__)
        _silence_stdout()
        _fail(f"cannot write to standard output: {error.strerror or error}")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # Now and then a thread of torch's groups aborts the interpreter as it ends, when all is done and written.
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> NoReturn:
    sys.stderr.write(f"flexshard: error: {' '.join(message.split())}\n")
    sys.exit(2)


def _silence_stdout() -> None:
    """Keep the interpreter from flushing what cannot be written once more when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
