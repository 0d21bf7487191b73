"""Names of an earlier release: they work for one more, and say what they are called now."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from flexshard.planner import Tier
from flexshard.tables import TTShape

REST: Any = {"covered": 0.0, "covered_held_out": None, "reads": 0.0, "hottest_p": 0.0, "coldest_p": 0.0}
MOVED = {
    "flexshard.costmodels": [
        *("DTYPE_BYTES", "OPTIMIZERS", "REDUCTIONS", "Table", "combined_dedup_factor", "dedup_factor", "dedup_len"),
        *("expected_distinct", "translation_bytes"),
    ],
    "flexshard.topologies": ["Fit", "LevelGroups", "fit_rate", "level_groups", "measure_cluster"],
    "flexshard.executors": ["Layout", "Piece", "calibrate", "deal"],
    "flexshard.ingestion": ["OnDistinct"],
}


@pytest.mark.parametrize(("room", "name"), [(room, name) for room, names in MOVED.items() for name in names])
def test_names_that_moved(room: str, name: str) -> None:
    if room in ("flexshard.executors", "flexshard.ingestion"):
        pytest.importorskip("torchrec")
    module = importlib.import_module(room)
    assert name not in module.__all__
    with pytest.warns(DeprecationWarning, match=rf"{room}.{name} is flexshard\.\S+ now; .* goes with the next release"):
        value = getattr(module, name)
    assert value is not None


def test_what_the_moved_registries_hold() -> None:
    from flexshard import costmodels

    with pytest.warns(DeprecationWarning, match="goes with the next release"):
        assert costmodels.DTYPE_BYTES["float16"] == 2
    with pytest.warns(DeprecationWarning, match="goes with the next release"):
        assert costmodels.OPTIMIZERS["rowwise_adagrad"] == (0, 4)  # bytes per element, and per row


def old_names() -> list[tuple[Any, str, str]]:
    shape = TTShape.choose(24, 8, 2)
    return [
        (Tier("", 1, 5, 3, 0.0, None, 0.0, 0.0, 0.0), "first_rank", "first_position"),
        (shape, "rows", "row_factors"),
        (shape, "dims", "dim_factors"),
        (shape, "ranks", "tt_ranks"),
    ]


@pytest.mark.parametrize(
    ("value", "old", "new"), old_names(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_attributes_that_were_renamed(value: Any, old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"{old} is {new} now"):
        assert getattr(value, old) == getattr(value, new)


def test_index_bijections() -> None:
    from flexshard.embeddings import IndexBijection

    order = IndexBijection(np.array([2, 0]), 4)
    with pytest.warns(DeprecationWarning, match="rank_of is position_of now"):
        assert order.rank_of.tolist() == order.position_of.tolist()
    with pytest.warns(DeprecationWarning, match="ranks is positions now"):
        assert order.ranks(np.array([0, 2])).tolist() == [1, 0]


def test_tensor_train_tables() -> None:
    torch = pytest.importorskip("torch")
    from flexshard.embeddings import TTEmbedding

    with pytest.warns(DeprecationWarning, match=r"TTEmbedding\(ranks=...\) is tt_ranks=... now"):
        table = TTEmbedding(24, 8, ranks=2, hot_rows=3)
    assert table.shape.tt_ranks == (2, 2)
    with pytest.warns(DeprecationWarning, match="goes with the next release"):
        assert TTEmbedding(24, 8, rows=[2, 3, 4], dims=[2, 2, 2]).shape.row_factors == (2, 3, 4)
    with pytest.warns(DeprecationWarning, match="hold is pin_rows now"):
        table.hold(torch.tensor([3, 5]))
    with pytest.warns(DeprecationWarning, match="fold is unpin_rows now"):
        assert table.fold() is not None
    with pytest.raises(TypeError, match="unexpected keyword argument 'bogus'"):
        TTEmbedding(24, 8, bogus=1)
    with pytest.raises(TypeError, match="by two names"):
        TTEmbedding(24, 8, rows=[2, 3, 4], row_factors=[2, 3, 4])


def test_keywords_that_were_renamed() -> None:
    from flexshard.costmodels import Layout, Piece, ShapeRates
    from flexshard.planner import Move

    def old(make: Any) -> Any:
        with pytest.warns(DeprecationWarning, match=r"\w+\(\w+=...\) is \w+=... now; the old name goes"):
            return make()

    tier = old(lambda: Tier("", 1, 5, first_rank=3, **REST))
    assert tier.first_position == 3
    assert old(lambda: TTShape.choose(24, 8, ranks=2)) == TTShape.choose(24, 8, 2)
    assert old(lambda: TTShape(24, 8, rows=(2, 3, 4), dims=(2, 2, 2), ranks=(2, 2))).tt_ranks == (2, 2)
    assert old(lambda: ShapeRates(rows=(2,), dims=(2,), ranks=(2,), step=(0.0,) * 12)).dim_factors == (2,)
    assert old(lambda: Piece(0, ranks=range(3))).positions == range(3)
    assert old(lambda: Move("t", 1, 8, first_rank=2, rows=1, nbytes=4)).first_position == 2
    layout = Layout.of({"a": [Tier("", 2, 5, 0, **REST)]}, {"a": 5}, 2)
    assert old(lambda: layout.piece(0, 0, position=1)) == layout.piece(0, 0, 1)
    for name, new in (
        ("first_rank", "first_position"),
        ("code_type", "location_type"),
        ("first_code", "first_location"),
    ):
        with pytest.warns(DeprecationWarning, match=f"{name} is {new} now"):
            assert np.array_equal(getattr(layout, name), getattr(layout, new))
