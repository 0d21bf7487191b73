"""Timing that can be trusted on a shared machine: medians of repeated runs, and peak memory of whole processes."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Run", "machine", "median_seconds", "on_one_core", "run_process"]


@dataclass(frozen=True)
class Run:
    """One finished process: wall time and peak memory as the operating system counts them, and what it printed."""

    seconds: float
    peak_bytes: int
    output: str


def machine() -> str:
    """One line that says what the figures were measured on."""
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}"
    )


def on_one_core() -> None:
    """Keep this process and its threads on one processor, where the system allows it."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def median_seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """Median wall time of calling ``work``."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def run_process(arguments: Sequence[str]) -> Run:
    """Run a Python script in a process of its own."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, arguments)
    return Run(seconds, usage.ru_maxrss * 1024, output)
