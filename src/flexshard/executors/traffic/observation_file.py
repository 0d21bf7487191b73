"""Observations as files: JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from flexshard._internal import DocumentFormat, PathLike, decode, read_json, write_json
from flexshard.errors import DataError
from flexshard.executors.traffic.observation import Observation

__all__ = ["load_observation", "observation_document", "save_observation"]

FORMAT = DocumentFormat("flexshard.observed", 1, "an observation", "observations", DataError, "observe again")


def save_observation(observation: Observation, path: PathLike) -> None:
    """See :meth:`Observation.save`."""
    write_json(path, observation_document(observation))


def observation_document(observation: Observation) -> dict[str, Any]:
    """See :meth:`Observation.document`."""
    document = asdict(observation)
    if not observation.calls:
        del document["calls"]
    for collective in document["collectives"]:
        if collective["mean_seconds"] is None:  # of an older file, which stays as it is
            del collective["mean_seconds"]
    return FORMAT.stamped(document)


def load_observation(path: PathLike) -> Observation:
    """See :meth:`Observation.load`."""
    return decode(Observation, read_json(path, FORMAT), str(path), FORMAT)
