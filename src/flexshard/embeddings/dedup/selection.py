"""Rows of jagged tensors by index, without padding (RecD paper, section 5, O6)."""

from __future__ import annotations

import torch

__all__ = ["jagged_index_select", "run_places"]


def jagged_index_select(
    values: torch.Tensor, lengths: torch.Tensor, index: torch.Tensor, total: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The lists at ``index``, one after the other; gradients of a list that is named often add up.

    Args:
        values: of all lists; shape (N, ...).
        lengths: of each list; shape (rows,).
        index: of lists, each any number of times; shape (taken,).
        total: number of values of the lists taken, where the caller knows it: the host need not wait for it then.

    Returns:
        values and lengths of the lists taken.
    """
    taken = lengths.index_select(0, index)
    starts = (torch.cumsum(lengths, 0) - lengths).index_select(0, index)
    return values.index_select(0, run_places(starts, taken, total)), taken


def run_places(starts: torch.Tensor, lengths: torch.Tensor, total: int | None = None) -> torch.Tensor:
    """Places of runs, one after the other: of each ``lengths`` from ``starts`` on; ``total`` is their sum, if known."""
    if total is None:
        total = int(lengths.sum())  # waits for the device, as every op of unknown size does
    shift = starts - (torch.cumsum(lengths, 0) - lengths)
    indices = torch.repeat_interleave(shift, lengths, output_size=total)
    return indices + torch.arange(total, device=indices.device, dtype=indices.dtype)
