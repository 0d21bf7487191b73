"""Any values to dense ids: against Python's own counting, through every kind of file, and what cannot be encoded."""

from __future__ import annotations

import json
from collections import Counter
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flexshard import AccessProfile
from flexshard.errors import ChangedDataError, DataError, ProfileError
from flexshard.profiling import encode, load_mapping, read_samples
from flexshard.profiling.encoding import encoding
from tests.commands import run

NAN = float("nan")


def mapping_of(path: Path) -> dict[Any, int]:
    table = pq.read_table(path)
    return dict(zip(table["value"].to_pylist(), table["row"].to_pylist(), strict=True))


def check(folder: Path, column: str, given: list[Any], expected: list[Any], **how: Any) -> None:
    """Values come back by the mapping, which numbers them by how often they occur."""
    found = encode(folder / "in.parquet", folder / "out.parquet", columns=[column], **how)[0]
    rows = mapping_of(folder / f"out.{column}.mapping.parquet")
    back = {row: value for value, row in rows.items()}
    encoded = pq.read_table(folder / "out.parquet")[column].to_pylist()
    assert [[back[i] for i in ids] if isinstance(ids, list) else back[ids] for ids in encoded] == expected
    flat = [value for ids in expected for value in (ids if isinstance(ids, list) else [ids])]
    counts = Counter(flat)
    assert sorted(rows.values()) == list(range(len(counts)))
    ordered = [counts[back[row]] for row in range(len(back))]
    assert ordered == sorted(ordered, reverse=True)
    assert (found.ids, found.mapping.rows) == (len(flat), len(counts))
    del given


@pytest.mark.parametrize(
    ("values", "expected", "how"),
    [
        (["b", "a", "b", "ü", ""], None, {}),
        (pa.array(["b", "a", "b"]).dictionary_encode(), ["b", "a", "b"], {}),
        ([7, 643_000_000, 7, -5], None, {}),
        (pa.array([2**64 - 1, 2**63 - 1, 2**63 - 2], pa.uint64()), [2**64 - 1, 2**63 - 1, 2**63 - 2], {}),
        ([1.0, NAN, 2.0, 1.0, None], [1, 2, 1], {"nulls": "drop"}),
        ([1.0, NAN, 2.0, 1.0, None], [1, None, 2, 1, None], {"nulls": "keep"}),
        ([1.5, 2.0, 1.5], None, {}),
        ([None, 3, 3, 4], [3, 3, 4], {"nulls": "drop"}),
        (["1|2|3", "2", None, "", " 3 | 2"], [["1", "2", "3"], ["2"], [], [], ["3", "2"]], {"separator": "|"}),
        ([["x", "y"], None, ["y"], [], ["x", None]], [["x", "y"], [], ["y"], [], ["x"]], {"nulls": "drop"}),
        ([["x", "y"], None, ["x", None]], [["x", "y"], [], ["x", None]], {"nulls": "keep"}),
        ([[[1], [2, 3]], [], [[3]], None], [[1, 2, 3], [], [3], []], {}),
        ([[1.0, NAN], [2.0], []], [[1], [2], []], {"nulls": "drop"}),
        (pa.array([b"\x00", b"\xff", b"\x00"]), [b"\x00", b"\xff", b"\x00"], {}),
        ([True, False, True], None, {}),
    ],
)
def test_values_are_numbered_by_frequency(tmp_path: Path, values: Any, expected: Any, how: dict[str, Any]) -> None:
    column = values if isinstance(values, pa.Array) else pa.array(values)
    pq.write_table(pa.table({"place": np.arange(len(column)), "x": column}), tmp_path / "in.parquet")
    check(tmp_path, "x", column.to_pylist(), column.to_pylist() if expected is None else expected, **how)
    kept = pq.read_table(tmp_path / "out.parquet")["place"].to_pylist()
    assert kept == sorted(kept)


