"""What a step with caches asks of the host on a GPU, counted on a CPU: operations, and the main thread's time.

    python -m benchmarks.lookahead.host_operations

The step of ``uvm_caching`` with small batches, whose code does what it would do on a GPU (``tests/host_waits.py``).
TorchRec's tables have no cache here, since FBGEMM's needs a GPU: what its prefetching asks for comes on top of theirs.
Kernels on CPUs take time that those of a GPU do not take from the host, in both.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from tests.host_waits import as_on_cuda
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.lookahead import uvm_caching
from benchmarks.lookahead.streams import CRITEO_ROWS

__all__ = ["Operations", "compare", "main"]

MOST_ROWS, SAMPLES, SHARE, WARM, COUNTED, BLOCKS, STEPS = 20_000, 64, 0.5, 20, 5, 12, 20


class Operations(TorchDispatchMode):
    """Counts operations while it is open, and of these the views, which start no kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace != "profiler":  # marks of the two in traces
            self.counts["views" if func.is_view else "others"] += 1
        return result


def compare(*, pooled: bool) -> dict[str, tuple[float, float, Callable[[int], None]]]:
    """Operations of a step, without views and with them, and what makes so many steps; of both."""
    device = torch.device("cpu")
    rows = tuple(min(number, MOST_ROWS) for number in CRITEO_ROWS)
    every = uvm_caching.batches_of(rows, SAMPLES, WARM + COUNTED + BLOCKS * STEPS + 8, pin=False)
    pipelines = {
        "TorchRec's": uvm_caching.in_device_memory(rows, device, pooled=pooled),
        "ours": uvm_caching.ours(rows, SHARE, device, pooled=pooled, lookahead=4),
    }
    found = {}
    for name, pipeline in pipelines.items():
        steps = partial(uvm_caching.steps, pipeline, iter(every))
        steps(WARM)
        with Operations() as seen:
            steps(COUNTED)
        found[name] = (seen.counts["others"] / COUNTED, seen.counts.total() / COUNTED, steps)
    return found


def main() -> None:
    """Bags and rows."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            for pooled in (True, False):
                with as_on_cuda():
                    found = compare(pooled=pooled)
                    seconds: dict[str, list[float]] = {name: [] for name in found}
                    for _ in range(BLOCKS):
                        for name, (_, _, steps) in found.items():
                            start = time.thread_time()
                            steps(STEPS)
                            seconds[name].append((time.thread_time() - start) / STEPS)
                what = "; ".join(
                    f"{name} {kernels:.0f} operations ({total:.0f} with views), {1e3 * median(seconds[name]):.2f} ms"
                    for name, (kernels, total, _) in found.items()
                )
                times = sorted(a / b for a, b in zip(seconds["ours"], seconds["TorchRec's"], strict=True))
                print(
                    f"{'bags' if pooled else 'rows'} of {len(CRITEO_ROWS)} tables, {SAMPLES} samples: {what} of the"
                    f" main thread a step, {median(times):.2f} times as long ({times[0]:.2f} to {times[-1]:.2f})",
                    flush=True,
                )
        finally:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
