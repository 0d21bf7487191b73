"""Embedding servers as Ray actors, and how the ranks of a job reach them (BagPipe, section 3)."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from flexshard._internal import check_int, connect_to_ray, first_line, on_all_ranks, on_first_rank
from flexshard.errors import CacheError, MissingDependencyError
from flexshard.executors.servers.row_server import Column, RowServer, Wanted

__all__ = ["EmbeddingServers", "PendingWrite", "ServedTables"]

_NAMESPACE = "flexshard-embedding-servers"
_OPTIONS = {"num_cpus": 1, "scheduling_strategy": "SPREAD"}
# Nothing is done twice, or by a server that has begun again without its rows.
_FIXED = {"namespace": _NAMESPACE, "max_restarts": 0, "max_task_retries": 0, "max_concurrency": 1}
_AUTHENTICATION = "RAY_AUTH_MODE"
_START_SECONDS = _ANSWER_SECONDS = 120.0
_RESTART = "end this job, start it again with new servers, and load its last checkpoint"

IntArray = npt.NDArray[np.int64]
PendingWrite = tuple[int, Any]  # which server, and what stands for its answer


class EmbeddingServers:
    """Processes that hold the rows of tables in their memory, for trainers that keep a cache of them.

    Give them to a sharder as ``servers``: the tables in ``cache_load_factors`` then have their rows there instead of in
    the trainers' own memory. Rows are dealt to the servers by id, whatever the plan, so that neither the number of
    trainers nor their plan matters to them. How many there are, and on which machines, is independent of the trainers.

    Servers end with the first rank's process, or with :meth:`close`. One that dies is not started again, since its rows
    are gone: training ends on every rank with an error that names it, and goes on from the last checkpoint with new
    ones. Tried on one machine.

    Every rank of the process group must make this object alike.

    Args:
        number: of servers.
        process_group: of the trainers; the default one if None.
        address: of the Ray cluster, as of ``ray.init``; by default that of the first rank's environment, or a new one
            on its machine.
        options: of the actors, as Ray takes them (``num_cpus``, ``resources``, ``memory``, ``scheduling_strategy``...).

    Raises:
        CacheError: they could not be started.
        MissingDependencyError: Ray is not installed.
    """

    def __init__(
        self,
        number: int,
        *,
        process_group: dist.ProcessGroup | None = None,
        address: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.number = check_int(number, "number of embedding servers", CacheError, least=1)
        self._group, self._first = process_group, dist.get_rank(process_group) == 0
        self._actors: list[Any] = []
        self._modules, self._left = 0, list[str]()
        on_all_ranks(lambda: _check_given(address, options), CacheError, process_group)
        on_all_ranks(_check_ray, MissingDependencyError, process_group)
        found = on_first_rank(lambda: self._start(address, dict(options or {})), CacheError, process_group)
        try:
            on_all_ranks(lambda: self._connect(*found), CacheError, process_group)
        except CacheError:
            self.close()
            raise

    @cached_property
    def _ray(self) -> Any:
        """Imported when it is needed: what is in the environment by then counts."""
        import ray

        return ray

    def _start(self, address: str | None, options: dict[str, Any]) -> tuple[int, str, str, str | None]:
        """Start the servers; how many, their names' beginning, where their cluster is, whether it asks for tokens."""
        ray = self._ray
        try:
            if not ray.is_initialized():
                connect_to_ray(address)
            elif address not in (None, "auto", here := ray.get_runtime_context().gcs_address):
                raise CacheError(f"this process is connected to Ray at {here} already; leave address={address!r} out")
            job = uuid.uuid4().hex
            made, how = ray.remote(RowServer), {**_OPTIONS, **options, **_FIXED}
            self._actors = [
                made.options(**how, name=f"{job}-{index}").remote(index, self.number) for index in range(self.number)
            ]
            ready, waiting = ray.wait(
                [actor.pid.remote() for actor in self._actors], num_returns=self.number, timeout=_START_SECONDS
            )
            ray.get(ready)
        except ConnectionError as error:
            raise CacheError(
                f"embedding servers could not be started: {first_line(error)}; is a Ray cluster there, and if it wants"
                f" tokens, does this process have {_AUTHENTICATION}=token and the right one?"
            ) from error
        except (ray.exceptions.RayError, ValueError, TypeError) as error:
            raise CacheError(f"embedding servers could not be started: {first_line(error)}") from error
        if waiting:
            free = ray.available_resources()
            self.close()
            raise CacheError(
                f"{len(waiting)} of {self.number} embedding servers have not started within {_START_SECONDS:g} s; the"
                f" Ray cluster has {free.get('CPU', 0):g} CPUs free: take fewer, or give options with less to ask for"
            )
        return self.number, job, ray.get_runtime_context().gcs_address, os.environ.get(_AUTHENTICATION)

    def _connect(self, number: int, job: str, where: str, authentication: str | None) -> None:
        if self._first:
            return
        if number != self.number:
            raise CacheError(
                f"{self.number} embedding servers are asked for here, {number} on rank 0: give all the same"
            )
        if authentication is not None and _AUTHENTICATION not in os.environ:  # a cluster that the first rank has made
            os.environ[_AUTHENTICATION] = authentication
            if "ray" in sys.modules:  # which has read the environment
                with suppress(ImportError, AttributeError):
                    importlib.import_module("ray._raylet").Config.initialize("")
        ray = self._ray
        try:
            connect_to_ray(where)
            self._actors = [ray.get_actor(f"{job}-{index}", _NAMESPACE) for index in range(self.number)]
        except (ray.exceptions.RayError, ConnectionError, ValueError) as error:
            raise CacheError(
                f"embedding servers at {where} cannot be reached: {first_line(error)}; does every rank have the same"
                f" {_AUTHENTICATION} and token?"
            ) from error

    def __enter__(self) -> EmbeddingServers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:  # others may not have come so far
            on_all_ranks(lambda: None, CacheError, self._group)
        self.close()

    def close(self) -> None:
        """End the servers, if this is the first rank; what they hold is gone, for all ranks."""
        if self._first:
            for actor in self._actors:
                self._ray.kill(actor)
        self._actors = []

    def pids(self) -> list[int]:
        """Of their processes."""
        return self._answers([(index, actor.pid.remote()) for index, actor in enumerate(self._live())])

    def nbytes(self) -> list[int]:
        """Bytes of rows that each holds."""
        return self._answers([(index, actor.nbytes.remote()) for index, actor in enumerate(self._live())])

    def tables(self, process_group: dist.ProcessGroup | None = None) -> ServedTables:
        """Room for the tables of one module more, which the ranks of a process group share; they must all call it.

        Raises:
            CacheError: these are other ranks than the servers'.
        """
        wanted, own = (dist.get_process_group_ranks(group) for group in (process_group, self._group))
        if wanted != own:
            raise CacheError(
                f"these embedding servers are of ranks {own}, the module is sharded over ranks {wanted}; make"
                " EmbeddingServers(process_group=...) for each group, whose tables are its own"
            )
        self._modules += 1
        return ServedTables(self, f"{self._modules}/")

    def _live(self) -> list[Any]:
        if not self._actors:
            raise CacheError("the embedding servers have been closed")
        return self._actors

    def _answers(self, calls: Sequence[PendingWrite]) -> list[Any]:
        """What servers answer.

        Raises:
            CacheError: one is gone, or does not answer, or could not do it.
        """
        ray = self._ray
        found = []
        for server, call in calls:
            whose = f"embedding server {server} of {self.number}"
            try:
                found.append(ray.get(call, timeout=_ANSWER_SECONDS))
            except ray.exceptions.RayTaskError as error:
                raise CacheError(f"{whose}: {first_line(error.cause or error)}") from error
            except ray.exceptions.GetTimeoutError as error:
                raise CacheError(f"{whose} has not answered for {_ANSWER_SECONDS:g} s; {_RESTART}") from error
            except ray.exceptions.RayError as error:
                raise CacheError(f"{whose} is gone; {_RESTART} ({first_line(error)})") from error
        return found


