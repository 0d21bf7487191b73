"""Calls of the API and job files with one wrong thing in each: whatever is wrong, FlexShard's own errors say so.

Ten seconds each, three times that in all in ``make test-slow``; drawn anew by ``FUZZ_SEED``, by default the same every
time.
"""

from __future__ import annotations

import os
import random
import re
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import flexshard
from flexshard import AccessProfile, Cluster, Plan, Table, TableConstraints, load_job, solve
from flexshard.errors import FlexShardError
from flexshard.topologies import CollectiveRate, Level
from tests.slow import first

SEED, CALLS, JOBS = int(os.environ.get("FUZZ_SEED", "0")), 1_500, 2_000
RATE = CollectiveRate(1e-6, 1e10)
CLUSTER = Cluster("c", 2, 2, 1e9, 0.0, (Level(1, None, RATE), Level(2, RATE, RATE), Level(4, RATE, None)))
PROFILE = AccessProfile.from_counts(np.ceil(500 / np.arange(1, 201)).astype(np.int64), 300)
TABLE = Table("t", 200, 8, PROFILE)
PLAN = solve([TABLE], CLUSTER, batch_size=16)
WRONG: list[Any] = [
    *(
        None,
        True,
        -1,
        0,
        2**70,
        10**400,
        1.5,
        -0.5,
        float("nan"),
        float("inf"),
        1e308,
        "",
        " ",
        "x",
        "40 parrots",
        "-1GiB",
    ),
    *([], [1], ["x"], (), {}, {"x": 1}, {1: 2}, b"x", object(), type, Path("/nowhere/x"), 1j),
    *(np.array([1]), np.array(["a"]), np.array([[1.0]]), np.float64("nan"), np.int64(3), pa.scalar(1), lambda: 1),
    *(TABLE, [TABLE], CLUSTER, PROFILE, RATE),
]
CALLED: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "from_counts": (AccessProfile.from_counts, {"counts": [3, 2, 1], "num_samples": 5, "num_rows": 4, "table": "t"}),
    "from_ids": (
        AccessProfile.from_ids,
        {"ids": np.array([1, 2]), "lengths": np.array([2]), "num_rows": 4, "hash": None},
    ),
    "from_frame": (AccessProfile.from_frame, {"frame": pa.table({"x": [1]}), "column": "x", "num_rows": 3}),
    "from_parquet": (
        AccessProfile.from_parquet,
        {"paths": "/nowhere.parquet", "column": "x", "num_rows": 3, "holdout": 0.1},
    ),
    "load profile": (AccessProfile.load, {"path": "/nowhere"}),
    "covered": (PROFILE.covered, {"rows": 3.0}),
    "covered_held_out": (PROFILE.covered_held_out, {"rows": 3.0}),
    "drift": (PROFILE.drift, {"other": PROFILE, "cuts": (0.1,)}),
    "Table": (
        Table,
        {"name": "t", "rows": 300, "dim": 8, "profile": PROFILE, "dtype": "float16", "optimizer": "sgd"}
        | {"replication_multiplier": 3.0, "features": ["f"], "dedup_factor": 1.5, "pooling": "sum"},
    ),
    "CollectiveRate": (CollectiveRate, {"alpha_seconds": 1e-6, "bytes_per_s": 1e9, "source": "measured", "note": ""}),
    "Level": (Level, {"group_size": 4, "all_to_all": RATE, "all_reduce": RATE, "own_all_gather": RATE}),
    "Cluster": (
        Cluster,
        {"name": "c", "nodes": 2, "ranks_per_node": 2, "hbm_bytes": 1e9, "reserve_bytes": 0.0, "levels": CLUSTER.levels}
        | {"hbm_bytes_per_s": 1e12, "ranks_per_link": 1, "host_bytes_per_s": 1e9},
    ),
    "preset": (Cluster.preset, {"name": "dgx-a100", "nodes": 2}),
    "load cluster": (Cluster.load, {"path": "/nowhere"}),
    "constraints": (
        TableConstraints,
        {"sharding_types": ["row_wise"], "compute_kernels": ["fused"], "min_partition": 8, "pin": [0], "forbid": []}
        | {"cache_load_factors": (0.1,), "with_tables": ["t"], "apart": [], "dtypes": None},
    ),
    "solve": (
        solve,
        {"tables": [TABLE], "cluster": CLUSTER, "batch_size": 16, "budget": "neutral", "tiers": 2, "method": "optimal"}
        | {"overlap": {"all_to_all@2": 0.5}, "index_dedup": "auto", "index_dedup_seconds_per_id": 1e-9}
        | {"reduction": "dense", "translation": "loader", "memory": "mean", "sample_order": "file"}
        | {"objective": "communication", "step": None, "constraints": {}, "host_memory": None, "timeout_seconds": 5.0}
        | {"gap": 0.01},
    ),
    "explain": (flexshard.explain, {"plan": PLAN, "name": "t"}),
    "diff": (flexshard.diff, {"before": PLAN, "after": PLAN}),
    "pareto": (flexshard.pareto, {"tables": [TABLE], "cluster": CLUSTER, "batch_size": 16, "tiers": 2, "prices": 4}),
    "compare": (flexshard.compare, {"tables": [TABLE], "cluster": CLUSTER, "batch_size": 16, "torchrec": False}),
    "load plan": (Plan.load, {"path": "/nowhere"}),
    "load job": (load_job, {"path": "/nowhere"}),
    "save plan": (PLAN.save, {"path": "/nowhere/x.json"}),
    "table of plan": (PLAN.table, {"name": "t"}),
}


