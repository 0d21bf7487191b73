"""Tensor-train tables against the TT-Rec algorithm and a dense table, one thread; compression of the paper's tables.

    python -m benchmarks.tensor_train            # D in 64, 128 and R in 32, 64, 128: minutes

TT-Rec (Yin et al. 2021) multiplies the chain of cores for every id of the batch by itself, in chunks, forward and
backward; its chunk is tuned here for each case, and it is timed on one id in sixteen, the work being linear. Times are
medians; ids are hashed, or numbered by frequency, as an index bijection leaves them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
from torch.nn import functional

from benchmarks.timing import machine
from flexshard import units
from flexshard._internal import as_text, new_grid
from flexshard.embeddings import TTEmbeddingBag, TTShape
from flexshard.embeddings.tensor_train.products import forward_rows, levels_of, product_sizes, suffix_products
from flexshard.embeddings.tensor_train.rows_function import laid_cores

ROWS, BATCH, LENGTH = 10_000_000, 4096, 20
FACTORS = (200, 200, 250)
SHARE = 16  # of the ids that TT-Rec is timed on
# Rows of the tables above a million of the data sets in Table III, as DLRM's scripts make them, and of all the others.
TABLE_SETS = {
    "Avazu": ([6_729_486, 2_686_408], 33_551, 16),
    "Criteo Terabyte": ([39_884_406, 38_532_951, 2_953_546, 39_979_771, 25_641_295, 39_664_984], 1_110_489, 64),
    "Criteo Kaggle": ([10_131_227, 2_202_608, 8_351_593, 5_461_306, 7_046_547], 569_296, 16),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", type=int, nargs="*", default=[64, 128])
    parser.add_argument("--ranks", type=int, nargs="*", default=[32, 64, 128])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(machine())
    batches = {"hashed": zipf(hashed=True), "ordered": zipf(hashed=False)}
    numbers = ["smaller", "TT-Rec fwd", "fwd+bwd", "plain fwd", "fwd+bwd", "ours fwd", "fwd+bwd+SGD", "fwd", "fwd+bwd"]
    grid = new_grid(f"E = {ROWS:,}, {BATCH:,} bags of {LENGTH} Zipf ids; milliseconds", ["D", "R", "ids"], numbers)
    for dim in args.dims:
        for rank in args.ranks:
            for name, ids in batches.items():
                grid.add_row(str(dim), str(rank), name, *row(dim, rank, ids, args.rounds))
        forward, both = dense(dim, batches["hashed"], args.rounds)
        grid.add_row(str(dim), "dense", "hashed", "1", "", "", "", "", f"{forward:.1f}", f"{both:.1f}", "", "")
    print(as_text(grid, 160), flush=True)
    print_shares(batches, args.rounds)
    print_suffix(batches["ordered"], args.rounds)
    print_compression()


def zipf(*, hashed: bool, exponent: float = 1.05, bags: int = BATCH) -> torch.Tensor:
    """Ids of a batch; the k-th most frequent is k, or anywhere."""
    generator = np.random.default_rng(0)
    weights = 1.0 / np.arange(1, ROWS + 1) ** exponent
    cumulative = np.cumsum(weights)
    drawn = np.searchsorted(cumulative, generator.random(bags * LENGTH) * cumulative[-1])
    if hashed:
        drawn = generator.permutation(ROWS)[drawn]
    return torch.from_numpy(drawn.astype(np.int64))


def timed(work: Callable[[], object], rounds: int) -> float:
    """Median milliseconds of processor time, after one round that warms up."""
    times = []
    for number in range(rounds + 1):
        start = time.process_time()
        work()
        if number:
            times.append(1e3 * (time.process_time() - start))
    return median(times)


def row(dim: int, rank: int, ids: torch.Tensor, rounds: int) -> list[str]:
    offsets = torch.arange(0, ids.numel(), LENGTH)
    how = {"mode": "sum", "tt_ranks": rank, "row_factors": FACTORS}
    table = TTEmbeddingBag(ROWS, dim, backend="torch", **how)
    fused = TTEmbeddingBag(ROWS, dim, optimizer="sgd", learning_rate=1e-6, **how)
    upstream = torch.ones(BATCH, dim)
    plain_forward = timed(lambda: forward(table, ids, offsets), rounds)
    plain_both = timed(lambda: table(ids, offsets).backward(upstream), rounds)
    own_forward = timed(lambda: forward(fused, ids, offsets), rounds)
    own_both = timed(lambda: fused(ids, offsets).backward(upstream), rounds)
    few = ids.view(BATCH, LENGTH)[::SHARE].reshape(-1)
    naive = TTRec(table)
    naive_forward = SHARE * best_chunk(lambda size: naive.forward(few, size), rounds)
    naive_both = SHARE * best_chunk(lambda size: naive.forward_backward(few, size), rounds)
    values = (naive_forward, naive_both, plain_forward, plain_both, own_forward, own_both)
    ratios = (naive_forward / own_forward, naive_both / own_both)
    return [f"{table.shape.compression:.0f}x", *(f"{v:.0f}" for v in values), *(f"{r:.1f}x" for r in ratios)]


def best_chunk(work: Callable[[int], object], rounds: int) -> float:
    """Milliseconds with the chunk that takes least."""
    chunk = min((4, 16, 64, 256), key=lambda size: timed(lambda: work(size), 1))
    return timed(lambda: work(chunk), rounds)


@torch.no_grad()
def forward(table: TTEmbeddingBag, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return table(ids, offsets)


class TTRec:
    """The chain of every id by itself, in chunks, with buffers that are used again."""

    def __init__(self, table: TTEmbeddingBag) -> None:
        self.shape, self.device = table.shape, table.cores[0].device
        self.cores = [core.detach().flatten(1) for core in table.cores]
        self._buffers: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

    def buffer(self, name: str, *size: int) -> torch.Tensor:
        """Memory that has been written to before, so that nothing faults."""
        return self._buffers.setdefault((name, size), torch.empty(size, device=self.device))

    def chain(self, ids: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor, torch.Tensor]:
        """Digits of ids, the slices of the cores at them, and both products."""
        p, q, r, n = self.shape.row_factors, self.shape.dim_factors, self.shape.tt_ranks, ids.numel()
        digits = [ids // (p[1] * p[2]), ids // p[2] % p[1], ids % p[2]]
        slices = []
        for k, (core, digit) in enumerate(zip(self.cores, digits, strict=True)):
            slices.append(torch.index_select(core, 0, digit, out=self.buffer(f"slice {k}", n, core.shape[1])))
        a, b, c = slices[0].view(n, q[0], r[0]), slices[1].view(n, r[0], -1), slices[2].view(n, r[1], q[2])
        first = torch.bmm(a, b, out=self.buffer("first", n, q[0], b.shape[2])).view(n, -1, r[1])
        return digits, [a, b, c], first, torch.bmm(first, c, out=self.buffer("rows", n, first.shape[1], q[2]))

    def forward(self, ids: torch.Tensor, chunk: int) -> torch.Tensor:
        """Pooled rows."""
        rows = torch.empty(ids.numel(), self.shape.embedding_dim, device=self.device)
        for part, own in zip(ids.split(chunk), rows.split(chunk), strict=True):
            own.copy_(self.chain(part)[3].view(own.shape))
        return rows.view(-1, LENGTH, rows.shape[1]).sum(1)

    def forward_backward(self, ids: torch.Tensor, chunk: int) -> list[torch.Tensor]:
        """Gradients of the cores, after a forward pass."""
        self.forward(ids, chunk)
        gradients = [torch.zeros_like(core) for core in self.cores]
        upstream = torch.ones(ids.numel(), self.shape.embedding_dim, device=self.device)
        for part, own in zip(ids.split(chunk), upstream.split(chunk), strict=True):
            digits, (a, b, c), first, _ = self.chain(part)  # again, as TT-Rec does
            n = part.numel()
            last = own.view(n, -1, c.shape[2])
            to_c = torch.bmm(first.transpose(1, 2), last, out=self.buffer("to c", *c.shape))
            to_first = torch.bmm(last, c.transpose(1, 2), out=self.buffer("to first", *first.shape)).view(
                n, a.shape[1], -1
            )
            to_b = torch.bmm(a.transpose(1, 2), to_first, out=self.buffer("to b", *b.shape))
            to_a = torch.bmm(to_first, b.transpose(1, 2), out=self.buffer("to a", *a.shape))
            for gradient, digit, one in zip(gradients, digits, (to_a, to_b, to_c), strict=True):
                gradient.index_add_(0, digit, one.view(n, -1))
        return gradients


def dense(dim: int, ids: torch.Tensor, rounds: int) -> tuple[float, float]:
    """A dense table with a sparse gradient and SGD on the rows that were read."""
    offsets = torch.arange(0, ids.numel(), LENGTH)
    table = torch.nn.EmbeddingBag(ROWS, dim, mode="sum", sparse=True)
    upstream = torch.ones(BATCH, dim)
    optimizer = torch.optim.SGD(table.parameters(), lr=1e-6)

    def step() -> None:
        table(ids, offsets).backward(upstream)
        optimizer.step()
        optimizer.zero_grad()

    with torch.no_grad():
        forward_only = timed(lambda: table(ids, offsets), rounds)
    return forward_only, timed(step, rounds)


def print_shares(batches: dict[str, torch.Tensor], rounds: int) -> None:
    """What each step of ours brings at D = R = 64, one added to the other: as Figures 14, 17 and 18 have it."""
    numbers = ["lookup (Figure 17)", "", "of the one before", "with backward (14, 18)", "", "of the one before"]
    grid = new_grid("D = 64, R = 64: what each optimisation brings", [""], numbers)
    found = shares(batches["hashed"], rounds)
    last = shares(batches["ordered"], rounds)
    found["and rows in order of frequency"] = last["and SGD within backward"]
    first = before = next(iter(found.values()))
    for name, own in found.items():
        cells = []
        for place in (0, 1):
            cells += [f"{own[place]:.0f} ms", f"{first[place] / own[place]:.1f}x", f"{before[place] / own[place]:.2f}x"]
        grid.add_row(name, *cells)
        before = own
    print(as_text(grid, 140), flush=True)


def shares(ids: torch.Tensor, rounds: int) -> dict[str, tuple[float, float]]:
    """Milliseconds of forward, and of forward and backward, with one optimisation more each."""
    offsets, upstream = torch.arange(0, BATCH * LENGTH, LENGTH), torch.ones(BATCH, 64)
    table = TTEmbeddingBag(ROWS, 64, mode="sum", tt_ranks=64, row_factors=FACTORS)
    fused = TTEmbeddingBag(ROWS, 64, mode="sum", tt_ranks=64, row_factors=FACTORS, optimizer="sgd", learning_rate=1e-6)
    optimizer = torch.optim.SGD(table.parameters(), lr=1e-6)
    naive = TTRec(table)
    few = ids.view(BATCH, LENGTH)[::SHARE].reshape(-1)
    distinct = torch.unique(ids)
    small = distinct[::SHARE]
    small = small[: small.numel() // LENGTH * LENGTH]
    scale = distinct.numel() / small.numel()

    def pool(backward: bool) -> None:
        rows = torch.zeros(distinct.numel(), 64, requires_grad=backward)
        pooled = functional.embedding_bag(torch.unique(ids, return_inverse=True)[1], rows, offsets, mode="sum")
        if backward:
            pooled.backward(upstream)

    def step() -> None:
        optimizer.zero_grad()
        table(ids, offsets).backward(upstream)
        optimizer.step()

    table(ids, offsets).backward(upstream)
    update = timed(optimizer.step, rounds)
    found = {
        "every id by itself (TT-Rec)": (
            SHARE * best_chunk(lambda size: naive.forward(few, size), rounds),
            SHARE * best_chunk(lambda size: naive.forward_backward(few, size), rounds) + update,
        ),
        "every distinct id by itself": (
            scale * best_chunk(lambda size: naive.forward(small, size), rounds) + timed(lambda: pool(False), rounds),
            scale * best_chunk(lambda size: naive.forward_backward(small, size), rounds)
            + timed(lambda: pool(True), rounds)
            + update,
        ),
    }
    table.backend, usual = "torch", table.backend
    found["and prefixes once"] = timed(lambda: forward(table, ids, offsets), rounds), timed(step, rounds)
    table.backend = usual
    found["and the suffix compiled"] = timed(lambda: forward(table, ids, offsets), rounds), timed(step, rounds)
    within = timed(lambda: fused(ids, offsets).backward(upstream), rounds)
    found["and SGD within backward"] = found["and the suffix compiled"][0], within
    return found


def print_suffix(ids: torch.Tensor, rounds: int) -> None:
    """Ways to compute the last core's products: what is kept is numba's."""
    table = TTEmbeddingBag(ROWS, 64, mode="sum", tt_ranks=64, row_factors=FACTORS)
    distinct = torch.unique(ids)
    levels = levels_of(distinct, table.shape)
    laid = laid_cores(table.cores)
    products = [laid[0].new_empty(size) for size in product_sizes(levels, table.shape)]
    rows = forward_rows(levels, table.shape, laid, products=products, compiled=True)
    out = rows.view(distinct.numel(), 16, 4)
    arguments = (products[-1], levels.parent, laid[-1], levels.digit, levels.row_index, out)

    def expression(
        prefixes: torch.Tensor, parent: torch.Tensor, core: torch.Tensor, digit: torch.Tensor
    ) -> torch.Tensor:
        return (prefixes[parent][:, :, None] * core[digit][:, None]).sum(-1)

    ways = {
        "batched products, 256 at a time": lambda: suffix_products(*arguments, compiled=False),
        "numba": lambda: suffix_products(*arguments, compiled=True),
    }
    compiled = torch.compile(expression, dynamic=True)
    try:
        compiled(*arguments[:4])
    except Exception as error:  # no compiler of C++, say
        print(f"torch.compile cannot be had here: {str(error).splitlines()[0]}")
    else:
        ways["torch.compile"] = lambda: compiled(*arguments[:4])
    print("the suffix of D = R = 64, ids in order, forward: ", end="")
    print(", ".join(f"{name} {timed(way, rounds):.1f} ms" for name, way in ways.items()), flush=True)


def print_compression() -> None:
    """Table III: all tables of a data set, those above a million rows as tensor trains."""
    grid = new_grid("Compression (Table III)", ["tables"], ["rows", "D", "dense", "R=32", "R=64", "R=128", "published"])
    published = {"Avazu": "6.22x", "Criteo Terabyte": "74.19x", "Criteo Kaggle": "7.29x"}
    for name, (large, small, dim) in TABLE_SETS.items():
        whole = (sum(large) + small) * dim
        ratios = []
        for rank in (32, 64, 128):
            kept = small * dim + sum(TTShape.choose(rows, dim, rank).parameters for rows in large)
            ratios.append(f"{whole / kept:.1f}x")
        size = units.format_bytes(4 * whole)
        grid.add_row(name, f"{sum(large) + small:,}", str(dim), size, *ratios, published[name])
    print(as_text(grid, 110), flush=True)


if __name__ == "__main__":
    main()