class ServedTables:
    """The tables of one module on embedding servers. When nobody has this any more, their memory goes to the tables
    that are made next.
    """

    def __init__(self, servers: EmbeddingServers, prefix: str) -> None:
        self.servers, self._prefix = servers, prefix
        self._columns: dict[str, dict[str, Column]] = {}
        weakref.finalize(self, servers._left.append, prefix).atexit = False

    def make(self, table: str, rows: int, columns: Mapping[str, Column]) -> None:
        """Take a table in, all zeros; every rank must call it.

        Args:
            table: its name.
            rows: E.
            columns: numbers per row, and their type, of weights ("weight") and states by name.
        """
        servers = self.servers
        self._columns[table] = dict(columns)

        def work() -> None:
            if not servers._first:
                return
            left, calls = list(servers._left), []
            for index, actor in enumerate(servers._live()):
                actor.drop.remote(left)
                calls.append((index, actor.make.remote(self._prefix + table, rows, columns)))
            del servers._left[: len(left)]
            servers._answers(calls)

        on_all_ranks(work, CacheError, servers._group)

    def read(self, wanted: Wanted, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Rows of tables of the same columns by id, one table's after the other's; shape (n, width) by name."""
        columns, number = self._columns[wanted[0][0]], sum(ids.size for _, ids in wanted)
        result = {name: np.empty((number, columns[name][0]), columns[name][1]) for name in names}
        actors, places, calls = self.servers._live(), [], []
        for server, where, own in self._split(wanted):
            places.append(where)
            calls.append((server, actors[server].read.remote(own, list(names))))
        for where, rows in zip(places, self.servers._answers(calls), strict=True):
            for name, values in rows.items():
                result[name][where] = values
        return {name: torch.from_numpy(values) for name, values in result.items()}

    def begin_write(self, wanted: Wanted, rows: Mapping[str, torch.Tensor]) -> list[PendingWrite]:
        """Let distinct rows by id be these, shape (n, width) by name; :meth:`finish_writes` waits for it. What this
        process reads afterwards finds them.
        """
        actors, arrays, calls = self.servers._live(), {name: values.numpy() for name, values in rows.items()}, []
        for server, where, own in self._split(wanted):
            part = {name: values[where] for name, values in arrays.items()}
            calls.append((server, actors[server].write.remote(own, part)))
        return calls

    def finish_writes(self, writes: Sequence[PendingWrite]) -> None:
        """Wait until rows are written, so that every rank finds them."""
        self.servers._answers(writes)

    def write(self, wanted: Wanted, rows: Mapping[str, torch.Tensor]) -> None:
        """As :meth:`begin_write`, and wait for it."""
        self.finish_writes(self.begin_write(wanted, rows))

    def _split(self, wanted: Wanted) -> Iterator[tuple[int, IntArray, Wanted]]:
        """Each server that is needed, which rows it has, and its own places of each table's."""
        number, tables = self.servers.number, [self._prefix + table for table, _ in wanted]
        ids = np.concatenate([ids for _, ids in wanted])
        places, owners = np.divmod(ids, number)
        ends = np.cumsum([one.size for _, one in wanted])
        order = np.argsort(owners, kind="stable")
        bounds = np.cumsum(np.bincount(owners, minlength=number))[:-1]
        for server, where in enumerate(np.split(order, bounds)):
            if where.size:
                parts = np.split(places[where], np.searchsorted(where, ends[:-1]))
                yield server, where, [(table, part) for table, part in zip(tables, parts, strict=True) if part.size]


def _check_given(address: object, options: object) -> None:
    if not isinstance(address, str | None):
        raise CacheError(f"address is a text, such as '10.0.0.1:6379', or None, found {address!r}")
    if not isinstance(options, Mapping | None):
        raise CacheError(f"options are Ray's of an actor, by name, found {options!r}")
    own = next((name for name in options or {} if name in _FIXED or name == "name"), None)
    if own is not None:
        raise CacheError(f"options: {own!r} is the servers' own; leave it out")


def _check_ray() -> None:
    try:
        found = importlib.util.find_spec("ray")
    except ValueError:  # a module that says nothing of where it is from
        found = None
    if found is None:
        raise MissingDependencyError("embedding servers need Ray, which is not installed: pip install 'flexshard[ray]'")
