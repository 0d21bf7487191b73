"""The command line as a stranger uses it: real processes, what they print, and what they leave behind."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import flexshard
from flexshard import AccessProfile, Plan
from tests.commands import run
from tests.ingestion.data import log, written

COMMANDS = {
    "profile": {
        "--column",
        "--rows",
        "--hash",
        "--sample-key",
        "--holdout",
        "--by",
        "--distinct-batch",
        "--json",
        "--output",
    },
    "clusters": {"--output", "--json"},
    "measure": {"--memory", "--reserve", "--ranks-per-node", "--sizes", "--repeats", "--output", "--json"},
    "job": {"--cluster", "--batch-size", "--dim", "--output", "--json"},
    "plan": {"--output", "--tiers", "--budget", "--method", "--objective", "--dense", "--observed", "--json"},
    "replan": {"--output", "--json"},
    "timeline": {"--output", "--json"},
    "pareto": {"--output", "--tiers", "--json"},
    "plot": {"--output", "--table", "--json"},
    "explain": {"--json"},
    "calibrate": {"--rounds", "--device", "--output", "--json"},
    "compress": {"--rates", "--plan", "--budget", "--hashed", "--output", "--json"},
    "compare": {"--torchrec", "--time-limit", "--row-wise", "--output", "--json"},
    "diff": {"--json"},
    "drift": {"--json"},
    "replay": {"--column", "--steps", "--batch-size", "--profile", "--distinct", "--json"},
    "cluster-sessions": {
        "--session",
        "--time",
        "--shards",
        "--keep",
        "--keep-by",
        "--seed",
        "--row-group-rows",
        "--memory",
        "--ray",
        "--output",
        "--json",
    },
    "duplication": {"--session", "--feature", "--batch-size", "--threshold", "--output", "--json"},
    "generate": {"--rows", "--samples", "--length", "--exponent", "--seed", "--output", "--json"},
}


def good(folder: Path, *arguments: object) -> str:
    result = run(folder, *arguments)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


def timed(folder: Path, *arguments: object) -> str:
    """What ``calibrate`` prints, which may say that the machine was busy."""
    result = run(folder, "calibrate", "job.yaml", *arguments)
    assert result.returncode == 0, result.stderr
    assert all(line.startswith("flexshard: note: times of ") for line in result.stderr.splitlines()), result.stderr
    return result.stdout


def bad(folder: Path, *arguments: object, limit_bytes: int | None = None) -> str:
    """The one line that a failing command prints; it must leave no new file."""
    before = sorted(folder.rglob("*"))
    result = run(folder, *arguments, limit_bytes=limit_bytes)
    assert result.returncode == 2, (result.returncode, result.stdout, result.stderr)
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("flexshard: error: ")
    assert result.stderr.count("\n") == 1, result.stderr
    assert sorted(folder.rglob("*")) == before, "nothing is left half-written"
    return result.stderr


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, a profile, a job and a plan, made by the commands that a stranger would type."""
    folder = tmp_path_factory.mktemp("work")
    good(folder, "generate", "-o", "clicks.parquet", "--rows", 20_000, "--samples", 5000, "--length", 60)
    profile = ("profile", "clicks.parquet", "--column", "items", "--rows", 20_000, "--holdout", 0.1)
    out = good(folder, *profile, "-o", "items.parquet")
    assert "hottest 1.0%" in out
    assert "20,000" in out
    options = ("--cluster", "dgx-a100:2", "--batch-size", 2048, "--dim", 128)
    good(folder, "job", "items.parquet", *options, "-o", "job.yaml")
    out = good(folder, "plan", "job.yaml", "-o", "plan.json")
    assert "Proof: no plan within the budget has less than" in out
    return folder


def test_the_whole_flow_and_its_json(project: Path) -> None:
    plan = Plan.load(project / "plan.json")
    out = good(project, "plan", "job.yaml", "-o", "again.json", "--json")
    assert json.loads(out)["fingerprint"] == plan.fingerprint
    assert (project / "again.json").read_bytes() == (project / "plan.json").read_bytes()
    assert "Its last row takes" in good(project, "explain", "plan.json")
    assert json.loads(good(project, "explain", "plan.json", "items", "--json"))["boundaries"]
    good(project, "plan", "job.yaml", "-o", "rich.json", "--budget=+10MiB", "--tiers", 2)
    moved = json.loads(good(project, "diff", "plan.json", "rich.json", "--json"))
    assert moved["rows"] == sum(move["rows"] for move in moved["moves"])
    assert good(project, "diff", "plan.json", "again.json").startswith("All rows have the same ranks.")
    good(project, "plan", "job.yaml", "-o", "paper.json", "--method", "paper")
    assert Plan.load(project / "paper.json").settings.method == "paper"
    compared = json.loads(good(project, "compare", "job.yaml", "--no-torchrec", "--json"))
    paper = {"paper_2_tier", "paper_3_tier"}
    assert set(compared["baselines"]) == {"row_wise", "row_wise_dedup", "data_parallel", "whole_table"} | paper
    out = good(project, "pareto", "job.yaml", "-o", "pareto.png")
    assert "memory_neutral" in out
    assert (project / "pareto.png").stat().st_size > 10_000
    for what in ("costs", "skew", "marginal", "step"):
        good(project, "plot", what, "job.yaml", "-o", f"{what}.svg")
        assert (project / f"{what}.svg").read_text().startswith("<?xml")
    assert "100.0%" in good(project, "drift", "items.parquet", "items.parquet")


def on_a_terminal(folder: Path, columns: int, *arguments: object) -> list[str]:
    """Lines that a command prints to a terminal of so many columns, without colours."""
    terminal, inside = os.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    command = [sys.executable, "-m", "flexshard.cli", *map(str, arguments)]
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=inside, stderr=subprocess.PIPE) as process:
        os.close(inside)
        printed = b""
        with contextlib.suppress(OSError):  # what reading raises when nobody has the terminal open
            while block := os.read(terminal, 1 << 16):
                printed += block
        assert process.wait() == 0
    os.close(terminal)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", printed.decode()).splitlines()


def test_tables_fit_a_terminal_of_80_columns_and_show_all_when_asked(project: Path) -> None:
    narrow = ""
    for arguments in (("compare", "job.yaml", "--no-torchrec"), ("clusters", "dgx-h100"), ("plan", "job.yaml")):
        lines = on_a_terminal(project, 80, *arguments)
        assert max(map(len, lines)) <= 80, arguments
        narrow = "\n".join(lines)
    assert "For want of room without" in narrow
    assert "dynamic" not in next(line for line in narrow.splitlines() if "vs row-wise" in line)
    wide = on_a_terminal(project, 80, "plan", "job.yaml", "--wide")
    heading = next(line for line in wide if "vs row-wise" in line)
    assert "dynamic" in heading
    assert "For want of room" not in "".join(wide)


def test_what_is_piped_is_neither_wrapped_nor_padded(project: Path) -> None:
    out = good(project, "plan", "job.yaml")
    assert "For want of room" not in out
    assert all(line == line.rstrip() for line in out.splitlines())
    assert any(line.startswith("Proof: ") and line.endswith(").") for line in out.splitlines())
    (sentence,) = [line for line in good(project, "explain", "plan.json").splitlines() if line.startswith("items: ")]
    assert sentence.endswith("(κ).")


def test_clusters_are_listed_shown_and_written(project: Path) -> None:
    assert "gb200-nvl72" in good(project, "clusters")
    shown = good(project, "clusters", "dgx-h100:128", "-o", "h100.yaml")
    assert "1024" in shown
    assert "Sources" in shown
    assert yaml.safe_load((project / "h100.yaml").read_text())["nodes"] == 128
    assert json.loads(good(project, "clusters", "h100.yaml", "--json"))["levels"][2]["group_size"] == 1024
    assert len(json.loads(good(project, "clusters", "--json"))) == 9


