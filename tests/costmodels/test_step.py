"""A step's time with deduplicated batches, from its phases."""

from __future__ import annotations

import pytest

from flexshard.costmodels import Collective, Cost, PhaseCurve, StepModel
from flexshard.errors import DataError


def line(fixed: float, per_row: float) -> PhaseCurve:
    return PhaseCurve(((0.0, fixed), (10.0, fixed + 10 * per_row)))


def test_a_curve_is_straight_between_what_was_measured() -> None:
    curve = PhaseCurve(((100, 2.0), (300, 4.0), (500, 8.0)))
    assert [curve.seconds(rows) for rows in (0, 100, 200, 300, 400, 600)] == [1.0, 2.0, 3.0, 4.0, 6.0, 10.0]
    assert PhaseCurve(((100, 1.0), (200, 4.0))).seconds(10) == 0  # nothing takes less than no time
    for points in (((3, 1.0),), ((3, 1.0), (3, 2.0)), ((3, 1.0), (2, 2.0))):
        with pytest.raises(DataError, match="two or more different numbers of rows"):
            PhaseCurve(points)


def test_each_phase_falls_by_what_is_deduplicated() -> None:
    model = StepModel(line(0.0, 2.0), line(1.0, 4.0), line(0.0, 1.0), line(0.0, 0.5))
    assert model.seconds(8) == 16 + 33 + 8
    assert model.seconds(8, dedup_factor=4.0) == 4 + 33 + 8 + 4
    assert model.seconds(8, dedup_factor=4.0, compute=True) == 4 + 9 + 8
    assert model.throughput(8) == 8 / 57
    with pytest.raises(DataError, match=r"at least 1, found 0\.5"):
        model.seconds(8, dedup_factor=0.5)


def test_links_that_take_longest() -> None:
    """All-to-alls inside nodes have links of their own; everything else crosses the outermost ones."""
    inside = Collective("all_to_all", 2, 2, 10.0, 0.0, 10.0)  # 2 s
    across = Collective("all_to_all", 8, 2, 10.0, 0.5, 20.0)  # 2 s
    reduced = Collective("all_reduce", 2, 1, 10.0, 0.0, 10.0)  # 1 s
    assert Cost(collectives=(reduced, inside, across)).bottleneck_seconds(8) == 3.0
    assert Cost(collectives=(reduced, inside, across)).comm_seconds == 5.0
    assert Cost(collectives=(inside,)).bottleneck_seconds(8) == 2.0
    assert Cost().bottleneck_seconds(8) == 0.0
