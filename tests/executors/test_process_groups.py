"""Groups of levels are made once for each process group, and go with it."""

from __future__ import annotations

import gc
import weakref

import pytest

pytest.importorskip("torchrec")

from tests.executors import ranks


def made_and_gone(rank: int) -> tuple[bool, bool, bool]:
    import torch.distributed as dist

    from flexshard._internal import level_groups

    del rank
    parent = dist.new_group([0, 1])
    levels = level_groups([1, 2], parent)
    shared = level_groups([2], parent)[2] is levels[2]
    kept = weakref.ref(levels[2])
    del levels
    gc.collect()
    lives = kept() is not None
    dist.destroy_process_group(parent)
    del parent
    gc.collect()
    return shared, lives, kept() is None


def test_groups_live_as_long_as_the_group_that_they_split() -> None:
    assert ranks.run(1, 2, made_and_gone) == [(True, True, True)] * 2


def after_a_group_of_its_own(rank: int, whole: bool) -> str:
    """One rank made a group before, by itself, as torch allows it."""
    import torch
    import torch.distributed as dist

    from flexshard._internal import level_groups
    from flexshard.errors import CommunicationError

    parent = None if whole else dist.new_group([0, 1])
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    if not whole:
        dist.barrier()  # a rank that leaves while others still connect to it fails them
        if rank > 1:
            return ""
    try:
        groups = level_groups([1, 2], parent)
    except CommunicationError as error:
        return str(error)
    sums = []
    for group in (groups[2].inside, groups[1].across):
        one = torch.tensor([float(rank)])
        dist.all_reduce(one, group=group)
        sums.append(f"{one.item():g}")
    return " ".join(sums)


def test_groups_that_some_ranks_made_before_do_not_matter() -> None:
    assert ranks.run(2, 2, after_a_group_of_its_own, True, timeout=20.0) == ["1 6", "1 6", "5 6", "5 6"]


def test_in_a_part_of_the_job_they_are_named() -> None:
    found = ranks.run(2, 2, after_a_group_of_its_own, False, timeout=20.0)
    assert all("rank 1 of the process group has made" in text for text in found[:2])
