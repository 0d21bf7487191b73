"""What jobs ask of storage for a dataset, from the footers of its files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flexshard.ingestion.storage.column_chunks import ColumnChunks
from flexshard.ingestion.storage.column_order import job_costs
from flexshard.ingestion.storage.flat_maps import Projection
from flexshard.ingestion.storage.merged_reads import ReadCost
from flexshard.ingestion.storage.projections import ProjectionLog

__all__ = ["job_reads"]

FloatArray = npt.NDArray[np.float64]


def job_reads(
    files: Sequence[tuple[pa.Schema, Any]], log: ProjectionLog, columns: Sequence[str], gap: float
) -> tuple[list[ReadCost], FloatArray]:
    """What each job asks of files, whether keys of maps have columns there or not; and bytes of each stored column.

    Args:
        files: schema and footer of each.
        log: of the jobs.
        columns: that they may read.
        gap: bytes between two columns up to which one read takes both.
    """
    totals = [ReadCost()] * len(log.projections)
    sizes = np.zeros(len(columns))
    for schema, footer in files:
        projection = Projection.of(schema, columns)
        place = {name: number for number, name in enumerate(projection.stored)}
        owner = np.array([place.get(name or "", len(place)) for name in projection.owners()], np.int64)
        chunks = ColumnChunks.of(footer, schema, projection.stored)
        needs = np.zeros((len(log.projections), len(projection.stored) + 1), bool)  # the last is of keys no row has
        job, column = np.nonzero(log.reads(columns))
        needs[job, owner[column]] = True
        needs = needs[:, chunks.columns]
        for starts, chunk_sizes in zip(chunks.starts, chunks.sizes, strict=True):
            costs = job_costs(needs, (starts, chunk_sizes), gap)
            totals = [total + cost for total, cost in zip(totals, costs, strict=True)]
        if not projection.keys:
            has_one = np.flatnonzero(owner < len(place))
            sizes += np.bincount(has_one[chunks.columns], chunks.sizes.sum(0), len(columns))
    return totals, sizes
