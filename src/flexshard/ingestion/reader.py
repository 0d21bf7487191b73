"""Parquet in, deduplicated batches out: RecD's reader and its three phases (RecD paper, sections 2.1, 4.2 and 6.3)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from time import perf_counter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
import torch
from torch.utils.data import IterableDataset, get_worker_info
from torchrec.streamable import Pipelineable

from flexshard._internal import ParquetSource, check_int, expand, first_repeated, one_array
from flexshard.embeddings import InverseKeyedJaggedTensor
from flexshard.errors import DataError
from flexshard.ingestion.batches import Rows, check_columns, fill_batches, row_groups

__all__ = ["ReaderPhases", "SessionBatch", "SessionReader"]

PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class ReaderPhases:
    """What reading took (Figure 10, Table 3). Adds up.

    Attributes:
        samples: rows.
        fill_seconds: reading, decompressing and decoding row groups.
        convert_seconds: from rows to tensors, finding the distinct ones.
        process_seconds: transforms.
        bytes_read: compressed, of the columns that were read.
        bytes_sent: of the batch's tensors.
    """

    samples: int = 0
    fill_seconds: float = 0.0
    convert_seconds: float = 0.0
    process_seconds: float = 0.0
    bytes_read: int = 0
    bytes_sent: int = 0

    def __add__(self, other: ReaderPhases) -> ReaderPhases:
        return ReaderPhases(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def seconds(self) -> float:
        """Of all three phases."""
        return self.fill_seconds + self.convert_seconds + self.process_seconds


@dataclass
class SessionBatch(Pipelineable):
    """A batch of B samples.

    Attributes:
        features: deduplicated by group, the others plain.
        dense: labels and other columns of a number per row; shape (B,) each.
        phases: what reading it took.
    """

    features: InverseKeyedJaggedTensor
    dense: dict[str, torch.Tensor]
    phases: ReaderPhases

    def to(self, device: torch.device | str, non_blocking: bool = False, data_copy_stream: Any = None) -> SessionBatch:
        """On another device."""
        features = self.features.to(device, non_blocking=non_blocking, data_copy_stream=data_copy_stream)
        dense = {name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self.dense.items()}
        return SessionBatch(features, dense, self.phases)

    def pin_memory(self) -> SessionBatch:
        """In page-locked memory."""
        dense = {name: tensor.pin_memory() for name, tensor in self.dense.items()}
        return SessionBatch(self.features.pin_memory(), dense, self.phases)

    def record_stream(self, stream: Any) -> None:
        """Keep the tensors' memory until what ``stream`` has queued is done."""
        self.features.record_stream(stream)
        for tensor in self.dense.values():
            tensor.record_stream(stream)


