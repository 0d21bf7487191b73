"""A DataLoader of a dataset whose items are whole batches."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from flexshard.errors import DataError
from flexshard.ingestion.batch import SessionBatch

__all__ = ["BatchDataset"]

_READERS_OWN = {
    "batch_size": "batches are whole as the reader makes them; give batch_size to the reader",
    "drop_last": "the reader ends the epoch; give drop_last to the reader",
    "shuffle": "the reader shuffles; give shuffle to the reader",
    "sampler": "the reader says which rows are read, and a sampler cannot",
    "batch_sampler": "the reader says which rows are read, and a sampler cannot",
    "collate_fn": "batches are whole, and nothing is put together; give preprocess to the reader",
}


class BatchDataset(IterableDataset[SessionBatch]):
    """A dataset that makes batches, of which a DataLoader must not make others."""

    def loader(self, **options: Any) -> DataLoader[SessionBatch]:
        """A DataLoader of these batches: ``DataLoader(self, batch_size=None, ...)``, where that cannot be forgotten.

        A DataLoader that was made without ``batch_size=None`` raises DataError at its first batch, since torch's tells
        its dataset nothing before.

        Args:
            options: of DataLoader, such as ``num_workers``, ``prefetch_factor`` and ``pin_memory``.

        Raises:
            DataError: an option that is the reader's own; says where to give it.
        """
        for name, remedy in _READERS_OWN.items():
            if options.get(name) not in (None, False):
                raise DataError(f"loader() has no {name!r}: {remedy}")
        return DataLoader(self, **{**options, "batch_size": None})
