"""With which ranks tables begin: against every choice on small cases, and what it is for on larger ones."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from flexshard.costmodels import apart, first_holders


def turned(loads: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Each table's loads so many ranks later, added up."""
    return np.sum([np.roll(one, turn) for one, turn in zip(loads, by, strict=True)], axis=0)


def test_by_hand() -> None:
    # The hottest stays, the next goes opposite of it, and what is even anywhere stays where it is.
    loads = np.array([[1.0, 1.0, 1.0, 1.0], [5.0, 1.0, 0.0, 1.0], [8.0, 2.0, 1.0, 2.0]])
    found = first_holders(loads)
    assert found.tolist() == [0, 2, 0]
    assert turned(loads, found).tolist() == [9.0, 4.0, 7.0, 4.0]


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_near_the_best_of_all_choices(seed: int, tables: int, ranks: int) -> None:
    loads = np.random.default_rng(seed).pareto(1.2, (tables, ranks))
    found = first_holders(loads)
    assert ((found >= 0) & (found < ranks)).all()
    squares = float((turned(loads, found) ** 2).sum())
    choices = [float((turned(loads, np.array(one)) ** 2).sum()) for one in product(range(ranks), repeat=tables)]
    assert min(choices) * (1 - 1e-12) <= squares <= 1.2 * min(choices)


@pytest.mark.parametrize(
    ("tables", "ranks", "most"), [(26, 8, 1.02), (100, 32, 1.1), (1000, 32, 1.02), (1000, 1024, 1.4)]
)
def test_hottest_rows_of_many_tables_do_not_share_a_rank(tables: int, ranks: int, most: float) -> None:
    rows = np.zeros(-(-2000 // ranks) * ranks)
    random = np.random.default_rng(0)
    loads = np.empty((tables, ranks))
    for table in range(tables):
        rows[:2000] = 1 / np.arange(1, 2001) ** random.uniform(0.7, 1.1)
        loads[table] = rows.reshape(-1, ranks).sum(axis=0)
    least = max(loads.sum() / ranks, loads.max())
    assert loads.sum(axis=0).max() > 1.3 * least  # where all begin with the same
    assert turned(loads, first_holders(loads)).max() < most * least


def test_nothing_is_turned_for_nothing() -> None:
    assert first_holders(np.zeros((3, 4))).tolist() == [0, 0, 0]
    assert first_holders(np.zeros((0, 4))).shape == (0,)
    assert first_holders(np.ones((2, 1))).tolist() == [0, 0]
    even = first_holders(np.full((5, 6), 0.1) * 3)
    assert even.tolist() == [0] * 5, "rounding decides nothing"


def test_tables_of_which_nothing_is_known_are_apart() -> None:
    assert [apart(number, 8) for number in range(9)] == [0, 5, 2, 7, 4, 1, 6, 3, 0]
    for ranks in range(1, 100):
        assert sorted(apart(number, ranks) for number in range(ranks)) == list(range(ranks))
    assert apart(5, 1) == 0
