"""Who has come to a call that every rank has to make: ``if rank == 0: model.state_dict()`` would wait for ever."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import distributed_c10d

from flexshard.errors import CheckpointError

__all__ = ["Attendance"]

_SAY_AFTER_SECONDS = 5.0
_made = itertools.count()


class Attendance:
    """Waits for all ranks, and names those that have not come: each leaves word in the process group's store."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._group = process_group
        self._calls: dict[str, int] = {}
        self._number = next(_made)  # alike on all ranks, which make their modules in one order
        self._store = dist.PrefixStore("flexshard", distributed_c10d._get_process_group_store(process_group))

    def wait(self, call: str, instead: str) -> None:
        """Until every rank has come.

        Args:
            call: what it is, such as "state_dict()".
            instead: what to write where not every rank can come.

        Warns:
            UserWarning: on the ranks that wait, after five seconds, with those that have not come.

        Raises:
            CheckpointError: a rank ended, or has not come within the process group's timeout.
        """
        world, rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        if world == 1:
            return
        number = self._calls[call] = self._calls.get(call, 0) + 1
        keys = [f"{self._number}/{call}/{number}/{other}" for other in range(world)]
        self._store.set(keys[rank], "here")
        everybody = dist.barrier(group=self._group, async_op=True)
        assert everybody is not None
        start, pause = time.monotonic(), 1e-5
        while not everybody.is_completed() and time.monotonic() - start < _SAY_AFTER_SECONDS:
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        if not everybody.is_completed():
            warnings.warn(f"rank {rank} waits in {call}: {self._absent(keys)}; {instead}", UserWarning, stacklevel=3)
        try:
            everybody.wait()
        except RuntimeError as error:
            raise CheckpointError(
                f"rank {rank}: {call} failed: {self._absent(keys)} before the process group's timeout; {instead}"
            ) from error
        # Everybody has left the call before this one.
        self._store.delete_key(f"{self._number}/{call}/{number - 1}/{rank}")

    def _absent(self, keys: Sequence[str]) -> str:
        absent = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
        if not absent:
            return "a rank ended"
        return f"rank {absent[0]} has not come" if len(absent) == 1 else f"ranks {', '.join(absent)} have not come"
