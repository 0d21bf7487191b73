"""Held-out AUC of a click model with dense tables and with tensor trains, over seeds (EL-Rec, Table IV).

    python -m benchmarks.tensor_train_accuracy globo_clicks.parquet

The model, the data and the optimizers are those of ``examples/elrec_compress.py``; tensor trains start anew, as in the
paper. The rate and the passes (3 of Adam at 0.04) were the best of four tried for dense tables, and of three for tensor
trains, on another tenth of the clicks held out. Negatives are articles that others read at the time, so popularity
alone has an AUC of 0.5.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from statistics import mean, stdev

import torch

from benchmarks.timing import machine
from flexshard import units
from flexshard._internal import as_text, new_grid

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from elrec_compress import ClickModel, auc, read_clicks, size_of, train
from flexshard.embeddings import compress

STD = 0.05  # what dense tables start with
READERS = {"readers": {"ranks": 32, "std": STD}}
MODELS: dict[str, dict[str, dict[str, object]]] = {
    "dense": {},
    "readers R=32": READERS,
    "readers R=32, articles R=128 (2 cores)": READERS | {"articles": {"ranks": 128, "cores": 2, "std": STD}},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    parser.add_argument("--sessions", type=int, default=400_000)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(machine())
    clicks = read_clicks(args.log, args.sessions)
    training, held_out = clicks.split(0.1, seed=0)
    print(f"{len(training):,} clicks to train on, {len(held_out):,} held out; rows {clicks.rows}", flush=True)
    found: dict[str, list[float]] = {name: [] for name in MODELS}
    sizes, seconds = {}, {}
    for seed in range(args.seeds):
        for name, tables in MODELS.items():
            torch.manual_seed(seed)
            model: torch.nn.Module = ClickModel(clicks.rows, args.dim)
            if tables:
                model, _ = compress(model, tables, decompose=False)
            seconds[name] = train(model, clicks, training, size=2048, seed=seed, rate=0.04, epochs=3)
            sizes[name] = size_of(model)
            found[name].append(auc(model, clicks, held_out))
            print(f"seed {seed}, {name}: {found[name][-1]:.4f}", flush=True)
    numbers = ["tables", "smaller", "held-out AUC", "to dense, points", "to train"]
    grid = new_grid(f"{args.log.name}, D = {args.dim}, {args.seeds} seeds (mean and deviation)", ["tables"], numbers)
    for name, own in found.items():
        apart = [100 * (a - b) for a, b in zip(own, found["dense"], strict=True)]
        cells = (units.format_bytes(sizes[name]), f"{sizes['dense'] / sizes[name]:.1f}x")
        difference = "" if name == "dense" else f"{mean(apart):+.2f} ± {spread(apart):.2f}"
        grid.add_row(name, *cells, f"{mean(own):.4f} ± {spread(own):.4f}", difference, f"{seconds[name]:.0f} s")
    print(as_text(grid, 130))


def spread(values: list[float]) -> float:
    """Standard deviation; nothing of one."""
    return stdev(values) if len(values) > 1 else 0.0


if __name__ == "__main__":
    main()
