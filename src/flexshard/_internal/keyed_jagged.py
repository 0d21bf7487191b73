"""TorchRec's jagged batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["of_keys", "with_flat_lengths", "with_values", "without_weights"]


def with_values(features: KeyedJaggedTensor, values: torch.Tensor) -> KeyedJaggedTensor:
    """The same batch, of one size or of one for each feature, with other values, shape (n,), and lengths of one
    dimension.
    """
    return _made_of(features, values, features.weights_or_none())


def with_flat_lengths(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The same batch with lengths of one dimension; TorchRec takes (features, samples) as well."""
    return features if features.lengths().dim() == 1 else with_values(features, features.values())


def without_weights(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The same batch, whose ids have no weights."""
    return features if features.weights_or_none() is None else _made_of(features, features.values(), None)


def of_keys(features: KeyedJaggedTensor, keys: Sequence[str]) -> KeyedJaggedTensor:
    """Some features of a batch, in this order. Their weights keep what they were made by: the backward pass of FBGEMM's
    permutation, which TorchRec calls without gradients, ends the process here.
    """
    import torch

    places = {key: place for place, key in enumerate(features.keys())}
    which = [places[key] for key in keys]
    with torch.no_grad():
        part = features.permute(which)
    weights = features.weights_or_none()
    if weights is None or not weights.requires_grad:
        return part
    ends = features.offset_per_key()
    return _made_of(part, part.values(), torch.cat([weights[ends[place] : ends[place + 1]] for place in which]))


def _made_of(features: KeyedJaggedTensor, values: torch.Tensor, weights: torch.Tensor | None) -> KeyedJaggedTensor:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    variable = features.variable_stride_per_key()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=values,
        lengths=features.lengths().reshape(-1),
        weights=weights,
        stride=None if variable else features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if variable else None,
        inverse_indices=features.inverse_indices_or_none(),
    )
