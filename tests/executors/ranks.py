"""Real processes of a job: nodes x ranks on one machine, gloo between them."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import shutil
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

# What is imported first may take the GPU, which a forked process cannot have then.
context = multiprocessing.get_context("forkserver" if shutil.which("nvidia-smi") is None else "spawn")
if context.get_start_method() == "forkserver":
    context.set_forkserver_preload(["tests.executors.preload"])


def run(
    nodes: int,
    ranks_per_node: int,
    work: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    limit: float = 240.0,
    expect_failures: bool = False,
    backend: str = "gloo",
) -> list[Any]:
    """Call ``work(rank, *args)`` in every rank; what each returned, or with ``expect_failures`` its exception.

    Args:
        timeout: of collectives, in seconds.
        limit: seconds until all ranks are given up and ended.
        backend: of the process group.
    """
    world = nodes * ranks_per_node
    with tempfile.TemporaryDirectory() as folder:
        queue = context.Queue()
        processes = [
            context.Process(
                target=_rank, args=(rank, world, ranks_per_node, folder, timeout, queue, work, args, backend)
            )
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        results: dict[int, Any] = {}
        deadline = time.monotonic() + limit
        try:
            while len(results) < world and time.monotonic() < deadline:
                try:
                    rank, result = queue.get(timeout=0.2)
                    results[rank] = result
                except Exception:
                    dead = [i for i, p in enumerate(processes) if p.exitcode is not None and i not in results]
                    if dead and queue.empty():
                        time.sleep(0.2)
                        if queue.empty():
                            for i in dead:
                                results[i] = RuntimeError(f"rank {i} ended with code {processes[i].exitcode}")
                failed = [r for r in results.values() if isinstance(r, BaseException)]
                if failed and not expect_failures:
                    break
        finally:
            for process in processes:
                process.join(0.5 if len(results) == world else 0.0)
                if process.is_alive():
                    process.kill()
                    process.join()
    if not expect_failures:
        for rank, result in sorted(results.items()):
            if isinstance(result, BaseException):
                raise AssertionError(f"rank {rank}: {result}\n{getattr(result, 'text', '')}") from result
    missing = [rank for rank in range(world) if rank not in results]
    assert not missing, f"ranks {missing} did not answer within {limit} s"
    return [results[rank] for rank in range(world)]


def leave_together() -> None:
    """Wait for all ranks, by no collective: one that ended would take with it what others still receive."""
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    store.set(f"done-{dist.get_rank()}", "")
    store.wait([f"done-{rank}" for rank in range(dist.get_world_size())], timedelta(seconds=30))


def _rank(
    rank: int,
    world: int,
    ranks_per_node: int,
    folder: str,
    timeout: float,
    queue: Any,
    work: Callable[..., Any],
    args: tuple[Any, ...],
    backend: str,
) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank % ranks_per_node),
        LOCAL_WORLD_SIZE=str(ranks_per_node),
        GLOO_SOCKET_IFNAME="lo",
    )
    warnings.simplefilter("ignore")
    faulthandler.enable()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    try:
        dist.init_process_group(
            backend,
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout),
        )
        queue.put((rank, work(rank, *args)))
    except BaseException as error:
        error.text = traceback.format_exc()  # type: ignore[attr-defined]
        try:
            queue.put((rank, error))
        except Exception:
            queue.put((rank, RuntimeError(str(error))))
    queue.close()
    queue.join_thread()
    os._exit(0)  # without waiting for the others to leave their groups
