"""Tensor-train tables on a GPU: forward, backward and fused update against the TT-Rec algorithm with batched products.

    python -m benchmarks.tensor_train_gpu            # needs CUDA and Triton

TT-Rec's chain is two batched matrix products for every id of the batch, backward four and two to repeat the first, and
an addition of every id's gradients to the cores; here it goes through cuBLAS by torch, in the chunk that is best. Both
run in float32. Times are medians of CUDA events after rounds that warm up.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from statistics import median

import torch

from benchmarks.tensor_train import BATCH, FACTORS, LENGTH, ROWS, zipf
from benchmarks.tensor_train_peers import TTRec
from flexshard._internal import as_text, new_grid
from flexshard.embeddings import TTEmbeddingBag


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", type=int, nargs="*", default=[64, 128])
    parser.add_argument("--ranks", type=int, nargs="*", default=[32, 64, 128])
    parser.add_argument("--batches", type=int, nargs="*", default=[BATCH, 16_384, 65_536])
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here; python -m benchmarks.tensor_train measures the CPU")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, commit {commit.stdout.strip() or 'unknown'}")
    numbers = ["TT-Rec fwd", "fwd+bwd", "ours fwd", "fwd+bwd+SGD", "+Adagrad", "fwd", "fwd+bwd", "apart"]
    for dim in args.dims:
        grid = new_grid(f"E = {ROWS:,}, D = {dim}, bags of {LENGTH}; milliseconds", ["R", "bags", "ids"], numbers)
        for rank in args.ranks:
            for bags in args.batches:
                for name, hashed in (("hashed", True), ("ordered", False)):
                    ids = zipf(hashed=hashed, bags=bags).cuda()
                    grid.add_row(str(rank), f"{bags:,}", name, *row(dim, rank, ids, args.rounds))
        print(as_text(grid, 140), flush=True)


def row(dim: int, rank: int, ids: torch.Tensor, rounds: int) -> list[str]:
    bags = ids.view(-1, LENGTH)
    how = {"mode": "sum", "tt_ranks": rank, "row_factors": FACTORS, "device": "cuda"}
    table = TTEmbeddingBag(ROWS, dim, **how)
    upstream = torch.ones(bags.shape[0], dim, device="cuda")
    naive = TTRec(table)
    offsets = torch.arange(0, ids.numel(), LENGTH, device="cuda")
    reference = naive.forward(ids, offsets, 1 << 14)
    apart = float((forward(table, bags) - reference).abs().max() / reference.abs().max())
    own_forward = timed(lambda: forward(table, bags), rounds)
    steps = []
    for optimizer in ("sgd", "adagrad"):
        fused = TTEmbeddingBag(ROWS, dim, optimizer=optimizer, learning_rate=1e-6, **how)
        steps.append(timed(lambda fused=fused: fused(bags).backward(upstream), rounds))
    naive_forward = best_chunk(lambda size: naive.forward(ids, offsets, size), rounds)
    naive_both = best_chunk(lambda size: naive.step(ids, offsets, upstream, size), rounds)
    values = (naive_forward, naive_both, own_forward, *steps)
    ratios = (naive_forward / own_forward, naive_both / steps[0])
    return [*(f"{v:.2f}" for v in values), *(f"{r:.1f}x" for r in ratios), f"{apart:.0e}"]


def best_chunk(work: Callable[[int], object], rounds: int) -> float:
    """Milliseconds with the chunk that takes least."""
    chunk = min((1 << 12, 1 << 14, 1 << 16), key=lambda size: timed(lambda: work(size), 3))
    return timed(lambda: work(chunk), rounds)


def timed(work: Callable[[], object], rounds: int) -> float:
    """Median milliseconds on the device."""
    times = []
    for number in range(rounds + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        if number >= 3:
            times.append(start.elapsed_time(end))
    return median(times)


@torch.no_grad()
def forward(table: TTEmbeddingBag, bags: torch.Tensor) -> torch.Tensor:
    return table(bags)


if __name__ == "__main__":
    main()
