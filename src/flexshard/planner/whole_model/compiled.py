"""Loops that are compiled where numba is installed, and run in Python where it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from flexshard._internal import has_numba

__all__ = ["compiled", "copy_into"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(function: _Function) -> _Function:
    """A function of loops over arrays, compiled if it can be."""
    if not has_numba():
        return function
    import numba

    return cast("_Function", numba.njit(cache=True, nogil=True)(function))


@compiled
def _copy_each(target: npt.NDArray[Any], source: npt.NDArray[Any]) -> None:
    into, out_of = target.reshape(-1), source.reshape(-1)
    for place in range(into.size):
        into[place] = out_of[place]


# In compiled loops; assigning one slice to another takes them seconds to compile, for the message where it fails.
copy_into = _copy_each if has_numba() else np.copyto
