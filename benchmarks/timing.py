"""Timing that can be trusted on a shared machine: medians of repeated runs, and peak memory of whole processes."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = ["Run", "machine", "median_seconds", "on_one_core", "paired_medians", "run_process"]

KeyT = TypeVar("KeyT")


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


def paired_medians(
    models: Mapping[KeyT, Any],
    step: Callable[[Any, Any], object],
    batches: Sequence[Any],
    *,
    blocks: int,
    barrier: Callable[[], object],
) -> dict[KeyT, list[float]]:
    """Median step of every model in each block; models take turns, so that a busy machine slows all of them.

    Args:
        step: trains a model on a batch.
        barrier: until all ranks are here, before and after each step.
    """
    medians: dict[KeyT, list[float]] = {name: [] for name in models}
    for _ in range(blocks):
        for name, model in models.items():
            times = []
            for batch in batches:
                barrier()
                start = time.perf_counter()
                step(model, batch)
                barrier()
                times.append(time.perf_counter() - start)
            medians[name].append(statistics.median(times))
    return medians


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
