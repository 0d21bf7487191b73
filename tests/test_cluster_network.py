"""The benchmark's network of namespaces: it carries ranks, and is gone afterwards, whatever happens."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.cluster.network import Network, NetworkError, network

PREFIX = f"fs{os.environ.get('PYTEST_XDIST_WORKER', 'test')}"  # one run of each prefix at a time


@pytest.fixture
def shape() -> Network:
    small = Network(2, 1, 400.0, 400.0, 400.0, prefix=PREFIX)
    try:
        with network(small):
            pass
    except NetworkError as error:
        pytest.skip(f"no network namespaces here: {error}")
    return small


def left() -> list[str]:
    return [path.name for path in Path("/run/netns").glob(f"{PREFIX}-*")] if Path("/run/netns").is_dir() else []


def test_ranks_run_and_nothing_is_left(shape: Network) -> None:
    with network(shape) as built:
        assert len(left()) == 3
        built.run("platform", [], timeout_s=20)
    assert not left()


def test_a_rank_that_fails_is_told_and_nothing_is_left(shape: Network) -> None:
    told = r"rank [01] failed with 1:\n(.|\n)*No module named no_such_module"
    with pytest.raises(NetworkError, match=told), network(shape) as built:
        built.run("no_such_module", [], timeout_s=20)
    assert not left()


def test_ranks_that_hang_are_killed(shape: Network) -> None:
    with pytest.raises(NetworkError, match="not done in time"), network(shape) as built:
        built.run("http.server", ["0"], timeout_s=1)
    assert not left()


def test_a_rank_has_the_cores_it_is_given(shape: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = tmp_path / "busy.py"
    busy.write_text(
        "import time\nbegin = time.monotonic()\nwhile time.process_time() < 0.5:\n    pass\n"
        "assert time.monotonic() - begin > 1.2, time.monotonic() - begin\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    quarter = replace(shape, cores=0.25)
    with network(quarter) as built:
        try:
            built.run("busy", [], timeout_s=60)
        except NetworkError as error:
            if "no control group" in str(error):
                pytest.skip(str(error))
            raise
    groups = [*Path("/sys/fs/cgroup").glob(f"{PREFIX}-*"), *Path("/sys/fs/cgroup/cpu").glob(f"{PREFIX}-*")]
    assert not groups
    assert not left()


def test_more_cores_than_there_are(shape: Network) -> None:
    with network(replace(shape, cores=1000.0)) as built, pytest.raises(NetworkError, match="do not fit"):
        built.run("platform", [], timeout_s=20)
