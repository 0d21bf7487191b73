"""The paper's four production models, as profiles that pass through the points which it publishes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import yaml
from scipy.optimize import brentq

from flexshard import AccessProfile, Table

PUBLISHED: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "flexshard_tables.yaml").read_text())
MODELS: dict[str, dict[str, Any]] = PUBLISHED["models"]


def published_table(model: str, ranks: int = 32) -> Table:
    """A table whose covered accesses are those of Table 5 at the five row counts that it gives.

    Between two of them p falls by a power law; the exponents are solved so that the accesses add up, and p is the
    memory-neutral breakpoint, (kappa - 1/U)/B, at the last data-parallel row of the 3-tier sharding.
    """
    spec, kappa, batch = MODELS[model], PUBLISHED["replication_multiplier"], PUBLISHED["batch_size"]
    length = spec["reads_per_sample"]
    dp, flex = spec["three_tier"]["data_parallel"], spec["three_tier"]["flex"]
    nodes = sorted(
        [
            (dp[0], dp[1]),
            tuple(spec["two_tier"]["data_parallel"]),
            (dp[0] + flex[0], dp[1] + flex[1]),
            (spec["rows"], 1.0),
        ]
    )
    at_break = (kappa - (1 + 1 / PUBLISHED["dim"]) / ranks) / batch
    rows, p = _head(nodes[0][0], nodes[0][1] * length, at_break)
    start, covered, last = nodes[0][0], nodes[0][1], at_break
    for end, share in nodes[1:]:
        more_rows, more_p = _piece(start, end, (share - covered) * length, last)
        rows, p = np.append(rows, more_rows), np.append(p, more_p)
        start, covered, last = end, share, min(last, float(more_p[-1]))
    profile = AccessProfile.from_probabilities(np.minimum.accumulate(p), rows.astype(np.int64), table=model)
    return Table(model, spec["rows"], PUBLISHED["dim"], profile, replication_multiplier=kappa)


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


def _binned(start: int, end: int, reads_until: Any, bins: int = 4000) -> tuple[np.ndarray, np.ndarray]:
    """Rows and mean p of bins that grow geometrically, from the integral of p."""
    edges = np.unique(np.round(np.geomspace(max(start, 1), end, bins)).astype(np.int64))
    edges = np.unique(np.concatenate([[start], edges]))
    reads = np.diff(reads_until(edges.astype(np.float64)))
    return np.diff(edges), reads / np.diff(edges)