def foreign(error: Exception) -> bool:
    return not isinstance(error, FlexShardError) or not str(error).strip() or "\n" in str(error).strip("\n")


@pytest.mark.parametrize("part", first(1, range(3)))
def test_the_api_says_what_is_wrong_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    monkeypatch.chdir(tmp_path)
    draw, found = random.Random(3 * SEED + part), Counter[str]()
    for _ in range(CALLS):
        name = draw.choice(list(CALLED))
        call, arguments = CALLED[name]
        changed = {
            key: draw.choice(WRONG)
            for key in draw.sample(list(arguments), draw.choice([1, 1, 1, min(2, len(arguments))]))
        }
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                call(**arguments | changed)
        except Exception as error:
            if foreign(error):
                shown = {key: repr(value)[:40] for key, value in changed.items()}
                found[f"{name}({shown}): {type(error).__name__}: {str(error)[:120]!r}"] += 1
    assert not found, f"{len(found)} foreign messages:\n" + "\n".join(sorted(found))


JOB = """format: flexshard.job
version: 1
cluster: dgx-h100:2
batch_size: 4096
budget: neutral
tiers: 3
method: optimal
overlap: {all_to_all@8: 0.9}
index_dedup: auto
reduction: dense
memory: mean
tables:
- {name: items, rows: 200, dim: 16, optimizer: rowwise_adagrad, profile: t.profile, features: [f], dedup_factor: 1.5}
- {name: users, rows: 300, dim: 8, dtype: float16, profile: t.profile, pooling: sum, constraints: {apart: []}}
"""
PIECES = [
    "",
    " ",
    "x",
    "-1",
    "0",
    "1e400",
    "nan",
    ".inf",
    "null",
    "[]",
    "{}",
    "[1, {a: b}]",
    "'",
    '"',
    "\t",
    "&a *a",
    "!!python/object:os.system x",
]
PIECES += [
    "9" * 40,
    "true",
    "2026-01-01",
    "{",
    "]",
    ":",
    "- -",
    "é\x00",
    "40 parrots",
    "|\n  x",
    "items",
    "<<: 3",
    "? x",
]


@pytest.mark.parametrize("part", first(1, range(3)))
def test_job_files_say_what_is_wrong_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    monkeypatch.chdir(tmp_path)
    PROFILE.save("t.profile")
    (tmp_path / "job.yaml").write_text(JOB)
    load_job("job.yaml").solve()
    draw, found, refused = random.Random(3 * SEED + part), Counter[str](), 0
    words = [match.span() for match in re.finditer(r"[^\s,:{}\[\]]+|[{}\[\],:]", JOB)]
    for _ in range(JOBS):
        text = JOB
        for begin, end in sorted(draw.sample(words, draw.choice([1, 1, 2])), reverse=True):
            text = text[:begin] + draw.choice(PIECES) + text[end:]
        (tmp_path / "job.yaml").write_text(text, encoding="utf-8")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                load_job("job.yaml")
        except Exception as error:
            refused += 1
            if foreign(error) or "job.yaml" not in str(error):
                changed = [line for line in text.splitlines() if line not in JOB.splitlines()]
                found[f"{changed}: {type(error).__name__}: {str(error)[:160]!r}"] += 1
    assert refused > JOBS / 2
    assert not found, f"{len(found)} foreign messages:\n" + "\n".join(sorted(found))
