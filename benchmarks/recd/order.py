"""What the order of stored samples does to a model (RecD paper, section 6.2): held-out AUC after one pass over a log.

The same model, weights and samples: in order of time, clustered by session (in order of their keys, and of their
starts), clustered within hours, and shuffled; trained on the first nine tenths of a log, scored on the last.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.recd.data import SHARED, shuffled, write, write_mind
from flexshard._internal import as_text, new_grid
from flexshard.ingestion import SessionReader, cluster_sessions
from growing_histories import LONGEST, Clicks
from recd_mind import distributed

__all__ = ["main"]

BATCH, DIM, SEEDS, CLICKS = 512, 32, (0, 1, 2), 400_000
HOUR_MS = 3_600_000


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    for name, value in (("RANK", 0), ("WORLD_SIZE", 1), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", 29518)):
        os.environ.setdefault(name, str(value))
    dist.init_process_group("gloo")
    if (SHARED / "globo_clicks.parquet").exists():
        print_scores("Globo", *write_globo(folder / "globo"), folder, hour=HOUR_MS)
    if (SHARED / "mind_sample.parquet").exists():
        print_scores("MIND", *write_mind(str(SHARED / "mind_sample.parquet"), folder / "mind"), folder, hour=3600)
    dist.destroy_process_group()


def write_globo(folder: Path) -> tuple[Path, Path, int]:
    """Clicks of some users in order of time, half of them with any other article instead of the clicked one."""
    folder.mkdir(parents=True, exist_ok=True)
    database = duckdb.connect()
    database.execute("SET threads = 1")
    source = f"read_parquet('{SHARED / 'globo_clicks.parquet'}')"
    database.execute(
        f"""
        CREATE TABLE log AS SELECT user_id, session_id AS session, timestamp AS time,
            dense_rank() OVER (ORDER BY item_id) - 1 AS item FROM {source} WHERE user_id IN (
                SELECT user_id FROM (SELECT user_id, sum(count(*)) OVER (ORDER BY hash(user_id)) AS so_far FROM {source}
                GROUP BY user_id) WHERE so_far <= {CLICKS});
        CREATE TABLE rows AS SELECT *, coalesce(list(item) OVER (PARTITION BY user_id ORDER BY time, item
            ROWS BETWEEN {LONGEST} PRECEDING AND 1 PRECEDING), []) AS history,
            CAST(hash(user_id, time, item) % (SELECT max(item) + 1 FROM log) AS BIGINT) AS other FROM log;
        """
    )
    (split,) = database.sql("SELECT quantile_disc(time, 0.9) FROM rows").fetchall()[0]
    paths = folder / "log.parquet", folder / "held_out.parquet"
    for path, where in zip(paths, (f"time < {split}", f"time >= {split}"), strict=True):
        database.execute(
            f"""
            COPY (SELECT session, time, history, CAST(l AS INT) AS label, CASE WHEN l = 1 THEN item ELSE other END
                AS candidate FROM (SELECT *, hash(user_id, item, time) // 7919 % 2 AS l FROM rows WHERE {where})
                ORDER BY time, session, item) TO '{path}' (FORMAT parquet, COMPRESSION zstd)
            """
        )
    (items,) = database.sql("SELECT max(item) + 1 FROM rows").fetchall()[0]
    return *paths, int(items)


def print_scores(name: str, log: Path, held_out: Path, items: int, folder: Path, *, hour: float) -> None:
    keys: dict[str, Any] = {"session": "session", "time": "time"}
    by_key = cluster_sessions(log, folder / name / "by_key", **keys).path
    orders = {
        "time": log,
        "clustered, by key": by_key,
        "clustered, by start": cluster_sessions(log, folder / name / "by_start", order="start", **keys).path,
        "clustered within hours": cluster_sessions(log, folder / name / "hours", partition=hour, **keys).path,
        "shuffled": folder / name / "shuffled.parquet",
    }
    write(shuffled(pq.read_table(log)), orders["shuffled"])
    grid = new_grid(
        f"{name}: held-out AUC after one pass, mean of {len(SEEDS)} seeds (least to most)",
        ["order of samples"],
        ["AUC", "", "DedupFactor of runs", "loss of the last 20 steps"],
    )
    for order, path in orders.items():
        found = [one_pass(path, held_out, items, seed) for seed in SEEDS]
        scores, factors, losses = zip(*found, strict=True)
        spread = f"{min(scores):.4f} to {max(scores):.4f}"
        cells = (f"{statistics.fmean(scores):.4f}", spread, f"{factors[0]:.2f}", f"{statistics.fmean(losses):.4f}")
        grid.add_row(order, *cells)
    print(as_text(grid, 110), flush=True)


def one_pass(path: Path, held_out: Path, items: int, seed: int) -> tuple[float, float, float]:
    """AUC on what was held out, the factor of partial deduplication, and the last losses."""
    torch.manual_seed(seed)
    model, optimizer = distributed(Clicks(items, DIM, "target"))
    losses, ids, kept = [], 0, 0
    for batch in reader_of(path):
        optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        (group,) = batch.features.groups
        ids += int(group.runs.lengths[group.inverse].sum())
        kept += group.jagged.values().numel()
    return score(model, held_out), ids / kept, statistics.fmean(losses[-20:])


@torch.no_grad()
def score(model: nn.Module, held_out: Path) -> float:
    """Chance that a click is scored above what was none."""
    found = [(model(batch)[1].numpy(), batch.dense["label"].numpy()) for batch in reader_of(held_out)]
    scores, labels = (np.concatenate(parts) for parts in zip(*found, strict=True))
    ranks = np.empty(scores.size)
    ranks[np.argsort(scores, kind="stable")] = np.arange(1, scores.size + 1)
    positive = labels == 1
    clicks, others = int(positive.sum()), int((~positive).sum())
    return float((ranks[positive].sum() - clicks * (clicks + 1) / 2) / (clicks * others))


def reader_of(path: Path) -> SessionReader:
    columns: dict[str, Any] = {"features": ["history", "candidate"], "dense": ["label"], "partial": [["history"]]}
    return SessionReader(path, batch_size=BATCH, **columns)