def test_one_profile_per_table_and_a_job_of_all(project: Path) -> None:
    random = np.random.default_rng(0)
    columns = {"table": random.integers(0, 12, 20_000), "row": random.zipf(1.3, 20_000) % 300}
    pq.write_table(pa.table(columns), project / "lookups.parquet")
    out = good(project, "profile", "lookups.parquet", "--column", "row", "--by", "table", "-o", "tables")
    assert "12 files" in out
    files = sorted((project / "tables").iterdir())
    assert len(files) == 12
    good(project, "job", *files, "-o", "many.yaml", "--cluster", "dgx-a100", "--batch-size", 65536, "--dim", 64)
    out = good(project, "plan", "many.yaml", "-o", "many.json")
    assert len(Plan.load(project / "many.json").tables) == 12
    assert "12 table(s)" in good(project, "explain", "many.json")
    assert "A sample reads " in good(project, "explain", "many.json", "7")


def test_reuse_statistics(project: Path) -> None:
    from tests.profiling.test_profile import REUSE

    (project / "reuse.txt").write_text(REUSE)
    good(project, "profile", "reuse.txt", "--reuse", "--rows", 1000, "-o", "reuse.parquet")
    assert AccessProfile.load(project / "reuse.parquet").num_accesses == 1000


@pytest.mark.parametrize("command", COMMANDS)
def test_help_and_flags_are_frozen(command: str, tmp_path: Path) -> None:
    out = good(tmp_path, command, "--help")
    for flag in COMMANDS[command]:
        assert flag in out
    assert "Usage:" in out


def test_tables_are_compressed_to_a_budget(tmp_path: Path) -> None:
    pytest.importorskip("torchrec")
    for name in ("users", "ads"):
        data = ("-o", f"{name}.parquet", "--rows", 200_000, "--samples", 4000, "--length", 10, "--column", name)
        good(tmp_path, "generate", *data)
        good(tmp_path, "profile", f"{name}.parquet", "--column", name, "--rows", 200_000, "-o", f"{name}.profile")
    options = ("--cluster", "dgx-a100:1", "--batch-size", 64, "--dim", 16, "-o", "job.yaml")
    good(tmp_path, "job", "users.profile", "ads.profile", *options)
    job = tmp_path / "job.yaml"
    timed(tmp_path, "-o", "dense.yaml", "--rounds", 3)  # tables alone, for planning steps
    (tmp_path / "step.yaml").write_text(job.read_text() + "dense: 5 ms\nrates: dense.yaml\n")
    good(tmp_path, "plan", "step.yaml", "-o", "step.json")
    planned, measured = Plan.load(tmp_path / "step.json"), yaml.safe_load((tmp_path / "dense.yaml").read_text())
    per_row = {one["rows"]: one["look_up"] for one in measured["tables"]}[200_000]
    assert planned.predicted.look_up_seconds > 0
    assert len(measured["tables"]) == 1  # both tables are of one size
    assert sum(per_row) > 0  # of so few ids the call is all but everything: a fit may give rows and bytes nothing
    (tmp_path / "step.yaml").write_text(job.read_text() + "rates: dense.yaml\n")
    assert "rates decide nothing without dense" in bad(tmp_path, "plan", "step.yaml", "-o", "x.json")
    text = job.read_text().replace(
        "profile: users.profile\n", "profile: users.profile\n  compress: [{ranks: 8, loss: 0.1}]\n"
    )
    job.write_text(text)
    assert "written to rates.yaml" in timed(tmp_path, "-o", "rates.yaml", "--rounds", 1)
    same = bad(tmp_path, "compress", "job.yaml", "--rates", "rates.yaml", "-o", "d.json", "--plan", "d.json")
    assert "give two names" in same
    arguments = ("compress", "job.yaml", "--rates", "rates.yaml", "-o", "d.json")
    out = good(tmp_path, *arguments, "--plan", "plan.json", "--budget", "-1MB")
    assert "tensor train, rows 58 x 59 x 59" in out
    assert "written to d.json and plan.json" in out
    found = good(tmp_path, "explain", "d.json")
    assert "As tiers of rows it would need" in found
    assert "No tensor train was offered for it." in found
    assert json.loads(good(tmp_path, "explain", "d.json", "users", "--json"))["users"].startswith("users: 200,000 rows")
    assert "ads" in good(tmp_path, "explain", "plan.json")
    assert "there is no table 'x'" in bad(tmp_path, "explain", "d.json", "x")
    assert "no choice of tensor trains and tiers fits" in bad(tmp_path, *arguments[:-1], "e.json", "--budget", "-1GB")
    for places in (("-o", "nowhere/e.json"), ("-o", "e.json", "--plan", "nowhere/p.json")):
        nowhere = bad(tmp_path, "compress", "job.yaml", "--rates", "rates.yaml", *places)
        assert "there is no such folder; choose another path with -o" in nowhere
        assert not (tmp_path / "e.json").exists()
    assert "there is no such folder" in bad(tmp_path, "calibrate", "job.yaml", "-o", "nowhere/rates.yaml")
    assert "none.yaml: cannot be read" in bad(tmp_path, "compress", "job.yaml", "--rates", "none.yaml", "-o", "e.json")
    assert "'tpu' is not one of 'cpu', 'cuda'; see '" in bad(
        tmp_path, "calibrate", "job.yaml", "-o", "r.yaml", "--device", "tpu"
    )
    for before, after, message in (
        ("{ranks: 8, loss: 0.1}", "{ranks: 8, loss: -1}", "compress[0]: an option's loss is at least 0, found -1.0"),
        ("{ranks: 8, loss: 0.1}", "{ranks: [8]}", "compress[0]: a tensor train of 200,000 rows of 16 with 3 cores"),
        ("{ranks: 8, loss: 0.1}", "{rank: 8}", "compress[0].rank: this field is unknown; do you mean ranks?"),
    ):
        job.write_text(text.replace(before, after))
        assert message in bad(tmp_path, "compress", "job.yaml", "--rates", "rates.yaml", "-o", "e.json")


def test_two_profiles_of_one_name_want_another(project: Path) -> None:
    command = ("job", "items.parquet", "items.parquet", "--cluster", "dgx-a100", "--batch-size", 64, "--dim", 8)
    assert "table 'items' is given twice" in (said := bad(project, *command, "-o", "two.yaml"))
    assert "flexshard profile --name gives another" in said


def test_every_command_is_listed(tmp_path: Path) -> None:
    out = good(tmp_path, "--help")
    for command in COMMANDS:
        assert f" {command} " in out
    assert good(tmp_path, "--version").startswith("flexshard ")
    for group in ("Data and clusters", "Decide", "See why", "Stored samples"):
        assert f" {group} " in out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_that_the_command_takes(command: str) -> None:
    from typer.main import get_command

    from flexshard.cli.app import app
    from flexshard.cli.commands import register

    register()
    known: Any = get_command(app)
    found = known.commands[command]
    _, _, example = found.help.partition("Example: ")
    words = shlex.split(example)
    assert words.count(command) == 1
    found.make_context(command, words[words.index(command) + 1 :])  # raises where an option is unknown or missing


def test_shells_complete_commands_choices_and_presets(project: Path) -> None:
    for words, expected in (
        ("flexshard pla", {"plan"}),
        ("flexshard plan --method ", {"optimal", "paper"}),
        ("flexshard job --cluster dgx-h", {"dgx-h100"}),
    ):
        environment = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
        environment["_FLEXSHARD_COMPLETE"] = "complete_bash"
        code = "from flexshard.cli import main; import sys; sys.argv = ['flexshard']; main()"
        found = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, check=False
        )
        assert set(found.stdout.split()) == expected, found.stderr


