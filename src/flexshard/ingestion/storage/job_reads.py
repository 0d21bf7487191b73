"""What jobs ask of storage for a dataset, from the footers of its files."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from flexshard._internal import ParquetSource
from flexshard.ingestion.storage.column_chunks import ColumnChunks
from flexshard.ingestion.storage.column_order import job_costs
from flexshard.ingestion.storage.flat_maps import Projection
from flexshard.ingestion.storage.merged_reads import ReadCost
from flexshard.ingestion.storage.projections import ProjectionLog

__all__ = ["job_reads"]

FloatArray = npt.NDArray[np.float64]


def job_reads(
    sources: Sequence[ParquetSource], log: ProjectionLog, columns: Sequence[str], gap: float
) -> tuple[list[ReadCost], FloatArray]:
    """What each job asks of files, whether keys of maps have columns there or not; and bytes of each stored column."""
    totals = [ReadCost()] * len(log.projections)
    sizes = np.zeros(len(columns))
    for source in sources:
        projection = Projection.of(source.schema, columns)
        place = {name: number for number, name in enumerate(projection.stored)}
        owner = np.array([place[name] for name in projection.owners()], np.int64)
        with source.open() as file:
            chunks = ColumnChunks.of(file.metadata, projection.stored)
        needs = np.zeros((len(log.projections), len(projection.stored)), bool)
        job, column = np.nonzero(log.reads(columns))
        needs[job, owner[column]] = True
        needs = needs[:, chunks.columns]
        for starts, chunk_sizes in zip(chunks.starts, chunks.sizes, strict=True):
            costs = job_costs(needs, (starts, chunk_sizes), gap)
            totals = [total + cost for total, cost in zip(totals, costs, strict=True)]
        if not projection.keys:
            sizes += np.bincount(owner[chunks.columns], chunks.sizes.sum(0), len(columns))
    return totals, sizes
