"""Sums of the gradients of rows that stand several times in a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexshard._internal.device_copies import host_waits_for, run_numbers

if TYPE_CHECKING:
    import torch

__all__ = ["NO_SLOT", "sum_by_slot"]

NO_SLOT = (1 << 31) - 1  # sorts behind all slots


def sum_by_slot(slots: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The sum of each slot's gradients, in a fixed order, unlike that of ``index_add`` on CUDA: copies must stay equal
    to the last bit.

    Args:
        slots: shape (n,), int64; entries of :data:`NO_SLOT` do not count.
        gradient: shape (n, D), float32.

    Returns:
        Slots, their sums, and whether they are to be updated (None: all of them). On CPUs they are distinct. Elsewhere
        the host would have to wait to hear how many there are; there are n, of which the last one fills up the rest.
    """
    import torch

    if not len(slots):
        return slots, gradient, None
    ordered, order = torch.sort(slots, stable=True)
    gradient = gradient[order]
    if not host_waits_for(slots.device):
        distinct, lengths = torch.unique_consecutive(ordered, return_counts=True)
        if len(distinct) and int(distinct[-1]) == NO_SLOT:
            distinct, lengths = distinct[:-1], lengths[:-1]
            gradient = gradient[: int(lengths.sum())]
        if len(distinct):
            gradient = torch.segment_reduce(gradient, "sum", lengths=lengths)
        return distinct, gradient, None
    run = run_numbers(ordered)
    distinct = torch.full_like(ordered, NO_SLOT).scatter_(0, run, ordered)
    lengths = torch.zeros_like(run).index_add_(0, run, torch.ones_like(run))
    sums = torch.segment_reduce(gradient, "sum", lengths=lengths, initial=0, unsafe=True)
    number = (distinct != NO_SLOT).sum()
    own = torch.minimum(torch.arange(len(slots), device=slots.device), (number - 1).clamp(min=0))
    some = (number > 0).expand(len(slots))
    return torch.where(some, distinct[own], 0), torch.where(some.view(-1, 1), sums[own], 0.0), some
