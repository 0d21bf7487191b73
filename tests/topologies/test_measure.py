"""Fits of alpha and beta, and a measurement of real gloo processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from flexshard import Cluster
from flexshard.calibration import fit_rate
from flexshard.calibration.cluster_rates import _fit
from flexshard.errors import ClusterError
from flexshard.topologies import Level
from tests.commands import run

SIZES = [1 << 16, 1 << 20, 1 << 23, 1 << 25]


@given(st.floats(0, 1e-2), st.floats(1e6, 1e12))
def test_a_line_is_found_again(alpha: float, beta: float) -> None:
    fit = fit_rate(SIZES, [alpha + n / beta for n in SIZES])
    assert fit.error < 1e-6
    assert fit.bytes_per_s == pytest.approx(beta, rel=1e-4) or SIZES[-1] / beta < 1e-6 * alpha
    assert fit.alpha_seconds == pytest.approx(alpha, rel=1e-4, abs=1e-6 * SIZES[0] / beta)


def test_a_line_by_hand() -> None:
    # 1 ms + n / (1 GB/s), with the largest 10 % slow: no line fits, and the error says how badly.
    seconds = [1e-3 + n / 1e9 for n in (1e6, 2e6, 4e6)]
    fit = fit_rate([1e6, 2e6, 4e6], seconds)
    assert (fit.alpha_seconds, fit.bytes_per_s) == (pytest.approx(1e-3), pytest.approx(1e9))
    bent = fit_rate([1e6, 2e6, 4e6], [*seconds[:2], 1.1 * seconds[2]])
    assert 0.01 < bent.error < 0.1


def test_a_negative_latency_is_none() -> None:
    fit = fit_rate([1e6, 2e6], [1e-3, 3e-3])
    assert fit.alpha_seconds == 0.0
    # The one slope with the least relative errors: (1 + 2/3) / (1 + 4/9) per 1e-9.
    assert 1 / fit.bytes_per_s == pytest.approx(1e-9 * (1 + 2 / 3) / (1 + 4 / 9))


@pytest.mark.parametrize(
    ("nbytes", "seconds", "message"),
    [
        ([1e6], [1e-3], "at least two sizes"),
        ([1e6, 1e6], [1e-3, 1e-3], "at least two sizes"),
        ([1e6, 2e6], [1e-3, 0.0], "at least two sizes"),
        ([1e3, 1e6], [2e-3, 1e-3], "do not grow with sizes"),
    ],
)
def test_times_without_a_line(nbytes: list[float], seconds: list[float], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        fit_rate(nbytes, seconds)


def test_calls_that_were_disturbed_are_timed_again() -> None:
    # 1 ms + n / (1 GB/s); the first time that the smallest is timed, something else has the processor.
    disturbed = iter([50e-3])
    counts = dict.fromkeys(SIZES, 0)

    def timer(nbytes: int) -> float:
        counts[nbytes] += 1
        return 1e-3 + nbytes / 1e9 + (next(disturbed, 0.0) if nbytes == SIZES[0] else 0.0)

    fit, attempts = _fit(SIZES, timer)
    assert (fit.alpha_seconds, fit.bytes_per_s) == (pytest.approx(1e-3), pytest.approx(1e9))
    assert (set(counts.values()), attempts) == ({2}, 2)
    assert _fit(SIZES, timer)[1] == 1, "times that grow are taken once"


def test_calls_whose_times_never_grow_are_timed_a_few_times_and_refused() -> None:
    calls: list[int] = []

    def timer(nbytes: int) -> float:
        calls.append(nbytes)
        return 1 / nbytes

    with pytest.raises(ClusterError, match="do not grow with sizes"):
        _fit(SIZES, timer)
    assert 2 * len(SIZES) <= len(calls) <= 10 * len(SIZES)


def measure(folder: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK")}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, "-m", "flexshard.cli", "measure", "-o", "cluster.yaml", *arguments]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, env=environment, timeout=120
    )


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_four_gloo_processes_as_two_nodes(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    options = ("--memory", "1 GB", "--ranks-per-node", "2", "--sizes", "64 KiB,1 MiB,16 MiB", "--repeats", "5")
    result = measure(tmp_path, *options, launcher=launcher)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("group size") == 1, "rank 0 alone prints"
    cluster = Cluster.load(tmp_path / "cluster.yaml")
    assert (cluster.nodes, cluster.ranks_per_node, cluster.group_sizes) == (2, 2, (1, 2, 4))
    for level in cluster.levels:
        assert (level.own_all_gather is None) == (level.own_reduce_scatter is None) == (level.group_size == 4)
        for rate in (level.all_to_all, level.all_reduce, level.own_all_gather, level.own_reduce_scatter):
            if rate is not None:
                assert rate.source == "measured"
                assert "gloo over 2 nodes x 2 ranks" in rate.note
                assert 1e6 < rate.bytes_per_s < 1e13  # beside other processes, times may hardly grow
                assert np.isfinite(rate.alpha_seconds)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_nodes_that_do_not_divide_the_ranks(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    result = measure(tmp_path, "--memory", "1 GB", "--ranks-per-node", "3", launcher=launcher)
    assert result.returncode != 0
    assert "flexshard: error: group size 3 does not divide the 2 ranks; nothing was measured" in result.stderr
    assert not list(tmp_path.iterdir())


def test_outside_torchrun_it_says_how_to_start_it(tmp_path: Path) -> None:
    result = measure(tmp_path, "--memory", "1 GB")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert ("torchrun" if find_spec("torch") is not None else "needs torch") in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.parametrize(
    ("variables", "arguments", "message"),
    [
        ({"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, (), "the environment has no WORLD_SIZE; start"),
        ({"RANK": "x", "LOCAL_RANK": "0"}, (), "the environment's RANK is 'x', not a number; start"),
        (
            {"RANK": "5", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}
            | {"MASTER_ADDR": "127.0.0.1"},
            (),
            "the environment's RANK is 5, of a WORLD_SIZE of 2; start",
        ),
        (
            {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "1", "MASTER_PORT": "abc"},
            (),
            "the environment's MASTER_PORT is 'abc', not a number; start",
        ),
        ({}, ("--reserve", "2 nights"), "2 nights"),
        ({}, ("-o", "nowhere/cluster.yaml"), "cannot write nowhere/cluster.yaml: there is no such folder"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_timed(
    variables: dict[str, str],
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    result = run(tmp_path, "measure", "-o", "cluster.yaml", "--memory", "1 GB", *arguments)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1), result.stderr
    assert message in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_buffers_that_no_rank_has_room_for(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    result = measure(tmp_path, "--memory", "1 GB", "--sizes", "64KiB,900TB", "--repeats", "1", launcher=launcher)
    assert result.returncode != 0
    assert "flexshard: error: buffers of 819 TiB do not fit a rank's memory; time smaller sizes" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_a_rank_that_is_killed_is_told_to_the_others(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    arguments = ["measure", "-o", "cluster.yaml", "--memory", "1 GB", "--sizes", "1MiB,2MiB", "--repeats", "100000"]
    killed = (
        "import os, runpy, signal, sys; from flexshard.calibration import cluster_rates;"
        " cluster_rates._timer = lambda *_: os.kill(os.getpid(), signal.SIGKILL);"  # when the ranks have met
        " runpy.run_module('flexshard.cli', run_name='__main__')"
    )
    place = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment = os.environ | place | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    both = [
        subprocess.Popen(
            [sys.executable, *how, *arguments],
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
            env=environment | {"RANK": rank, "LOCAL_RANK": rank},
        )
        for rank, how in (("0", ("-m", "flexshard.cli")), ("1", ("-c", killed)))
    ]
    _, errors = both[0].communicate(timeout=100)
    both[1].communicate()
    assert both[0].returncode == 2, errors
    (line,) = [one for one in errors.splitlines() if one.startswith("flexshard: ")]
    assert "error: another rank has ended, or cannot be reached any more: " in line
    assert not list(tmp_path.iterdir())


def test_names_are_of_one_line() -> None:
    with pytest.raises(ClusterError, match="a cluster's name is a text of one line, found 'a"):
        Cluster("a\nb", 1, 1, 1e9, 0.0, (Level(1),))
