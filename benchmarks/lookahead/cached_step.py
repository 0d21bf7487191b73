"""What a step costs with a cache: kernel, oracle and moves, beside the same kernel on all rows. Twice: with FBGEMM's
kernel as our stores call it, and as TorchRec's ``EmbeddingCollection`` does (rows that are not pooled, which on CPUs is
the slower one of the two).
"""

from __future__ import annotations

import time
from collections import deque
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode

from benchmarks.lookahead.streams import zipf
from flexshard.executors.stores import fused
from flexshard.executors.stores.base import RowStore
from flexshard.executors.stores.cached import CachedStore
from flexshard.executors.stores.fused import FusedStore
from flexshard.executors.stores.updates import OptimizerSpec

__all__ = ["main"]

_HOST = torch.device("cpu")


class _AsTorchRec(FusedStore):
    """All rows in FBGEMM's kernel for rows that are not pooled."""

    def __init__(self, *arguments: Any) -> None:
        with mock.patch.object(fused, "PoolingMode", SimpleNamespace(NONE=PoolingMode.NONE, SUM=PoolingMode.NONE)):
            super().__init__(*arguments)


def _steps(store: RowStore, batches: list[torch.Tensor], ahead: int) -> tuple[list[float], float]:
    """CPU seconds of each step, all threads, and a sum over what was looked up."""
    announced = deque(store.announce(batch) for batch in batches[:ahead])
    seconds, total = [], 0.0
    for number, batch in enumerate(batches):
        start = time.process_time()
        if number + ahead < len(batches):
            announced.append(store.announce(batches[number + ahead]))
        store.begin_step(number + 1)
        found = announced.popleft()() if ahead else store.look_up(batch)
        found.update(torch.tanh(found.rows) * 0.1)
        total += float(found.rows.sum(dtype=torch.float64))
        if isinstance(store, CachedStore):
            store.drained()  # what the step asked for is part of it
        seconds.append(time.process_time() - start)
    return seconds, total


def compare(rows: int, dim: int, lookups: int, share: float, ahead: int, kind: EmbOptimType, steps: int = 80) -> None:
    """Print CPU time per step of both, interleaved, and whether they give the same."""
    rng = np.random.default_rng(0)
    order = rng.permutation(rows)
    batches = [torch.from_numpy(order[zipf(rng, rows, 1.05, lookups)]) for _ in range(steps)]
    spec = OptimizerSpec.of({"optimizer": kind, "learning_rate": 0.05}, "t", _HOST)
    start = torch.randn(rows, dim, generator=torch.Generator().manual_seed(1))
    times: list[list[float]] = [[], [], [], []]  # of all rows and a cache, with our kernel and with theirs
    ends: list[set[float]] = [set(), set(), set(), set()]
    for turn in range(4):
        stores: list[RowStore] = []
        for kernel in (FusedStore, _AsTorchRec):
            cached = partial(CachedStore, cache_rows=int(share * rows), cache=kernel, label="benchmark")
            stores += [make(spec, rows, dim, torch.float32, _HOST) for make in (kernel, cached)]
        for index in range(4)[:: -1 if turn % 2 else 1]:
            store = stores[index]
            store.part("weight").copy_(start)
            seconds, total = _steps(store, batches, ahead if isinstance(store, CachedStore) else 0)
            times[index] += seconds[ahead:-ahead]  # what the others announce is no part of the last ones
            ends[index].add(total)
        ours, behind, theirs, behind_theirs = (store.part("weight") for store in stores)
        assert torch.equal(ours, behind)
        assert torch.equal(theirs, behind_theirs)
        assert torch.allclose(ours, theirs, atol=1e-5)
    assert all(len(totals) == 1 for totals in (ends[0] | ends[1], ends[2] | ends[3]))
    store = stores[1]
    assert isinstance(store, CachedStore)
    traffic = store.traffic
    a, b, c, d = (float(np.median(seconds)) for seconds in times)
    print(
        f"  {kind.value:22} {rows:>9,} x {dim}, {lookups:,} lookups, cache {share:.0%}, lookahead {ahead}: all rows"
        f" {a * 1e3:.2f} ms, cached {b * 1e3:.2f} ms of CPU, ratio {b / a:.2f}; with the kernel as TorchRec calls it"
        f" {c * 1e3:.2f} and {d * 1e3:.2f} ms, ratio {d / c:.2f} (ours to theirs without a cache {b / c:.2f}); fetched"
        f" {traffic.fetched / traffic.batches:,.0f} of {traffic.distinct / traffic.batches:,.0f} rows a step, needed by"
        f" the next {traffic.carried / traffic.distinct:.0%}"
    )


def main() -> None:
    """A cache of a twentieth of the rows, and smaller ones."""
    torch.set_num_threads(1)
    print("A step's CPU time (median of 4 rounds in turns), the same bits on both sides:")
    for kind in (EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_SGD):
        compare(300_000, 32, 10_000, 0.053, 4, kind)
    compare(300_000, 32, 10_000, 0.14, 16, EmbOptimType.EXACT_ROWWISE_ADAGRAD)
    compare(2_000_000, 64, 60_000, 0.05, 2, EmbOptimType.EXACT_ROWWISE_ADAGRAD, 24)
