"""Whether a module is what deduplication takes it for: causal, or one that treats rows one by one.

A module that is not would train wrongly without a word. So parts of a batch are given to it by themselves, now and
then: at the first call, and at the second, fourth, eighth, ..., since a gate that starts at zero hides what is behind.
Vectors are brought to a size of 1 before, since rows of large tables start so small that any output looks alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from flexshard.embeddings.dedup.selection import run_places
from flexshard.errors import DataError

__all__ = ["check_causal", "check_rows", "is_due"]

_TRIED = 16
_LEAST_TOLERANCE, _ROUNDINGS = 1e-3, 24


def is_due(calls: int) -> bool:
    """Whether the call after so many is one at which modules are checked."""
    return calls & (calls + 1) == 0


@torch.no_grad()
def check_causal(module: nn.Module, sequences: JaggedTensor, calls: int) -> bool:
    """Check that beginnings of some lists have the outputs that these have in them; False where no list tells.

    Args:
        module: takes lists of vectors, and returns an output per vector.
        sequences: some that it was called with.
        calls: how often it was called: lists are cut elsewhere each time.

    Raises:
        DataError: they have others.
    """
    lengths = sequences.lengths().cpu()
    tried = torch.argsort(lengths, descending=True, stable=True)[:_TRIED]
    tried = tried[lengths[tried] > 1]
    if not tried.numel():
        return False
    begins, whole = (torch.cumsum(lengths, 0) - lengths)[tried], lengths[tried].long()
    values = sequences.values().detach()[run_places(begins, whole).to(sequences.values().device)]
    values = _of_size_1(values)
    # One before the end, one after the start, and others anywhere: what attends within blocks is found, too.
    cuts = 1 + (torch.arange(tried.numel()) * 7919 + calls * 104_729) % (whole - 1)
    cuts[:1], cuts[1:2] = whole[:1] - 1, 1
    places = run_places(torch.cumsum(whole, 0) - whole, cuts).to(values.device)
    with _restored(module):
        full = _values(module(JaggedTensor(values, lengths=whole.to(sequences.lengths()))))
        again = _values(module(JaggedTensor(values[places], lengths=cuts.to(sequences.lengths()))))
    if not _agree(again, full[places], values):
        raise DataError(
            "the module is not causal: what it makes of a place changes with the places after it; give it a causal"
            " mask, or use Deduped, which runs once per distinct list"
        )
    return True


@torch.no_grad()
def check_rows(module: nn.Module, rows: list[JaggedTensor], result: Any) -> bool:
    """Check that some rows by themselves have the outputs that they have among the others; False where there are none.

    Args:
        module: takes lists of vectors, and returns tensors with a row for each.
        rows: what it was called with.
        result: what it returned.

    Raises:
        DataError: they have others.
    """
    count = min(int(part.lengths().numel()) for part in rows) // 2
    if not count:
        return False
    count = min(count, _TRIED)
    few = []
    for part in rows:
        lengths = part.lengths()[:count]
        few.append(JaggedTensor(part.values().detach()[: int(lengths.sum())], lengths=lengths))
    with _restored(module):
        again = module(*few)
    leaves = zip(pytree.tree_leaves(again), pytree.tree_leaves(result), strict=False)
    for one, other in leaves:
        if isinstance(one, torch.Tensor) and one.shape[:1] == (count,) and not _agree(one, other.detach()[:count], one):
            raise DataError(
                "the module does not treat rows one by one: what it makes of a row changes with the rows beside it, as"
                " batch normalisation does; put it behind, where every sample has a row"
            )
    return True


def _of_size_1(values: torch.Tensor) -> torch.Tensor:
    if not values.is_floating_point():
        return values
    size = values.float().square().mean().sqrt()
    return (values / size.clamp(min=1e-30)).to(values.dtype)


def _values(outputs: Any) -> torch.Tensor:
    values: torch.Tensor = outputs.values() if isinstance(outputs, JaggedTensor) else outputs
    return values


@contextmanager
def _restored(module: nn.Module) -> Iterator[None]:
    """What the module counts in buffers, it counts no further."""
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        for buffer, kept in before:
            buffer.copy_(kept)


def _agree(found: torch.Tensor, expected: torch.Tensor, like: torch.Tensor) -> bool:
    """Whether outputs are the same but for rounding, row by row, beside the size of all."""
    if not found.is_floating_point():
        return torch.equal(found, expected)
    kinds = [kind for kind in (found.dtype, like.dtype) if kind.is_floating_point]
    if torch.is_autocast_enabled(like.device.type):
        kinds.append(torch.get_autocast_dtype(like.device.type))
    tolerance = max(_LEAST_TOLERANCE, _ROUNDINGS * max(torch.finfo(kind).eps for kind in kinds))
    own, due = found.float().reshape(len(found), -1), expected.float().reshape(len(expected), -1)
    size = due.square().mean().sqrt()
    apart = (own - due).square().mean(1).sqrt()
    return bool((apart <= tolerance * size).all()) if bool(size.isfinite()) else True
