"""Batches from Parquet, and transforms on distinct rows: the same as on everything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

pytest.importorskip("torchrec")

import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import DataLoader
from torchrec import KeyedJaggedTensor

from flexshard.embeddings import InverseKeyedJaggedTensor
from flexshard.errors import DataError
from flexshard.ingestion import (
    ClipIds,
    DedupedTransform,
    DropFeatures,
    DropIds,
    HashIds,
    MapIds,
    ReaderPhases,
    SessionReader,
    SortIds,
    Truncate,
    cluster_sessions,
)
from flexshard.profiling.hashing import hash_to_rows
from tests.embeddings.test_inverse import same
from tests.ingestion.data import log, written

FEATURES = ["history", "shops", "liked", "item"]
GROUPS = [["history", "shops"], ["liked"]]


def scripted(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=features.keys(), values=features.values() * 3 + 1, lengths=features.lengths(), weights=None
    )


class Scripted(torch.nn.Module):
    """What a user has: a module of plain tensors, compiled to TorchScript."""

    def __init__(self) -> None:
        super().__init__()
        self.values = torch.jit.script(add_lengths)

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        values = self.values(features.values(), features.lengths())
        return KeyedJaggedTensor(
            keys=features.keys(), values=values, lengths=features.lengths(), stride=features.stride()
        )


def add_lengths(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return values + torch.repeat_interleave(lengths, lengths).to(values.dtype)


TRANSFORMS: dict[str, tuple[Callable[[], object], Callable[[list[int]], list[int]]]] = {
    "hash": (lambda: HashIds(97), lambda row: hash_to_rows(np.array(row, np.int64), 97).tolist()),
    "clip": (lambda: ClipIds(5, 9), lambda row: [min(max(v, 5), 9) for v in row]),
    "truncate last": (lambda: Truncate(2), lambda row: row[-2:]),
    "truncate first": (lambda: Truncate(2, keep="first"), lambda row: row[:2]),
    "truncate all": (lambda: Truncate(0), lambda row: []),
    "sort": (lambda: SortIds(), sorted),
    "map": (lambda: MapIds({3: 30, -1: 7}, default=-5), lambda row: [{3: 30, -1: 7}.get(v, -5) for v in row]),
    "map nothing": (lambda: MapIds({}), lambda row: [0] * len(row)),
    "drop": (lambda: DropIds([3, 4]), lambda row: [v for v in row if v not in (3, 4)]),
    "own function": (lambda: lambda k: scripted(k), lambda row: [3 * v + 1 for v in row]),
    "TorchScript": (Scripted, lambda row: [v + len(row) for v in row]),
}
ROWS = st.lists(
    st.tuples(st.lists(st.integers(-3, 12), max_size=4), st.lists(st.integers(-3, 12), max_size=4)),
    min_size=1,
    max_size=8,
)


def lists_of(features: KeyedJaggedTensor, key: str) -> list[list[int]]:
    values = features[key].values().split(features[key].lengths().tolist())
    return [part.tolist() for part in values]


@pytest.mark.parametrize("name", TRANSFORMS)
@given(rows=ROWS)
@settings(max_examples=30, deadline=None)
def test_a_transform_is_pythons_and_the_same_on_distinct_rows(
    name: str, rows: list[tuple[list[int], list[int]]]
) -> None:
    make, python = TRANSFORMS[name]
    wrapped = DedupedTransform(make())
    batch = InverseKeyedJaggedTensor.from_rows([{"a": a, "b": b} for a, b in rows], [["a"]])
    everything = wrapped(batch.to_keyed_jagged())
    assert lists_of(everything, "a") == [python(a) for a, _ in rows]
    assert lists_of(everything, "b") == [python(b) for _, b in rows]
    distinct = wrapped(batch)
    assert isinstance(distinct, InverseKeyedJaggedTensor)
    assert distinct.groups[0].num_distinct == batch.groups[0].num_distinct
    assert same(distinct.to_keyed_jagged(), everything)


def test_a_torchscript_module_of_whole_batches_runs_too() -> None:
    batch = InverseKeyedJaggedTensor.from_rows([{"a": [1, 2]}, {"a": [1, 2]}, {"a": [3]}], [["a"]])
    module = torch.jit.script(Double())
    assert lists_of(DedupedTransform(module)(batch).to_keyed_jagged(), "a") == [[2, 4], [2, 4], [6]]


class Double(torch.nn.Module):
    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(
            keys=features.keys(), values=features.values() * 2, lengths=features.lengths(), weights=None
        )


def test_transforms_of_some_features_weights_and_dropped_features() -> None:
    table = pa.table(
        {"a": [[3, 1], [3, 1]], "b": [[9, 8, 7], [5]], "w": [[0.5, 1.0], [0.5, 1.0]], "v": [[1.0, 2, 3], [4]]}
    )
    batch = InverseKeyedJaggedTensor.from_arrow(table, [["a"]], weights={"a": "w", "b": "v"})
    found = DedupedTransform(SortIds(features=["a"]), Truncate(1, features=["b"]))(batch).to_keyed_jagged()
    assert lists_of(found, "a") == [[1, 3], [1, 3]]
    assert lists_of(found, "b") == [[7], [5]]
    assert found.weights().tolist() == [1.0, 0.5, 1.0, 0.5, 3.0, 4.0]
    for one in (batch, batch.to_keyed_jagged()):
        with pytest.raises(DataError, match="HashIds: no feature 'typo'; there are a, b"):
            DedupedTransform(SortIds(features=["a"]), HashIds(5, features=["typo"]))(one)
    left = DedupedTransform(DropFeatures(["a"]))(batch)
    assert (left.keys(), left.groups) == (["b"], ())
    assert DedupedTransform(DropFeatures(["b"]))(batch).keys() == ["a"]
    none = DedupedTransform(DropFeatures(["a", "b"]), HashIds(3))(batch)
    assert (none.keys(), none.stride()) == ([], 0)


@pytest.mark.parametrize("shape", ["even", "one long row", "no ids", "no rows"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_are_sorted_within_rows_and_weights_go_with_them(shape: str, weighted: bool, dtype: torch.dtype) -> None:
    generator = np.random.default_rng(0)
    lengths = {"even": generator.integers(0, 30, 500), "one long row": np.array([2] * 999 + [900])}.get(
        shape, np.zeros(3 * (shape == "no ids"), np.int64)
    )
    most = torch.iinfo(dtype).max
    values = torch.from_numpy(generator.choice([-5, 0, 3, 7, most], int(lengths.sum()))).to(dtype)
    weights = torch.arange(values.numel(), dtype=torch.float32) if weighted else None
    found, sizes, heavy = SortIds().change(values, torch.from_numpy(lengths), weights)
    assert (found.dtype, sizes.tolist()) == (dtype, lengths.tolist())
    rows = np.split(values.numpy(), np.cumsum(lengths)[:-1]) if lengths.size else []
    assert found.tolist() == [value for row in rows for value in sorted(row.tolist())]
    if weighted:
        assert heavy is not None
        starts = np.cumsum(lengths) - lengths
        order = [start + at for start, row in zip(starts, rows, strict=True) for at in np.argsort(row, kind="stable")]
        assert heavy.tolist() == order


def test_transforms_that_cannot_be() -> None:
    for make in (
        lambda: HashIds(0),
        lambda: ClipIds(2, 1),
        lambda: Truncate(1, keep="some"),
        lambda: DedupedTransform(3),
        lambda: DropFeatures("a"),
        lambda: SortIds(features="a"),
    ):
        with pytest.raises(DataError):
            make()


@pytest.fixture(scope="module")
def clustered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, pa.Table]:
    folder = tmp_path_factory.mktemp("reader")
    table = log()
    written(table, folder / "in", 2)
    found = cluster_sessions(folder / "in", folder / "out", session="session", time="time", shards=2, row_group_rows=40)
    import pyarrow.parquet as pq

    return found.path, pa.concat_tables([pq.read_table(found.path / name) for name in found.files])


def test_batches_are_the_rows_in_order(clustered: tuple[Path, pa.Table]) -> None:
    folder, table = clustered
    reader = SessionReader(
        folder, batch_size=64, features=FEATURES, groups=GROUPS, dense=["label"], session="session", time="time"
    )
    batches = list(reader)
    assert [batch.features.stride() for batch in batches] == [64] * (table.num_rows // 64) + [table.num_rows % 64]
    for name in ("history", "shops", "liked"):
        found = [row for batch in batches for row in lists_of(batch.features.to_keyed_jagged(), name)]
        assert found == table[name].to_pylist()
    assert torch.cat([batch.dense["label"] for batch in batches]).tolist() == table["label"].to_pylist()
    assert batches[0].dense["label"].dtype == torch.int8
    assert batches[0].features.groups[0].num_distinct < 40
    assert len(list(SessionReader(folder, batch_size=64, features=FEATURES, drop_last=True))) == table.num_rows // 64


def test_phases_add_up(clustered: tuple[Path, pa.Table]) -> None:
    folder, table = clustered

    def total(groups: list[list[str]]) -> ReaderPhases:
        reader = SessionReader(
            folder, batch_size=64, features=FEATURES, groups=groups, transform=DedupedTransform(HashIds(9))
        )
        return sum((batch.phases for batch in reader), ReaderPhases())

    deduped, plain = total(GROUPS), total([])
    assert deduped.samples == table.num_rows
    assert min(deduped.fill_seconds, deduped.convert_seconds, deduped.process_seconds) > 0
    assert deduped.seconds == deduped.fill_seconds + deduped.convert_seconds + deduped.process_seconds
    import pyarrow.parquet as pq

    nbytes = 0
    for path in folder.glob("*.parquet"):
        with pq.ParquetFile(path) as file:
            for number in range(file.num_row_groups):
                group = file.metadata.row_group(number)
                columns = [group.column(c) for c in range(group.num_columns)]
                nbytes += sum(c.total_compressed_size for c in columns if c.path_in_schema.split(".")[0] in FEATURES)
    assert deduped.bytes_read == plain.bytes_read == nbytes
    assert deduped.bytes_sent < plain.bytes_sent / 1.5
    values = sum(sum(len(row) if isinstance(row, list) else 1 for row in table[name].to_pylist()) for name in FEATURES)
    assert plain.bytes_sent == 8 * values + 4 * len(FEATURES) * table.num_rows


def test_ranks_and_workers_share_the_row_groups(clustered: tuple[Path, pa.Table]) -> None:
    folder, table = clustered
    labels: list[list[int]] = []
    for rank in range(2):
        reader = SessionReader(
            folder, batch_size=16, features=["item"], groups=[["item"]], dense=["time"], rank=rank, world_size=2
        )
        loader = DataLoader(reader, batch_size=None, num_workers=2)
        labels += [
            list(zip(b.features.to_keyed_jagged().values().tolist(), b.dense["time"].tolist(), strict=True))
            for b in loader
        ]
    found = sorted(pair for batch in labels for pair in batch)
    assert found == sorted(zip(table["item"].to_pylist(), table["time"].to_pylist(), strict=True))


def test_a_loader_is_torchs_and_makes_no_batches_of_batches(clustered: tuple[Path, pa.Table]) -> None:
    folder, _ = clustered
    reader = SessionReader(folder, batch_size=16, features=["item"], groups=[["item"]])
    ours = reader.loader(num_workers=2, prefetch_factor=3, drop_last=False, shuffle=None)
    theirs = DataLoader(reader, batch_size=None, num_workers=2, prefetch_factor=3)
    assert type(ours) is DataLoader
    assert (ours.batch_size, ours.num_workers, ours.prefetch_factor) == (None, 2, 3)
    rows = [[b.features.to_keyed_jagged().values().tolist() for b in loader] for loader in (ours, theirs)]
    assert rows[0] == rows[1]
    for option in ({"batch_size": 4}, {"drop_last": True}, {"shuffle": True}, {"sampler": range(3)}):
        with pytest.raises(DataError, match=f"loader.. has no '{next(iter(option))}': .*the reader"):
            reader.loader(**option)
    with pytest.raises(DataError, match="nothing is put together; give preprocess"):
        reader.loader(collate_fn=list)


def test_shuffling_moves_row_groups_and_keeps_sessions_together(clustered: tuple[Path, pa.Table]) -> None:
    folder, table = clustered

    def items(epoch: int) -> list[int]:
        reader = SessionReader(folder, batch_size=16, features=["item"], shuffle=True, seed=3, session="session")
        reader.set_epoch(epoch)
        return [v for batch in reader for v in batch.features.to_keyed_jagged().values().tolist()]

    assert items(0) == items(0)
    assert items(0) != items(1) != table["item"].to_pylist()
    assert sorted(items(0)) == sorted(table["item"].to_pylist())


def test_a_batch_moves(clustered: tuple[Path, pa.Table]) -> None:
    batch = next(iter(SessionReader(clustered[0], batch_size=8, features=FEATURES, groups=GROUPS, dense=["label"])))
    moved = batch.to("meta")
    assert moved.features.device() == moved.dense["label"].device == torch.device("meta")


def test_shared_lists_have_no_weights(clustered: tuple[Path, pa.Table]) -> None:
    with pytest.raises(DataError, match="lists that share ids have no weights, and features have them all or none"):
        SessionReader(
            clustered[0], batch_size=8, features=["history"], partial=[["history"]], weights={"history": "label"}
        )


def test_rows_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    table = log().sort_by([("session", "ascending"), ("time", "ascending")])
    how = {"batch_size": 64, "features": FEATURES, "groups": GROUPS}

    def fails(changed: pa.Table, message: str, **more: object) -> None:
        written(changed, tmp_path / "in", 3, row_group_size=30)
        with pytest.raises(DataError, match=message):
            list(SessionReader(tmp_path / "in", **(how | more)))  # type: ignore[arg-type]

    rows = table.to_pylist()
    size = -(-len(rows) // 3)
    bad = size + 41  # of the second file, within a batch that starts in another row group
    rows[bad]["history"] = [1, None]
    fails(pa.Table.from_pylist(rows, table.schema), r"log-1\.parquet: column 'history' has a null id in row 41;")
    rows = table.to_pylist()
    rows[bad]["label"] = None
    fails(
        pa.Table.from_pylist(rows, table.schema), r"log-1\.parquet: column 'label' is null in row 41;", dense=["label"]
    )
    fails(table, "no column 'user'", dense=["user"])
    fails(table, r"column 'session' holds string, not a number per row", dense=["session"])
    fails(table, "group 0 names feature 'user', which is not there", groups=[["user"]])
    fails(table, "name the session column too", time="time")
    fails(table, "there are ranks 0 to 1, found 2", rank=2, world_size=2)
    fails(table, "a batch has at least one feature", features=[])
    order = log()
    fails(order, r"session 's\d+' of column 'session' starts again in row \d+; cluster the data", session="session")
    times = np.array(table["time"].to_pylist())
    session = table["session"].to_pylist()
    place = next(n for n in range(size + 40, len(times)) if session[n] == session[n - 1])
    times[place] = times[place - 1] - 1
    changed = table.set_column(1, "time", pa.array(times))
    fails(
        changed,
        rf"log-1\.parquet: column 'time' goes back in row {place - size}, within session '{session[place]}'",
        session="session",
        time="time",
    )
    mixed = tmp_path / "in" / "zz.parquet"
    import pyarrow.parquet as pq

    pq.write_table(table.set_column(2, "history", pa.array([["x"]] * table.num_rows)), mixed)
    with pytest.raises(DataError, match=r"zz\.parquet: column 'history' holds list<.*string>, but list<.*int64>"):
        SessionReader(tmp_path / "in", **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [pa.uint8(), pa.uint64(), pa.bool_(), pa.float32(), pa.timestamp("ns"), pa.date32()])
def test_times_of_every_type_are_in_order(tmp_path: Path, kind: pa.DataType) -> None:
    import pyarrow.parquet as pq

    def read(times: list[int]) -> int:
        column = pa.array(times, pa.int32() if pa.types.is_date32(kind) else pa.int64()).cast(kind)
        session = pa.array([7] * len(times), pa.timestamp("ns"))
        pq.write_table(pa.table({"s": session, "t": column, "f": [1] * len(times)}), tmp_path / "a.parquet")
        return len(list(SessionReader(tmp_path, batch_size=2, features=["f"], session="s", time="t")))

    if pa.types.is_boolean(kind):
        with pytest.raises(DataError, match="time column 't' holds bool; expected numbers or timestamps"):
            read([0, 1])
        return
    assert read([0, 1, 1, 100]) == 2
    for wrong in ([0, 2, 1], [2, 1]):
        with pytest.raises(DataError, match=rf"goes back in row {len(wrong) - 1}"):
            read(wrong)


def test_a_session_over_many_row_groups_may_be_shuffled(tmp_path: Path) -> None:
    written(pa.table({"s": [1] * 6 + [2] * 2, "t": list(range(8)), "f": [1] * 8}), tmp_path / "in")
    found = cluster_sessions(tmp_path / "in", tmp_path / "out", session="s", time="t", row_group_rows=2)
    for seed in range(6):
        reader = SessionReader(found.path, batch_size=8, features=["f"], session="s", time="t", shuffle=True, seed=seed)
        assert sum(batch.features.stride() for batch in reader) == 8


def test_epochs_reach_workers_that_stay(clustered: tuple[Path, pa.Table]) -> None:
    reader = SessionReader(clustered[0], batch_size=16, features=["item"], shuffle=True)
    loader = DataLoader(reader, batch_size=None, num_workers=1, persistent_workers=True)
    orders = []
    for epoch in range(2):
        reader.set_epoch(epoch)
        orders.append([v for batch in loader for v in batch.features.to_keyed_jagged().values().tolist()])
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])


def test_large_tables_and_floats() -> None:
    wide = HashIds(2**32).change(torch.tensor([1, 2, 3], dtype=torch.int32), torch.tensor([3]), None)[0]
    assert wide.tolist() == hash_to_rows(np.array([1, 2, 3]), 2**32).tolist()
    mapped = MapIds({1: 2**40}).change(torch.tensor([1], dtype=torch.int32), torch.tensor([1]), None)[0]
    assert mapped.tolist() == [2**40]
    with pytest.raises(DataError, match=r"feature 'a' of row 1 is \[1\.5\], not a list of ids"):
        InverseKeyedJaggedTensor.from_rows([{"a": [1]}, {"a": [1.5]}], [["a"]])  # type: ignore[list-item]


def test_arguments_of_a_reader(clustered: tuple[Path, pa.Table]) -> None:
    for how, message in (
        ({"features": ["item", "item"]}, "feature 'item' is named twice"),
        ({"features": ["item"], "session": "history"}, "session column 'history' holds list"),
        ({"features": ["item"], "session": "session", "time": "session"}, "time column 'session' holds string"),
        ({"features": ["item"], "seed": -1}, "seed must be at least 0"),
    ):
        with pytest.raises(DataError, match=message):
            SessionReader(clustered[0], batch_size=4, **how)  # type: ignore[arg-type]
