"""Benchmarks are run by hand: what they take from the package is there."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def without_what_they_need(rank: int, names: list[str]) -> list[str]:
    """Those that cannot be imported, and why."""
    found = []
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            missing = error.name or ""
            if missing.startswith(("flexshard", "benchmarks", "torch", "fbgemm")):  # others are extras
                found.append(f"{name}: {error}")
    return found


def test_they_import_what_there_is() -> None:
    pytest.importorskip("torchrec")
    from tests.executors import ranks

    files = [file.relative_to(ROOT).with_suffix("") for file in sorted((ROOT / "benchmarks").rglob("*.py"))]
    names = [".".join(file.parts) for file in files if file.name != "__main__"]
    assert len(names) > 60
    assert ranks.run(1, 1, without_what_they_need, names) == [[]]
