"""TorchRec's own tests of sharded sequence embeddings, run with our planner and our sharder in the place of TorchRec's.

They train a model of six small tables one step under ``DistributedModelParallel`` and compare its predictions with
those of the unsharded model: for four sharding types, with and without quantised communication, optimizers applied in
backward and batch sizes that differ between ranks or features, on ``KeyedJaggedTensor`` and ``TensorDict`` batches. The
tests and their helpers are read from a TorchRec source tree (wheels leave the tests out); TorchRec itself is the one
installed.

What is changed: processes are on CPUs with gloo, whatever device and backend a test asks for (quantised communication
as TorchRec builds it for CPUs, where BF16 becomes FP16); every combination of a test's parameters runs instead of three
that hypothesis draws; and each runs under every plan of ``KINDS``, three of them for two nodes of two ranks, since two
ranks have no tier between copies and row-wise. Rank 0 notes the rows of each tier in the plan that it carries out. A
sharding type and a kernel decide nothing here: tests that differ only in them repeat each other.

    python -m benchmarks.torchrec_sharding_tests CHECKOUT [--kinds solved] [--examples 3]
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import pickle
import sys
import tempfile
import time
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import fbgemm_gpu
import hypothesis
import numpy as np
import torch
import torchrec.distributed
from torchrec.distributed.fbgemm_qcomm_codec import get_qcomm_codecs_registry
from torchrec.distributed.test_utils.multi_process import MultiProcessTestBase
from torchrec.distributed.types import ShardingPlan

import flexshard
from benchmarks.timing import machine
from flexshard import FlexShardEmbeddingCollectionSharder, FlexShardPlanner, Plan
from flexshard._internal import as_text, new_grid
from flexshard.costmodels import strategy_name
from flexshard.planner import FlexShardParameterSharding, Tier
from flexshard.topologies import Cluster, CollectiveRate, Level

COUNTS = ["run", "passed", "failed", "excluded"]
PRELOADED = ["torch.distributed.optim", "flexshard.planner.torchrec.adaptor", "flexshard.executors.sharding.sharders"]
BATCH = 4  # samples per rank, as the tests have it
PARAMETERS = (
    "input_type",
    "qcomms_config",
    "apply_optimizer_in_backward_config",
    "variable_batch_size",
    "variable_batch_per_feature",
)
TIERS = {"data_parallel": "copied", "flex": "in a node", "row_wise": "row-wise"}


@dataclass(frozen=True)
class Kind:
    """Plans that a test runs under, on processes that stand for nodes."""

    nodes: int
    ranks_per_node: int
    tiers: str | int  # "solved" from skewed profiles; "drawn", and reductions too; or the group size that all rows have
    index_dedup: bool = False  # whether a batch's repeated ids are sent once

    @property
    def cluster(self) -> Cluster:
        """With the bandwidths of the paper's Table 6: of all-to-all and all-reduce, by group size."""
        node, world = self.ranks_per_node, self.nodes * self.ranks_per_node
        betas = {node: (76e9, 10e9), 1: (None, 5e9), world: (25.8e9, None)}
        levels = (Level(size, *(beta and CollectiveRate(0.0, beta) for beta in betas[size])) for size in sorted(betas))
        return Cluster("two levels", self.nodes, node, float(1 << 30), 0.0, tuple(levels))


KINDS = {
    "solved, 2 ranks": Kind(1, 2, "solved"),
    "drawn, 2 ranks": Kind(1, 2, "drawn"),
    "copied, 2 ranks": Kind(1, 2, 1),
    "row-wise, 2 ranks": Kind(1, 2, 2),
    "drawn, ids once, 2 nodes of 1": Kind(2, 1, "drawn", index_dedup=True),
    "solved, 2 nodes of 2": Kind(2, 2, "solved"),
    "drawn, 2 nodes of 2": Kind(2, 2, "drawn"),
    "in a node, 2 nodes of 2": Kind(2, 2, 2),
}


class WatchedPlanner(FlexShardPlanner):
    """Ours, which notes how many rows each tier has, and that no table was left to TorchRec."""

    notes: Path

    def collective_plan(self, module: Any, sharders: Any, pg: Any = None) -> ShardingPlan:
        """As ours, on every rank."""
        sharding = super().collective_plan(module, sharders, pg)
        hows = [how for part in sharding.plan.values() for how in part.values()]
        assert {type(how) for how in hows} == {FlexShardParameterSharding}
        rows: Counter[str] = Counter()
        for tier in (tier for how in hows for tier in how.table.tiers):
            rows[TIERS[tier.strategy]] += tier.rows
            if tier.strategy != "row_wise":
                rows[tier.reduction] += tier.rows
        if torch.distributed.get_rank() == 0:
            self.notes.write_text(json.dumps(rows))
        return sharding


