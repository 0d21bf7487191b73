"""Stored samples to batches: datasets clustered by session and what they repeat (sessions/), datasets rewritten for
reading (storage/), the reader and its transforms, the service (service/).

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
    from flexshard.ingestion.dense_transforms import (
        BoxCox as BoxCox,
        Clamp as Clamp,
        FillMissing as FillMissing,
        Logarithm as Logarithm,
        Logit as Logit,
        Normalize as Normalize,
    )
    from flexshard.ingestion.derived import (
        Bucketize as Bucketize,
        Cross as Cross,
        Derived as Derived,
        NGrams as NGrams,
        OnFeatures as OnFeatures,
    )
    from flexshard.ingestion.reader import SessionReader as SessionReader
    from flexshard.ingestion.service.client import IngestionClient as IngestionClient, IngestionStats as IngestionStats
    from flexshard.ingestion.service.ledger import SplitLedger as SplitLedger
    from flexshard.ingestion.service.packing import batch_hash as batch_hash
    from flexshard.ingestion.service.running import IngestionRun as IngestionRun, run_job as run_job
    from flexshard.ingestion.service.sizing import (
        adjusted_workers as adjusted_workers,
        workers_needed as workers_needed,
    )
    from flexshard.ingestion.service.spec import IngestionSpec as IngestionSpec
    from flexshard.ingestion.sessions.clustering import Clustered as Clustered, cluster_sessions as cluster_sessions
    from flexshard.ingestion.sessions.duplication import (
        Duplication as Duplication,
        FeatureDuplication as FeatureDuplication,
        measure_duplication as measure_duplication,
    )
    from flexshard.ingestion.sessions.grouping import (
        suggest_groups as suggest_groups,
        suggest_partial as suggest_partial,
    )
    from flexshard.ingestion.storage.merged_reads import Disk as Disk, ReadCost as ReadCost
    from flexshard.ingestion.storage.popularity import (
        PopularBytes as PopularBytes,
        StorageTier as StorageTier,
        TieredStorage as TieredStorage,
        popular_bytes as popular_bytes,
        tiered_storage as tiered_storage,
    )
    from flexshard.ingestion.storage.projections import ProjectionLog as ProjectionLog
    from flexshard.ingestion.storage.rewriting import Rewritten as Rewritten, rewrite_dataset as rewrite_dataset
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
        "dense_transforms": ["BoxCox", "Clamp", "FillMissing", "Logarithm", "Logit", "Normalize"],
        "derived": ["Bucketize", "Cross", "Derived", "NGrams", "OnFeatures"],
        "reader": ["SessionReader"],
        "service.client": ["IngestionClient", "IngestionStats"],
        "service.ledger": ["SplitLedger"],
        "service.packing": ["batch_hash"],
        "service.running": ["IngestionRun", "run_job"],
        "service.sizing": ["adjusted_workers", "workers_needed"],
        "service.spec": ["IngestionSpec"],
        "sessions.clustering": ["Clustered", "cluster_sessions"],
        "sessions.duplication": ["Duplication", "FeatureDuplication", "measure_duplication"],
        "sessions.grouping": ["suggest_groups", "suggest_partial"],
        "storage.merged_reads": ["Disk", "ReadCost"],
        "storage.popularity": ["PopularBytes", "StorageTier", "TieredStorage", "popular_bytes", "tiered_storage"],
        "storage.projections": ["ProjectionLog"],
        "storage.rewriting": ["Rewritten", "rewrite_dataset"],
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
