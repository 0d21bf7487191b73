"""The examples that train: what they print is what they are for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import run_script
from tests.slow import first

pytest.importorskip("torchrec")

ROOT = Path(__file__).resolve().parents[1]


def recd(folder: Path, ranks: int, *options: str) -> list[tuple[str, ...]]:
    """Losses, AUC and DedupFactor of each epoch that recd_mind.py prints."""
    script = [ROOT / "examples" / "recd_mind.py", "--folder", "recd", "--sessions", "400", "--epochs", "2"]
    done = run_script(*script, "--batch-size", "128", *options, folder=folder, ranks=ranks)
    assert done.returncode == 0, done.stderr
    pattern = r"epoch \d: loss (\S+) to (\S+), held-out AUC (\S+), .*, (\S+) ids of the batch per id looked up"
    found = re.findall(pattern, done.stdout)
    assert len(found) == 2
    return found


@pytest.mark.parametrize("ranks", first(1, [2, 1]))
def test_recd_mind_has_the_same_losses_with_and_without_deduplication(tmp_path: Path, ranks: int) -> None:
    deduped, plain = recd(tmp_path, ranks), recd(tmp_path, ranks, "--plain")
    for a, b in zip(deduped, plain, strict=True):
        for one, other in zip(a[:2], b[:2], strict=True):
            assert float(one) == pytest.approx(float(other), rel=1e-4)
        assert float(a[2]) == pytest.approx(float(b[2]), abs=0.005)
        assert float(a[3]) > 3
        assert float(b[3]) == 1


@pytest.mark.slow
def test_elrec_compress_makes_tables_smaller_and_trains_on(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "examples" / "elrec_compress.py"), "--sessions", "20000", "--epochs", "3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*script, "--rank", "16"], cwd=tmp_path, capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    # What a decomposition loses is said, and nothing else.
    said = [line for line in done.stderr.splitlines() if "Warning" in line]
    assert all("has a relative error of" in line for line in said)
    pattern = r"^(.*?): \S+ \S+, (\S+) times smaller, held-out AUC (\S+)$"
    found = {name: (float(times), float(score)) for name, times, score in re.findall(pattern, done.stdout, re.M)}
    dense, decomposed, on, start, without = (
        found[name]
        for name in (
            "dense",
            "decomposed",
            "decomposed and trained on",
            "tensor trains from the start",
            "dense, without the readers' table",
        )
    )
    assert dense[0] == 1
    assert on[0] == start[0] >= 10
    assert on[1] > decomposed[1]
    assert min(on[1], start[1], dense[1], without[1]) > 0.55


def test_dlrm_trains_to_the_weights_of_the_unsharded_model(tmp_path: Path) -> None:
    script = [ROOT / "examples" / "dlrm.py", "--steps", "3", "--scale", "1000", "--batch-size", "64"]
    done = run_script(*script, folder=tmp_path, ranks=4)
    assert done.returncode == 0, done.stderr
    trained = re.findall(r"moved weights by up to (\S+), at most (\S+) from unsharded", done.stdout)
    assert len(trained) == 2
    for moved, difference in trained:
        assert float(moved) > 1e-4
        assert float(difference) < 1e-6
    gaps = [float(gap) for gap in re.findall(r"at most (\S+) % above the optimum", done.stdout)]
    assert len(gaps) == 2
    assert max(gaps) <= 5
    assert float(re.findall(r"estimators, (\S+) times ours", done.stdout)[0]) >= 1
    assert done.stdout.count("flex_shard 1") == 2


def test_ingest_train_goes_on_with_the_same_losses(tmp_path: Path) -> None:
    done = run_script(ROOT / "examples" / "ingest_train.py", "--backend", "threads", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    losses = re.search(r"40 steps of 512 clicks: loss (\S+) to (\S+)", done.stdout)
    assert losses is not None
    assert float(losses[2]) < float(losses[1])
    assert "stopped after 20 and gone on with: losses differ by 0.0e+00 at most" in done.stdout


def test_lookahead_train_gives_the_same_bits(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    done = run_script(ROOT / "examples" / "lookahead_train.py", "--share", "0.08", folder=tmp_path, ranks=4)
    assert done.returncode == 0, done.stderr
    found = re.search(r"rank 0 reads (\S+) rows a step, fetches (\S+); lookahead (\d+)", done.stdout)
    assert found is not None, done.stdout
    read, fetched, lookahead = (int(number.replace(",", "")) for number in found.groups())
    assert 0 < fetched < read
    assert lookahead >= 2
    assert done.stdout.count("equal to the last bit") == 4


@pytest.mark.parametrize("ranks", first(1, [2, 1]))
def test_growing_histories_train_to_the_same_losses_from_fewer_ids(tmp_path: Path, ranks: int) -> None:
    script = [ROOT / "examples" / "growing_histories.py", "--rows", "20000", "--steps", "4", "--batch-size", "512"]
    done = run_script(*script, "--dim", "16", folder=tmp_path, ranks=ranks)
    assert done.returncode == 0, done.stderr
    pattern = r"  (\w+) +\d+ ms .* times fewer: (\S+) ids looked up, (\S+) bytes of batches.* differs by (\S+)"
    found = re.findall(pattern, done.stdout)
    assert [way for way, *_ in found] == ["plain", "exact", "partial"] * 2
    for way, ids, nbytes, differs in found:
        assert float(differs) < 1e-5
        assert way != "exact" or float(ids) < 1.5
        assert way != "partial" or float(ids) > 4
        assert way != "partial" or float(nbytes) > 2


@pytest.mark.parametrize(
    "name",
    sorted({file.name for file in (ROOT / "examples").glob("*.py")} - {"one_line.py", "sessions.py", "two_ranks.py"}),
)
def test_examples_say_what_they_take(name: str, tmp_path: Path) -> None:
    done = run_script(ROOT / "examples" / name, "--help", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {name}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("plan_a_log.py", "Proof: no plan within the budget has less than"),
        ("train_under_plan.py", r"step 0: loss (0\.[89]|1\.[01])\d*\nstep 19: loss 0\.[4-7]"),
        (
            "dedup_a_batch.py",
            "1,280 ids of histories looked up, instead of 10,240\nrows of every sample's history: equal",
        ),
        ("tensor_train_table.py", r"1,280 MB as a dense table, 7\.\d MB as a tensor train\n(.*\n)*step 29: loss 0\.0"),
        ("read_and_go_on.py", "stopped after 10,240 samples(.*\n)*20,000 samples in all"),
    ],
)
def test_short_examples_start_without_a_launcher(name: str, says: str, tmp_path: Path) -> None:
    assert len((ROOT / "examples" / name).read_text().splitlines()) <= 45
    done = run_script(ROOT / "examples" / name, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(says, done.stdout), done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("plan_a_log.py", ["nothing.parquet"]),
        ("read_and_go_on.py", ["nothing.parquet"]),
        ("next_click.py", ["nothing.parquet"]),
        ("elrec_compress.py", ["--log", "nothing.parquet"]),
        ("recd_mind.py", ["--mind", "nothing.parquet"]),
        ("growing_histories.py", ["--clicks", "nothing.parquet"]),
        ("ingest_train.py", ["--clicks", "nothing.parquet"]),
    ],
)
def test_examples_say_what_is_missing_in_one_line(name: str, options: list[str], tmp_path: Path) -> None:
    done = run_script(ROOT / "examples" / name, *options, folder=tmp_path)
    assert done.returncode == 2
    said = [line for line in done.stderr.splitlines() if "error" in line]
    assert len(said) == 1
    assert said[0].startswith(f"{name}: error: ")
    assert "nothing.parquet" in said[0]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--dim", "7"], "argument --dim: must be a multiple of 4, one part for each attention head"),
        (["--rows", "10"], "clicks for 0 steps; give more --rows, fewer --steps or --batch-size"),
    ],
)
def test_histories_that_are_too_short_are_one_line(options: list[str], says: str, tmp_path: Path) -> None:
    done = run_script(ROOT / "examples" / "growing_histories.py", *options, folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"growing_histories.py: error: {says}"
    assert "Traceback" not in done.stderr
