"""TorchRec's jagged batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["expanded", "with_values"]


def expanded(lengths: torch.Tensor, inverse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists that stand for several samples, written out: lengths of the samples' lists, shape (samples,), and which
    entry each of their entries is, shape (n,).

    Args:
        lengths: of the distinct lists; shape (lists,).
        inverse: which of them each sample has; shape (samples,).
    """
    import torch

    first = torch.cumsum(lengths, 0) - lengths
    sample_lengths = lengths.index_select(0, inverse)
    before = torch.cumsum(sample_lengths, 0) - sample_lengths
    shift = torch.repeat_interleave(first.index_select(0, inverse) - before, sample_lengths)
    return sample_lengths, shift + torch.arange(shift.numel(), device=shift.device)


def with_values(features: KeyedJaggedTensor, values: torch.Tensor) -> KeyedJaggedTensor:
    """The same batch, of one size or of one for each feature, with other values; shape (n,)."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    variable = features.variable_stride_per_key()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=values,
        lengths=features.lengths(),
        weights=features.weights_or_none(),
        stride=None if variable else features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if variable else None,
        inverse_indices=features.inverse_indices_or_none(),
    )
