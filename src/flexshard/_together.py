"""Errors of one rank that all ranks raise: the others would otherwise go on, and wait for it in vain."""

from __future__ import annotations

import pickle
from typing import Any

from flexshard.errors import FlexShardError

__all__ = ["picklable", "raise_together"]


def picklable(error: Exception, error_type: type[FlexShardError]) -> Exception:
    """The error itself, or its words as another type where it cannot be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return error_type(f"{type(error).__name__}: {error}")
    return error


def raise_together(problem: Exception | None, error_type: type[FlexShardError], process_group: Any = None) -> None:
    """Go on only if no rank has a problem; every rank must call it.

    Raises:
        Exception: the rank's own problem.
        error_type: on the other ranks, with the first problem's words and rank.
    """
    import torch.distributed as dist

    words: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(words, None if problem is None else str(problem), group=process_group)
    if problem is not None:
        raise problem
    failed = next((rank for rank, found in enumerate(words) if found is not None), None)
    if failed is not None:
        raise error_type(f"rank {failed}: {words[failed]}")
