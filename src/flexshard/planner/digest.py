"""What a plan was made from, in one number."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from flexshard.planner.plan import Settings
from flexshard.tables import Table
from flexshard.topologies import Cluster

__all__ = ["cluster_fields", "job_digest", "settings_fields"]


# What came later is not in the digest of jobs that do without.
_LATER = {"host_memory": None, "gap": 0.002, "constraints": ()}


def job_digest(tables: Sequence[Table], cluster: Cluster, settings: Settings) -> str:
    """SHA-256 of tables, profiles, cluster and settings, in hexadecimal."""
    listed = [
        (t.name, t.rows, t.dim, t.dtype, t.optimizer, t.replication_multiplier, t.features, t.profile.digest)
        + ((t.dedup_factor,) if t.dedup_factor > 1 else ())
        + ((t.pooling,) if t.is_pooled else ())
        for t in tables
    ]
    fields = settings_fields(settings)
    asked = {name: value for name, value in fields.items() if name not in _LATER or value != _LATER[name]}
    text = json.dumps([listed, cluster_fields(cluster), asked], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def settings_fields(settings: Settings) -> dict[str, Any]:
    """Settings as a mapping, without what rates of earlier releases do not say of their tables."""
    found = asdict(settings)
    for table in () if found["rates"] is None else found["rates"]["tables"]:
        for name in ("length", "dtype", "optimizer"):
            if table[name] is None:
                del table[name]
    return found


def cluster_fields(cluster: Cluster) -> dict[str, Any]:
    """A cluster as a mapping, without the rates of its levels that came later and that are derived."""
    found = asdict(cluster)
    for level in found["levels"]:
        for name in ("own_all_gather", "own_reduce_scatter", "torchrec_all_to_all"):
            if level[name] is None:
                del level[name]
    return found
