"""Where ids are translated to the locations of their rows, and what that takes of a rank's memory."""

from __future__ import annotations

from collections.abc import Sequence

from flexshard.planner.named import Named
from flexshard.tables import Table

__all__ = ["TRANSLATIONS", "OnDevice", "OnLoader", "Translation"]


class Translation(Named):
    """Where ids are translated to ranks and slots."""

    def held_bytes(self, tables: Sequence[Table]) -> int:
        """Static memory of a rank that every placement needs for it."""
        raise NotImplementedError


class OnLoader(Translation):
    """Ahead of the model, in host memory."""

    name = "loader"

    def held_bytes(self, tables: Sequence[Table]) -> int:
        """None of a rank's memory."""
        del tables
        return 0


class OnDevice(Translation):
    """In the model: a location per row in the memory of each rank."""

    name = "device"

    def held_bytes(self, tables: Sequence[Table]) -> int:
        """A location of every row."""
        return sum(table.translation_bytes for table in tables)


TRANSLATIONS: dict[str, Translation] = {one.name: one for one in (OnLoader(), OnDevice())}
