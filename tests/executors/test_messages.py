"""All-to-alls of messages beside torch's own."""

from __future__ import annotations

import gc

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("torchrec")
import torch
import torch.distributed as dist

from flexshard._internal import all_to_all, messages
from tests.executors import ranks

WORLD = 4


def splits_of(seed: int, rank: int) -> tuple[list[int], list[int]]:
    """Received and sent by a rank; some of nothing, some rows for itself."""
    sizes = np.random.default_rng(seed).integers(0, 5, (WORLD, WORLD)) * np.random.default_rng(seed + 1).integers(
        0, 2, (WORLD, WORLD)
    )
    return sizes[:, rank].tolist(), sizes[rank].tolist()


def exchanged(rank: int, ours: bool) -> list[npt.NDArray[np.generic]]:
    """Several under way at once, among all ranks and among two; some that nobody waits for."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pending, found = [], []

    def exchange(sent: torch.Tensor, back: list[int], out: list[int], group: dist.ProcessGroup | None = None) -> None:
        found.append(torch.full((sum(back), *sent.shape[1:]), 7, dtype=sent.dtype))
        if ours:
            pending.append(all_to_all(found[-1], sent, back, out, group))
            all_to_all(torch.empty_like(found[-1]), sent, back, out, group)
        else:
            dist.all_to_all_single(found[-1], sent, back, out, group=group)

    for seed, dtype in enumerate((torch.float32, torch.int64, torch.float16, torch.uint8, torch.float64)):
        back, out = splits_of(seed, rank)
        exchange((torch.arange(sum(out) * 3).reshape(-1, 3) % 50 + 50 * rank).to(dtype), back, out)
    uneven = [[3, 1], [2, 5]]
    back, out = [row[rank % 2] for row in uneven], uneven[rank % 2]
    exchange(torch.arange(float(sum(out))) + 10 * rank, back, out, pairs[rank // 2])
    gc.collect()
    for each in reversed(pending):
        each.wait()
        each.wait()  # does nothing
    # Those that nobody waited for went with the next; but for the last of all ranks.
    assert not ours or len(messages._of_group[dist.group.WORLD].under_way) == 1
    even = torch.empty(WORLD)
    all_to_all(even, torch.arange(float(WORLD)) + rank).wait()
    dist.barrier()
    return [one.numpy() for one in (*found, even)]


def test_they_are_those_of_torch() -> None:
    ours, theirs = (ranks.run(2, 2, exchanged, mine) for mine in (True, False))
    for mine, others in zip(ours, theirs, strict=True):
        assert len(mine) == len(others) == 7
        for one, other in zip(mine, others, strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)


def refused(rank: int) -> list[str]:
    rows, found = torch.zeros(4), []
    for back, out in (([1, 2], [2, 2]), ([4], [2, 2]), ([3, 1], [1, 3]) if rank == 0 else ([1, 3], [3, 1])):
        with pytest.raises(RuntimeError) as error:
            all_to_all(torch.empty(4), rows, back, out)
        found.append(str(error.value))
    dist.barrier()
    return found


def test_splits_that_do_not_fit_are_refused() -> None:
    for found in ranks.run(1, 2, refused):
        assert "2 splits of 3 entries, for 2 ranks and 4" in found[0]
        assert "1 splits of 4 entries" in found[1]
        assert "a rank sends itself" in found[2]
