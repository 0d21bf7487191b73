"""A job without a trainer: what it gives and how fast, to measure, to compare and to keep (DPP paper, section 5.3)."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from flexshard._internal import DocumentFormat, PathLike, check_finite, read_json, write_json
from flexshard.errors import DataError
from flexshard.ingestion.batch import ReaderPhases, SessionBatch
from flexshard.ingestion.service.client import IngestionClient, IngestionStats
from flexshard.ingestion.service.packing import batch_hash
from flexshard.ingestion.service.spec import IngestionSpec

__all__ = ["IngestionRun", "run_job"]

FORMAT = DocumentFormat(
    "flexshard.ingested", 1, "a run of an ingestion job", "runs of ingestion jobs", DataError, "run the job again"
)


@dataclass(frozen=True)
class IngestionRun:
    """What a job gave.

    Attributes:
        spec: the job.
        rank, world_size: whose batches they were.
        digest: of all batches, in order; the same for the same job, whoever made them.
        stats: what the client saw.
        phases: what workers took, added up.
        step_seconds: that the trainer took for each batch.
    """

    spec: IngestionSpec
    rank: int
    world_size: int
    digest: str
    stats: IngestionStats
    phases: ReaderPhases
    step_seconds: float

    @property
    def samples_per_second(self) -> float:
        """Of wall time, the trainer's steps included."""
        return self.stats.samples / self.stats.seconds if self.stats.seconds else 0.0

    @property
    def stalled(self) -> float:
        """Share of the time that the trainer waited for batches."""
        return self.stats.stall_seconds / self.stats.seconds if self.stats.seconds else 0.0

    def document(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "job": self.spec.model_dump(exclude_defaults=True),
            "rank": self.rank,
            "world_size": self.world_size,
            "digest": self.digest,
            "samples_per_second": self.samples_per_second,
            "stalled": self.stalled,
            "step_seconds": self.step_seconds,
            "stats": asdict(self.stats),
            "phases": asdict(self.phases),
        }

    def save(self, path: PathLike) -> None:
        """Write it as JSON, whole or not at all.

        Raises:
            OutputError: it could not be written.
        """
        write_json(path, FORMAT.stamped(self.document()))

    @classmethod
    def load(cls, path: PathLike) -> IngestionRun:
        """Read what :meth:`save` wrote.

        Raises:
            DataError: it is not such a file.
        """
        body = read_json(path, FORMAT)
        try:
            return cls(
                IngestionSpec.of_json(json.dumps(body["job"])),
                int(body["rank"]),
                int(body["world_size"]),
                str(body["digest"]),
                IngestionStats(**body["stats"]),
                ReaderPhases(**body["phases"]),
                float(body["step_seconds"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}: not a run of an ingestion job: {error}; run the job again") from error


def run_job(
    spec: IngestionSpec,
    *,
    rank: int = 0,
    world_size: int = 1,
    step_seconds: float = 0.0,
    most_batches: int | None = None,
    on_batch: Callable[[IngestionClient, SessionBatch], None] | None = None,
    **how: Any,
) -> IngestionRun:
    """Take all batches of a job's epochs and let them go.

    Args:
        spec: the job.
        rank, world_size: whose batches.
        step_seconds: to sleep after each, in place of a trainer.
        most_batches: after which to stop.
        on_batch: called with each.
        how: workers and backend, as for :class:`IngestionClient`.

    Raises:
        DataError: as :class:`IngestionClient`; a time below 0.
    """
    if check_finite(step_seconds, "step_seconds", DataError) < 0:
        raise DataError(f"step_seconds is the time of a step, at least 0; found {step_seconds:g}")
    digest, phases, count = hashlib.blake2b(digest_size=16), ReaderPhases(), 0
    with IngestionClient(spec, rank=rank, world_size=world_size, **how) as client:
        for epoch in range(spec.epochs):
            client.set_epoch(epoch)
            for batch in client:
                digest.update(batch_hash(batch).encode())
                phases += batch.phases
                count += 1
                if on_batch is not None:
                    on_batch(client, batch)
                if step_seconds:
                    time.sleep(step_seconds)
                if count == most_batches:
                    break
            if count == most_batches:
                break
        return IngestionRun(spec, rank, world_size, digest.hexdigest(), client.stats, phases, step_seconds)
