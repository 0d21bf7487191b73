"""A share of the machine's processors for each rank, by control groups of Linux (either version, as root).

Ranks that share processors freely leave what they do not need to the others: a rank that waits for the network then
makes another one faster, and hiding a wait gains nothing. With a share of its own a rank that waits loses it, as a
machine of its own would.
"""

from __future__ import annotations

import contextlib
import os
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
    old = _ROOT / "cpu" / "cpu.cfs_quota_us"
    parent = old.parent if old.exists() else _ROOT
    groups = [parent / f"{prefix}-rank{rank}" for rank in range(ranks)]
    quota = round(cores * _PERIOD_US)
    try:
        if parent == _ROOT:
            (parent / "cgroup.subtree_control").write_text("+cpu")
        for group in groups:
            group.mkdir(exist_ok=True)
            if parent == _ROOT:
                (group / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
            else:
                (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
                (group / "cpu.cfs_quota_us").write_text(str(quota))
        yield groups
    except OSError as error:
        raise NetworkError(f"no control group for processors: {error}; leave --cores out") from None
    finally:
        for group in groups:
            _remove(group)


def inside(group: Path, command: Sequence[str]) -> list[str]:
    """A command that runs another one in a control group."""
    return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs"), *command]


def _remove(group: Path) -> None:
    """Once the last process has left it."""
    for _ in range(50):
        try:
            group.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.1)
        else:
            return
