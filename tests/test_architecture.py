"""The rooms, the arrows between them, and the surface that users rely on."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx as nx
import pytest

import flexshard
from flexshard import costmodels, planner, profiling, tables, topologies

SOURCE = Path(flexshard.__file__).parent
FLOORS = (
    {"errors", "units", "_internal"},
    {"topologies", "profiling"},
    {"tables"},
    {"costmodels", "embeddings"},
    {"calibration", "planner", "ingestion"},
    {"executors"},
    {"plots", "report"},
    {"cli"},
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
ROOMS = sorted(path.parent.name for path in SOURCE.glob("*/__init__.py"))
FILES = sorted(SOURCE.rglob("*.py"))
MOST_LINES = 400
LEAST_FILES = 150  # so that a search that finds nothing does not pass


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def module_of(file: Path) -> str:
    parts = file.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """The room of a module of ours; "" for the package itself."""
    return [*module.split("."), ""][1]


def is_module(name: str) -> bool:
    path = SOURCE.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def imports_of(file: Path) -> Iterator[tuple[str, str]]:
    """(module of ours, name taken from it or ""), wherever the import stands: in functions and for types alone, too."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.split(".")[0] == "flexshard")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            base = node.module or ""
            if base.split(".")[0] == "flexshard":
                for alias in node.names:
                    inner = f"{base}.{alias.name}"
                    yield (inner, "") if is_module(inner) else (base, alias.name)


def allowed(room: str) -> set[str]:
    """What a room's ``__init__`` says that it may import."""
    doc = ast.get_docstring(tree(SOURCE / room / "__init__.py")) or ""
    assert "May import: " in doc, f"{room}/__init__.py: say what the room is for, and 'May import: ...'"
    assert not doc.startswith("May import"), f"{room}/__init__.py: say what the room is for"
    text = doc.partition("May import: ")[2].partition(".")[0].replace("\n", " ")
    if text.startswith("all rooms"):
        return set(FLOOR_OF) - {room} - set(text.partition("but ")[2].split(", "))
    return {name.strip() for name in text.split(",")}


def test_every_room_says_what_it_is_for_and_what_it_may_import() -> None:
    assert set(ROOMS) == set(FLOOR_OF) - {"errors", "units"}
    for room in ROOMS:
        for other in allowed(room):
            assert FLOOR_OF[other] < FLOOR_OF[room] or other in FLOORS[0], f"{room} may not import {other}: go upstairs"


@pytest.mark.parametrize("room", ROOMS)
def test_arrows_between_rooms_go_one_way(room: str) -> None:
    for file in (SOURCE / room).rglob("*.py"):
        others = {room_of(module) for module, _ in imports_of(file)} - {room, ""}
        wrong = others - allowed(room)
        assert not wrong, f"{file.name} in {room} imports {sorted(wrong)}"


def test_imports_from_outside_a_room_go_through_its_init() -> None:
    assert len(FILES) > LEAST_FILES
    for file in FILES:
        mine = room_of(module_of(file))
        if file == SOURCE / mine / "__init__.py" or file == SOURCE / "__init__.py":
            continue
        for module, name in imports_of(file):
            room = room_of(module)
            where = f"{file.relative_to(SOURCE)}: {module}.{name}"
            if room in ROOMS and room != mine:
                assert module == f"flexshard.{room}", f"{where}: import from flexshard.{room}"
                if name:
                    assert name in importlib.import_module(module).__all__, f"{where}: no name of the room"
            elif room == mine and file.name != "__main__.py":
                assert module != f"flexshard.{room}" or not name, f"{where}: a room's own files name each other"


def test_rooms_named_as_modules_have_the_names_used() -> None:
    """``planner.solve``: type checkers take any name of a room that loads lazily."""
    used = 0
    for file in FILES:
        named = {module.split(".")[1] for module, name in imports_of(file) if module.count(".") == 1 and not name}
        rooms = named & set(ROOMS)
        for node in ast.walk(tree(file)):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in rooms & set(ROOMS)
            ):
                used += 1
                names = importlib.import_module(f"flexshard.{node.value.id}").__all__
                assert node.attr in names, f"{file.relative_to(SOURCE)}:{node.lineno}: {node.value.id}.{node.attr}"
    assert used > 20


def test_no_circle_among_files() -> None:
    graph = nx.DiGraph()
    for file in FILES:
        here = module_of(file)
        for module, _ in imports_of(file):
            if module == here or (file.name == "__init__.py" and module.startswith(f"{here}.")):
                continue  # a room's __init__ names its files, which do not name it (tested above)
            graph.add_edge(here, module)
    assert graph.number_of_edges() > 2 * LEAST_FILES
    circles = [sorted(part) for part in nx.strongly_connected_components(graph) if len(part) > 1]
    assert not circles


def test_no_file_is_long() -> None:
    long = {
        str(file.relative_to(SOURCE)): n for file in FILES if (n := len(file.read_text().splitlines())) > MOST_LINES
    }
    assert not long


