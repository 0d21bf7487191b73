"""Where ids are translated to the locations of their rows, and what that takes of a rank's memory."""

from __future__ import annotations

from flexshard.planner.named import Named
from flexshard.tables import place_bytes, translation_bytes

__all__ = ["TRANSLATIONS", "OnDevice", "OnLoader", "Translation"]


class Translation(Named):
    """Where ids are translated to ranks and slots."""

    def held_bytes(self, rows: int, *, dealt_by_id: bool) -> int:
        """Static memory of a rank for a table of so many rows, wherever they live; ``dealt_by_id`` where its row-wise
        rows are, so that only the others need places, which count extra.
        """
        raise NotImplementedError

    def place_bytes(self, rows: int) -> int:
        """Static memory of a rank for the place of one row, in a table of so many."""
        raise NotImplementedError


class OnLoader(Translation):
    """Ahead of the model, in host memory."""

    name = "loader"

    def held_bytes(self, rows: int, *, dealt_by_id: bool) -> int:
        """None of a rank's memory."""
        del rows, dealt_by_id
        return 0

    def place_bytes(self, rows: int) -> int:
        """None of a rank's memory."""
        del rows
        return 0


class OnDevice(Translation):
    """In the model: a set of the rows that need a place, and their places, in the memory of each rank."""

    name = "device"

    def held_bytes(self, rows: int, *, dealt_by_id: bool) -> int:
        """Of the set; where no rows are dealt by id, of a place for each."""
        return translation_bytes(rows, 0 if dealt_by_id else None)

    def place_bytes(self, rows: int) -> int:
        """As listed."""
        return place_bytes(rows)


TRANSLATIONS: dict[str, Translation] = {one.name: one for one in (OnLoader(), OnDevice())}
