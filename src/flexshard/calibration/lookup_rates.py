"""How fast this machine looks up tensor trains and dense tables: a few batches of each shape, timed and fitted."""

from __future__ import annotations

import datetime
import platform
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from flexshard._internal import check_finite, check_int
from flexshard.calibration.batches import least_seconds, sample_batches
from flexshard.calibration.dense_tables import DenseShape, measure_dense
from flexshard.costmodels import ShapeRates, TableRates, TTRates, TTReads, TTWork, fit_rates
from flexshard.embeddings import TTEmbeddingBag
from flexshard.errors import JobError
from flexshard.tables import DATA_TYPES, OPTIMIZERS, TTShape

__all__ = ["calibrate", "train_step"]

_FAR_OFF = 2.0  # times, of a fit

Progress = Callable[[int, int], None]
Step = Callable[[], object]


def calibrate(
    shapes: Sequence[TTShape],
    *,
    lengths: Sequence[float] | None = None,
    tables: Sequence[DenseShape | tuple[int, int, float]] = (),
    batch_size: int = 4096,
    rounds: int = 5,
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> TTRates:
    """Time steps (lookup, backward, update) of every shape and of dense tables, and fit rates.

    The least of several rounds counts: what the machine takes when nothing else runs.

    Args:
        shapes: tensor trains to measure.
        lengths: ids per bag of each (L of its table); 20 by default.
        tables: rows, dimension and ids per bag of dense tables to measure, and their data type and optimizer ("float32"
            and "rowwise_adagrad" by default); by default those that the shapes stand for.
        batch_size: bags of the largest batch.
        rounds: per batch, after one that warms up.
        seed: of the ids.
        device: to measure.
        progress: called with how many shapes are done, and of how many.

    Raises:
        JobError: nothing to measure, numbers out of range, or a device that is not there.
    """
    if not shapes and not tables:
        raise JobError("there are no shapes to calibrate; give ranks, or tables")
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise JobError(f"device {str(device)!r} cannot be measured: {str(error).splitlines()[0]}") from error
    rounds, batch_size = check_int(rounds, "rounds", JobError), check_int(batch_size, "batch_size", JobError, least=8)
    if lengths is not None and len(lengths) != len(shapes):
        raise JobError(f"there are {len(shapes)} shapes and {len(lengths)} lengths; give one of each")
    bag_lengths = dict(zip(shapes, [20.0] * len(shapes) if lengths is None else lengths, strict=True))
    distinct = list(bag_lengths)
    stand_for = [(shape.num_embeddings, shape.embedding_dim, length) for shape, length in bag_lengths.items()]
    dense = list(dict.fromkeys(_rounded(DenseShape(*table)) for table in tables or stand_for))
    done, total = 0, len(distinct) + len(dense)

    def tick() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    waking = sample_batches(distinct[0].num_embeddings, batch_size, seed, bag_lengths[distinct[0]]) if distinct else ()
    for ids, bags in waking:
        least_seconds([train_step(distinct[0], ids, bags, device)], rounds, device)  # wakes the machine up
    shape_rates: list[ShapeRates] = []
    all_work: list[Any] = []
    all_seconds: list[float] = []
    for shape in distinct:
        batches = list(sample_batches(shape.num_embeddings, batch_size, seed, bag_lengths[shape]))
        work = [TTWork.of(shape, TTReads.of(ids, bags, shape)).array for ids, bags in batches]
        seconds = least_seconds([train_step(shape, ids, bags, device) for ids, bags in batches], rounds, device)
        tick()
        step = fit_rates(work, seconds)
        _warn_of_fit(f"a tensor train of {shape}", work, seconds, step)
        shape_rates.append(ShapeRates(shape.row_factors, shape.dim_factors, shape.tt_ranks, step))
        all_work += work
        all_seconds += seconds
    dense_work: list[Any] = []
    dense_seconds: list[float] = []
    table_rates: list[TableRates] = []
    for table in dense:
        own, numbers, seconds = measure_dense(table, batch_size, rounds, seed, device)
        _warn_of_fit(f"a table of {own.rows:,} rows of {own.dim}", [one[:2] for one in numbers], seconds, own.pooled)
        table_rates.append(own)
        dense_work += numbers
        dense_seconds += seconds
        tick()
    machine = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} thread(s), {device}, "
    machine += datetime.date.today().isoformat()
    step = fit_rates(all_work, all_seconds) if all_work else ()
    return TTRates(machine, step, fit_rates(dense_work, dense_seconds), tuple(shape_rates), tuple(table_rates))


def _warn_of_fit(what: str, work: Sequence[Any], seconds: Sequence[float], rates: Sequence[float]) -> None:
    """Say it where times are far from what the rates make of the work, or do not grow with it."""
    times, ratio = np.asarray(seconds), np.asarray(work) @ np.asarray(rates) / np.asarray(seconds)
    off = float(np.maximum(ratio, 1 / np.maximum(ratio, 1e-9)).max())
    grows = times.size < 2 or any(rates[1:])
    if off > _FAR_OFF or not grows:
        why = f"are up to {off:.1f} times off their fit" if grows else "do not grow with the ids"
        warnings.warn(
            f"times of {what} {why}; was the machine busy? calibrate again, with more rounds",
            UserWarning,
            stacklevel=3,
        )


def _rounded(shape: DenseShape) -> DenseShape:
    """Bags have whole numbers of ids: tables whose lengths differ by less are measured once.

    Raises:
        JobError: a length, data type or optimizer that there is not.
    """
    check_finite(shape.length, "length of a table", JobError)
    for name, known in (("dtype", DATA_TYPES), ("optimizer", OPTIMIZERS)):
        if getattr(shape, name) not in known:
            raise JobError(f"{name} of a table is one of {', '.join(known)}, found {getattr(shape, name)!r}")
    return shape._replace(length=float(max(round(shape.length), 1)))


def train_step(shape: TTShape, ids: np.ndarray, bags: int, device: torch.device | str = "cpu") -> Step:
    """A lookup of ``bags`` bags of equal length, its backward pass and a fused update."""
    table = TTEmbeddingBag(
        shape.num_embeddings,
        shape.embedding_dim,
        tt_ranks=shape.tt_ranks,
        row_factors=shape.row_factors,
        dim_factors=shape.dim_factors,
        mode="sum",
        optimizer="rowwise_adagrad",
        learning_rate=1e-6,
        device=device,
    )
    values = torch.from_numpy(ids).to(device).view(bags, -1)
    upstream = torch.ones(bags, shape.embedding_dim, device=device)
    return lambda: table(values).backward(upstream)
