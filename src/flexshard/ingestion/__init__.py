"""Data to batches: clustering by session, what is duplicated, the reader and its transforms."""

from typing import TYPE_CHECKING

from flexshard._values import from_extra
from flexshard.ingestion._cluster import Clustered, cluster_sessions
from flexshard.ingestion._duplication import Duplication, FeatureDuplication, measure_duplication, suggest_groups

if TYPE_CHECKING:
    from flexshard.ingestion._reader import ReaderPhases, SessionBatch, SessionReader
    from flexshard.ingestion._transforms import (
        ClipIds,
        DropFeatures,
        DropIds,
        HashIds,
        MapIds,
        OnDistinct,
        SortIds,
        Truncate,
    )

__all__ = [
    "ClipIds",
    "Clustered",
    "DropFeatures",
    "DropIds",
    "Duplication",
    "FeatureDuplication",
    "HashIds",
    "MapIds",
    "OnDistinct",
    "ReaderPhases",
    "SessionBatch",
    "SessionReader",
    "SortIds",
    "Truncate",
    "cluster_sessions",
    "measure_duplication",
    "suggest_groups",
]

__getattr__ = from_extra(
    __name__,
    {
        "ClipIds": "_transforms",
        "DropFeatures": "_transforms",
        "DropIds": "_transforms",
        "HashIds": "_transforms",
        "MapIds": "_transforms",
        "OnDistinct": "_transforms",
        "ReaderPhases": "_reader",
        "SessionBatch": "_reader",
        "SessionReader": "_reader",
        "SortIds": "_transforms",
        "Truncate": "_transforms",
    },
)
