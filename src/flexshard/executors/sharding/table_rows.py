"""What stands for a table in a sharded collection."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["TableRows"]


class TableRows(nn.Module):
    """Stands for a table where parameters are listed: this rank's rows of it.

    What is saved and loaded is whole tables, which the collection gives and takes.
    """

    def __init__(self, rows: nn.Parameter) -> None:
        super().__init__()
        self.weight = rows

    def _save_to_state_dict(self, *_: Any) -> None:
        pass

    def _load_from_state_dict(self, *_: Any) -> None:
        pass
