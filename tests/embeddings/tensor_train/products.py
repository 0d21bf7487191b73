"""The dense product of cores, and the ways to compute lookups."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from importlib.util import find_spec

import pytest
import torch

__all__ = ["dense", "each_backend", "each_backend_and"]

# "triton" is what runs on CUDA; without it, in Triton's interpreter, which is slow: small tables, few examples.
_BACKENDS = [
    pytest.param(name, marks=pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed"))
    for name in ("numba", "torch", "triton")
]
each_backend = pytest.mark.parametrize("backend", _BACKENDS)


def each_backend_and(name: str, values: Sequence[str]) -> pytest.MarkDecorator:
    """As ``each_backend`` with each of some values; in Triton's interpreter all but the last are slow cases."""
    cases = []
    for backend, value in itertools.product(_BACKENDS, values):
        slow = [pytest.mark.slow] if backend.values == ("triton",) and value != values[-1] else []
        cases.append(pytest.param(*backend.values, value, marks=[*backend.marks, *slow]))
    return pytest.mark.parametrize(("backend", name), cases)


def dense(cores: list[torch.Tensor], rows: int) -> torch.Tensor:
    """The product of the cores, every row of it; differentiable."""
    table = cores[0].flatten(1).view(cores[0].shape[0], cores[0].shape[2], -1)
    for core in cores[1:]:
        table = torch.einsum("iqr,jrsk->ijqsk", table, core).flatten(0, 1).flatten(1, 2)
    return table.squeeze(2)[:rows]
