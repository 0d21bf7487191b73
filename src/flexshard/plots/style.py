"""What all pictures share: colours that most people tell apart, and styles and markers, so that they read without."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from flexshard import units
from flexshard._internal import PathLike, replacing
from flexshard.errors import OutputError

__all__ = [
    "COLORS",
    "DOTS",
    "GRAY",
    "LINES",
    "MARKERS",
    "PICTURE_SUFFIXES",
    "STYLE",
    "literal",
    "memory_unit",
    "plain",
    "save",
    "sparse",
]

# Okabe and Ito's colours, which people who are blind to some colours tell apart too (jfly.uni-koeln.de/color).
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D1F")
GRAY = "0.72"
STYLE = {
    "font.size": 10,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
}
PICTURE_SUFFIXES = (".png", ".svg", ".pdf")
LINES = ("-", "--", "-.", ":")
DOTS = "osv^Dp<>h"  # nine, so that with four styles 36 lines differ
MARKERS = {
    "greatest_memory_saving": "v",
    "memory_neutral": "D",
    "communication_neutral": "^",
    "full_replication": "s",
    "row_wise": "o",
    "table_wise": "*",
    "paper_2_tier": "P",
    "paper_3_tier": "X",
}


def memory_unit(most: float) -> tuple[float, str]:
    """Bytes per unit of an axis that goes up to so many bytes, and its name."""
    for scale, unit in ((units.GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if most >= scale:
            return float(scale), unit
    return 1.0, "B"


def plain(value: float, _position: float | None = None) -> str:
    """A tick label without powers of ten."""
    return f"{value:g}"


def sparse(value: float, _position: float | None = None) -> str:
    """Labels of minor ticks on a logarithmic axis: only as many as have room."""
    lead = value / 10 ** np.floor(np.log10(value)) if value > 0 else 0
    return f"{value:g}" if round(float(lead), 6) in (2, 3, 5, 7) else ""


def literal(name: str) -> str:
    """A user's name as a label: no mathematics, and shown even where it starts with an underscore."""
    return (" " if name.startswith("_") else "") + name.replace("$", r"\$")


def save(figure: Any, path: PathLike) -> None:
    """Write a picture; raises OutputError where it cannot be, or for other kinds than PNG, SVG and PDF."""
    suffix = os.path.splitext(os.fspath(path))[1].lower() or ".png"  # noqa: PTH122 - works on any path type
    if suffix not in PICTURE_SUFFIXES:
        raise OutputError(f"cannot draw {path}: pictures are .png, .svg or .pdf")
    # Without a date and a version the same figure gives the same bytes.
    metadata = {"Software": None} if suffix == ".png" else ({"Date": None} if suffix == ".svg" else None)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150, format=suffix[1:], metadata=metadata)
