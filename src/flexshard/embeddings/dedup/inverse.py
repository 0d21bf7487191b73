"""Batches that keep every distinct list once: RecD's inverse keyed jagged tensors (RecD paper, section 4.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import pyarrow as pa
import torch
import torch.utils._pytree as pytree
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from flexshard._internal import JaggedArray, PathLike, bound, first_repeated, there_are
from flexshard.embeddings.dedup.group import DedupedGroup, Sharing, deduplicated
from flexshard.embeddings.dedup.keyed import (
    Groups,
    arrow_columns,
    changed,
    checked_groups,
    columns_of,
    in_order,
    keyed,
    keyed_range,
    lists_of_rows,
    padded,
    tensors_of,
    widened,
)
from flexshard.embeddings.dedup.pytrees import register
from flexshard.errors import DataError

__all__ = ["InverseKeyedJaggedTensor"]

Transform = Callable[[KeyedJaggedTensor], KeyedJaggedTensor]


class InverseKeyedJaggedTensor(Pipelineable):
    """A batch of B samples in which each group of features keeps its distinct rows once.

    Rows of a group are the same only if all of its features are. Features in no group stay a KeyedJaggedTensor. Of a
    group with runs, distinct rows share what their lists have in common, too.

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
        if self._keys != all_keys and sorted(self._keys) != sorted(all_keys):
            raise DataError(f"keys {self._keys} are not the features of the batch, {all_keys}")
        sizes = {int(group.inverse.numel()) for group in self.groups} | (set() if plain is None else {plain.stride()})
        if len(sizes) > 1:
            raise DataError(f"groups of one batch have as many samples, found {sorted(sizes)}")
        self._stride = sizes.pop() if sizes else 0

    # From other formats, and back.

    @classmethod
    def from_keyed_jagged(
        cls,
        features: KeyedJaggedTensor,
        groups: Groups = (),
        *,
        partial: Groups = (),
        newest: str = "last",
        max_shift: int = 16,
    ) -> InverseKeyedJaggedTensor:
        """Find the distinct rows of each group; the work is done on the CPU, the result is on ``features``' device.

        Args:
            features: a batch.
            groups: features to deduplicate together.
            partial: features to deduplicate partially together: distinct rows whose lists go on from those of the row
                before share a buffer, for which the samples of a session have to follow each other. The lists of
                features named together have equal lengths.
            newest, max_shift: of these, as of :meth:`PartialJaggedTensor.from_jagged`.

        Raises:
            DataError: a group that names an unknown feature or one a second time; batches of different size per key;
                weights or lists of different lengths where there may be none.
        """
        if features.variable_stride_per_key():
            raise DataError("features have batches of different size per key; give every key one length per sample")
        exact, shared = checked_groups(groups, partial, features.keys())
        columns, kind, device = columns_of(features), features.lengths().dtype, features.device()
        made = deduplicated(columns, exact, shared, kind, device, Sharing(newest, max_shift))
        rest = {key: column for key, column in columns.items() if not any(key in group.keys for group in made)}
        return cls(made, keyed(rest, kind, device) if rest else None, list(columns))

    @classmethod
    def from_arrow(
        cls,
        table: pa.Table | pa.RecordBatch,
        groups: Groups = (),
        *,
        partial: Groups = (),
        newest: str = "last",
        max_shift: int = 16,
        keys: Sequence[str] | None = None,
        weights: Mapping[str, str] | None = None,
        where: str = "the batch",
        first_row: int = 0,
    ) -> InverseKeyedJaggedTensor:
        """From columns of integers or of lists of integers, whose values are not copied to find the distinct rows.

        Args:
            table: one row per sample; a null list is an empty one.
            groups, partial, newest, max_shift: as of :meth:`from_keyed_jagged`.
            keys: features to read; by default every column that is not the weights of another.
            weights: the column with a feature's weights, by feature; all features have them or none.
            where: the file, for messages.
            first_row: row of the file at which the batch starts, for messages.

        Raises:
            DataError: as :meth:`from_keyed_jagged`; a missing column, columns of other types, nulls within lists, or
                weights of other lengths than the values; names column and row.
        """
        columns = arrow_columns(table, keys, weights, where, first_row)
        how: dict[str, Any] = {"newest": newest, "max_shift": max_shift, "where": where, "first_row": first_row}
        return cls.from_columns(columns, groups, partial=partial, **how)

    @classmethod
    def from_columns(
        cls,
        columns: Mapping[str, JaggedArray],
        groups: Groups = (),
        *,
        partial: Groups = (),
        rows: tuple[int, int] | None = None,
        **how: Any,
    ) -> InverseKeyedJaggedTensor:
        """From lists of ids by feature, such as :func:`arrow_columns` finds.

        Args:
            columns: of as many rows each.
            groups, partial: as of :meth:`from_keyed_jagged`.
            rows: from which row to which, if not all.
            how: ``newest``, ``max_shift``, ``where`` and ``first_row``, as of :meth:`from_arrow`.

        Raises:
            DataError: as :meth:`from_keyed_jagged`.
        """
        sharing, (exact, shared) = Sharing(**how), checked_groups(groups, partial, list(columns))
        start, stop = (0, len(next(iter(columns.values()), ()))) if rows is None else rows
        lists = {key: widened(columns[key].slice(start, stop)) for group in [*exact, *shared] for key in group}
        made = deduplicated(lists, exact, shared, torch.int32, torch.device("cpu"), sharing)
        rest = {key: column for key, column in columns.items() if key not in lists}
        return cls(made, keyed_range(rest, start, stop) if rest else None, list(columns))

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[Mapping[str, Sequence[int]]],
        groups: Groups = (),
        *,
        keys: Sequence[str] | None = None,
        **how: Any,
    ) -> InverseKeyedJaggedTensor:
        """From a list of ids per feature and sample; a feature that a row leaves out is an empty list.

        Args:
            rows: of the batch.
            groups: as of :meth:`from_keyed_jagged`.
            keys: features to read; by default all.
            how: further arguments of :meth:`from_arrow`.

        Raises:
            DataError: as :meth:`from_arrow`.
        """
        names = list(keys if keys is not None else dict.fromkeys(key for row in rows for key in row))
        columns = {name: lists_of_rows(rows, name) for name in names}
        return cls.from_arrow(pa.table(columns), groups, keys=names, **how)

    def to_keyed_jagged(self) -> KeyedJaggedTensor:
        """The whole batch, every sample with lists of its own: equal, bit for bit, to what this was made from."""
        parts = [group.expand() for group in self.groups]
        return in_order([*parts, *([] if self.plain is None else [self.plain])], self._keys, self._stride)

    @cached_property
    @torch.inference_mode(False)  # what is kept may be trained on later
    def distinct(self) -> KeyedJaggedTensor:
        """Ids of distinct rows alone, as every lookup takes them: R lists per group, then empty ones up to B.

        Of a partially deduplicated group, the ids of its buffer.

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
            raise DataError(f"no feature {key!r} in the batch; {there_are(self._keys)}")
        return next((group for group in self.groups if key in group.keys), None)

    def map(self, transform: Transform) -> InverseKeyedJaggedTensor:
        """Run ``transform`` on distinct rows, group by group, and on the plain features.

        The transform may change values, lengths, weights and keys, but keeps rows and what a row depends on: itself.
        One that has a true attribute ``per_id``, because it maps ids one by one whatever their rows, runs once per id
        of a shared buffer; others get every distinct row's own list, and what these share is found again.

        Raises:
            DataError: it returned another number of rows, or one with ``per_id`` another number of ids.
        """
        groups, keys = [], []
        for group in self.groups:
            on_buffer = group.runs is not None and getattr(transform, "per_id", False)
            result = transform(group.jagged if on_buffer else group.lists())
            if result.stride() != group.num_distinct and result.keys():
                raise DataError(
                    f"a transform of {group.keys} returned {result.stride()} rows for {group.num_distinct}; it must"
                    " keep them"
                )
            found, due = result.values().numel() * len(group.keys), group.jagged.values().numel() * len(result.keys())
            if on_buffer and result.weights_or_none() is not None:
                raise DataError(f"a transform gave {group.keys} weights, which lists that share ids cannot have")
            if on_buffer and found != due:
                raise DataError(f"a transform of {group.keys} says per_id, but returned more or fewer ids than it got")
            if result.keys():
                groups += [replace(group, jagged=result)] if on_buffer else group.of_lists(result)
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
        return 1.0 if group is None else group.dedup_factor(key)

    def nbytes(self) -> int:
        """Bytes of all tensors: values, lengths, weights, inverse indices and runs."""
        return sum(tensor.nbytes for tensor in self._tensors())

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

    def parts(self) -> list[tuple[KeyedJaggedTensor, DedupedGroup | None]]:
        """Lists of every group, or buffers, and of the plain features; and the group, None for plain ones."""
        parts: list[tuple[KeyedJaggedTensor, DedupedGroup | None]] = [(group.jagged, group) for group in self.groups]
        return parts if self.plain is None else [*parts, (self.plain, None)]

    def _tensors(self) -> list[torch.Tensor]:
        leaves = [leaf for g in self.groups for leaf in pytree.tree_leaves((g.jagged, g.inverse, g.runs))]
        plain = [] if self.plain is None else tensors_of(self.plain)
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)] + plain

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> InverseKeyedJaggedTensor:
        groups = [group.each(change) for group in self.groups]
        plain = None if self.plain is None else changed(self.plain, change)
        return InverseKeyedJaggedTensor(groups, plain, self._keys)


def _flatten(batch: InverseKeyedJaggedTensor) -> tuple[list[Any], Any]:
    children = [child for group in batch.groups for child in (group.jagged, group.inverse, group.runs)]
    expanded = [group.expanded_lengths for group in batch.groups]
    return [*children, batch.plain], (batch.keys(), batch.stride(), expanded)


def _unflatten(children: Iterable[Any], context: Any) -> InverseKeyedJaggedTensor:
    *parts, plain = children
    batch = InverseKeyedJaggedTensor.__new__(InverseKeyedJaggedTensor)  # leaves need not be tensors: nothing to check
    batch.groups = tuple(
        DedupedGroup(jagged, index, expanded, runs)
        for jagged, index, runs, expanded in zip(parts[::3], parts[1::3], parts[2::3], context[2], strict=True)
    )
    batch.plain = plain
    batch._keys, batch._stride = list(context[0]), context[1]
    return batch


register(InverseKeyedJaggedTensor, _flatten, _unflatten)
