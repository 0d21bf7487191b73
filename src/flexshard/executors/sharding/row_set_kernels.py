"""A compiled loop over a batch's ids; the plain path in torch gives the same."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

__all__ = ["locate"]


@numba.njit(cache=True, nogil=True)
def locate(
    ids: npt.NDArray[Any],
    words: npt.NDArray[np.int64],
    members: npt.NDArray[Any],
    starts: npt.NDArray[np.int64],
    locations: npt.NDArray[Any],
) -> None:
    """Locations of ids: of members as listed, of the others dealt to the ranks in turn.

    Args:
        ids: shape (n,).
        words: as of :class:`RowSet`.
        members: location of each member, in order of id.
        starts: locations of the first others, one for each of the ranks that these are dealt to.
        locations: to fill; shape (n,).
    """
    # Unsigned numbers need neither a negative index's nor a negative quotient's branches.
    divisor = np.uint64(starts.size)
    for index in range(ids.size):
        row = np.uint64(ids[index])
        block = (row >> np.uint64(6)) << np.uint64(1)
        bit = row & np.uint64(63)
        word = np.uint64(words[block + np.uint64(1)])
        below = word & ((np.uint64(1) << bit) - np.uint64(1))
        below = below - ((below >> np.uint64(1)) & np.uint64(0x5555555555555555))
        below = (below & np.uint64(0x3333333333333333)) + ((below >> np.uint64(2)) & np.uint64(0x3333333333333333))
        below = (below + (below >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
        before = np.uint64(words[block]) + ((below * np.uint64(0x0101010101010101)) >> np.uint64(56))
        if (word >> bit) & np.uint64(1):
            locations[index] = members[before]
        else:
            other = row - before
            turn = other // divisor
            locations[index] = starts[other - turn * divisor] + np.int64(turn)