def planner_for(
    kind: Kind, seed: int, tables: Sequence[Any], notes: Path, *, constraints: Any = None, **_topology: Any
) -> WatchedPlanner:
    """What stands where the helpers make an ``EmbeddingShardingPlanner``."""
    generator = np.random.default_rng(seed)
    profiles = {}
    for config in tables:
        counts = np.floor(1000.0 / (1 + np.arange(config.num_embeddings)) ** 1.2).astype(np.int64)
        profiles[config.name] = flexshard.AccessProfile.from_counts(generator.permutation(counts), num_samples=100)
    options: dict[str, Any] = {"batch_size": BATCH, "index_dedup": kind.index_dedup}
    if kind.tiers == "solved":
        planner = WatchedPlanner(profiles=profiles, cluster=kind.cluster, constraints=constraints, **options)
    else:
        sizes = ((config.name, config.num_embeddings, config.embedding_dim) for config in tables)
        planned = [flexshard.Table(*size, profiles[size[0]], optimizer="sgd") for size in sizes]
        plan = flexshard.solve(planned, kind.cluster, **options)
        planner = WatchedPlanner(given_tiers(plan, kind, generator), profiles=profiles, constraints=constraints)
    planner.notes = notes
    return planner


def given_tiers(plan: Plan, kind: Kind, generator: np.random.Generator) -> Plan:
    """The plan with tiers of its kind in the place of its own; of those drawn some are empty."""
    placed = {}
    for name, table in plan.tables.items():
        sizes, cuts = [kind.tiers], []
        if kind.tiers == "drawn":
            sizes = generator.permutation(kind.cluster.group_sizes).tolist()
            cuts = np.sort(generator.integers(0, table.rows + 1, len(sizes) - 1)).tolist()
        tiers = []
        for size, (first, end) in zip(sizes, pairwise([0, *cuts, table.rows]), strict=True):
            strategy, reduction = strategy_name(size, plan.cluster.world_size), generator.choice(["dense", "sparse"])
            if end > first:
                tiers.append(Tier(strategy, size, end - first, first, 0.0, None, 0.0, 0.0, 0.0, str(reduction)))
        placed[name] = replace(table, tiers=tuple(tiers))
    return replace(plan, tables=placed)


def use_checkout(checkout: str) -> None:
    """Find ``torchrec.distributed.tests`` in the checkout; the installed TorchRec goes first for all the rest."""
    torchrec.distributed.__path__.append(str(Path(checkout) / "torchrec" / "distributed"))


def on_rank(
    checkout: str, kind: Kind, seed: int, notes: Path, address: Mapping[str, str], work: bytes, *, rank: int, **job: Any
) -> None:
    """One rank of one example: the test's own function, with planner and sharder replaced."""
    os.environ.update(address)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    use_checkout(checkout)
    function, arguments = pickle.loads(work)
    qcomms = arguments.get("qcomms_config")
    codecs = get_qcomm_codecs_registry(qcomms, device=torch.device("cpu")) if qcomms else None
    arguments["sharders"] = [
        FlexShardEmbeddingCollectionSharder(theirs.fused_params, codecs) for theirs in arguments["sharders"]
    ]
    helpers = importlib.import_module("torchrec.distributed.test_utils.test_sharding")
    ours = partial(planner_for, kind, seed, arguments["tables"], notes)
    with mock.patch.object(helpers, "EmbeddingShardingPlanner", ours):
        function(rank=rank, **job, **arguments)


class Outcome(NamedTuple):
    """Of one example, or of a test that went wrong outside of its examples."""

    test: str
    kind: str
    verdict: str
    rows: Mapping[str, int]
    text: str = ""


def runner(checkout: str, kind: str, outcomes: list[Outcome], notes: Path) -> Callable[..., None]:
    """What runs an example in the place of ``MultiProcessTestBase._run_multi_process_test``, and notes how it ended."""
    original, how = MultiProcessTestBase._run_multi_process_test, KINDS[kind]

    def run(self: Any, *, callable: Any, world_size: int = 2, **arguments: Any) -> None:
        assert world_size <= how.cluster.world_size
        arguments |= {"backend": "gloo", "local_size": how.ranks_per_node}
        address = {name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "GLOO_DEVICE_TRANSPORT")}
        work = partial(on_rank, checkout, how, len(outcomes), notes, address, pickle.dumps((callable, arguments)))
        notes.unlink(missing_ok=True)
        try:
            original(self, callable=work, world_size=how.cluster.world_size)
        except AssertionError as error:
            told = {name: value for name, value in arguments.items() if name in PARAMETERS and value}
            outcomes.append(Outcome(self.id(), kind, "failed", {}, f"{told}\n{error}"))
        else:
            outcomes.append(Outcome(self.id(), kind, "passed", json.loads(notes.read_text())))

    return run


