"""Train a table of ten million rows in the memory of a small one: a tensor train. One process.

python examples/tensor_train_table.py [--rows 10000000 --rank 32]
"""

from __future__ import annotations

import argparse
import time

import torch

from flexshard.embeddings import TTEmbeddingBag
from one_line import run_example


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--rank", type=int, default=32, help="TT rank: larger is nearer to a dense table, and slower")
    parser.add_argument("--steps", type=int, default=30)
    given = parser.parse_args()
    torch.manual_seed(0)
    table = TTEmbeddingBag(
        given.rows, given.dim, tt_ranks=given.rank, mode="sum", optimizer="adagrad", learning_rate=0.1
    )
    dense = 4 * given.rows * given.dim
    print(f"{dense / 1e6:,.0f} MB as a dense table, {table.nbytes / 1e6:,.1f} MB as a tensor train")
    ids = (given.rows ** torch.rand(256, 10)).long() - 1  # a power law
    target = torch.randn(256, given.dim)
    start = time.perf_counter()
    for step in range(given.steps):
        loss = (table(ids) - target).square().mean()
        loss.backward()  # which updates the table, too
        if step in (0, given.steps - 1):
            print(f"step {step}: loss {loss.item():.3f}, {time.perf_counter() - start:.2f} s")


if __name__ == "__main__":
    run_example(main)
