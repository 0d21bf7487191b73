"""Maps of features as a column per feature, in files and in memory (DPP paper, section 4.2.2: feature flattening and
in-memory flatmaps). No row is built: entries are put in order by key, and each feature takes its stretch of them.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from flexshard._internal import is_list, one_array
from flexshard.errors import DataError

__all__ = [
    "Projection",
    "feature_name",
    "flat_columns",
    "loosened",
    "map_columns",
    "map_of",
    "note_of",
    "taken_apart",
]

IntArray = npt.NDArray[np.int64]
_SEPARATOR, _TAKEN_APART = "/", b"flexshard.maps"


def feature_name(column: str, key: object) -> str:
    """The column of a key of a map."""
    return f"{column}{_SEPARATOR}{key}"


def map_columns(schema: pa.Schema) -> list[str]:
    """Columns that hold maps from numbers or texts."""
    return [field.name for field in schema if pt.is_map(field.type) and _is_key(field.type.key_type)]


def map_of(column: str, maps: Iterable[str]) -> str | None:
    """Of which map a column is a key; of maps whose names begin alike, the longest."""
    return max((name for name in maps if column.startswith(f"{name}{_SEPARATOR}")), key=len, default=None)


def taken_apart(schema: pa.Schema) -> dict[str, pa.DataType]:
    """Maps whose keys became columns when a file was written, and what they held."""
    noted = (schema.metadata or {}).get(_TAKEN_APART)
    if noted is None:
        return {}
    try:
        held = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(noted)))
    except (ValueError, pa.ArrowException, OSError):
        return {}  # a note of somebody else
    return {field.name: field.type for field in held}


def note_of(maps: Mapping[str, pa.DataType]) -> dict[bytes, bytes]:
    """Metadata of a schema that say which maps were taken apart, and what they held."""
    if not maps:
        return {}
    return {_TAKEN_APART: base64.b64encode(pa.schema(list(maps.items())).serialize().to_pybytes())}


def loosened(kind: pa.DataType) -> pa.DataType:
    """The type of values some of which are missing: fields of structs may be null."""
    if not pt.is_struct(kind):
        return kind
    fields = [kind.field(number) for number in range(kind.num_fields)]
    return pa.struct([pa.field(field.name, loosened(field.type), metadata=field.metadata) for field in fields])


def _is_key(kind: pa.DataType) -> bool:
    return bool(pt.is_integer(kind) or pt.is_string(kind) or pt.is_large_string(kind))


@dataclass(frozen=True)
class Projection:
    """Columns that are wanted of a schema, some of which are keys of maps.

    Attributes:
        columns: that are wanted; ``map/key`` is a key of a map, unless there is a column of that name.
        stored: that have to be read for them.
        keys: of each map, and the place among ``columns`` that each goes to.
        absent: places of keys that no row has, of maps that were taken apart when the file was written; and their type.
    """

    columns: tuple[str, ...]
    stored: tuple[str, ...]
    keys: Mapping[str, tuple[pa.Array, tuple[int, ...]]]
    absent: Mapping[int, pa.DataType]

    @classmethod
    def of(cls, schema: pa.Schema, columns: Sequence[str]) -> Projection:
        """Find the columns; those that there are not are left as they are, for others to miss."""
        names, maps, before = set(schema.names), set(map_columns(schema)), taken_apart(schema)
        stored: dict[str, None] = {}
        found: dict[str, list[tuple[str, int]]] = {}
        absent: dict[int, pa.DataType] = {}
        for place, column in enumerate(columns):
            owner = None if column in names else map_of(column, maps | before.keys())
            if owner is None:
                stored[column] = None
            elif owner in maps:
                stored[owner] = None
                found.setdefault(owner, []).append((column[len(owner) + 1 :], place))
            else:
                absent[place] = before[owner]
        keys = {}
        for owner, wanted in found.items():
            kind = schema.field(owner).type.key_type
            values = pa.array([_key(owner, text, kind) for text, _ in wanted], kind)
            keys[owner] = (values, tuple(place for _, place in wanted))
        return cls(tuple(columns), tuple(stored), keys, absent)

    def owners(self) -> list[str | None]:
        """The stored column that each column is in; None for those that no row has."""
        of_keys = {place: owner for owner, (_, places) in self.keys.items() for place in places}
        return [None if place in self.absent else of_keys.get(place, name) for place, name in enumerate(self.columns)]

    def types(self, schema: pa.Schema) -> list[pa.DataType]:
        """What each column holds."""
        kinds = {name: schema.field(name).type for name in self.stored}
        of_keys = {
            place: loosened(kinds[name].item_type) for name, (_, places) in self.keys.items() for place in places
        }
        found = of_keys | dict(self.absent)
        return [found.get(place) or kinds[name] for place, name in enumerate(self.columns)]

    def of_batch(self, batch: pa.RecordBatch, where: str, first_row: int) -> pa.RecordBatch:
        """The wanted columns of what was read.

        Raises:
            DataError: a row with a key twice; names file, row, column and key.
        """
        if not self.keys and not self.absent:
            # Where one column's name begins another's, up to a dot, Arrow reads both. Whether nulls may be there
            # differs between files that are read as one.
            found = batch if tuple(batch.schema.names) == self.columns else batch.select(list(self.columns))
            return pa.RecordBatch.from_arrays(found.columns, names=list(self.columns))
        names = set(batch.schema.names)
        arrays = [batch.column(column) if column in names else None for column in self.columns]
        for place, kind in self.absent.items():
            arrays[place] = pa.nulls(batch.num_rows, kind)
        for owner, (keys, places) in self.keys.items():
            found = flat_columns(batch.column(owner), keys, f"{where}: column {owner!r}", first_row)
            for place, array in zip(places, found, strict=True):
                arrays[place] = array
        return pa.RecordBatch.from_arrays(arrays, names=list(self.columns))


def _key(column: str, text: str, kind: pa.DataType) -> str | int:
    """A key as it is written behind its map."""
    if not pt.is_integer(kind):
        return text
    try:
        number = int(text)
        if str(number) == text:  # "01" and " 1" name no other key than "1"
            return int(pa.scalar(number, kind).as_py())
    except (ValueError, OverflowError, pa.ArrowInvalid):
        pass
    raise DataError(f"keys of column {column!r} are {kind}; {feature_name(column, text)!r} names none")


def flat_columns(column: pa.Array | pa.ChunkedArray, keys: pa.Array, what: str, first_row: int) -> list[pa.Array]:
    """The value of each key in every row of a map; null where a row has not the key.

    Args:
        column: of maps; N entries in R rows.
        keys: that are wanted, each once.
        what: file and column, for messages.
        first_row: of the file at which the column starts, for messages.

    Raises:
        DataError: a row with a key twice; names row and key.
    """
    maps = one_array(column) if isinstance(column, pa.ChunkedArray) else column
    rows = len(maps)
    offsets = maps.offsets.to_numpy().astype(np.int64)
    lengths = np.diff(offsets)
    if maps.null_count:  # what a null map holds is nothing
        lengths = np.where(pc.is_null(maps).to_numpy(zero_copy_only=False), 0, lengths)
    begin, end = int(offsets[0]), int(offsets[-1])
    codes = pc.index_in(maps.keys.slice(begin, end - begin), value_set=keys)
    row_of = np.repeat(np.arange(rows), np.diff(offsets))
    wanted = pc.is_valid(codes).to_numpy(zero_copy_only=False)
    if maps.null_count:
        wanted &= (lengths > 0)[row_of]
    places = np.flatnonzero(wanted)
    code = codes.to_numpy(zero_copy_only=False)[places]
    code = code.astype(np.int16 if len(keys) < 1 << 15 else np.int64)  # NumPy sorts 16 bits by radix
    order = np.argsort(code, kind="stable")
    code, row_of = code[order], row_of[places[order]]
    twice = np.flatnonzero((code[1:] == code[:-1]) & (row_of[1:] == row_of[:-1]))
    if twice.size:
        raise DataError(
            f"{what}: row {first_row + int(row_of[twice[0]]):,} has key {keys[int(code[twice[0]])].as_py()!r} twice"
        )
    values = maps.items.slice(begin, end - begin).take(pa.array(places[order]))
    bounds = np.searchsorted(code, np.arange(len(keys) + 1))
    spread = _lists if is_list(values.type) and not pt.is_fixed_size_list(values.type) else _values
    return spread(values, row_of, bounds, rows)


def _values(values: pa.Array, row_of: IntArray, bounds: IntArray, rows: int) -> list[pa.Array]:
    """Each stretch of values over all rows."""
    found = []
    for first, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        if stop - first == rows:
            found.append(values.slice(first, rows))
            continue
        place = np.full(rows, -1, np.int64)
        place[row_of[first:stop]] = np.arange(first, stop)
        found.append(values.take(pa.array(place, mask=place < 0)))
    kind = loosened(values.type)
    return found if kind == values.type else [array.cast(kind) for array in found]


def _lists(values: pa.Array, row_of: IntArray, bounds: IntArray, rows: int) -> list[pa.Array]:
    """Each stretch of lists over all rows; their numbers stay where they are."""
    offsets = values.offsets.to_numpy()
    sizes, inner = np.diff(offsets), values.values
    if values.null_count:
        sizes = np.where(pc.is_null(values).to_numpy(zero_copy_only=False), 0, sizes)
    made, found = type(values), []
    for first, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        begin, end = int(offsets[first]), int(offsets[stop])
        held = np.zeros(rows + 1, offsets.dtype)
        held[row_of[first:stop] + 1] = sizes[first:stop]
        np.cumsum(held, out=held)
        missing = np.ones(rows, bool)
        missing[row_of[first:stop]] = False
        if values.null_count:
            missing[row_of[first:stop]] = pc.is_null(values.slice(first, stop - first)).to_numpy(zero_copy_only=False)
        mask = pa.array(missing) if missing.any() else None
        found.append(made.from_arrays(pa.array(held), inner.slice(begin, end - begin), type=values.type, mask=mask))
    return found