# -- bad input: one clear line, exit code 2, nothing half-written


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Files that cannot be counted."""
    whole = pa.table({"id": np.arange(50_000)})
    pq.write_table(whole, tmp_path / "good.parquet")
    content = (tmp_path / "good.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(content[: len(content) // 2])
    (tmp_path / "text.parquet").write_text("not parquet\n")
    for name, values in {
        "floats": pa.array([1.0, 2.0]),
        "texts": pa.array(["a"]),
        "nulls": pa.array([1, None]),
        "negative": pa.array([3, -7]),
        "empty": pa.array([], pa.int64()),
        "unread": pa.array([[], []], pa.list_(pa.int64())),
    }.items():
        pq.write_table(pa.table({"id": values}), tmp_path / f"{name}.parquet")
    return tmp_path


@pytest.mark.parametrize(
    ("file", "options", "expected"),
    [
        ("none.parquet", (), "none.parquet: no such file"),
        ("text.parquet", (), "text.parquet: not a Parquet file"),
        ("cut.parquet", (), "cut.parquet: not a Parquet file, or cut off"),
        ("good.parquet", ("--column", "item"), "no column 'item'; there are id"),
        ("floats.parquet", (), "column 'id' holds double, not ids"),
        ("texts.parquet", (), "column 'id' holds string, not ids"),
        ("nulls.parquet", (), "1 null ids in the rows from 0 on, the first in row 1"),
        ("negative.parquet", (), "1 ids are outside [0, 2^28), the first is -7 in negative.parquet, row 1"),
        ("good.parquet", ("--rows", 100), "49,900 ids are outside [0, 100), the first is 100 in good.parquet, row 100"),
        ("empty.parquet", (), "empty.parquet: no rows in 1 file(s)"),
        ("unread.parquet", ("--rows", 5), "no row was read in 2 samples"),
        ("good.parquet", ("--holdout", "0.9999999999999"), "num_samples must be at least 1"),
        ("good.parquet", ("--hash", "md5", "--rows", 5), "no hash is called 'md5'; there are splitmix64"),
        ("good.parquet", ("--rows", 0), "num_rows must be at least 1, found 0"),
    ],
)
def test_data_that_cannot_be_counted(data: Path, file: str, options: tuple[object, ...], expected: str) -> None:
    column = () if "--column" in options else ("--column", "id")
    assert expected in bad(data, "profile", file, *column, *options, "-o", "out.parquet")


def test_a_missing_column_option(data: Path) -> None:
    assert "give --column" in bad(data, "profile", "good.parquet", "-o", "out.parquet")
    options = ("--column", "id", "--by", "id", "--distinct-batch", 5)
    assert "--by does not go with" in bad(data, "profile", "good.parquet", *options, "-o", "out")


def test_a_disk_that_is_full_keeps_what_was_there(project: Path) -> None:
    target = project / "full.parquet"
    target.write_text("precious")
    arguments = ("profile", "clicks.parquet", "--column", "items", "-o", "full.parquet", "--force")
    assert "cannot write full.parquet: file too large" in bad(project, *arguments, limit_bytes=4096)
    assert target.read_text() == "precious"
    for arguments in (
        ("plan", "job.yaml", "-o", "full.json"),
        ("pareto", "job.yaml", "-o", "full.png"),
        ("generate", "-o", "full2.parquet"),
        ("clusters", "dgx-h100", "-o", "full.yaml"),
    ):
        assert "cannot write full" in bad(project, *arguments, limit_bytes=300)


def test_places_that_cannot_be_written(project: Path) -> None:
    assert "cannot write none/plan.json: no such file or directory" in bad(
        project, "plan", "job.yaml", "-o", "none/plan.json"
    )
    (project / "folder").mkdir(exist_ok=True)
    assert "cannot write folder: it is a folder" in bad(project, "plan", "job.yaml", "-o", "folder")
    pq.write_table(pa.table({"table": [1], "row": [0]}), project / "one.parquet")
    by = ("one.parquet", "--column", "row", "--by", "table")
    assert "cannot make the folder job.yaml/tables" in bad(project, "profile", *by, "-o", "job.yaml/tables")


def edit(folder: Path, name: str, **changes: object) -> str:
    document = yaml.safe_load((folder / name).read_text())
    tables = changes.pop("table", {})
    assert isinstance(tables, dict)
    document.update(changes)
    document["tables"][0].update(tables)
    (folder / "edited.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    return "edited.yaml"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"cluster": "dgx-z9"}, "edited.yaml:3: cluster: 'dgx-z9' is neither a cluster file nor a preset; presets are"),
        ({"cluster": "mine.yaml"}, "edited.yaml:3: cluster: mine.yaml: no such cluster file"),
        ({"batch_size": "many"}, "edited.yaml:4: batch_size: Input should be a valid integer"),
        ({"batch_size": 0}, "edited.yaml:4: batch_size: Input should be greater than or equal to 1"),
        ({"budget": "-500MB"}, "the least that is feasible is"),
        ({"budget": "2 parsecs"}, "edited.yaml:5: budget: budget must be 'neutral'"),
        ({"budget": 40}, "edited.yaml:5: budget: memory has a unit, such as 40GiB; found 40"),
        ({"budget": 80_000_000_000}, "budget: memory has a unit, such as 40GiB; found 80000000000"),
        ({"host_memory": float("nan")}, "edited.yaml:15: host_memory: memory has a unit, such as 40GiB; found nan"),
        ({"batch_size": "1e3"}, "edited.yaml:4: batch_size: YAML takes 1e3 for a text; write 1000"),
        ({"gap": "1e-3"}, "edited.yaml:15: gap: YAML takes 1e-3 for a text; write 1.0e-3"),
        ({"loss_limit": -1}, "edited.yaml:15: loss_limit must be at least 0, found -1"),
        ({"loss_limit": float("nan")}, "edited.yaml:15: loss_limit must be finite, found nan"),
        ({"table": {"dedup_factor": 1e6}}, "edited.yaml:15: tables[0].dedup_factor: table 'items': a batch of"),
        ({"cluster": 40}, "edited.yaml:3: cluster: expected text, found 40"),
        ({"cluster": "dgx-a100:9999999999"}, "the number of nodes after ':' is a whole number up to 4,096, found '9"),
        ({"tier": 2}, "tier: this field is unknown; do you mean tiers?"),
        ({"table": {"optimiser": "sgd"}}, "tables[0].optimiser: this field is unknown; do you mean optimizer?"),
        ({"table": {"name": ""}}, "a table's name is a text of one line, found ''"),
        ({"table": {"name": "a\nb"}}, "a table's name is a text of one line"),
        ({"tiers": 0}, "edited.yaml:6: tiers: Input should be greater than or equal to 1"),
        ({"method": "magic"}, "edited.yaml:7: method: Input should be 'optimal' or 'paper'"),
        ({"overlap": {"x@1": 0.5}}, "overlap names 'x@1', which the cluster does not have"),
        ({"colour": "red"}, "colour: this field is unknown"),
        ({"dim": 3}, "dim: this field is unknown here; it belongs to tables"),
        ({"table": {"batch_size": 3}}, "tables[0].batch_size: this field is unknown here; it belongs at the top"),
        ({"overlap": {"all_to_all@16": True}}, "overlap.all_to_all@16: Input should be a valid number"),
        ({"overlap": 3}, "overlap: expected text, found 3"),
        ({"index_dedup": "true"}, "index_dedup: expected true, false or auto, found 'true'"),
        ({"index_dedup": 1}, "index_dedup: expected true, false or auto, found 1"),
        ({"host_memory": "nan GB"}, "edited.yaml:15: host_memory: 'nan GB' is not a size"),
        ({"table": {"features": ["a", "a"]}}, "edited.yaml:9: tables[0]: table 'items': feature 'a' is named twice"),
        ({"table": {"features": [""]}}, "a feature's name is empty"),
        ({"host_memory": "0B"}, "edited.yaml:15: host_memory is a number of bytes above 0, found '0B'"),
        ({"gap": -1}, "edited.yaml:15: gap must be at least 0"),
        ({"cluster": ""}, "edited.yaml:3: cluster: '' is neither a cluster file nor a preset"),
        ({"version": 7}, "edited.yaml:2: version: version 7 of flexshard.job is unknown"),
        ({"table": {"rows": 10}}, "edited.yaml:9: tables[0]: table 'items': has 10 rows, but its profile is of 20,000"),
        ({"table": {"dim": None}}, "tables[0].dim: Input should be a valid integer"),
        ({"table": {"optimizer": "lion"}}, "optimizer must be one of sgd"),
        ({"table": {"profile": "none.parquet"}}, "none.parquet: no such file; build it with 'flexshard profile'"),
        ({"table": {"profile": "clicks.parquet"}}, "clicks.parquet: not a profile but other Parquet data"),
        (
            {"table": {"replication_multiplier": float("nan")}},
            "replication_multiplier must be at least 1",
        ),
    ],
)
def test_jobs_that_cannot_be_planned(project: Path, changes: dict[str, object], expected: str) -> None:
    name = edit(project, "job.yaml", **changes)
    assert expected in bad(project, "plan", name, "-o", "never.json")


def test_a_table_of_a_job_has_fields(project: Path) -> None:
    document = yaml.safe_load((project / "job.yaml").read_text())
    (project / "number.yaml").write_text(yaml.safe_dump({**document, "tables": [3]}, sort_keys=False))
    text = "number.yaml:9: tables[0]: expected fields, each with its value, found 3"
    assert text in bad(project, "plan", "number.yaml", "-o", "never.json")


def test_a_job_is_written_only_if_it_can_be_planned(project: Path) -> None:
    before = (project / "job.yaml").read_text()
    options = ("job", "items.parquet", "-o", "job.yaml", "--cluster", "dgx-a100", "--batch-size")
    text = "job.yaml is not written: tables[0]: table 'items': dim must be at least 1"
    assert text in bad(project, *options, 4, "--dim", 0)
    assert "job.yaml is not written: batch_size: " in bad(project, *options, 0, "--dim", 4)
    assert (project / "job.yaml").read_text() == before
    twice = ("job", "items.parquet", "items.parquet", "-o", "twice.yaml", "--cluster", "dgx-a100")
    assert "table 'items' is given twice" in bad(project, *twice, "--batch-size", 4, "--dim", 4)


def test_paths_in_a_job_are_relative_to_it_and_do_not_change_the_plan(project: Path) -> None:
    (project / "sub").mkdir(exist_ok=True)
    good(project, "clusters", "dgx-a100:2", "-o", "mine.yaml")
    made = ("job", "items.parquet", "-o", "sub/job.yaml", "--cluster", "mine.yaml", "--batch-size", 64, "--dim", 8)
    good(project, *made)
    good(project, "plan", "sub/job.yaml", "-o", "a.json")
    good(project / "sub", "plan", "job.yaml", "-o", "b.json")
    assert (project / "a.json").read_bytes() == (project / "sub" / "b.json").read_bytes()
    assert Plan.load(project / "a.json").tables["items"].profile_path == "../items.parquet"


def test_odd_names_are_shown_and_kept_apart(project: Path) -> None:
    columns = {"table": ["a/b", "a_b", "[red]", "$x_{$", "..", "-o"], "row": [0, 1, 2, 3, 4, 5]}
    pq.write_table(pa.table(columns), project / "odd.parquet")
    out = good(project, "profile", "odd.parquet", "--column", "row", "--by", "table", "-o", "odd")
    assert "[red]" in out
    files = sorted((project / "odd").glob("*.parquet"))
    assert len(files) == len([*(project / "odd").iterdir()]) == 6
    assert not [file for file in files if file.name.startswith((".", "-"))]
    good(project, "job", *files, "-o", "odd.yaml", "--cluster", "dgx-a100", "--batch-size", 64, "--dim", 8)
    assert "$x_{$" in good(project, "plan", "odd.yaml", "-o", "odd.json")
    good(project, "plot", "skew", "odd.yaml", "-o", "odd.png")


def test_wrong_usage_is_one_line(project: Path) -> None:
    assert "Missing option '--output' / '-o'" in bad(project, "pareto", "job.yaml").replace(
        "'-o' / '--output'", "'--output' / '-o'"
    )
    assert "Invalid value for '--tiers'" in bad(project, "plan", "job.yaml", "-o", "x.json", "--tiers", "many")
    assert "No such command 'plam'" in bad(project, "plam")
    assert "No such option" in bad(project, "plan", "job.yaml", "--colour")
    assert "cannot draw x.txt: the name of a picture ends in .png, .svg, .pdf" in bad(
        project, "pareto", "job.yaml", "-o", "x.txt"
    )
    assert "is what this command reads, and would be lost" in bad(
        project, "profile", "clicks.parquet", "--column", "items", "-o", "clicks.parquet"
    )
    twice = ("profile", "clicks.parquet", "clicks.parquet", "--column", "items", "-o", "x.parquet")
    assert "is given twice" in bad(project, *twice)
    (project / "double.yaml").write_text((project / "job.yaml").read_text() + "tiers: 2\n")
    assert "tiers: this field is given twice" in bad(project, "plan", "double.yaml", "-o", "x.json")


def test_paths_of_home_are_expanded_behind_equals_signs(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "home").mkdir()
    (project / "home" / "job.yaml").write_text((project / "job.yaml").read_text().replace("items", "../items"))
    monkeypatch.setenv("HOME", str(project / "home"))
    for words in (["plan", "~/job.yaml", "--output=~/plan.json"], ["pareto", "~/job.yaml", "--output=~/p.png"]):
        result = run(project, *words, new=True)
        assert (result.returncode, result.stderr) == (0, "")
    assert {"plan.json", "p.png"} <= {file.name for file in (project / "home").iterdir()}


def test_letters_that_an_encoding_lacks_are_spelt(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of tables stay lines, and columns below each other."""
    plain = run(project, "explain", "plan.json", new=True).stdout
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    spelt = run(project, "explain", "plan.json", new=True)
    assert (spelt.returncode, spelt.stderr) == (0, "")
    assert "\\u2" not in spelt.stdout
    assert "\\xb5" not in spelt.stdout
    assert [line.count("-") for line in spelt.stdout.splitlines() if "----" in line] == [
        line.count("─") + line.count("-") for line in plain.splitlines() if "────" in line
    ]


