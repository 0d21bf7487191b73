"""Checks of what people and other libraries hand over, which come out as plain Python values."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, SupportsFloat

from flexshard import units
from flexshard.errors import FlexShardError, UnitError

__all__ = ["check_above_0", "check_bytes", "check_finite", "check_int", "first_repeated", "name_and_value", "there_are"]

_MOST = 1 << 62
_NAMED = 20


def check_int(value: Any, name: str, error_type: type[FlexShardError], *, least: int = 1) -> int:
    """A whole number of at least ``least`` as an ``int``; NumPy's are taken, floats and booleans are not.

    Raises:
        error_type: another type, or out of range.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise error_type(f"{name} must be a whole number, found {value!r}") from None
    if isinstance(value, bool):
        raise error_type(f"{name} must be a whole number, found {value}")
    if number >= _MOST:
        raise error_type(f"{name} must be below 2^62, found a number beyond it")
    if number < least:
        raise error_type(f"{name} must be at least {least}, found {number if number > -_MOST else 'one below -2^62'}")
    return number


def check_finite(value: SupportsFloat, name: str, error_type: type[FlexShardError]) -> float:
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


def check_above_0(value: SupportsFloat, name: str, error_type: type[FlexShardError]) -> float:
    """A finite number above 0; raises ``error_type`` for others."""
    number = check_finite(value, name, error_type)
    if number <= 0:
        raise error_type(f"{name} must be above 0, found {value}")
    return number


def check_bytes(value: str | float, name: str, error_type: type[FlexShardError], *, least: float = 1) -> float:
    """A number of bytes, or a text such as "4GiB".

    Raises:
        error_type: a text that is no size, or fewer bytes than ``least``.
    """
    try:
        nbytes = units.parse_bytes(value) if isinstance(value, str) else check_finite(value, name, error_type)
    except UnitError as error:
        raise error_type(f"{name}: {error}") from error
    if nbytes < least:
        raise error_type(f"{name} is at least {least:g} bytes, found {value}")
    return nbytes


def there_are(names: Iterable[object]) -> str:
    """What there is, for errors about what is not: the first twenty, and how many others."""
    listed = [str(name) for name in names]
    more = f" and {len(listed) - _NAMED:,} more" if len(listed) > _NAMED else ""
    return f"there are {', '.join(listed[:_NAMED]) or 'none'}{more}"


def name_and_value(text: str, names: Iterable[str]) -> tuple[str | None, str]:
    """NAME=VALUE, where a name that is known may hold "=" itself; no name where there is no "=" at all."""
    known = [name for name in names if text.startswith(f"{name}=")]
    if known:
        name = max(known, key=len)
        return name, text[len(name) + 1 :]
    left, equals, right = text.partition("=")
    return (left, right) if equals else (None, text)


def first_repeated(names: Iterable[str]) -> str | None:
    """The first name that appears a second time, if any does."""
    names = list(names)
    if len(set(names)) == len(names):
        return None
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None
