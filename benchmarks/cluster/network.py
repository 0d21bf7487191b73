"""A cluster of N nodes x W ranks on one Linux machine: network namespaces joined by a bridge, links limited by tc tbf.

Needs root and iproute2. Every node is a network namespace; one more holds a bridge, the switch::

    node i:  lo    tbf at intra_mbit: ranks of a node talk over its own address, which the kernel routes through lo
             eth0  htb at inter_mbit: what leaves the node, and at path_mbit what goes to any one other node

A ring of an all-reduce has one neighbour and feels the second limit, an all-to-all hardly does: without it the ratio of
the two bandwidths would be fixed by arithmetic, at 0.5.

All of it lives in namespaces named ``<prefix>-...``: removing them removes bridge, links, limits and addresses, and
nothing in the machine's own namespace is touched. What a killed run left is removed at the next start.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from benchmarks.cluster.processors import NetworkError, inside, shares

__all__ = ["Network", "NetworkError", "network"]

INTERFACE = "eth0"
_NAMESPACES = Path("/run/netns")
_LOCKS = Path("/run/lock")
# A tbf must hold the largest packet it can see (64 KiB of segments and their headers), or it drops it; and as much as
# all connections of a node keep under way together, or TCP takes drops for congestion.
_BURST_BYTES, _QUEUE_BYTES = 128 << 10, 32 << 20


@dataclass(frozen=True)
class Network:
    """Shape and speed.

    Attributes:
        nodes, ranks_per_node: N and W.
        inter_mbit, path_mbit, intra_mbit: of each node's link, of what goes to one other node, and of each node's
            loopback; Mbit/s.
        prefix: of the namespaces' names.
        full_duplex: whether links are limited in both directions; otherwise in the sending one alone.
        cores: of the machine that each rank has for itself; None where they share all.
    """

    nodes: int
    ranks_per_node: int
    inter_mbit: float
    path_mbit: float
    intra_mbit: float
    prefix: str = "flexshard"
    full_duplex: bool = False
    cores: float | None = None

    @property
    def world_size(self) -> int:
        """U."""
        return self.nodes * self.ranks_per_node

    def address(self, node: int) -> str:
        """IPv4 address of a node."""
        return f"10.231.77.{node + 1}"

    def namespace(self, node: int) -> str:
        """Name of a node's namespace."""
        return f"{self.prefix}-n{node}"

    def run(self, module: str, arguments: Sequence[str], *, timeout_s: float, port: int = 29500) -> None:
        """Run ``python -m module arguments`` as every rank and wait for all.

        Raises:
            NetworkError: a rank failed (with what it wrote), or time is up; the others are killed. Or ranks cannot have
                so many cores each.
        """
        ranks: list[_Rank] = []
        command = [sys.executable, "-u", "-m", module, *arguments]
        with contextlib.ExitStack() as stack:
            groups: list[Path | None] = [None] * self.world_size
            if self.cores is not None:
                groups = [*stack.enter_context(shares(self.prefix, self.world_size, self.cores))]
            stack.callback(_end, ranks)
            for rank, group in enumerate(groups):
                ranks.append(self._start(rank, command, port, group))
            _wait(ranks, time.monotonic() + timeout_s)

    def _start(self, rank: int, command: list[str], port: int, group: Path | None) -> _Rank:
        node = rank // self.ranks_per_node
        command = ["ip", "netns", "exec", self.namespace(node), *command]
        process = subprocess.Popen(
            command if group is None else inside(group, command),
            env=os.environ
            | {
                "RANK": str(rank),
                "WORLD_SIZE": str(self.world_size),
                "LOCAL_RANK": str(rank % self.ranks_per_node),
                "LOCAL_WORLD_SIZE": str(self.ranks_per_node),
                "MASTER_ADDR": self.address(0),
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": INTERFACE,
                "OMP_NUM_THREADS": "1",
                "TORCH_CPP_LOG_LEVEL": "ERROR",  # namespaces have no name server, which every connection remarks on
            },
            text=True,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        assert process.stderr is not None
        return _Rank(rank, process, _Tail(process.stderr))


class _Tail:
    """The last lines of a stream, read by a thread so that the writer never waits."""

    def __init__(self, stream: IO[str]) -> None:
        self.lines: deque[str] = deque(maxlen=40)
        self._stream = stream
        self._thread = threading.Thread(target=lambda: self.lines.extend(stream), daemon=True)
        self._thread.start()

    def text(self) -> str:
        """What was written, once the writer has ended."""
        self._thread.join(2.0)
        return "".join(self.lines)

    def close(self) -> None:
        """Once the writer has ended."""
        self._thread.join(2.0)
        if not self._thread.is_alive():
            self._stream.close()


@dataclass(frozen=True)
class _Rank:
    rank: int
    process: subprocess.Popen[str]
    said: _Tail


def _end(ranks: list[_Rank]) -> None:
    for one in ranks:
        if one.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.process.pid, signal.SIGKILL)
        one.process.wait()
        one.said.close()


def _wait(ranks: list[_Rank], deadline: float) -> None:
    running = list(ranks)
    while running:
        for one in list(running):
            code = one.process.poll()
            if code is None:
                continue
            running.remove(one)
            if code:
                raise NetworkError(f"rank {one.rank} failed with {code}:\n{one.said.text()}")
        if running and time.monotonic() > deadline:
            raise NetworkError(f"ranks {', '.join(str(one.rank) for one in running)} were not done in time and killed")
        time.sleep(0.05)