def test_the_package_runs_as_the_command_does(project: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "flexshard", "--version"], capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stdout) == (0, good(project, "--version"))


def test_commands_of_these_tests_are_those_of_new_processes(project: Path) -> None:
    for words in ("clusters --json", "--help", "explain", "profile nothing.parquet", "job no.yaml"):
        forked, new = (run(project, *words.split(), new=new) for new in (False, True))
        assert (forked.returncode, forked.stdout, forked.stderr) == (new.returncode, new.stdout, new.stderr)
        assert forked.stdout + forked.stderr


def test_a_full_pipe_and_a_closed_one(project: Path) -> None:
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "flexshard.cli", "clusters"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert result.returncode == 2
    assert result.stderr == "flexshard: error: cannot write to standard output: No space left on device\n"


def test_clusters_that_do_not_divide(project: Path) -> None:
    good(project, "clusters", "dgx-a100:2", "-o", "two_nodes.yaml")
    text = (project / "two_nodes.yaml").read_text().replace("group_size: 8", "group_size: 3")
    (project / "odd.yaml").write_text(text)
    line = 1 + text[: text.index("group_size: 3")].count("\n")
    assert f"odd.yaml:{line}: levels[1]: group size 3 does not divide the 16 ranks" in bad(
        project, "clusters", "odd.yaml"
    )
    assert "no such file" in bad(project, "clusters", "none.yaml")
    assert "neither a cluster file nor a preset" in bad(project, "clusters", "none")


