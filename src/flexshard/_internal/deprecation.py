"""Old names, kept for one release."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

__all__ = ["deprecated_attribute", "renamed_parameters"]

CallableT = TypeVar("CallableT", bound=Callable[..., Any])


def deprecated_attribute(old: str, new: str) -> Any:
    """A property of the old name that gives what the new one does."""

    def get(value: Any) -> Any:
        _warn(f"{type(value).__name__}.{old} is {new} now", 3)
        return getattr(value, new)

    return property(get, doc=f"Deprecated: :attr:`{new}`.")


def renamed_parameters(**names: str) -> Callable[[CallableT], CallableT]:
    """Have a function, or what makes a class's values, take keywords by old names (new ones by old) as well.

    It raises TypeError for a keyword that is given by both names.
    """

    def decorate(function: CallableT) -> CallableT:
        is_class = isinstance(function, type)
        called: Callable[..., Any] = vars(function)["__init__"] if is_class else function

        @wraps(called)
        def call(*args: Any, **given: Any) -> Any:
            for old in [keyword for keyword in given if keyword in names]:
                new, owner = names[old], type(args[0]).__name__ if is_class else called.__name__
                if new in given:
                    raise TypeError(f"{owner}() got {new!r} by two names")
                _warn(f"{owner}({old}=...) is {new}=... now", 3)
                given[new] = given.pop(old)
            return called(*args, **given)

        if is_class:
            type.__setattr__(cast("type", function), "__init__", call)
        return function if is_class else cast("CallableT", call)

    return decorate


def _warn(message: str, level: int) -> None:
    warnings.warn(f"{message}; the old name goes with the next release", DeprecationWarning, stacklevel=level)
