"""Old names, kept for one release."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from typing import Any, TypeVar, cast

__all__ = ["deprecated_attribute", "renamed_keywords", "renamed_parameters"]

CallableT = TypeVar("CallableT", bound=Callable[..., Any])


def deprecated_attribute(old: str, new: str) -> Any:
    """A property of the old name that gives what the new one does."""

    def get(value: Any) -> Any:
        _warn(f"{type(value).__name__}.{old} is {new} now", 3)
        return getattr(value, new)

    return property(get, doc=f"Deprecated: :attr:`{new}`.")


def renamed_keywords(
    owner: str, given: Mapping[str, Any], names: Mapping[str, str], *, present: Collection[str] = ()
) -> dict[str, Any]:
    """Keywords that were given by old names, by their new ones.

    Args:
        owner: whose they are, for messages.
        given, names: the keywords; new names by old ones.
        present: new names that were given as well.

    Raises:
        TypeError: a keyword that has neither, or that is given by both names.
    """
    renamed: dict[str, Any] = {}
    for keyword, value in given.items():
        if keyword not in names:
            raise TypeError(f"{owner}() got an unexpected keyword argument {keyword!r}")
        if names[keyword] in {*renamed, *present}:
            raise TypeError(f"{owner}() got {names[keyword]!r} by two names")
        _warn(f"{owner}({keyword}=...) is {names[keyword]}=... now", 4)
        renamed[names[keyword]] = value
    return renamed


def renamed_parameters(**names: str) -> Callable[[CallableT], CallableT]:
    """Have a function, or what makes a class's values, take keywords by old names (new ones by old) as well."""

    def decorate(function: CallableT) -> CallableT:
        is_class = isinstance(function, type)
        called: Callable[..., Any] = vars(function)["__init__"] if is_class else function
        owner = getattr(function, "__name__", "")

        @wraps(called)
        def call(*args: Any, **given: Any) -> Any:
            if not names.keys().isdisjoint(given):
                old = {name: given.pop(name) for name in names if name in given}
                given |= renamed_keywords(owner, old, names, present=given)
            return called(*args, **given)

        if is_class:
            type.__setattr__(cast("type", function), "__init__", call)
        return function if is_class else cast("CallableT", call)

    return decorate


def _warn(message: str, level: int) -> None:
    warnings.warn(f"{message}; the old name goes with the next release", DeprecationWarning, stacklevel=level)