def test_plans_that_cannot_be_read(project: Path) -> None:
    text = (project / "plan.json").read_text()
    (project / "old.json").write_text(text.replace('"version": 2', '"version": 0'))
    assert "old.json: version 0 of plans is unknown" in bad(project, "explain", "old.json")
    (project / "cut.json").write_text(text[:500])
    assert "cut.json:" in bad(project, "explain", "cut.json")
    assert "not valid JSON" in bad(project, "diff", "plan.json", "cut.json")
    assert "none.json: cannot be read: no such file or directory" in bad(project, "explain", "none.json")
    assert "the plan has no table 'users'; it has items" in bad(project, "explain", "plan.json", "users")
    assert "'heat' is not one of 'costs', 'skew', 'marginal', 'step', 'ranks'" in bad(
        project, "plot", "heat", "job.yaml", "-o", "x.png"
    )


def test_torchrec_is_named_where_it_is_missing(project: Path) -> None:
    script = (
        "import sys; sys.modules['torchrec'] = None; from flexshard.cli import main;"
        "sys.argv = ['flexshard', 'compare', 'job.yaml', '--torchrec']; main()"
    )
    found = subprocess.run([sys.executable, "-c", script], cwd=project, capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert "pip install --no-deps torchrec==1.8.0" in found.stderr


def observed_file(folder: Path, plan: Plan, name: str, scale: float = 1.0, **fields: object) -> None:
    """An observation that agrees with a plan's prediction but for a factor."""
    from flexshard.executors import Observation, ObservedCollective, predicted_bytes

    collectives = tuple(
        ObservedCollective(kind, size, content, 1.0, scale * nbytes, scale * nbytes, 0.01, 0.004, (scale * nbytes,))
        for (kind, size, content), nbytes in sorted(predicted_bytes(plan).items())
    )
    found = Observation(plan.fingerprint, plan.cluster.world_size, (0.1, 0.2, 0.3), collectives)
    document = found.document() | fields
    (folder / name).write_text(json.dumps(document))


def test_compare_sets_a_plan_beside_what_ran(project: Path, tmp_path: Path) -> None:
    plan = Plan.load(project / "plan.json")
    observed_file(project, plan, "observed.json", 1.01)
    out = good(project, "compare", "plan.json", "observed.json", "-o", tmp_path / "figure6.png")
    assert "+1.0%" in out
    assert (tmp_path / "figure6.png").stat().st_size > 5000
    found = json.loads(good(project, "compare", "plan.json", "observed.json", "--json"))["plan"]
    assert found["reduction_observed"] == pytest.approx(1 - 1.01 * (1 - found["reduction_predicted"]))
    assert set(found["overlap"].values()) == {0.6}
    assert all(line["error"] == pytest.approx(0.01) for line in found["lines"] if line["unit"] == "bytes")

    assert "every plan needs what was observed of it" in bad(
        project, "compare", "plan.json", "observed.json", "plan.json"
    )
    assert "plan.json is of the kind plan" in bad(project, "compare", "plan.json", "plan.json")
    observed_file(project, plan, "other.json", fingerprint="f" * 64)
    assert "the observation is of plan ffffffffffff" in bad(project, "compare", "plan.json", "other.json")
    observed_file(project, plan, "other.json", world_size=3)
    assert "the observation is of 3 ranks, the plan is for 16" in bad(project, "compare", "plan.json", "other.json")
    observed_file(project, plan, "other.json", version=9)
    assert "version 9 of observations is unknown" in bad(project, "compare", "plan.json", "other.json")
    (project / "other.json").write_text((project / "observed.json").read_text()[:200])
    assert "other.json:1: not valid JSON" in bad(project, "compare", "plan.json", "other.json")
    assert "go with a plan and what was observed" in bad(project, "compare", "job.yaml", "-o", "x.png")
    (project / "other.json").unlink()
    (project / "observed.json").unlink()


def test_replay_counts_what_a_plan_would_move(project: Path) -> None:
    job = yaml.safe_load((project / "job.yaml").read_text()) | {"batch_size": 256}
    (project / "small.yaml").write_text(yaml.safe_dump(job))
    good(project, "plan", "small.yaml", "-o", "small.json")
    replay = ("replay", "small.json", "clicks.parquet", "--column")
    assert "imbalance" in good(project, *replay, "items")
    found = json.loads(good(project, *replay, "items", "--json"))
    assert found["steps"] == 5000 // (16 * 256)
    assert found["world_size"] == 16
    assert all(c["bytes"] > 0 for c in found["collectives"] if c["content"] == "embeddings")
    assert found["steps_above_predicted"] <= 1
    assert 0 < found["fullest_memory_p999_bytes"] <= found["peak_memory_bytes"] - found["static_memory_bytes"]
    assert f"{found['steps_above_predicted']} of {found['steps']} exceed" in good(project, *replay, "items")
    other = json.loads(good(project, *replay, "items", "--json", "--batch-size", "16"))
    assert other["predicted_p999_bytes"] is None
    assert "no column 'x'" in bad(project, *replay, "x")
    assert "the plan has no table 'x'" in bad(project, *replay, "x=items")
    assert "none.parquet" in bad(project, *replay, "items", "--profile", "none.parquet")
    assert "5,000 samples are less than one step" in bad(project, "replay", "plan.json", *replay[2:], "items")
    (project / "small.yaml").unlink()
    (project / "small.json").unlink()


def test_steps_are_planned_and_drawn(project: Path, tmp_path: Path) -> None:
    out = good(project, "plan", "job.yaml", "-o", tmp_path / "step.json", "--dense", "20 ms")
    assert "a step of less than" in out
    plan = Plan.load(tmp_path / "step.json")
    assert (plan.settings.objective, plan.settings.dense_seconds) == ("step", 0.02)
    job = yaml.safe_load((project / "job.yaml").read_text()) | {"dense": "20 ms"}
    job["tables"][0]["profile"] = str(project / "items.parquet")
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    good(tmp_path, "plan", "job.yaml", "-o", "same.json")
    same = Plan.load(tmp_path / "same.json")
    assert (same.predicted, same.lower_bound_seconds) == (plan.predicted, plan.lower_bound_seconds)
    observed_file(project, Plan.load(project / "plan.json"), "observed.json")
    ran = ("--observed", "plan.json", "observed.json")
    good(project, "plan", "job.yaml", "-o", tmp_path / "seen.json", *ran)
    waited = 0.004 * len(json.loads((project / "observed.json").read_text())["collectives"])
    seen = Plan.load(tmp_path / "seen.json")
    assert seen.settings.dense_seconds == pytest.approx(0.2 - waited)
    assert {one.overlap for one in seen.predicted.collectives} == {0.6}
    told = tmp_path / "told.yaml"
    told.write_text(yaml.safe_dump(job | {"overlap": {}}))
    good(project, "plan", told, "-o", tmp_path / "told.json", *ran)
    assert {one.overlap for one in Plan.load(tmp_path / "told.json").predicted.collectives} == {0.0}
    good(tmp_path, "plan", "job.yaml", "-o", "sum.json", "--objective", "communication")
    assert Plan.load(tmp_path / "sum.json").settings.dense_seconds is None
    assert "give one of them" in bad(project, "plan", "job.yaml", "-o", tmp_path / "x.json", *ran, "--dense", "1 ms")
    assert "not one of 'communication', 'step'" in bad(project, "plan", "job.yaml", "--objective", "speed")
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job | {"dense": "20"}))
    assert "dense" in bad(tmp_path, "plan", "job.yaml", "-o", "x.json")

    out = good(tmp_path, "timeline", "step.json", "-o", "trace.json")
    assert "dense: 20 ms (rank 20 ms)" in out
    trace = json.loads((tmp_path / "trace.json").read_text())
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    phases = [e for e in spans if e["pid"] == 1 and e["tid"] == 0]
    assert sum(e["dur"] for e in phases) == pytest.approx(1e6 * sum(p.seconds for p in plan.phases), abs=0.01)
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in spans)
    assert "keeps no single step" in bad(project, "timeline", "plan.json", "observed.json", "-o", tmp_path / "t.json")
    assert "is a plan, not a trace" in bad(tmp_path, "timeline", "step.json", "-o", "same.json")
    (project / "observed.json").unlink()


