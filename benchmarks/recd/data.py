"""What is measured on: generated sessions with the paper's statistics, MIND's impressions and Globo's clicks."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared" / "data"
sys.path.insert(0, str(ROOT / "examples"))

from sessions import write_generated, write_mind  # noqa: E402 - the examples are no package


@dataclass(frozen=True)
class Log:
    """A log in order of time.

    Attributes:
        name: of the data.
        path: its file.
        session, time: its columns.
        items: one more than its largest id.
    """

    name: str
    path: Path
    session: str
    time: str
    items: int


def logs(folder: Path, *, sessions: int) -> list[Log]:
    """Every log that is at hand."""
    path, _, items = write_generated(folder / "generated", sessions=sessions)
    found = [Log("generated", path, "session", "time", items)]
    mind, globo = SHARED / "mind_sample.parquet", SHARED / "globo_clicks.parquet"
    if mind.exists():
        path, _, items = write_mind(str(mind), folder / "mind")
        found.append(Log("MIND", path, "session", "time", items))
    if globo.exists():
        path = folder / "globo.parquet"
        duckdb.sql(f"COPY (SELECT * FROM '{globo}' ORDER BY timestamp) TO '{path}' (FORMAT parquet, COMPRESSION zstd)")
        found.append(Log("Globo", path, "session_id", "timestamp", 0))
    return found


def write(table: pa.Table, path: Path, *, packed: bool = True, row_group_size: int = 1 << 16) -> int:
    """Bytes of a table as zstd Parquet: with Arrow's dictionaries (``packed``), or with lists as they are."""
    flat = [field.name for field in table.schema if not pt.is_nested(field.type)]
    pq.write_table(
        table,
        path,
        compression="zstd",
        compression_level=3,
        use_dictionary=True if packed else flat,
        row_group_size=row_group_size,
    )
    return path.stat().st_size


def shuffled(table: pa.Table) -> pa.Table:
    """Rows in random order."""
    return table.take(np.random.default_rng(0).permutation(table.num_rows))
