"""Choices of tables by bounds of all of them: none that may be better is left out, whatever is looked into."""

from __future__ import annotations

from itertools import product
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from flexshard import Cluster
from flexshard.planner import Problem
from flexshard.planner.solver import table_bounds
from flexshard.planner.solver.deduplication import Variants
from flexshard.planner.solver.table_bounds import TableCosts, below
from tests.planner.test_index_dedup import often_read


def costs(generator: np.random.Generator, tables: int, prices: int) -> TableCosts:
    sides = generator.choice([0.0, 1.0, 2.5, 7.0], (2, prices, tables)) * generator.uniform(0, 1, (2, prices, tables))
    return TableCosts(sides, generator.uniform(-3, 0, prices))


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.integers(1, 9), st.integers(1, 4), st.sampled_from([3, 10_000]))
def test_every_choice_that_may_be_better(seed: int, tables: int, prices: int, most: int) -> None:
    generator = np.random.default_rng(seed)
    ways = [costs(generator, tables, prices) for _ in range(generator.integers(0, 3))]
    known = float(generator.uniform(0, 6))
    expected = {}
    for mask in product((0, 1), repeat=tables):
        bounds = [
            (one.rest + one.sides[list(mask), :, range(tables)].sum(axis=0)).max() for one in ways
        ]  # of each choice of levels, at the price at which most is known
        if min(bounds, default=np.inf) < known:
            expected[mask] = min(bounds)
    with mock.patch.object(table_bounds, "_MOST_OPEN", most):
        found = below(ways, known, tables)
    given = {tuple(map(int, mask)): bound for mask, bound in zip(found.masks, found.bounds, strict=True)}
    assert list(found.bounds) == sorted(found.bounds)
    assert len(given) == len(found.masks)
    if most > 3:
        assert given == pytest.approx(expected)
        assert found.others == np.inf
    else:
        assert all(bound == pytest.approx(expected[mask]) or bound >= found.others for mask, bound in given.items())
        assert all(bound >= found.others - 1e-9 for mask, bound in expected.items() if mask not in given)


@pytest.mark.parametrize(("seed", "tables", "overlap", "of_neutral"), [(4, 10, "paper", 1.0), (0, 60, None, 0.5)])
def test_choices_by_what_just_fits_are_proved(seed: int, tables: int, overlap: str | None, of_neutral: float) -> None:
    """Prices of memory gave plans of 1.6 and 4.2 times their bounds."""
    problem = Problem(often_read(seed, tables), Cluster.preset("dgx-h100", 4), 2048, overlap=overlap)
    variants = Variants(problem)
    neutral = variants.plain.memory_bytes(variants.plain.uniform(problem.cluster.world_size))
    instance, found = variants.solve(of_neutral * neutral, problem.tiers)
    assert instance.memory_bytes(found.allocation) <= of_neutral * neutral
    assert instance.exposed_seconds(found.allocation) == found.seconds
    assert found.lower_bound_seconds <= found.seconds <= found.lower_bound_seconds * (1 + 1e-3)
