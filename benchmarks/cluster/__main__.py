"""Row-wise, the paper's plans and ours on a cluster of network namespaces: step time, and communication predicted and
observed.

    sudo .venv/bin/python -m benchmarks.cluster          # needs iproute2; about ten minutes

Four nodes of two ranks; each node's link and loopback are limited so that bandwidths have the ratios of the paper's
cluster and communication dominates. The cluster is measured first, as 'flexshard measure' does it, with messages as
large as those that follow (bursts pass a limited link faster), and everything is planned for what was measured.
"communication" is every collective by itself, one after the other; "step" a step as it is, predicted by its phases with
links at once, lookups and updates at rates measured with all ranks running, and what else it does fitted to one plan;
"fullest" is the fullest buffer over the mean one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.cluster.network import Network, NetworkError, network
from benchmarks.cluster.workloads import GLOBO, WORKLOADS
from benchmarks.timing import machine
from flexshard import Cluster, units
from flexshard._internal import as_text, new_grid

RANK = "benchmarks.cluster.rank"
TIE = 0.05  # equal plans differ by as much in one run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inter-mbit", type=float, default=200.0, help="of each node's link")
    parser.add_argument("--path-mbit", type=float, default=120.0, help="of what a node sends to one other")
    parser.add_argument("--intra-mbit", type=float, default=340.0, help="of each node's loopback")
    parser.add_argument("--rounds", type=int, default=5, help="steps of every plan that count")
    parser.add_argument("--workloads", nargs="*", choices=list(WORKLOADS), default=list(WORKLOADS))
    args = parser.parse_args()
    shape = Network(4, 2, args.inter_mbit, args.path_mbit, args.intra_mbit)
    limits = f"links of {args.inter_mbit:g} ({args.path_mbit:g} to one other node), loopbacks of {args.intra_mbit:g}"
    print(f"{machine()}; 4 nodes x 2 ranks, {limits} Mbit/s")
    try:
        with tempfile.TemporaryDirectory() as folder, network(shape) as cluster:
            file, measured = Path(folder) / "cluster.yaml", None
            for name in args.workloads:
                if name == "globo" and not GLOBO.exists():
                    print("globo_clicks.parquet is not here; left out")
                    continue
                sizes = WORKLOADS[name]().message_bytes
                if sizes != measured:
                    cluster.run(RANK, ["measure", str(file), "--sizes", *map(str, sizes)], timeout_s=900)
                    print(f"measured with messages of {', '.join(units.format_bytes(size) for size in sizes)}")
                    print_cluster(Cluster.load(file))
                    measured = sizes
                result = Path(folder) / f"{name}.json"
                how = ["--workload", name, "--result", str(result), "--rounds", str(args.rounds)]
                cluster.run(RANK, ["train", str(file), *how], timeout_s=1200)
                print_workload(name, json.loads(result.read_text()))
    except NetworkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def print_cluster(cluster: Cluster) -> None:
    for level in cluster.levels:
        for kind in ("all_to_all", "torchrec_all_to_all", "all_reduce", "own_all_gather", "own_reduce_scatter"):
            rate = getattr(level, kind)
            if rate is not None:
                alpha, beta = units.format_seconds(rate.alpha_seconds), units.format_bandwidth(rate.bytes_per_s)
                print(f"  {kind.removeprefix('own_')}@{level.group_size}: {alpha} + bytes / {beta}")


def fullest(found: dict[str, Any]) -> float:
    """Fullest buffer over the mean one, of the rows' and gradients' all-to-all over all ranks: 1 is even."""
    rows = [
        c
        for c in found["observed"]
        if c["kind"] == "all_to_all" and c["content"] in ("embeddings", "gradients", "other embeddings")
    ]
    outer = [c for c in rows if c["group_size"] == max(c["group_size"] for c in rows)]
    return float(sum(c["fullest_bytes"] for c in outer) / sum(c["bytes"] for c in outer)) if rows else 1.0


def print_order(title: str, results: dict[str, Any], expected: str, seen: str) -> None:
    """Whether steps are ordered as their communication is predicted; predictions closer than ``TIE`` order nothing."""
    for what, key in (("predicted", expected), ("step", seen)):
        plans = sorted(results, key=lambda plan: results[plan][key])
        print(f"{title}, {what}: {' < '.join(f'{plan} {results[plan][key]:.2f}' for plan in plans)}")
    pairs = [(a, b) for a in results for b in results if results[a][expected] * (1 + TIE) < results[b][expected]]
    wrong = [(a, b) for a, b in pairs if results[a][seen] > results[b][seen]]
    print(
        f"{title}: {len(pairs)} pairs predicted to differ by over {TIE:.0%}, {len(pairs) - len(wrong)} in that order"
        + "".join(f"; not {a} < {b}" for a, b in wrong)
    )


def print_workload(name: str, results: dict[str, Any]) -> None:
    base = results["row-wise (TorchRec)"]
    numbers = ["communication", "predicted", "error", "fullest", "faster", "predicted", "step", "predicted", "error"]
    grid = new_grid(f"{name}: seconds per step, medians", ["plan", "rows by group"], numbers)
    for plan, found in results.items():
        seen, expected = found["observed_comm_seconds"], found["predicted_comm_seconds"]
        grid.add_row(
            plan,
            " ".join(f"{size}:{rows:,}" for size, rows in found["rows"].items()),
            f"{seen:.2f}",
            f"{expected:.2f}",
            f"{seen / expected - 1:+.0%}",
            f"{fullest(found):.2f}",
            f"{base['observed_comm_seconds'] / seen:.2f}x",
            f"{base['predicted_comm_seconds'] / expected:.2f}x",
            f"{found['step_seconds']:.2f}",
            f"{found['predicted_step_seconds']:.2f}",
            "fitted" if found["fitted"] else f"{found['step_seconds'] / found['predicted_step_seconds'] - 1:+.0%}",
        )
    print(as_text(grid, 170))
    print_order("one collective at a time", results, "predicted_comm_seconds", "blocking_step_seconds")
    print_order("levels at once", results, "predicted_step_seconds", "step_seconds")
    errors = [
        abs(found["step_seconds"] / found["predicted_step_seconds"] - 1)
        for found in results.values()
        if not found["fitted"]
    ]
    print(f"steps: median error {statistics.median(errors):.1%}, largest {max(errors):.1%}, of {len(errors)} predicted")
    seen = {name: found["observed_comm_seconds"] for name, found in results.items()}
    once = "optimal, ids once"
    against = ("row-wise (TorchRec)", "optimal", "row-wise, ids once")
    print(
        f"{once}: distinct ids {results[once]['distinct']:.2f} of all; less communication than "
        + ", ".join(
            f"{name} {seen[name] / seen[once]:.2f} times (predicted"
            f" {results[name]['predicted_comm_seconds'] / results[once]['predicted_comm_seconds']:.2f})"
            for name in against
        )
    )
    headings = ["bytes", "predicted s", "s, alone", "s, as it runs", "of it waiting"]
    lines = new_grid(f"{name}: per collective", ["plan", "collective"], headings)
    for plan, found in results.items():
        for c, free in zip(found["observed"], found["free"], strict=True):
            want = [p for p in found["predicted"] if (p["kind"], p["group_size"]) == (c["kind"], c["group_size"])]
            timed = want and c["content"] not in ("ids", "other ids", "counts", "touched")
            expected_seconds = f"{want[0]['seconds'] / want[0]['calls'] * c['calls']:.3f}" if timed else "-"
            label = f"{c['kind']}@{c['group_size']} {c['content']}"
            times = (f"{value:.3f}" for value in (c["seconds"], free["seconds"], free["exposed_seconds"]))
            lines.add_row(plan, label, units.format_bytes(c["bytes"]), expected_seconds, *times)
    print(as_text(lines, 150), flush=True)


if __name__ == "__main__":
    sys.exit(main())