@pytest.mark.parametrize("name", ["event.item_id", "events.item_id"])
def test_fields_of_structs(tmp_path: Path, name: str) -> None:
    events = [[{"item_id": 7}, {"item_id": 8}], [], None, [{"item_id": 7}]]
    table = pa.table({"event": [{"item_id": n % 2, "other": "q"} for n in range(4)], "events": events})
    pq.write_table(table, tmp_path / "in.parquet")
    expected = [0, 1, 0, 1] if name == "event.item_id" else [[7, 8], [], [], [7]]
    check(tmp_path, name, [], expected)
    assert pq.read_table(tmp_path / "out.parquet").column_names == ["event", "events", name]


def test_csv_json_and_partitions(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("u,item,hash\n1,red,18446744073709551615\n2,blue,9223372036854775807\n3,red,5\n")
    encode(tmp_path / "a.csv", tmp_path / "a.parquet", columns=["item", "hash"])
    found = pq.read_table(tmp_path / "a.parquet")
    assert found.to_pydict() == {"u": [1, 2, 3], "item": [0, 1, 0], "hash": [2, 1, 0]}
    assert mapping_of(tmp_path / "a.hash.mapping.parquet") == {5: 0, 2**63 - 1: 1, 2**64 - 1: 2}
    encode(tmp_path / "a.csv", tmp_path / "b.parquet", columns=["item"])
    kept = pq.read_table(tmp_path / "b.parquet")["hash"].to_pylist()
    assert [int(value) for value in kept] == [2**64 - 1, 2**63 - 1, 5]  # other columns keep their values
    (tmp_path / "log").mkdir()
    for number, ids in enumerate((["p", "q"], ["q"])):
        lines = [json.dumps({"user": number, "event": {"id": each}}) for each in ids]
        (tmp_path / "log" / f"{number}.jsonl").write_text("\n".join(lines))
    encode(tmp_path / "log", tmp_path / "c.parquet", columns=["event.id"])
    assert pq.read_table(tmp_path / "c.parquet")["event.id"].to_pylist() == [1, 0, 0]
    for day in (1, 2):
        (tmp_path / "hive" / f"day={day}").mkdir(parents=True)
        pq.write_table(pa.table({"i": ["m", "n"]}), tmp_path / "hive" / f"day={day}" / "x.parquet")
    encode(tmp_path / "hive", tmp_path / "d.parquet", columns=["i", "day"])
    assert pq.read_table(tmp_path / "d.parquet").to_pydict() == {"i": [0, 1, 0, 1], "day": [0, 0, 1, 1]}


def test_rows_keep_their_order_beyond_memory(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    items = generator.zipf(1.3, 600_000) % 10**12
    lists = pa.ListArray.from_arrays(np.arange(0, 600_001, 3, dtype=np.int32), items.astype(np.int64))
    pq.write_table(pa.table({"x": lists, "place": np.arange(200_000)}), tmp_path / "in.parquet", row_group_size=10_000)
    pq.write_table(pa.table({"y": items, "place": np.arange(600_000)}), tmp_path / "flat.parquet", row_group_size=9000)
    for name, column in (("in", "x"), ("flat", "y")):
        encode(tmp_path / f"{name}.parquet", tmp_path / "out.parquet", columns=[column], memory="100MB")
        found = pq.read_table(tmp_path / "out.parquet")
        assert found["place"].to_pylist() == list(range(found.num_rows))
        rows = pq.read_table(tmp_path / f"out.{column}.mapping.parquet")
        back = rows["value"].to_numpy()[pa.compute.list_flatten(found["x"]) if name == "in" else found["y"].to_numpy()]
        np.testing.assert_array_equal(back, items)
        assert np.all(np.diff(rows["count"].to_numpy()) <= 0)


def test_a_mapping_is_used_again(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": ["a", "b", "a"], "s": [1, 1, 2]}), tmp_path / "in.parquet")
    encode(tmp_path / "in.parquet", tmp_path / "out.parquet", columns=["x"])
    mapping = tmp_path / "out.x.mapping.parquet"
    assert load_mapping(mapping).rows == 2
    pq.write_table(pa.table({"x": ["b", "c", "a", None], "s": [1, 1, 2, 2]}), tmp_path / "later.parquet")
    how: dict[str, Any] = {"columns": ["x"], "mappings": {"x": mapping}}
    with pytest.raises(DataError, match=r"'x' has 1 values that .* has not, 'c' among them; leave them out"):
        encode(tmp_path / "later.parquet", tmp_path / "no.parquet", nulls="drop", **how)
    assert not (tmp_path / "no.parquet").exists()
    found = encode(tmp_path / "later.parquet", tmp_path / "new.parquet", nulls="drop", unknown="drop", **how)[0]
    assert (found.ids, found.dropped) == (2, 2)
    assert pq.read_table(tmp_path / "new.parquet")["x"].to_pylist() == [1, 0]
    profile = AccessProfile.from_parquet(tmp_path / "in.parquet", column="x", mapping=mapping, sample_key="s")
    assert (profile.num_rows, profile.num_samples, profile.counts.tolist()) == (2, 2, [2, 1])
    (tmp_path / "profiles").mkdir()
    profile.save(tmp_path / "profiles" / "x.profile.parquet")
    loaded = AccessProfile.load(tmp_path / "profiles" / "x.profile.parquet")
    assert loaded.mapping == str(mapping)
    ids, lengths = read_samples(
        tmp_path / "in.parquet", "x", sample_key="s", mapping=loaded.mapping, num_rows=loaded.num_rows
    )
    assert (ids.tolist(), lengths.tolist()) == ([0, 1, 0], [2, 1])
    # What it has not are lost where that is asked for, and nowhere else.
    later = {"column": "x", "mapping": mapping, "sample_key": "s"}
    with pytest.raises(DataError, match=r"later.parquet: column 'x' has 1 values that .* has not, 'c' among them"):
        AccessProfile.from_parquet(tmp_path / "later.parquet", **later)
    with pytest.raises(DataError, match=r"later.parquet: column 'x' has 1 values that .* has not, 'c' among them"):
        read_samples(tmp_path / "later.parquet", "x", mapping=mapping)
    assert AccessProfile.from_parquet(tmp_path / "later.parquet", unknown="drop", **later).num_accesses == 2
    ids, lengths = read_samples(tmp_path / "later.parquet", "x", mapping=mapping, unknown="drop")
    assert (ids.tolist(), lengths.tolist()) == ([1, 0], [1, 1])
    with pytest.raises(DataError, match="unknown='drop' is of values that a mapping has not; give mapping"):
        AccessProfile.from_parquet(tmp_path / "new.parquet", column="x", unknown="drop")
    pq.write_table(pa.table({"x": ["z"]}), tmp_path / "others.parquet")
    with pytest.raises(DataError, match=r"others.parquet, encoded by .*out.x.mapping.parquet: no rows") as caught:
        AccessProfile.from_parquet(tmp_path / "others.parquet", column="x", mapping=mapping, unknown="drop")
    assert "flexshard-" not in str(caught.value), "the name of a file that is gone"
    both = profile + AccessProfile.from_parquet(tmp_path / "new.parquet", column="x", sample_key="s", num_rows=2)
    assert (both.num_accesses, both.mapping, both.encoded_by) == (5, str(mapping), profile.encoded_by)
    encode(tmp_path / "later.parquet", tmp_path / "anew.parquet", columns=["x"], nulls="drop")
    with pytest.raises(ProfileError, match="mapped otherwise do not add up"):
        _ = profile + AccessProfile.from_parquet(tmp_path / "anew.parquet", column="x", sample_key="s", num_rows=3)


def test_encoded_files_say_by_which_mapping(tmp_path: Path) -> None:
    """Files, profiles and replays of two mappings do not go together: one id is two values."""
    for name, values in (("monday", ["a", "b", "a"]), ("tuesday", ["b", "a", "b"]), ("again", ["a", "a", "a", "b"])):
        pq.write_table(pa.table({"x": values, "y": [*values]}), tmp_path / f"{name}.raw.parquet")
        encode(tmp_path / f"{name}.raw.parquet", tmp_path / f"{name}.parquet", columns=["x"])
    how: dict[str, Any] = {"column": "x", "num_rows": 2}
    monday, tuesday, again = (
        AccessProfile.from_parquet(tmp_path / f"{name}.parquet", **how) for name in ("monday", "tuesday", "again")
    )
    assert monday.encoded_by == again.encoded_by  # by what it gives which row, not by how often
    with pytest.raises(ProfileError, match="not the same values, which two mappings numbered; profile the newer data"):
        monday.drift(tuesday)
    monday.save(tmp_path / "saved")
    assert AccessProfile.load(tmp_path / "saved").drift(again)[-1].kept == 1
    with pytest.raises(
        DataError, match=r"tuesday.parquet: ids of column 'x' were encoded by another mapping than .*mon"
    ):
        AccessProfile.from_parquet([tmp_path / "monday.parquet", tmp_path / "tuesday.parquet"], **how)
    together = AccessProfile.from_parquet([tmp_path / "monday.parquet", tmp_path / "again.parquet"], **how)
    assert (together.num_accesses, together.encoded_by) == (7, monday.encoded_by)
    with pytest.raises(DataError, match="another mapping than those of the profile"):
        read_samples(tmp_path / "tuesday.parquet", "x", encoded_by=monday.encoded_by)
    mapped = AccessProfile.from_parquet(
        tmp_path / "tuesday.raw.parquet", column="x", mapping=tmp_path / "monday.x.mapping.parquet"
    )
    assert (mapped.encoded_by, mapped.counts.tolist()) == (monday.encoded_by, [2, 1])
    # Another column of an encoded file leaves what was said of the first.
    encode(tmp_path / "monday.parquet", tmp_path / "more.parquet", columns=["y"])
    more = [AccessProfile.from_parquet(tmp_path / "more.parquet", column=name, num_rows=2) for name in "xy"]
    assert [each.encoded_by for each in more] == [monday.encoded_by, monday.encoded_by]


@pytest.mark.parametrize(
    "values",
    [
        [3, 1, 3],
        [2.5, 2.5, 1.0],
        [b"\xff", b"\xff", b""],
        ["ab", "ab", "c", None],
        [True, True, False],
        [date(2026, 1, 1), date(2026, 1, 1), date(2026, 1, 2)],
        [Decimal("1.50"), Decimal("1.50"), Decimal(2)],
        pa.array([b"\xff" * 16, b"\xff" * 16, b"\xfe" * 16], pa.uuid()),
    ],
)
def test_mappings_of_other_types_have_digests(tmp_path: Path, values: Any) -> None:
    """Each its own, the same whichever file has the values."""
    digests = []
    column = values if isinstance(values, pa.Array) else pa.array(values)
    for name, given in (
        ("one", column),
        ("other", pa.chunked_array([column, column])),
        ("reversed", pa.chunked_array([column[2:]] * 4)),
    ):
        pq.write_table(pa.table({"x": given}), tmp_path / "in.parquet")
        encode(tmp_path / "in.parquet", tmp_path / f"{name}.parquet", columns=["x"], nulls="keep")
        digests.append(AccessProfile.from_parquet(tmp_path / f"{name}.parquet", column="x").encoded_by)
    assert digests[0] == digests[1] != digests[2]


def test_what_cannot_be_encoded(tmp_path: Path) -> None:
    table = pa.table(
        {"items": ["a", None], "event": [{"id": 1}] * 2, "f": [1.0, float("inf")], "n": pa.nulls(2, pa.int64())}
    )
    pq.write_table(table, tmp_path / "in.parquet")
    (tmp_path / "x.log").write_text("a")
    (tmp_path / "empty").mkdir()
    pq.write_table(pa.table({"a": [1], "A": [2]}), tmp_path / "case.parquet")
    pq.write_table(pa.table([pa.array([1]), pa.array([2])], names=["a", "a"]), tmp_path / "twice.parquet")
    pq.write_table(pa.table({f"c{i}": [1] for i in range(60)}), tmp_path / "wide.parquet")
    rows = "".join(f"{i},b\n" for i in range(600))
    for name, text in {"short": f"a,b\n{rows}7\n", "long": f"a,b\n{rows}7,8,9\n", "same": f"a,a\n{rows}"}.items():
        (tmp_path / f"{name}.csv").write_text(text)
    (tmp_path / "utf16.csv").write_bytes("a,b\n7,caf\xe9\n".encode("utf-16"))
    (tmp_path / "latin.csv").write_bytes(f"a,b\n{rows}7,caf\xe9\n".encode("latin-1"))
    (tmp_path / "nothing.csv").touch()
    (tmp_path / "quoted.csv").write_text('"a,b",c\n1,2\n')
    for message, data, how in (
        ("column 'items' has 1 null ids in 1 file", "in.parquet", {"columns": ["items"]}),
        ("no column 'item'; did you mean 'items'", "in.parquet", {"columns": ["item"]}),
        (r"column 'event' holds STRUCT.*; name one of its fields", "in.parquet", {"columns": ["event"]}),
        ("no field 'x' in STRUCT", "in.parquet", {"columns": ["event.x"]}),
        ("'f' has numbers that are infinite", "in.parquet", {"columns": ["f"]}),
        ("'n' has no values", "in.parquet", {"columns": ["n"], "nulls": "drop"}),
        ("a separator goes with texts", "in.parquet", {"columns": ["f"], "separator": "|"}),
        ("nulls is 'drop' or 'keep', found 'x'", "in.parquet", {"columns": ["items"], "nulls": "x"}),
        ("unknown is 'error' or 'drop'", "in.parquet", {"columns": ["items"], "unknown": "x"}),
        ("is given twice", "in.parquet", {"columns": ["items", "items"]}),
        ("give one at least", "in.parquet", {"columns": []}),
        (
            "not a mapping that 'flexshard encode' wrote",
            "in.parquet",
            {"columns": ["f"], "mappings": {"f": tmp_path / "in.parquet"}},
        ),
        ("no such file", "in.parquet", {"columns": ["f"], "mappings": {"f": tmp_path / "no"}}),
        ("x.log: of no kind that is read", "x.log", {"columns": ["a"]}),
        ("no Parquet, CSV or JSON files", "empty", {"columns": ["a"]}),
        ("nothing: no such file", "nothing", {"columns": ["a"]}),
        ("'a' and 'A' differ by case at most", "case.parquet", {"columns": ["a"]}),
        ("has several columns called 'a'; rename them", "twice.parquet", {"columns": ["a"]}),
        ("has several columns called 'a'; rename them", "same.csv", {"columns": ["a"]}),
        ("no column 'x'; there are c0, .*, c19 and 40 more$", "wide.parquet", {"columns": ["x"]}),
        ("line 602: Expected Number of Columns: 2 Found: 1", "short.csv", {"columns": ["a"]}),
        ("line 602: Expected Number of Columns: 2 Found: 3", "long.csv", {"columns": ["a"]}),
        (r"line 602: it is not utf-8; convert the file", "latin.csv", {"columns": ["b"]}),
        (r"line 1: it is not utf-8; convert the file", "utf16.csv", {"columns": ["b"]}),
        ("nothing.csv: is empty", "nothing.csv", {"columns": ["a"]}),
        ("no column 'x'; there are a,b, c$", "quoted.csv", {"columns": ["x"]}),
    ):
        arguments: Any = how
        with pytest.raises(DataError, match=message):
            encode(tmp_path / data, tmp_path / "out.parquet", **arguments)
    assert not list(tmp_path.glob("*out*"))


def test_commands_from_a_log_to_a_plan_and_back(tmp_path: Path) -> None:
    """A log that pandas wrote as CSV, its items texts: encoded, profiled, planned, replayed through the mapping."""
    generator = np.random.default_rng(0)
    lines = [f"{row // 4},sku-{item % 300}" for row, item in enumerate(generator.zipf(1.2, 4000))]
    (tmp_path / "log.csv").write_text("\n".join(["session_id,item", *lines]))
    done = run(tmp_path, "encode", "log.csv", "--column", "item", "-o", "log.parquet", "--json")
    assert done.returncode == 0, done.stderr
    column = json.loads(done.stdout)["columns"][0]
    assert column["ids"] == 4000
    own = ["--column", "item", "--sample-key", "session_id"]
    one = run(tmp_path, "profile", "log.parquet", *own, "-o", "a.profile.parquet", "--json")
    own += ["--mapping", column["mapping"]]
    two = run(tmp_path, "profile", "log.csv", *own, "-o", "item.profile.parquet", "--json")
    assert one.returncode == two.returncode == 0, one.stderr + two.stderr
    first, second = (json.loads(each.stdout)[0] for each in (one, two))
    assert {**first, "path": ""} == {**second, "path": ""}
    assert first["num_samples"] == 1000
    how = ["--cluster", "a100-4x8-roce", "--batch-size", 8, "--dim", 16]
    made = run(tmp_path, "job", "item.profile.parquet", *how, "-o", "job.yaml")
    assert made.returncode == 0, made.stderr
    assert run(tmp_path, "plan", "job.yaml", "-o", "plan.json").returncode == 0
    raw = run(tmp_path, "replay", "plan.json", "log.csv", "--column", "item", "--json")
    assert raw.returncode == 0, raw.stderr
    assert json.loads(raw.stdout)["steps"] > 0
    texts = run(tmp_path, "profile", "log.parquet", "--column", "item", "-o", "b.profile.parquet")
    assert "every row is a sample of one id (L = 1)" in texts.stderr
    assert "--sample-key; columns that may be: session_id" in texts.stderr
    pq.write_table(pa.table({"item": ["a"]}), tmp_path / "texts.parquet")
    wrong = run(tmp_path, "profile", "texts.parquet", "--column", "item", "-o", "c.profile.parquet")
    assert wrong.returncode == 2
    assert "flexshard encode texts.parquet --column item -o encoded.parquet" in wrong.stderr
    lost = run(tmp_path, "encode", "log.csv", "--column", "item", "-o", "log.csv")
    assert lost.returncode == 2
    assert lost.stderr.count("\n") == 1


@pytest.mark.parametrize("gone", [False, True])
def test_files_that_are_replaced_meanwhile_are_not_encoded(
    gone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read twice: to count values, and to write them."""
    pq.write_table(pa.table({"c": ["x", "y"]}), tmp_path / "in.parquet")
    pq.write_table(pa.table({"c": ["x", "z", "z"]}), tmp_path / "other")
    query = encoding._query

    def swap(*args: Any) -> str:
        if gone:
            (tmp_path / "in.parquet").unlink(missing_ok=True)
        elif (tmp_path / "other").exists():
            (tmp_path / "other").replace(tmp_path / "in.parquet")
        return query(*args)

    monkeypatch.setattr(encoding, "_query", swap)
    what = "is no longer there" if gone else "has changed since reading began"
    with pytest.raises(ChangedDataError, match=rf"in\.parquet: {what}"):
        encode(tmp_path / "in.parquet", tmp_path / "out.parquet", columns=["c"])
    assert not (tmp_path / "out.parquet").exists()
    assert not (tmp_path / "out.c.mapping.parquet").exists()


@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize(("made", "again"), [("keep", "drop"), ("drop", "keep"), ("keep", "keep"), ("drop", "drop")])
def test_nulls_of_a_mapping_made_before(made: str, again: str, lists: bool, tmp_path: Path) -> None:
    values: Any = [["x", None], [None], ["x"], ["y"]] if lists else ["x", None, None, "x", "y"]
    pq.write_table(pa.table({"c": values}), tmp_path / "in.parquet")
    encode(tmp_path / "in.parquet", tmp_path / "a.parquet", columns=["c"], nulls=made)
    mapping = tmp_path / "a.c.mapping.parquet"
    how: Any = {"columns": ["c"], "mappings": {"c": mapping}, "nulls": again}
    if (made, again) == ("drop", "keep"):
        with pytest.raises(DataError, match=r"has 1 values that .* has not, null among them"):
            encode(tmp_path / "in.parquet", tmp_path / "b.parquet", **how)
        how["unknown"] = "drop"
    (found,) = encode(tmp_path / "in.parquet", tmp_path / "b.parquet", **how)
    back = {row: value for value, row in mapping_of(mapping).items()}
    keeps = made == again == "keep"
    written = pq.read_table(tmp_path / "b.parquet")["c"].to_pylist()
    if lists:
        assert [[back[row] for row in ids] for ids in written] == [
            [value for value in ids if keeps or value is not None] for ids in values
        ]
    else:
        assert [back[row] for row in written] == [value for value in values if keeps or value is not None]
    assert (found.ids, found.dropped) == ((5, 0) if keeps else (3, 2))


def test_rows_that_another_column_leaves_out_are_counted(tmp_path: Path) -> None:
    columns = {"a": ["x", None, "x", None, "y"], "b": [1, 2, 3, 4, 5], "l": [[1], [2, 2], [], [3], [1, 1]]}
    pq.write_table(pa.table(columns), tmp_path / "in.parquet")
    found = encode(tmp_path / "in.parquet", tmp_path / "out.parquet", columns=["a", "b", "l"], nulls="drop")
    assert [(one.ids, one.dropped) for one in found] == [(3, 2), (3, 2), (3, 3)]


@pytest.mark.parametrize("wrong", ["twice", "row twice", "outside", "short"])
def test_a_mapping_that_is_none(wrong: str, tmp_path: Path) -> None:
    """Joined with one that has a value twice, rows would be doubled."""
    pq.write_table(pa.table({"c": ["x", "y", "x"]}), tmp_path / "in.parquet")
    encode(tmp_path / "in.parquet", tmp_path / "a.parquet", columns=["c"])
    mapping = tmp_path / "a.c.mapping.parquet"
    table = pq.read_table(mapping)
    rows = {"row twice": [0, 0], "outside": [0, 7]}.get(wrong, [0, 1])
    other = table.set_column(1, table.field(1), pa.array(rows, table.field(1).type))
    if wrong == "twice":
        other = pa.concat_tables([other, other.slice(0, 1)])
    pq.write_table(other.slice(0, 1) if wrong == "short" else other, mapping)
    with pytest.raises(DataError, match=r"a\.c\.mapping\.parquet: does not give each of 2 rows, from 0 on, to one"):
        encode(tmp_path / "in.parquet", tmp_path / "b.parquet", columns=["c"], mappings={"c": mapping}, unknown="drop")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("2020-01-01", "2020-1-1"),
        ("10:00:00", "10:00:00.0"),
        ("123e4567-e89b-12d3-a456-426614174000", "123E4567-E89B-12D3-A456-426614174000"),
        ("2020-01-01 10:00:00", "2020-01-01 10:00:00.000"),
    ],
)
def test_texts_of_json_are_texts(one: str, other: str, tmp_path: Path) -> None:
    """DuckDB takes such texts for dates, times and UUIDs, of which two spellings are one value."""
    folder = tmp_path / "day=2020-01-01"
    folder.mkdir()
    rows = [{"c": text, "l": [text], "s": {"date": text}, "n": n} for n, text in enumerate((one, other, one))]
    (folder / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    encode(tmp_path, tmp_path / "out" / "out.parquet", columns=["c"])
    assert mapping_of(tmp_path / "out" / "out.c.mapping.parquet") == {one: 0, other: 1}
    written = pq.read_table(tmp_path / "out" / "out.parquet")
    assert written["l"].to_pylist() == [[one], [other], [one]]
    assert written["s"].to_pylist() == [{"date": one}, {"date": other}, {"date": one}]
    assert written["n"].to_pylist() == [0, 1, 2]
    assert written["day"].to_pylist() == [date(2020, 1, 1)] * 3


def test_lists_below_a_folder_of_their_name(tmp_path: Path) -> None:
    """What is written is read as it is, whatever its folders say."""
    pq.write_table(pa.table({"k": [["a", "b"], ["b"]]}), tmp_path / "in.parquet")
    (tmp_path / "k=3" / "row=7").mkdir(parents=True)
    (found,) = encode(tmp_path / "in.parquet", tmp_path / "k=3" / "row=7" / "out.parquet", columns=["k"])
    assert (found.ids, found.dropped) == (3, 0)
    mapping = {"k": tmp_path / "k=3" / "row=7" / "out.k.mapping.parquet"}
    (found,) = encode(tmp_path / "in.parquet", tmp_path / "again.parquet", columns=["k"], mappings=mapping)
    assert (found.ids, found.dropped) == (3, 0)


def test_keys_of_json_that_differ_by_case_are_kept(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"id": "2020-01-01", "ID": 2, "x": 1}\n{"id": "2020-01-02", "ID": 3, "x": 1}\n')
    encode(tmp_path / "in.jsonl", tmp_path / "out.parquet", columns=["x"])
    assert pq.read_table(tmp_path / "out.parquet")["ID_1"].to_pylist() == [2, 3]
