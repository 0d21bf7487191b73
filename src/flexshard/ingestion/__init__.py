"""Stored samples to batches: datasets clustered by session and what they repeat (sessions/), the reader and its
transforms.

May import: errors, units, _internal, profiling, tables, embeddings. Needs torch and TorchRec for the reader and its
transforms.
"""

from typing import TYPE_CHECKING

from flexshard._internal.lazy import lazy_exports

if TYPE_CHECKING:
    from flexshard.ingestion.batch import (
        BatchPosition as BatchPosition,
        ReaderPhases as ReaderPhases,
        SessionBatch as SessionBatch,
    )
    from flexshard.ingestion.reader import SessionReader as SessionReader
    from flexshard.ingestion.sessions.clustering import Clustered as Clustered, cluster_sessions as cluster_sessions
    from flexshard.ingestion.sessions.duplication import (
        Duplication as Duplication,
        FeatureDuplication as FeatureDuplication,
        measure_duplication as measure_duplication,
    )
    from flexshard.ingestion.sessions.grouping import suggest_groups as suggest_groups
    from flexshard.ingestion.transforms import (
        ClipIds as ClipIds,
        DedupedTransform as DedupedTransform,
        DropFeatures as DropFeatures,
        DropIds as DropIds,
        HashIds as HashIds,
        MapIds as MapIds,
        SortIds as SortIds,
        Truncate as Truncate,
    )

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "batch": ["BatchPosition", "ReaderPhases", "SessionBatch"],
        "reader": ["SessionReader"],
        "sessions.clustering": ["Clustered", "cluster_sessions"],
        "sessions.duplication": ["Duplication", "FeatureDuplication", "measure_duplication"],
        "sessions.grouping": ["suggest_groups"],
        "transforms": [
            "ClipIds",
            "DedupedTransform",
            "DropFeatures",
            "DropIds",
            "HashIds",
            "MapIds",
            "SortIds",
            "Truncate",
        ],
    },
    deprecated={
        "OnDistinct": "transforms:DedupedTransform",
    },
)
