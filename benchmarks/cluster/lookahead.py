"""Steps whose exchanges reach into their neighbours, on a cluster of network namespaces: BagPipe's
Figures 9 to 11.

    sudo .venv/bin/python -m benchmarks.cluster.lookahead           # needs iproute2; half an hour
    sudo .venv/bin/python -m benchmarks.cluster.lookahead --sweeps # by ranks, batch, skew (Figures 16, 18, 19), an hour

The cluster is that of ``benchmarks.cluster``, at two rates of its links. DLRM and Deep&Cross with the layers of
BagPipe's Table 2 and Criteo's 26 tables (at most so many rows each), one id per table and sample; gradients of the
layers travel in 16 bits, or they would be most of the step. Every rank has a share of this machine's cores for itself,
so that one that waits does not make another one faster. TorchRec runs with its ``TrainPipelineSparseDist``: an
``EmbeddingCollection`` row-wise, and an ``EmbeddingBagCollection`` as its planner decides; ours under one plan, with
and without batches known ahead, delayed synchronisation and caches. "no exchange" has all rows on every rank, which
never hear of each other's updates: nothing that trains rightly is faster.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cluster.__main__ import print_cluster
from benchmarks.cluster.network import Network, NetworkError, network
from benchmarks.timing import machine
from flexshard import Cluster
from flexshard._internal import as_text, new_grid
from flexshard.topologies import Level

SIZES = (1 << 18, 1 << 20)
MODELS = ("dlrm", "deep-and-cross")
_SWEPT = ("TorchRec, row-wise", "plan, cache of 5 %", "no exchange")
_BY_RANKS = ("TorchRec, row-wise", "TorchRec's planner", "plan", "plan, cache of 5 %", "plan, cache, tensor train")


@dataclass(frozen=True)
class Case:
    """What is trained, in which ways, on how many ranks (two to a node); and how ids are drawn."""

    model: str = "dlrm"
    ranks: int = 8
    batch_size: int = 1024
    ids: str = "zipf:1.05"
    ways: tuple[str, ...] = _SWEPT

    def __str__(self) -> str:
        return f"{self.model}, {self.ranks} ranks x {self.batch_size} samples, {self.ids}"


# BagPipe's Figures 16, 18 and 19; by ranks EL-Rec's Figures 12 and 13, too.
SWEEPS = {
    "ranks": [Case(ranks=ranks, ways=_BY_RANKS) for ranks in (1, 2, 4, 8)],
    "batch": [Case(batch_size=samples) for samples in (256, 512, 1024, 2048)],
    "hot": [Case(ids=f"hot:{share:g}") for share in (0.9, 0.4, 0.1, 0.01)],
    "zipf": [Case(ids=f"zipf:{exponent:g}") for exponent in (1.0, 2.0, 3.0, 5.0)],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, nargs="*", default=[100.0, 250.0], help="of each node's link")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batch-size", type=int, default=1024, help="samples per rank")
    parser.add_argument("--most-rows", type=int, default=200_000, help="of a table")
    parser.add_argument(
        "--ids", nargs="*", default=["zipf:1.05"], help="zipf:EXPONENT or hot:SHARE of a table's hundredth"
    )
    parser.add_argument("--cores", type=float, default=0.2, help="of this machine for each rank; 0: they share all")
    parser.add_argument("--rounds", type=int, default=2, help="blocks of six steps of every way that count")
    parser.add_argument("--ways", nargs="*", default=[], help="of the table's, by name; all by default")
    parser.add_argument("--sweeps", nargs="*", choices=list(SWEEPS), help="instead: by ranks, batch, and skew of ids")
    args = parser.parse_args()
    own = f"{args.cores:g} of a core each" if args.cores else "which share its cores"
    print(f"{machine()}; nodes of 2 ranks, {own}; tables of up to {args.most_rows:,} rows")
    single = [Case(model, 8, args.batch_size, ids, tuple(args.ways)) for model in args.models for ids in args.ids]
    groups = [single] if args.sweeps is None else [SWEEPS[name] for name in args.sweeps or SWEEPS]
    try:
        for mbit in args.mbit:
            clusters: dict[int, str] = {}
            how = {"mbit": mbit, "cores": args.cores or None, "most_rows": args.most_rows, "rounds": args.rounds}
            for cases in groups:
                found = {}
                for ranks in dict.fromkeys(case.ranks for case in cases):
                    of = [case for case in cases if case.ranks == ranks]
                    found |= measure(of, clusters, **how)
                if args.sweeps is not None:
                    print_sweep(f"{mbit:g} Mbit/s: steps, medians of blocks, and samples of all ranks a second", found)
    except NetworkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def measure(
    cases: Sequence[Case],
    clusters: dict[int, str],
    *,
    mbit: float,
    cores: float | None,
    most_rows: int,
    rounds: int,
) -> dict[Case, dict[str, Any]]:
    """What each case's ranks found, all of them as many.

    Args:
        clusters: files of those that were measured at these links, by how many ranks they have; added to.
    """
    found, ranks = {}, cases[0].ranks
    width = min(ranks, 2)
    shape = Network(ranks // width, width, mbit, mbit, 2 * mbit, full_duplex=True, cores=cores)
    with tempfile.TemporaryDirectory() as folder, network(shape) as cluster:
        file, result = Path(folder) / "cluster.yaml", Path(folder) / "steps.json"
        file.write_text(clusters[ranks] if ranks in clusters else _measured(cluster, file))
        clusters[ranks] = file.read_text()
        for case in cases:
            how = ["--model", case.model, "--batch-size", case.batch_size, "--most-rows", most_rows]
            how += ["--ids", case.ids, "--rounds", rounds, "--result", result, "--ways", *case.ways]
            cluster.run("benchmarks.cluster.lookahead_rank", [str(file), *map(str, how)], timeout_s=1500)
            found[case] = json.loads(result.read_text())
            print_steps(f"{case}, {mbit:g} Mbit/s", found[case])
    return found


def _measured(cluster: Network, file: Path) -> str:
    """Its file, with the rates of its links."""
    if cluster.world_size == 1:
        Cluster("one rank", 1, 1, 1e12, 0.0, (Level(1),)).save(file)
        return file.read_text()
    cluster.run("benchmarks.cluster.rank", ["measure", str(file), "--sizes", *map(str, SIZES)], timeout_s=900)
    print(f"{cluster.nodes} nodes, links of {cluster.inter_mbit:g} Mbit/s")
    print_cluster(Cluster.load(file))
    return file.read_text()


def print_sweep(title: str, found: Mapping[Case, Mapping[str, Any]]) -> None:
    """Steps and throughput of every case."""
    ways = list(next(iter(found.values()))["ways"])
    grid = new_grid(title, ["case"], ways)
    for case, results in found.items():
        seconds = [results["ways"][way]["step_seconds"] for way in ways]
        samples = case.ranks * case.batch_size
        grid.add_row(str(case), *(f"{one * 1e3:,.0f} ms, {samples / one:,.0f}/s" for one in seconds))
    print(as_text(grid, 170))
    sys.stdout.flush()


def print_steps(title: str, results: dict[str, Any]) -> None:
    ways = results["ways"]
    peer, ideal = (ways.get(way, {}).get("step_seconds") for way in ("TorchRec, row-wise", "no exchange"))
    headings = ["step", "least", "most", "row-wise /", "/ no exchange"]
    grid = new_grid(f"{title}: seconds per step, medians of blocks", ["way"], headings)
    for way, found in ways.items():
        seconds = found["step_seconds"]
        grid.add_row(
            way,
            f"{seconds:.3f}",
            f"{min(found['rounds']):.3f}",
            f"{max(found['rounds']):.3f}",
            f"{peer / seconds:.2f}x" if peer else "",
            f"{seconds / ideal:.2f}x" if ideal else "",
        )
    print(as_text(grid, 120))
    rows = ", ".join(f"{size}: {number:,}" for size, number in results["tiers"].items())
    print(f"  plan: rows by group size {rows}; {results['cached']} tables with caches")
    for way, found in ways.items():
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
