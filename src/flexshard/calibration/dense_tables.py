"""How fast this machine looks up and updates dense tables, at their own sizes and lengths."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    PoolingMode,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from flexshard.calibration.batches import least_seconds, sample_batches
from flexshard.calibration.plain_rows import PlainRows
from flexshard.costmodels import TableRates, fit_rates
from flexshard.tables import DATA_TYPES, OPTIMIZERS

__all__ = ["DenseShape", "dense_step", "dense_table", "measure_dense", "split_seconds"]

Step = Callable[[], object]
Sample = tuple[np.ndarray, int]

_MOST_BYTES = 1 << 30  # of a table that is measured; a larger one is taken to be as slow
_ON_CPU = frozenset({"float32", "float16"})  # data types of FBGEMM's kernels there


class DenseShape(NamedTuple):
    """What a dense table's lookups and updates depend on.

    Attributes:
        rows, dim, dtype, optimizer: as of :class:`Table`.
        length: ids per bag.
    """

    rows: int
    dim: int
    length: float
    dtype: str = "float32"
    optimizer: str = "rowwise_adagrad"


def measure_dense(
    shape: DenseShape, batch_size: int, rounds: int, seed: int, device: torch.device | str
) -> tuple[TableRates, list[list[float]], list[float]]:
    """Rates of a table under its optimizer, and the pooled steps that they are fitted to.

    Returns:
        the rates; calls, ids and numbers of each pooled step; and the seconds that it took.
    """
    rows, dim = shape.rows, shape.dim
    wide = -(-dim // 4) * 4  # what FBGEMM takes
    numbers = wide * (1 + OPTIMIZERS[shape.optimizer].state_bytes_per_element // 4)
    held = max(min(rows, _MOST_BYTES // (4 * numbers)), 1)
    samples = list(sample_batches(held, batch_size, seed, shape.length))
    small = shape._replace(rows=held, dim=wide)
    pooled = dense_table(small, pooled=True, device=device)
    seconds = least_seconds([dense_step(pooled, wide, *sample, device) for sample in samples], rounds, device)
    del pooled
    work = [[1.0, ids.size] for ids, _ in samples]
    alone = dense_table(small, pooled=False, device=device)
    forward, backward = split_seconds(alone, samples, rounds, device, getattr(torch, shape.dtype))
    (call, row), (last_call, last_row) = fit_rates(work, forward), fit_rates(work, backward)
    rates = TableRates(
        rows,
        dim,
        fit_rates(work, seconds),
        (call, row, 0.0),
        (last_call, last_row, 0.0),
        shape.length,
        shape.dtype,
        shape.optimizer,
    )
    return rates, [[1.0, ids.size, ids.size * wide] for ids, _ in samples], seconds


def dense_table(shape: DenseShape, *, pooled: bool, device: torch.device | str) -> torch.nn.Module:
    """A table in FBGEMM, if that has kernels: as TorchRec has pooled ones, or as executors have rows that are looked up
    one by one, which are bags of one id on CPUs.
    """
    on_cpu = torch.device(device).type == "cpu"
    optimizer, precision = OPTIMIZERS[shape.optimizer], DATA_TYPES[shape.dtype].fbgemm
    has_kernel = optimizer.fbgemm is not None and precision is not None
    if on_cpu:
        has_kernel = has_kernel and optimizer.on_cpu and shape.dtype in _ON_CPU
    if not has_kernel:
        dtype = getattr(torch, shape.dtype)
        return PlainRows(shape.rows, shape.dim, dtype, optimizer, pooled, torch.device(device))
    location = EmbeddingLocation.HOST if on_cpu else EmbeddingLocation.DEVICE
    unit = ComputeDevice.CPU if on_cpu else ComputeDevice.CUDA
    return SplitTableBatchedEmbeddingBagsCodegen(
        [(shape.rows, shape.dim, location, unit)],
        optimizer=EmbOptimType[optimizer.fbgemm],
        learning_rate=1e-6,
        pooling_mode=PoolingMode.SUM if pooled or on_cpu else PoolingMode.NONE,
        weights_precision=SparseType[precision],
        output_dtype=SparseType.FP32,
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
    table: torch.nn.Module,
    samples: Sequence[Sample],
    rounds: int,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[float], list[float]]:
    """Least seconds of the lookup of each batch's rows, one by one, as ``dtype``, and of its backward with update."""
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
            rows.detach().to(dtype)
            middle = now()
            upstream = torch.ones_like(rows)
            begin = now()
            rows.backward(upstream)
            times[number, index] = middle - start, now() - begin
    least = times[1:].min(axis=0)  # the first round warms up
    return least[:, 0].tolist(), least[:, 1].tolist()
