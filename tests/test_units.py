from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from flexshard import units
from flexshard.errors import UnitError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("40 GiB", 40 * 2**30),
        ("40GB", 40e9),
        ("+2GiB", 2 * 2**30),
        ("-500 MB", -500e6),
        ("1_000 B", 1000),
        ("1.5e3 kB", 1.5e6),
    ],
)
def test_bytes(text: str, expected: float) -> None:
    assert units.parse_bytes(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("200 Gbps", 25e9), ("25.8 GB/s", 25.8e9), ("1 GiB/s", 2**30), ("8 b/s", 1), ("400 Gbit/s", 50e9)],
)
def test_bandwidth_counts_bits_and_bytes_apart(text: str, expected: float) -> None:
    assert units.parse_bandwidth(text) == pytest.approx(expected)


@pytest.mark.parametrize(("text", "expected"), [("8.3 ms", 8.3e-3), ("9 us", 9e-6), ("9 µs", 9e-6), ("0 s", 0.0)])
def test_seconds(text: str, expected: float) -> None:
    assert units.parse_seconds(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    "text", ["40", 40, "forty GiB", "40 GiB/s", "40 gib", "", "1e999 GiB", None, "GiB", "4 0 GiB", "1,5 GiB", "1__0 B"]
)
def test_sizes_without_a_known_unit_are_refused(text: object) -> None:
    with pytest.raises(UnitError, match="GiB"):
        units.parse_bytes(text)  # type: ignore[arg-type]


def test_numbers_that_nobody_reads_are_short() -> None:
    assert units.format_seconds(1e300) == "1e+300 s"
    assert units.format_bytes(1e300) == "8.88e+284 PiB"
    assert units.format_count(1e300) == "1e+300"
    assert units.format_count(123_456_789_012_345) == "123,456,789,012,345"
    assert units.format_seconds(-1234567.0) == "-1,234,567 s"
    assert units.format_bytes(1000 * 2**50) == "1,000 PiB"


@given(st.floats(1024, 1e15))
def test_what_is_printed_reads_back_to_three_digits(value: float) -> None:
    assert units.parse_bytes(units.format_bytes(value)) == pytest.approx(value, rel=6e-3)
    assert units.parse_bandwidth(units.format_bandwidth(value)) == pytest.approx(value, rel=6e-3, abs=0.5)


@given(st.floats(1e-9, 1e5))
def test_times_read_back(value: float) -> None:
    text = units.format_seconds(value)
    if not text.endswith("ns"):
        assert units.parse_seconds(text.replace(",", "")) == pytest.approx(value, rel=6e-3)
