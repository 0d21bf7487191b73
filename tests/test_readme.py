"""The README's example runs as it stands there, and its links lead somewhere."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.main import get_command

from flexshard._internal import INSTALL_TORCHREC
from flexshard.cli.app import app
from flexshard.cli.commands import register
from tests import commands

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_it_is_short_and_installs_what_make_installs() -> None:
    assert len(README.splitlines()) <= 120
    assert f"    {INSTALL_TORCHREC}\n" in README
    makefile = (ROOT / "Makefile").read_text()
    torch, fbgemm, torchrec = re.findall(r"^VERSIONS := (.*)$", makefile, flags=re.MULTILINE)[0].split()
    others = re.findall(r"^\t\t(tensordict .*)$", makefile, flags=re.MULTILINE)[0]
    first = f"pip install torch=={torch} fbgemm-gpu-cpu=={fbgemm} {others}"
    assert f"{first} && pip install --no-deps torchrec=={torchrec}" == INSTALL_TORCHREC


def test_the_package_index_gets_the_same_without_links_into_the_tree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / project["readme"]).read_text()
    assert not re.findall(r"\]\((?!https?://)", text)
    known = set(README.splitlines())
    own = "    pip install flexshard"
    blocks = [line for line in text.splitlines() if line.startswith(("    ", "+", "-", "| ")) and line != own]
    assert len(blocks) > 10
    assert [line for line in blocks if line not in known] == []


def test_the_commands_are_there_with_the_options_that_they_are_given(tmp_path: Path) -> None:
    """README's five lines run; those of docs/command_line.md are taken by their commands."""
    lines = re.search(r"## Five lines on generated data\n\n(.*?)\n\n", README, flags=re.DOTALL)
    assert lines is not None
    for line in lines[1].splitlines():
        words = shlex.split(line)
        assert words[0] == "flexshard"
        done = commands.run(tmp_path, *words[1:])
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "report.html").stat().st_size > 10_000
    register()
    known: Any = get_command(app)
    for document in ("README.md", "docs/command_line.md", "docs/running.md", "docs/dedup.md", "docs/ingestion.md"):
        for line in re.findall(
            r"^    (?:torchrun .*)?flexshard (.*)$", (ROOT / document).read_text(), flags=re.MULTILINE
        ):
            name, *words = shlex.split(line, comments=True)
            known.commands[name].make_context(name, words)


def test_the_python_example_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "flex" in result.stdout
    assert "Proof: no plan within the budget has less than" in result.stdout
    assert {"clicks.parquet", "plan.json", "pareto.png"} <= {path.name for path in tmp_path.iterdir()}


def test_the_tutorial_runs(tmp_path: Path) -> None:
    cells = json.loads((ROOT / "docs" / "tutorial.ipynb").read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells), "what it prints is made with the site"
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    code = code.replace("from IPython.display import Image", "Image = str")
    clicks = pa.table({"who": [n // 3 for n in range(1000)], "what": [f"item {n % 7}" for n in range(1000)]})
    pq.write_table(clicks, tmp_path / "log.parquet")
    own = {"FLEXSHARD_DATA": "log.parquet", "FLEXSHARD_COLUMN": "what", "FLEXSHARD_KEY": "who"}
    for environment in ({}, own):
        run = [sys.executable, "-W", "ignore", "-c", code.replace('Image("frontier.png", width=700)', "")]
        done = subprocess.run(
            run, cwd=tmp_path, env=os.environ | environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "rows would move" in done.stdout


def test_the_yaml_example_is_a_job(tmp_path: Path) -> None:
    from flexshard import AccessProfile, load_job

    (text,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "command_line.md").read_text(), flags=re.DOTALL)
    (tmp_path / "job.yaml").write_text(text)
    AccessProfile.from_counts([5, 1], 10, 10_000_000).save(tmp_path / "items.profile.parquet")
    job = load_job(tmp_path / "job.yaml")
    assert job.overlap == {"all_to_all@8": 0.9}
    assert job.cluster.world_size == 1024
    assert job.solve().tables["items"].rows == 10_000_000


def test_links_lead_somewhere() -> None:
    for document in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_the_code_of_dedup_md_runs(tmp_path: Path) -> None:
    pytest.importorskip("torchrec")
    code = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "dedup.md").read_text(), flags=re.DOTALL))
    prepare = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'examples')!r})\n"
        "from pathlib import Path\n"
        "from sessions import write_generated\n"
        "from flexshard.ingestion import cluster_sessions\n"
        "log, _, _ = write_generated(Path('data'), sessions=200)\n"
        "cluster_sessions(log, 'by_session', session='session', time='time')\n"
    )
    run = [sys.executable, "-W", "ignore", "-c", prepare + code + "\nprint(scores.shape)"]
    result = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "InverseKeyedJaggedTensor(b: 2 of 3, c+d: 2 of 3; plain a)\n[0, 1, 0] 1.5" in result.stdout
    assert result.stdout.endswith("torch.Size([512])\n")


def test_the_code_of_tensor_train_md_runs(tmp_path: Path) -> None:
    pytest.importorskip("torchrec")
    pytest.importorskip("igraph")
    text = (ROOT / "docs" / "tensor_train.md").read_text()
    code = (
        "import warnings; warnings.filterwarnings('error', '.*goes with the next release')\n"
        + "\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))
        + "\nprint(0 < error <= 1, sorted(ids) != sorted(reads[0]))"
    )
    run = [sys.executable, "-W", "ignore", "-c", code]
    result = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "times smaller" in result.stdout
    assert result.stdout.endswith("True True\n")
    assert (tmp_path / "ads.bijection.parquet").exists()
