"""Pooling and attention computed once for all samples that share it (RecD paper, section 5, O7, and section 7).

What may be shared is a matter of what an output depends on. What depends on an id alone is computed once per id that is
kept. What is causal, so that a place depends on the ones before it, is computed once for all lists that begin at one
place of a shared buffer. What depends on a whole list is computed once per distinct list, and what depends on a
sample's own target as well, once per sample.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from flexshard.embeddings.dedup.jagged import DedupedJagged
from flexshard.embeddings.dedup.module_checks import check_causal, check_rows, is_due
from flexshard.embeddings.dedup.partial import PartialJaggedTensor
from flexshard.errors import DataError

__all__ = ["Deduped", "DedupedCausal", "DedupedPerSample", "Shared", "as_runs"]

Shared = DedupedJagged | PartialJaggedTensor


class Deduped(nn.Module):
    """Any pooling or attention module, run once per distinct row (O7).

    The module's inputs and outputs have a row per sample in their first dimension; it must treat rows one by one.
    """

    def __init__(self, module: nn.Module) -> None:
        """Wrap ``module``, which takes JaggedTensors (or what ``forward`` is given besides).

        Raises:
            DataError: it has dropout, which would drop the same for all samples of a row, or batch normalisation, which
                would count each row once; put such layers behind, where every sample has a row.
        """
        super().__init__()
        _check_row_by_row(module)
        self.module = module
        self._calls = 0

    def forward(self, *sequences: Shared | JaggedTensor, **others: Any) -> Any:
        """Its output for every sample; shape (B, ...), for each tensor that it returns.

        That it treats rows one by one is checked at its first, second, fourth, ... call, on some rows by themselves.

        Args:
            sequences: of features of one group, given to the module as JaggedTensors of R lists; or of plain features,
                for which it runs as it would by itself.
            others: given to it as they are.

        Raises:
            DataError: no sequences, or of different groups; an output that has not a row per distinct row; random
                numbers drawn; or rows whose outputs depend on what other rows there are.
        """
        shared = _shared(sequences)
        before = _random_state(sequences)
        distinct = [_distinct(sequence) for sequence in sequences]
        result = self.module(*distinct, **others)
        _check_random_state(before, sequences, shared)
        if not _is_traced(*sequences) and shared is not None and not others:  # what else is given may have rows, too
            self._calls += not is_due(self._calls) or check_rows(self.module, distinct, result)
        return _expanded(result, shared)


class DedupedCausal(nn.Module):
    """A causal module of sequences, such as a transformer with a causal mask, run once for all lists that begin alike.

    What it makes of a place depends on the places up to it in the list. So the lists of a session that has only grown,
    which begin at one place of their buffer, have the longest one's outputs in common; lists that have dropped their
    oldest ids begin elsewhere, and are computed apart. Outputs and gradients are those of every list by itself. (Of
    newest-first lists, no two begin alike.)
    """

    def __init__(self, module: nn.Module) -> None:
        """Wrap ``module``, which takes a JaggedTensor and returns its values' outputs, in their order.

        That it is causal is checked at its first, second, fourth, eighth, ... call, on beginnings of some lists.

        Raises:
            DataError: as :class:`Deduped`.
        """
        super().__init__()
        _check_row_by_row(module)
        self.module = module
        self._calls = 0

    def forward(self, history: Shared | JaggedTensor) -> PartialJaggedTensor:
        """Outputs at every place of every sample's list, of which :meth:`PartialJaggedTensor.last` gives the last.

        Args:
            history: lists of vectors; of a plain feature too.

        Raises:
            DataError: outputs that are not one per value; a module that is not causal, or draws random numbers while
                training.
        """
        sequences, lists = _sequences(history)
        before = _random_state((history,))
        outputs = _values(self.module(sequences), sequences)
        _check_random_state(before, (history,), True)
        if not _is_traced(history):  # where no list tells, the next call is checked
            self._calls += not is_due(self._calls) or check_causal(self.module, sequences, self._calls)
        return _with_values(lists, outputs)


class DedupedPerSample(nn.Module):
    """A module whose output depends on a sample's own target too, as DIN's attention does: run once per sample.

    Lookups stay shared, and so does what is computed on a sequence's ``values`` before. For attention by dot products,
    :class:`TargetAttention` shares more.
    """

    def __init__(self, module: nn.Module) -> None:
        """Wrap ``module``, which takes JaggedTensors of B lists, and what has a row per sample."""
        super().__init__()
        self.module = module

    def forward(self, *sequences: Shared | JaggedTensor, **others: Any) -> Any:
        """Its output, of every sample's own lists.

        Args:
            sequences: of any groups, or plain.
            others: given to it as they are, such as a target's vectors; shape (B, ...).
        """
        return self.module(*(_every(sequence) for sequence in sequences), **others)


def _check_row_by_row(module: nn.Module) -> None:
    for name, part in module.named_modules():
        chance = part.p if isinstance(part, nn.modules.dropout._DropoutNd) else getattr(part, "dropout", 0.0)
        where = f"{type(part).__name__} {name!r}" if name else type(part).__name__
        if isinstance(chance, float | int) and not isinstance(chance, bool) and chance > 0:
            raise DataError(
                f"{where} drops {chance:.0%} at random: samples that share a row would lose the same; set it to 0, or"
                " put dropout behind, where every sample has a row"
            )
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            raise DataError(
                f"{where} normalises over rows: a row that many samples share would count once; put it behind, where"
                " every sample has a row, or use LayerNorm"
            )


# What is wrapped stays whole where a pipeline traces the model to find out what its lookups are given.
@torch.fx.wrap
def _shared(sequences: tuple[Shared | JaggedTensor, ...]) -> Shared | None:
    """One of them, all being of one group; None if they are plain."""
    if not sequences:
        raise DataError("a deduplicated module needs a sequence; call it with DedupedJagged values")
    deduped = [sequence for sequence in sequences if isinstance(sequence, Shared)]
    if not deduped:
        return None
    first = deduped[0]
    for other in deduped[1:]:
        if _inverse(other) is not _inverse(first) and not torch.equal(_inverse(other), _inverse(first)):
            raise DataError("sequences of different groups have rows of their own; put their features in one group")
    if len(deduped) < len(sequences):
        raise DataError(
            "a plain sequence has a row per sample; put its feature in the group of the others, or use DedupedPerSample"
        )
    return first


def _inverse(sequence: Shared) -> torch.Tensor:
    if sequence.inverse is not None:
        return sequence.inverse
    return torch.arange(sequence.lengths.numel(), device=sequence.lengths.device)


@torch.fx.wrap
def _distinct(sequence: Shared | JaggedTensor) -> JaggedTensor:
    return sequence.distinct() if isinstance(sequence, Shared) else sequence


@torch.fx.wrap
def _every(sequence: Shared | JaggedTensor) -> JaggedTensor:
    return sequence.expand() if isinstance(sequence, Shared) else sequence


@torch.fx.wrap
def _expanded(result: Any, shared: Shared | None) -> Any:
    """A module's outputs, for every sample."""
    if shared is None:
        return result
    inverse, rows = _inverse(shared), shared.num_distinct

    def expand(output: Any) -> Any:
        if output is None or isinstance(output, bool | int | float | str):
            return output
        if not isinstance(output, torch.Tensor):
            raise DataError(
                f"the module returned a {type(output).__name__}, whose rows are not seen; let it return tensors, or"
                " tuples, lists or dicts of them"
            )
        if output.shape[:1] != (rows,):
            raise DataError(f"the module returned shape {tuple(output.shape)} for {rows} distinct rows")
        return output.index_select(0, inverse)

    return pytree.tree_map(expand, result)


