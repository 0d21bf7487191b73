"""The paper's four production models, as profiles through the points that it publishes: one fitted, one predicted."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from scipy.optimize import brentq

from flexshard import AccessProfile, Table
from flexshard.costmodels import Cost

PUBLISHED: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "flexshard_tables.yaml").read_text())
MODELS: dict[str, dict[str, Any]] = PUBLISHED["models"]


def published_table(model: str, ranks: int = 32) -> Table:
    """A table for which the published algorithm finds Table 5's row counts by construction.

    It covers the accesses of Table 5 at the row counts given there. Between two of them p falls by a power law; the
    exponents are solved so that the accesses add up. Fitted to the counts themselves: L (``reads_per_sample``), with
    which they are memory neutral at kappa = 6, and p at the last data-parallel row of the 3-tier sharding, which is
    the memory-neutral breakpoint, (kappa - 1/U)/B.
    """
    spec, kappa, batch = MODELS[model], PUBLISHED["replication_multiplier"], PUBLISHED["batch_size"]
    length, points = spec["reads_per_sample"], covered_points(model)
    at_break = (kappa - (1 + 1 / PUBLISHED["dim"]) / ranks) / batch
    start, covered = points[0]
    rows, p = _head(start, covered * length, at_break)
    last = at_break
    for end, share in points[1:]:
        more_rows, more_p = _piece(start, end, (share - covered) * length, last)
        rows, p = np.append(rows, more_rows), np.append(p, more_p)
        start, covered, last = end, share, min(last, float(more_p[-1]))
    return _table(model, np.minimum.accumulate(p), rows)


def predicted_table(model: str) -> Table:
    """A table that knows of Table 5 only the covered accesses, and of Table 6 only the row-wise elements.

    Covered accesses are interpolated between the published points on logarithmic scales, so that they grow by a power
    of the rows, and p, their slope, falls at each point. Assumed, since nothing is published of hotter rows: the first
    power law reaches down to row 1. L is ``elements_length``. Fitted is kappa = 6 alone.
    """
    points = covered_points(model)
    ends, covered = np.array(points).T
    exponents = np.diff(np.log(covered)) / np.diff(np.log(ends))
    starts = [0, *(end for end, _ in points[:-1])]
    pieces = [
        _power_piece(start, end, share * elements_length(model), float(exponent))
        for start, (end, share), exponent in zip(starts, points, [exponents[0], *exponents], strict=True)
    ]
    rows, p = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
    return _table(model, p, rows)


def covered_points(model: str) -> list[tuple[int, float]]:
    """Rows and the share of accesses that so many hottest rows cover, as Table 5 has them, and all rows."""
    spec = MODELS[model]
    dp, flex = spec["three_tier"]["data_parallel"], spec["three_tier"]["flex"]
    two = spec["two_tier"]["data_parallel"]
    points = sorted([(dp[0], dp[1]), (two[0], two[1]), (dp[0] + flex[0], dp[1] + flex[1]), (spec["rows"], 1.0)])
    assert all(less[1] < more[1] for less, more in pairwise(points))
    return points


def elements_length(model: str) -> float:
    """L as Table 6 counts it: elements that a rank receives by the row-wise all-to-all, per sample and dimension."""
    elements, _ = MODELS[model]["all_to_all"]["row_wise"]
    return float(elements / (PUBLISHED["dim"] * PUBLISHED["batch_size"]))


def rows_seconds(cost: Cost, group_size: int | None = None) -> float:
    """Time of the all-to-alls of rows and gradients, which Table 6 gives, across all ranks (or within groups), at the
    mean rank's bytes, as it counts them.
    """
    found = [c for c in cost.collectives if c.content in ("embeddings", "gradients")]
    size = max(c.group_size for c in found) if group_size is None else group_size
    return sum(replace(c, excess_bytes=0.0).seconds for c in found if c.group_size == size)


def _table(model: str, p: np.ndarray, rows: np.ndarray) -> Table:
    profile = AccessProfile.from_probabilities(p, rows.astype(np.int64), table=model)
    kappa = PUBLISHED["replication_multiplier"]
    return Table(model, MODELS[model]["rows"], PUBLISHED["dim"], profile, replication_multiplier=kappa)


def _head(end: int, reads: float, last: float) -> tuple[np.ndarray, np.ndarray]:
    """Rows 1 ... end with p = last · (row/end)^-a; their integral is last·end/(1-a)."""
    exponent = 1 - last * end / reads
    return _binned(0, end, lambda r: last * end / (1 - exponent) * (r / end) ** (1 - exponent))


def _piece(start: int, end: int, reads: float, first: float) -> tuple[np.ndarray, np.ndarray]:
    """Rows start+1 ... end with p = first · (row/start)^-a and the sum that is asked for."""

    def integral(r: np.ndarray | float, a: float) -> Any:
        x = np.asarray(r) / start
        return first * start * (np.log(x) if abs(a - 1) < 1e-12 else (x ** (1 - a) - 1) / (1 - a))

    exponent = brentq(lambda a: float(integral(end, a)) - reads, 0.0, 60.0, xtol=1e-14)
    return _binned(start, end, lambda r: integral(r, exponent))


def _power_piece(start: int, end: int, reads: float, exponent: float) -> tuple[np.ndarray, np.ndarray]:
    """Rows start+1 ... end where the hottest r rows have ``reads · (r/end)^exponent`` reads."""
    return _binned(start, end, lambda r: reads * (r / end) ** exponent)


def _binned(start: int, end: int, reads_until: Any, bins: int = 4000) -> tuple[np.ndarray, np.ndarray]:
    """Rows and mean p of bins that grow geometrically, from the integral of p."""
    edges = np.unique(np.round(np.geomspace(max(start, 1), end, bins)).astype(np.int64))
    edges = np.unique(np.concatenate([[start], edges]))
    reads = np.diff(reads_until(edges.astype(np.float64)))
    return np.diff(edges), reads / np.diff(edges)
