"""Memory budgets: what row-wise needs, a difference to that, or a limit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from flexshard import units
from flexshard.errors import JobError, UnitError
from flexshard.planner.named import Named
from flexshard.topologies import Cluster

__all__ = ["Budget", "BudgetLike", "Difference", "Limit", "Neutral", "parse_budget"]


class Budget(Named):
    """Memory that embeddings may take per rank; its name is the budget as it was written."""

    def limit_bytes(self, neutral_bytes: float, cluster: Cluster) -> float:
        """Bytes per rank, where row-wise needs ``neutral_bytes``.

        Raises:
            JobError: the cluster's reserve leaves nothing of it.
        """
        raise NotImplementedError


BudgetLike = str | float | Budget  # as people write it


class Neutral(Budget):
    """No more than row-wise needs."""

    name = "neutral"

    def __init__(self, name: str = name) -> None:
        """As the text says that it was read from."""
        self.name = name

    def limit_bytes(self, neutral_bytes: float, cluster: Cluster) -> float:
        """What row-wise needs."""
        del cluster
        return neutral_bytes


class Difference(Budget):
    """So many bytes more or fewer than row-wise needs."""

    def __init__(self, nbytes: float, name: str | None = None) -> None:
        """``nbytes``, and the text that it was read from, if it was."""
        self.nbytes = nbytes
        self.name = f"{nbytes:+} B" if name is None else name

    def limit_bytes(self, neutral_bytes: float, cluster: Cluster) -> float:
        """What row-wise needs, and the difference."""
        del cluster
        return neutral_bytes + self.nbytes


class Limit(Budget):
    """An absolute limit, of which the cluster's reserve is taken off."""

    def __init__(self, nbytes: float, name: str | None = None) -> None:
        """``nbytes``, and the text that it was read from, if it was."""
        self.nbytes = nbytes
        self.name = f"{nbytes} B" if name is None else name

    def limit_bytes(self, neutral_bytes: float, cluster: Cluster) -> float:
        """The limit less the reserve; raises as :meth:`Budget.limit_bytes`."""
        del neutral_bytes
        if self.nbytes <= cluster.reserve_bytes:
            raise JobError(
                f"budget {self.name!r} is not above the cluster's reserve of"
                f" {units.format_bytes(cluster.reserve_bytes)}; raise it or lower the reserve"
            )
        return self.nbytes - cluster.reserve_bytes


def parse_budget(given: Any) -> Budget:
    """A budget from "neutral", a difference ("+2GiB", or a number of bytes), a limit ("40GiB"), or itself.

    Raises:
        JobError: none of these.
    """
    if isinstance(given, Budget):
        return given
    if isinstance(given, bool) or not isinstance(given, (str, int, float, np.number)):
        raise JobError(f"budget must be 'neutral', a difference or a limit, found {given!r}")
    if not isinstance(given, str):
        try:
            nbytes = float(given)  # of numpy's, too
        except OverflowError:
            nbytes = math.inf
        if not math.isfinite(nbytes):
            raise JobError(f"budget must be a finite number of bytes, found {given}")
        return Difference(nbytes)
    text = given.strip()
    if text == Neutral.name:
        return Neutral(given)
    try:
        nbytes = units.parse_bytes(given)
    except UnitError as error:
        raise JobError(f"budget must be 'neutral', a difference ('+2GiB') or a limit ('40GiB'): {error}") from error
    return Difference(nbytes, given) if text[0] in "+-" else Limit(nbytes, given)
