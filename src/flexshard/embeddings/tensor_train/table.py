"""What tensor-train tables of all kinds share: cores, lookups of distinct ids, pinned rows, checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from flexshard._internal import (
    HostCopy,
    check_int,
    deprecated_attribute,
    host_waits_for,
    renamed_parameters,
    to_device,
)
from flexshard.embeddings.tensor_train.core_optimizer import CoreOptimizer, at_least_0
from flexshard.embeddings.tensor_train.decomposition import decompose
from flexshard.embeddings.tensor_train.distinct import DistinctIds, prefix_counts
from flexshard.embeddings.tensor_train.folding import Folded, Frequencies, SeenIds, fit_rows, relative_error
from flexshard.embeddings.tensor_train.hot_rows import HotRows
from flexshard.embeddings.tensor_train.rows_function import BACKENDS, ProductBuffer, RowsContext, TTRows
from flexshard.errors import DataError, TableError
from flexshard.profiling import AccessProfile
from flexshard.tables import TTShape

__all__ = ["TTTable"]

_CHUNK = 1 << 16


@renamed_parameters(rows="row_factors", dims="dim_factors", ranks="tt_ranks")
class TTTable(nn.Module):
    """Cores, and rows of distinct ids."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        tt_ranks: int | Sequence[int] = 32,
        cores: int = 3,
        row_factors: Sequence[int] | None = None,
        dim_factors: Sequence[int] | None = None,
        std: float | None = None,
        optimizer: str | None = None,
        learning_rate: float = 0.01,
        eps: float = 1e-8,
        padding_idx: int | None = None,
        hot_rows: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        backend: str | None = None,
        validate: bool = True,
    ) -> None:
        """Make a table of E rows and dimension D.

        Args:
            num_embeddings, embedding_dim: E and D.
            tt_ranks: one for all (cut to what is possible), or r_1 to r_{d-1}.
            cores: d, 2 to 4.
            row_factors, dim_factors: of E and D; chosen where not given. The product of ``row_factors`` may exceed E.
            std: standard deviation of the table to begin with; see :meth:`reset_parameters`.
            optimizer: None for ``.grad`` and any torch optimizer; "sgd", "adagrad" or "rowwise_adagrad" (a state per
                slice of a core) to be updated within the backward pass.
            learning_rate, eps: of that.
            padding_idx: row of zeros that no gradient flows to.
            hot_rows: most rows that are pinned, see :meth:`pin_rows`.
            device, dtype: of the cores; float32 or bfloat16.
            backend: "numba", "torch" or "triton"; by default the fastest that is installed and fits the device.
            validate: whether offsets of bags are checked, for which the host waits once for a device; ids always are.

        Raises:
            TableError: factors that do not cover the table, ranks above the possible, or other arguments out of range.
        """
        super().__init__()
        factors = {"row_factors": row_factors, "dim_factors": dim_factors}
        self.shape = TTShape.choose(num_embeddings, embedding_dim, tt_ranks, cores=cores, **factors)
        self.num_embeddings, self.embedding_dim = self.shape.num_embeddings, self.shape.embedding_dim
        self.core_optimizer = None if optimizer is None else CoreOptimizer(optimizer, learning_rate, eps)
        self._learning_rate, self._eps = at_least_0(learning_rate, "learning_rate"), at_least_0(eps, "eps")
        if backend not in (None, *BACKENDS):
            raise TableError(f"backend is one of {', '.join(BACKENDS)} or None, found {backend!r}")
        self.backend, self.validate, self._products = backend, bool(validate), ProductBuffer()
        if dtype not in (torch.float32, torch.bfloat16):
            raise TableError(f"cores are float32 or bfloat16, found {dtype}")
        if device is not None and torch.device(device).type == "meta":
            raise TableError("cores are made where their numbers are; device 'meta' has none")
        if padding_idx is not None:
            within = isinstance(padding_idx, int) and -num_embeddings <= padding_idx < num_embeddings
            if not within or isinstance(padding_idx, bool):
                raise TableError(f"padding_idx must be within the {num_embeddings:,} rows, found {padding_idx}")
            padding_idx %= num_embeddings
        self.padding_idx = padding_idx
        bounds = self.shape.bounds
        self.cores = nn.ParameterList(
            nn.Parameter(torch.empty(p, bounds[k], q, bounds[k + 1], device=device, dtype=dtype))
            for k, (p, q) in enumerate(zip(self.shape.row_factors, self.shape.dim_factors, strict=True))
        )
        if self.core_optimizer is not None and self.core_optimizer.has_state:
            for k, core in enumerate(self.cores):
                self.register_buffer(f"sum_{k}", self.core_optimizer.new_state(core.shape, device))
        self.hot: HotRows | None = None
        if check_int(hot_rows, "hot_rows", TableError, least=0):
            size = (min(hot_rows, self.num_embeddings), embedding_dim)
            self.hot = HotRows(size, self.core_optimizer, dtype=dtype, device=device)
        self.seen = None if self.hot is None else SeenIds(device)
        self.reset_parameters(std)

    @property
    def optimizer(self) -> str | None:
        """Name of the fused optimizer, if there is one."""
        return None if self.core_optimizer is None else self.core_optimizer.name

    @property
    def learning_rate(self) -> float:
        """Of the fused optimizer; may be set between steps."""
        return self._learning_rate if self.core_optimizer is None else self.core_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._learning_rate = at_least_0(value, "learning_rate")
        if self.core_optimizer is not None:
            self.core_optimizer.learning_rate = self._learning_rate

    @property
    def eps(self) -> float:
        """Of the fused optimizer; may be set between steps."""
        return self._eps if self.core_optimizer is None else self.core_optimizer.eps

    @eps.setter
    def eps(self, value: float) -> None:
        self._eps = at_least_0(value, "eps")
        if self.core_optimizer is not None:
            self.core_optimizer.eps = self._eps

    def reset_parameters(self, std: float | None = None) -> None:
        """Gaussian cores whose product has the standard deviation ``std``: ``(std² / ΠR)^(1/2d)`` each.

        By default 1/sqrt(3E), as DLRM's uniform initialisation has it; with fused SGD 0.1, since with less the
        gradients of a product of near-zero cores vanish.
        """
        if std is None:
            std = 0.1 if self.optimizer == "sgd" else (3.0 * self.num_embeddings) ** -0.5
        std = at_least_0(std, "std")
        ranks = 1.0
        for rank in self.shape.tt_ranks:
            ranks *= rank
        each = (std**2 / ranks) ** (1 / (2 * self.shape.cores))
        with torch.no_grad():
            for core in self.cores:
                core.normal_(0.0, each)
        self._forget()

    def _forget(self) -> None:
        """Start the optimizer's state anew."""
        for name, state in self.named_buffers(recurse=False):
            if name.startswith("sum_"):
                state.zero_()
        if self.hot is not None:
            self.hot.clear()

    def decompose_(self, weight: torch.Tensor) -> float:
        """Take over a dense table by TT-SVD; the relative error of its rows then (Frobenius).

        Raises:
            TableError: a table of another shape, or with numbers that are not finite.
        """
        cores, _ = decompose(weight, self.shape)
        self._forget()
        wrong = total = 0.0
        with torch.no_grad():
            for core, values in zip(self.cores, cores, strict=True):
                core.copy_(values)
            for start in range(0, self.num_embeddings, _CHUNK):
                part = weight[start : start + _CHUNK].detach().double()
                rows = self._rows(torch.arange(start, start + part.shape[0], device=self.cores[0].device))
                wrong += float(((rows.double() - part.to(rows.device)) ** 2).sum())
                total += float((part**2).sum())
        return (wrong / total) ** 0.5 if total else 0.0

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of any ids; shape (*ids.shape, D).

        Raises:
            DataError: an id outside the table.
        """
        rows, inverse, _ = self._lookup(ids)
        return rows[inverse]

    @torch.no_grad()
    def to_dense(self) -> torch.Tensor:
        """The whole table; shape (E, D)."""
        return self.rows(torch.arange(self.num_embeddings, device=self.cores[0].device))

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
        wanted = self.rows(given).float()
        if not bool(wanted.isfinite().all()):
            raise TableError("a row to unpin has a number that is not finite")
        known = Frequencies.of(profile, self.seen, self.num_embeddings, given.device)
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(self.num_embeddings, (4 * given.numel(),), generator=generator)
        others = torch.unique(torch.cat([known.ids, drawn.to(given.device)]))
        others = others[~torch.isin(others, hot.pinned)]
        kept = self._rows(others).float()
        weights = [known.of_rows(part) for part in (given, others)]
        trial = copy.deepcopy(self).float()
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
        return Folded(before, after, moved, known.source)

    hold = deprecated_attribute("hold", "pin_rows")
    fold = deprecated_attribute("fold", "unpin_rows")

    def _lookup(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int | None]:
        """Rows of distinct ids, the index of each id among them, and that of the padding row if it is there."""
        found = self._distinct(ids)
        if self.seen is not None and self.training and torch.is_grad_enabled():
            self.seen.add(ids)
        if self.hot is None:
            return _without(self._rows(found.ids, found.prefixes), found.padding), found.inverse, found.padding
        pinned, slot = self.hot.find(found.ids)
        order = torch.argsort(pinned.to(torch.int8), stable=True)  # those of the cores first
        now = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
        others, padding, prefixes = self._without_pinned(found, pinned, order, now)
        rows = torch.cat([self._rows(found.ids[order[:others]], prefixes), self.hot.take(slot[order[others:]])])
        return _without(rows, padding), now[found.inverse], padding

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

    def _distinct(self, ids: torch.Tensor) -> DistinctIds:
        if not isinstance(ids, torch.Tensor):
            raise DataError(f"ids are a tensor, found {type(ids).__name__}")
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise DataError(f"ids are whole numbers, found {ids.dtype}")
        found = DistinctIds.of(ids.long(), self.shape, self.padding_idx)
        if found.least < 0 or found.most >= self.num_embeddings:
            wrong = found.least if found.least < 0 else found.most
            raise DataError(f"id {wrong} is outside the table's rows, 0 to {self.num_embeddings - 1}")
        return found

    def _rows(self, distinct: torch.Tensor, prefixes: tuple[int, ...] | None = None) -> torch.Tensor:
        trained = torch.is_grad_enabled() and any(core.requires_grad for core in self.cores)
        states, optimizer = self._states(), self.core_optimizer
        context = RowsContext(
            self.shape, list(self.cores), states, optimizer, self._products, self.backend, trained, prefixes
        )
        rows: torch.Tensor = TTRows.apply(distinct, context, *self.cores)
        return rows

    def _states(self) -> list[torch.Tensor]:
        """The fused optimizer's state of each core, in float32 whatever the model was cast to."""
        if self.core_optimizer is None or not self.core_optimizer.has_state:
            return []
        for k in range(self.shape.cores):
            state = getattr(self, f"sum_{k}")
            if state.dtype != torch.float32:
                setattr(self, f"sum_{k}", state.float())
        return [getattr(self, f"sum_{k}") for k in range(self.shape.cores)]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        given_shapes: list[tuple[int, ...]] = []
        while f"{prefix}cores.{len(given_shapes)}" in state_dict:
            given_shapes.append(tuple(state_dict[f"{prefix}cores.{len(given_shapes)}"].shape))
        shapes = [tuple(core.shape) for core in self.cores]
        if given_shapes and given_shapes != shapes:
            raise TableError(
                f"{prefix or 'the table'}: a checkpoint with cores of shape {given_shapes} does not load into cores of"
                f" shape {shapes}; make the table with the same factors and TT ranks"
            )
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        fused = "" if self.optimizer is None else f", fused {self.optimizer}"
        smaller = f"{self.shape.compression:.0f} times smaller"
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.shape}, {smaller}{fused}"


def _without(rows: torch.Tensor, index: int | None) -> torch.Tensor:
    """Rows with zeros at one index, if any."""
    return rows if index is None else rows.index_fill(0, to_device(np.array([index]), rows.device), 0.0)