def run_tests(cases: Iterable[unittest.TestCase], kinds: Iterable[str], checkout: str) -> list[Outcome]:
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds:
            run = runner(checkout, kind, outcomes, Path(folder) / "tiers.json")
            for case in (case for case in cases if isinstance(case, MultiProcessTestBase)):
                case._mp_init_mode = "forkserver"  # where torch is built for CUDA they would spawn, which takes long
                result = unittest.TestResult()
                result.buffer = True
                with mock.patch.object(MultiProcessTestBase, "_run_multi_process_test", run):
                    case.run(result)
                wrong = result.errors + result.failures
                outcomes += [Outcome(case.id(), kind, "failed", {}, text) for _, text in wrong]
    return outcomes


def load_tests(checkout: str, examples: int) -> Any:
    """The checkout's module of tests, with so many combinations of parameters, and nothing skipped for lack of GPUs."""
    use_checkout(checkout)
    given = hypothesis.settings
    quiet, checks = hypothesis.Verbosity.quiet, list(hypothesis.HealthCheck)  # TensorDict's tests are inherited
    ours = {"max_examples": examples, "derandomize": True, "verbosity": quiet, "suppress_health_check": checks}
    with (
        mock.patch.object(hypothesis, "settings", lambda **theirs: given(**(theirs | ours))),
        mock.patch.object(torch.cuda, "device_count", return_value=2),
    ):
        return importlib.import_module("torchrec.distributed.tests.test_sequence_model_parallel")


def why_excluded(case: unittest.TestCase, counts: Mapping[str, int]) -> str:
    if counts:
        return ""
    empty, other = "TorchRec's own test is empty", "of an FBGEMM operator on CUDA, without planner or sharder"
    return empty if isinstance(case, MultiProcessTestBase) else other


def print_results(cases: Iterable[unittest.TestCase], kinds: Iterable[str], outcomes: Sequence[Outcome]) -> None:
    texts = ["class", "test", "why excluded"]
    grid = new_grid("Tests, and how many combinations of their parameters and plans", texts, COUNTS)
    for case in cases:
        counts = Counter(outcome.verdict for outcome in outcomes if outcome.test == case.id())
        passed, failed, excluded = counts["passed"], counts["failed"], int(not counts)
        name = case.id().rpartition(".")[2].removeprefix("test_")
        numbers = map(str, (passed + failed, passed, failed, excluded))
        grid.add_row(type(case).__name__, name, why_excluded(case, counts), *numbers)
    print(as_text(grid), "\n")
    tiers = [*TIERS.values(), "dense", "sparse"]
    grid = new_grid("Rows by tier, and copies by reduction, where they passed", ["plan"], [*COUNTS[:3], *tiers])
    for kind in kinds:
        mine = [outcome for outcome in outcomes if outcome.kind == kind]
        passed = [outcome for outcome in mine if outcome.verdict == "passed"]
        rows = sum((Counter(outcome.rows) for outcome in passed), Counter())
        total = max(sum(rows[tier] for tier in TIERS.values()), 1)
        numbers = map(str, (len(mine), len(passed), len(mine) - len(passed)))
        grid.add_row(kind, *numbers, *(f"{rows[tier] / total:.0%}" for tier in tiers))
    print(as_text(grid), "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", help="a TorchRec source tree, of the release that is installed")
    parser.add_argument("--kinds", default="", help="only kinds of plans with this in their name")
    parser.add_argument(
        "--examples", type=int, default=64, help="most combinations per test and plan; the tests have 3"
    )
    options = parser.parse_args()
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    get_context("forkserver").set_forkserver_preload(PRELOADED)
    logging.disable(logging.CRITICAL)
    checkout, start = str(Path(options.checkout).resolve()), time.monotonic()
    suite = unittest.defaultTestLoader.loadTestsFromModule(load_tests(checkout, options.examples))
    cases = [case for group in suite for case in group]
    kinds = [name for name in KINDS if options.kinds in name]
    outcomes = run_tests(cases, kinds, checkout)
    print_results(cases, kinds, outcomes)
    packages = ", ".join(f"{package.__name__} {package.__version__}" for package in (torch, fbgemm_gpu, torchrec))
    print(f"{packages}; {time.monotonic() - start:.0f} s; {machine()}")
    failures = [f"{o.test}, {o.kind}: {o.text}" for o in outcomes if o.verdict == "failed"]
    print(*(text[:2000] for text in failures[:10]), sep="\n\n")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
