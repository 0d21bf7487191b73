"""Tensor-train tables some of whose rows are held dense for a while, and given back to the cores."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import torch
import torch.distributed as dist

from flexshard._internal import HostCopy, check_int, deprecated_attribute, host_waits_for
from flexshard.embeddings.tensor_train.core_optimizer import in_full
from flexshard.embeddings.tensor_train.distinct import NO_ID, DistinctIds, marked, prefix_counts, without_row
from flexshard.embeddings.tensor_train.folding import (
    MOST_ROWS,
    Fit,
    Folded,
    Frequencies,
    SeenIds,
    fit_rows,
    most_rows,
    relative_error,
)
from flexshard.embeddings.tensor_train.hot_rows import HotRows
from flexshard.embeddings.tensor_train.table import TTTable
from flexshard.errors import TableError
from flexshard.profiling import AccessProfile

__all__ = ["PinnableTable"]


class PinnableTable(TTTable):
    """Cores, and up to ``hot_rows`` rows that are pinned."""

    hot: HotRows | None

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        hot_rows: int = 0,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        **how: Any,
    ) -> None:
        """Make a table of E rows and dimension D.

        Args:
            num_embeddings, embedding_dim: E and D.
            hot_rows: most rows that are pinned, see :meth:`pin_rows`.
            max_norm, norm_type, scale_grad_by_freq, sparse: as torch's embeddings have them, at their defaults alone:
                rows are products of cores, which cannot be cut to a norm, and have gradients of their own.
            how: tt_ranks, cores, row_factors, dim_factors, std, optimizer, learning_rate, eps, padding_idx, device,
                dtype, backend and more, as for :class:`TTTable`.

        Raises:
            TableError: as there, or what a tensor train cannot do.
        """
        for name, given, usual in (
            ("max_norm", max_norm, None),
            ("norm_type", norm_type, 2.0),
            ("scale_grad_by_freq", scale_grad_by_freq, False),
            ("sparse", sparse, False),
        ):
            if given != usual:
                raise TableError(f"{name}={given!r} is not for tensor trains, whose rows are products of cores")
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

        Rows that are pinned already stay as they are; those that are and are not named are folded back, however well.

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
        how: dict[str, Any] = {"profile": profile, "steps": steps, "seed": seed}
        folded = self.unpin_rows(leaving, tolerance=math.inf, **how) if leaving.numel() else None
        self.hot.fill(distinct, self.rows(distinct))
        return folded

    @torch.no_grad()
    def unpin_rows(
        self,
        ids: torch.Tensor | None = None,
        *,
        profile: AccessProfile | None = None,
        tolerance: float = 0.2,
        steps: int = 100,
        seed: int = 0,
    ) -> Folded:
        """Give pinned rows back to the cores: least squares over them and over others, which are to stay as they are,
        each row weighted by how often it is read.

        A tensor train cannot hold any rows it is given. Rows whose errors weigh most stay pinned where the others are
        not held within the tolerance otherwise; what is returned says how many, and how near the rest came.

        Args:
            ids: of pinned rows; all of them by default.
            profile: how often rows are read; by default a sample of the ids that the table has been trained on since it
                was made or loaded, which says something only if training reads rows as often as those who use them.
            tolerance: greatest relative error, weighted, of the rows that are given back, and of these and the others
                together. ``math.inf`` gives all back, whatever becomes of them.
            steps: most of L-BFGS, on a copy of the cores in float32; of each of about eight fits at most.
            seed: of the rarely read rows that are to stay too, four times as many as are unpinned (more where nothing
                says how often rows are read), and of as many that the fit is not told of, by which it is judged.

        Raises:
            TableError: a row that is not pinned, a profile of a larger table, or a tolerance below 0.
        """
        hot = self.hot
        if hot is None:
            raise TableError("rows to unpin must be pinned; see pin_rows()")
        if not tolerance >= 0:
            raise TableError(f"a tolerance is a relative error of at least 0, or math.inf, found {tolerance!r}")
        given = hot.pinned if ids is None else self._distinct(ids).ids
        if not bool(torch.isin(given, hot.pinned).all()):
            raise TableError("rows to unpin must be pinned; see pin_rows()")
        self._check_alike(given)
        self._share()  # ranks have seen ids of their own
        wanted = in_full(self.rows(given))
        if not bool(wanted.isfinite().all()):
            raise TableError("a row to unpin has a number that is not finite")
        known = Frequencies.of(profile, self.seen, self.num_embeddings, given.device)
        if not given.numel():
            return Folded(0.0, 0.0, 0.0, known.source)
        generator = torch.Generator().manual_seed(seed)
        number = 4 * given.numel()
        if not known.ids.numel():  # as many as leave the cores no room to be anything elsewhere
            cores = sum(core.numel() for core in self.cores.parameters())
            number = max(number, min(-(-2 * cores // self.embedding_dim), MOST_ROWS))
        drawn = torch.randint(self.num_embeddings, (2, number), generator=generator).to(given.device)
        others = torch.unique(torch.cat([known.ids, drawn[0]]))
        others = others[~torch.isin(others, hot.pinned)]
        # What the fit is not told of says what becomes of the rows that it is not told of.
        tested = torch.unique(drawn[1])
        tested = tested[~torch.isin(tested, torch.cat([hot.pinned, others]))]
        kept, known_of_tested = (in_full(self._rows(part)) for part in (others, tested))
        weights = [known.of_rows(part) for part in (given, others, tested)]
        if not known.ids.numel():  # each stands for as many as nobody looks at
            weights[2] *= (self.num_embeddings - hot.pinned.numel() - others.numel()) / max(tested.numel(), 1)
        staying = torch.cat([others, tested]), torch.cat([kept, known_of_tested]), torch.cat(weights[1:])
        trial = copy.deepcopy(self).to(wanted.dtype)
        trial.core_optimizer, trial.hot = None, None
        trial.cores.requires_grad_(True)
        start = [core.detach().clone() for core in trial.cores.parameters()]

        def fit(going: torch.Tensor) -> Fit:
            for core, first in zip(trial.cores.parameters(), start, strict=True):
                core.copy_(first)
            both, order = torch.sort(torch.cat([given[going], others]))
            rows = torch.cat([wanted[going], kept])[order]
            weight = torch.cat([weights[0][going], weights[1]])[order]
            fit_rows(trial.cores.parameters(), trial._rows, both, rows, weight, steps)
            squares = weights[0][going] * ((trial._rows(given[going]).float() - wanted[going].float()) ** 2).sum(1)
            back = given[going], wanted[going], weights[0][going]
            everything = (torch.cat(pair) for pair in zip(back, staying, strict=True))
            error = max(relative_error(trial._rows, *back), relative_error(trial._rows, *everything))
            return Fit([core.detach().clone() for core in trial.cores.parameters()], squares, error)

        found = most_rows(fit, given.numel(), tolerance, given.device)
        going = torch.zeros(given.numel(), dtype=torch.bool, device=given.device) if found is None else found[0]
        going = self._of_first_rank(going)  # fits may differ by rounding
        measured = given[going], wanted[going], weights[0][going]
        before = relative_error(self._rows, *measured)
        for core, fitted in zip(self.cores, [] if found is None else found[1].cores, strict=found is not None):
            core.copy_(fitted)
        after = relative_error(self._rows, *measured)
        moved = relative_error(self._rows, *staying)
        hot.drop(given[going])
        self._share()
        pinned = int((~going).sum())
        if pinned:
            warnings.warn(
                f"{pinned:,} of {given.numel():,} rows stay pinned: the cores cannot hold them within tolerance="
                f"{tolerance:g}; larger tt_ranks may, and tolerance=math.inf gives them back whatever becomes of them",
                stacklevel=2,
            )
        return Folded(before, after, moved, known.source, pinned)

    def _of_first_rank(self, chosen: torch.Tensor) -> torch.Tensor:
        """The first rank's choice, of those that average gradients."""
        optimizer = self.core_optimizer
        if optimizer is None or not optimizer.is_distributed:
            return chosen
        marks = chosen.to(torch.uint8)
        dist.broadcast(
            marks, dist.get_global_rank(optimizer.process_group or dist.group.WORLD, 0), optimizer.process_group
        )
        return marks.bool()

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
        if self.hot is None:
            return super()._lookup(ids)
        found = self._distinct(ids, counted=False)
        if is_noted and self.seen is not None and self.training and torch.is_grad_enabled():
            self.seen.add(ids)
        pinned, slot = self.hot.find(found.ids)
        if found.filled:
            rows, place = self._beside_pinned(self.hot, found, pinned & (found.ids != NO_ID), slot)
            return self._checked(rows), place[found.inverse], found.padding
        order = torch.argsort(pinned.to(torch.int8), stable=True)  # those of the cores first
        now = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
        others, padding, prefixes = self._without_pinned(found, pinned, order, now)
        rows = torch.cat([self._rows(found.ids[order[:others]], prefixes), self.hot.take(slot[order[others:]])])
        return without_row(self._checked(rows), padding), now[found.inverse], padding

    def _beside_pinned(
        self, hot: HotRows, found: DistinctIds, pinned: torch.Tensor, slot: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of ids that are not pinned and all that are, and the place of each id among these; without a wait."""
        own, order = torch.sort(torch.where(pinned, NO_ID, found.ids), stable=True)  # a place for padding stays last
        place = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
        read = marked(torch.where(pinned, slot, hot.capacity), hot.capacity)
        rows = torch.cat([self._rows(own, found.prefixes, filled=True), hot.take_all(read)])
        return rows, torch.where(pinned, own.numel() + slot, place)

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
