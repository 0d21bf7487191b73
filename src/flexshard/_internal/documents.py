"""Files with a format and a version: one header, one way to say what is wrong, values decoded by their types.

All of FlexShard's files say what they are in the fields ``format`` and ``version``: JSON and YAML documents at the top,
Parquet files and archives in a JSON text beside the data.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import types
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar, get_args, get_type_hints

from flexshard._internal.files import PathLike, read_text, write_text
from flexshard.errors import FlexShardError

__all__ = ["DocumentFormat", "decode", "digest_of", "format_of", "read_json", "with_names", "write_json"]

ValueT = TypeVar("ValueT")
Body = dict[str, Any]

# The key of the header in the metadata of Parquet files.
_METADATA_KEY = b"flexshard"


@dataclasses.dataclass(frozen=True)
class DocumentFormat:
    """One kind of file.

    Attributes:
        name: its ``format`` field, such as "flexshard.plan".
        version: its ``version`` field; others are refused, but for
        older: those that are read as well.
        noun: what people call it, with its article, such as "a plan".
        plural: of the noun.
        error_type: what its readers raise.
        remedy: what to do about a file that is refused.
    """

    name: str
    version: int
    noun: str
    plural: str
    error_type: type[FlexShardError]
    remedy: str
    older: tuple[int, ...] = ()

    def stamped(self, body: Mapping[str, Any], *, version: int | None = None) -> Body:
        """A document: the header, then the body; of an older version where one is given."""
        return {"format": self.name, "version": self.version if version is None else version, **body}

    def body_of(self, document: Any, where: str, *, expected: str = "") -> Body:
        """The fields of a document besides its header.

        Args:
            document: as it was parsed.
            where: the file, for messages.
            expected: what was looked for or found instead, for messages.

        Raises:
            error_type: of another format or version.
        """
        if not isinstance(document, dict) or document.get("format") != self.name:
            what = expected or f"; expected 'format': '{self.name}'"
            raise self.error_type(f"{where}: not {self.noun}{what}; {self.remedy}")
        self.check_version(document.get("version"), where)
        return {key: value for key, value in document.items() if key not in ("format", "version")}

    def check_version(self, found: Any, where: str) -> None:
        """Raise ``error_type`` if this is not the version that is read."""
        known = (*self.older, self.version)
        if found not in known or isinstance(found, bool):
            raise self.error_type(
                f"{where}: version {found!r} of {self.plural} is unknown; this FlexShard reads"
                f" {' and '.join(map(str, known))}: {self.remedy}"
            )

    def to_metadata(self, body: Mapping[str, Any]) -> dict[bytes, bytes]:
        """The header and some fields as metadata of an Arrow schema."""
        return {_METADATA_KEY: json.dumps(self.stamped(body)).encode()}

    def of_metadata(self, metadata: Mapping[bytes, bytes] | None, where: str) -> Body:
        """The fields that :meth:`to_metadata` wrote; raises as :meth:`body_of`."""
        raw = (metadata or {}).get(_METADATA_KEY)
        try:
            document = None if raw is None else json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise self.error_type(f"{where}: its metadata 'flexshard' is not JSON: {error}") from error
        return self.body_of(document, where, expected=" but other Parquet data")


def with_names(document: Any, names: Mapping[str, str]) -> Any:
    """A document with other names for some fields, at any depth, in their places."""
    if isinstance(document, dict):
        return {names.get(key, key): with_names(value, names) for key, value in document.items()}
    if isinstance(document, (list, tuple)):
        return type(document)(with_names(value, names) for value in document)
    return document


def digest_of(body: Mapping[str, Any]) -> str:
    """SHA-256 of a JSON body in canonical form, in hexadecimal."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def write_json(path: PathLike, document: Mapping[str, Any]) -> None:
    """Write a JSON document whole or not at all; the same document gives the same bytes.

    Raises:
        OutputError: it could not be written.
    """
    write_text(path, json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def read_json(path: PathLike, kind: DocumentFormat, *, digest: Callable[[Body], str] | None = None) -> Body:
    """The body of a JSON document, less its header and (with ``digest``) its fingerprint.

    Args:
        path: the file.
        kind: what it should be.
        digest: of the body, which the document's ``fingerprint`` must equal.

    Raises:
        error_type: of the kind; not readable, not JSON (names the line), of another format or version, or changed since
            it was written.
    """
    text = read_text(path, kind.error_type).removeprefix("\ufeff")  # which some editors write first
    try:
        document = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise kind.error_type(f"{path}:{error.lineno}: not valid JSON: {error.msg}; {kind.remedy}") from error
    except (ValueError, RecursionError) as error:
        raise kind.error_type(f"{path}: not {kind.noun}: {str(error).splitlines()[0]}; {kind.remedy}") from error
    body = kind.body_of(document, str(path), expected=f"; expected a JSON object with 'format': '{kind.name}'")
    if digest is None:
        return body
    written = body.pop("fingerprint", None)
    try:
        stored_digest = digest(body)
    except (KeyError, TypeError, AttributeError, ValueError):
        stored_digest = None
    if stored_digest != written:
        raise kind.error_type(
            f"{path}: its content does not match its fingerprint; it was edited or damaged: {kind.remedy}"
        )
    return body


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number that a file may hold")


def format_of(path: PathLike, error_type: type[FlexShardError]) -> str | None:
    """The ``format`` of a JSON file; None where it has none."""
    try:
        document = json.loads(read_text(path, error_type))
    except (ValueError, RecursionError):
        return None
    name = document.get("format") if isinstance(document, dict) else None
    return name if isinstance(name, str) else None


def decode(cls: type[ValueT], body: Any, where: str, kind: DocumentFormat) -> ValueT:
    """A value from the parsed JSON of its fields, by the types of the dataclass: lists become tuples, nothing else is
    converted, and no field may be missing (without a default) or unknown.

    Raises:
        error_type: of the kind; names the field.
    """
    from pydantic import ValidationError  # takes longer to import than planning a table

    try:
        # Strict checks take tuples from JSON text alone; parsed JSON has only lists.
        value: ValueT = _adapter(cls).validate_json(json.dumps(body), strict=True)  # type: ignore[arg-type]  # a cached function of a type
        return value
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        reason = first["msg"].removeprefix("Value error, ")
        at = f"{where}: {field}" if field else where
        raise kind.error_type(f"{at}: {reason}; {kind.remedy}") from error


@cache
def _adapter(cls: type) -> Any:
    from pydantic import ConfigDict, TypeAdapter

    for part in _dataclasses_in(cls):
        part.__pydantic_config__ = ConfigDict(extra="forbid")  # where pydantic looks for a plain dataclass's own
    return TypeAdapter(cls)


def _dataclasses_in(kind: Any) -> list[Any]:
    """A dataclass and those in its fields, whatever containers they are in."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and not isinstance(kind, types.GenericAlias):
        hints = get_type_hints(kind)
        inner = [part for field in dataclasses.fields(kind) for part in _dataclasses_in(hints[field.name])]
        return [kind, *inner]
    return [part for argument in get_args(kind) for part in _dataclasses_in(argument)]
