"""Whole models on a cluster of network namespaces: steps predicted and observed under four plans: TorchRec's, ours,
table-wise and row-wise.

    sudo .venv/bin/python -m benchmarks.cluster.whole_models          # needs iproute2; a quarter of an hour

The cluster is that of ``benchmarks.cluster``. Pooled tables run in TorchRec's modules whatever the plan; of sequences,
TorchRec's plan runs in TorchRec's, ours in ours. Nothing is fitted to the steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.cluster.__main__ import TIE, print_cluster
from benchmarks.cluster.models import MODELS
from benchmarks.cluster.network import Network, NetworkError, network
from benchmarks.timing import machine
from flexshard import Cluster, units
from flexshard._internal import as_text, new_grid

MEMORY = 160e6  # of a rank: row-wise needs about a third
SIZES = (1 << 19, 1 << 20, 1 << 21, 1 << 22, 1 << 24)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=200.0, help="of each node's link, in each direction")
    parser.add_argument("--path-mbit", type=float, default=120.0, help="of what a node sends to one other")
    parser.add_argument("--intra-mbit", type=float, default=340.0, help="of each node's loopback")
    parser.add_argument("--rounds", type=int, default=5, help="steps of every plan that count")
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--result", type=Path, help="write all figures here, too")
    args = parser.parse_args()
    shape = Network(4, 2, args.mbit, args.path_mbit, args.intra_mbit, full_duplex=True)
    print(f"{machine()}; 4 nodes x 2 ranks, links of {args.mbit:g} Mbit/s, loopbacks of {args.intra_mbit:g}")
    everything: dict[str, Any] = {}
    try:
        with tempfile.TemporaryDirectory() as folder, network(shape) as cluster:
            file = Path(folder) / "cluster.yaml"
            cluster.run("benchmarks.cluster.rank", ["measure", str(file), "--sizes", *map(str, SIZES)], timeout_s=900)
            print_cluster(Cluster.load(file))
            for name in args.models:
                result = Path(folder) / f"{name}.json"
                how = ["--model", name, "--result", str(result), "--rounds", str(args.rounds), "--memory", str(MEMORY)]
                cluster.run("benchmarks.cluster.whole_rank", [str(file), *how], timeout_s=1200)
                everything[name] = json.loads(result.read_text())
                print_model(name, everything[name])
    except NetworkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        if args.result and everything:
            args.result.write_text(json.dumps(everything))
    print_summary(everything)
    return 0


def print_model(name: str, results: dict[str, Any]) -> None:
    grid = new_grid(
        f"{name}: seconds per step, medians",
        ["plan", "tables"],
        ["memory", "step", "predicted", "error"],
    )
    for plan, found in results.items():
        error = found["predicted_step_seconds"] / found["step_seconds"] - 1
        grid.add_row(
            plan,
            found["words"],
            units.format_bytes(found["memory_bytes"]),
            f"{found['step_seconds']:.3f}",
            f"{found['predicted_step_seconds']:.3f}",
            f"{error:+.0%}",
        )
    print(as_text(grid, 170))
    lines = new_grid(f"{name}: collectives one by one", ["plan", "collective"], ["bytes", "fullest", "predicted", "s"])
    for plan, found in results.items():
        for c in found["observed"]:
            label = f"{c['kind']}@{c['group_size']} {c['content']}"
            numbers = (
                units.format_bytes(c["bytes"]),
                units.format_bytes(c["fullest_bytes"]),
                "",
                f"{c['seconds']:.3f}",
            )
            lines.add_row(plan, label, *numbers)
        for c in found["predicted"]:
            label = f"{c['kind']}@{c['group_size']} {c['content']}"
            nbytes = (c["nbytes"] * c["calls"], (c["nbytes"] + c["excess_bytes"]) * c["calls"])
            lines.add_row(plan, label, *map(units.format_bytes, nbytes), f"{c['seconds']:.3f}", "")
    print(as_text(lines, 150))
    for plan, found in results.items():
        print(f"  {plan}: " + ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in found["phases"].items()))
    sys.stdout.flush()


def print_summary(everything: dict[str, Any]) -> None:
    """Errors of what was predicted, and whether plans are in the order that they were predicted in."""
    errors, pairs, wrong = [], 0, []
    for model, results in everything.items():
        errors += [abs(found["predicted_step_seconds"] / found["step_seconds"] - 1) for found in results.values()]
        for a, one in results.items():
            for b, other in results.items():
                if one["predicted_step_seconds"] * (1 + TIE) < other["predicted_step_seconds"]:
                    pairs += 1
                    if one["step_seconds"] > other["step_seconds"]:
                        wrong.append(f"{model}: not {a} < {b}")
    print(
        f"steps: median error {statistics.median(errors):.1%}, largest {max(errors):.1%}, of {len(errors)} predicted;"
        f" {pairs} pairs predicted to differ by over {TIE:.0%}, {pairs - len(wrong)} in that order"
        + "".join(f"; {one}" for one in wrong)
    )


if __name__ == "__main__":
    sys.exit(main())
