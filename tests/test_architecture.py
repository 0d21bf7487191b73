"""The rooms, the arrows between them, and the surface that users rely on."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import flexshard
from flexshard import costmodels, planner, profiling, topologies

SOURCE = Path(flexshard.__file__).parent
ROOMS = {
    "topologies": set(),
    "profiling": set(),
    "costmodels": {"topologies", "profiling"},
    "planner": {"topologies", "profiling", "costmodels"},
    "embeddings": set(),
    "executors": {"topologies", "profiling", "costmodels", "planner", "embeddings"},
    "ingestion": {"embeddings"},
}
COMMON = {
    "errors",
    "units",
    "_dedup",
    "_files",
    "_documents",
    "_grids",
    "_jagged",
    "_kernels",
    "_sources",
    "_tt_shape",
    "_together",
    "_values",
}


def imports_of(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            base = node.module or ""
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "flexshard" else [base]
        found |= {name.split(".")[1] for name in names if name.startswith("flexshard.")}
    return found


def test_arrows_between_rooms_go_one_way() -> None:
    seen = 0
    for room, allowed in ROOMS.items():
        for file in (SOURCE / room).rglob("*.py"):
            seen += 1
            wrong = imports_of(file) - allowed - {room} - COMMON
            assert not wrong, f"{file.name} in {room} imports {sorted(wrong)}"
    assert seen > 30


def test_links_at_the_root_lead_into_the_package() -> None:
    root = SOURCE.parents[1]
    for name in ("planner", "costmodels", "topologies", "executors"):
        link = root / name
        assert link.is_symlink()
        assert not link.readlink().is_absolute()
        assert link.resolve() == (SOURCE / name).resolve()


def test_importing_needs_neither_torch_nor_matplotlib() -> None:
    script = (
        "import sys; sys.modules['torch'] = None; sys.modules['torchrec'] = None\n"
        "import flexshard, flexshard.cli\n"
        "sys.exit('matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_public_names_are_frozen() -> None:
    assert sorted(flexshard.__all__) == [
        "AccessProfile",
        "Cluster",
        "Cost",
        "FlexShardEmbeddingCollectionSharder",
        "FlexShardError",
        "FlexShardPlanner",
        "Job",
        "ParetoCurve",
        "Plan",
        "Table",
        "compare",
        "diff",
        "explain",
        "load_job",
        "pareto",
        "plot_pareto",
        "solve",
    ]
    for module in (flexshard, topologies, profiling, costmodels, planner):
        for name in module.__all__:
            value = getattr(module, name)
            assert value is not None
            assert value.__doc__ or (not inspect.isclass(value) and not inspect.isfunction(value)), (
                f"{name} has no docstring"
            )


def test_every_preset_figure_has_a_source_and_a_date() -> None:
    for name in topologies.preset_names():
        figures = topologies.load_preset(name).figures()
        assert len(figures) >= 6
        for field, value, source, date in figures:
            assert value, field
            assert len(source) > 10, f"{name}: {field}"
            assert date or source.startswith(("fitted", "measured")), f"{name}: {field}"
