"""What type a column has is said by all rows of all files: values that a file tells apart stay apart."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flexshard import AccessProfile
from flexshard.errors import DataError
from flexshard.profiling import encode
from tests.commands import run

MANY = 30_000  # beyond the rows that DuckDB looks at by default


def decoded(folder: Path, files: list[str], **how: Any) -> list[Any]:
    """The column c, encoded and mapped back, and that the other column is as it was."""
    encode([folder / file for file in files], folder / "out.parquet", columns=["c"], **how)
    back = pq.read_table(folder / "out.c.mapping.parquet")["value"].to_pylist()
    return [back[row] for row in pq.read_table(folder / "out.parquet")["c"].to_pylist()]


def lines(kind: str, values: list[Any]) -> str:
    if kind == "json":
        return "".join(json.dumps({"c": value, "x": value}) + "\n" for value in values)
    return "c,x\n" + "".join(f"{value},{value}\n" for value in values)


@pytest.mark.parametrize("kind", ["csv", "json"])
@pytest.mark.parametrize("late", [[1.5, 2.5, 2.49], ["a", "b"], ["007", "7"]])
def test_values_of_another_type_that_come_late(tmp_path: Path, kind: str, late: list[Any]) -> None:
    """Beside pandas: what comes after many rows of whole numbers is not rounded."""
    (tmp_path / f"in.{kind}").write_text(lines(kind, [row % 5 for row in range(MANY)] + late))
    if kind == "json" and isinstance(late[0], str):
        with pytest.raises(DataError, match="column 'c' holds values of more than one type; write them"):
            decoded(tmp_path, ["in.json"])
        return
    found = decoded(tmp_path, [f"in.{kind}"])
    kept = pq.read_table(tmp_path / "out.parquet")["x"].to_pylist()
    assert [str(value) for value in found[-len(late) :]] == [str(value) for value in late]
    assert [str(value).strip('"') for value in kept[-len(late) :]] == [str(value) for value in late]
    if kind == "csv" and isinstance(late[0], float):
        pandas = pytest.importorskip("pandas")
        assert found == pandas.read_csv(tmp_path / "in.csv")["c"].tolist()


def test_a_key_that_comes_late(tmp_path: Path) -> None:
    with (tmp_path / "in.json").open("w") as file:
        file.writelines(json.dumps({"x": 1}) + "\n" for _ in range(MANY))
        file.write(json.dumps({"x": 1, "c": 7}) + "\n")
    assert decoded(tmp_path, ["in.json"], nulls="drop") == [7]


def test_files_of_numbers_of_other_types(tmp_path: Path) -> None:
    """As pandas.concat has them, in either order."""
    for name, values in (("int", pa.array([1, 2], pa.int32())), ("float", [1.5, 2.4]), ("wide", [1, 2**40])):
        pq.write_table(pa.table({"c": values, "x": values}), tmp_path / f"{name}.parquet")
    pq.write_table(pa.table({"c": [3.0, None], "x": [1.7, 2.7]}), tmp_path / "missing.parquet")
    pq.write_table(pa.table({"c": pa.nulls(2), "x": pa.nulls(2)}), tmp_path / "null.parquet")
    pq.write_table(pa.table({"c": pa.array([1, 2], pa.int32()), "y": [1, 2]}), tmp_path / "other.parquet")
    assert decoded(tmp_path, ["int.parquet", "float.parquet"]) == [1.0, 2.0, 1.5, 2.4]
    assert decoded(tmp_path, ["float.parquet", "int.parquet"]) == [1.5, 2.4, 1.0, 2.0]
    assert decoded(tmp_path, ["int.parquet", "wide.parquet"]) == [1, 2, 1, 2**40]
    assert decoded(tmp_path, ["int.parquet", "missing.parquet"], nulls="drop") == [1, 2, 3]
    assert pq.read_table(tmp_path / "out.parquet")["x"].to_pylist() == [1, 2, 1.7]
    assert decoded(tmp_path, ["null.parquet", "int.parquet"], nulls="drop") == [1, 2]
    decoded(tmp_path, ["int.parquet", "other.parquet"])
    assert pq.read_table(tmp_path / "out.parquet")["y"].to_pylist() == [None, None, 1, 2]


def test_times_of_other_units(tmp_path: Path) -> None:
    for name, unit, values in (("coarse", "s", [1, 2]), ("fine", "ns", [1_000_000_001, 1_000_000_002])):
        pq.write_table(pa.table({"c": pa.array(values, pa.timestamp(unit))}), tmp_path / f"{name}.parquet")
    encode([tmp_path / "coarse.parquet", tmp_path / "fine.parquet"], tmp_path / "out.parquet", columns=["c"])
    assert len(pq.read_table(tmp_path / "out.c.mapping.parquet")) == 4


def test_types_that_do_not_go_together(tmp_path: Path) -> None:
    for name, values in (
        ("int", [1, 2]),
        ("text", ["1", "z"]),
        ("list", [[1], [2]]),
        ("large", [1, 2**60 + 1]),
        ("float", [1.5, 2.0]),
    ):
        pq.write_table(pa.table({"c": values}), tmp_path / f"{name}.parquet")
    for files, expected in (
        (("int", "text"), r"text.parquet: column 'c' holds VARCHAR, but BIGINT in .*int.parquet; write both"),
        (("int", "list"), r"cannot be read|list.parquet: column 'c' holds list of BIGINT, but BIGINT in .*int.parquet"),
        (
            ("large", "float"),
            r"large.parquet: column 'c' has whole numbers above 9,007,.* such as 1152921504606846977, ",
        ),
    ):
        for order in (files, files[::-1]):
            with pytest.raises(DataError, match=expected):
                decoded(tmp_path, [f"{name}.parquet" for name in order])
    (tmp_path / "large.json").write_text('{"c": 18446744073709551616}\n{"c": 18446744073709551617}\n')
    with pytest.raises(DataError, match="which are read as floats; write them as texts"):
        decoded(tmp_path, ["large.json"])


@pytest.mark.parametrize("nested", [False, True])
def test_types_that_would_not_stay(tmp_path: Path, nested: bool) -> None:
    """Columns that are only passed on stay as they are, or nothing is written."""
    digits = pa.array([Decimal(10) ** 17 + index for index in range(4)], pa.decimal256(40, 0))
    few = pa.array([Decimal(index) for index in range(4)], pa.decimal256(20, 0))
    spans = pa.array([1, 2, 3, 4], pa.duration("ms"))
    keys = pa.array([5, 6, 7, 5])

    def of(values: pa.Array) -> pa.Array:
        return pa.ListArray.from_arrays(pa.array([0, 1, 2, 3, 4], pa.int32()), values) if nested else values

    pq.write_table(pa.table({"c": of(digits), "x": keys}), tmp_path / "digits.parquet")
    pq.write_table(pa.table({"c": of(spans), "x": keys}), tmp_path / "spans.parquet")
    pq.write_table(pa.table({"c": of(few), "x": keys}), tmp_path / "few.parquet")
    for column in ("c", "x"):
        for name, expected in (
            (
                "digits",
                "column 'c' holds .*decimal256.* would lose digits as they are read; write them with at most",
            ),
            ("spans", "column 'c' holds .*duration.* would be written as plain whole numbers; write them as these"),
        ):
            with pytest.raises(DataError, match=rf"{name}.parquet: {expected}"):
                encode(tmp_path / f"{name}.parquet", tmp_path / "out.parquet", columns=[column])
    assert not (tmp_path / "out.parquet").exists()
    encode(tmp_path / "few.parquet", tmp_path / "out.parquet", columns=["x"])
    assert pq.read_table(tmp_path / "out.parquet")["c"].to_pylist() == of(few).to_pylist()


def test_columns_that_are_not_encoded_have_their_types(tmp_path: Path) -> None:
    of_text = pa.dictionary(pa.int32(), pa.string())
    columns = {
        "user": ["b", "a", "a"],
        "zone": pa.array([1, None, 3], pa.timestamp("us", "Europe/Berlin")),
        "nanoseconds": pa.array([1001, None, 3003], pa.timestamp("ns", "Asia/Tokyo")),
        "category": pa.array(["x", None, "x"], of_text),
        "large": pa.array(["x", None, "z"], pa.large_string()),
        "view": pa.array(["x", None, "z"], pa.string_view()),
        "bytes": pa.array([b"x", None, b"z"], pa.large_binary()),
        "fixed": pa.array([[1.0, 2.0]] * 3, pa.list_(pa.float32(), 2)),
        "lists": pa.array([[1], None, []], pa.large_list(pa.int16())),
        "zones": pa.array([[5], None, []], pa.list_(pa.timestamp("us", "Asia/Tokyo"))),
        "struct": pa.array([{"a": 1, "b": "x"}] * 3, pa.struct([("a", pa.int8()), ("b", of_text)])),
        "map": pa.array([[("a", 1)]] * 3, pa.map_(pa.string(), pa.int32())),
    }
    table = pa.table(columns)
    pq.write_table(table, tmp_path / "log.parquet")
    encode(tmp_path / "log.parquet", tmp_path / "ids.parquet", columns=["user"])
    written = pq.read_table(tmp_path / "ids.parquet")
    assert written.schema.metadata[b"flexshard.encoded"]
    assert written["user"].to_pylist() == [1, 0, 0]
    before = pq.read_table(tmp_path / "log.parquet")
    for name in before.column_names[1:]:
        assert written[name].type == before[name].type
        assert written[name].equals(before[name])
    # Of files that differ, what Parquet has.
    other = table.set_column(1, "zone", table["zone"].cast(pa.timestamp("us", "Asia/Tokyo")))
    pq.write_table(other, tmp_path / "more.parquet")
    both = [tmp_path / "log.parquet", tmp_path / "more.parquet"]
    encode(both, tmp_path / "all.parquet", columns=["user"])
    written = pq.read_table(tmp_path / "all.parquet")
    assert written.schema.field("zone").type == pa.timestamp("us", "UTC")
    assert written.schema.field("category").type == of_text
    assert written["zone"].cast(pa.int64()).to_pylist() == [1, None, 3] * 2


def test_what_pandas_knows_of_columns_stays(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {
            "user": ["b", "a", "a", None],
            "shop": pandas.Categorical(["u", "v", "v", "v"]),
            "category": pandas.Categorical(["x", "y", "x", None], categories=["y", "x", "z"], ordered=True),
            "when": pandas.date_range("2026-01-01", periods=4, tz="Europe/Berlin"),
            "count": pandas.array([1, None, 2, 3], dtype="Int64"),
        },
        index=pandas.Index([3, 5, 7, 9], name="number"),
    )
    frame.to_parquet(tmp_path / "log.parquet")
    encode(tmp_path / "log.parquet", tmp_path / "ids.parquet", columns=["user", "shop"], nulls="drop")
    read, before = (pandas.read_parquet(tmp_path / f"{name}.parquet") for name in ("ids", "log"))
    assert read["user"].tolist() == [1, 0, 0]
    assert read["shop"].tolist() == [1, 0, 0]
    assert [str(kind) for kind in read.dtypes[["user", "shop"]]] == ["int32", "int32"]
    others = ["category", "when", "count"]
    pandas.testing.assert_frame_equal(read[others], before[others].iloc[:3], check_categorical=False)
    assert read["category"].tolist() == ["x", "y", "x"]
    assert str(read["category"].dtype) == "category"
    assert not read["category"].cat.ordered, "a file does not keep the order of categories, and no wrong one is told"
    assert str(read.index.name) == "number"


def test_files_of_which_pandas_knows_other_things(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    columns = {
        "whole": (pandas.array([1, 2], dtype="Int64"), [1.5, 2.5]),
        "flag": (pandas.array([True, False], dtype="boolean"), [1, 0]),
        "small": (pandas.array([1, 2], dtype="Int8"), [300, 400]),
        "text": (["a", "b"], ["c", "d"]),
    }
    for number in range(2):
        frame = pandas.DataFrame({"user": ["b", "a"]} | {name: both[number] for name, both in columns.items()})
        frame.index = pandas.Index([3, 4], name=f"number{number}")
        frame.to_parquet(tmp_path / f"{number}.parquet")
    both = [tmp_path / "0.parquet", tmp_path / "1.parquet"]
    encode(both, tmp_path / "ids.parquet", columns=["user"])
    read = pandas.read_parquet(tmp_path / "ids.parquet")
    assert read["whole"].tolist() == [1, 2, 1.5, 2.5]
    assert read["small"].tolist() == [1, 2, 300, 400]
    assert read["text"].tolist() == ["a", "b", "c", "d"]
    assert read["user"].tolist() == [1, 0, 1, 0]


def test_two_columns_of_one_name(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["b", "a"]), pa.array([1, 2]), pa.array([3, 4])], ["user", "x", "x"])
    pq.write_table(table, tmp_path / "log.parquet")
    encode(tmp_path / "log.parquet", tmp_path / "ids.parquet", columns=["user"])
    assert pq.read_table(tmp_path / "ids.parquet").to_pydict() == {"user": [1, 0], "x": [1, 2], "x_1": [3, 4]}


def test_csv_files_of_other_types(tmp_path: Path) -> None:
    """007 is a text in one file, so that it is one in the other, though all values there are numbers."""
    (tmp_path / "a.csv").write_text("c,x\n007,1\n8,2\n")
    (tmp_path / "b.csv").write_text("x,c\n1.5,abc\n2,007\n")
    (tmp_path / "c.csv").write_text("")
    with pytest.warns(UserWarning, match="c.csv is empty, and left out"):
        assert decoded(tmp_path, ["a.csv", "b.csv", "c.csv"]) == ["007", "8", "abc", "007"]
    (tmp_path / "nan.csv").write_text("c,x\n1.0,1\nNaN,2\n2.0,3\n")
    assert decoded(tmp_path, ["nan.csv"], nulls="drop") == [1, 2]


def test_links_to_folders_are_read(tmp_path: Path) -> None:
    """As pandas reads them; a folder of two names once, and no loop for ever."""
    elsewhere, root = tmp_path / "elsewhere", tmp_path / "root"
    for folder, value in ((root / "day=1", 1), (elsewhere, 2)):
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"c": [value, value]}), folder / "part.parquet")
    (root / "day=2").symlink_to(elsewhere)
    pandas = pytest.importorskip("pandas")
    expected = sorted(pandas.read_parquet(root)["c"].tolist())
    (root / "latest").symlink_to(root / "day=1")
    (root / "loop").symlink_to(root)
    encode(root, tmp_path / "out.parquet", columns=["c"])
    assert sorted(pq.read_table(tmp_path / "out.parquet")["day"].to_pylist()) == [1, 1, 2, 2]
    assert AccessProfile.from_parquet(root, column="c").num_accesses == len(expected) == 4
    lost = run(root, "encode", ".", "--column", "c", "-o", "day=2/part.parquet")
    assert (lost.returncode, "is what this command reads" in lost.stderr) == (2, True)


@pytest.mark.parametrize("what", [".", "*.parquet"])
@pytest.mark.parametrize("command", ["encode", "profile"])
def test_links_to_nothing_are_errors(tmp_path: Path, command: str, what: str) -> None:
    """As for DuckDB: rows would be missing without a word."""
    pq.write_table(pa.table({"c": [1, 2]}), tmp_path / "a.parquet")
    (tmp_path / ".hidden.parquet").symlink_to("nowhere")
    (tmp_path / "out.parquet").write_text("")
    (tmp_path / "b.parquet").symlink_to("gone.parquet")
    done = run(tmp_path, command, what, "--column", "c", "-o", "out.parquet", "--force")
    assert done.returncode == 2, done.stdout
    assert "b.parquet: a link to gone.parquet, which is not there; mend it, or remove it" in done.stderr


def test_an_output_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell leaves --output=~/... as it is; what stands there is looked at before it is written over."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    precious = tmp_path / "home" / "precious.parquet"
    precious.write_text('{"format": "flexshard.plan"}')
    (tmp_path / "in.csv").write_text("c\na\n")
    done = run(tmp_path, "encode", "in.csv", "--column", "c", "--output=~/precious.parquet")
    assert (done.returncode, "precious.parquet exists and is" in done.stderr) == (2, True), done.stderr
    assert precious.read_text() == '{"format": "flexshard.plan"}'


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_says_so(tmp_path: Path, how: signal.Signals) -> None:
    """In a line, as every command; nothing is left of what was begun, or the next run removes it."""
    table = pa.table({"c": pa.array(range(3_000_000)).cast(pa.string())})
    pq.write_table(table, tmp_path / "in.parquet")
    # A shell's background jobs, as tests may be, ignore it.
    heard = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    program = f"{heard}; runpy.run_module('flexshard.cli', run_name='__main__')"
    command = [sys.executable, "-c", program, "encode", "in.parquet", "--column", "c", "-o", "out.parquet"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".out*")) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    time.sleep(0.3)
    os.kill(process.pid, how)
    _, said = process.communicate(timeout=60)
    assert "Traceback" not in said
    assert process.returncode == (130 if how is signal.SIGINT else -signal.SIGTERM), said
    if how is signal.SIGTERM:
        pq.write_table(pa.table({"c": ["a"]}), tmp_path / "in.parquet")
        encode(tmp_path / "in.parquet", tmp_path / "out.parquet", columns=["c"])
        (tmp_path / "out.parquet").unlink()
        (tmp_path / "out.c.mapping.parquet").unlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.parquet"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.5, 2.0, 2.49], "holds DOUBLE, such as '(1.5|2.49)'; write the column as BIGINT, or encode anew"),
        (["1", "x"], "holds VARCHAR, such as 'x'"),
        (["01", "2"], "holds VARCHAR, such as '01'"),
        ([1.0, 2.0], None),
        (["1", "2"], None),
        (pa.array([1, 2], pa.int8()), None),
    ],
)
def test_a_mapping_of_another_type(tmp_path: Path, values: Any, expected: str | None) -> None:
    """What its type does not hold is not rounded to a value that it has."""
    pq.write_table(pa.table({"c": [1, 2, 2]}), tmp_path / "one.parquet")
    encode(tmp_path / "one.parquet", tmp_path / "a.parquet", columns=["c"])
    pq.write_table(pa.table({"c": values}), tmp_path / "two.parquet")
    how: dict[str, Any] = {"columns": ["c"], "mappings": {"c": tmp_path / "a.c.mapping.parquet"}, "unknown": "drop"}
    if expected is None:
        encode(tmp_path / "two.parquet", tmp_path / "b.parquet", **how)
        assert pq.read_table(tmp_path / "b.parquet")["c"].to_pylist() == [1, 0]
        return
    with pytest.raises(DataError, match=rf"a.c.mapping.parquet: its values are BIGINT, and column 'c' {expected}"):
        encode(tmp_path / "two.parquet", tmp_path / "b.parquet", **how)
    assert not (tmp_path / "b.parquet").exists()


def test_a_file_is_given_once(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "a.parquet"
    pq.write_table(pa.table({"user": ["b", "a", "a"]}), log)
    (tmp_path / "logs" / "b.parquet").symlink_to(log)
    for paths in ([log, log], tmp_path / "logs", [log, str(tmp_path / "logs" / "a*.parquet")]):
        with pytest.raises(DataError, match=r"a\.parquet: is given twice, and would be written twice"):
            encode(paths, tmp_path / "ids.parquet", columns=["user"])
    assert not (tmp_path / "ids.parquet").exists()


@pytest.mark.parametrize("users_of", [["b", "a", "a"], [0, 1, 1, 2, 2, 2]])
def test_a_mapping_is_used_once(tmp_path: Path, users_of: list[Any]) -> None:
    pq.write_table(pa.table({"user": users_of}), tmp_path / "log.parquet")
    encode(tmp_path / "log.parquet", tmp_path / "ids.parquet", columns=["user"])
    users, out = tmp_path / "ids.user.mapping.parquet", tmp_path / "out.parquet"
    for unknown in ("error", "drop"):
        with pytest.raises(DataError, match=r"column 'user' holds rows of .*user\.mapping\.parquet already; use it as"):
            encode(tmp_path / "ids.parquet", out, columns=["user"], mappings={"user": users}, unknown=unknown)
    with pytest.raises(DataError, match="holds rows of"):
        AccessProfile.from_parquet(tmp_path / "ids.parquet", column="user", mapping=users)
    assert not out.exists()


def test_spellings_in_csv_are_values(tmp_path: Path) -> None:
    """Dates and times that are encoded are texts, as in JSON; so are cells of a day where none has a separator."""
    lines = ["d,t,s", "2024-01-01,10:00:00,1", "2024-1-1,10:00,007"]
    (tmp_path / "in.csv").write_text("\n".join(lines) + "\n")
    found = encode(tmp_path / "in.csv", tmp_path / "out.parquet", columns=["d", "t"])
    assert [one.mapping.rows for one in found] == [2, 2]
    again = encode(
        tmp_path / "in.csv", tmp_path / "again.parquet", columns=["d"], mappings={"d": found[0].mapping.path}
    )
    assert again[0].mapping.rows == 2
    cut = encode(tmp_path / "in.csv", tmp_path / "cut.parquet", columns=["s"], separator="|")
    assert sorted(pq.read_table(cut[0].mapping.path)["value"].to_pylist()) == ["007", "1"]


def test_whole_numbers_that_floats_do_not_tell_apart(tmp_path: Path) -> None:
    values = [2**53 + 1, 2**53, 0.5]
    (tmp_path / "in.jsonl").write_text("\n".join(json.dumps({"item": value}) for value in values) + "\n")
    with pytest.raises(DataError, match="whole numbers above 9,007,199,254,740,991"):
        encode(tmp_path / "in.jsonl", tmp_path / "out.parquet", columns=["item"])
    (tmp_path / "in.csv").write_text("\n".join(["item", *map(str, values)]) + "\n")
    (found,) = encode(tmp_path / "in.csv", tmp_path / "out.parquet", columns=["item"])
    assert set(pq.read_table(found.mapping.path)["value"].to_pylist()) == {str(value) for value in values}


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        (["1.1", "1.10", "1.2"], True),
        (["t", "true", "f"], True),
        (["0x10", "16"], True),
        (["0x1234567890abcdef1234567890abcdef", "0x1"], True),
        (["+5", "5"], True),
        (["007", "7"], True),
        (["1_000", "1000"], True),
        (["9007199254740993", "0.5"], True),
        (["1.0", "2.0", "2.0"], False),
        (["1.5", "2.5"], False),
        (["true", "false"], False),
        ([" 1", " 2"], False),
        (["nan", "1.0"], False),
        (["2.50", "3.00"], False),
        (["18446744073709551615", "5"], False),
    ],
)
@pytest.mark.parametrize("quoted", [False, True])
def test_texts_in_csv_that_their_type_would_merge_or_change(
    values: list[str], kept: bool, quoted: bool, tmp_path: Path
) -> None:
    cells = [f'"{value}"' if quoted else value for value in values]
    (tmp_path / "in.csv").write_text("\n".join(["c", *cells]) + "\n")
    (found,) = encode(tmp_path / "in.csv", tmp_path / "out.parquet", columns=["c"], nulls="drop")
    mapping = pq.read_table(found.mapping.path)["value"]
    assert pa.types.is_string(mapping.type) == kept
    assert len(mapping) == len(set(values) - {"nan"})
    if kept:
        assert set(mapping.to_pylist()) == set(values)


def test_numbers_in_csv_are_those_that_pandas_reads(tmp_path: Path) -> None:
    """It writes a column of whole numbers with a point where there are nulls: a day with nulls, and one without."""
    (tmp_path / "a.csv").write_text("c,b,e\n1,True,100000\n2,False,2\n")
    (tmp_path / "b.csv").write_text("c,b,e\n1.0,true,1e+05\n,false,2\n")
    files = [tmp_path / "a.csv", tmp_path / "b.csv"]
    found = encode(files, tmp_path / "out.parquet", columns=["c", "b", "e"], nulls="drop")
    values = [pq.read_table(one.mapping.path)["value"] for one in found]
    assert [sorted(each.to_pylist()) for each in values] == [[1, 2], [False, True], [2, 100_000]]
    assert pa.types.is_integer(values[0].type)


def test_folders_are_columns_of_csv_that_are_encoded(tmp_path: Path) -> None:
    for day in ("2024-01-01", "2024-01-02"):
        (tmp_path / "in" / f"day={day}").mkdir(parents=True)
        (tmp_path / "in" / f"day={day}" / "a.csv").write_text("c\n0x10\n16\n")
    days, codes = encode(tmp_path / "in", tmp_path / "out.parquet", columns=["day", "c"])
    assert (days.mapping.rows, codes.mapping.rows) == (2, 2)


def test_csv_is_read_as_its_mapping_was(tmp_path: Path) -> None:
    """Without the one text that made all of them texts, the others are no numbers either; nor are cells cut once."""
    (tmp_path / "a.csv").write_text("c,s\n1.1,1|2\n1.10,3\n1.10,3\nbeta,3\n")
    (tmp_path / "b.csv").write_text("c,s\n1.1,1\n1.10,3\n1.10,3\n")
    (words,) = encode(tmp_path / "a.csv", tmp_path / "a.parquet", columns=["c"])
    encode(tmp_path / "b.csv", tmp_path / "b.parquet", columns=["c"], mappings={"c": words.mapping.path})
    known = pq.read_table(words.mapping.path)
    rows = dict(zip(known["value"].to_pylist(), known["row"].to_pylist(), strict=True))
    assert pq.read_table(tmp_path / "b.parquet")["c"].to_pylist() == [rows["1.1"], rows["1.10"], rows["1.10"]]
    (cut,) = encode(tmp_path / "a.csv", tmp_path / "s.parquet", columns=["s"], separator="|")
    encode(tmp_path / "b.csv", tmp_path / "t.parquet", columns=["s"], mappings={"s": cut.mapping.path})
    assert [len(ids) for ids in pq.read_table(tmp_path / "t.parquet")["s"].to_pylist()] == [1, 1, 1]


def test_local_files_may_be_given_as_urls(tmp_path: Path) -> None:
    (tmp_path / "a b.csv").write_text("c\nred\nblue\nred\n")
    (found,) = encode((tmp_path / "a b.csv").as_uri(), tmp_path / "out.parquet", columns=["c"])
    assert found.ids == 3
    with pytest.raises(DataError, match="values are encoded from local files; copy them here first"):
        encode("s3://bucket/a.csv", tmp_path / "out.parquet", columns=["c"])
