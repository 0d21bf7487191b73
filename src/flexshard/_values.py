"""Numbers that people and other libraries hand over, as plain Python ones."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, SupportsFloat

from flexshard.errors import FlexShardError, MissingDependencyError

__all__ = ["finite", "first_repeated", "from_extra", "has_numba", "has_triton", "whole"]

_MOST = 1 << 62


def whole(value: Any, name: str, error_type: type[FlexShardError], *, least: int = 1) -> int:
    """A whole number of at least ``least`` as an ``int``; NumPy's are taken, floats and booleans are not.

    Raises:
        error_type: another type, or out of range.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise error_type(f"{name} must be a whole number, found {value!r}") from None
    if isinstance(value, bool) or not least <= number < _MOST:
        shown = str(value) if abs(number) < _MOST else "a number beyond 2^62"
        raise error_type(f"{name} must be at least {least}, found {shown}")
    return number


def first_repeated(names: Iterable[str]) -> str | None:
    """The first name that stands there a second time, if any does."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def finite(value: SupportsFloat, name: str, error_type: type[FlexShardError]) -> float:
    """A finite number as a ``float``.

    Raises:
        error_type: NaN, infinite, or not a number.
    """
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise error_type(f"{name} must be a number, found {value!r}") from None
    if number - number != 0:
        raise error_type(f"{name} must be finite, found {value!r}")
    return number


@cache  # a package that is missing is looked for in all of the path every time
def has_numba() -> bool:
    """Whether loops can be compiled."""
    try:
        import numba  # noqa: F401 - only to know whether it is there
    except ImportError:
        return False
    return True


@cache
def has_triton() -> bool:
    """Whether kernels for GPUs can be compiled."""
    try:
        import triton  # noqa: F401 - only to know whether it is there
    except ImportError:
        return False
    return True


def from_extra(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's ``__getattr__`` for public names that need TorchRec, imported when they are first used.

    Args:
        package: its full name.
        modules: which of its modules has each name.

    Its result raises MissingDependencyError where TorchRec or torch is not installed.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)
        except ImportError as error:
            raise MissingDependencyError(f"{name} needs TorchRec; run 'make setup' ({error})") from error

    return get
