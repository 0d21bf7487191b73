"""A TorchRec model fed by the ingestion service, stopped in the middle and gone on with: the same losses.

Workers in processes of their own read clicks, shuffle them by session, hash ids and derive a crossed feature; the
trainer takes batches ready to train. The state of the job is in the checkpoint, beside the model.

    python examples/ingest_train.py                                      # on generated clicks
    python examples/ingest_train.py --clicks globo_clicks.parquet        # on Globo.com's
    python examples/ingest_train.py --backend ray --workers 2            # workers as Ray actors
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from flexshard.ingestion import IngestionClient, IngestionSpec, SessionBatch
from one_line import run_example

DIM, ROWS = 16, 100_000
TABLES = {"user": "user_id", "item": "item_id", "region": "click_region", "item_in_region": "item_in_region"}


class Clicks(nn.Module):
    """Whether a click comes from a phone, from who clicks on what and where."""

    def __init__(self) -> None:
        super().__init__()
        self.lookup = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name=name, num_embeddings=ROWS, embedding_dim=DIM, feature_names=[feature])
                for name, feature in TABLES.items()
            ]
        )
        self.over = nn.Sequential(nn.Linear(DIM * len(TABLES) + 1, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, batch: SessionBatch) -> Tensor:
        """The loss of a batch."""
        found = self.lookup(batch.sparse_features).values()
        size = batch.dense["session_size"][:, None].float()
        logits = self.over(torch.cat([found, size], 1)).squeeze(1)
        label = (batch.dense["click_deviceGroup"] == 1).float()
        return nn.functional.binary_cross_entropy_with_logits(logits, label)


def job_of(path: Path, batch_size: int) -> IngestionSpec:
    """What is read, and what is made of it."""
    return IngestionSpec(
        paths=str(path),
        batch_size=batch_size,
        features=["user_id", "item_id", "click_region"],
        dense=["click_deviceGroup", "session_size"],
        session="session_id",
        time="timestamp",
        shuffle="sessions",
        seed=7,
        transforms=[
            {"op": "cross", "features": ["item_id", "click_region"], "into": "item_in_region", "num_rows": ROWS},
            {"op": "hash_ids", "features": ["user_id", "item_id", "click_region"], "num_rows": ROWS},
            {"op": "log", "columns": ["session_size"]},
        ],
    )


def train(
    client: IngestionClient, model: Clicks, optimizer: torch.optim.Optimizer, steps: int
) -> tuple[list[float], Any]:
    """Losses of up to so many steps, and the job's state after the last."""
    losses, state = [], client.state_dict()
    for batch in client:
        loss = model(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        state = client.state_dict(batch)  # of what was trained; what was read ahead is read again
        if len(losses) == steps:
            break
    return losses, state


def made(seed: int) -> tuple[Clicks, torch.optim.Optimizer]:
    """A model and its optimizer, the same for the same seed."""
    torch.manual_seed(seed)
    model = Clicks()
    return model, torch.optim.Adagrad(model.parameters(), lr=0.05)


def write_generated(path: Path, sessions: int = 20_000) -> None:
    """Clicks in sessions: users and items of power laws, regions that decide on the device."""
    generator = np.random.default_rng(0)
    size = 2 + generator.poisson(1.0, sessions)
    region, user = generator.integers(0, 28, sessions), generator.zipf(1.3, sessions) % 50_000
    rows = int(size.sum())
    phone = np.repeat(generator.random(sessions) < region / 28, size)
    table = {
        "session_id": np.repeat(np.arange(sessions), size),
        "timestamp": np.arange(rows),
        "user_id": np.repeat(user, size),
        "item_id": generator.zipf(1.2, rows) % 40_000,
        "click_region": np.repeat(region, size),
        "click_deviceGroup": np.where(phone, 1, 3),
        "session_size": np.repeat(size, size),
    }
    pq.write_table(pa.table(table), path, row_group_size=10_000, compression="zstd")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clicks", type=Path, help="clicks of Globo.com; generated ones by default")
    parser.add_argument("--steps", type=int, default=40, help="to train, and to stop halfway")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--backend", default="processes", choices=["processes", "threads", "ray"])
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        path = args.clicks or Path(folder) / "clicks.parquet"
        if args.clicks is None:
            write_generated(path)
        job = job_of(path, args.batch_size)
        job.save(Path(folder) / "job.yaml")
        how: dict[str, Any] = {"workers": args.workers, "backend": args.backend}

        with IngestionClient(IngestionSpec.load(Path(folder) / "job.yaml"), **how) as client:
            whole, _ = train(client, *made(0), args.steps)
            stats = client.stats

        checkpoint = Path(folder) / "checkpoint.pt"
        with IngestionClient(job, **how) as client:  # the first half, and no more
            model, optimizer = made(0)
            first, state = train(client, model, optimizer, args.steps // 2)
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "job": state}, checkpoint)

        with IngestionClient(job, **how | {"workers": 1}) as client:  # another program, with another number of workers
            model, optimizer = made(1)
            held = torch.load(checkpoint, weights_only=True)
            model.load_state_dict(held["model"])
            optimizer.load_state_dict(held["optimizer"])
            client.load_state_dict(held["job"])
            second, _ = train(client, model, optimizer, args.steps - args.steps // 2)

    print(f"{len(whole)} steps of {args.batch_size} clicks: loss {whole[0]:.4f} to {whole[-1]:.4f}")
    print(f"waited for batches {stats.stall_seconds:.2f} s of {stats.seconds:.2f} s, the start of workers among it")
    worst = max(abs(a - b) for a, b in zip(whole, first + second, strict=True))
    print(f"stopped after {len(first)} and gone on with: losses differ by {worst:.1e} at most")
    if worst > 1e-6:
        raise SystemExit("the losses are others")


if __name__ == "__main__":
    run_example(main)
