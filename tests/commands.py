"""Commands as a stranger runs them, in processes of their own; forked from one that has imported what they need."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

_ENVIRONMENT = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
_ROOMS = ("cli.app", "tables", "topologies", "profiling", "costmodels", "planner", "calibration", "ingestion", "plots")


def run(
    folder: Path, *arguments: object, limit_bytes: int | None = None, new: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run ``flexshard`` in a folder.

    Args:
        limit_bytes: writing more to a file fails as on a full disk.
        new: start Python for it, as a stranger does, without a limit; otherwise what starting takes is spent once.
    """
    words = [str(argument) for argument in arguments]
    command = [sys.executable, "-m", "flexshard.cli", *words]
    if new:
        assert limit_bytes is None
        environment = {**os.environ, **_ENVIRONMENT}
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)
    with tempfile.TemporaryDirectory() as held:
        paths = [f"{held}/{name}" for name in ("stdout", "stderr")]
        server = _server()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps([str(folder), words, dict(os.environ), paths, limit_bytes]) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        return subprocess.CompletedProcess(command, code, *(Path(path).read_text() for path in paths))


@cache
def _server() -> subprocess.Popen[str]:
    """It ends when this process does, which closes its input."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.commands"],
        cwd=Path(__file__).parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _serve() -> None:
    """Run every command of standard input in a child, one after the other, and write the codes with which they end."""
    for room in _ROOMS:
        with contextlib.suppress(ImportError):
            module = importlib.import_module(f"flexshard.{room}")
            for name in module.__all__:
                with contextlib.suppress(ImportError):
                    getattr(module, name)
    for line in sys.stdin:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # libraries' idle threads
            child = os.fork()
        if not child:
            _become(*json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _become(
    folder: str, words: Sequence[str], environment: dict[str, str], paths: Sequence[str], limit_bytes: int | None
) -> None:
    """Be a process that was started with these words."""
    import flexshard.cli

    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in enumerate(paths, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment, **_ENVIRONMENT)
    sys.modules["__main__"].__package__ = "flexshard.cli"
    sys.argv = [str(Path(flexshard.cli.__file__).with_name("__main__.py")), *words]
    if limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    code: Any = 1
    try:
        flexshard.cli.main()
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        if isinstance(code, str):
            print(code, file=sys.stderr)
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


if __name__ == "__main__":
    _serve()