def test_a_plan_is_planned_again(project: Path, tmp_path: Path) -> None:
    good(tmp_path, "generate", "-o", "later.parquet", "--rows", 20_000, "--samples", 5000, "--length", 60, "--seed", 5)
    good(tmp_path, "profile", "later.parquet", "--column", "items", "--rows", 20_000, "-o", "later.profile")
    out = good(project, "replan", "plan.json", tmp_path / "later.profile", "-o", tmp_path / "new.json")
    assert "paid back after" in out or "nothing is saved" in out
    found = json.loads(good(project, "replan", "plan.json", f"items={tmp_path / 'later.profile'}", "--json"))
    assert found["after"] == Plan.load(tmp_path / "new.json").fingerprint
    assert found["saved_seconds_per_step"] == pytest.approx(found["seconds_before"] - found["seconds_after"])
    again = json.loads(good(tmp_path, "replan", "new.json", "later.profile", "--json"))  # which names its profile
    assert again["moved_bytes"] == 0
    same = json.loads(good(project, "replan", "plan.json", "items.parquet", "--json"))
    assert same["moved_bytes"] == 0
    # What row-wise needs is another number of bytes with other reads.
    assert found["budget_bytes_before"] == Plan.load(project / "plan.json").settings.budget_bytes
    assert found["budget_bytes_after"] == Plan.load(tmp_path / "new.json").settings.budget_bytes
    assert 0 < found["memory_bytes_after"] <= found["budget_bytes_after"] != found["budget_bytes_before"]
    assert "The budget (neutral) is " in " ".join(out.split())
    assert same["budget_bytes_before"] == same["budget_bytes_after"]
    assert "The budget" not in good(project, "replan", "plan.json", "items.parquet")
    assert same["saved_seconds_per_step"] == pytest.approx(0, abs=1e-9)
    assert "the plan has no table 'x'; it has items" in bad(project, "replan", "plan.json", "x=items.parquet")
    assert "x=none.parquet: no such file" in bad(project, "replan", "plan.json", "x=none.parquet")
    assert "no such file" in bad(project, "replan", "plan.json", "nothing.profile")
    assert "would be lost" in bad(project, "replan", "plan.json", "items.parquet", "-o", "items.parquet")


def test_a_table_has_one_newer_profile(project: Path) -> None:
    twice = ("items=items.parquet", "items=clicks.parquet")
    assert "table 'items' has a newer profile already, items.parquet" in bad(project, "replan", "plan.json", *twice)


def test_what_a_job_names_is_not_written_over(project: Path) -> None:
    profile, cluster = (project / "items.parquet").read_bytes(), project / "own.yaml"
    good(project, "clusters", "dgx-a100:2", "-o", "own.yaml")
    job = (project / "job.yaml").read_text().replace("dgx-a100:2", "own.yaml")
    (project / "named.yaml").write_text(job)
    for output in ("items.parquet", "own.yaml"):
        for command in ("plan", "pareto"):
            said = bad(project, command, "named.yaml", "-o", output, "--force")
            assert f"{output} is what this command reads, and would be lost" in said
    assert (project / "items.parquet").read_bytes() == profile
    assert "flexshard.cluster" in cluster.read_text()


def test_sessions_are_clustered_and_measured(tmp_path: Path) -> None:
    data = log(600)
    written(data, tmp_path / "log", 2)
    out = good(tmp_path, "duplication", "log", "--session", "session", "--batch-size", 16)
    assert "groups to deduplicate: none is above the threshold" in out
    inside = bad(tmp_path, "cluster-sessions", "log", "-o", "log/in", "--session", "session", "--time", "time")
    assert "log/in lies in log, with which it would be read from now on" in inside
    cluster = ("cluster-sessions", "log", "-o", "by_session", "--session", "session", "--time", "time")
    out = good(tmp_path, *cluster, "--shards", 2, "--memory", "200MB")
    assert "written to by_session (2 files)" in out
    words = ("duplication", "by_session", "--session", "session", "--batch-size", 64, "-o", "pictures")
    assert "sessions.png: file too large" in bad(tmp_path, *words, limit_bytes=4096)  # and the folder is not there
    out = good(tmp_path, *words)
    assert "groups to deduplicate: [liked]\n" in out
    assert "to deduplicate partially (newest last): [history, shops]" in out
    for name in ("sessions.png", "duplication.png"):
        assert (tmp_path / "pictures" / name).read_bytes().startswith(b"\x89PNG")
    found = json.loads(good(tmp_path, "duplication", "by_session", "--session", "session", "--json"))
    assert (found["groups"], found["partial"]["last"]) == ([["liked"]], [["history", "shops"]])
    hours = (*cluster[:3], "hours", *cluster[4:], "--order", "start", "--partition")
    assert "written to hours" in good(tmp_path, *hours, 300)
    assert "give partitions as a number in its own unit" in bad(tmp_path, *hours[:3], "x", *hours[4:], "1h")
    assert "'end' is not one of 'key', 'start'" in bad(tmp_path, *cluster[:3], "x", *cluster[4:], "--order", "end")
    assert found["samples_per_session"] == pytest.approx(data.num_rows / 600)
    kept = (*cluster[:3], "half", *cluster[4:], "--keep", 0.5, "--keep-by", "sample", "--json")
    assert json.loads(good(tmp_path, *kept))["samples_per_session"] < 0.7 * found["samples_per_session"]
    assert "it exists and is not an empty folder" in bad(tmp_path, *cluster)
    assert "no column 'user'" in bad(tmp_path, *cluster[:3], "x", "--session", "user", "--time", "time")
    assert "not one of 'session', 'sample'" in bad(tmp_path, *kept[:-2], "row")
    assert "DataError" not in bad(tmp_path, "duplication", "nowhere", "--session", "session")


def test_outputs_do_not_replace_inputs(project: Path) -> None:
    job = (project / "job.yaml").read_bytes()
    for words in (("plan", "job.yaml"), ("pareto", "job.yaml"), ("plot", "skew", "job.yaml")):
        assert "job.yaml is what this command reads, and would be lost" in bad(project, *words, "-o", "job.yaml")
        assert "would be lost" in bad(project, *words, "-o", "job.yaml", "--force")
    (project / "link.json").symlink_to("job.yaml")
    assert "would be lost" in bad(project, "plan", "job.yaml", "-o", "link.json")
    assert (project / "job.yaml").read_bytes() == job


