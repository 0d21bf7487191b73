"""Pictures are drawn, whole or not at all, and the same input gives the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from flexshard import AccessProfile, Cluster, Table, pareto, plot_pareto
from flexshard.errors import OutputError
from flexshard.planner import marginal_curve
from flexshard.plots import plot_marginal, plot_normalized_costs, plot_skew
from flexshard.profiling import power_law_probabilities
from tests.slow import crossed

TABLE = Table("items", 2000, 64, AccessProfile.from_probabilities(power_law_probabilities(2000, 50, 1.0)))
CLUSTER = Cluster.preset("a100-4x8-roce")
MAGIC = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


@cache
def curve(kind: Callable[..., Any]) -> Any:
    return kind([TABLE], CLUSTER, batch_size=512)


def draw(what: str, path: Path) -> None:
    if what == "pareto":
        plot_pareto(curve(pareto), path)
    elif what == "costs":
        plot_normalized_costs(TABLE, CLUSTER, 512, path)
    elif what == "skew":
        plot_skew({"a": TABLE.profile, "b": AccessProfile.from_counts([1] * 100, 10)}, path)
    else:
        plot_marginal(curve(marginal_curve), path)


@pytest.mark.parametrize(("what", "suffix"), crossed(["pareto", "costs", "skew", "marginal"], MAGIC))
def test_each_figure_in_each_format(what: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"figure.{suffix}"
    draw(what, path)
    assert path.read_bytes().startswith(MAGIC[suffix])
    assert path.stat().st_size > 5000
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    if suffix == "png":
        before = path.read_bytes()
        draw(what, path)
        assert path.read_bytes() == before


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="no such file or directory"):
        draw("skew", tmp_path / "none" / "figure.png")
