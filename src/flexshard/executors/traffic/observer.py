"""Counting what really goes over the wire: every collective that Python starts, ours and TorchRec's alike."""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from flexshard._internal import Messages, Moment, PendingMessages, device_of_group, moment, plain_sum, seconds_between
from flexshard.errors import DataError
from flexshard.executors.comm.collectives import label_of_call
from flexshard.executors.traffic.observation import Observation, ObservedCall, ObservedCollective

__all__ = ["Observer"]

Key = tuple[str, int, str]


@dataclass
class _Call:
    """A collective.

    Attributes:
        key: kind, group size, content.
        sent, received: bytes.
        start, end: of the collective; no end while nobody knows it.
        waits: when its caller, on CUDA its caller's stream, began to wait for it, and when that was over.
    """

    key: Key
    sent: int
    received: int
    start: Moment
    end: Moment | None = None
    waits: list[tuple[Moment, Moment]] = field(default_factory=list)

    @property
    def exposed_seconds(self) -> float:
        return plain_sum(seconds_between(*wait) for wait in self.waits)

    @property
    def seconds(self) -> float:
        end = self.end
        if self.waits and (end is None or (end.event is None and end.host > self.waits[0][1].host)):
            end = self.waits[0][1]  # whoever noted the end came later
        return 0.0 if end is None else seconds_between(self.start, end)


@dataclass
class _Step:
    calls: list[_Call] = field(default_factory=list)
    seconds: float = 0.0
    begun: Moment = field(default_factory=moment)


