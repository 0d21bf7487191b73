"""The index bijection."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexshard.embeddings import IndexBijection
from flexshard.errors import TableError


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.permutations(range(n)), st.integers(0, n))))
def test_it_is_one_to_one_and_goes_both_ways(case: tuple[int, list[int], int]) -> None:
    number, order, ranked = case
    bijection = IndexBijection(order[:ranked], number)
    ids = np.arange(number)
    ranks = bijection.ranks(ids)
    assert sorted(ranks.tolist()) == ids.tolist()
    assert bijection.rows(ranks).tolist() == ids.tolist()
    assert bijection.rows(np.arange(ranked)).tolist() == order[:ranked] or bijection.is_identity
    rest = bijection.rows(np.arange(ranked, number))
    assert rest.tolist() == sorted(rest.tolist())  # rows that nobody ranked follow in order of id


def test_bad_rankings_are_refused() -> None:
    with pytest.raises(TableError, match="names row 2 twice"):
        IndexBijection([2, 0, 2], 5)
    with pytest.raises(TableError, match="names row 7, but the table has rows 0 to 4"):
        IndexBijection([7], 5)
    with pytest.raises(TableError, match="whole row ids"):
        IndexBijection([0.5], 5)
