"""A batch of samples as a model takes it, and what reading it took."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, NoReturn

import torch
from torch.utils.data._utils.collate import default_collate_fn_map
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from flexshard.embeddings import InverseKeyedJaggedTensor
from flexshard.errors import DataError

__all__ = ["BatchPosition", "ReaderPhases", "SessionBatch"]


@dataclass(frozen=True)
class ReaderPhases:
    """What reading took (Figure 10, Table 3). Adds up.

    Attributes:
        samples: rows.
        fill_seconds: reading, decompressing and decoding row groups.
        convert_seconds: from rows to tensors, finding the distinct ones.
        process_seconds: transforms.
        bytes_read: from storage: columns that are used, compressed, and what lies in gaps that were read as well.
        bytes_sent: of the batch's tensors.
        bytes_wanted: of the columns that are used.
        reads: of storage.
    """

    samples: int = 0
    fill_seconds: float = 0.0
    convert_seconds: float = 0.0
    process_seconds: float = 0.0
    bytes_read: int = 0
    bytes_sent: int = 0
    bytes_wanted: int = 0
    reads: int = 0

    def __add__(self, other: ReaderPhases) -> ReaderPhases:
        return ReaderPhases(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def seconds(self) -> float:
        """Of all three phases."""
        return self.fill_seconds + self.convert_seconds + self.process_seconds


@dataclass(frozen=True)
class BatchPosition:
    """Where a batch stands in the order of all batches.

    Attributes:
        epoch: it belongs to.
        number: within the epoch, over all ranks.
        consumed: batches of the epoch that all ranks have taken once each has taken one like this.
        repeated: samples at its end that the epoch had before, so that every rank has a batch.
    """

    epoch: int = 0
    number: int = 0
    consumed: int = 0
    repeated: int = 0


@dataclass
class SessionBatch(Pipelineable):
    """A batch of B samples.

    Attributes:
        features: deduplicated by group, the others plain.
        dense: labels and other columns of numbers; shape (B,), or (B, D) of lists of D numbers.
        phases: what reading it took.
        position: of the batch; :meth:`SessionReader.state_dict` goes on after it.
    """

    features: InverseKeyedJaggedTensor
    dense: dict[str, torch.Tensor]
    phases: ReaderPhases
    position: BatchPosition = BatchPosition()

    @property
    def sparse_features(self) -> KeyedJaggedTensor:
        """All features, every sample with lists of its own, as TorchRec's models take them."""
        return self.features.to_keyed_jagged()

    def to(self, device: torch.device | str, non_blocking: bool = False, data_copy_stream: Any = None) -> SessionBatch:
        """On another device."""
        features = self.features.to(device, non_blocking=non_blocking, data_copy_stream=data_copy_stream)
        dense = {name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self.dense.items()}
        return replace(self, features=features, dense=dense)

    def pin_memory(self) -> SessionBatch:
        """In page-locked memory."""
        dense = {name: tensor.pin_memory() for name, tensor in self.dense.items()}
        return replace(self, features=self.features.pin_memory(), dense=dense)

    def record_stream(self, stream: Any) -> None:
        """Keep the tensors' memory until what ``stream`` has queued is done."""
        self.features.record_stream(stream)
        for tensor in self.dense.values():
            tensor.record_stream(stream)


def _collated(_batch: Any, **_others: Any) -> NoReturn:
    raise DataError(
        "a reader's batches are whole; make the DataLoader by reader.loader(), or with batch_size=None, so that it puts"
        " none together"
    )


# Where torch lets types say how they are put together (torch.utils.data.default_collate).
default_collate_fn_map[SessionBatch] = _collated
