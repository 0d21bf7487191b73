"""What files must agree on before they are clustered together."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import PurePath

import pyarrow as pa
import pyarrow.types as pt

from flexshard._internal import ParquetSource, there_are
from flexshard.errors import DataError
from flexshard.ingestion.sessions.partitions import PARTITION_KEY, SESSION_KEY, TIME_KEY, partition_width
from flexshard.ingestion.sessions.sorting import RESERVED

__all__ = ["common_schema"]

_FOLDER_KEY = re.compile(r"([^=]+)=[^=]*")  # as Hive and Spark name folders


def common_schema(
    sources: Sequence[ParquetSource], session: str, time: str, partition: str | float | None
) -> pa.Schema:
    """The schema that all files share, with what clustering does in its metadata."""
    first = sources[0]
    folders = {
        found[1]
        for source in sources
        for part in PurePath(source.name).parts[:-1]
        if (found := _FOLDER_KEY.fullmatch(part)) and found[1] not in source.schema.names
    }
    if folders:
        warnings.warn(
            f"{first.name}: what folders say of their rows ({', '.join(sorted(folders))}) is not in the files, and"
            " will not be in what is written; write it as columns first if it is wanted",
            UserWarning,
            stacklevel=3,
        )
    for source in sources:
        _check_names(source)
        for column in (session, time):
            if source.schema.names.count(column) != 1:
                raise DataError(f"{source.name}: no column {column!r}; {there_are(source.schema.names)}")
        if set(source.schema.names) != set(first.schema.names):
            odd = sorted(set(source.schema.names) ^ set(first.schema.names))[0]
            raise DataError(f"{source.name}: column {odd!r} is in this file or in {first.name}, but not in both")
        for field in source.schema:
            other = first.schema.field(field.name).type
            if field.type != other:
                raise DataError(
                    f"{source.name}: column {field.name!r} holds {field.type}, but {other} in {first.name}; write them"
                    " alike"
                )
    kind = first.schema.field(session).type
    if pt.is_nested(kind) or pt.is_floating(kind):
        raise DataError(f"{first.name}: session column {session!r} holds {kind}; expected one key per row")
    kind = first.schema.field(time).type
    if not (pt.is_integer(kind) or pt.is_floating(kind) or pt.is_temporal(kind)):
        raise DataError(f"{first.name}: time column {time!r} holds {kind}; expected numbers or timestamps")
    kept = dict(first.schema.metadata or {})
    kept.pop(b"pandas", None)  # describes an index that sorting breaks
    kept.pop(PARTITION_KEY, None)
    kept |= {SESSION_KEY: session.encode(), TIME_KEY: time.encode()}
    if partition is not None:
        kept[PARTITION_KEY] = repr(partition_width(kind, partition, time)).encode()
    return first.schema.with_metadata(kept)


def _check_names(source: ParquetSource) -> None:
    """Check that DuckDB tells the columns apart and keeps their values."""
    seen: dict[str, str] = {}
    for field in source.schema:
        other = seen.setdefault(field.name.lower(), field.name)
        if other is not field.name and (other != field.name or source.schema.names.count(field.name) > 1):
            raise DataError(f"{source.name}: columns {other!r} and {field.name!r} differ by case at most; rename one")
        if not field.name or field.name.lower() in RESERVED:
            raise DataError(f"{source.name}: a column cannot be called {field.name!r} here; rename it")
        alike = _alike(field.type)
        if alike is not None:
            raise DataError(
                f"{source.name}: column {field.name!r} has fields {alike[0]!r} and {alike[1]!r}, which differ by case"
                " at most; rename one"
            )
        if _lossy(field.type):
            raise DataError(
                f"{source.name}: column {field.name!r} holds {field.type}, which DuckDB changes; cast it before"
            )


def _alike(kind: pa.DataType) -> tuple[str, str] | None:
    """Two fields of one struct that DuckDB takes for one."""
    if not pt.is_nested(kind):
        return None
    fields = [kind.field(number) for number in range(kind.num_fields)]
    seen: dict[str, str] = {}
    for field in fields if pt.is_struct(kind) else []:
        if field.name.lower() in seen:
            return seen[field.name.lower()], field.name
        seen[field.name.lower()] = field.name
    return next((found for field in fields if (found := _alike(field.type)) is not None), None)


def _lossy(kind: pa.DataType) -> bool:
    if pt.is_nested(kind):
        return any(_lossy(kind.field(number).type) for number in range(kind.num_fields))
    return pt.is_decimal256(kind) or isinstance(kind, pa.BaseExtensionType)
