"""Preprocessing of features, once per distinct row (RecD paper, section 4.3: O4).

A transform takes and returns a KeyedJaggedTensor; :class:`DedupedTransform` runs any of them, and any function or
TorchScript module of the same form, on a deduplicated batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from flexshard._internal import check_int, there_are
from flexshard.embeddings import InverseKeyedJaggedTensor
from flexshard.errors import DataError

__all__ = [
    "ClipIds",
    "DedupedTransform",
    "DropFeatures",
    "DropIds",
    "HashIds",
    "MapIds",
    "SortIds",
    "Truncate",
    "folded",
    "splitmix64",
]

_PADDING = 4  # places of padded rows per value, up to which these are sorted at once (twice as fast, measured)
_BLOCK = 1 << 16  # ids that a processor's cache holds through all steps of a hash: four times as fast (measured)

Batch = TypeVar("Batch", KeyedJaggedTensor, InverseKeyedJaggedTensor)


class DedupedTransform(nn.Module):
    """Transforms, one after the other, on distinct rows only.

    What comes out is what running them on every row would give, since a transform looks at one row at a time. One that
    looks at one id at a time says so by an attribute ``per_id`` that is true (:class:`HashIds`, :class:`ClipIds` and
    :class:`MapIds` have it): it runs on each id of a shared buffer once.
    """

    def __init__(self, *transforms: Any) -> None:
        """Wrap transforms: modules, TorchScript modules or functions of a KeyedJaggedTensor."""
        super().__init__()
        self.transforms = [_checked(transform) for transform in transforms]
        modules = [transform for transform in self.transforms if isinstance(transform, nn.Module)]
        self.modules_held = nn.ModuleList(modules)  # so that buffers move with ``to``

    def forward(self, features: Batch) -> Batch:
        """The transformed batch, of the kind that it came as.

        Raises:
            DataError: a transform returned another number of rows, or names a feature that is not in the batch.
        """
        if all(isinstance(transform, _PerFeature) for transform in self.transforms):  # others may add some
            keys = list(features.keys())
            for transform in self.transforms:
                missing = next((name for name in transform.features or () if name not in keys), None)
                if missing is not None:
                    raise DataError(f"{type(transform).__name__}: no feature {missing!r}; {there_are(keys)}")
        if not isinstance(features, InverseKeyedJaggedTensor):
            return _all(self.transforms, features)
        if all(group.runs is None for group in features.groups):
            return features.map(partial(_all, self.transforms))
        for per_id, together in groupby(self.transforms, lambda transform: bool(getattr(transform, "per_id", False))):
            several = partial(_all, list(together))
            several.per_id = per_id  # type: ignore[attr-defined] # functions take attributes
            features = features.map(several)
        return features


def _all(transforms: Sequence[Any], features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    for transform in transforms:
        if not features.keys():
            break
        features = transform(features)
    return features


def _checked(transform: Any) -> Any:
    if not callable(transform):
        raise DataError(f"a transform is a function or a module, found {transform!r}")
    return transform


class _PerFeature(nn.Module):
    """A transform of some features; the others pass."""

    def __init__(self, features: Sequence[str] | None) -> None:
        super().__init__()
        if isinstance(features, str):
            raise DataError(f"features are a list of names, found {features!r}")
        self.features = None if features is None else list(features)

    def forward(self, batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The batch with its features changed."""
        keys, stride = list(batch.keys()), int(batch.stride())
        if self.features is None or all(key in self.features for key in keys):
            return _batch(keys, *self.change(batch.values(), batch.lengths(), batch.weights_or_none()), stride)
        ends = batch.offset_per_key()
        parts = []
        for index, key in enumerate(keys):
            span, rows = slice(ends[index], ends[index + 1]), slice(index * stride, (index + 1) * stride)
            weights = None if batch.weights_or_none() is None else batch.weights()[span]
            part = (batch.values()[span], batch.lengths()[rows], weights)
            parts.append(self.change(*part) if key in self.features else part)
        values, lengths, each = zip(*parts, strict=True)
        weights = None if each[0] is None else torch.cat(each)
        return _batch(keys, torch.cat(values), torch.cat(lengths), weights, stride)

    def change(
        self, values: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Values, lengths and weights of rows, one after the other, changed."""
        raise NotImplementedError


class HashIds(_PerFeature):
    """Raw ids folded into the rows of a table: ``splitmix64(id) mod num_rows``, as profiles fold them."""

    per_id = True

    def __init__(self, num_rows: int, *, features: Sequence[str] | None = None) -> None:
        """Fold ids of ``features`` (all by default) into ``num_rows`` rows.

        Raises:
            DataError: ``num_rows`` is not a whole number of at least 1.
        """
        super().__init__(features)
        self.num_rows = check_int(num_rows, "num_rows", DataError)

    def change(
        self, values: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """See the class."""
        parts = [values] if values.is_cuda else values.split(_BLOCK)
        rows = [_like(folded(splitmix64(part.long()), self.num_rows), part, self.num_rows - 1) for part in parts]
        return rows[0] if len(rows) == 1 else torch.cat(rows), lengths, weights


class ClipIds(_PerFeature):
    """Ids below or above a range, at its ends."""

    per_id = True

    def __init__(self, least: int, most: int, *, features: Sequence[str] | None = None) -> None:
        """Keep ids of ``features`` (all by default) between ``least`` and ``most``.

        Raises:
            DataError: an empty range.
        """
        super().__init__(features)
        if least > most:
            raise DataError(f"ids cannot be clipped to {least} to {most}; the first is the least")
        self.least, self.most = least, most

    def change(
        self, values: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """See the class."""
        return values.clamp(self.least, self.most), lengths, weights


class MapIds(_PerFeature):
    """Ids by a dictionary, others by a default."""

    per_id = True

    def __init__(self, mapping: Mapping[int, int], *, default: int = 0, features: Sequence[str] | None = None) -> None:
        """Map ids of ``features`` (all by default); those that ``mapping`` lacks become ``default``."""
        super().__init__(features)
        keys = np.fromiter(mapping.keys(), np.int64, len(mapping))
        order = np.argsort(keys)
        self.default = default
        self.register_buffer("known", torch.from_numpy(keys[order]))
        self.register_buffer("target", torch.from_numpy(np.fromiter(mapping.values(), np.int64, len(mapping))[order]))

    def change(
        self, values: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """See the class."""
        if not self.known.numel():
            return torch.full_like(values, self.default), lengths, weights
        index = torch.searchsorted(self.known, values.long()).clamp(max=self.known.numel() - 1)
        mapped = torch.where(self.known[index] == values, self.target[index], self.default)
        most = max(int(self.target.abs().max()), abs(self.default))
        return _like(mapped, values, most), lengths, weights


class SortIds(_PerFeature):
    """Ids of each row in ascending order; weights go with them."""

    def __init__(self, *, features: Sequence[str] | None = None) -> None:
        """Sort rows of ``features`` (all by default)."""
        super().__init__(features)

    def change(
        self, values: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """See the class."""
        longest = int(lengths.max()) if lengths.numel() else 0
        # Few long rows among many short ones; or floats, some of which no padding stands behind.
        if values.is_floating_point() or longest * lengths.numel() > _PADDING * values.numel() + _BLOCK:
            by_value = torch.argsort(values, stable=True)
            order = by_value[torch.argsort(_rows_of(lengths)[by_value], stable=True)]
            return values[order], lengths, None if weights is None else weights[order]
        inside = torch.arange(longest, device=values.device) < lengths[:, None]
        largest = torch.iinfo(values.dtype).max
        # Padding is as large as any value and stands behind it, which a stable sort leaves so.
        rows = torch.full(inside.shape, largest, dtype=values.dtype, device=values.device)
        rows.masked_scatter_(inside, values)
        if weights is None:
            if not rows.is_cuda:
                rows.numpy().sort(axis=1)  # in vector instructions, which torch has not for this
                return rows[inside], lengths, None
            return rows.sort(dim=1)[0][inside], lengths, None
        ordered, order = rows.sort(dim=1, stable=True)
        heavy = torch.zeros(inside.shape, dtype=weights.dtype, device=weights.device).masked_scatter_(inside, weights)
        return ordered[inside], lengths, heavy.gather(1, order)[inside]


class Truncate(_PerFeature):
    """At most so many ids of each row, from its end or its start."""

    def __init__(self, length: int, *, keep: str = "last", features: Sequence[str] | None = None) -> None:
        """Keep the ``last`` or ``first`` ``length`` ids of rows of ``features`` (all by default).

        Raises:
            DataError: ``keep`` is neither, or ``length`` is negative.
        """
        super().__init__(features)
        if keep not in ("last", "first"):
            raise DataError(f"keep is 'last' or 'first', found {keep!r}")
        self.length, self.keep = check_int(length, "length", DataError, least=0), keep

    def change(
        self, values: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """See the class."""
        position = torch.arange(values.numel(), device=values.device)
        position = position - torch.repeat_interleave(torch.cumsum(lengths, 0) - lengths, lengths)
        if self.keep == "last":
            position = torch.repeat_interleave(lengths, lengths) - 1 - position
        kept = position < self.length
        return values[kept], lengths.clamp(max=self.length), None if weights is None else weights[kept]


class DropIds(_PerFeature):
    """Rows without some ids."""

    def __init__(self, ids: Sequence[int], *, features: Sequence[str] | None = None) -> None:
        """Drop ``ids`` from rows of ``features`` (all by default)."""
        super().__init__(features)
        self.register_buffer("ids", torch.tensor(list(ids), dtype=torch.int64))

    def change(
        self, values: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """See the class."""
        kept = ~torch.isin(values.long(), self.ids)
        counts = torch.zeros_like(lengths).index_add_(0, _rows_of(lengths), kept.to(lengths.dtype))
        return values[kept], counts, None if weights is None else weights[kept]


class DropFeatures(nn.Module):
    """A batch without some features."""

    def __init__(self, features: Sequence[str]) -> None:
        """Drop ``features``; those that a batch lacks are no error."""
        super().__init__()
        if isinstance(features, str):
            raise DataError(f"features are a list of names, found {features!r}")
        self.features = list(features)

    def forward(self, batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """See the class."""
        kept = [index for index, key in enumerate(batch.keys()) if key not in self.features]
        if len(kept) == len(batch.keys()):
            return batch
        ends, stride = batch.offset_per_key(), int(batch.stride())

        def parts(tensor: torch.Tensor) -> torch.Tensor:
            pieces = [tensor[ends[index] : ends[index + 1]] for index in kept]
            return torch.cat(pieces) if pieces else tensor[:0]

        lengths = [batch.lengths()[index * stride : (index + 1) * stride] for index in kept]
        weights = batch.weights_or_none()
        return _batch(
            [batch.keys()[index] for index in kept],
            parts(batch.values()),
            torch.cat(lengths) if lengths else batch.lengths()[:0],
            None if weights is None else parts(weights),
            stride,
        )


def _batch(
    keys: list[str], values: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor | None, stride: int
) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys=keys, values=values, lengths=lengths, weights=weights, stride=stride)


def _like(result: torch.Tensor, values: torch.Tensor, most: int) -> torch.Tensor:
    """In the ids' own type, if that holds the largest."""
    return result.to(values.dtype) if most <= torch.iinfo(values.dtype).max else result


def _rows_of(lengths: torch.Tensor) -> torch.Tensor:
    """The row of every value."""
    return torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift to the right."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def folded(mixed: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Unsigned numbers of 64 bits modulo ``num_rows``."""
    # torch does not divide unsigned numbers: their upper 63 bits twice, and the last.
    return (_shifted(mixed, 1) % num_rows * 2 + (mixed & 1)) % num_rows


def splitmix64(ids: torch.Tensor) -> torch.Tensor:
    """Steele, Lea and Flood 2014, in the two's complement arithmetic of int64."""
    mixed = ids + _signed(0x9E3779B97F4A7C15)
    mixed = (mixed ^ _shifted(mixed, 30)) * _signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(0x94D049BB133111EB)
    return mixed ^ _shifted(mixed, 31)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number
