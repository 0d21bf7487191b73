"""All ranks agree, or all raise: a rank that stopped alone would leave the others waiting for it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from flexshard.errors import FlexShardError

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["differing_ranks", "lost_rank", "on_all_ranks", "on_first_rank"]

ResultT = TypeVar("ResultT")
ErrorType = Callable[[str], FlexShardError]


def on_all_ranks(
    work: Callable[[], ResultT], error_type: ErrorType, process_group: dist.ProcessGroup | None = None
) -> ResultT:
    """Do something on every rank, and go on only if it succeeded on all of them; every rank must call it.

    ``work`` starts no collectives: those of a rank that stops in the middle would keep the others waiting.

    Raises:
        Exception: what ``work`` raised on this rank.
        error_type: on the ranks where it did not, with the first failing rank and its message; or where a rank has
            ended meanwhile.
    """
    import torch.distributed as dist

    problem: Exception | None = None
    result: Any = None
    try:
        result = work()
    except Exception as error:  # whatever it is, the other ranks must hear of it
        problem = error
    messages: list[Any] = [None] * dist.get_world_size(process_group)
    try:
        dist.all_gather_object(messages, None if problem is None else str(problem), group=process_group)
    except RuntimeError as error:
        raise problem or error_type(lost_rank(error)) from error
    if problem is not None:
        raise problem
    failed = next((rank for rank, message in enumerate(messages) if message is not None), None)
    if failed is not None:
        raise error_type(f"rank {failed}: {messages[failed]}")
    return result  # type: ignore[no-any-return]  # what work returned


def lost_rank(error: Exception) -> str:
    """What a collective's own error means."""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return (
        "a rank ended, or did not answer within the process group's timeout, as where it has fewer batches than others;"
        " see the other ranks' messages"
        f" ({reason[:200]})"
    )


def on_first_rank(
    work: Callable[[], ResultT], error_type: ErrorType, process_group: dist.ProcessGroup | None = None
) -> ResultT:
    """Do something on the group's first rank; every rank gets its result, or raises its error. Both are pickled.

    Raises:
        Exception: what ``work`` raised, or ``error_type`` with its message where it cannot be pickled.
        error_type: a rank has ended meanwhile.
    """
    import torch.distributed as dist

    group = dist.group.WORLD if process_group is None else process_group
    box: list[Any] = [None]
    if dist.get_rank(group) == 0:
        try:
            box = [(work(), None)]
        except Exception as error:  # the other ranks wait for an answer
            box = [(None, _picklable(error, error_type))]
    try:
        dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    except RuntimeError as error:
        problem = None if box[0] is None else box[0][1]
        raise problem or error_type(lost_rank(error)) from error
    result, problem = box[0]
    if problem is not None:
        raise problem
    return result  # type: ignore[no-any-return]  # what work returned


def differing_ranks(value: Any, process_group: dist.ProcessGroup | None = None) -> tuple[list[Any], list[int]]:
    """Every rank's value, and the ranks where it differs from the first that is not None; every rank must call it."""
    import torch.distributed as dist

    values: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(values, value, group=process_group)
    expected = next((known for known in values if known is not None), None)
    return values, [rank for rank, known in enumerate(values) if known is not None and known != expected]


def _picklable(error: Exception, error_type: ErrorType) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return error_type(f"{type(error).__name__}: {error}")
    return error