def test_what_is_written_beside_the_output_replaces_nothing_either(tmp_path: Path) -> None:
    """Mappings, and a folder's profiles."""

    def table(name: str, **columns: list[object]) -> bytes:
        pq.write_table(pa.table(columns), tmp_path / name)
        return (tmp_path / name).read_bytes()

    logs = {name: table(name, a=["x", "y", "x"], z=[1, 2, 3]) for name in ("in.a.mapping.parquet", "log.parquet")}
    lost = bad(tmp_path, "encode", "in.a.mapping.parquet", "--column", "a", "-o", "in.parquet", "--force")
    assert "in.a.mapping.parquet is what this command reads, and would be lost" in lost
    kept = ("encode", "log.parquet", "--column", "a", "-o", "in.parquet")
    assert "in.a.mapping.parquet exists and is a Parquet file of data, not a mapping" in bad(tmp_path, *kept)
    good(tmp_path, "encode", "log.parquet", "--column", "a", "-o", "out.parquet")
    good(tmp_path, "encode", "log.parquet", "--column", "a", "-o", "out.parquet")
    again = ("--mapping", "out.a.mapping.parquet", "-o", "out.a.mapping.parquet", "--force")
    assert "would be lost" in bad(tmp_path, "encode", "log.parquet", "--column", "a", *again)
    assert {name: (tmp_path / name).read_bytes() for name in logs} == logs

    (tmp_path / "folder.parquet").mkdir()
    before = (tmp_path / "out.a.mapping.parquet").read_bytes()
    (tmp_path / "out.parquet").unlink()
    (tmp_path / "out.parquet").mkdir()
    table("other.parquet", a=["q", "r"])
    assert "it is a folder" in bad(tmp_path, "encode", "other.parquet", "--column", "a", "-o", "out.parquet")
    assert (tmp_path / "out.a.mapping.parquet").read_bytes() == before
    assert "it is a folder" in bad(tmp_path, "encode", "other.parquet", "--column", "a", "-o", "folder.parquet")
    assert not (tmp_path / "folder.a.mapping.parquet").exists()
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    assert "cannot write one: its links lead in a circle" in bad(
        tmp_path, "encode", "other.parquet", "--column", "a", "-o", "one"
    )
    through = ("--column", "a", "--mapping", "out.a.mapping.parquet", "-o", "out.a.mapping.parquet", "--force")
    assert "would be lost" in bad(tmp_path, "profile", "log.parquet", *through)

    table("alike.parquet", **{"a/b": ["p", "q"], "a_b": ["z", "w"]})
    both = bad(tmp_path, "encode", "alike.parquet", "--column", "a/b", "--column", "a_b", "-o", "o.parquet")
    assert "o.a_b.mapping.parquet would be the mapping of column 'a_b' and of column 'a/b'" in both
    assert "-o a_b.profile.parquet" in good(tmp_path, "encode", "alike.parquet", "--column", "a/b", "-o", "o.parquet")

    (tmp_path / "all").mkdir()
    own = table("all/a.profile.parquet", i=[1, 2], t=["a", "b"])
    for given in ("all", "all/*.parquet", "all/a.profile.parquet"):
        assert "would be lost" in bad(tmp_path, "profile", given, "--column", "i", "--by", "t", "-o", "all", "--force")
    counted = ("profile", "all", "--column", "i", "-o", "all/a.profile.parquet", "--force")
    assert "would be lost" in bad(tmp_path, *counted)
    table("by.parquet", i=[1, 2], t=["a", "b"])
    by = ("profile", "by.parquet", "--column", "i", "--by", "t", "-o")
    assert "a.profile.parquet exists and is a Parquet file of data, not a profile" in bad(tmp_path, *by, "all")
    assert (tmp_path / "all" / "a.profile.parquet").read_bytes() == own
    (tmp_path / "half" / "b.profile.parquet").mkdir(parents=True)
    assert "half/b.profile.parquet: it is a folder" in bad(tmp_path, *by, "half")
    assert [path.name for path in (tmp_path / "half").iterdir()] == ["b.profile.parquet"]
    table("long.parquet", i=[1, 2], t=["a", "b" * 300])
    long = ("profile", "long.parquet", "--column", "i", "--by", "t", "-o")
    assert "bb.profile.parquet: file name too long" in bad(tmp_path, *long, "new")
    assert not (tmp_path / "new").exists()


def test_options_that_would_do_nothing_are_refused(project: Path) -> None:
    counted = ("profile", "clicks.parquet", "--column", "item", "-o", "again.profile")
    for more, expected in (
        (("--batch", 3), "--batch goes with --reuse"),
        (("--by", "user", "--name", "t"), "--by does not go with --mapping, --distinct-batch or --name"),
        (("--name", ""), "a table's name is a text of one line, found ''"),
        (("--name", "a\nb"), "a table's name is a text of one line, found 'a\\nb'"),
    ):
        assert expected in bad(project, *counted, *more)
    assert "which cluster is to be written?" in bad(project, "clusters", "-o", "c.yaml")
    columns = ("--column", "item", "--column", "user")
    assert "table 'items' is given item and user; give it one" in bad(
        project, "replay", "plan.json", "clicks.parquet", *columns
    )
    for limit in ("-1", "nan"):
        assert "time_limit_seconds must be" in bad(project, "compare", "job.yaml", "--time-limit", limit)


def test_outputs_replace_their_own_kind_alone(project: Path) -> None:
    (project / "notes.txt").write_text("what I must not forget")
    assert "notes.txt exists and is another file, not a plan" in bad(project, "plan", "job.yaml", "-o", "notes.txt")
    profile = written_copy(project / "items.parquet")
    assert "is a profile, not a plan" in bad(project, "plan", "job.yaml", "-o", profile)
    assert "is a Parquet file of data, not a profile" in bad(
        project, "profile", "clicks.parquet", "--column", "items", "-o", written_copy(project / "clicks.parquet")
    )
    assert (project / "notes.txt").read_text() == "what I must not forget"
    good(project, "plan", "job.yaml", "-o", "again.json")
    good(project, "plan", "job.yaml", "-o", "again.json")  # a plan in a plan's place
    (project / "empty.json").touch()
    good(project, "plan", "job.yaml", "-o", "empty.json")
    good(project, "plan", "job.yaml", "-o", "notes.txt", "--force")
    assert Plan.load(project / "notes.txt").fingerprint == Plan.load(project / "again.json").fingerprint


def test_outputs_have_names_that_they_can_have(project: Path) -> None:
    assert "-o takes the path of a file, found '-'" in bad(project, "plan", "job.yaml", "-o", "-")
    for command in (
        ("duplication", "clicks.parquet", "--session", "items"),
        ("cluster-sessions", "clicks.parquet", "--session", "items", "--time", "items"),
        ("rewrite", "clicks.parquet"),
    ):
        assert "-o takes the path of a folder, found '-'" in bad(project, *command, "-o", "-")
    assert "cannot draw pic: the name of a picture ends in .png, .svg, .pdf" in bad(
        project, "pareto", "job.yaml", "-o", "pic"
    )
    assert "File name too long; choose another path" in bad(project, "plan", "job.yaml", "-o", "a" * 300 + ".json")


def test_files_of_another_kind_are_named(project: Path) -> None:
    text = "compare takes one job, or PLAN OBSERVED in turn"
    assert f"plan.json is of the kind plan; {text}" in bad(project, "compare", "plan.json")
    assert f"job.yaml is of the kind job; {text}" in bad(project, "compare", "job.yaml", "job.yaml")
    assert f"job.yaml is of the kind job; {text}" in bad(project, "compare", "plan.json", "job.yaml")
    good(project, "plan", edit(project, "job.yaml", table={"name": "others"}), "-o", "others.json")
    assert "plan.json and others.json have no table in common: one is of items, the other of others" in bad(
        project, "diff", "plan.json", "others.json"
    )


def test_pipes_tables_without_names_and_shards_without_rows(project: Path) -> None:
    os.mkfifo(project / "pipe")
    with (project / "pipe").open("r+b", buffering=0) as pipe:
        pipe.write(b"PAR1")
        words = ("profile", "pipe", "--column", "items", "-o", "x.parquet")
        assert "pipe: a pipe cannot be read as Parquet; write it to a file first" in bad(project, *words)
    pq.write_table(pa.table({"row": [1, 2], "table": ["a", None]}), project / "unnamed.parquet")
    words = ("profile", "unnamed.parquet", "--column", "row", "--by", "table", "-o", "x")
    assert "column of tables (by) 'table' is null in row 1; drop or fill such rows" in bad(project, *words)
    words = ("cluster-sessions", "unnamed.parquet", "-o", "x", "--session", "row", "--time", "row", "--shards", 100_000)
    assert "100,000 shards of 2 rows would be empty files; at most one for each row" in bad(project, *words)


