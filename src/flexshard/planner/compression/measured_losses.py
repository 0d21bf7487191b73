"""Losses of tensor trains, measured by training with each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from flexshard._internal import Grid, check_finite, new_grid
from flexshard.errors import TableError
from flexshard.planner.compression.decision import TTOption
from flexshard.tables import TTShape

__all__ = ["MeasuredLosses", "measure_losses"]

Score = Callable[[Mapping[str, TTShape], int], float]


@dataclass(frozen=True)
class MeasuredLosses:
    """What a model scores with its tables as they are, and with one of them as each tensor train offered.

    Attributes:
        dense: score of the tables as they are, by seed.
        scores: of every option, by table, option and seed; in the options' order.
        options: as offered, each with its mean loss: how far its score is below the dense one's of the same seed; 0
            where it is above.
    """

    dense: tuple[float, ...]
    scores: Mapping[str, tuple[tuple[float, ...], ...]]
    options: Mapping[str, tuple[TTOption, ...]]

    def grid(self) -> Grid:
        """For people."""
        title = "Scores with one table as a tensor train"
        grid = new_grid(title, ["table", "tensor train"], ["smaller", "score", "loss"])
        grid.add_row("all as they are", "", "1x", _shown(self.dense), "0")
        for name, options in self.options.items():
            for option, scores in zip(options, self.scores[name], strict=True):
                shape = option.shape
                ranks = " x ".join(map(str, shape.tt_ranks))
                grid.add_row(
                    name, f"TT ranks {ranks}", f"{shape.compression:.3g}x", _shown(scores), f"{option.loss:.3g}"
                )
        return grid


def _shown(scores: Sequence[float]) -> str:
    most = max(scores) - min(scores)
    return f"{fmean(scores):.4g}" + (f" ± {most / 2:.2g}" if most else "")


def measure_losses(
    options: Mapping[str, Sequence[TTOption]], score: Score, *, seeds: Iterable[int] = (0,)
) -> MeasuredLosses:
    """Train and score once per option and seed, and once with no table compressed.

    Losses of several tables are added up where a plan is chosen, so each is measured with the others as they are.

    Args:
        options: tensor trains that each table may become; their own losses are not looked at.
        score: trains a model with these tables as these tensor trains (none the first time), such as by ``compress``,
            and returns what it scores on data held out: the more the better.
        seeds: given to ``score``, one after the other.

    Raises:
        TableError: no seeds, or a score that is not a finite number.
    """
    numbers = tuple(seeds) if isinstance(seeds, Iterable) else ()
    if not numbers:
        raise TableError(f"losses are measured with one seed at least; give seeds=[0], found {seeds!r}")
    for name, offered in options.items():
        if isinstance(offered, TTOption) or not all(isinstance(option, TTOption) for option in offered):
            raise TableError(f"table {name!r}: options are a list of TTOption, found {offered!r}")

    def scored(shapes: Mapping[str, TTShape]) -> tuple[float, ...]:
        return tuple(check_finite(score(shapes, seed), "a score", TableError) for seed in numbers)

    dense = scored({})
    scores, measured = {}, {}
    for name, offered in options.items():
        scores[name] = tuple(scored({name: option.shape}) for option in offered)
        measured[name] = tuple(
            replace(option, loss=max(0.0, fmean(a - b for a, b in zip(dense, own, strict=True))))
            for option, own in zip(offered, scores[name], strict=True)
        )
    return MeasuredLosses(dense, scores, measured)
