"""Values that people name by a word: methods, reductions, translations, budgets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from flexshard.errors import JobError

__all__ = ["Named", "parse"]

NamedT = TypeVar("NamedT", bound="Named")


class Named:
    """A value with a name, which it equals and prints as: files and older code compare texts.

    Attributes:
        name: as people write it.
    """

    name: str

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            return self.name == other
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return self.name

    def __format__(self, how: str) -> str:
        return format(self.name, how)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


def parse(given: Any, known: Mapping[str, NamedT], kind: type[NamedT], what: str) -> NamedT:
    """A value from itself or its name.

    Raises:
        JobError: neither.
    """
    if isinstance(given, kind):
        return given
    if not isinstance(given, str) or given not in known:
        raise JobError(f"{what} must be one of {', '.join(known)}, found {given!r}")
    return known[given]
