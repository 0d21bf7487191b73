"""The same batches whoever reads: ranks, workers and restarts, beside torch's and torchdata's own loaders."""

from __future__ import annotations

import copy
import os
import pickle
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("torchrec")
import torch
from torch.utils.data import DataLoader, DistributedSampler

from flexshard.errors import DataError
from flexshard.ingestion import SessionBatch, SessionReader
from tests.slow import first

ROWS = 1037
SETTINGS: list[dict[str, Any]] = [
    {},
    {"lanes": 6},
    {"shuffle": True, "session": "session", "shuffle_window": 100},
    {"shuffle": "samples", "lanes": 4, "shuffle_window": 130},
    {"shuffle": "sessions", "session": "session", "time": "time", "whole_sessions": True, "lanes": 3},
    {"session": "session", "whole_sessions": True},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows that say their own number, in three files of uneven row groups."""
    path = tmp_path_factory.mktemp("rows")
    generator = np.random.default_rng(0)
    session = np.repeat(np.arange(ROWS), generator.integers(1, 8, ROWS))[:ROWS]
    table = pa.table(
        {
            "row": np.arange(ROWS),
            "session": session,
            "time": np.arange(ROWS) % 7 + session * 10,
            "ids": [[row, row + 1] for row in range(ROWS)],
        }
    )
    table = table.set_column(2, "time", pa.array(np.arange(ROWS)))
    for number, (start, stop, group) in enumerate([(0, 300, 64), (300, 700, 400), (700, ROWS, 50)]):
        pq.write_table(table.slice(start, stop - start), path / f"part-{number}.parquet", row_group_size=group)
    return path


def reader_of(folder: Path, **how: Any) -> SessionReader:
    return SessionReader(folder, **({"batch_size": 16, "features": ["ids"], "dense": ["row"], "seed": 5} | how))


def rows_of(batch: SessionBatch) -> list[int]:
    rows = batch.dense["row"]
    assert batch.sparse_features["ids"].values().tolist() == torch.stack([rows, rows + 1], 1).reshape(-1).tolist()
    return rows.tolist()


def new_rows(batch: SessionBatch) -> list[int]:
    found = rows_of(batch)
    return found[: len(found) - batch.position.repeated]


@pytest.mark.parametrize("how", SETTINGS)
@pytest.mark.parametrize("world", [1, 3, 8])
def test_ranks_have_as_many_batches_and_every_row_once(folder: Path, how: dict[str, Any], world: int) -> None:
    readers = [reader_of(folder, rank=rank, world_size=world, **how) for rank in range(world)]
    batches = [list(reader) for reader in readers]
    assert {len(found) for found in batches} == {len(readers[0])}
    assert sorted(row for found in batches for batch in found for row in new_rows(batch)) == list(range(ROWS))
    assert readers[0].progress == 1.0


def test_the_last_samples_are_divided_dropped_or_padded(folder: Path) -> None:
    def sizes(**how: Any) -> list[list[int]]:
        readers = [reader_of(folder, rank=rank, world_size=8, **how) for rank in range(8)]
        return [[batch.features.stride() for batch in reader] for reader in readers]

    left = ROWS - 8 * 16 * 8
    assert [found[-1] for found in sizes()] == [left * (r + 1) // 8 - left * r // 8 for r in range(8)]
    assert sizes(drop_last=True) == [[16] * 8] * 8
    assert sizes(pad_last=True) == [[16] * 9] * 8
    first = next(iter(reader_of(folder)))
    padded = [list(reader_of(folder, rank=rank, world_size=8, pad_last=True))[-1] for rank in range(8)]
    assert sum(batch.position.repeated for batch in padded) == 8 * 16 - left
    again = [row for batch in padded for row in rows_of(batch)[16 - batch.position.repeated :]]
    assert again[:16] == rows_of(first)


@pytest.mark.parametrize("how", [{}, {"shuffle": "samples", "seed": 1}])
def test_what_more_ranks_drop_of_an_epoch_is_no_reason_to_read_it_again(folder: Path, how: dict[str, Any]) -> None:
    reader, done = reader_of(folder, drop_last=True, **how), ROWS // 16 - 2
    reader.set_epoch(3)
    batches = iter(reader)
    state = reader.state_dict([next(batches) for _ in range(done)][-1])
    assert not state["finished"]
    for world, left in ((8, 0), (2, 1), (1, 2)):
        for rank in range(world):
            other = reader_of(folder, rank=rank, world_size=world, drop_last=True, **how)
            other.load_state_dict(state)
            assert len(list(other)) == left
            assert len(list(other)) == ROWS // 16 // world  # another pass
    last = list(batches)[-1]
    assert reader.state_dict(last)["finished"]
    again = reader_of(folder, drop_last=True, **how)
    again.load_state_dict(reader.state_dict(last))
    assert len(list(again)) == ROWS // 16


def test_as_many_samples_as_torchs_distributed_sampler(folder: Path) -> None:
    for drop in (False, True):
        theirs = [len(DistributedSampler(range(ROWS), 8, rank, drop_last=drop)) for rank in range(8)]  # type: ignore[arg-type]
        for rank in range(8):
            ours = reader_of(folder, batch_size=1, rank=rank, world_size=8, drop_last=drop, pad_last=not drop)
            assert len(ours) == theirs[rank] == sum(1 for _ in ours)


@pytest.mark.parametrize("how", SETTINGS)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_give_the_same_batches_in_the_same_order(folder: Path, how: dict[str, Any], workers: int) -> None:
    expected = [rows_of(batch) for batch in reader_of(folder, rank=1, world_size=2, **how)]
    reader = reader_of(folder, rank=1, world_size=2, prefetch=2, **how)
    loader = DataLoader(reader, batch_size=None, num_workers=workers)
    assert len(loader) == len(expected)
    assert [rows_of(batch) for batch in loader] == expected
    with pytest.raises(DataError, match="give the batch that was trained last"):
        reader.state_dict()


@pytest.mark.parametrize("how", SETTINGS)
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 3), (3, 1), (1, 8)])
def test_a_checkpoint_goes_on_with_other_ranks(folder: Path, how: dict[str, Any], before: int, after: int) -> None:
    seen: list[int] = []
    states = []
    for rank in range(before):
        reader = reader_of(folder, rank=rank, world_size=before, **(how | {"lanes": 4, "prefetch": 3}))
        reader.set_epoch(2)
        for step, batch in enumerate(reader):
            seen += new_rows(batch)
            if step == 6:  # others were made ahead, and are made again
                states.append(reader.state_dict())
                assert reader.state_dict(batch) == states[-1]
                break
    assert all(state == states[0] for state in states)
    for rank in range(after):
        reader = reader_of(folder, rank=rank, world_size=after, **{k: v for k, v in how.items() if k != "lanes"})
        reader.load_state_dict(states[0])
        assert (reader.epoch, reader.lanes) == (2, 4)
        loader = DataLoader(reader, batch_size=None, num_workers=rank % 3)
        seen += [row for batch in loader for row in new_rows(batch)]
    assert sorted(seen) == list(range(ROWS))


def test_a_state_after_a_batch_of_a_workers(folder: Path) -> None:
    reader = reader_of(folder, shuffle="samples")
    whole = [rows_of(batch) for batch in reader]
    loader = iter(DataLoader(reader, batch_size=None, num_workers=2, prefetch_factor=4))
    for _ in range(9):
        batch = next(loader)
    state = reader.state_dict(batch)
    other = reader_of(folder, shuffle="samples")
    other.load_state_dict(state)
    assert [rows_of(batch) for batch in other] == whole[9:]


def test_passes_after_a_loaded_state_are_whole(folder: Path) -> None:
    """What is left of an epoch is read once; one that was over is not dropped, nor read twice where it is named."""
    reader = reader_of(folder)
    batches = list(reader)
    middle, end = reader.state_dict(batches[4]), reader.state_dict(batches[-1])
    for workers in (0, 2):
        other = reader_of(folder)
        other.load_state_dict(middle)
        loader = DataLoader(other, batch_size=None, num_workers=workers)
        counts = [sum(1 for _ in loader) for _ in range(3)]
        assert counts == [len(batches) - 5, len(batches), len(batches)]
        other.load_state_dict(end)
        assert sum(1 for _ in loader) == len(batches)
        other.load_state_dict(end)
        other.set_epoch(0)
        assert sum(1 for _ in loader) == 0
        other.set_epoch(1)
        assert sum(1 for _ in loader) == len(batches)
        other.load_state_dict(middle)
        other.set_epoch(1)  # another epoch than that of the state
        assert sum(1 for _ in loader) == len(batches)
    stays = DataLoader(reader, batch_size=None, num_workers=2, persistent_workers=True)
    reader.load_state_dict(middle)
    assert [sum(1 for _ in stays) for _ in range(2)] == [len(batches) - 5, len(batches)]
    reader.load_state_dict(middle)
    assert sum(1 for _ in stays) == len(batches) - 5


class Plain(torch.utils.data.IterableDataset[int]):
    """A stateful dataset as torchdata's users write it."""

    def __init__(self, batches: int) -> None:
        self.batches, self.next = batches, 0

    def __iter__(self) -> Iterator[int]:
        worker = torch.utils.data.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for number in range(max(first, self.next), self.batches, step):
            self.next = number + step
            yield number
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("stop", [0, 1, 5, 13])
def test_in_torchdatas_stateful_loader(folder: Path, workers: int, stop: int) -> None:
    """The same loop over their dataset and ours: read some, save, go on elsewhere, and once more from the start."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    count = len(reader_of(folder))

    def counts(make: Callable[[], Any], number: Callable[[Any], int]) -> list[list[int]]:
        loader = stateful(make(), batch_size=None, num_workers=workers)
        first, found = iter(loader), []
        found += [number(next(first)) for _ in range(stop)]
        state = loader.state_dict()
        again = stateful(make(), batch_size=None, num_workers=workers)
        again.load_state_dict(state)
        return [found, [number(item) for item in again], [number(item) for item in again]]

    theirs = counts(lambda: Plain(count), int)
    ours = counts(lambda: reader_of(folder), lambda batch: batch.position.number)
    assert ours == theirs
    assert ours[0] + ours[1] == ours[2] == list(range(count))


def test_a_stateful_loader_with_epochs_and_another_number_of_workers(folder: Path) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    reader = reader_of(folder, shuffle="samples")
    reader.set_epoch(4)
    whole = [rows_of(batch) for batch in reader]
    loader = stateful(reader, batch_size=None, num_workers=2)
    found = iter(loader)
    for _ in range(7):
        next(found)
    state = loader.state_dict()
    for name in (True, False):
        other = reader_of(folder, shuffle="samples")
        again = stateful(other, batch_size=None, num_workers=2)
        again.load_state_dict(state)
        if name:
            other.set_epoch(4)
        assert [rows_of(batch) for batch in again] == whole[7:]


def test_states_of_something_else_are_refused(folder: Path, tmp_path: Path) -> None:
    reader = reader_of(folder, shuffle="samples")
    state = reader.state_dict()
    for changed, message in (
        ({"seed": 6}, r"the reader's state is of seed 5, this reader has 6; go on with"),
        ({"batch_size": 8}, "of batch size 16, this reader has 8"),
        ({"shuffle": False}, "of shuffle 'samples', this reader has None"),
        ({"lanes": 2}, "of lanes 1, this reader has 2"),
        ({"shuffle_window": 7}, "of shuffle window .* this reader has 7"),
    ):
        with pytest.raises(DataError, match=message):
            reader_of(folder, **({"shuffle": "samples"} | changed)).load_state_dict(state)
    for bad, message in (
        ({}, "has no 'epoch'"),
        (3, "what state_dict\\(\\) returned, found int"),
        (state | {"batches": 900}, "after 900 batches of 65"),
        (state | {"batches": -1}, "number of batches must be at least 0"),
    ):
        with pytest.raises(DataError, match=message):
            reader.load_state_dict(bad)  # type: ignore[arg-type]
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    reader_of(copy, shuffle="samples").load_state_dict(state)  # the same files elsewhere
    (copy / "part-2.parquet").unlink()
    with pytest.raises(DataError, match="the reader's state is of rows 1037, this reader has 700"):
        reader_of(copy, shuffle="samples").load_state_dict(state)
    table = pq.read_table(folder / "part-2.parquet")
    pq.write_table(table.set_column(0, "row", pa.array(np.arange(ROWS - 700))), copy / "part-2.parquet")
    with pytest.raises(DataError, match="the reader's state is of other files"):
        reader_of(copy, shuffle="samples").load_state_dict(state)


def test_files_that_change_are_named_and_never_mixed_in(folder: Path, tmp_path: Path) -> None:
    def after_some(change: Callable[[Path], object], message: str, **how: Any) -> None:
        copy = tmp_path / "changing"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy)
        reader = iter(reader_of(copy, **how))
        seen = [rows_of(next(reader)) for _ in range(3)]
        change(copy / "part-2.parquet")
        with pytest.raises(DataError, match=rf"part-2\.parquet: {message}"):
            seen += [rows_of(batch) for batch in reader]
        if not how:
            assert [row for rows in seen for row in rows] == list(range(sum(len(rows) for rows in seen)))

    def rewrite(path: Path) -> None:
        pq.write_table(pq.read_table(path).slice(0, 100), path)

    def truncate(path: Path) -> None:
        path.write_bytes(path.read_bytes()[:500])

    def replace_and_keep_times(path: Path) -> None:
        times, other = path.stat(), path.with_suffix(".other")
        shutil.copyfile(path, other)
        other.replace(path)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    for how in ({}, {"shuffle": "samples", "shuffle_window": 64}):
        after_some(replace_and_keep_times, "has changed since reading began", **how)
        after_some(Path.unlink, "is no longer there; put it back", **how)
        after_some(rewrite, "has changed since reading began; start again", **how)
        after_some(truncate, "has changed since reading began", **how)


def test_sessions_are_checked_across_the_whole_dataset(folder: Path, tmp_path: Path) -> None:
    table = pa.concat_tables([pq.read_table(path) for path in sorted(folder.glob("*.parquet"))])

    def fails(column: str, change: Callable[[np.ndarray], None], message: str) -> None:
        values = table[column].to_numpy().copy()
        change(values)
        place = table.schema.get_field_index(column)
        pq.write_table(table.set_column(place, column, pa.array(values)), tmp_path / "a.parquet", row_group_size=20)
        with pytest.raises(DataError, match=message):
            reader_of(tmp_path / "a.parquet", session="session", time="time")

    def again(values: np.ndarray) -> None:
        values[900] = values[10]  # far from it: no batch has both

    session = table["session"].to_pylist()
    border = next(row for row in range(16, ROWS, 16) if session[row] == session[row - 1])

    def back(values: np.ndarray) -> None:
        values[border:] -= 500  # between two batches

    fails("session", again, r"a\.parquet: session \d+ of column 'session' starts again in row 900; cluster")
    fails("time", back, rf"a\.parquet: column 'time' goes back in row {border}, within session {session[border]};")


def test_resuming_takes_under_a_second(tmp_path: Path) -> None:
    """In the middle of a million rows, of one row group, shuffled or not."""
    rows = 1_000_000
    pq.write_table(pa.table({"ids": np.arange(rows) % 1000, "row": np.arange(rows)}), tmp_path / "a.parquet")
    for how in ({}, {"shuffle": "samples"}):
        reader = SessionReader(tmp_path, batch_size=1000, features=["ids"], dense=["row"], **how)  # type: ignore[arg-type]
        state = reader.state_dict() | {"batches": 500}
        other = SessionReader(tmp_path, batch_size=1000, features=["ids"], dense=["row"], **how)  # type: ignore[arg-type]
        start = time.perf_counter()
        other.load_state_dict(state)
        batch = next(iter(other))
        assert time.perf_counter() - start < 5.0  # 0.05 by itself; machines that run tests are busy
        assert batch.position.number == 500


def test_a_window_is_all_that_is_held(tmp_path: Path) -> None:
    rows = 400_000
    pq.write_table(
        pa.table({"ids": np.arange(rows), "row": np.arange(rows)}), tmp_path / "a.parquet", row_group_size=5000
    )
    reader = SessionReader(
        tmp_path, batch_size=500, features=["ids"], dense=["row"], shuffle="samples", shuffle_window=10_000
    )
    before = pa.total_allocated_bytes()
    most, seen = 0, []
    for batch in reader:
        most = max(most, pa.total_allocated_bytes() - before)
        seen.append(batch.dense["row"])
        seen[-1] = seen[-1].clone()
    assert most < 4 * 10_000 * 16  # a window, twice while it is made, and two row groups
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(rows))


def test_dense_columns_of_lists(tmp_path: Path) -> None:
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(12, dtype=np.float32)), 3)
    table = pa.table({"ids": [[1], [2], [3], [4]], "fixed": fixed, "list": [[1.5, 2], [3, 4], [5, 6], [7, 8]]})
    pq.write_table(table, tmp_path / "a.parquet")

    def dense(path: Path) -> dict[str, torch.Tensor]:
        return next(iter(SessionReader(path, batch_size=4, features=["ids"], dense=["fixed", "list"]))).dense

    found = dense(tmp_path / "a.parquet")
    assert found["fixed"].tolist() == fixed.to_pylist()
    assert (found["fixed"].dtype, found["list"].tolist()) == (torch.float32, table["list"].to_pylist())
    for rows, message in (
        ([[1.5, 2], [3, 4], [5], [7, 8]], "column 'list' has 1 numbers in row 2, and 2 in others"),
        ([[1.5, 2], None, [5, 6], [7, 8]], "column 'list' is null in row 1"),
        ([[1.5, 2], [3, None], [5, 6], [7, 8]], "column 'list' has a null in row 1"),
        ([["a"], ["b"], ["c"], ["d"]], r"column 'list' holds list<.*string>, not numbers or lists of numbers"),
    ):
        pq.write_table(table.set_column(2, "list", pa.array(rows)), tmp_path / "b.parquet")
        with pytest.raises(DataError, match=rf"b\.parquet: {message}"):
            dense(tmp_path / "b.parquet")


def test_arguments_that_contradict_each_other(folder: Path) -> None:
    for how, message in (
        ({"drop_last": True, "pad_last": True}, "drop_last and pad_last are both true"),
        ({"whole_sessions": True}, "name the session column"),
        ({"shuffle": "sessions"}, "to shuffle sessions, name the session column"),
        ({"shuffle": "rows"}, "shuffle is 'samples', 'sessions', true or false, found 'rows'"),
        ({"shuffle": "samples", "session": "session", "whole_sessions": True}, "leave no whole sessions"),
        ({"shuffle": True, "groups": [["ids"]]}, "name the session column, or say shuffle='samples'"),
        ({"lanes": 0}, "lanes must be at least 1"),
        ({"prefetch": -1}, "prefetch must be at least 0"),
        ({"shuffle_window": 0}, "shuffle_window must be at least 1"),
    ):
        with pytest.raises(DataError, match=message):
            reader_of(folder, **how)


@pytest.mark.parametrize("shuffle", [False, "samples"])
def test_every_row_group_is_decoded_once(folder: Path, shuffle: bool | str) -> None:
    """But for those in which a lane starts; windows that share a row group read on in it."""
    reader = reader_of(folder, batch_size=8, shuffle=shuffle, shuffle_window=32, lanes=4)
    read = sum(batch.phases.bytes_read for batch in reader)
    files = [pq.ParquetFile(path).metadata for path in folder.glob("*.parquet")]
    groups = [file.row_group(number) for file in files for number in range(file.num_row_groups)]
    columns = [group.column(number) for group in groups for number in range(group.num_columns)]
    once = sum(c.total_compressed_size for c in columns if c.path_in_schema.split(".")[0] in ("ids", "row"))
    assert (
        once <= read <= once + 4 * max(sum(group.column(n).total_compressed_size for n in range(4)) for group in groups)
    )


def test_the_last_batch_is_read_on_where_a_chunk_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that make no whole batch, after a chunk of decoded rows that ends with the last whole one."""
    monkeypatch.setattr("flexshard.ingestion.stored_rows._CHUNK_BYTES", 8 << 10)
    pq.write_table(pa.table({"ids": np.arange(10_500)}), tmp_path / "one.parquet")
    batches = list(SessionReader(tmp_path, batch_size=1024, features=["ids"]))
    assert len(batches) == 11
    assert sum(batch.phases.reads for batch in batches) == 1


def stateful_of(folder: Path, workers: int, **how: Any) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    loader = {"batch_size": None, "num_workers": workers, "persistent_workers": how.pop("persistent_workers", False)}
    return module.StatefulDataLoader(reader_of(folder, **how), **loader)


@pytest.mark.parametrize("how", [{"prefetch": 3}, {}, {"shuffle": "samples"}])
@pytest.mark.parametrize("takes", [(5, 0, 1), (4, 1, 3), (0, 2, 0), (7, 1)])
@pytest.mark.parametrize("workers", first(1, [2, 3]))
def test_states_one_after_the_other(folder: Path, how: dict[str, Any], takes: tuple[int, ...], workers: int) -> None:
    """Also of loaders that read ahead, and of those that were resumed and have hardly begun."""
    loader, seen = stateful_of(folder, workers, **how), []
    for take in takes:
        found = iter(loader)
        seen += [row for _ in range(take) for row in rows_of(next(found))]
        state = loader.state_dict()
        loader = stateful_of(folder, workers, **how)
        loader.load_state_dict(state)
    seen += [row for batch in loader for row in rows_of(batch)]
    assert seen == [row for batch in reader_of(folder, **how) for row in rows_of(batch)]


def test_a_state_early_in_a_later_pass_of_workers_that_stay(folder: Path) -> None:
    loader = stateful_of(folder, 2, persistent_workers=True)
    whole = [rows_of(batch) for batch in loader]
    found = iter(loader)
    seen = [rows_of(next(found))]
    other = stateful_of(folder, 2, persistent_workers=True)
    other.load_state_dict(loader.state_dict())
    assert seen + [rows_of(batch) for batch in other] == whole


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_pass_is_one_pass_whoever_began_the_one_before(folder: Path, workers: int) -> None:
    reader = reader_of(folder)
    whole = [rows_of(batch) for batch in reader]
    reader.load_state_dict(reader.state_dict() | {"batches": 5})
    first = DataLoader(reader, batch_size=None, num_workers=workers)
    assert rows_of(next(iter(first))) == whole[5]  # a look at one batch
    assert [rows_of(batch) for batch in DataLoader(reader, batch_size=None, num_workers=3)] == whole


def test_workers_that_stay_take_a_loaded_order_and_copies_their_epoch(folder: Path) -> None:
    readers = [reader_of(folder, rank=rank, world_size=4) for rank in range(4)]
    seen = [row for reader in readers for _, batch in zip(range(2), reader, strict=False) for row in rows_of(batch)]
    other = copy.deepcopy(reader_of(folder))
    loader = DataLoader(other, batch_size=None, num_workers=2, persistent_workers=True)
    assert sum(1 for _ in loader) == len(other)
    other.load_state_dict(readers[0].state_dict())
    assert sorted(seen + [row for batch in loader for row in rows_of(batch)]) == list(range(ROWS))
    shuffled = pickle.loads(pickle.dumps(reader_of(folder, shuffle="samples")))
    loader = DataLoader(shuffled, batch_size=None, num_workers=2, persistent_workers=True)
    orders = []
    for epoch in range(2):
        shuffled.set_epoch(epoch)
        orders.append([rows_of(batch) for batch in loader])
    assert orders[0] != orders[1]


def test_files_that_are_no_data_and_files_given_twice(folder: Path, tmp_path: Path) -> None:
    copied = tmp_path / "_data" / "log"  # what is above the folder says nothing about it
    shutil.copytree(folder, copied)
    for hidden in ("_temporary/0", ".staging"):
        (copied / hidden).mkdir(parents=True)
        shutil.copy(folder / "part-0.parquet", copied / hidden / "part-0.parquet")
    (copied / "_part=1").mkdir()
    shutil.copy(folder / "part-0.parquet", copied / "_part=1" / "part-0.parquet")
    assert sum(len(rows_of(batch)) for batch in reader_of(copied)) == ROWS + 300
    for twice in ([folder, folder / "part-1.parquet"], [folder, folder / ".." / folder.name / "part-1.parquet"]):
        with pytest.raises(DataError, match=r"part-1\.parquet: is given twice"):
            SessionReader(twice, batch_size=4, features=["ids"])


def test_a_batch_may_be_written_to(folder: Path, tmp_path: Path) -> None:
    for number, (start, stop) in enumerate([(0, 6), (6, 9)]):
        table = pa.table({"ids": list(range(start, stop)), "row": list(range(start, stop))})
        pq.write_table(table, tmp_path / f"{number}.parquet")
    for how in ({}, {"pad_last": True}):
        found = []
        for batch in SessionReader(tmp_path, batch_size=4, features=["ids"], dense=["row"], world_size=2, **how):  # type: ignore[arg-type]
            found.append(batch.dense["row"].tolist())
            batch.dense["row"].add_(1000)
        assert max(max(rows) for rows in found) < 1000


def test_whole_sessions_do_not_exceed_a_batch_in_the_last_step(tmp_path: Path) -> None:
    for lengths, size in (([2, 50, 2], 4), ([9, 1, 10, 1, 9], 10), ([3, 3, 3, 3, 3], 4)):
        session = np.repeat(np.arange(len(lengths)), lengths)
        pq.write_table(pa.table({"ids": np.arange(session.size), "row": session}), tmp_path / "a.parquet")
        for world in range(1, 6):
            seen = []
            for rank in range(world):
                reader = SessionReader(
                    tmp_path,
                    batch_size=size,
                    features=["ids"],
                    dense=["row"],
                    session="row",
                    whole_sessions=True,
                    rank=rank,
                    world_size=world,
                )
                for batch in reader:
                    held = batch.dense["row"].tolist()
                    assert len(held) <= size or len(set(held)) == 1
                    seen += held[: len(held) - batch.position.repeated]
            assert sorted(seen) == session.tolist()


def test_the_end_of_an_epoch_whose_rest_is_dropped(folder: Path) -> None:
    reader = reader_of(folder, drop_last=True)
    count = sum(1 for _ in reader)
    other = reader_of(folder, drop_last=True)
    other.load_state_dict(reader.state_dict())
    assert [sum(1 for _ in other) for _ in range(2)] == [count, count]


def test_keys_and_times_that_are_no_numbers(tmp_path: Path) -> None:
    def read(sessions: list[float], times: list[float], parts: int = 1) -> None:
        shutil.rmtree(tmp_path / "d", ignore_errors=True)
        (tmp_path / "d").mkdir()
        table = pa.table({"s": sessions, "t": times, "ids": [1] * len(times)})
        size = len(times) // parts
        for part in range(parts):
            pq.write_table(table.slice(part * size, size), tmp_path / "d" / f"{part}.parquet")
        SessionReader(tmp_path / "d", batch_size=2, features=["ids"], session="s", time="t")

    nan = float("nan")
    read([1.0, nan, nan, 2.0], [1, 2, 3, 4])
    read([1.0, nan, nan, 2.0], [1, 2, 3, 4], parts=2)
    with pytest.raises(DataError, match=r"session nan .* starts again in row 3"):
        read([nan, 1.0, 2.0, nan], [1, 2, 3, 4])
    with pytest.raises(DataError, match="time column 't' is nan in row 1"):
        read([1.0, 1.0], [5, nan])
    views = pa.table({"s": pa.array(["a", "a", "b"]).cast(pa.string_view()), "ids": [1, 2, 3]})
    pq.write_table(views, tmp_path / "views.parquet")
    SessionReader(tmp_path / "views.parquet", batch_size=2, features=["ids"], session="s")


def test_a_refused_state_changes_nothing(folder: Path) -> None:
    reader = reader_of(folder)
    with pytest.raises(DataError, match="after 1,000,000 batches"):
        reader.load_state_dict(reader_of(folder, lanes=4).state_dict() | {"batches": 10**6})
    assert reader.lanes == 1
