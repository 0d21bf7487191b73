"""From columns of lists to keyed jagged tensors and between them, by feature and by row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from flexshard._internal import (
    IntArray,
    JaggedArray,
    first_repeated,
    is_list,
    jagged_of_arrow,
    joined,
    joined_range,
    there_are,
)
from flexshard.embeddings.dedup.selection import jagged_index_select
from flexshard.errors import DataError

__all__ = [
    "Groups",
    "arrow_columns",
    "changed",
    "checked_groups",
    "columns_of",
    "in_order",
    "keyed",
    "keyed_range",
    "lists_of_rows",
    "padded",
    "rows_of",
    "tensors_of",
    "widened",
]

Groups = Sequence[Sequence[str]]


def checked_groups(groups: Groups, partial: Groups, keys: Sequence[str]) -> tuple[list[list[str]], list[list[str]]]:
    """Groups of features that are there, exact and partial, each in one group at most; raises DataError."""
    for found in (groups, partial):
        if isinstance(found, str) or any(isinstance(group, str) for group in found):
            raise DataError(f"groups are lists of features, such as [['history', 'authors']]; found {found!r}")
    if not groups and not partial:
        return [], []
    exact_names, partial_names = [list(group) for group in groups], [list(group) for group in partial]
    for noun, names in (("group", exact_names), ("partial group", partial_names)):
        for number, group in enumerate(names):
            if not group:
                raise DataError(f"{noun} {number} names no feature")
            for key in group:
                if key not in keys:
                    raise DataError(f"{noun} {number} names feature {key!r}, which is not there; {there_are(keys)}")
    twice = first_repeated(key for group in [*exact_names, *partial_names] for key in group)
    if twice is not None:
        raise DataError(f"feature {twice!r} is named twice in the groups; a feature belongs to one group")
    return exact_names, partial_names


def columns_of(features: KeyedJaggedTensor) -> dict[str, JaggedArray]:
    """Views of a batch's features on the CPU."""
    stride, ends = features.stride(), features.offset_per_key()
    values, lengths = features.values().detach().cpu().numpy(), features.lengths().cpu().numpy()
    weights = None
    if features.weights_or_none() is not None:
        held = features.weights().detach().cpu()
        weights = (held.view(torch.int16) if held.dtype == torch.bfloat16 else held).numpy()  # NumPy has no bfloat16
    columns = {}
    for index, key in enumerate(features.keys()):
        part = slice(ends[index], ends[index + 1])
        each = lengths[index * stride : (index + 1) * stride]
        columns[key] = JaggedArray.of(values[part], each, None if weights is None else weights[part])
    return columns


def arrow_columns(
    table: pa.Table | pa.RecordBatch,
    keys: Sequence[str] | None = None,
    weights: Mapping[str, str] | None = None,
    where: str = "the batch",
    first_row: int = 0,
) -> dict[str, JaggedArray]:
    """Columns of ids by feature, with their weights, as :meth:`InverseKeyedJaggedTensor.from_arrow` reads them: without
    copying, where they hold signed ids, and 32 bits a weight.

    Args:
        table, keys, weights, where, first_row: as of :meth:`InverseKeyedJaggedTensor.from_arrow`.

    Raises:
        DataError: a missing column, columns of other types, nulls within lists, or weights of other lengths than the
            values; names column and row.
    """
    there, weights = table.schema.names, dict(weights or {})
    names = list(keys) if keys is not None else [name for name in there if name not in weights.values()]
    for name in [*names, *weights, *weights.values()]:
        if there.count(name) != 1:
            raise DataError(f"{where}: no column {name!r}; {there_are(there)}")
    if weights and set(weights) != set(names):
        without = next(iter(set(names) ^ set(weights)))
        raise DataError(f"{where}: feature {without!r} has no weights or is none of the keys; all have them or none")
    columns = {}
    for name in names:
        column = jagged_of_arrow(table.column(name), name, where=where, first_row=first_row)
        if column.values.dtype.kind != "i":
            raise DataError(
                f"{where}: column {name!r} holds {table.schema.field(name).type}, not ids; round them before"
            )
        if name in weights:
            other = jagged_of_arrow(table.column(weights[name]), weights[name], where=where, first_row=first_row)
            wrong = np.flatnonzero(other.lengths != column.lengths)
            if wrong.size:
                row = int(wrong[0])
                raise DataError(
                    f"{where}: column {weights[name]!r} has {other.lengths[row]} weights for {column.lengths[row]} ids"
                    f" of {name!r} in row {first_row + row:,}"
                )
            with np.errstate(over="ignore"):
                narrow = other.values.astype(np.float32, copy=False)
            lost = np.isinf(narrow) & ~np.isinf(other.values)
            if lost.any():
                position = int(np.flatnonzero(lost)[0])
                row = int(np.searchsorted(column.offsets, position, side="right")) - 1
                raise DataError(
                    f"{where}: column {weights[name]!r} has a weight of {other.values[position]:g} in row"
                    f" {first_row + row:,}, which float32 does not hold; scale the weights"
                )
            column = JaggedArray(column.values, column.offsets, narrow)
        columns[name] = column
    return columns


def widened(column: JaggedArray) -> JaggedArray:
    """Its ids in 64 bits."""
    if column.values.dtype == np.int64:
        return column
    return JaggedArray(column.values.astype(np.int64), column.offsets, column.weights)


def lists_of_rows(rows: Sequence[Mapping[str, Sequence[int]]], name: str) -> pa.Array:
    """One feature of rows, as lists of ids.

    Raises:
        DataError: a row has something else there; names it.
    """
    lists = [row.get(name) for row in rows]
    values = _integers(lists)
    if values is not None:
        return values
    for number, one in enumerate(lists):
        if _integers([one]) is None:
            raise DataError(f"the rows: feature {name!r} of row {number:,} is {one!r}, not a list of ids")
    raise DataError(f"the rows: feature {name!r} is not lists of ids")


