"""Parquet in, deduplicated batches out: RecD's reader and its three phases (RecD paper, sections 2.1, 4.2 and 6.3).

A batch is a function of (dataset, seed, epoch, position), so that ranks, workers and restarts agree without talking.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import get_worker_info

from flexshard._internal import check_bytes, check_int, expand
from flexshard.embeddings import InverseKeyedJaggedTensor
from flexshard.errors import ChangedDataError, DataError
from flexshard.ingestion.batch import BatchPosition, SessionBatch
from flexshard.ingestion.batches import BatchRows
from flexshard.ingestion.conversion import BatchMaker
from flexshard.ingestion.loading import BatchDataset
from flexshard.ingestion.order import EpochOrder, OrderSettings
from flexshard.ingestion.reader_arguments import check_arguments, checked_groups, checked_shuffle
from flexshard.ingestion.reader_state import ReaderPlace, checked_state
from flexshard.ingestion.reading_ahead import read_ahead
from flexshard.ingestion.session_starts import scanned_sessions
from flexshard.ingestion.splits import Split, splits_of
from flexshard.ingestion.stored_rows import StoredRows

__all__ = ["SessionReader"]

PathLike = str | os.PathLike[str]
_WINDOW_BYTES, _WINDOW_ROWS, _SPLIT_BYTES = 128 << 20, 1 << 18, 64 << 20


class SessionReader(BatchDataset):
    """Batches of a Parquet dataset for a DataLoader (:meth:`loader`), or for a plain loop.

    Which rows a batch holds depends on the dataset, the seed and the epoch alone, not on processes: every rank gets as
    many batches as the others, any number of DataLoader workers gives them in the same order, and a checkpoint of one
    number of ranks and workers goes on with another, with no sample lost or read twice.

    Without ``shuffle``, one lane follows the order of the files. Splits are ranges of rows; a range within a row group
    takes decoding what is before it there.
    """

    def __init__(
        self,
        paths: PathLike | Sequence[PathLike],
        *,
        batch_size: int,
        features: Sequence[str],
        groups: Sequence[Sequence[str]] = (),
        partial: Sequence[Sequence[str]] = (),
        newest: str = "last",
        max_shift: int = 16,
        dense: Sequence[str] = (),
        weights: Mapping[str, str] | None = None,
        transform: Callable[[InverseKeyedJaggedTensor], InverseKeyedJaggedTensor] | None = None,
        preprocess: Sequence[Callable[[SessionBatch], SessionBatch]] = (),
        session: str | None = None,
        time: str | None = None,
        whole_sessions: bool = False,
        rank: int = 0,
        world_size: int = 1,
        lanes: int | None = None,
        drop_last: bool = False,
        pad_last: bool = False,
        shuffle: bool | str = False,
        shuffle_window: int | None = None,
        seed: int = 0,
        prefetch: int = 0,
        dense_nulls: str = "raise",
        read_gap: str | float | None = None,
    ) -> None:
        """Read some columns.

        Args:
            paths: files, globs, folders or URLs.
            batch_size: B, of each rank.
            features: columns of ids or of lists of ids. Here and below, ``map/key`` is a key of a column of maps.
            groups: of features to deduplicate together (``dedup_sparse_features`` in the paper).
            partial, newest, max_shift: of features whose lists grow or shift within a session, and how, as of
                :meth:`InverseKeyedJaggedTensor.from_keyed_jagged`.
            dense: columns of a number per row, such as labels, or of lists of as many numbers in every row.
            weights: column with the weights of a feature, by feature.
            transform: of the features, such as :class:`DedupedTransform`.
            preprocess: of whole batches, one after the other: dense columns, and features that are derived from others,
                such as :class:`Normalize`, :class:`Cross`, :class:`Bucketize`.
            session, time: check that every session is in one piece and in order of time, as clustering leaves them.
                Takes a scan of these columns when the reader is made, and 8 bytes per session.
            whole_sessions: no batch starts or ends within a session: batches have at most B samples, but for a session
                of more, which is a batch of its own.
            rank, world_size: of the job that reads together.
            lanes: stretches of the data that are read side by side, by default one per rank. Batches come from each
                in turn; with a multiple of ranks times workers, every process decodes only what it returns.
            drop_last: leave out the last samples, where they are fewer than B for every rank. By default these are
                divided among the ranks, evenly; a rank for which there is none reads the epoch's first sample again.
            pad_last: fill the last batches up to B with the epoch's first samples.
            shuffle: ``"samples"``, or ``"sessions"`` whose samples stay in order, and together but where a window or a
                batch ends (not even there with ``whole_sessions``); True is the latter where ``session`` is given.
                Row groups come in a random order, and what falls into a window is shuffled.
                Another order after each :meth:`set_epoch`.
            shuffle_window: rows that are shuffled together, which have to fit in memory, once per lane of a process
                and once more; by default those that unpack to 128 MiB, at most 262,144.
            seed: of that order.
            prefetch: batches that a thread makes ahead.
            dense_nulls: what nulls in dense columns are: ``"raise"``, or ``"nan"`` in columns of floats.
            read_gap: bytes such as "1MiB" between two columns up to which one read takes both; by default 8 KiB of
                local files, and 1 MiB of others.

        Raises:
            DataError: a column that is missing or of another type in some file; sessions in pieces or out of order;
                ranks that are none; arguments that contradict each other.
        """
        super().__init__()
        self.batch_size = check_int(batch_size, "batch_size", DataError)
        self.features, self.dense = list(features), list(dense)
        self.weights = dict(weights or {})
        self.transform, self.preprocess = transform, list(preprocess)
        self.session, self.time = session, time
        self.world_size = check_int(world_size, "world_size", DataError)
        self.rank = check_int(rank, "rank", DataError, least=0)
        if self.rank >= self.world_size:
            raise DataError(f"there are ranks 0 to {self.world_size - 1}, found {self.rank}")
        self.seed = check_int(seed, "seed", DataError, least=0)
        self.drop_last, self.pad_last, self.whole_sessions = drop_last, pad_last, whole_sessions
        self.prefetch = check_int(prefetch, "prefetch", DataError, least=0)
        self.dense_nulls = dense_nulls
        check_arguments(
            self.features,
            dense_nulls=dense_nulls,
            session=session,
            time=time,
            whole_sessions=whole_sessions,
            drop_last=drop_last,
            pad_last=pad_last,
        )
        self.groups, self.partial = checked_groups(self.features, groups, partial, newest, max_shift, self.weights)
        self._sharing = {"partial": self.partial, "newest": newest, "max_shift": max_shift}
        some = bool(self.groups or self.partial)
        self.shuffle = checked_shuffle(shuffle, session=session, groups=some, whole_sessions=whole_sessions)
        lanes_used = self.world_size if lanes is None else check_int(lanes, "lanes", DataError)
        self._given = {"lanes": lanes is not None, "shuffle_window": shuffle_window is not None}
        columns = list(dict.fromkeys([*self.features, *self.weights.values(), *self.dense]))
        gap = None if read_gap is None else check_bytes(read_gap, "read_gap", DataError, least=0)
        self._stored = StoredRows(expand(paths), columns, gap=gap)
        self._sessions = None if session is None else scanned_sessions(self._stored, session, time)
        window = (
            max(self.batch_size, min(_WINDOW_ROWS, int(_WINDOW_BYTES / max(1.0, self._stored.row_bytes))))
            if shuffle_window is None
            else check_int(shuffle_window, "shuffle_window", DataError)
        )
        self._place = ReaderPlace(lanes_used, window)
        self._last: BatchPosition | None = None
        self._orders: dict[tuple[int, int, int], EpochOrder] = {}
        self._split_rows: tuple[EpochOrder, BatchRows] | None = None
        self._worker: dict[str, int] = {}  # where a DataLoader's worker is
        self._own_order: tuple[int, int] | None = None  # lanes and window of the state that a worker loaded
        self._resumed: dict[str, int] | None = None  # where it goes on

    # Where it is.

    def set_epoch(self, epoch: int) -> None:
        """Shuffle otherwise from now on, as DistributedSampler's; the epoch of a loaded state is gone on with."""
        if check_int(epoch, "epoch", DataError, least=0) != self.epoch:
            self._last = None
        self._place.set_epoch(epoch)

    @property
    def epoch(self) -> int:
        """That is read, or is read next."""
        return self._place.epoch

    @property
    def lanes(self) -> int:
        """Stretches that are read side by side; those of a loaded state, where none were asked for."""
        return self._place.lanes

    @property
    def shuffle_window(self) -> int:
        """Rows that are shuffled together; those of a loaded state, where none were asked for."""
        return self._place.window

    def __len__(self) -> int:
        """Batches of this rank in an epoch."""
        return self._order(self.epoch).steps(self.world_size, drop_last=self.drop_last)

    @property
    def progress(self) -> float:
        """Share of the epoch that was read when this process's last batch was returned."""
        if self._last is None:
            return 0.0
        return self._last.consumed / max(1, self._order(self._last.epoch).num_batches)

    def state_dict(self, batch: SessionBatch | None = None) -> dict[str, Any]:
        """Where reading goes on: plain numbers and texts, the same for every rank.

        Args:
            batch: the last one that was trained. By default the last that this reader returned, which is another
                one where a pipeline reads ahead.

        Raises:
            DataError: a DataLoader's workers read, of which this process knows nothing: name the batch.
        """
        if batch is None and self._place.is_read_by_workers and get_worker_info() is None:
            raise DataError(
                "the DataLoader's workers read, and this process does not know how far; give the batch that was"
                " trained last, or use torchdata's StatefulDataLoader"
            )
        position = self._last if batch is None else batch.position
        if position is None:
            position = BatchPosition(self.epoch, consumed=self._place.first)
        state = {"epoch": position.epoch, "batches": position.consumed, **self._identity()}
        state["finished"] = self._is_over(position.epoch, position.consumed)
        return state | ({"worker": dict(self._worker)} if self._worker else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the batches of a state, of which the next pass reads the rest.

        Raises:
            DataError: a state of other files, batches or order; names what differs.
        """
        own = self._identity()
        if isinstance(state, dict):  # what was not asked for is as it was
            own |= {name: state.get(name, own[name]) for name, given in self._given.items() if not given}
        epoch, consumed = checked_state(state, own)
        lanes = check_int(own["lanes"], "the state's lanes", DataError)
        window = check_int(own["shuffle_window"], "the state's shuffle window", DataError) if self.shuffle else 1
        if consumed > (batches := self._order(epoch, lanes, window).num_batches):
            raise DataError(f"the reader's state is after {consumed:,} batches of {batches:,}")
        if get_worker_info() is None:
            self._place.order_by(lanes, window if self.shuffle else self.shuffle_window)
            self._place.set(epoch, consumed, unfinished=not state.get("finished", True))
            self._last = None
        else:  # of a DataLoader that keeps its workers' states, each of which loads its own
            self._own_order = lanes, window
            self._worker = dict(state.get("worker", {}))
            self._resumed = {"epoch": epoch, "first": consumed, **self._worker}
            self._last = BatchPosition(epoch, consumed=consumed)

    def _identity(self) -> dict[str, Any]:
        """What a state has to agree with, to mean the same batches."""
        lanes, window = self._own_order or (self.lanes, self.shuffle_window)
        return {
            "format": 1,
            "rows": self._stored.num_rows,
            "dataset": self._stored.fingerprint,
            "batch_size": self.batch_size,
            "lanes": lanes,
            "shuffle": self.shuffle,
            "seed": self.seed if self.shuffle else None,
            "shuffle_window": window if self.shuffle else None,
            "whole_sessions": self.whole_sessions,
        }

    # What it reads.

    def __iter__(self) -> Iterator[SessionBatch]:
        """Batches, in order.

        Raises:
            DataError: values that cannot be used, or files that changed; names file, row and column.
        """
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        resumed = self._resumed
        epoch, first, next_step = self._begun(number, workers)
        order = self._order(epoch)
        # From here on, states are of this pass, also before its first batch.
        if worker is not None:
            self._worker = {"epoch": epoch, "first": first, "next": next_step, "of": workers}
        if resumed is None or self._last is None:
            self._last = BatchPosition(epoch, consumed=first)
        steps = range(next_step, order.steps(self.world_size, drop_last=self.drop_last, consumed=first), workers)
        return self._batches(self._read(order, epoch, first, steps), worker is not None)

    def _batches(self, steps: Iterator[tuple[int, SessionBatch]], in_worker: bool) -> Iterator[SessionBatch]:
        for following, batch in read_ahead(steps, self.prefetch) if self.prefetch else steps:
            self._last = batch.position
            if in_worker:
                self._worker["next"] = following
            yield batch

    def _read(self, order: EpochOrder, epoch: int, first: int, steps: range) -> Iterator[tuple[int, SessionBatch]]:
        """Batches of some steps, and which step comes after each."""
        shared = math.gcd(order.settings.lanes, self.world_size * steps.step)
        rows = BatchRows(self._stored, order, lanes=order.settings.lanes // shared)
        for step in steps:
            consumed = first + step * self.world_size
            yield step + steps.step, self._step(rows, order, epoch, consumed, self.rank, self.world_size)

    def begin_pass(self) -> tuple[int, int]:
        """Epoch of the pass that begins, and how many of its batches, of all ranks, were read before."""
        epoch, first, _ = self._begun(0, 1)
        self._last = BatchPosition(epoch, consumed=first)
        return epoch, first

    def splits(self, epoch: int, consumed: int) -> list[Split]:
        """This rank's steps after ``consumed`` batches of an epoch, in stretches that any process may read."""
        return splits_of(
            self._order(epoch),
            epoch,
            consumed,
            self.rank,
            self.world_size,
            drop_last=self.drop_last,
            batches=self.split_batches,
            dataset=self._stored.fingerprint,
        )

    def read_split(
        self, split: Split, on_error: Callable[[DataError, BatchPosition], None] | None = None
    ) -> Iterator[SessionBatch]:
        """Batches of a split, whichever rank's.

        Args:
            split: of :meth:`splits` of a reader of the same dataset and arguments.
            on_error: takes what is wrong with a batch that cannot be read, and its position, instead of raising it.

        Raises:
            DataError: as iteration; files that changed in any case.
        """
        if split.dataset != self._stored.fingerprint:
            raise ChangedDataError("the job's files are others than when it began; start again, on files that stay")
        order = self._order(split.epoch, split.lanes, split.window)
        if self._split_rows is None or self._split_rows[0] is not order:
            self._split_rows = order, BatchRows(self._stored, order, lanes=1)
        rows = self._split_rows[1]  # the same one, which reads on in a row group of which an earlier split was
        for step in split.steps:
            consumed = split.consumed + step * split.world_size
            try:
                batch = self._step(rows, order, split.epoch, consumed, split.rank, split.world_size)
            except DataError as error:
                if on_error is None or isinstance(error, ChangedDataError):
                    raise
                on_error(error, self._position(order, split.epoch, consumed, split.rank, split.world_size))
            else:
                yield batch

    @property
    def split_batches(self) -> int:
        """Batches of a split: those of a window, or of about a row group, of at most 64 MiB."""
        if self.shuffle:
            return max(1, self.shuffle_window // self.batch_size)
        groups = max(1, self._stored.group_starts.size - 1)
        rows = min(self._stored.num_rows / groups, _SPLIT_BYTES / max(1.0, self._stored.row_bytes))
        return max(1, round(rows / self.batch_size))

    def _step(
        self, rows: BatchRows, order: EpochOrder, epoch: int, consumed: int, rank: int, world_size: int
    ) -> SessionBatch:
        """A rank's batch after so many of the epoch."""
        share = order.share(consumed, rank, world_size, pad_last=self.pad_last)
        position = self._position(order, epoch, consumed, rank, world_size, share.repeated)
        what = (self.features, self.groups, self._sharing, self.weights, self.dense, self.dense_nulls == "nan")
        return BatchMaker(*what, self.transform, self.preprocess)(rows.read(share.ranges), position)

    @staticmethod
    def _position(
        order: EpochOrder, epoch: int, consumed: int, rank: int, world_size: int, repeated: int = 0
    ) -> BatchPosition:
        return BatchPosition(epoch, consumed + rank, min(order.num_batches, consumed + world_size), repeated)

    def _begun(self, number: int, workers: int) -> tuple[int, int, int]:
        """Epoch of a pass that begins, batches that it leaves out, and the step of this worker that comes first."""
        epoch, first, resumed = self._place.epoch, self._place.begin(), self._resumed
        self._resumed = None
        if resumed is None or (self._place.is_named and resumed["epoch"] != epoch):
            self._own_order = None if resumed is None else self._own_order
            return epoch, self._first_of(epoch, first), number
        if resumed.get("of", workers) != workers:
            raise DataError(
                f"this state of a DataLoader is of {resumed['of']} workers, there are {workers}; for another number"
                " of workers, keep the reader's own state_dict(batch)"
            )
        return resumed["epoch"], resumed["first"], resumed.get("next", number)

    def _first_of(self, epoch: int, first: int) -> int:
        """Batches that a pass leaves out: none, where the pass before was over and no epoch was named."""
        goes_on = self._place.is_named or self._place.is_unfinished or not self._is_over(epoch, first)
        return first if goes_on else 0

    def _is_over(self, epoch: int, consumed: int) -> bool:
        return not self._order(epoch).steps(self.world_size, drop_last=self.drop_last, consumed=consumed)

    def _order(self, epoch: int, lanes: int | None = None, window: int | None = None) -> EpochOrder:
        """Of an epoch; the last one is kept."""
        own = self._own_order or (self.lanes, self.shuffle_window)
        key = (epoch if self.shuffle else 0, lanes or own[0], (window or own[1]) if self.shuffle else 1)
        if key not in self._orders:
            rows, groups = self._stored.num_rows, self._stored.group_starts[:-1]
            how = (key[1], self.shuffle, key[2], groups, self._sessions, self.whole_sessions)
            settings = OrderSettings(rows, self.batch_size, *how)
            self._orders = {key: EpochOrder(settings, self.seed, key[0])}
        return self._orders[key]
