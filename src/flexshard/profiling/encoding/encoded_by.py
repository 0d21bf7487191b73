"""Which mapping numbered a column's ids, as encoded files say of themselves."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from flexshard._internal import ParquetSource, PathLike
from flexshard.errors import DataError

__all__ = ["METADATA_KEY", "check_not_yet_encoded", "digest_of", "encoded_by", "encodings"]

METADATA_KEY = "flexshard.encoded"


def digest_of(mapping: PathLike) -> str:
    """Of a mapping: two of the same digest give each value, as a text, the same row."""
    lengths, texts = hashlib.sha256(), hashlib.sha256()
    with pq.ParquetFile(mapping) as file:  # its values are in the order of their rows
        for batch in file.iter_batches(columns=["value"]):
            values = _as_bytes(batch.column(0))
            lengths.update(pc.binary_length(values).fill_null(-1).to_numpy().astype("<i8").tobytes())
            texts.update(b"".join(values.drop_null().to_pylist()))
    return hashlib.sha256(lengths.digest() + texts.digest()).hexdigest()[:16]


def _as_bytes(values: pa.Array) -> pa.Array:
    """Values as they are written, in UTF-8; bytes as they are."""
    if isinstance(values, pa.ExtensionArray):  # UUIDs
        values = values.storage
    kind = values.type
    is_bytes = pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)
    return (values if is_bytes else values.cast(pa.large_string())).cast(pa.large_binary())


def encodings(schema: pa.Schema) -> dict[str, str]:
    """Digests of mappings by the column that each numbered, from a file's metadata."""
    try:
        said = json.loads((schema.metadata or {}).get(METADATA_KEY.encode(), b"{}"))
    except ValueError:
        return {}
    return {name: text for name, text in said.items() if isinstance(text, str)} if isinstance(said, dict) else {}


def encoded_by(sources: Sequence[ParquetSource], column: str) -> str | None:
    """The digest of the mapping that numbered a column of all files; None where not all of them say.

    Raises:
        DataError: two files whose ids are of two mappings, so that one id is two values.
    """
    digests = [encodings(source.schema).get(column) for source in sources]
    first: dict[str, str] = {}
    for source, digest in zip(sources, digests, strict=True):
        if digest is not None:
            first.setdefault(digest, source.name)
    if len(first) > 1:
        one, other, *_ = first.values()
        raise DataError(
            f"{other}: ids of column {column!r} were encoded by another mapping than those of {one}, so that one id is"
            " two values; encode both together, or one with the mapping of the other (--mapping)"
        )
    return None if None in digests else digests[0]


def check_not_yet_encoded(files: Iterable[tuple[str, pa.Schema]], column: str, mapping: str, digest: str) -> None:
    """Whether a column of files may be encoded by a mapping.

    Raises:
        DataError: in one of them it holds that mapping's rows already.
    """
    for file, schema in files:
        if encodings(schema).get(column) == digest:
            raise DataError(
                f"{file}: column {column!r} holds rows of {mapping} already; use it as it is, without the mapping"
            )