def _integers(lists: Sequence[Sequence[int] | None]) -> pa.Array | None:
    try:
        array = pa.array(lists)  # its own type, since Arrow would cut floats
        inner = array.type.value_type if is_list(array.type) else array.type
        if pt.is_null(array.type) or (is_list(array.type) and (pt.is_integer(inner) or pt.is_null(inner))):
            return array.cast(pa.large_list(pa.int64()))
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        pass
    return None


def keyed(
    columns: Mapping[str, JaggedArray],
    lengths: torch.dtype,
    device: torch.device,
    *,
    rows: IntArray | None = None,
) -> KeyedJaggedTensor:
    """These rows (all by default) of some columns."""
    kind = np.int32 if lengths == torch.int32 else np.int64
    values, each, bits = joined(list(columns.values()), rows, lengths_type=kind)
    weights = None if bits is None else torch.from_numpy(bits)
    if weights is not None and weights.dtype == torch.int16:
        weights = weights.view(torch.bfloat16)
    return KeyedJaggedTensor(
        keys=list(columns),
        values=torch.from_numpy(values).to(device),
        lengths=torch.from_numpy(each).to(lengths).to(device),
        weights=None if weights is None else weights.to(device),
        stride=len(next(iter(columns.values()))) if rows is None else int(rows.size),
    )


def keyed_range(columns: Mapping[str, JaggedArray], start: int, stop: int) -> KeyedJaggedTensor:
    """Consecutive rows of some columns of ids, on the host, with lengths of 32 bits."""
    values, each, weights = joined_range(list(columns.values()), start, stop)
    return KeyedJaggedTensor(
        keys=list(columns),
        values=torch.from_numpy(values),
        lengths=torch.from_numpy(each),
        weights=None if weights is None else torch.from_numpy(weights),
        stride=stop - start,
    )


def rows_of(jagged: KeyedJaggedTensor, rows: torch.Tensor) -> KeyedJaggedTensor:
    """A batch of these rows of every feature."""
    keys, stride = jagged.keys(), jagged.stride()
    index = (torch.arange(len(keys), device=rows.device)[:, None] * stride + rows[None]).reshape(-1)
    values, lengths = jagged_index_select(jagged.values(), jagged.lengths(), index)
    weights = jagged.weights_or_none()
    if weights is not None:
        weights = jagged_index_select(weights, jagged.lengths(), index)[0]
    return KeyedJaggedTensor(keys=keys, values=values, lengths=lengths, weights=weights, stride=int(rows.numel()))


def padded(jagged: KeyedJaggedTensor, stride: int) -> KeyedJaggedTensor:
    """The same rows, followed by empty ones up to ``stride``."""
    each = jagged.lengths().view(len(jagged.keys()), -1)
    lengths = torch.nn.functional.pad(each, (0, stride - each.shape[1])).reshape(-1)
    return KeyedJaggedTensor(
        keys=jagged.keys(),
        values=jagged.values(),
        lengths=lengths,
        weights=jagged.weights_or_none(),
        stride=stride,
        length_per_key=jagged.length_per_key_or_none(),
        offset_per_key=jagged.offset_per_key_or_none(),
    )


def in_order(parts: Sequence[KeyedJaggedTensor], keys: Sequence[str], stride: int) -> KeyedJaggedTensor:
    """One batch of all parts' features, in the order of ``keys``."""
    if not parts:
        empty = torch.zeros(0, dtype=torch.int64)
        return KeyedJaggedTensor(keys=[], values=empty, lengths=empty, stride=stride)
    if len(parts) == 1 and list(parts[0].keys()) == list(keys):
        return parts[0]
    values, lengths, weights = {}, {}, {}
    number: dict[str, int] = {}
    for part in parts:
        ends = part.offset_per_key()
        number |= dict(zip(part.keys(), part.length_per_key(), strict=True))
        for index, key in enumerate(part.keys()):
            span = slice(ends[index], ends[index + 1])
            values[key] = part.values()[span]
            lengths[key] = part.lengths()[index * stride : (index + 1) * stride]
            if part.weights_or_none() is not None:
                weights[key] = part.weights()[span]
    return KeyedJaggedTensor(
        keys=list(keys),
        values=torch.cat([values[key] for key in keys]),
        lengths=torch.cat([lengths[key] for key in keys]),
        weights=torch.cat([weights[key] for key in keys]) if weights else None,
        stride=stride,
        length_per_key=[number[key] for key in keys],
    )


def tensors_of(jagged: KeyedJaggedTensor) -> list[torch.Tensor]:
    """In the order in which torch's pytrees find them, which take long for it."""
    held = (jagged.values(), jagged.weights_or_none(), jagged.lengths_or_none(), jagged.offsets_or_none())
    return [tensor for tensor in held if tensor is not None]


def changed(jagged: KeyedJaggedTensor, change: Callable[[torch.Tensor], torch.Tensor]) -> KeyedJaggedTensor:
    """The same batch, each of its tensors changed; what the host knows of it, it still knows."""
    weights = jagged.weights_or_none()
    return KeyedJaggedTensor(
        keys=jagged.keys(),
        values=change(jagged.values()),
        lengths=change(jagged.lengths()),
        weights=None if weights is None else change(weights),
        stride=jagged.stride(),
        length_per_key=jagged.length_per_key_or_none(),
        offset_per_key=jagged.offset_per_key_or_none(),
    )
