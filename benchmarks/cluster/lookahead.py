"""Steps whose exchanges reach into their neighbours, on a cluster of network namespaces: BagPipe's
Figures 9 to 11.

    sudo .venv/bin/python -m benchmarks.cluster.lookahead          # needs iproute2; a quarter of an hour

The cluster is that of ``benchmarks.cluster``, at two rates of its links. DLRM and Deep&Cross with the layers of
BagPipe's Table 2 and Criteo's 26 tables (at most so many rows each), one id per table and sample; gradients of the
layers travel in 16 bits, or they would be most of the step. TorchRec runs with its ``TrainPipelineSparseDist``: an
``EmbeddingCollection`` row-wise, and an ``EmbeddingBagCollection`` as its planner decides; ours under one plan, with
and without batches known ahead, delayed synchronisation and caches. "no exchange" has all rows on every rank, which
never hear of each other's updates: nothing that trains rightly is faster.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.cluster.__main__ import print_cluster
from benchmarks.cluster.network import Network, NetworkError, network
from benchmarks.timing import machine
from flexshard import Cluster
from flexshard._internal import as_text, new_grid

SIZES = (1 << 18, 1 << 20, 1 << 22)
MODELS = ("dlrm", "deep-and-cross")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, nargs="*", default=[100.0, 200.0], help="of each node's link")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batch-size", type=int, default=1024, help="samples per rank")
    parser.add_argument("--most-rows", type=int, default=200_000, help="of a table")
    parser.add_argument("--exponents", type=float, nargs="*", default=[1.05], help="of the power law that ids follow")
    parser.add_argument("--rounds", type=int, default=4, help="blocks of three steps of every way that count")
    args = parser.parse_args()
    print(
        f"{machine()}; 4 nodes x 2 ranks, {args.batch_size} samples per rank, tables of up to {args.most_rows:,} rows"
    )
    for mbit in args.mbit:
        shape = Network(4, 2, mbit, mbit, 2 * mbit, full_duplex=True)
        try:
            with tempfile.TemporaryDirectory() as folder, network(shape) as cluster:
                file, result = Path(folder) / "cluster.yaml", Path(folder) / "steps.json"
                sizes = ["--sizes", *map(str, SIZES)]
                cluster.run("benchmarks.cluster.rank", ["measure", str(file), *sizes], timeout_s=900)
                print(f"links of {mbit:g} Mbit/s")
                print_cluster(Cluster.load(file))
                for model in args.models:
                    for exponent in args.exponents:
                        how = ["--model", model, "--batch-size", args.batch_size, "--most-rows", args.most_rows]
                        how += ["--exponent", exponent, "--rounds", args.rounds, "--result", result]
                        module = "benchmarks.cluster.lookahead_rank"
                        cluster.run(module, [str(file), *map(str, how)], timeout_s=1500)
                        print_steps(f"{model}, Zipf {exponent:g}, {mbit:g} Mbit/s", json.loads(result.read_text()))
        except NetworkError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    return 0


def print_steps(title: str, results: dict[str, Any]) -> None:
    peer, ideal = results["TorchRec, row-wise"]["step_seconds"], results["no exchange"]["step_seconds"]
    headings = ["step", "least", "most", "row-wise /", "/ no exchange"]
    grid = new_grid(f"{title}: seconds per step, medians of blocks", ["way"], headings)
    for way, found in results.items():
        seconds = found["step_seconds"]
        grid.add_row(
            way,
            f"{seconds:.3f}",
            f"{min(found['rounds']):.3f}",
            f"{max(found['rounds']):.3f}",
            f"{peer / seconds:.2f}x",
            f"{seconds / ideal:.2f}x",
        )
    print(as_text(grid, 120))
    plan = results["plan"]
    rows = ", ".join(f"{size}: {number:,}" for size, number in plan["tiers"].items())
    print(f"  plan: rows by group size {rows}; {plan['cached']} tables with caches")
    for way, found in results.items():
        if "late" in found:
            share = found["late"] / found["rows"]
            print(
                f"  {way}: {found['rows']:,.0f} rows a step between all ranks (predicted {found['expected_rows']:,.0f},"
                f" {found['rows'] / found['expected_rows'] - 1:+.1%}), waited for {found['late']:,.0f} ({share:.1%};"
                f" predicted {found['expected_late']:,.0f}, {found['late'] / found['expected_late'] - 1:+.1%})"
            )
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
