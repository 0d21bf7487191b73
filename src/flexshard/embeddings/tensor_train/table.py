"""What tensor-train tables of all kinds share: cores, lookups of distinct ids, steps, checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import isfinite
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from flexshard._internal import check_int, host_waits_for, renamed_parameters
from flexshard.embeddings.tensor_train.core_optimizer import (
    CoreOptimizer,
    StepCount,
    Unscaled,
    at_least_0,
    checked_scaler,
    full_buffer,
    full_dtype,
)
from flexshard.embeddings.tensor_train.decomposition import LARGE_ERROR, decompose, warn_of_error
from flexshard.embeddings.tensor_train.distinct import DistinctIds, check_dtype, check_ids, without_row
from flexshard.embeddings.tensor_train.rows_function import (
    BACKENDS,
    ProductBuffer,
    RowsContext,
    TTRows,
    chosen_backend,
    rows_of,
)
from flexshard.errors import DataError, TableError
from flexshard.tables import TTShape

__all__ = ["TTTable"]

_CHUNK = 1 << 16


@renamed_parameters(rows="row_factors", dims="dim_factors", ranks="tt_ranks")
class TTTable(nn.Module):
    """Cores, and rows of distinct ids."""

    _reads_padding = True  # as zeros; bags leave it out

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
        learning_rate: float | None = None,
        eps: float | None = None,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        backend: str | None = None,
        validate: bool = True,
        process_group: dist.ProcessGroup | None = None,
        grad_scaler: Any = None,
    ) -> None:
        """Make a table of E rows and dimension D.

        Args:
            num_embeddings, embedding_dim: E and D.
            tt_ranks: one for all (cut to what is possible), or r_1 to r_{d-1}.
            cores: d, 2 to 4.
            row_factors, dim_factors: of E and D; chosen where not given. The product of ``row_factors`` may exceed E.
            std: standard deviation of the table to begin with; see :meth:`reset_parameters`.
            optimizer: None for ``.grad`` and any torch optimizer; "sgd", "adagrad", "rowwise_adagrad" (a state per
                slice of a core) or "adam" (of the slices that a batch reads) to be updated within the backward pass.
            learning_rate, eps: of that; 0.01 and 1e-8 by default.
            padding_idx: row of zeros that no gradient flows to.
            device, dtype: of the cores; float32 or bfloat16, whose products are in float32, or float64. On "meta" they
                have no numbers before ``to_empty`` and :meth:`reset_parameters`.
            backend: "numba", "torch" or "triton"; by default the fastest that is installed and fits the device.
            validate: whether ids and offsets of bags are checked, for which the host waits for a device, and on the
                CPU gradients before a step of the optimizer above. Without, Triton's kernels never let the host wait:
                they make room for as many rows as there are ids, and one outside the table fails on the device, as
                ``nn.Embedding`` has it; elsewhere ids are checked all the same.
            process_group: ranks over which gradients are averaged before a step of the optimizer above. What averages
                others', DistributedDataParallel say, has to ignore the cores, which ``updated_in_backward`` names.
            grad_scaler: the ``torch.amp.GradScaler`` that scales the loss, if any, for the optimizer above: its factor
                is taken off gradients, and a step with such as are not finite is left out.

        Raises:
            TableError: factors that do not cover the table, ranks above the possible, or other arguments out of range.
        """
        super().__init__()
        factors = {"row_factors": row_factors, "dim_factors": dim_factors}
        self.shape = TTShape.choose(num_embeddings, embedding_dim, tt_ranks, cores=cores, **factors)
        self.num_embeddings, self.embedding_dim = self.shape.num_embeddings, self.shape.embedding_dim
        self.core_optimizer = CoreOptimizer.of(
            optimizer,
            bool(validate),
            learning_rate=learning_rate,
            eps=eps,
            process_group=process_group,
            grad_scaler=grad_scaler,
        )
        if backend not in (None, *BACKENDS):
            raise TableError(f"backend is one of {', '.join(BACKENDS)} or None, found {backend!r}")
        self.backend, self.validate, self._products = backend, bool(validate), ProductBuffer()
        check_dtype(dtype)
        if backend == "triton" and dtype == torch.float64:
            raise TableError("the kernels in Triton compute in float32; cores of float64 take another backend")
        if padding_idx is not None:
            padding_idx = check_int(padding_idx, "padding_idx", TableError, least=-num_embeddings)
            if padding_idx >= num_embeddings:
                raise TableError(f"padding_idx must be within the {num_embeddings:,} rows, found {padding_idx}")
            padding_idx %= num_embeddings
        self.padding_idx = padding_idx
        self.error: float | None = None  # of the last decomposition
        bounds = self.shape.bounds
        self.cores = nn.ParameterList(
            nn.Parameter(torch.empty(p, bounds[k], q, bounds[k + 1], device=device, dtype=dtype))
            for k, (p, q) in enumerate(zip(self.shape.row_factors, self.shape.dim_factors, strict=True))
        )
        if self.core_optimizer is not None:
            for k, core in enumerate(self.cores):
                for name, state in self.core_optimizer.new_states(core.detach()).items():
                    self.register_buffer(f"{_buffer(name)}_{k}", state)
            if self.core_optimizer.rule.counts_steps:
                self.register_buffer("steps", torch.zeros(self.shape.cores, dtype=torch.int64, device=device))
        self._counted, self._is_shared = StepCount(self.shape.cores), False
        self.reset_parameters(std)

    @property
    def optimizer(self) -> str | None:
        """Name of the fused optimizer, if there is one."""
        return None if self.core_optimizer is None else self.core_optimizer.name

    @property
    def learning_rate(self) -> float | None:
        """Of the fused optimizer; may be set between steps."""
        return None if self.core_optimizer is None else self.core_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._own_optimizer("learning_rate").learning_rate = at_least_0(value, "learning_rate")

    @property
    def eps(self) -> float | None:
        """Of the fused optimizer; may be set between steps."""
        return None if self.core_optimizer is None else self.core_optimizer.eps

    @eps.setter
    def eps(self, value: float) -> None:
        optimizer = self._own_optimizer("eps")
        optimizer.eps = optimizer.checked_eps(value)

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
        for states in self._states():
            for state in states.values():
                state.zero_()
        self.error, self._is_shared = None, False
        if hasattr(self, "steps"):
            self.steps.zero_()
        self._counted = StepCount(self.shape.cores)

    @classmethod
    def from_pretrained(cls, embeddings: torch.Tensor, freeze: bool = True, **how: Any) -> Self:
        """A tensor train of a dense table, by TT-SVD.

        Args:
            embeddings: the table; shape (E, D).
            freeze: whether its cores are not trained, as ``nn.Embedding.from_pretrained`` has it.
            how: arguments of the table, ``tt_ranks`` among them; by default ``dtype`` and ``device`` stay.

        Raises:
            TableError: a table of another kind, or with numbers that are not finite, or in the row of ``padding_idx``
                where that would be read: it is zeros here.

        Warns:
            UserWarning: a relative error above 0.5; :attr:`error` has it.
        """
        if not isinstance(embeddings, torch.Tensor) or embeddings.dim() != 2:
            found = tuple(embeddings.shape) if isinstance(embeddings, torch.Tensor) else type(embeddings).__name__
            raise TableError(f"a table to decompose is a tensor of two dimensions, found {found}")
        own = {"dtype": embeddings.dtype} if embeddings.is_floating_point() else {}
        table = cls(*embeddings.shape, **{**own, "device": embeddings.device, **how})
        padding = table.padding_idx
        if cls._reads_padding and padding is not None and bool(embeddings[padding].count_nonzero()):
            what = f"the row of padding_idx {padding} has numbers, and would read as zeros"
            raise TableError(f"{what}; set it to zero before, or leave padding_idx out")
        if table.decompose_(embeddings) > LARGE_ERROR:
            warn_of_error("the table", embeddings, table.shape, table.error or 0.0)
        return table.requires_grad_(not freeze)

    def decompose_(self, weight: torch.Tensor) -> float:
        """Take over a dense table by TT-SVD; the relative error of its rows then (Frobenius), kept as :attr:`error`.

        Raises:
            TableError: a table of another shape, or with numbers that are not finite.
        """
        if self.cores[0].is_meta:
            raise TableError("the table has no numbers yet; to_empty(device=...) makes them")
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
        error = (wrong / total) ** 0.5 if total else 0.0
        if not isfinite(error):
            raise TableError(
                "the table's numbers are too small or too large to decompose; scale them, and the rows after"
            )
        self.error = error
        return error

    @property
    def weight(self) -> torch.Tensor:
        """The whole table, made when it is asked for; shape (E, D). Gradients flow to the cores, unless an optimizer of
        the table's own takes them. Writing to it changes nothing: :meth:`decompose_` takes a table over.
        """
        ids = torch.arange(self.num_embeddings, device=self.cores[0].device)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.core_optimizer is None):
            return self.rows(ids)

    @property
    def nbytes(self) -> int:
        """Bytes that the table holds now: cores, the optimizer's state, pinned rows, and products that it keeps."""
        held = [*self.parameters(), *self.buffers()]
        return sum(tensor.nbytes for tensor in held) + self._products.nbytes

    def train(self, mode: bool = True) -> Self:
        """As ``nn.Module.train``; memory of products is kept from step to step in training alone."""
        self._products.is_kept = mode
        return super().train(mode)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of any ids; shape (*ids.shape, D).

        Raises:
            DataError: an id outside the table.
        """
        rows, inverse, _ = self._lookup(ids, is_noted=False)
        return rows[inverse]

    @torch.no_grad()
    def to_dense(self) -> torch.Tensor:
        """The whole table; shape (E, D)."""
        return self.rows(torch.arange(self.num_embeddings, device=self.cores[0].device))

    def _lookup(self, ids: torch.Tensor, *, is_noted: bool = True) -> tuple[torch.Tensor, torch.Tensor, int | None]:
        """Rows of distinct ids, the index of each id among them, and that of the padding row if it is there."""
        del is_noted
        found = self._distinct(ids, counted=False)
        rows = self._checked(self._rows(found.ids, found.prefixes, filled=found.filled))
        return rows if found.filled else without_row(rows, found.padding), found.inverse, found.padding

    def _checked(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of a lookup, whose gradient the table's own optimizer can take a step by."""
        if self.core_optimizer is None or not rows.requires_grad:
            return rows
        self.core_optimizer.check_lookup()
        checked: torch.Tensor = Unscaled.apply(rows, self.core_optimizer)
        return checked

    def _distinct(self, ids: torch.Tensor, *, counted: bool = True) -> DistinctIds:
        check_ids(ids)
        check_dtype(self.cores[0].dtype)  # whatever the model was cast to since
        if self.cores[0].is_meta:
            raise TableError("the table has no numbers yet; to_empty(device=...) and reset_parameters() make them")
        if not self._is_shared and torch.is_grad_enabled():
            self._share()
        may_be_filled = not (counted or self.validate) and ids.numel() and host_waits_for(ids.device)
        if may_be_filled and chosen_backend(self.backend, self.shape, self.cores[0]) == "triton":
            return DistinctIds.at_most(ids.long(), self.shape, self.padding_idx)
        found = DistinctIds.of(ids.long(), self.shape, self.padding_idx)
        if found.least < 0 or found.most >= self.num_embeddings:
            wrong = found.least if found.least < 0 else found.most
            raise DataError(f"id {wrong} is outside the table's rows, 0 to {self.num_embeddings - 1}")
        return found

    def _rows(
        self, distinct: torch.Tensor, prefixes: tuple[int, ...] | None = None, *, filled: bool = False
    ) -> torch.Tensor:
        trained = torch.is_grad_enabled() and any(core.requires_grad for core in self.cores)
        context = RowsContext(
            self.shape,
            list(self.cores),
            self._states() if trained else (),
            self.core_optimizer,
            partial(self._counted.add, self),
            self._products,
            self.backend,
            trained,
            prefixes,
            filled,
        )
        if not trained:
            return rows_of(distinct, context)
        rows: torch.Tensor = TTRows.apply(distinct, context, *self.cores)
        return rows

    def _states(self) -> list[dict[str, torch.Tensor]]:
        """The fused optimizer's states of each core, in float32 whatever the model was cast to; in float64 of such."""
        if self.core_optimizer is None:
            return []
        kind, states = full_dtype(self.cores[0].dtype), self.core_optimizer.rule.states
        return [
            {state.name: full_buffer(self, f"{_buffer(state.name)}_{k}", kind) for state in states}
            for k in range(self.shape.cores)
        ]

    @property
    def grad_scaler(self) -> Any:
        """That scales the loss, for the table's own optimizer; may be set between steps."""
        return None if self.core_optimizer is None else self.core_optimizer.grad_scaler

    @grad_scaler.setter
    def grad_scaler(self, value: Any) -> None:
        self._own_optimizer("grad_scaler").grad_scaler = checked_scaler(value)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Over whose ranks gradients are averaged, for the table's own optimizer; may be set between steps."""
        return None if self.core_optimizer is None else self.core_optimizer.process_group

    @process_group.setter
    def process_group(self, value: dist.ProcessGroup | None) -> None:
        self._own_optimizer("process_group").process_group = value
        self._is_shared = False

    def _own_optimizer(self, name: str) -> CoreOptimizer:
        """The fused optimizer, which is about to be given what it may have lost."""
        if self.core_optimizer is None:
            raise TableError(f"{name} goes with an optimizer of the table's own")
        self.core_optimizer.lost = tuple(lost for lost in self.core_optimizer.lost if lost != name)
        return self.core_optimizer

    @torch.no_grad()
    def _share(self) -> None:
        """Give all ranks that average gradients the first one's numbers: the same steps keep cores the same."""
        optimizer = self.core_optimizer
        self._is_shared = True
        if optimizer is None or not optimizer.is_distributed:
            return
        first = dist.get_global_rank(optimizer.process_group or dist.group.WORLD, 0)
        for tensor in (*self.parameters(), *self.buffers()):
            dist.broadcast(tensor.detach(), first, optimizer.process_group)

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
        self._is_shared = False

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        fused = "" if self.optimizer is None else f", fused {self.optimizer}"
        smaller = f"{self.shape.compression:.3g} times smaller"
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.shape}, {smaller}{fused}"


def _buffer(state: str) -> str:
    """What a state's buffers are called: Adagrad's as they were before others came."""
    return "sum" if state == "momentum1" else state
