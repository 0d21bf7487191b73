"""Whole models for the emulated cluster: DLRMs with Criteo's tables, with and without sequences beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torchrec import KeyedJaggedTensor

from flexshard import AccessProfile, Table

__all__ = ["MODELS", "Model"]

IntArray = npt.NDArray[np.int64]

# Distinct values of the 26 categorical columns of Criteo's Kaggle data, and how many values each has in the multi-hot
# version of MLPerf's DLRM benchmark.
ROWS = (
    *(1_460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5_683, 8_351_593, 3_194),
    *(27, 14_992, 5_461_306, 10, 5_652, 2_173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572),
)
LENGTHS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
MOST_ROWS = 100_000  # of a table here: eight ranks share one machine's memory
SEQUENCE_ROWS = 300_000  # too many to have copies: FBGEMM 1.8 adds sequences up in those, on a CPU
LEAST_ROWS = 64  # FBGEMM 1.8 crashes at times on a CPU where a rank of a row-wise plan has none of some table
EXPONENT = 1.05  # of the power law that ids follow


@dataclass(frozen=True)
class Model:
    """Tables and how they are read.

    Attributes:
        name: of the model.
        batch_size: B, samples per rank.
        rows, dims, lengths: of each table, by name; every sample reads ``lengths`` ids of it.
        sequences: names of the tables that are not pooled.
    """

    name: str
    batch_size: int
    rows: Mapping[str, int]
    dims: Mapping[str, int]
    lengths: Mapping[str, int]
    sequences: tuple[str, ...] = ()

    def tables(self) -> list[Table]:
        """With the distribution that ids are drawn from."""
        return [
            Table(
                name,
                rows,
                self.dims[name],
                AccessProfile.from_counts(self._counts(name), num_samples=1_000_000),
                pooling="none" if name in self.sequences else "sum",
                features=(name,),
            )
            for name, rows in self.rows.items()
        ]

    def _shares(self, name: str) -> npt.NDArray[np.float64]:
        weights = 1.0 / np.arange(1, self.rows[name] + 1) ** EXPONENT
        shares: npt.NDArray[np.float64] = weights / weights.sum()
        return shares

    def _places(self, name: str) -> IntArray:
        """The row of each position: ids say nothing of how often they are read."""
        number = list(self.rows).index(name)
        return np.random.default_rng(number).permutation(self.rows[name])

    def _counts(self, name: str) -> IntArray:
        counts = np.zeros(self.rows[name], np.int64)
        counts[self._places(name)] = np.round(self._shares(name) * self.lengths[name] * 1_000_000)
        return counts

    def batches(self, rank: int, count: int) -> list[dict[bool, KeyedJaggedTensor]]:
        """Ids of so many batches of a rank: of pooled tables (True) and of sequences (False), where there are any."""
        random = np.random.default_rng([rank, count])
        drawn: dict[str, list[IntArray]] = {}
        for name in self.rows:
            ends, places = np.cumsum(self._shares(name)), self._places(name)
            number = self.batch_size * self.lengths[name]
            found = [np.searchsorted(ends, random.random(number) * ends[-1], side="right") for _ in range(count)]
            drawn[name] = [places[np.minimum(one, len(places) - 1)] for one in found]
        kinds = {True: [n for n in self.rows if n not in self.sequences], False: list(self.sequences)}
        return [
            {pooled: self._features(names, drawn, batch) for pooled, names in kinds.items() if names}
            for batch in range(count)
        ]

    def _features(self, names: list[str], drawn: Mapping[str, list[IntArray]], batch: int) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(
            names,
            torch.from_numpy(np.concatenate([drawn[name][batch] for name in names])),
            lengths=torch.tensor([self.lengths[name] for name in names]).repeat_interleave(self.batch_size),
        )


def _dlrm(name: str, batch_size: int, dims: Callable[[int], int], sequences: Mapping[str, int] | None = None) -> Model:
    """Criteo's tables; ``sequences`` are lengths of further ones, of 32 numbers a row."""
    names = [f"c{i}" for i in range(len(ROWS))]
    others = sequences or {}
    return Model(
        name,
        batch_size,
        {n: min(max(rows, LEAST_ROWS), MOST_ROWS) for n, rows in zip(names, ROWS, strict=True)}
        | dict.fromkeys(others, SEQUENCE_ROWS),
        {n: dims(i) for i, n in enumerate(names)} | dict.fromkeys(others, 32),
        dict(zip(names, LENGTHS, strict=True)) | dict(others),
        tuple(others),
    )


MODELS: dict[str, Callable[[], Model]] = {
    "dlrm": lambda: _dlrm("dlrm", 512, lambda _: 64),
    "dlrm-wide": lambda: _dlrm("dlrm-wide", 384, lambda i: (16, 32, 64, 128, 256)[i % 5]),
    "mixed": lambda: _dlrm("mixed", 512, lambda _: 32, {"clicks": 60, "views": 30}),
    "mixed-long": lambda: _dlrm("mixed-long", 512, lambda i: (16, 64)[i % 2], {"clicks": 200}),
}