@contextlib.contextmanager
def network(shape: Network) -> Iterator[Network]:
    """Build it, and take it down again whatever happens.

    Raises:
        NetworkError: not root, no iproute2, another run under way, or the kernel refuses.
    """
    _check_machine()
    with _lock(shape.prefix), _unwound_by_sigterm():
        _remove(shape.prefix)
        try:
            _build(shape)
            yield shape
        finally:
            _remove(shape.prefix)


def _check_machine() -> None:
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise NetworkError(f"{' and '.join(missing)} not found; install iproute2")
    if os.geteuid() != 0:
        raise NetworkError("network namespaces need root; run this with sudo")


def _command(*words: str, text: str = "") -> None:
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise NetworkError(f"'{' '.join(words)}' failed: {said[0] if said else 'no message'}")


def _build(shape: Network) -> None:
    switch = f"{shape.prefix}-switch"
    _command("ip", "netns", "add", switch)
    _command("ip", "-n", switch, "link", "add", "bridge0", "type", "bridge", "stp_state", "0", "mcast_snooping", "0")
    _command("ip", "-n", switch, "link", "set", "bridge0", "mtu", "9000", "up")
    for node in range(shape.nodes):
        own, port = shape.namespace(node), f"port{node}"
        _command("ip", "netns", "add", own)
        for setting in ("tcp_congestion_control=reno", "tcp_slow_start_after_idle=0"):
            name, _, value = setting.partition("=")
            _command("ip", "netns", "exec", own, "tee", f"/proc/sys/net/ipv4/{name}", text=value)
        peer = ("peer", "name", port, "mtu", "9000", "netns", switch)
        _command("ip", "-n", own, "link", "add", INTERFACE, "mtu", "9000", "type", "veth", *peer)
        _command("ip", "-n", own, "link", "set", "lo", "up")
        _command("ip", "-n", own, "addr", "add", f"{shape.address(node)}/24", "dev", INTERFACE)
        _command("ip", "-n", own, "link", "set", INTERFACE, "up")
        _command("ip", "-n", switch, "link", "set", port, "master", "bridge0", "up")
        for where, device in ((own, INTERFACE), (own, "lo"), (switch, port)):
            _keep_order(where, device)
        _limit_paths(shape, node)
        _limit(own, "lo", shape.intra_mbit)
        if shape.full_duplex:
            _limit(switch, port, shape.inter_mbit)


def _limit(namespace: str, device: str, mbit: float) -> None:
    """Limit what leaves a device."""
    how = ["rate", f"{round(mbit * 1e6)}bit", "burst", str(_BURST_BYTES), "limit", str(_QUEUE_BYTES)]
    _command("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *how)


def _limit_paths(shape: Network, node: int) -> None:
    """Limit what leaves a node, and what of it goes to each other node."""
    own = shape.namespace(node)
    burst = ("burst", str(_BURST_BYTES), "cburst", str(_BURST_BYTES), "quantum", "65536")
    whole, path = (f"{round(mbit * 1e6)}bit" for mbit in (shape.inter_mbit, shape.path_mbit))
    share = f"{round(shape.inter_mbit * 1e6 / shape.nodes)}bit"

    def tc(*words: str) -> None:
        _command("tc", "-n", own, words[0], "add", "dev", INTERFACE, *words[1:])

    tc("qdisc", "root", "handle", "1:", "htb", "default", "fff")
    tc("class", "parent", "1:", "classid", "1:1", "htb", "rate", whole, "ceil", whole, *burst)
    for peer in range(shape.nodes):
        if peer != node:
            name = f"1:{peer + 16:x}"
            tc("class", "parent", "1:1", "classid", name, "htb", "rate", share, "ceil", path, *burst)
            tc("qdisc", "parent", name, "bfifo", "limit", str(_QUEUE_BYTES))
            match = ("u32", "match", "ip", "dst", f"{shape.address(peer)}/32")
            tc("filter", "parent", "1:", "protocol", "ip", *match, "flowid", name)


def _keep_order(namespace: str, device: str) -> None:
    """Let one CPU receive all of a connection; a veth would otherwise take whichever sends, and reorder packets."""
    every = f"{(1 << min(os.cpu_count() or 1, 32)) - 1:x}"
    path = f"/sys/class/net/{device}/queues/rx-0/rps_cpus"
    _command("ip", "netns", "exec", namespace, "tee", path, text=every)


def _existing(prefix: str) -> list[str]:
    if not _NAMESPACES.is_dir():
        return []
    return sorted(path.name for path in _NAMESPACES.iterdir() if path.name.startswith(f"{prefix}-"))


def _remove(prefix: str) -> None:
    names = _existing(prefix)
    for name in names:
        pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
        for pid in pids.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    for name in names:
        done = subprocess.run(["ip", "netns", "del", name], capture_output=True, text=True, check=False)
        if done.returncode:  # of a run that was killed before the namespace was mounted
            (_NAMESPACES / name).unlink(missing_ok=True)
    if _existing(prefix):
        raise NetworkError(f"could not remove namespaces {', '.join(_existing(prefix))}; remove them with ip netns del")


@contextlib.contextmanager
def _lock(prefix: str) -> Iterator[None]:
    """One run at a time; the kernel lets go of the lock if we are killed."""
    _LOCKS.mkdir(parents=True, exist_ok=True)
    with (_LOCKS / f"{prefix}-network.lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise NetworkError("another run of this benchmark is under way; wait for it") from None
        yield


@contextlib.contextmanager
def _unwound_by_sigterm() -> Iterator[None]:
    """Let a polite kill run the clean-up."""

    def stop(number: int, _: FrameType | None) -> Any:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
