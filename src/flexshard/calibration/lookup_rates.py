"""How fast this machine looks up tensor trains and dense tables: a few batches of each shape, timed and fitted."""

from __future__ import annotations

import datetime
import platform
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    PoolingMode,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from flexshard._internal import check_int
from flexshard.costmodels import ShapeRates, TTRates, TTReads, TTWork, fit_rates
from flexshard.embeddings import TTEmbeddingBag
from flexshard.errors import JobError
from flexshard.tables import TTShape

__all__ = ["calibrate", "least_seconds", "sample_batches", "train_step"]

# Shares of the batch and of the ids per bag, exponent of Zipf's law, and whether ids are in order of frequency.
_BATCHES = (
    (1.0, 1.0, 1.05, False),
    (1.0, 1.0, 1.05, True),
    (0.25, 1.0, 1.05, False),
    (1.0, 0.25, 0.9, True),
    (0.5, 0.5, 1.2, True),
)
_DENSE_ROWS = 1_000_000

Progress = Callable[[int, int], None]
Step = Callable[[], object]


def calibrate(
    shapes: Sequence[TTShape],
    *,
    lengths: Sequence[float] | None = None,
    batch_size: int = 4096,
    rounds: int = 5,
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> TTRates:
    """Time steps (lookup, backward, update) of every shape and of dense tables of its dimensions, and fit rates.

    The least of several rounds counts: what the machine takes when nothing else runs.

    Args:
        shapes: tensor trains to measure.
        lengths: ids per bag of each (L of its table); 20 by default.
        batch_size: bags of the largest batch.
        rounds: per batch, after one that warms up.
        seed: of the ids.
        device: to measure.
        progress: called with how many shapes are done, and of how many.

    Raises:
        JobError: no shapes, numbers out of range, or a device that is not there.
    """
    if not shapes:
        raise JobError("there are no shapes to calibrate; give ranks, or a job whose tables have some")
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise JobError(f"device {str(device)!r} cannot be measured: {str(error).splitlines()[0]}") from error
    rounds, batch_size = check_int(rounds, "rounds", JobError), check_int(batch_size, "batch_size", JobError, least=8)
    if lengths is not None and len(lengths) != len(shapes):
        raise JobError(f"there are {len(shapes)} shapes and {len(lengths)} lengths; give one of each")
    bag_lengths = dict(zip(shapes, [20.0] * len(shapes) if lengths is None else lengths, strict=True))
    distinct = list(bag_lengths)
    dims = sorted({-(-shape.embedding_dim // 4) * 4 for shape in distinct})  # what FBGEMM takes
    done, total = 0, len(distinct) + len(dims)

    def tick() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    for ids, bags in sample_batches(distinct[0].num_embeddings, batch_size, seed, bag_lengths[distinct[0]]):
        least_seconds([train_step(distinct[0], ids, bags, device)], rounds, device)  # wakes the machine up
    shape_rates, all_work, all_seconds = [], [], []
    for shape in distinct:
        batches = list(sample_batches(shape.num_embeddings, batch_size, seed, bag_lengths[shape]))
        work = [TTWork.of(shape, TTReads.of(ids, bags, shape)).array for ids, bags in batches]
        seconds = least_seconds([train_step(shape, ids, bags, device) for ids, bags in batches], rounds, device)
        tick()
        shape_rates.append(ShapeRates(shape.row_factors, shape.dim_factors, shape.tt_ranks, fit_rates(work, seconds)))
        all_work += work
        all_seconds += seconds
    dense_work, dense_seconds = [], []
    for dim in dims:
        batches = list(sample_batches(_DENSE_ROWS, batch_size, seed))
        dense_work += [[1.0, ids.size, ids.size * dim] for ids, _ in batches]
        table = _dense_table(dim, device)
        dense_seconds += least_seconds([_dense_step(table, dim, *sample, device) for sample in batches], rounds, device)
        tick()
    machine = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} thread(s), {device}, "
    machine += datetime.date.today().isoformat()
    return TTRates(machine, fit_rates(all_work, all_seconds), fit_rates(dense_work, dense_seconds), tuple(shape_rates))


def sample_batches(rows: int, batch_size: int, seed: int, length: float = 20.0) -> Iterator[tuple[np.ndarray, int]]:
    """Ids of the batches that are timed, and how many bags of equal length they are in."""
    generator = np.random.default_rng(seed)
    for share, part, exponent, ordered in _BATCHES:
        bags, length_of = max(round(share * batch_size), 1), max(round(part * length), 1)
        # Zipf's law by its inverse, so that a table of any size needs no array of its rows.
        uniform = generator.random(bags * length_of)
        if exponent == 1.0:
            rank = rows**uniform
        else:
            rank = (1.0 + uniform * (rows ** (1.0 - exponent) - 1.0)) ** (1.0 / (1.0 - exponent))
        ids = np.minimum(rank.astype(np.int64) - 1, rows - 1)
        if not ordered:
            # Multiplying by a number without a common factor sends every row to another one.
            factor = next(f for f in range(int(0.618 * rows) | 1, 2 * rows + 3) if np.gcd(f, rows) == 1)
            ids = (ids.astype(object) * factor % rows).astype(np.int64) if rows > 1 << 31 else ids * factor % rows
        yield ids, bags


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


def _dense_table(dim: int, device: torch.device | str) -> torch.nn.Module:
    """A table in FBGEMM, as TorchRec has it."""
    on_cpu = torch.device(device).type == "cpu"
    location = EmbeddingLocation.HOST if on_cpu else EmbeddingLocation.DEVICE
    unit = ComputeDevice.CPU if on_cpu else ComputeDevice.CUDA
    return SplitTableBatchedEmbeddingBagsCodegen(
        [(_DENSE_ROWS, dim, location, unit)],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=1e-6,
        pooling_mode=PoolingMode.SUM,
        device=torch.device(device),
    )


def _dense_step(table: torch.nn.Module, dim: int, ids: np.ndarray, bags: int, device: torch.device | str) -> Step:
    """A lookup of it, with backward and update."""
    values = torch.from_numpy(ids).to(device)
    offsets = torch.arange(0, ids.size + 1, ids.size // bags, device=device)
    upstream = torch.ones(bags, dim, device=device)
    return lambda: table(values, offsets).backward(upstream)


def least_seconds(steps: Sequence[Step], rounds: int, device: torch.device | str = "cpu") -> list[float]:
    """Least time of each step, all of them in turn, so that a slow spell of the machine meets them all alike."""
    times = np.full((rounds + 1, len(steps)), np.inf)
    for number in range(rounds + 1):
        for position, step in enumerate(steps):
            start = time.perf_counter()
            step()
            if torch.device(device).type == "cuda":
                torch.cuda.synchronize(device)
            times[number, position] = time.perf_counter() - start
    least: list[float] = times[1:].min(axis=0).tolist()  # the first round warms up
    return least
