"""TorchRec's own tests of its planner, run with ``OptimalShardingPlanner`` in its place.

The tests are read from a TorchRec source tree (wheels leave them out); TorchRec itself is the one installed. Tests that
give the planner another search, or read TorchRec's words in an error, are excluded by name.

    python -m benchmarks.torchrec_planner_tests CHECKOUT
"""

from __future__ import annotations

import argparse
import importlib
import sys
import unittest
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torchrec.distributed.planner
import torchrec.distributed.planner.planners

from benchmarks.timing import machine
from flexshard import OptimalShardingPlanner

FILES = ("test_planners", "test_stats", "test_types", "test_embedding_utils", "test_embeddingbag_utils")
EXCLUDED = {
    "TestEmbeddingShardingHashPlannerContextInputs.test_hash_equality": "gives a performance_model",
    "TestEmbeddingShardingHashPlannerContextInputs.test_hash_inequality": "gives a performance_model",
    "TestAutoPlannerWithScaleupProposer.test_auto_sharder_solution": "gives a proposer",
    "TestAutoPlannerWithScaleupProposer.test_planner_with_virtual_table": "gives a proposer",
    "TestFixedAbsoluteStorageReservation.test_error_message_with_fixed_absolute_reservation": "looks for TorchRec's"
    " words in the message that nothing fits",
}


def tests_of(folder: Path) -> Iterator[unittest.TestCase]:
    """Every test of the files, whose planner is ours."""
    with (
        mock.patch.object(torchrec.distributed.planner, "EmbeddingShardingPlanner", OptimalShardingPlanner),
        mock.patch.object(torchrec.distributed.planner.planners, "EmbeddingShardingPlanner", OptimalShardingPlanner),
    ):
        sys.path.insert(0, str(folder))  # processes that the tests start import them by name
        for name in FILES:
            if not (folder / f"{name}.py").exists():
                raise SystemExit(f"{folder / name}.py is not there; give TorchRec's source tree")
            module = importlib.import_module(name)
            for suite in unittest.defaultTestLoader.loadTestsFromModule(module):
                yield from suite  # type: ignore[misc]  # a class's tests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    checkout = parser.parse_args().checkout
    warnings.simplefilter("ignore")
    print(f"TorchRec's planner tests with OptimalShardingPlanner; {machine()}")
    passed, excluded, failed = 0, 0, 0
    for test in tests_of(checkout / "torchrec" / "distributed" / "planner" / "tests"):
        name = test.id().split(".", 1)[1]
        if name in EXCLUDED:
            excluded += 1
            print(f"  excluded: {name}: {EXCLUDED[name]}")
            continue
        result = unittest.TestResult()
        test.run(result)
        passed += result.wasSuccessful()
        failed += not result.wasSuccessful()
        for _, trace in (*result.failures, *result.errors):
            print(f"  failed: {name}: {trace.strip().splitlines()[-1]}")
    print(f"{passed + failed + excluded} tests: {passed} passed, {failed} failed, {excluded} excluded")
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
