"""A share of the machine's processors for each rank, by control groups of Linux (either version, as root).

Ranks that share processors freely leave what they do not need to the others: a rank that waits for the network then
makes another one faster, and hiding a wait gains nothing. With a share of its own a rank that waits loses it, as a
machine of its own would.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["NetworkError", "inside", "shares"]

_ROOT, _PERIOD_US = Path("/sys/fs/cgroup"), 10_000


class NetworkError(RuntimeError):
    """The network of ranks could not be set up, or a rank failed; the first line says what."""


@contextlib.contextmanager
def shares(prefix: str, ranks: int, cores: float) -> Iterator[list[Path]]:
    """The control groups of so many ranks, each with so many of the machine's cores.

    Raises:
        NetworkError: there are fewer cores than that, or the kernel refuses.
    """
    if ranks * cores > (os.cpu_count() or 1):
        raise NetworkError(f"{ranks} ranks of {cores:g} cores each do not fit {os.cpu_count()} cores; give fewer")
    old = (_ROOT / "cpu" / "cpu.cfs_quota_us").exists()
    parent = _ROOT / "cpu" if old else _ROOT
    groups = [parent / f"{prefix}-rank{rank}" for rank in range(ranks)]
    try:
        try:
            if not old:
                (parent / "cgroup.subtree_control").write_text("+cpu")
            for group in groups:
                _make(group, round(cores * _PERIOD_US), old=old)
        except OSError as error:
            raise NetworkError(
                f"no control group for processors: {error}; let ranks share the cores (--cores 0)"
            ) from None
        yield groups
    finally:
        for group in groups:
            _remove(group)


def _make(group: Path, quota_us: int, *, old: bool) -> None:
    """A group with so much of the processors' time, in either version's files."""
    group.mkdir(exist_ok=True)
    if old:
        (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))
    else:
        (group / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")


def inside(group: Path, command: Sequence[str]) -> list[str]:
    """A command that runs another one in a control group."""
    return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs"), *command]


def _remove(group: Path) -> None:
    """With whatever a command has left running in it."""
    for _ in range(50):
        try:
            for process in (group / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
            group.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.1)  # until they are gone
        else:
            return
