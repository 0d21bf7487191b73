"""Old names, kept for one release."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any

__all__ = ["deprecated_attribute", "renamed_keywords"]


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


def _warn(message: str, level: int) -> None:
    warnings.warn(f"{message}; the old name goes with the next release", DeprecationWarning, stacklevel=level)