class SessionReader(IterableDataset[SessionBatch]):
    """Batches of a Parquet dataset for a DataLoader (with ``batch_size=None``), or for a plain loop.

    Row groups go in turn to the ranks of a job, and to the DataLoader's workers of each; batches follow the
    order of the files, so that of a dataset that ``flexshard cluster-sessions`` wrote they hold whole sessions.
    """

    def __init__(
        self,
        paths: PathLike | Sequence[PathLike],
        *,
        batch_size: int,
        features: Sequence[str],
        groups: Sequence[Sequence[str]] = (),
        dense: Sequence[str] = (),
        weights: Mapping[str, str] | None = None,
        transform: Callable[[InverseKeyedJaggedTensor], InverseKeyedJaggedTensor] | None = None,
        session: str | None = None,
        time: str | None = None,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        """Read some columns.

        Args:
            paths: files, globs, folders or URLs.
            batch_size: B.
            features: columns of ids or of lists of ids.
            groups: of features to deduplicate together (``dedup_sparse_features`` in the paper).
            dense: columns of a number per row, such as labels.
            weights: column with the weights of a feature, by feature.
            transform: of the features, such as :class:`DedupedTransform`.
            session, time: check that sessions are adjacent and in order of time, as clustering leaves them.
            rank, world_size: of the job that reads together.
            drop_last: leave out a last batch of fewer than B rows.
            shuffle: read row groups in a random order, another one after each :meth:`set_epoch`.
            seed: of that order.

        Raises:
            DataError: a column that is missing or of another type in some file; ranks that are none.
        """
        super().__init__()
        self.batch_size = check_int(batch_size, "batch_size", DataError)
        self.features, self.dense = list(features), list(dense)
        self.groups = [list(group) for group in groups]
        self.weights = dict(weights or {})
        self.transform = transform
        self.session, self.time = session, time
        if time is not None and session is None:
            raise DataError("times are in order within a session; name the session column too")
        self.world_size = check_int(world_size, "world_size", DataError)
        self.rank = check_int(rank, "rank", DataError, least=0)
        if self.rank >= self.world_size:
            raise DataError(f"there are ranks 0 to {self.world_size - 1}, found {self.rank}")
        self.drop_last, self.shuffle, self.seed = drop_last, shuffle, check_int(seed, "seed", DataError, least=0)
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # seen by workers that stay
        sources = expand(paths)
        checked = [c for c in (session, time) if c is not None]
        self._columns = list(dict.fromkeys([*self.features, *self.weights.values(), *self.dense, *checked]))
        if not self.features:
            raise DataError("a batch has at least one feature")
        check_columns(sources, self._columns)
        twice = first_repeated(self.features)
        if twice is not None:
            raise DataError(f"feature {twice!r} is named twice")
        if session is not None:
            _check_type(sources[0], session, "session", nested=True)
        if time is not None:
            _check_type(sources[0], time, "time", nested=False)
        self._groups = row_groups(sources, self._columns)

    def set_epoch(self, epoch: int) -> None:
        """Shuffle otherwise from now on."""
        self._epoch.fill_(check_int(epoch, "epoch", DataError, least=0))

    def __iter__(self) -> Iterator[SessionBatch]:
        """Batches, in order.

        Raises:
            DataError: values that cannot be used, or sessions that are not in order; names file, row and column.
        """
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        groups = self._groups
        if self.shuffle:
            order = np.random.default_rng([self.seed, int(self._epoch)]).permutation(len(groups))
            groups = [groups[index] for index in order.tolist()]
        local_groups = groups[self.rank * workers + number :: self.world_size * workers]
        before: _Last | None = None
        for rows in fill_batches(local_groups, self._columns, self.batch_size, drop_last=self.drop_last):
            if self.session is not None:
                before = _check_order(rows, self.session, self.time, before)
            yield self._batch(rows)

    def _batch(self, rows: Rows) -> SessionBatch:
        start = perf_counter()
        features = self._converted(rows)
        dense = {name: _numbers(rows, name) for name in self.dense}
        converted = perf_counter()
        if self.transform is not None:
            features = self.transform(features)
        processed = perf_counter()
        phases = ReaderPhases(
            rows.table.num_rows,
            rows.seconds,
            converted - start,
            processed - converted,
            rows.bytes_read,
            features.nbytes() + sum(tensor.numel() * tensor.element_size() for tensor in dense.values()),
        )
        return SessionBatch(features, dense, phases)

    def _converted(self, rows: Rows) -> InverseKeyedJaggedTensor:
        how: dict[str, Any] = {"keys": self.features, "weights": self.weights}
        try:
            return InverseKeyedJaggedTensor.from_arrow(rows.table, self.groups, **how)
        except DataError:
            for table, where, row in rows.runs():  # again, to name the file and its row
                InverseKeyedJaggedTensor.from_arrow(table, self.groups, where=where, first_row=row, **how)
            raise


def _check_type(source: ParquetSource, column: str, role: str, *, nested: bool) -> None:
    kind = source.schema.field(column).type
    if nested:
        fits = not pt.is_nested(kind) and not isinstance(kind, pa.BaseExtensionType)
        expected = "one key per row"
    else:
        fits = pt.is_integer(kind) or pt.is_floating(kind) or pt.is_temporal(kind)
        expected = "numbers or timestamps"
    if not fits:
        raise DataError(f"{source.name}: {role} column {column!r} holds {kind}; expected {expected}")


def _numbers(rows: Rows, name: str) -> torch.Tensor:
    column = rows.table.column(name)
    if not (pt.is_integer(column.type) or pt.is_floating(column.type) or pt.is_boolean(column.type)):
        raise DataError(f"{rows.origins[0][1]}: column {name!r} holds {column.type}, not a number per row")
    if column.null_count:
        where, row = rows.origin_of(int(np.flatnonzero(pc.is_null(column).to_numpy())[0]))
        raise DataError(f"{where}: column {name!r} is null in row {row:,}; drop or fill such rows")
    return torch.from_numpy(np.array(column.to_numpy()))


@dataclass(frozen=True)
class _Last:
    """Where a run of rows ended: the file and the next row of it, its last session and time."""

    where: str
    row: int
    session: pa.Scalar
    time: Any


def _check_order(rows: Rows, session: str, time: str | None, before: _Last | None) -> _Last | None:
    """Check that no session starts twice among consecutive rows of a file, and that time goes on within one."""
    for table, where, first in _consecutive(rows):
        follows = before is not None and (before.where, before.row) == (where, first)
        before = _check_run(table, where, first, session, time, before if follows else None)
    return before


def _consecutive(rows: Rows) -> Iterator[tuple[pa.Table, str, int]]:
    """Runs of rows that follow each other in a file, whatever row groups they are of."""
    waiting: tuple[pa.Table, str, int] | None = None
    for table, where, row in rows.runs():
        if waiting is not None and waiting[1] == where and waiting[2] + waiting[0].num_rows == row:
            waiting = (pa.concat_tables([waiting[0], table]), where, waiting[2])
            continue
        if waiting is not None:
            yield waiting
        waiting = (table, where, row)
    if waiting is not None:
        yield waiting


def _check_run(table: pa.Table, where: str, first: int, session: str, time: str | None, before: _Last | None) -> _Last:
    flat = _whole_column(table, session, f"{where}: session column", first)
    codes = flat.dictionary_encode().indices.to_numpy()
    starts = np.flatnonzero(np.diff(codes, prepend=-1))
    _, known = np.unique(codes[starts], return_index=True)
    if known.size < starts.size:
        row = int(starts[int(np.setdiff1d(np.arange(starts.size), known)[0])])
        raise DataError(
            f"{where}: session {_shown(flat[row])} of column {session!r} starts again in row {first + row:,};"
            " cluster the data with 'flexshard cluster-sessions'"
        )
    last = None
    if time is not None:
        column = _whole_column(table, time, f"{where}: time column", first)
        if pt.is_temporal(column.type):
            column = column.cast(pa.int32() if column.type.bit_width == 32 else pa.int64())
        times = column.to_numpy(zero_copy_only=False)
        back = np.flatnonzero((times[1:] < times[:-1]) & (codes[1:] == codes[:-1])) + 1
        if before is not None and before.session.equals(flat[0]) and times[0] < before.time:
            back = np.concatenate([[0], back])
        if back.size:
            row = int(back[0])
            raise DataError(
                f"{where}: column {time!r} goes back in row {first + row:,}, within session {_shown(flat[row])};"
                " cluster the data with 'flexshard cluster-sessions'"
            )
        last = times[-1]
    return _Last(where, first + table.num_rows, flat[len(flat) - 1], last)


def _whole_column(table: pa.Table, name: str, what: str, first: int) -> pa.Array:
    flat = one_array(table.column(name))
    if flat.null_count:
        row = first + int(np.flatnonzero(pc.is_null(flat).to_numpy(zero_copy_only=False))[0])
        raise DataError(f"{what} {name!r} is null in row {row:,}; drop or fill such rows")
    return flat.dictionary_decode() if pt.is_dictionary(flat.type) else flat


def _shown(key: pa.Scalar) -> str:
    try:
        return repr(key.as_py())
    except (ValueError, TypeError):  # nanoseconds, which Python's own times do not have
        return str(key.cast(pa.string()).as_py())
