"""Bijections as files: Parquet."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from flexshard._internal import DocumentFormat, PathLike, replacing
from flexshard.embeddings.ordering.bijection import IndexBijection
from flexshard.errors import TableError

__all__ = ["load_bijection", "save_bijection"]

FORMAT = DocumentFormat(
    "flexshard.bijection", 1, "an index bijection of version 1", "index bijections", TableError, "make it again"
)


def save_bijection(bijection: IndexBijection, path: PathLike) -> None:
    """See :meth:`IndexBijection.save`."""
    metadata = FORMAT.to_metadata({"num_rows": bijection.num_rows})
    schema = pa.schema({"row": pa.int64()}, metadata=metadata)
    table = pa.table({"row": bijection.ranked_rows.astype(np.int64)}, schema=schema)
    with replacing(path) as draft:
        pq.write_table(table, draft, compression="zstd")


def load_bijection(path: PathLike) -> IndexBijection:
    """See :meth:`IndexBijection.load`."""
    try:
        with pq.ParquetFile(path) as file:
            metadata = file.schema_arrow.metadata
            rows = file.read(columns=["row"]).column("row").to_numpy()
    except FileNotFoundError:
        raise TableError(f"{path}: no such file") from None
    except Exception as error:  # Arrow raises many kinds on damaged files
        raise TableError(f"{path}: not an index bijection, or damaged: {str(error).splitlines()[0]}") from error
    about = FORMAT.of_metadata(metadata, str(path))
    try:
        return IndexBijection(rows, int(about["num_rows"]))
    except (TableError, KeyError, TypeError, ValueError) as error:
        raise TableError(f"{path}: {error}; {FORMAT.remedy}") from error
