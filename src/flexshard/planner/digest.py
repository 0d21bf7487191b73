"""What a plan was made from, in one number."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict

from flexshard.planner.plan import Settings
from flexshard.planner.solver.instance import Instance

__all__ = ["job_digest"]


def job_digest(instance: Instance, settings: Settings) -> str:
    """SHA-256 of tables, profiles, cluster and settings, in hexadecimal."""
    tables = [
        (t.name, t.rows, t.dim, t.dtype, t.optimizer, t.replication_multiplier, t.features, t.profile.digest)
        + ((t.dedup_factor,) if t.dedup_factor > 1 else ())
        for t in instance.tables
    ]
    text = json.dumps([tables, asdict(instance.cluster), asdict(settings)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
