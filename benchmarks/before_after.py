"""This tree beside another one of the same public names, such as a checkout of the release before.

python -m benchmarks.before_after OTHER [--rounds 15] [--only solver ...]

Each tree has a process of its own, which has loaded everything; rounds of the two alternate, and the least CPU time of
each counts, so that a slow spell of the machine meets both alike.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
Step = Callable[[], Any]


def solver() -> Step:
    """A plan of 1,000 tables with 10^10 rows on 1,024 ranks, with its baselines."""
    from benchmarks.solver import large_model
    from flexshard import Cluster, solve

    tables, cluster = large_model(), Cluster.preset("dgx-h100", nodes=128)
    return lambda: solve(tables, cluster, batch_size=1024)


def profiling() -> Step:
    """5 million ids of a million rows, counted from Parquet."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    from flexshard import AccessProfile

    path = Path(tempfile.mkdtemp()) / "ids.parquet"
    ids = np.random.default_rng(0).zipf(1.2, 5_000_000) % 1_000_000
    pq.write_table(pa.table({"id": ids}), path, row_group_size=1_000_000)
    return lambda: AccessProfile.from_parquet(path, column="id", num_rows=1_000_000, workers=1).ranked_rows


def replay() -> Step:
    """2 million lookups on 256 ranks."""
    import numpy as np

    from flexshard import AccessProfile, Cluster, Table, solve
    from flexshard.executors import Lookups, replay

    generator = np.random.default_rng(0)
    profile = AccessProfile.from_counts(generator.zipf(1.3, 1_000_000) % 10_000, num_samples=1_000_000)
    plan = solve(
        [Table("items", 1_000_000, 128, profile)],
        Cluster.preset("dgx-h100", nodes=32),
        batch_size=512,
        index_dedup=False,
    )
    ids = generator.zipf(1.2, 2_000_000) % 1_000_000
    ranks = np.sort(generator.integers(0, 256, ids.size))
    return lambda: replay(plan, [{"items": Lookups(ids, ranks)}], {"items": profile})


def row_wise_step() -> Step:
    """Ten steps of four row-wise tables on two ranks; the first rank's time."""
    folder = tempfile.mkdtemp()
    subprocess.Popen([sys.executable, str(Path(__file__).resolve()), "--peer", folder])
    return _rank(0, folder)


def _rank(rank: int, folder: str) -> Step:
    import torch
    import torch.distributed as dist

    from benchmarks.torchrec_row_wise import batches, ours

    os.environ.update(GLOO_SOCKET_IFNAME="lo", LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.set_num_threads(1)
    model, features = ours(2, ranked=True), batches(rank, 10)

    def steps() -> None:
        for batch in features:
            rows = model(batch)
            torch.cat([value.values().flatten() for value in rows.values()]).sum().backward()

    return steps


def conversion() -> Step:
    """20,000 samples of lists of 50 ids, four at a time the same, to an InverseKeyedJaggedTensor."""
    import torch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    from flexshard.embeddings import InverseKeyedJaggedTensor

    lists = torch.randint(0, 1 << 40, (5_000, 50), generator=torch.Generator().manual_seed(0))
    values = lists.repeat_interleave(4, 0).repeat(2, 1).flatten()
    batch = KeyedJaggedTensor(keys=["a", "b"], values=values, lengths=torch.full((40_000,), 50))
    return lambda: InverseKeyedJaggedTensor.from_keyed_jagged(batch, groups=[["a", "b"]])


def tensor_train_step() -> Step:
    """A lookup of 2,048 bags of 20 ids of a million rows, D = R = 32, its backward pass and SGD."""
    import torch

    from flexshard.embeddings import TTEmbeddingBag

    generator = torch.Generator().manual_seed(0)
    how: dict[str, Any] = {"mode": "sum", "optimizer": "sgd", "learning_rate": 1e-6}
    try:
        table = TTEmbeddingBag(1_000_000, 32, tt_ranks=32, **how)
    except TypeError:  # an earlier name
        table = TTEmbeddingBag(1_000_000, 32, ranks=32, **how)
    ids = (torch.rand(2048, 20, generator=generator) ** 4 * 1_000_000).long()
    upstream = torch.ones(2048, 32)
    return lambda: table(ids).backward(upstream)


CASES = {case.__name__: case for case in (solver, profiling, replay, row_wise_step, conversion, tensor_train_step)}


def work(case: str) -> None:
    """Answer every line with the CPU seconds of one round."""
    warnings.simplefilter("ignore")
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    step = CASES[case]()
    step()
    for _ in sys.stdin:
        start = time.process_time()
        step()
        os.write(answers, f"{time.process_time() - start}\n".encode())
    os._exit(0)


def peer(folder: str) -> None:
    """The second rank: takes part in steps until the first one is gone."""
    warnings.simplefilter("ignore")
    step = _rank(1, folder)
    try:
        while True:
            step()
    except Exception:
        os._exit(0)


def start(tree: Path, case: str) -> subprocess.Popen[str]:
    paths = os.pathsep.join([str(tree / "src"), str(HERE if tree == HERE else tree), str(HERE)])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    script = [sys.executable, str(Path(__file__).resolve()), "--work", case]
    return subprocess.Popen(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=tree)


def seconds(worker: subprocess.Popen[str]) -> float:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write("go\n")
    worker.stdin.flush()
    return float(worker.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("other", nargs="?", type=Path, help="the tree to compare with")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        return work(args.work)
    if args.peer:
        return peer(args.peer)
    if args.other is None:
        parser.error("say which tree to compare with")
    from benchmarks.timing import machine

    print(f"least CPU time of {args.rounds} interleaved rounds; {machine()}")
    print(f"{'':18} {'before':>9} {'after':>9} {'after/before':>13} {'medians':>8}")
    for case in args.only:
        both = [start(tree.resolve(), case) for tree in (args.other, HERE)]
        times = [[seconds(worker) for worker in both] for _ in range(args.rounds)]
        for worker in both:
            worker.kill()
        before, after = zip(*times, strict=True)
        middle = sorted(after)[len(after) // 2] / sorted(before)[len(before) // 2]
        ratio = min(after) / min(before)
        print(f"{case:18} {min(before):8.4f}s {min(after):8.4f}s {ratio:13.3f} {middle:8.3f}", flush=True)
    return None


if __name__ == "__main__":
    main()
