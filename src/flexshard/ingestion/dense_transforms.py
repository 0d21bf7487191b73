"""Preprocessing of dense columns: what a batch holds a number, or some numbers, of per sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import copysign, inf, isfinite

import numpy as np
import torch

from flexshard._internal import there_are
from flexshard.errors import DataError
from flexshard.ingestion.batch import SessionBatch

__all__ = ["BoxCox", "Clamp", "FillMissing", "Logarithm", "Logit", "Normalize"]

_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


class _PerColumn:
    """A transform of some dense columns, number by number; the others pass."""

    def __init__(self, columns: Sequence[str]) -> None:
        if isinstance(columns, str) or not list(columns):
            raise DataError(f"columns are a list of at least one name, found {columns!r}")
        self.columns = list(columns)

    def __call__(self, batch: SessionBatch) -> SessionBatch:
        """The batch with its columns changed.

        Raises:
            DataError: a column that the batch has not.
        """
        changed = {}
        for name in self.columns:
            if name not in batch.dense:
                raise DataError(f"no dense column {name!r} to transform; {there_are(batch.dense)}")
            values = batch.dense[name]
            changed[name] = self.change(values) if values.is_floating_point() else self.change_whole(values)
        return replace(batch, dense=batch.dense | changed)

    def change(self, values: torch.Tensor) -> torch.Tensor:
        """Floating point numbers, changed."""
        raise NotImplementedError

    def change_whole(self, values: torch.Tensor) -> torch.Tensor:
        """Whole numbers, changed: computed in 64 bits, of which many need more than 32 to be told apart."""
        return self.change(values.double()).float()


class Normalize(_PerColumn):
    """Less their mean, in units of their standard deviation."""

    def __init__(self, columns: Sequence[str], *, mean: float = 0.0, std: float = 1.0) -> None:
        """Normalize ``columns``.

        Raises:
            DataError: a deviation that is not above 0.
        """
        super().__init__(columns)
        if not std > 0:
            raise DataError(f"std is above 0, found {std}")
        self.mean, self.std = mean, std

    def change(self, values: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return (values - self.mean) / self.std


class Logarithm(_PerColumn):
    """``log(1 + x)`` of counts; what is below 0 counts as 0."""

    def change(self, values: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return values.clamp(min=0).log1p()


class Clamp(_PerColumn):
    """Numbers below or above a range, at its ends. Whole numbers stay whole, if the ends are; or else become 64-bit
    floating point numbers.
    """

    def __init__(self, columns: Sequence[str], *, least: float, most: float) -> None:
        """Keep ``columns`` between ``least`` and ``most``.

        Raises:
            DataError: an empty range.
        """
        super().__init__(columns)
        if not least <= most:
            raise DataError(f"numbers cannot be clamped to {least} to {most}; the first is the least")
        self.least, self.most = least, most

    def change(self, values: torch.Tensor) -> torch.Tensor:
        """See the class."""
        largest = torch.finfo(values.dtype).max
        ends = (end if abs(end) <= largest else copysign(inf, end) for end in (self.least, self.most))
        return values.clamp(*ends)

    def change_whole(self, values: torch.Tensor) -> torch.Tensor:
        """See the class."""
        ends = self.least, self.most
        if values.dtype != torch.bool and all(end == int(end) for end in ends if isfinite(end)):
            possible = torch.iinfo(values.dtype)
            if self.least <= possible.max and self.most >= possible.min:
                least, most = (int(min(max(end, possible.min), possible.max)) for end in ends)
                if values.dtype in _UNSIGNED:  # of which torch has no clamp
                    return torch.from_numpy(np.clip(values.numpy(), least, most))
                return values.clamp(least, most)
        return self.change(values.double())


class FillMissing(_PerColumn):
    """A number in place of those that are none (nan). Whole numbers, none of which is missing, stay as they are."""

    def __init__(self, columns: Sequence[str], *, value: float = 0.0) -> None:
        super().__init__(columns)
        self.value = value

    def change(self, values: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return values.nan_to_num(nan=self.value, posinf=torch.inf, neginf=-torch.inf)

    def change_whole(self, values: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return values


class Logit(_PerColumn):
    """``log(x / (1 - x))`` of shares, kept ``margin`` away from 0 and 1."""

    def __init__(self, columns: Sequence[str], *, margin: float = 1e-6) -> None:
        """Take the logits of ``columns``.

        Raises:
            DataError: a margin that is not between 0 and a half.
        """
        super().__init__(columns)
        if not 0 < margin < 0.5:
            raise DataError(f"margin is between 0 and 0.5, found {margin}")
        self.margin = margin

    def change(self, values: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return torch.logit(values, self.margin)


class BoxCox(_PerColumn):
    """``(x**power - 1) / power``, or ``log(x)`` for a power of 0; of numbers of at least ``least``."""

    def __init__(self, columns: Sequence[str], *, power: float, least: float = 1e-6) -> None:
        """Transform ``columns``.

        Raises:
            DataError: a least number that is not above 0.
        """
        super().__init__(columns)
        if not least > 0:
            raise DataError(f"least is above 0, found {least}")
        self.power, self.least = power, least

    def change(self, values: torch.Tensor) -> torch.Tensor:
        """See the class."""
        values = values.clamp(min=self.least)
        return values.log() if self.power == 0 else (values**self.power - 1) / self.power
