"""Accesses in samples that a profile's counts have not seen."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Holdout"]

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Holdout:
    """Accesses in samples that the counts have not seen.

    Attributes:
        num_samples: samples held out.
        accesses: held-out accesses of the rows of each in-sample count, then of the rows never read in sample;
            shape (K + 1,).
        share, seed: which samples they are; profiles add up only where these agree.
    """

    num_samples: int
    accesses: IntArray
    share: float = 0.0
    seed: int = 0
