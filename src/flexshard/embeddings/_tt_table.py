"""What tensor-train tables of all kinds share: cores, initialisation, the optimizer's step, hot rows, checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from flexshard._tt_shape import TTShape
from flexshard._values import finite, whole
from flexshard.embeddings._tt_decompose import decompose
from flexshard.embeddings._tt_function import TTRows
from flexshard.embeddings._tt_hot import HotRows
from flexshard.embeddings._tt_rows import Step
from flexshard.errors import DataError, TableError

__all__ = ["Folded", "TTTable"]

_CHUNK = 1 << 16
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")


@dataclass(frozen=True)
class Folded:
    """How well the cores took hot rows over; relative errors (Frobenius).

    Attributes:
        before, after: of the cores' rows to the hot ones, before and after.
        others: how far other rows moved.
    """

    before: float
    after: float
    others: float


class TTTable(nn.Module):
    """Cores, and rows of distinct ids."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        ranks: int | Sequence[int] = 32,
        cores: int = 3,
        rows: Sequence[int] | None = None,
        dims: Sequence[int] | None = None,
        std: float | None = None,
        optimizer: str | None = None,
        learning_rate: float = 0.01,
        eps: float = 1e-8,
        padding_idx: int | None = None,
        hot_rows: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Make a table of E rows and dimension D.

        Args:
            num_embeddings, embedding_dim: E and D.
            ranks: one for all (cut to what is possible), or r_1 to r_{d-1}.
            cores: d, 2 to 4.
            rows, dims: factors of E and D; chosen where not given. The product of ``rows`` may exceed E.
            std: standard deviation of the table to begin with; see :meth:`reset_parameters`.
            optimizer: None for ``.grad`` and any torch optimizer; "sgd", "adagrad" or "rowwise_adagrad" (a state per
                slice of a core) to be updated within the backward pass.
            learning_rate, eps: of that.
            padding_idx: row of zeros that no gradient flows to.
            hot_rows: most rows that are held dense, see :meth:`hold`.
            device, dtype: of the cores; float32 or bfloat16.

        Raises:
            TableError: factors that do not cover the table, ranks above the possible, or other arguments out of range.
        """
        super().__init__()
        self.shape = TTShape.choose(num_embeddings, embedding_dim, ranks, cores=cores, rows=rows, dims=dims)
        self.num_embeddings, self.embedding_dim = self.shape.num_embeddings, self.shape.embedding_dim
        if optimizer is not None and optimizer not in OPTIMIZERS:
            raise TableError(f"optimizer is one of {', '.join(OPTIMIZERS)} or None, found {optimizer!r}")
        if dtype not in (torch.float32, torch.bfloat16):
            raise TableError(f"cores are float32 or bfloat16, found {dtype}")
        self.optimizer = optimizer
        self.learning_rate = _at_least_0(learning_rate, "learning_rate")
        self.eps = _at_least_0(eps, "eps")
        if not self.eps and optimizer in ("adagrad", "rowwise_adagrad"):
            raise TableError("eps must be above 0: numbers without a gradient yet would be divided by 0")
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
            for k, (p, q) in enumerate(zip(self.shape.rows, self.shape.dims, strict=True))
        )
        if optimizer in ("adagrad", "rowwise_adagrad"):
            for k, core in enumerate(self.cores):
                size = core.shape if optimizer == "adagrad" else core.shape[:1]
                self.register_buffer(f"sum_{k}", torch.zeros(size, device=device))
        self._updates = 0  # fused ones, so far
        self.hot: HotRows | None = None
        if whole(hot_rows, "hot_rows", TableError, least=0):
            self.hot = HotRows(min(hot_rows, self.num_embeddings), self, device=device)
        self.reset_parameters(std)

    def reset_parameters(self, std: float | None = None) -> None:
        """Gaussian cores whose product has the standard deviation ``std``: ``(std² / ΠR)^(1/2d)`` each.

        By default 1/sqrt(3E), as DLRM's uniform initialisation has it; with fused SGD 0.1, since with less the
        gradients of a product of near-zero cores vanish.
        """
        if std is None:
            std = 0.1 if self.optimizer == "sgd" else (3.0 * self.num_embeddings) ** -0.5
        std = _at_least_0(std, "std")
        ranks = 1.0
        for rank in self.shape.ranks:
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
        found, _ = decompose(weight, self.shape)
        self._forget()
        wrong = total = 0.0
        with torch.no_grad():
            for core, own in zip(self.cores, found, strict=True):
                core.copy_(own)
            for start in range(0, self.num_embeddings, _CHUNK):
                part = weight[start : start + _CHUNK].detach().double()
                own = self._rows(torch.arange(start, start + part.shape[0], device=self.cores[0].device))
                wrong += float(((own.double() - part.to(own.device)) ** 2).sum())
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
    def hold(self, ids: torch.Tensor, *, steps: int = 100, seed: int = 0) -> Folded | None:
        """Hold rows dense from now on: they are read and trained there, and nowhere else.

        Rows that are held already stay as they are; those that are and are not named are folded back.

        Args:
            ids: of the rows, such as the hottest of a profile.
            steps, seed: as for :meth:`fold`.

        Returns:
            how well rows were folded back, if any were.

        Raises:
            DataError: an id outside the table.
            TableError: more rows than ``hot_rows``.
        """
        distinct, _ = self._distinct(ids)
        room = 0 if self.hot is None else self.hot.capacity
        if self.hot is None or distinct.numel() > room:
            raise TableError(f"{distinct.numel():,} rows to hold are more than hot_rows={room:,}")
        leaving = self.hot.held[~torch.isin(self.hot.held, distinct)]
        folded = self.fold(leaving, steps=steps, seed=seed) if leaving.numel() else None
        self.hot.fill(distinct, self.rows(distinct))
        return folded

    def fold(self, ids: torch.Tensor | None = None, *, steps: int = 100, seed: int = 0) -> Folded:
        """Give hot rows back to the cores: least squares over them and over other rows, which are to stay as they are.

        A tensor train cannot hold any rows it is given; what is returned says how near it came.

        Args:
            ids: of held rows; all of them by default.
            steps: most of L-BFGS, on a copy of the cores in float32.
            seed: of the other rows, four times as many.

        Raises:
            TableError: a row that is not held.
        """
        hot = self.hot
        given = torch.zeros(0, dtype=torch.long) if hot is None else hot.held if ids is None else self._distinct(ids)[0]
        if hot is None or not bool(torch.isin(given, hot.held).all()):
            raise TableError("rows to fold back must be held; see hold()")
        with torch.no_grad():
            wanted = self.rows(given).float()
            if not bool(wanted.isfinite().all()):
                raise TableError("a row to fold back has a number that is not finite")
            generator = torch.Generator().manual_seed(seed)
            drawn = torch.randint(self.num_embeddings, (4 * given.numel(),), generator=generator)
            others = torch.unique(drawn.to(given.device))
            others = others[~torch.isin(others, hot.held)]
            ends = self._rows(others).float()
        trial = copy.deepcopy(self).float()
        trial.optimizer, trial.hot = None, None
        trial.cores.requires_grad_(True)
        found = [_apart(trial, given, wanted)]
        scales = [max(float(rows.norm()) ** 2, 1e-30) for rows in (wanted, ends)]
        optimizer = torch.optim.LBFGS(trial.cores.parameters(), max_iter=steps, line_search_fn="strong_wolfe")

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = ((trial._rows(given) - wanted) ** 2).sum() / scales[0]
            loss = loss + ((trial._rows(others) - ends) ** 2).sum() / scales[1]
            loss.backward()
            return loss

        if given.numel():
            with torch.enable_grad():
                optimizer.step(closure)
        with torch.no_grad():
            for core, own in zip(self.cores, trial.cores, strict=True):
                core.copy_(own)
            found += [_apart(trial, given, wanted), _apart(trial, others, ends)]
            hot.drop(given)
        return Folded(*found)

    def _lookup(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int | None]:
        """Rows of distinct ids, the place of each id among them, and that of the padding row if it is there."""
        distinct, inverse = self._distinct(ids)
        padding = self._padding(distinct)
        if self.hot is None:
            return _without(self._rows(distinct), padding), inverse, padding
        found, place = self.hot.find(distinct)
        order = torch.argsort(found.to(torch.int8), stable=True)  # those of the cores first
        now = torch.empty_like(order)
        now[order] = torch.arange(order.numel(), device=order.device)
        rows = torch.cat([self._rows(distinct[~found]), self.hot.take(place[found], self)])
        padding = None if padding is None else int(now[padding])
        return _without(rows, padding), now[inverse], padding

    def _distinct(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not isinstance(ids, torch.Tensor):
            raise DataError(f"ids are a tensor, found {type(ids).__name__}")
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise DataError(f"ids are whole numbers, found {ids.dtype}")
        distinct, inverse = torch.unique(ids.long(), return_inverse=True)
        if distinct.numel():
            least, most = int(distinct[0]), int(distinct[-1])
            if least < 0 or most >= self.num_embeddings:
                wrong = least if least < 0 else most
                raise DataError(f"id {wrong} is outside the table's rows, 0 to {self.num_embeddings - 1}")
        return distinct, inverse

    def _padding(self, distinct: torch.Tensor) -> int | None:
        """Place of the padding row among distinct ids, if it is there."""
        if self.padding_idx is None:
            return None
        place = int(torch.searchsorted(distinct, self.padding_idx))
        return place if place < distinct.numel() and int(distinct[place]) == self.padding_idx else None

    def _rows(self, distinct: torch.Tensor) -> torch.Tensor:
        trained = torch.is_grad_enabled() and any(core.requires_grad for core in self.cores)
        return TTRows.apply(distinct, self, trained, *self.cores)

    def _check_alone(self) -> None:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise TableError(
                f"optimizer {self.optimizer!r} updates the cores within backward, where ranks have their own gradients;"
                " in a job of several ranks use optimizer=None and an optimizer after them"
            )

    def _sums(self) -> list[torch.Tensor]:
        """The optimizer's state of each core, in float32 whatever the model was cast to."""
        if self.optimizer in (None, "sgd"):
            return []
        for k in range(self.shape.cores):
            setattr(self, f"sum_{k}", getattr(self, f"sum_{k}").float())
        return [getattr(self, f"sum_{k}") for k in range(self.shape.cores)]

    def _update(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """The optimizer's step of the cores that have a gradient here."""
        sums = self._sums()
        for k, (core, gradient) in enumerate(zip(self.cores, gradients, strict=True)):
            if gradient is not None and core.requires_grad:
                self._step(core, gradient, sums[k] if sums else None)

    def _slice_step(self) -> Step:
        """The optimizer's step of one slice of a core, which is p_k times as small."""
        sums = self._sums()

        def step(k: int, digit: int, gradient: torch.Tensor) -> None:
            if self.cores[k].requires_grad:
                one = slice(digit, digit + 1)
                self._step(
                    self.cores[k][one], gradient.view(1, *self.cores[k].shape[1:]), sums[k][one] if sums else None
                )

        return step

    @torch.no_grad()
    def _step(self, core: torch.Tensor, gradient: torch.Tensor, state: torch.Tensor | None) -> None:
        """The optimizer's step of slices of a core, and of their state; shape (n, r, q, r') each, state (n,) by row."""
        core = core.detach()
        if state is None:
            core.add_(gradient.to(core.dtype), alpha=-self.learning_rate)
            return
        core.sub_(self._adagrad(gradient, state).to(core.dtype))

    def _adagrad(self, gradient: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """What Adagrad takes off slices or rows; their squares are added to ``state``, of the gradient's shape or, row
        by row, with one number each.
        """
        squares = gradient**2
        if self.optimizer == "rowwise_adagrad":
            state += squares.flatten(1).mean(1).view(state.shape)
            state = state.view(-1, *[1] * (gradient.dim() - 1))
        else:
            state += squares
        return self.learning_rate * gradient / (state.sqrt() + self.eps)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        found: list[tuple[int, ...]] = []
        while f"{prefix}cores.{len(found)}" in state_dict:
            found.append(tuple(state_dict[f"{prefix}cores.{len(found)}"].shape))
        own = [tuple(core.shape) for core in self.cores]
        if found and found != own:
            raise TableError(
                f"{prefix or 'the table'}: a checkpoint with cores of shape {found} does not load into cores of shape"
                f" {own}; make the table with the same factors and ranks"
            )
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        fused = "" if self.optimizer is None else f", fused {self.optimizer}"
        smaller = f"{self.shape.compression:.0f} times smaller"
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.shape}, {smaller}{fused}"


def _without(rows: torch.Tensor, place: int | None) -> torch.Tensor:
    """Rows with zeros at one place, if any."""
    return rows if place is None else rows.index_fill(0, torch.tensor([place], device=rows.device), 0.0)


def _at_least_0(value: float, name: str) -> float:
    number = finite(value, name, TableError)
    if number < 0:
        raise TableError(f"{name} must be at least 0, found {value}")
    return number


@torch.no_grad()
def _apart(table: TTTable, ids: torch.Tensor, rows: torch.Tensor) -> float:
    """Relative error of the cores' rows."""
    norm = float(rows.norm())
    return float((table._rows(ids).float() - rows).norm()) / norm if norm else 0.0
