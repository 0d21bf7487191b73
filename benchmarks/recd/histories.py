"""Histories that grow from click to click: what partial deduplication spares, against peers at their best.

The model and the data are those of ``examples/growing_histories.py``. Peers of target attention: torch's
``nn.MultiheadAttention`` over padded histories, keys and values projected before padding, and FlexShard's attention on
plain batches; the fastest of them is what "plain" means in ratios. The plain causal transformer computes without
padding but for the attention itself. Everything runs in this process and in turn, but for bytes sent, which four
processes count.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torchrec import JaggedTensor

from benchmarks.recd.data import ROOT, SHARED
from flexshard import units
from flexshard._internal import as_text, new_grid
from growing_histories import GROUPS, HEADS, Clicks, Run, batches_of, write_histories
from recd_mind import distributed

__all__ = ["main"]

BATCH, STEPS, DIMS = 2048, 14, (64, 128, 256, 512)


class Padded(nn.Module):
    """Target attention of ``nn.MultiheadAttention`` over padded histories."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, HEADS, batch_first=True)

    def forward(self, target: Tensor, history: JaggedTensor) -> Tensor:
        """A vector per sample."""
        lengths = history.lengths()
        rows = history.to_padded_dense(max(1, int(lengths.max())))
        outside = torch.arange(rows.shape[1]) >= lengths[:, None].clamp(min=1)  # an empty history sees a zero
        found = self.attention(target[:, None], rows, rows, key_padding_mask=outside, need_weights=False)[0][:, 0]
        return torch.where(lengths[:, None] > 0, found, self.attention.out_proj.bias)


