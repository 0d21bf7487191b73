"""Rows between a cache and the host's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torchrec")
pytest.importorskip("numba")

import torch

from flexshard.executors.lookahead.host_rows import HostRows, LocalRows


class Plain(HostRows):
    """By torch's own functions, as a store elsewhere is reached."""

    def __init__(self, values: Mapping[str, torch.Tensor]) -> None:
        self._values = values

    def read(self, slots: Any, names: Sequence[str]) -> dict[str, torch.Tensor]:
        return {name: self._values[name][torch.from_numpy(slots)] for name in names}

    def write(self, slots: Any, rows: Mapping[str, torch.Tensor]) -> None:
        for name, values in rows.items():
            self._values[name][torch.from_numpy(slots)] = values

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("width", [1, 3, 8])
@pytest.mark.parametrize("first", [0, 1, 4])  # rows may begin anywhere in a larger tensor
def test_rows_are_copied_to_the_last_bit(dtype: torch.dtype, width: int, first: int) -> None:
    generator = np.random.default_rng(width)

    def drawn(rows: int, first: int) -> torch.Tensor:
        size = torch.empty(0, dtype=dtype).element_size()
        bits = torch.from_numpy(generator.integers(0, 256, (first + rows * width) * size, np.uint8))
        return bits.view(dtype)[first:].view(rows, width)

    host, cache = {"weight": drawn(50, first)}, {"weight": drawn(20, 0)}
    other = [{name: values.clone() for name, values in side.items()} for side in (host, cache)]
    slots, places = generator.permutation(50)[:13], generator.permutation(20)[:13]
    LocalRows(host, lambda: False).fetch(slots, cache, places)
    Plain(other[0]).fetch(slots, other[1], places)
    for back, where in ((slots[:5], places[8:]), (slots[:0], places[:0])):
        LocalRows(host, lambda: False).put_back(back, cache, where)
        Plain(other[0]).put_back(back, other[1], where)
    bits = [[side["weight"].contiguous().view(torch.uint8) for side in both] for both in ((host, cache), other)]
    assert all(torch.equal(a, b) for a, b in zip(*bits, strict=True))
