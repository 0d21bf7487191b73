"""A step's time with deduplicated batches, from its phases."""

from __future__ import annotations

import pytest

from flexshard.costmodels import PhaseLine, StepModel
from flexshard.errors import DataError


def test_a_line_through_two_measurements() -> None:
    line = PhaseLine.through((100, 2.0), (300, 4.0))
    assert (line.fixed_seconds, line.row_seconds) == (1.0, 0.01)
    assert line.seconds(200) == 3.0
    steep = PhaseLine.through((100, 1.0), (200, 4.0))  # nothing takes less than no time
    assert (steep.fixed_seconds, steep.seconds(200)) == (0.0, 4.0)
    with pytest.raises(DataError, match="two different numbers of rows, found 3 and 3"):
        PhaseLine.through((3, 1.0), (3, 1.0))


def test_each_phase_falls_by_what_is_deduplicated() -> None:
    model = StepModel(PhaseLine(0.0, 2.0), PhaseLine(1.0, 4.0), PhaseLine(0.0, 1.0), PhaseLine(0.0, 0.5))
    assert model.seconds(8) == 16 + 33 + 8
    assert model.seconds(8, dedup_factor=4.0) == 4 + 33 + 8 + 4
    assert model.seconds(8, dedup_factor=4.0, compute=True) == 4 + 9 + 8
    assert model.throughput(8) == 8 / 57
    with pytest.raises(DataError, match=r"at least 1, found 0\.5"):
        model.seconds(8, dedup_factor=0.5)