@pytest.mark.parametrize("room", [room for room in ROOMS if room != "cli"])
def test_what_types_see_of_a_room_is_what_it_gives(room: str) -> None:
    """The lazy table and the imports for type checkers say the same, and no name is that of a file of the room: the
    file, once imported, would stand in its place.
    """
    pytest.importorskip("torchrec")
    file = SOURCE / room / "__init__.py"
    seen = {}
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            for part in node.body:
                assert isinstance(part, ast.ImportFrom)
                seen |= {alias.asname or alias.name: part.module for alias in part.names}
    module = importlib.import_module(f"flexshard.{room}")
    assert sorted(seen) == sorted(
        getattr(module, "_names", module.__all__)
    )  # the package's own are fewer without torch
    for name, home in seen.items():
        assert home is not None
        assert getattr(module, name) is getattr(importlib.import_module(home), name)
        assert not is_module(f"flexshard.{room}.{name}"), f"{room}: {name} is a file of the room, too"


def test_values_name_files_that_have_their_methods() -> None:
    pytest.importorskip("torchrec")
    for room in ROOMS:
        for method, target in getattr(importlib.import_module(f"flexshard.{room}"), "VALUE_METHODS", {}).items():
            file, _, function = target.partition(":")
            assert callable(getattr(importlib.import_module(f"flexshard.{room}.{file}"), function)), method


def test_every_command_is_registered() -> None:
    from flexshard.cli.commands import COMMANDS

    files = (SOURCE / "cli" / "commands").glob("*.py")
    listed = [name for names in COMMANDS.values() for name in names]
    assert sorted(file.stem for file in files if "@app.command(" in file.read_text()) == sorted(listed)


def test_optimizers_are_told_apart_by_what_they_say_of_themselves() -> None:
    """Whoever compares names has to be found and changed for each new one; tensor trains have kernels of a few."""
    names = set(tables.OPTIMIZERS)
    for file in FILES:
        if file.parent.name in ("optimizers", "tensor_train"):
            continue
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.Compare):
                compared = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)} & names
                assert not compared, f"{file.relative_to(SOURCE)}:{node.lineno} compares {sorted(compared)}"


def test_links_at_the_root_lead_into_the_package() -> None:
    root = SOURCE.parents[1]
    for name in ("planner", "costmodels", "topologies", "executors"):
        link = root / name
        assert link.is_symlink()
        assert not link.readlink().is_absolute()
        assert link.resolve() == (SOURCE / name).resolve()


def run(script: str) -> None:
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_planning_needs_no_torch() -> None:
    """Every file of the rooms that import no torch, and those of the planner but for TorchRec's adaptor."""
    names = [
        module
        for module in map(module_of, FILES)
        if room_of(module) in {"topologies", "profiling", "tables", "costmodels", "planner", "plots", "cli"}
        and not module.startswith("flexshard.planner.torchrec")
    ]
    assert len(names) > LEAST_FILES / 2
    run(
        "import sys, importlib; sys.modules['torch'] = None; sys.modules['torchrec'] = None\n"
        f"for name in {names}: importlib.import_module(name)"
    )


def test_importing_is_light() -> None:
    """Nothing but Python's own and what prints the command line; every room waits until it is used."""
    run(
        "import sys; import flexshard, flexshard.cli.app\n"
        "heavy = {'torch', 'numpy', 'scipy', 'pyarrow', 'matplotlib', 'networkx', 'pydantic', 'pulp', 'rich.table'}\n"
        "sys.exit(sorted(heavy & set(sys.modules)) or 0)"
    )


def test_rooms_are_attributes_of_the_package() -> None:
    names = [*ROOMS, "errors", "units"]
    names.remove("_internal")
    run(f"import flexshard\nfor name in {names}: assert getattr(flexshard, name).__name__ == 'flexshard.' + name")


def test_all_names_can_be_had_at_once_without_torch() -> None:
    run(
        "import sys; sys.modules['torch'] = None\n"
        "from flexshard import *\n"
        "import flexshard\n"
        "assert callable(solve) and 'FlexShardPlanner' not in globals() and 'FlexShardPlanner' in dir(flexshard)"
    )


def test_public_names_are_frozen() -> None:
    pytest.importorskip("torchrec")
    assert sorted(flexshard.__all__) == [
        "AccessProfile",
        "Cluster",
        "Cost",
        "FlexShardEmbeddingBagCollectionSharder",
        "FlexShardEmbeddingCollectionSharder",
        "FlexShardError",
        "FlexShardPlanner",
        "Job",
        "OptimalShardingPlanner",
        "ParetoCurve",
        "Plan",
        "Problem",
        "Table",
        "TableConstraints",
        "compare",
        "diff",
        "explain",
        "load_job",
        "pareto",
        "plot_pareto",
        "solve",
    ]
    for module in (flexshard, topologies, profiling, tables, costmodels, planner):
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
