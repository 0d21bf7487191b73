"""Process groups of the levels of a cluster: inside each group of g ranks, and across its copies."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from flexshard._internal.clocks import device_of_group
from flexshard._internal.collective_errors import differing_ranks
from flexshard._internal.deprecation import deprecated_attribute, renamed_parameters
from flexshard.errors import CommunicationError

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["LevelGroups", "group_behind", "level_groups"]


@renamed_parameters(position="local_rank")
@dataclass(frozen=True)
class LevelGroups:
    """The two process groups of one level that a rank is in.

    Attributes:
        group_size: g.
        inside: the g consecutive ranks that its rows are split over (all-to-all); None for g = 1.
        across: the U/g ranks that hold the same rows (all-reduce); None for g = U.
        local_rank: of this rank inside: rank mod g.
        copy: which copy this rank holds: rank div g.
    """

    group_size: int
    inside: dist.ProcessGroup | None
    across: dist.ProcessGroup | None
    local_rank: int
    copy: int

    position = deprecated_attribute("position", "local_rank")


# Groups by the group that they split, which they go with.
_made: MutableMapping[dist.ProcessGroup, dict[int, LevelGroups]] = WeakKeyDictionary()


def level_groups(group_sizes: Sequence[int], process_group: dist.ProcessGroup | None = None) -> dict[int, LevelGroups]:
    """Groups of every level, each with the timeout of ``process_group``; every rank must call it alike.

    Args:
        group_sizes: g's, each a divisor of the number of ranks.
        process_group: what they split; the default process group if None.

    Groups are made once and shared for as long as ``process_group`` lives. The two of a level are groups of their own,
    so that their collectives may overlap. Where ``process_group`` has all ranks of the job, each of them makes every
    group, in one order, so that it does not matter which groups some of them made before.

    Raises:
        CommunicationError: ``process_group`` has some ranks of the job alone, which made different numbers of groups
            before: torch would name the new ones differently on each, and they would wait for ever.
    """
    import torch.distributed as dist

    parent = dist.group.WORLD if process_group is None else process_group
    world, rank = dist.get_world_size(parent), dist.get_rank(parent)
    members = dist.get_process_group_ranks(parent)
    everybody = world == dist.get_world_size()
    known = _made.setdefault(parent, {})
    if any(size not in known for size in group_sizes):
        _agree_on_names(parent)

    def make(groups: list[range]) -> dist.ProcessGroup:
        """The one of these groups that this rank is in."""
        mine = None
        for ranks in groups:
            if not everybody and rank not in ranks:
                continue
            made = _new_group([members[r] for r in ranks], parent)
            mine = made if rank in ranks else mine
        assert mine is not None
        return mine

    for size in group_sizes:
        if size not in known:
            inside = [range(first, first + size) for first in range(0, world, size)]
            across = [range(first, world, size) for first in range(size)]
            known[size] = LevelGroups(
                size,
                make(inside) if size > 1 else None,
                make(across) if size < world else None,
                rank % size,
                rank // size,
            )
    return {size: known[size] for size in group_sizes}


_behind: MutableMapping[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def group_behind(process_group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Another group of the same ranks, made once, for what nobody waits for: the first one's collectives do not stand
    behind it. Every rank must call it alike; raises as :func:`level_groups`.
    """
    import torch.distributed as dist

    if process_group not in _behind:
        ranks = dist.get_process_group_ranks(process_group)
        _agree_on_names(process_group)
        _behind[process_group] = _new_group(ranks, process_group)
    return _behind[process_group]


def _new_group(ranks: Sequence[int], parent: dist.ProcessGroup) -> dist.ProcessGroup:
    """Of some ranks of the job, with the timeout of ``parent``; ranks outside of that need not know."""
    import torch.distributed as dist

    everybody = dist.get_world_size(parent) == dist.get_world_size()
    return dist.new_group(list(ranks), timeout=_timeout(parent), use_local_synchronization=not everybody)


def _agree_on_names(parent: dist.ProcessGroup) -> None:
    """Have torch give a group that all of these ranks make one name: it counts those that a rank has made or knows.

    Raises:
        CommunicationError: in a part of the job, whose ranks know different numbers of groups.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    # From torch 2.14 on a group that some ranks make by themselves counts there alone, and names need only be unique.
    made, _ = differing_ranks(distributed_c10d._world.group_count, parent)
    distributed_c10d._world.group_count = max(made)
    if dist.get_world_size(parent) == dist.get_world_size():
        return
    counts, odd = differing_ranks(len(distributed_c10d._world.pg_names), parent)
    if odd:
        raise CommunicationError(
            f"rank {odd[0]} of the process group has made {counts[odd[0]]} process groups so far, rank 0 has made"
            f" {counts[0]}, so that torch cannot name new ones alike; make the same groups on all of these ranks first"
        )


def _timeout(group: dist.ProcessGroup) -> Any:
    """How long collectives of a group wait; new groups would otherwise wait for the library's default."""
    return group._get_backend(device_of_group(group)).options._timeout
