"""Tensor-train tables against the TT-Rec algorithm and a dense table, one thread; compression of the paper's tables.

    python -m benchmarks.tensor_train            # D in 64, 128 and R in 32, 64, 128: minutes

Peers (``tensor_train_peers``), all of distinct ids but the last: fifteen lines of torch with one product per middle
slice; a compiled chain of BLAS calls that copies no slices; TT-Rec's batched products (Yin et al. 2021), of distinct
ids and of every id, whose chunks are tuned here for each case, and which are timed on a share of the ids, the work
being linear. Times are medians; ids are uniform, or Zipf's, hashed or numbered by frequency, as an index bijection
leaves them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median

import numpy as np
import torch

from benchmarks.tensor_train_peers import Chain, FifteenLines, TTRec, TTRecDistinct, products_alone
from benchmarks.timing import machine
from flexshard import units
from flexshard._internal import as_text, new_grid
from flexshard.embeddings import TTEmbeddingBag, TTShape
from flexshard.embeddings.tensor_train.products import forward_rows, levels_of, product_sizes, suffix_products
from flexshard.embeddings.tensor_train.rows_function import laid_cores
from flexshard.embeddings.tensor_train.suffix_kernels import suffix_forward

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
    batches = {"uniform": uniform(), "Zipf, hashed": zipf(hashed=True), "Zipf, ordered": zipf(hashed=False)}
    numbers = ["smaller", "ours fwd", "with bwd + SGD", "ours in torch", "fifteen lines", "chain, BLAS"]
    numbers += ["TT-Rec, distinct ids", "TT-Rec, every id"]
    title = (
        f"E = {ROWS:,}, {BATCH:,} bags of {LENGTH} ids; ours in ms of one core, others as multiples, fwd / fwd + bwd"
    )
    grid = new_grid(title, ["D", "R", "ids"], numbers)
    for dim in args.dims:
        for rank in args.ranks:
            for name, ids in batches.items():
                if name != "uniform" or (dim, rank) == (64, 64):
                    grid.add_row(str(dim), str(rank), name, *row(dim, rank, ids, args.rounds))
                    print(f"{dim} {rank} {name} done", file=sys.stderr, flush=True)
        once, both = dense(dim, batches["Zipf, hashed"], args.rounds)
        grid.add_row(str(dim), "dense", "Zipf, hashed", "1", f"{once:.1f}", f"{both:.1f}", *[""] * 5)
    print(as_text(grid, 150), flush=True)
    print_small(args.rounds)
    batches = {"hashed": batches["Zipf, hashed"], "ordered": batches["Zipf, ordered"]}
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


def uniform() -> torch.Tensor:
    """Ids that are all as likely."""
    return torch.from_numpy(np.random.default_rng(0).integers(0, ROWS, BATCH * LENGTH))


def print_small(rounds: int) -> None:
    """Small batches, beside the products of middle slices and their updates alone."""
    numbers = ["prefixes", "products alone", "step", "of it", "forward"]
    grid = new_grid("D = R = 64, SGD within backward, small batches; milliseconds", ["bags x ids", "ids"], numbers)
    for bags, length in ((128, 10), (2048, 10)):
        for name in ("ordered", "hashed"):
            ids = zipf(hashed=name == "hashed", bags=bags)[: bags * length]
            offsets, upstream = torch.arange(0, ids.numel(), length), torch.ones(bags, 64)
            how = {"mode": "sum", "tt_ranks": 64, "row_factors": FACTORS, "optimizer": "sgd", "learning_rate": 1e-6}
            table = TTEmbeddingBag(ROWS, 64, **how)
            alone = timed(products_alone(table, torch.unique(ids)), 4 * rounds)
            step = timed(lambda t=table, i=ids, o=offsets, u=upstream: t(i, o).backward(u), 4 * rounds)
            once = timed(lambda t=table, i=ids, o=offsets: forward(t, i, o), 4 * rounds)
            prefixes = torch.unique(ids // FACTORS[2]).numel()
            cells = [f"{prefixes:,}", f"{alone:.2f}", f"{step:.2f}", f"{step / alone:.2f}x", f"{once:.2f}"]
            grid.add_row(f"{bags:,} x {length}", name, *cells)
    print(as_text(grid, 110))
    one, first = zipf(hashed=True, bags=1), torch.zeros(1, dtype=torch.int64)
    table = TTEmbeddingBag(ROWS, 64, mode="sum", tt_ranks=64, row_factors=FACTORS)
    print(f"one bag of {LENGTH} ids, forward: {timed(lambda: forward(table, one, first), 400):.3f} ms", flush=True)


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
    offsets, upstream = torch.arange(0, ids.numel(), LENGTH), torch.ones(BATCH, dim)
    how = {"mode": "sum", "tt_ranks": rank, "row_factors": FACTORS}
    table = TTEmbeddingBag(ROWS, dim, backend="torch", **how)
    fused = TTEmbeddingBag(ROWS, dim, optimizer="sgd", learning_rate=1e-6, **how)
    plain_forward = timed(lambda: forward(table, ids, offsets), rounds)
    plain_both = timed(lambda: table(ids, offsets).backward(upstream), rounds)
    own_forward = timed(lambda: forward(fused, ids, offsets), rounds)
    own_both = timed(lambda: fused(ids, offsets).backward(upstream), rounds)
    cells = [f"{table.shape.compression:.0f}x", f"{own_forward:.1f}", f"{own_both:.1f}"]
    cells += [f"{plain_forward / own_forward:.1f} / {plain_both / own_both:.1f}"]
    for forward_ms, both_ms in peers(table, ids, offsets, upstream, rounds):
        cells.append(f"{forward_ms / own_forward:.1f} / {both_ms / own_both:.1f}")
    return cells


def peers(
    table: TTEmbeddingBag, ids: torch.Tensor, offsets: torch.Tensor, upstream: torch.Tensor, rounds: int
) -> Iterator[tuple[float, float]]:
    """Milliseconds of each peer: forward, and with backward and SGD; each with the chunk that suits it best."""
    fifteen, chain, distinct = FifteenLines(table), Chain(table), TTRecDistinct(table)
    expected = forward(table, ids, offsets)
    with torch.no_grad():
        for peer in (fifteen, chain, distinct):
            torch.testing.assert_close(peer.forward(ids, offsets), expected, atol=1e-6, rtol=1e-3)
        least = best_chunk(lambda size: fifteen.forward(ids, offsets, size), rounds, (64, 256, 1024, 1 << 30))
    yield least, best_chunk(lambda size: fifteen.step(ids, offsets, upstream, size), rounds, (1024, 1 << 30))
    few_rounds = min(rounds, 3)
    yield (
        timed(lambda: chain.forward(ids, offsets), few_rounds),
        timed(lambda: chain.step(ids, offsets, upstream), few_rounds),
    )
    for peer, share in ((distinct, 4), (TTRec(table), SHARE)):  # the work is linear in ids
        few = ids.view(-1, LENGTH)[::share].reshape(-1)
        scale = share
        if peer is distinct:
            scale = torch.unique(ids).numel() / torch.unique(few).numel()
        some, above = torch.arange(0, few.numel(), LENGTH), upstream[: few.numel() // LENGTH]
        yield (
            scale * best_chunk(lambda size, p=peer, f=few, o=some: p.forward(f, o, size), few_rounds),
            scale * best_chunk(lambda size, p=peer, f=few, o=some, a=above: p.step(f, o, a, size), few_rounds),
        )


def best_chunk(work: Callable[[int], object], rounds: int, chunks: Sequence[int] = (4, 16, 64, 256)) -> float:
    """Milliseconds with the chunk that takes least."""
    chunk = min(chunks, key=lambda size: timed(lambda: work(size), 1))
    return timed(lambda: work(chunk), rounds)


@torch.no_grad()
def forward(table: TTEmbeddingBag, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return table(ids, offsets)


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
    found = dict(
        zip(
            ("fifteen lines", "chain", "every distinct id by itself", "every id by itself (TT-Rec)"),
            peers(table, ids, offsets, upstream, rounds),
            strict=True,
        )
    )
    found = {name: found[name] for name in ("every id by itself (TT-Rec)", "every distinct id by itself")}

    def step() -> None:
        optimizer.zero_grad()
        table(ids, offsets).backward(upstream)
        optimizer.step()

    table.backend, usual = "torch", table.backend
    found["and prefixes once"] = timed(lambda: forward(table, ids, offsets), rounds), timed(step, rounds)
    table.backend = usual
    found["and compiled loops"] = timed(lambda: forward(table, ids, offsets), rounds), timed(step, rounds)
    within = timed(lambda: fused(ids, offsets).backward(upstream), rounds)
    found["and SGD within backward"] = found["and compiled loops"][0], within
    return found


def print_suffix(ids: torch.Tensor, rounds: int) -> None:
    """Ways to compute the last core's products: what is kept is numba's."""
    table = TTEmbeddingBag(ROWS, 64, mode="sum", tt_ranks=64, row_factors=FACTORS)
    distinct = torch.unique(ids)
    levels = levels_of(distinct, table.shape)
    laid = laid_cores(table.cores, copied=True)
    products = [laid[0].new_empty(size) for size in product_sizes(levels, table.shape)]
    rows = forward_rows(levels, table.shape, laid, products=products)
    out = rows.view(distinct.numel(), 16, 4)
    arguments = (products[-1], levels.parent, laid[-1], levels.digit, levels.row_index, out)

    def expression(
        prefixes: torch.Tensor, parent: torch.Tensor, core: torch.Tensor, digit: torch.Tensor
    ) -> torch.Tensor:
        return (prefixes[parent][:, :, None] * core[digit][:, None]).sum(-1)

    ways = {
        "batched products, 256 at a time": lambda: suffix_products(*arguments),
        "numba": lambda: suffix_forward(*(tensor.detach().numpy() for tensor in arguments)),
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
