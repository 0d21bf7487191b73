"""People's units at the edge of the program: parsed and printed here and nowhere else.

Inside, every quantity is in SI units and says so in its name: ``_bytes``, ``_bytes_per_s``, ``_seconds``.
Decimal prefixes (k, M, G, T) are powers of 1000, binary ones (Ki, Mi, Gi, Ti) powers of 1024; ``b`` is a bit and
``B`` a byte, so ``200 Gbps`` is 25 GB/s.
"""

from __future__ import annotations

import math
import re

from flexshard.errors import UnitError

__all__ = [
    "GIB",
    "format_bandwidth",
    "format_bytes",
    "format_count",
    "format_seconds",
    "parse_bandwidth",
    "parse_bytes",
    "parse_seconds",
]

GIB = 1 << 30

_NUMBER = re.compile(r"\s*([+-]?(?:\d+(?:_\d+)*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-zµμ/]*)\s*")
_PREFIX = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "Pi": 1 << 50}
_BYTES = {prefix + "B": float(factor) for prefix, factor in (_PREFIX | _BINARY).items()}
_BANDWIDTH = (
    {unit + "/s": factor for unit, factor in _BYTES.items()}
    | {prefix + "bps": factor / 8 for prefix, factor in _PREFIX.items()}
    | {prefix + "bit/s": factor / 8 for prefix, factor in _PREFIX.items()}
    | {prefix + "b/s": factor / 8 for prefix, factor in _PREFIX.items()}
)
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}
_SECONDS |= {"min": 60.0, "h": 3600.0, "d": 86_400.0}
_LEGIBLE = 1e15


def parse_bytes(text: str) -> float:
    """Bytes in a text such as ``"40 GiB"`` or ``"512MB"``. May be signed.

    Raises:
        UnitError: no number, no unit, or a unit that is not one of bytes.
    """
    return _parse(text, _BYTES, "size", "40 GiB")


def parse_bandwidth(text: str) -> float:
    """Bytes per second in a text such as ``"25.8 GB/s"`` or ``"200 Gbps"``.

    Raises:
        UnitError: no number, no unit, or a unit that is not one of bandwidth.
    """
    return _parse(text, _BANDWIDTH, "bandwidth", "25.8 GB/s or 200 Gbps")


def parse_seconds(text: str) -> float:
    """Seconds in a text such as ``"8.3 ms"``.

    Raises:
        UnitError: no number, no unit, or a unit that is not one of time.
    """
    return _parse(text, _SECONDS, "time", "8.3 ms")


def _parse(text: object, units: dict[str, float], kind: str, example: str) -> float:
    if not isinstance(text, str):
        raise UnitError(f"{text!r} is a {kind} without a unit; write it as text with one, such as {example}")
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise UnitError(f"{text!r} is not a {kind}; write a number and a unit, such as {example}")
    number, unit = match.groups()
    if not unit:
        raise UnitError(f"{text!r} is a {kind} without a unit; write one, such as {example}")
    if unit not in units:
        raise UnitError(f"{text!r} has the unit {unit!r}, which is not one of {kind}; write it such as {example}")
    value = float(number.replace("_", "")) * units[unit]
    if not math.isfinite(value):
        raise UnitError(f"{text!r} is not a finite {kind}")
    return value


def format_bytes(value: float) -> str:
    """``1.50 GiB`` for 1610612736."""
    size = abs(value)
    for unit, factor in reversed(_BINARY.items()):
        if size >= factor:
            return f"{_rounded(value / factor)} {unit}B"
    return f"{value:.0f} B"


def format_bandwidth(bytes_per_s: float) -> str:
    """``25.8 GB/s`` for 25.8e9."""
    for unit, factor in (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bytes_per_s >= factor:
            return f"{bytes_per_s / factor:.4g} {unit}"
    return f"{bytes_per_s:.4g} B/s"


def format_seconds(value: float) -> str:
    """``8.3 ms`` for 0.0083."""
    size = abs(value)
    if size == 0:
        return "0 s"
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if size >= factor * 0.9995:
            return f"{_rounded(value / factor)} {unit}"
    return f"{value / 1e-9:.3g} ns"


def format_count(value: float) -> str:
    """``1,234,567`` for whole numbers, three digits for the rest and for what is very large."""
    whole = (value >= 1000 or float(value).is_integer()) and abs(value) < _LEGIBLE
    return f"{value:,.0f}" if whole else f"{value:.3g}"


def _rounded(value: float) -> str:
    """Three digits, or all before the point, unless nobody counts them."""
    return f"{value:,.0f}" if 999.5 <= abs(value) < _LEGIBLE else f"{value:.3g}"
