"""Steps of a trainer whose rows are on embedding servers of another machine: fetched as they are needed, or ahead.

    sudo .venv/bin/python -m benchmarks.cluster.served          # needs iproute2; five minutes

Two network namespaces with a link of a given rate between them, each a node of one Ray cluster: one trainer (DLRM with
the layers of BagPipe's Table 2 and Criteo's 26 tables, at most so many rows each, one id per table and sample), two
servers on the other node with the tables that have as many. A trainer alone, so that nothing else wants the link.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from benchmarks.cluster.network import Network, NetworkError, network
from benchmarks.timing import machine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, nargs="*", default=[100.0, 400.0], help="of the link")
    parser.add_argument("--exponents", type=float, nargs="*", default=[0.5, 1.05], help="of the power law of ids")
    parser.add_argument("--batch-size", type=int, default=512, help="samples")
    parser.add_argument("--most-rows", type=int, default=200_000, help="of a table")
    parser.add_argument("--tt-rank", type=int, help="of the largest table as a tensor train, in the trainer")
    parser.add_argument("--cores", type=float, default=0.0, help="of this machine for each node; 0: they share all")
    parser.add_argument("--rounds", type=int, default=6, help="blocks of five steps of every way that count")
    args = parser.parse_args()
    print(f"{machine()}; a trainer and two servers, {args.batch_size} samples, tables of up to {args.most_rows:,} rows")
    for mbit in args.mbit:
        for exponent in args.exponents:
            shape = Network(2, 1, mbit, mbit, 10_000.0, full_duplex=True, cores=args.cores or None)
            try:
                with tempfile.TemporaryDirectory() as folder, network(shape) as cluster:
                    result = Path(folder) / "steps.json"
                    how = ["--exponent", exponent, "--batch-size", args.batch_size, "--most-rows", args.most_rows]
                    how += ["--rounds", args.rounds, "--result", result]
                    how += [] if args.tt_rank is None else ["--tt-rank", args.tt_rank]
                    words = [shape.address(0), shape.address(1), *map(str, how)]
                    cluster.run("benchmarks.cluster.served_rank", words, timeout_s=600)
                    results = json.loads(result.read_text())
            except NetworkError as error:
                print(f"error: {error}", file=sys.stderr)
                return 2
            peer = results["fetched as needed"]["step_seconds"]
            ideal = results["all rows in the trainer"]["step_seconds"]
            there = results["fetched as needed"]["there"]
            print(f"{mbit:g} Mbit/s, Zipf {exponent:g}; {there / 2**20:,.0f} MiB on servers:")
            for way, found in results.items():
                seconds, rounds = found["step_seconds"], found["rounds"]
                rows = ""
                if "rows" in found:
                    rows = f"; {found['fetched']:,.0f} of {found['rows']:,.0f} rows fetched"
                    rows += f", {found['here'] / 2**20:,.0f} MiB in the trainer"
                print(
                    f"  {way}: {seconds * 1e3:.0f} ms a step ({min(rounds) * 1e3:.0f} to {max(rounds) * 1e3:.0f}),"
                    f" {peer / seconds:.2f} times as fast as fetching, {seconds / ideal:.2f} of all rows here{rows}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
