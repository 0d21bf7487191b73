"""Mappings from values to dense ids: Parquet files that any tool joins back."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from flexshard._internal import DocumentFormat, PathLike
from flexshard.errors import DataError

__all__ = ["FORMAT", "Mapping", "load_mapping", "mapping_path"]

FORMAT = DocumentFormat(
    "flexshard.mapping", 1, "a mapping that 'flexshard encode' wrote", "mappings", DataError, "encode the data anew"
)
NULLS = ("drop", "keep")


@dataclass(frozen=True)
class Mapping:
    """How a column's values were numbered, the most frequent first.

    Attributes:
        path: of the file, whose columns are value, row and count.
        column: that it was made of.
        rows: ids, from 0 on.
        nulls: "drop" where ids that are null were left out, "keep" where they have a row; None where there were none.
        separator: at which texts were cut into lists, if any.
    """

    path: str
    column: str
    rows: int
    nulls: str | None
    separator: str | None

    @property
    def is_of_texts(self) -> bool:
        """Whether its values are."""
        return pq.read_schema(self.path).field("value").type in (pa.string(), pa.large_string())

    @property
    def metadata(self) -> str:
        """What its file says of itself."""
        about = {"column": self.column, "rows": self.rows, "nulls": self.nulls, "separator": self.separator}
        return json.dumps(FORMAT.stamped(about))


def mapping_path(output: Path, column: str) -> Path:
    """Where the mapping of a column is written."""
    stem = output.name.removesuffix(".parquet")
    return output.with_name(f"{stem}.{column.replace(os.sep, '_')}.mapping.parquet")


def load_mapping(path: PathLike) -> Mapping:
    """Read what a mapping says of itself.

    Raises:
        DataError: no mapping, of another version, or broken; names file and field.
    """
    name = str(path)
    try:
        schema = pq.read_schema(path)
    except FileNotFoundError as error:
        raise DataError(f"{name}: no such file") from error
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{name}: not a mapping that 'flexshard encode' wrote: no Parquet file") from error
    about = FORMAT.of_metadata(schema.metadata, name)
    if schema.names != ["value", "row", "count"]:
        raise DataError(f"{name}: a mapping has the columns value, row and count; found {', '.join(schema.names)}")
    column, rows, nulls, separator = (about.get(key) for key in ("column", "rows", "nulls", "separator"))
    if not isinstance(column, str) or not isinstance(rows, int) or nulls not in (None, *NULLS):
        raise DataError(f"{name}: a mapping whose metadata is broken: {about}")
    return Mapping(name, column, rows, nulls, separator if isinstance(separator, str) else None)
