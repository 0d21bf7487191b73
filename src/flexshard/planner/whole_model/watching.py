"""Ranks that a plan's bound watches: those that have most of what lies on all ranks in any case.

A kind of load takes as long as its busiest rank, so at least as long as ranks take on any weighted average. That of all
ranks alike is close where some tables can make up for what others bring a rank. Where tables are cut into blocks of
rows, of which some are read more than others, nothing makes up for it at times: of the ids of row-wise tables, say.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from flexshard.planner.whole_model.menus import Menus, Spread, Watched, undominated
from flexshard.planner.whole_model.program import load_duals

__all__ = ["watching"]

FloatArray = npt.NDArray[np.float64]

_LEAST = 1e-9  # dual that counts
_MOST = 6  # of a kind of load: ranks, and positions in a host


def watching(menus: Menus) -> Menus:
    """The menus with averages to watch, and those to bound by, where ranks have more of an option than others have."""
    busy = _watched(menus)
    if not busy.loads.size:
        return menus
    menus = replace(menus, watched=busy)
    few = undominated(menus)
    duals = load_duals(few) if all(few.options) else None
    if duals is None:
        return menus
    weights, alone = np.repeat(duals.bins / menus.ranks, menus.ranks, axis=1), duals.tables
    np.add.at(weights, busy.loads, duals.watched[:, None] * busy.weights)
    sums = weights.sum(axis=1) + alone.sum(axis=1)
    weights, alone = (each / np.maximum(sums, _LEAST)[:, None] for each in (weights, alone))
    # What nothing bounds, and the first kind, of which all ranks have the same.
    free = (sums <= _LEAST) | (np.arange(len(sums)) == 0)
    weights[free], alone[free] = 1 / menus.ranks, 0.0
    paid = duals.paid / np.maximum(duals.paid.sum(axis=1), 1.0)[:, None]
    averages = Watched(np.arange(len(menus.loads)), weights)
    return replace(menus, averages=averages, alone=np.concatenate([alone, paid]))


def _watched(menus: Menus) -> Watched:
    found = []
    for load, together in enumerate(menus.sharing):
        by_rank, ranks_differ = _sums(menus, load, together, Spread.EVERY_RANK)
        by_local, locals_differ = _sums(menus, load, together, Spread.HOST_BLOCKS)
        if ranks_differ:
            found += [(load, group, False) for group in _most(by_rank)]
        if locals_differ:
            found += [(load, group, True) for group in _most(by_local)]
    weights = np.zeros((len(found), menus.ranks))
    for row, (load, group, on_hosts) in zip(weights, found, strict=True):
        together = menus.sharing[load]
        ranks = group * together + np.arange(together)
        at = ranks + menus.ranks_per_host * np.arange(menus.hosts)[:, None] if on_hosts else ranks
        row[at] = 1 / at.size
    return Watched(np.array([load for load, *_ in found], np.int64), weights)


def _sums(menus: Menus, load: int, together: int, spread: Spread) -> tuple[FloatArray, bool]:
    """What groups of ranks (of a host, where blocks lie on hosts) have of tables at most; whether any of it differs."""
    width = menus.ranks if spread is Spread.EVERY_RANK else menus.ranks_per_host
    total, differs = np.zeros(width // together), False
    for menu in menus.options:
        of_options = [
            one.perf[load].reshape(-1, width).sum(axis=0).reshape(-1, together).mean(axis=1)
            for one in menu
            if one.spread is spread
        ]
        if of_options:
            total += np.max(of_options, axis=0)
            differs |= bool(np.ptp(of_options, axis=1).any())
    return total, differs


def _most(total: FloatArray) -> list[int]:
    found: list[int] = np.argsort(-total, kind="stable")[:_MOST].tolist()
    return found