class ProjectedFirst(Padded):
    """The same, keys and values projected before they are padded."""

    def forward(self, target: Tensor, history: JaggedTensor) -> Tensor:
        """A vector per sample."""
        own, dim, lengths = self.attention, target.shape[1], history.lengths()
        weights, biases = own.in_proj_weight.split([dim, 2 * dim]), own.in_proj_bias.split([dim, 2 * dim])
        query = functional.linear(target, weights[0], biases[0]).view(-1, HEADS, 1, dim // HEADS)
        both = JaggedTensor(functional.linear(history.values(), weights[1], biases[1]), lengths=lengths)
        rows = both.to_padded_dense(max(1, int(lengths.max())))
        keys, values = rows.view(*rows.shape[:2], 2, HEADS, dim // HEADS).permute(2, 0, 3, 1, 4)
        inside = (torch.arange(rows.shape[1]) < lengths[:, None].clamp(min=1))[:, None, None]
        found = functional.scaled_dot_product_attention(query, keys, values, attn_mask=inside)
        return own.out_proj(found.reshape(-1, dim) * (lengths[:, None] > 0))


def main(folder: Path) -> None:
    clicks = SHARED / "globo_clicks.parquet"
    source = str(clicks) if clicks.exists() else None
    torch.set_num_threads(1)
    for name, value in (("RANK", 0), ("WORLD_SIZE", 1), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", 29516)):
        os.environ.setdefault(name, str(value))
    dist.init_process_group("gloo")
    for by in ("user", "session"):
        path, items = write_histories(source, folder, by=by, rows=200_000, seed=0)
        print_speeds(path, items, by)
    path, items = write_histories(source, folder, by="user", rows=200_000, seed=0)
    print_widths(path, items)
    dist.destroy_process_group()
    for by in ("user", "session"):
        print_sent(source, folder, by)


def made(path: Path, items: int, dim: int, attention: str, way: str, peer: Callable[[int], nn.Module] | None) -> Run:
    """A way to train, from the same weights as the others."""
    torch.manual_seed(0)
    model = Clicks(items, dim, attention)
    if peer is not None:
        other = peer(dim)
        own: Any = model.target
        getattr(other, "attention", other).load_state_dict(own.state_dict())
        model.target = other
    parallel, optimizer = distributed(model)
    return Run(parallel, optimizer, iter(batches_of(path, BATCH, **GROUPS[way])))


def print_speeds(path: Path, items: int, by: str) -> None:
    ways: dict[str, tuple[str, str, Callable[[int], nn.Module] | None]] = {
        "target, nn.MultiheadAttention": ("target", "plain", Padded),
        "target, projected before padding": ("target", "plain", ProjectedFirst),
        "target, FlexShard's on plain": ("target", "plain", None),
        "target, exact": ("target", "exact", None),
        "target, partial": ("target", "partial", None),
        "causal, plain": ("causal", "plain", None),
        "causal, exact": ("causal", "exact", None),
        "causal, partial": ("causal", "partial", None),
    }
    runs = {name: made(path, items, DIMS[0], *how) for name, how in ways.items()}
    for _ in range(STEPS):
        for run in runs.values():
            run.step()
    columns = [
        "step ms",
        "read ms",
        "ids looked up",
        "bytes of a batch",
        "activations",
        "times as fast",
        "loss differs by",
    ]
    grid = new_grid(
        f"Histories by {by}, {BATCH:,} samples a batch, D = {DIMS[0]}; medians of {STEPS - 2}", ["way"], columns
    )
    median = {name: statistics.median(run.seconds[2:]) for name, run in runs.items()}
    for name, run in runs.items():
        kind = name.partition(",")[0]
        best = min(
            (other for other, how in ways.items() if how[1] == "plain" and how[0] == kind), key=median.__getitem__
        )
        ids, _, nbytes, _ = (run.counts / STEPS).tolist()
        faster = statistics.median(a / b for a, b in zip(runs[best].seconds[2:], run.seconds[2:], strict=True))
        differs = max(abs(a / b - 1) for a, b in zip(run.losses, runs[best].losses, strict=True))
        grid.add_row(
            name,
            f"{1e3 * median[name]:.0f}",
            f"{1e3 * statistics.median(run.read_seconds[2:]):.1f}",
            f"{ids:,.0f}",
            units.format_bytes(nbytes),
            units.format_bytes(kept_bytes(run)),
            f"{faster:.2f}x",
            f"{differs:.0e}",
        )
    print(as_text(grid, 140), flush=True)


def kept_bytes(run: Run) -> int:
    """What a forward pass keeps for its backward pass, each storage once, without parameters."""
    seen: dict[int, int] = {}
    parameters = {parameter.untyped_storage().data_ptr() for parameter in run.model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    batch = next(run.batches)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss, _ = run.model(batch)
    loss.backward()
    run.optimizer.zero_grad()
    return sum(size for place, size in seen.items() if place not in parameters)


def print_widths(path: Path, items: int) -> None:
    """Wider embeddings in what partial deduplication frees (the paper's Table 2)."""
    for attention in ("target", "causal"):
        columns = ["activations", "step ms", "loss, mean of the last 5"]
        grid = new_grid(f"Wider embeddings, {attention} attention, by user", ["way", "D"], columns)
        for way, dims in (("plain", DIMS[:1]), ("partial", DIMS)):
            for dim in dims:
                run = made(path, items, dim, attention, way, None)
                for _ in range(STEPS // 2):
                    run.step()
                loss = statistics.fmean(run.losses[-5:])
                step = 1e3 * statistics.median(run.seconds[2:])
                grid.add_row(way, str(dim), units.format_bytes(kept_bytes(run)), f"{step:.0f}", f"{loss:.4f}")
        print(as_text(grid, 100), flush=True)


def print_sent(source: str | None, folder: Path, by: str) -> None:
    """Bytes that four processes send, from the example itself."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    command += [str(ROOT / "examples" / "growing_histories.py"), "--folder", str(folder / "sent"), "--by", by]
    command += ["--steps", "6", "--batch-size", str(BATCH), *(["--clicks", source] if source else [])]
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface}
    done = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True)
    print(done.stdout, flush=True)