class _Timed(dist.Work):
    """A collective's handle that notes how long its caller stood waiting.

    TorchRec waits only for what is a ``dist.Work``.
    """

    def __init__(self, work: Any, call: _Call, device: torch.device, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._work, self._call, self._device = work, call, device
        self._tensors = tensors  # NCCL keeps them only until anybody has waited, which noting the end does

    def wait(self, *args: Any) -> Any:
        start = moment(self._device)
        try:
            return self._work.wait(*args)
        finally:
            self._call.waits.append((start, moment(self._device)))
            self._tensors = ()

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def get_future(self) -> Any:
        return self._work.get_future()


class _Watchers:
    """Threads that wait for messages of ours, whose handles call nobody when they are over; one for each group, in
    which they are over in the order in which they were started.
    """

    def __init__(self) -> None:
        self._queues: dict[Any, SimpleQueue[tuple[PendingMessages, _Call] | None]] = {}

    def watch(self, group: Any, work: PendingMessages, noted: _Call) -> None:
        """Let the end of messages be noted when it comes."""
        queue = self._queues.get(group)
        if queue is None:
            queue = self._queues[group] = SimpleQueue()
            # A rank that fails does not wait for what will never come.
            Thread(target=_note_ends, args=(queue,), name="flexshard-observer", daemon=True).start()
        queue.put((work, noted))

    def close(self) -> None:
        """Let the threads end, once they have seen what was under way."""
        for queue in self._queues.values():
            queue.put(None)
        self._queues.clear()


def _note_ends(queue: SimpleQueue[tuple[PendingMessages, _Call] | None]) -> None:
    while (watched := queue.get()) is not None:
        work, noted = watched
        with suppress(RuntimeError):  # which whoever waits for it raises
            work.wait()
            noted.end = moment()
        del watched, work, noted


class Observer:
    """Counts calls, bytes and seconds of collectives while it is open, step by step.

    ::

        with Observer() as observer:
            for batch in batches:
                train(batch)
                observer.step()
        observed = observer.result()  # on every rank
        if rank == 0:
            observed.save("observed.json")

    Bytes are whole buffers, a rank's own part included. A collective's seconds run from its start until it is over;
    its exposed seconds are those in which Python stood waiting, with NCCL those in which the current stream did. Under
    NCCL both are told by CUDA's events, which was never run on a GPU.
    Seen are our own messages under gloo, and ``all_to_all_single``, ``all_reduce``, ``all_gather_into_tensor`` and
    ``reduce_scatter_tensor`` of ``torch.distributed``, ours and TorchRec's (called "other ids" and "other embeddings");
    DDP's own gradient reduction starts in C++ and is not: it is none of the plan's.

    Args:
        blocking: run every collective by itself, after a barrier of its group: the time of the collective alone, as
            ``flexshard measure`` times it, without waiting for ranks that come late and without sharing a link with
            others. The step is slower, then.
    """

    def __init__(self, *, blocking: bool = False) -> None:
        self._blocking = blocking
        self._steps: list[_Step] = []
        self._now = _Step()
        self._saved: dict[str, Any] = {}
        self._watchers = _Watchers()
        self._start = time.perf_counter()

    def __enter__(self) -> Observer:
        self._saved = {name: getattr(_home(name), name) for name in _WATCHED}
        for name, original in self._saved.items():
            setattr(_home(name), name, self._watch(name, original))
        self._start = time.perf_counter()
        self._now.begun = moment()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, original in self._saved.items():
            setattr(_home(name), name, original)
        self._watchers.close()

    def step(self) -> None:
        """The end of a step, after its backward pass."""
        now = time.perf_counter()
        self._now.seconds, self._start = now - self._start, now
        self._steps.append(self._now)
        self._now = _Step()

    def _watch(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        kind, sizes = _WATCHED[name]
        signature = inspect.signature(original)

        def call(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            group, tensors = given.get("group"), [one for one in given.values() if isinstance(one, torch.Tensor)]
            sent, received, dtype = sizes(*args, **kwargs)
            label = label_of_call()
            content = (
                label.content if label is not None else ("other embeddings" if dtype.is_floating_point else "other ids")
            )
            size = label.group_size if label is not None else dist.get_world_size(group)
            device = _clock_of(tensors[0], group)
            if self._blocking:
                self._barrier(group, device)
            noted = _Call((kind, size, content), sent, received, moment(device))
            self._now.calls.append(noted)
            work = original(*args, **kwargs)
            if self._blocking and work is not None:
                work.wait()
            if self._blocking or work is None or not hasattr(work, "wait"):
                noted.end = moment(device)
                noted.waits.append((noted.start, noted.end))
                if self._blocking:
                    seconds_between(noted.start, noted.end)  # until it is over
                return work
            if isinstance(work, PendingMessages):
                self._watchers.watch(group, work, noted)
            else:
                _note_end(work, noted, device)
            return _Timed(work, noted, device, tensors)

        return call

    def _barrier(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Until all ranks of a group are here, by its own functions, which are not watched."""
        one = torch.zeros(1, device=device)
        self._saved["all_reduce"](one, group=group)
        one.tolist()

    def result(
        self, process_group: dist.ProcessGroup | None = None, *, fingerprint: str = "", skip: int = 0
    ) -> Observation:
        """Of all ranks together; every rank must call it, after the last :meth:`step`.

        Args:
            fingerprint: of the plan that ran, so that it is not compared with another.
            skip: first steps to leave out, such as those that warm up.

        Raises:
            DataError: no steps, or another number of them on another rank.
        """
        observed = self._steps[skip:]
        every: list[Any] = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(every, [_sums(step) for step in observed], group=process_group)
        if not any(every):
            raise DataError("no steps were observed; call step() after each")
        if len({len(steps) for steps in every}) != 1:
            raise DataError("ranks observed different numbers of steps; call step() on every rank after each step")
        keys = sorted({key for steps in every for _, calls in steps for key in calls})
        nothing = (0, 0, 0, 0.0, 0.0)
        collectives = []
        for key in keys:
            # (ranks, steps) of calls, bytes sent and received, seconds, exposed seconds
            table = [[calls.get(key, nothing) for _, calls in steps] for steps in every]
            ranks, number = len(table), len(table[0])
            mean = [plain_sum(cell[i] for row in table for cell in row) / ranks / number for i in range(5)]
            by_step = [sum(row[step][1] for row in table) / ranks for step in range(number)]
            fullest = [max(max(row[step][1], row[step][2]) for row in table) for step in range(number)]
            slowest = [max(row[step][3] for row in table) for step in range(number)]
            collectives.append(
                ObservedCollective(
                    kind=key[0],
                    group_size=key[1],
                    content=key[2],
                    calls=mean[0],
                    bytes=mean[1],
                    fullest_bytes=plain_sum(fullest) / number,
                    seconds=statistics.median(slowest),
                    exposed_seconds=mean[4],
                    bytes_by_step=tuple(by_step),
                    mean_seconds=mean[3],
                )
            )
        lengths = [max(steps[i][0] for steps in every) for i in range(len(observed))]
        median = sorted(range(len(lengths)), key=lambda index: lengths[index])[len(lengths) // 2]
        shown: list[Any] = [None] * dist.get_world_size(process_group)
        rank = dist.get_rank(process_group)
        dist.all_gather_object(shown, _calls_of(observed[median], rank), group=process_group)
        calls = tuple(call for own in shown for call in own)
        return Observation(fingerprint, len(every), tuple(lengths), tuple(collectives), calls)

    def calls(self) -> list[dict[Key, tuple[int, int, int]]]:
        """Of this rank, by step: (calls, bytes sent, bytes received) of each (kind, group size, content)."""
        return [{key: cell[:3] for key, cell in _sums(step)[1].items()} for step in self._steps]


def _clock_of(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.device:
    """The device whose events tell when a collective is over: NCCL's; else the host."""
    own = device_of_group(group)
    return own if tensor.device.type == own.type else torch.device("cpu")


def _note_end(work: Any, noted: _Call, device: torch.device) -> None:
    """Let the end of a collective be noted when it comes."""
    if device.type == "cuda":  # NCCL's futures are over when the collective has been queued
        with torch.cuda.stream(torch.cuda.Stream(device)):
            work.wait()  # lets this stream wait, and nobody else
            noted.end = moment(device)
        return

    def over(_: Any) -> None:
        noted.end = moment()

    with suppress(RuntimeError, AttributeError):  # a backend without futures: until someone has waited
        work.get_future().add_done_callback(over)


def _calls_of(step: _Step, rank: int) -> list[ObservedCall]:
    """A step's calls; times from its beginning, or on a device from its first collective."""
    found = []
    zero: dict[bool, Moment] = {False: step.begun}
    for call in step.calls:
        on_device = call.start.event is not None
        begin = zero.setdefault(on_device, call.start)
        waits = tuple((seconds_between(begin, start), seconds_between(start, end)) for start, end in call.waits)
        start = seconds_between(begin, call.start)
        found.append(ObservedCall(rank, *call.key, call.sent, start, call.seconds, waits))
    return found


def _sums(step: _Step) -> tuple[float, dict[Key, tuple[int, int, int, float, float]]]:
    sums: dict[Key, tuple[int, int, int, float, float]] = {}
    for call in step.calls:
        old = sums.get(call.key, (0, 0, 0, 0.0, 0.0))
        new = 1, call.sent, call.received, call.seconds, call.exposed_seconds
        sums[call.key] = (old[0] + new[0], old[1] + new[1], old[2] + new[2], old[3] + new[3], old[4] + new[4])
    return step.seconds, sums


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _of_all_to_all(output: torch.Tensor, input: torch.Tensor, *_: Any, **__: Any) -> tuple[int, int, torch.dtype]:
    return _nbytes(input), _nbytes(output), input.dtype


def _of_all_reduce(tensor: torch.Tensor, *_: Any, **__: Any) -> tuple[int, int, torch.dtype]:
    return _nbytes(tensor), _nbytes(tensor), tensor.dtype


def _of_all_gather(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, *_: Any, **__: Any
) -> tuple[int, int, torch.dtype]:
    return _nbytes(output_tensor), _nbytes(output_tensor), input_tensor.dtype


def _of_reduce_scatter(
    output: torch.Tensor,  # noqa: ARG001 - as callers name it
    input: torch.Tensor,
    *_: Any,
    **__: Any,
) -> tuple[int, int, torch.dtype]:
    return _nbytes(input), _nbytes(input), input.dtype


_WATCHED: dict[str, tuple[str, Callable[..., tuple[int, int, torch.dtype]]]] = {
    "exchange_messages": ("all_to_all", _of_all_to_all),  # ours
    "all_to_all_single": ("all_to_all", _of_all_to_all),
    "all_reduce": ("all_reduce", _of_all_reduce),
    "all_gather_into_tensor": ("all_gather", _of_all_gather),
    "reduce_scatter_tensor": ("reduce_scatter", _of_reduce_scatter),
}


def _home(name: str) -> Any:
    """Where a watched function is looked up when it is called."""
    return Messages if name == "exchange_messages" else dist
