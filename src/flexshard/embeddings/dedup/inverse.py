"""Batches that keep every distinct list once: RecD's inverse keyed jagged tensors (RecD paper, section 4.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pyarrow as pa
import torch
import torch.utils._pytree as pytree
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from flexshard._internal import JaggedArray, PathLike, bound, distinct_rows, first_repeated
from flexshard.embeddings.dedup.keyed import (
    Groups,
    arrow_columns,
    changed,
    checked_groups,
    columns_of,
    in_order,
    keyed,
    lists_of_rows,
    padded,
    rows_of,
)
from flexshard.errors import DataError

__all__ = ["DedupedGroup", "InverseKeyedJaggedTensor"]

Transform = Callable[[KeyedJaggedTensor], KeyedJaggedTensor]


@dataclass(frozen=True)
class DedupedGroup:
    """Features that share one inverse index.

    Attributes:
        jagged: the distinct rows of every feature; stride R.
        inverse: the distinct row that each sample has; shape (B,), int64.
        expanded_lengths: number of ids of each feature in the whole batch, where the host knows it; a batch that goes
            from the host to a device knows it.
    """

    jagged: KeyedJaggedTensor
    inverse: torch.Tensor
    expanded_lengths: tuple[int, ...] | None = None

    @property
    def keys(self) -> list[str]:
        """Its features."""
        return list(self.jagged.keys())

    @property
    def num_distinct(self) -> int:
        """R."""
        return int(self.jagged.stride())

    def counted(self) -> DedupedGroup:
        """The same, of a batch on the host, with what a device need not be asked for later on."""
        self.jagged.offset_per_key()
        lengths = self.jagged.lengths().view(len(self.keys), -1)
        return replace(self, expanded_lengths=tuple(lengths[:, self.inverse].sum(dim=1).tolist()))


class InverseKeyedJaggedTensor(Pipelineable):
    """A batch of B samples in which each group of features keeps its distinct rows once.

    Rows of a group are the same only if all of its features are. Features in no group stay a KeyedJaggedTensor.

    Attributes:
        groups: in the order they were asked for.
        plain: the features in no group; stride B. None if there are none.
    """

    def __init__(
        self,
        groups: Iterable[DedupedGroup],
        plain: KeyedJaggedTensor | None = None,
        keys: Sequence[str] | None = None,
    ) -> None:
        """Put groups and plain features together.

        Args:
            groups, plain: see the class.
            keys: all features in the order that :meth:`to_keyed_jagged` gives them; by default groups, then plain.

        Raises:
            DataError: a feature that stands twice, other keys, or groups of different batches.
        """
        self.groups = tuple(groups)
        self.plain = plain
        all_keys = [key for group in self.groups for key in group.keys] + ([] if plain is None else list(plain.keys()))
        self._keys = list(all_keys if keys is None else keys)
        twice = first_repeated(all_keys)
        if twice is not None:
            raise DataError(f"feature {twice!r} is in the batch twice; a feature belongs to one group")
        if sorted(self._keys) != sorted(all_keys):
            raise DataError(f"keys {self._keys} are not the features of the batch, {all_keys}")
        sizes = {int(group.inverse.numel()) for group in self.groups} | (
            {plain.stride()} if plain is not None else set()
        )
        if len(sizes) > 1:
            raise DataError(f"groups of one batch have as many samples, found {sorted(sizes)}")
        self._stride = sizes.pop() if sizes else 0

    # From other formats, and back.

    @classmethod
    def from_keyed_jagged(cls, features: KeyedJaggedTensor, groups: Groups) -> InverseKeyedJaggedTensor:
        """Find the distinct rows of each group; the work is done on the CPU, the result is on ``features``' device.

        Raises:
            DataError: a group that names an unknown feature or one a second time; batches of different size per key.
        """
        if features.variable_stride_per_key():
            raise DataError("features have batches of different size per key; give every key one length per sample")
        names = checked_groups(groups, features.keys())
        return cls._of_columns(columns_of(features), names, features.lengths().dtype, features.device())

    @classmethod
    def from_arrow(
        cls,
        table: pa.Table | pa.RecordBatch,
        groups: Groups,
        *,
        keys: Sequence[str] | None = None,
        weights: Mapping[str, str] | None = None,
        where: str = "the batch",
        first_row: int = 0,
    ) -> InverseKeyedJaggedTensor:
        """From columns of integers or of lists of integers, whose values are not copied to find the distinct rows.

        Args:
            table: one row per sample; a null list is an empty one.
            groups: features to deduplicate together.
            keys: features to read; by default every column that is not the weights of another.
            weights: the column with a feature's weights, by feature; all features have them or none.
            where: the file, for messages.
            first_row: row of the file at which the batch starts, for messages.

        Raises:
            DataError: as :meth:`from_keyed_jagged`; a missing column, columns of other types, nulls within lists, or
                weights of other lengths than the values; names column and row.
        """
        columns = arrow_columns(table, keys, dict(weights or {}), where, first_row)
        return cls._of_columns(columns, checked_groups(groups, list(columns)), torch.int32, torch.device("cpu"))

    @classmethod
    def _of_columns(
        cls, columns: Mapping[str, JaggedArray], groups: Groups, lengths: torch.dtype, device: torch.device
    ) -> InverseKeyedJaggedTensor:
        """The distinct rows of each group, and the other columns as they are."""
        groups_made = []
        for group in groups:
            group_columns = {key: columns[key] for key in group}
            same = distinct_rows(*group_columns.values())
            jagged = keyed(group_columns, lengths, device, rows=same.first)
            groups_made.append(DedupedGroup(jagged, torch.from_numpy(same.inverse).to(device)))
        grouped = {key for group in groups for key in group}
        rest = {key: column for key, column in columns.items() if key not in grouped}
        return cls(groups_made, keyed(rest, lengths, device) if rest else None, list(columns))

    @classmethod
    def from_rows(
        cls, rows: Sequence[Mapping[str, Sequence[int]]], groups: Groups, *, keys: Sequence[str] | None = None
    ) -> InverseKeyedJaggedTensor:
        """From a list of ids per feature and sample; a feature that a row leaves out is an empty list.

        Raises:
            DataError: as :meth:`from_arrow`.
        """
        names = list(keys if keys is not None else dict.fromkeys(key for row in rows for key in row))
        columns = {name: lists_of_rows(rows, name) for name in names}
        return cls.from_arrow(pa.table(columns), groups, keys=names)

    def to_keyed_jagged(self) -> KeyedJaggedTensor:
        """The whole batch, every sample with lists of its own: equal, bit for bit, to what this was made from."""
        parts = [rows_of(group.jagged, group.inverse) for group in self.groups]
        return in_order([*parts, *([] if self.plain is None else [self.plain])], self._keys, self._stride)

    @cached_property
    def distinct(self) -> KeyedJaggedTensor:
        """Ids of distinct rows alone, as every lookup takes them: R lists per group, then empty ones up to B.

        All keys have stride B, so that TorchRec takes them for an ordinary batch: its variable batches (VBE) lose
        gradients on the CPU (fbgemm 1.8: ``permute_1D_sparse_data`` has no backward for lengths per key there).
        """
        parts = [padded(group.jagged, self._stride) for group in self.groups]
        return in_order([*parts, *([] if self.plain is None else [self.plain])], self._keys, self._stride)

    def inverse_of(self, key: str) -> torch.Tensor | None:
        """The inverse index of a feature; None if it is in no group.

        Raises:
            DataError: no such feature.
        """
        group = self.group_of(key)
        return None if group is None else group.inverse

    def group_of(self, key: str) -> DedupedGroup | None:
        """The group of a feature; None if it is in none.

        Raises:
            DataError: no such feature.
        """
        if key not in self._keys:
            raise DataError(f"no feature {key!r} in the batch; there are {', '.join(self._keys)}")
        return next((group for group in self.groups if key in group.keys), None)

    def map(self, transform: Transform) -> InverseKeyedJaggedTensor:
        """Run ``transform`` on distinct rows, group by group, and on the plain features.

        The transform may change values, lengths, weights and keys, but keeps rows and what a row depends on: itself.

        Raises:
            DataError: it returned another number of rows.
        """
        groups, keys = [], []
        for group in self.groups:
            result = transform(group.jagged)
            if result.stride() != group.num_distinct and result.keys():
                raise DataError(
                    f"a transform of {group.keys} returned {result.stride()} rows for {group.num_distinct}; it must"
                    " keep them"
                )
            if result.keys():
                groups.append(DedupedGroup(result, group.inverse))
                keys += list(result.keys())
        plain = None if self.plain is None else transform(self.plain)
        if plain is not None and plain.keys():
            if plain.stride() != self._stride:
                raise DataError(
                    f"a transform of {self.plain.keys() if self.plain else []} returned {plain.stride()} rows for"
                    f" {self._stride}; it must keep them"
                )
            keys += list(plain.keys())
        else:
            plain = None
        ordered = [key for key in self._keys if key in keys] + [key for key in keys if key not in self._keys]
        return InverseKeyedJaggedTensor(groups, plain, ordered)

    # What it is.

    def keys(self) -> list[str]:
        """All features."""
        return list(self._keys)

    def stride(self) -> int:
        """B, samples."""
        return self._stride

    def device(self) -> torch.device:
        """Where it is."""
        tensors = self._tensors()
        return tensors[0].device if tensors else torch.device("cpu")

    def dedup_factor(self, key: str) -> float:
        """Ids of the whole batch per id that is kept: DedupFactor as measured (1 for a plain feature).

        Raises:
            DataError: no such feature.
        """
        group = self.group_of(key)
        if group is None:
            return 1.0
        rows, index = group.num_distinct, group.keys.index(key)
        lengths = group.jagged.lengths()[index * rows : (index + 1) * rows]  # jagged[key] has no batches of no rows
        kept = int(lengths.sum())
        return int(lengths[group.inverse].sum()) / kept if kept else 1.0

    def nbytes(self) -> int:
        """Bytes of all tensors: values, lengths, weights and inverse indices."""
        jagged = [group.jagged for group in self.groups] + ([] if self.plain is None else [self.plain])
        tensors = [group.inverse for group in self.groups]
        for each in jagged:
            tensors += [each.values(), each.lengths()]
            tensors += [each.weights()] if each.weights_or_none() is not None else []
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def __repr__(self) -> str:
        groups = ", ".join(f"{'+'.join(g.keys)}: {g.num_distinct} of {self._stride}" for g in self.groups)
        plain = "" if self.plain is None else f"; plain {', '.join(self.plain.keys())}"
        return f"InverseKeyedJaggedTensor({groups}{plain})"

    # Where it goes.

    def to(
        self, device: torch.device | str, non_blocking: bool = False, data_copy_stream: Any = None
    ) -> InverseKeyedJaggedTensor:
        """On another device (or itself, if it is there).

        Args:
            data_copy_stream: that copies; what it copies to is the current stream's, as TorchRec's pipelines expect
                of copies in place, which do not tell the allocator of another one.
        """
        target = torch.device(device)
        if self.device().type == "cpu" and target.type != "cpu":
            if self.plain is not None:
                self.plain.offset_per_key()
            groups = [group.counted() for group in self.groups]
            return InverseKeyedJaggedTensor(groups, self.plain, self._keys)._to(target, non_blocking, data_copy_stream)
        return self._to(target, non_blocking, data_copy_stream)

    def _to(self, target: torch.device, non_blocking: bool, stream: Any) -> InverseKeyedJaggedTensor:
        if stream is None:
            return self._each(lambda tensor: tensor.to(target, non_blocking=non_blocking))
        source = self._each(lambda tensor: tensor)  # without what a batch remembers besides, such as offsets
        places = self._each(lambda tensor: torch.empty_like(tensor, device=target))
        device = torch.get_device_module(target)
        stream.wait_stream(device.current_stream())  # which may use that memory still, for something else
        with device.stream(stream):
            for place, tensor in zip(places._tensors(), source._tensors(), strict=True):
                place.copy_(tensor, non_blocking=non_blocking)
        return places

    def pin_memory(self) -> InverseKeyedJaggedTensor:
        """In page-locked memory, from which copies to a GPU overlap other work."""
        return self._each(lambda tensor: tensor.pin_memory())

    def record_stream(self, stream: Any) -> None:
        """Keep the tensors' memory until what ``stream`` has queued is done."""
        for tensor in self._tensors():
            tensor.record_stream(stream)

    def save(self, path: PathLike) -> None:
        """Write it as a NumPy archive (no pickles), whole or not at all.

        Raises:
            OutputError: it could not be written.
        """
        bound("flexshard.embeddings", "InverseKeyedJaggedTensor.save")(self, path)

    @classmethod
    def load(cls, path: PathLike) -> InverseKeyedJaggedTensor:
        """Read what :meth:`save` wrote.

        Raises:
            DataError: missing, of another format or version, or damaged.
        """
        batch: InverseKeyedJaggedTensor = bound("flexshard.embeddings", "InverseKeyedJaggedTensor.load")(path)
        return batch

    def parts(self) -> list[tuple[KeyedJaggedTensor, torch.Tensor | None]]:
        """Every group and the plain features: lists, and the inverse index, None for plain ones."""
        parts: list[tuple[KeyedJaggedTensor, torch.Tensor | None]] = [(g.jagged, g.inverse) for g in self.groups]
        return parts if self.plain is None else [*parts, (self.plain, None)]

    def _tensors(self) -> list[torch.Tensor]:
        return [t for t in pytree.tree_leaves(self) if isinstance(t, torch.Tensor)]

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> InverseKeyedJaggedTensor:
        groups = [
            DedupedGroup(changed(group.jagged, change), change(group.inverse), group.expanded_lengths)
            for group in self.groups
        ]
        plain = None if self.plain is None else changed(self.plain, change)
        return InverseKeyedJaggedTensor(groups, plain, self._keys)


def _flatten(batch: InverseKeyedJaggedTensor) -> tuple[list[Any], Any]:
    children = [child for group in batch.groups for child in (group.jagged, group.inverse)]
    expanded = [group.expanded_lengths for group in batch.groups]
    return [*children, batch.plain], (batch.keys(), batch.stride(), expanded)


def _unflatten(children: Iterable[Any], context: Any) -> InverseKeyedJaggedTensor:
    *pairs, plain = children
    batch = InverseKeyedJaggedTensor.__new__(InverseKeyedJaggedTensor)  # leaves need not be tensors: nothing to check
    batch.groups = tuple(
        DedupedGroup(jagged, index, expanded)
        for jagged, index, expanded in zip(pairs[::2], pairs[1::2], context[2], strict=True)
    )
    batch.plain = plain
    batch._keys, batch._stride = list(context[0]), context[1]
    return batch


pytree.register_pytree_node(
    InverseKeyedJaggedTensor, _flatten, _unflatten, serialized_type_name="flexshard.InverseKeyedJaggedTensor"
)
