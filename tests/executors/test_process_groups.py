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