def test_nothing_slow_is_imported_before_an_interrupt_is_a_line() -> None:
    source = Path(flexshard.__file__).parents[1]
    code = f"import sys; sys.path.insert(0, {str(source)!r}); import flexshard.cli; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    assert not {"typing", "importlib.metadata", "typer", "numpy"} & set(found.stdout.split())


def test_interrupted_while_it_starts_and_without_an_output(project: Path) -> None:
    find = "lambda name, *_: os.kill(os.getpid(), signal.SIGINT) if name == sys.argv[1] else None"
    code = f"import os, signal, sys; sys.meta_path.insert(0, type('I', (), {{'find_spec': staticmethod({find})}}))"
    code += "; from flexshard.cli import main; main()"
    for module in ("typer", "flexshard.cli.commands.plan"):
        interrupted = [sys.executable, "-c", code, module]
        result = subprocess.run(interrupted, capture_output=True, text=True, check=False)
        assert (result.returncode, result.stderr) == (130, "flexshard: interrupted\n")
    # Typer's own loop turns an interrupt within a command into a code, without a word.
    code = "import sys, flexshard.topologies as t; t.preset_names = lambda: (_ for _ in ()).throw(KeyboardInterrupt)"
    code += "; sys.argv[1:] = ['clusters']; from flexshard.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (130, "flexshard: interrupted\n")
    closed = f"{sys.executable} -m flexshard.cli plan job.yaml >&-"
    result = subprocess.run(["bash", "-c", closed], cwd=project, capture_output=True, text=True, check=False)
    expected = "flexshard: error: standard output is closed; send it to a file, or to /dev/null\n"
    assert (result.returncode, result.stderr) == (2, expected)


@pytest.mark.parametrize("becomes", ["pass", "raise SystemError('returned a result with an exception set')"])
def test_an_interrupt_that_compiled_code_swallows_is_heard(project: Path, becomes: str) -> None:
    """As where Arrow imports pandas in the middle of a command: it went on, or ended with a traceback."""
    code = f"""
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
import flexshard.profiling as profiling
counted = profiling.AccessProfile.from_parquet
def from_parquet(*args, **how):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        {becomes}
    return counted(*args, **how)
profiling.AccessProfile.from_parquet = from_parquet
sys.argv[1:] = ["profile", "clicks.parquet", "--column", "items", "-o", "new.parquet"]
from flexshard.cli import main
main()
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=project, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (130, "flexshard: interrupted\n")
    assert not (project / "new.parquet").exists()


def written_copy(path: Path) -> str:
    copy = path.with_name("copy.parquet")
    copy.write_bytes(path.read_bytes())
    return copy.name


@pytest.mark.parametrize("budget", ["900TiB", "+900TiB"])
def test_the_clusters_memory_is_a_limit(project: Path, budget: str) -> None:
    text = bad(project, "plan", "job.yaml", "-o", "x.json", "--budget", budget)
    assert f"budget '{budget}' comes to" in text
    assert "900 TiB" in text
    assert "less a reserve of" in text
    assert not (project / "x.json").exists()


def test_replay_reads_data_as_the_profile_did(tmp_path: Path) -> None:
    """Samples are users, ids are hashed: one click a row, eight of a user."""
    generator = np.random.default_rng(0)
    users = np.repeat(np.arange(400), 8)
    shuffled = generator.permutation(users.size)
    raw = generator.zipf(1.3, users.size).astype(np.uint64) + np.uint64(2**63)
    table = pa.table({"user": [f"u{user}" for user in users[shuffled]], "item": raw})
    pq.write_table(table, tmp_path / "clicks.parquet", row_group_size=1000)
    profile = ("profile", "clicks.parquet", "--column", "item", "--rows", 1000, "--hash", "splitmix64")
    good(tmp_path, *profile, "--sample-key", "user", "-o", "item.parquet")
    assert AccessProfile.load(tmp_path / "item.parquet").hash == "splitmix64"
    good(tmp_path, "job", "item.parquet", "--cluster", "dgx-a100:2", "--batch-size", 16, "--dim", 8, "-o", "job.yaml")
    good(tmp_path, "plan", "job.yaml", "-o", "plan.json")
    out = json.loads(good(tmp_path, "replay", "plan.json", "clicks.parquet", "--column", "item", "--json"))
    assert out["steps"] == 400 // (16 * 16)
    plan = Plan.load(tmp_path / "plan.json")
    rows = {(c["group_size"]): c["bytes"] for c in out["collectives"] if c["content"] == "embeddings"}
    expected = 16 * 8 * 8 * 4  # samples, clicks, dimension, bytes
    served = sum(tier.reads for tier in plan.tables["item"].tiers if tier.group_size > 1) * 8 * 4
    assert served > 0
    assert sum(rows.values()) == pytest.approx(served, rel=0.1)
    assert sum(rows.values()) <= expected
    small = json.loads(
        good(tmp_path, "replay", "plan.json", "clicks.parquet", "--column", "item", "--batch-size", 4, "--json")
    )
    assert small["steps"] == 400 // (16 * 4)


def test_replay_looks_lists_up_as_the_profile_counted_them(tmp_path: Path) -> None:
    """A profile of distinct lists needs no option to say so again."""
    generator = np.random.default_rng(0)
    sessions = [generator.integers(0, 1000, 8).tolist() for _ in range(100)]
    pq.write_table(pa.table({"items": [row for row in sessions for _ in range(8)]}), tmp_path / "log.parquet")
    good(
        tmp_path,
        "profile",
        "log.parquet",
        "--column",
        "items",
        "--rows",
        1000,
        "--distinct-batch",
        16,
        "-o",
        "i.parquet",
    )
    good(tmp_path, "job", "i.parquet", "--cluster", "dgx-a100:1", "--batch-size", 16, "--dim", 8, "-o", "job.yaml")
    good(tmp_path, "plan", "job.yaml", "-o", "plan.json")
    told, untold = (
        json.loads(good(tmp_path, "replay", "plan.json", "log.parquet", "--column", "items", *options, "--json"))
        for options in (("--distinct",), ())
    )
    assert told == untold
    (tmp_path / "job.yaml").write_text(
        (tmp_path / "job.yaml").read_text().replace("dim: 8", "dim: 8\n  dedup_factor: 8")
    )
    assert "counts each distinct list once per 16 rows already" in bad(tmp_path, "plan", "job.yaml", "-o", "x.json")


@pytest.mark.parametrize(("written", "taken"), [("0256", "174"), ("4:16", "256")])
def test_numbers_that_yaml_takes_for_others(project: Path, written: str, taken: str) -> None:
    text = (project / "job.yaml").read_text()
    line = next(line for line in text.splitlines() if line.startswith("batch_size:"))
    (project / "based.yaml").write_text(text.replace(line, f"batch_size: {written}"))
    done = run(project, "plan", "based.yaml", "-o", "based.json")
    assert done.returncode == 2
    assert f"YAML takes {written} for {taken}; write a number in digits" in done.stderr


def test_a_plan_that_an_editor_saved_with_a_mark_first(project: Path) -> None:
    (project / "marked.json").write_bytes(b"\xef\xbb\xbf" + (project / "plan.json").read_bytes())
    assert good(project, "explain", "marked.json") == good(project, "explain", "plan.json")


def test_a_file_of_another_table_is_not_looked_for_by_both_names(project: Path) -> None:
    done = run(project, "replay", "plan.json", "clicks.parquet", "--column", "items", "--profile", "nope=items.parquet")
    assert (done.returncode, "the plan has no table 'nope'" in done.stderr) == (2, True)


@pytest.mark.parametrize("output", ["", ".", "/"])
def test_outputs_without_a_name(project: Path, output: str) -> None:
    done = run(project, "encode", "clicks.parquet", "--column", "items", "-o", output)
    assert done.returncode == 2
    assert done.stderr.startswith("flexshard: error: -o takes the path of a file")
