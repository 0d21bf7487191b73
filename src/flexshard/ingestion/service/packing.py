"""Batches as plain arrays, to go between processes; and what tells two batches apart."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from flexshard.embeddings import DedupedGroup, InverseKeyedJaggedTensor, Runs
from flexshard.ingestion.batch import BatchPosition, ReaderPhases, SessionBatch

__all__ = ["PackedBatch", "batch_hash", "pack"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class _Jagged:
    keys: tuple[str, ...]
    stride: int
    weighted: bool
    grouped: bool
    runs: tuple[str, int] | None = field(default=None, repr=False)  # newest and max_shift


@dataclass(frozen=True)
class PackedBatch:
    """A batch: how it is put together, and its arrays."""

    keys: tuple[str, ...]
    parts: tuple[_Jagged, ...]
    dense: tuple[str, ...]
    phases: ReaderPhases
    position: BatchPosition
    arrays: tuple[Array, ...]

    @property
    def nbytes(self) -> int:
        """Of the arrays."""
        return sum(array.nbytes for array in self.arrays)

    @cached_property
    def batch(self) -> SessionBatch:
        """What it is of, unpacked once; it shares the arrays' memory where that may be written to."""
        return _unpacked(self)


def pack(batch: SessionBatch) -> PackedBatch:
    """A batch on the host as arrays; they share its memory."""
    parts, arrays = [], []
    for part, group in batch.features.parts():
        weights, runs = part.weights_or_none(), None if group is None else group.runs
        how = None if runs is None else (runs.newest, runs.max_shift)
        parts.append(_Jagged(tuple(part.keys()), int(part.stride()), weights is not None, group is not None, how))
        tensors = [part.values(), part.lengths(), weights, None if group is None else group.inverse]
        tensors += [] if runs is None else [runs.starts, runs.lengths]
        arrays += [tensor.numpy() for tensor in tensors if tensor is not None]
    arrays += [tensor.numpy() for tensor in batch.dense.values()]
    keys = tuple(batch.features.keys())
    return PackedBatch(keys, tuple(parts), tuple(batch.dense), batch.phases, batch.position, tuple(arrays))


def _unpacked(packed: PackedBatch) -> SessionBatch:
    """The batch; arrays that may not be written to, such as those in shared memory, are copied."""
    arrays = iter(packed.arrays)

    def tensor() -> torch.Tensor:
        array = next(arrays)
        return torch.from_numpy(array if array.flags.writeable else array.copy())

    groups, plain = [], None
    for part in packed.parts:
        values, lengths = tensor(), tensor()
        weights = tensor() if part.weighted else None
        jagged = KeyedJaggedTensor(list(part.keys), values, lengths=lengths, weights=weights, stride=part.stride)
        if part.grouped:
            inverse, runs = tensor(), None
            if part.runs is not None:
                starts, each = tensor().numpy(), tensor().numpy()
                runs = Runs.of(starts, each, newest=part.runs[0], max_shift=part.runs[1])
            groups.append(DedupedGroup(jagged, inverse, runs=runs))
        else:
            plain = jagged
    dense = {name: tensor() for name in packed.dense}
    features = InverseKeyedJaggedTensor(groups, plain, packed.keys)
    return SessionBatch(features, dense, packed.phases, packed.position)


def batch_hash(batch: SessionBatch) -> str:
    """Of everything that training sees: keys, tensors, their types and shapes, and where the batch stands."""
    packed = pack(batch)
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr((packed.keys, packed.parts, packed.dense, packed.position)).encode())
    if any(part.runs is not None for part in packed.parts):  # others have the hashes that they always had
        digest.update(repr([part.runs for part in packed.parts]).encode())
    for array in packed.arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()