@torch.fx.wrap
def _random_state(sequences: tuple[Shared | JaggedTensor, ...]) -> torch.Tensor | None:
    """Of the generator that dropout draws from."""
    return _generator_state(sequences) if sequences else None


def _generator_state(sequences: tuple[Shared | JaggedTensor, ...]) -> torch.Tensor:
    first = sequences[0]
    values = first.values() if isinstance(first, JaggedTensor) else first.values
    return torch.cuda.get_rng_state(values.device) if values.is_cuda else torch.get_rng_state()


@torch.fx.wrap
def _check_random_state(before: torch.Tensor | None, sequences: tuple[Shared | JaggedTensor, ...], shared: Any) -> None:
    """Dropout that is no module of its own shows in the state of the generator."""
    if before is not None and shared and not torch.equal(before, _generator_state(sequences)):
        raise DataError(
            "the module drew random numbers, as dropout does: samples that share a row would have the"
            " same; put what is random behind, where every sample has a row"
        )


@torch.fx.wrap
def _sequences(history: Shared | JaggedTensor) -> tuple[JaggedTensor, PartialJaggedTensor]:
    """Sequences to compute, and every sample's list as a run of their values."""
    if isinstance(history, PartialJaggedTensor):
        return history.sequences()
    return _distinct(history), as_runs(history)


def as_runs(history: Shared | JaggedTensor) -> PartialJaggedTensor:
    """Every sample's list as a run of the values that are kept."""
    if isinstance(history, PartialJaggedTensor):
        return history
    lists = history.distinct() if isinstance(history, DedupedJagged) else history
    lengths = lists.lengths()
    starts = torch.cumsum(lengths, 0) - lengths
    if not isinstance(history, DedupedJagged):
        return PartialJaggedTensor(lists.values(), starts, lengths)
    starts, lengths = starts.index_select(0, history.inverse), lengths.index_select(0, history.inverse)
    return PartialJaggedTensor(lists.values(), starts, lengths, expanded_length=history.expanded_length)


@torch.fx.wrap
def _values(outputs: Any, sequences: JaggedTensor) -> torch.Tensor:
    values = outputs.values() if isinstance(outputs, JaggedTensor) else outputs
    count = sequences.values().shape[0]
    if not isinstance(values, torch.Tensor) or values.shape[:1] != (count,):
        found = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
        raise DataError(
            f"the causal module returned {found} for {count} values of its sequences; it returns one per value"
        )
    return values


@torch.fx.wrap
def _with_values(lists: PartialJaggedTensor, values: torch.Tensor) -> PartialJaggedTensor:
    return lists.with_values(values)


def _is_traced(*values: Any) -> bool:
    """Whether a pipeline traces the model, so that nothing has numbers."""
    return any(isinstance(value, torch.fx.Proxy) for value in values)
