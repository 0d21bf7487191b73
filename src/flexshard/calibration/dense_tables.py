"""How fast this machine looks up and updates dense tables, at their own sizes and lengths."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    PoolingMode,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from flexshard.calibration.batches import least_seconds, sample_batches
from flexshard.costmodels import TableRates, fit_rates

__all__ = ["DenseShape", "dense_step", "dense_table", "measure_dense", "split_seconds"]

Step = Callable[[], object]
Sample = tuple[np.ndarray, int]
DenseShape = tuple[int, int, float]  # rows, dimension, ids per bag

_MOST_BYTES = 1 << 30  # of a table that is measured; a larger one is taken to be as slow


def measure_dense(
    shape: DenseShape, batch_size: int, rounds: int, seed: int, device: torch.device | str
) -> tuple[TableRates, list[list[float]], list[float]]:
    """Rates of a float32 table under row-wise Adagrad, and the pooled steps that they are fitted to.

    Returns:
        the rates; calls, ids and numbers of each pooled step; and the seconds that it took.
    """
    rows, dim, length = shape
    wide = -(-dim // 4) * 4  # what FBGEMM takes
    held = max(min(rows, _MOST_BYTES // (4 * wide)), 1)
    samples = list(sample_batches(held, batch_size, seed, length))
    pooled = dense_table(held, wide, pooled=True, device=device)
    seconds = least_seconds([dense_step(pooled, wide, *sample, device) for sample in samples], rounds, device)
    work = [[1.0, ids.size] for ids, _ in samples]
    forward, backward = split_seconds(dense_table(held, wide, pooled=False, device=device), samples, rounds, device)
    (call, row), (last_call, last_row) = fit_rates(work, forward), fit_rates(work, backward)
    rates = TableRates(rows, dim, fit_rates(work, seconds), (call, row, 0.0), (last_call, last_row, 0.0))
    return rates, [[1.0, ids.size, ids.size * wide] for ids, _ in samples], seconds


def dense_table(rows: int, dim: int, *, pooled: bool, device: torch.device | str) -> torch.nn.Module:
    """A table in FBGEMM: as TorchRec has pooled ones, or as executors have rows that are looked up one by one, which
    are bags of one id on CPUs.
    """
    on_cpu = torch.device(device).type == "cpu"
    location = EmbeddingLocation.HOST if on_cpu else EmbeddingLocation.DEVICE
    unit = ComputeDevice.CPU if on_cpu else ComputeDevice.CUDA
    return SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, location, unit)],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=1e-6,
        pooling_mode=PoolingMode.SUM if pooled or on_cpu else PoolingMode.NONE,
        device=torch.device(device),
    )


def _inputs(ids: np.ndarray, bags: int, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids, and where each bag of them starts and the last one ends."""
    offsets = torch.arange(0, ids.size + 1, ids.size // bags, device=device)
    return torch.from_numpy(ids).to(device), offsets


def dense_step(table: torch.nn.Module, dim: int, ids: np.ndarray, bags: int, device: torch.device | str) -> Step:
    """A lookup, with backward and update."""
    values, offsets = _inputs(ids, bags, device)
    upstream = torch.ones(bags, dim, device=device)
    return lambda: table(values, offsets).backward(upstream)


def _settle() -> None:
    """Have the C library keep memory of up to 31 MiB that is freed, as in a process that has trained for a while.

    Before, a large output is of pages that the system has to clear first, which takes longer than the lookup.
    """
    for _ in range(2):
        torch.ones(31 << 18)


def split_seconds(
    table: torch.nn.Module, samples: Sequence[Sample], rounds: int, device: torch.device | str
) -> tuple[list[float], list[float]]:
    """Least seconds of the lookup of each batch's rows, one by one, and of its backward with update."""
    times = np.full((rounds + 1, len(samples), 2), np.inf)
    _settle()
    inputs = [_inputs(ids, ids.size, device) for ids, _ in samples]

    def now() -> float:
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    for number in range(rounds + 1):
        for index, (values, offsets) in enumerate(inputs):
            start = now()
            rows = table(values, offsets)
            middle = now()
            upstream = torch.ones_like(rows)
            begin = now()
            rows.backward(upstream)
            times[number, index] = middle - start, now() - begin
    least = times[1:].min(axis=0)  # the first round warms up
    return least[:, 0].tolist(), least[:, 1].tolist()
