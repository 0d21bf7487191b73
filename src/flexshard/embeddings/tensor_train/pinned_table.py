"""Tensor-train tables some of whose rows are held dense for a while, and given back to the cores."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist

from flexshard._internal import HostCopy, check_int, deprecated_attribute, host_waits_for
from flexshard.embeddings.tensor_train.core_optimizer import in_full
from flexshard.embeddings.tensor_train.distinct import DistinctIds, prefix_counts
from flexshard.embeddings.tensor_train.folding import Folded, Frequencies, SeenIds, fit_rows, relative_error
from flexshard.embeddings.tensor_train.hot_rows import HotRows
from flexshard.embeddings.tensor_train.table import TTTable, without_row
from flexshard.errors import TableError
from flexshard.profiling import AccessProfile

__all__ = ["PinnableTable"]


class PinnableTable(TTTable):
    """Cores, and up to ``hot_rows`` rows that are pinned."""

    hot: HotRows | None

    def __init__(self, num_embeddings: int, embedding_dim: int, *, hot_rows: int = 0, **how: Any) -> None:
        """Make a table of E rows and dimension D.

        Args:
            num_embeddings, embedding_dim: E and D.
            hot_rows: most rows that are pinned, see :meth:`pin_rows`.
            how: as for :class:`TTTable`.

        Raises:
            TableError: as there.
        """
        super().__init__(num_embeddings, embedding_dim, **how)
        device, dtype = self.cores[0].device, self.cores[0].dtype
        self.hot = None
        if check_int(hot_rows, "hot_rows", TableError, least=0):
            size = (min(hot_rows, self.num_embeddings), embedding_dim)
            self.hot = HotRows(size, self.core_optimizer, dtype=dtype, device=device)
        self.seen = None if self.hot is None else SeenIds(device)

    def _forget(self) -> None:
        super()._forget()
        hot = self._modules.get("hot")
        if isinstance(hot, HotRows):
            hot.reset()

    @torch.no_grad()
    def pin_rows(
        self, ids: torch.Tensor, *, profile: AccessProfile | None = None, steps: int = 100, seed: int = 0
    ) -> Folded | None:
        """Hold rows dense from now on: they are read and trained there, and nowhere else.

        Rows that are pinned already stay as they are; those that are and are not named are folded back.

        Args:
            ids: of the rows, such as the hottest of a profile.
            profile, steps, seed: as for :meth:`unpin_rows`.

        Returns:
            how well rows were folded back, if any were.

        Raises:
            DataError: an id outside the table.
            TableError: more rows than ``hot_rows``.
        """
        distinct = self._distinct(ids).ids
        room = 0 if self.hot is None else self.hot.capacity
        if self.hot is None or distinct.numel() > room:
            raise TableError(f"{distinct.numel():,} rows to pin are more than hot_rows={room:,}")
        leaving = self.hot.pinned[~torch.isin(self.hot.pinned, distinct)]
        self._check_alike(distinct)
        folded = self.unpin_rows(leaving, profile=profile, steps=steps, seed=seed) if leaving.numel() else None
        self.hot.fill(distinct, self.rows(distinct))
        return folded

    @torch.no_grad()
    def unpin_rows(
        self,
        ids: torch.Tensor | None = None,
        *,
        profile: AccessProfile | None = None,
        steps: int = 100,
        seed: int = 0,
    ) -> Folded:
        """Give pinned rows back to the cores: least squares over them and over others, which are to stay as they are,
        each row weighted by how often it is read.

        A tensor train cannot hold any rows it is given; what is returned says how near it came.

        Args:
            ids: of pinned rows; all of them by default.
            profile: how often rows are read; by default a sample of the ids that the table has been trained on since it
                was made or loaded.
            steps: most of L-BFGS, on a copy of the cores in float32.
            seed: of the rarely read rows that are to stay too, four times as many as are unpinned.

        Raises:
            TableError: a row that is not pinned, or a profile of a larger table.
        """
        hot = self.hot
        if hot is None:
            raise TableError("rows to unpin must be pinned; see pin_rows()")
        given = hot.pinned if ids is None else self._distinct(ids).ids
        if not bool(torch.isin(given, hot.pinned).all()):
            raise TableError("rows to unpin must be pinned; see pin_rows()")
        self._check_alike(given)
        self._share()  # ranks have seen ids of their own
        wanted = in_full(self.rows(given))
        if not bool(wanted.isfinite().all()):
            raise TableError("a row to unpin has a number that is not finite")
        known = Frequencies.of(profile, self.seen, self.num_embeddings, given.device)
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(self.num_embeddings, (4 * given.numel(),), generator=generator)
        others = torch.unique(torch.cat([known.ids, drawn.to(given.device)]))
        others = others[~torch.isin(others, hot.pinned)]
        kept = in_full(self._rows(others))
        weights = [known.of_rows(part) for part in (given, others)]
        trial = copy.deepcopy(self).to(wanted.dtype)
        trial.core_optimizer, trial.hot = None, None
        trial.cores.requires_grad_(True)
        before = relative_error(trial._rows, given, wanted, weights[0])
        if given.numel():
            both, order = torch.sort(torch.cat([given, others]))
            fit_rows(
                trial.cores.parameters(),
                trial._rows,
                both,
                torch.cat([wanted, kept])[order],
                torch.cat(weights)[order],
                steps,
            )
        for core, fitted in zip(self.cores, trial.cores, strict=True):
            core.copy_(fitted)
        after = relative_error(trial._rows, given, wanted, weights[0])
        moved = relative_error(trial._rows, others, kept, weights[1])
        hot.drop(given)
        self._share()  # whose fits may differ by rounding
        return Folded(before, after, moved, known.source)

    def _check_alike(self, ids: torch.Tensor) -> None:
        """Check that all ranks that average gradients pin or unpin the same rows; raises TableError on all of them."""
        optimizer = self.core_optimizer
        if optimizer is None or not optimizer.is_distributed:
            return
        every: list[list[int]] = [[]] * dist.get_world_size(optimizer.process_group)
        dist.all_gather_object(every, ids.tolist(), optimizer.process_group)
        if any(own != every[0] for own in every):
            raise TableError("ranks pin or unpin different rows of one table; give the same ids on every rank")

    hold = deprecated_attribute("hold", "pin_rows")
    fold = deprecated_attribute("fold", "unpin_rows")

    def _lookup(self, ids: torch.Tensor, *, is_noted: bool = True) -> tuple[torch.Tensor, torch.Tensor, int | None]:
        """Rows of distinct ids, the index of each id among them, and that of the padding row if it is there."""
        found = self._distinct(ids)
        if is_noted and self.seen is not None and self.training and torch.is_grad_enabled():
            self.seen.add(ids)
        if self.hot is None:
            rows = self._checked(self._rows(found.ids, found.prefixes))
            return without_row(rows, found.padding), found.inverse, found.padding
        pinned, slot = self.hot.find(found.ids)
        order = torch.argsort(pinned.to(torch.int8), stable=True)  # those of the cores first
        now = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
        others, padding, prefixes = self._without_pinned(found, pinned, order, now)
        rows = torch.cat([self._rows(found.ids[order[:others]], prefixes), self.hot.take(slot[order[others:]])])
        return without_row(self._checked(rows), padding), now[found.inverse], padding

    def _without_pinned(
        self, found: DistinctIds, pinned: torch.Tensor, order: torch.Tensor, now: torch.Tensor
    ) -> tuple[int, int | None, tuple[int, ...] | None]:
        """How many ids are not pinned, where the padding row is among all in their new order, and how many prefixes of
        each level those that are not pinned have; one wait.
        """
        if not len(found.ids):
            return 0, None, found.prefixes
        first = [(~pinned).sum().view(1), now[:1] if found.padding is None else now[found.padding].view(1)]
        counts = []
        if host_waits_for(pinned.device):
            counts = [prefix_counts(found.ids[order], ~pinned[order], self.shape)]
        others, padding, *prefixes = HostCopy(torch.cat([*first, *counts])).numbers().tolist()
        return others, None if found.padding is None else padding, tuple(prefixes) if counts else None
