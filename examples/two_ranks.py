"""Two processes of one machine that train together."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, multiprocessing

__all__ = ["run_ranks"]


def run_ranks(train: Callable[..., None], *arguments: Any) -> None:
    """Call ``train(rank, *arguments)`` in two processes with gloo between them, and the same seed."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_rank_main, (f"{folder}/store", train, arguments), nprocs=2)


def _rank_main(rank: int, store: str, train: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    train(rank, *arguments)
    distributed.destroy_process_group()
    gc.collect()  # gloo's threads end with their group, which models hold in cycles; later they may abort it all
