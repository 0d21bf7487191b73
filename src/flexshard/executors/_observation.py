"""What was observed, as a file."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError

from flexshard._files import read_text, write_text
from flexshard.errors import DataError

__all__ = ["Observation", "ObservedCollective"]

FORMAT, VERSION = "flexshard.observed", 1

Whole = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class ObservedCollective:
    """One collective, per step.

    Attributes:
        kind: "all_to_all", "all_reduce", "all_gather" or "reduce_scatter".
        group_size: g of its level; of collectives that are not ours, the size of their process group.
        content: "counts", "ids", "embeddings", "gradients", "replicas", "touched" or "touched_rows"; "other ids" and
            "other embeddings" of collectives that are not ours.
        calls, bytes: mean over ranks and steps; bytes of the buffer that is sent.
        fullest_bytes: of the fullest buffer of a step, sent or received, mean over steps.
        seconds: of the slowest rank, median over steps.
        exposed_seconds: in which Python stood waiting, mean over ranks and steps.
        bytes_by_step: mean over ranks of each step.
    """

    kind: str
    group_size: Whole
    content: str
    calls: FiniteFloat
    bytes: FiniteFloat
    fullest_bytes: FiniteFloat
    seconds: FiniteFloat
    exposed_seconds: FiniteFloat
    bytes_by_step: tuple[FiniteFloat, ...]


@dataclass(frozen=True)
class Observation:
    """Steps that ran.

    Attributes:
        fingerprint: of the plan that ran; empty where none did.
        world_size: U.
        step_seconds: of each step, the slowest rank's.
        collectives: sorted by kind, group size and content.
    """

    fingerprint: str
    world_size: Whole
    step_seconds: Annotated[tuple[FiniteFloat, ...], Field(min_length=1)]
    collectives: tuple[ObservedCollective, ...]

    def of(self, kind: str, group_size: int, *contents: str) -> list[ObservedCollective]:
        """Collectives of a kind and level, of these contents (of any, if none are named)."""
        return [
            c
            for c in self.collectives
            if c.kind == kind and c.group_size == group_size and (not contents or c.content in contents)
        ]

    @property
    def comm_seconds(self) -> float:
        """All collectives of a step, one after the other."""
        return sum(c.seconds for c in self.collectives)

    def document(self) -> dict[str, Any]:
        """As the mapping that its file holds."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON.

        Raises:
            OutputError: it could not be written.
        """
        write_text(path, json.dumps(self.document(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Observation:
        """Read what :meth:`save` wrote.

        Raises:
            DataError: not an observation, of another version, or damaged.
        """
        text = read_text(path, DataError)
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: not valid JSON: {error}; observe again") from error
        if not isinstance(document, dict) or document.pop("format", None) != FORMAT:
            raise DataError(f"{path}: not an observation; expected a JSON object with 'format': '{FORMAT}'")
        version = document.pop("version", None)
        if version != VERSION:
            raise DataError(f"{path}: version {version!r} of observations is unknown; this FlexShard reads {VERSION}")
        try:
            return TypeAdapter(cls).validate_python(document)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            raise DataError(f"{path}: {field}: {first['msg']}; observe again") from error
