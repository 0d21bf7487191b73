"""YAML that people write: checked by a pydantic model, with errors that name file, line and field."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from flexshard._files import read_text
from flexshard.errors import FlexShardError

__all__ = ["load_yaml", "located"]

ModelT = TypeVar("ModelT", bound=BaseModel)
Location = Sequence[str | int]

# Pydantic puts the branch of a union that it tried into a field's place.
_UNION_BRANCHES = ("str", "dict[str,float]", "int", "float")


def load_yaml(
    path: str | os.PathLike[str], model: type[ModelT], *, kind: str, version: int, error_type: type[FlexShardError]
) -> tuple[ModelT, yaml.Node]:
    """Read and check a YAML document of one ``kind`` (its ``format`` field) and version.

    Returns the model and the composed tree, with which :func:`located` finds the line of a field.

    Raises:
        error_type: not readable, not YAML, of another format or version, or not what the model asks for.
    """
    text = read_text(path, error_type)
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except (ValueError, RecursionError) as error:
        raise error_type(f"{path}: not valid YAML: {str(error).splitlines()[0]}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise error_type(f"{path}{line}: not valid YAML: {problem}") from error
    if tree is None or not isinstance(data, dict):
        raise error_type(f"{path}: expected a YAML mapping with 'format: {kind}', found {type(data).__name__}")
    _check_keys(path, tree, error_type)
    if data.pop("format", None) != kind:
        raise error_type(f"{located(path, tree, ['format'])}: expected 'format: {kind}' in this file")
    found = data.pop("version", None)
    if found != version:
        raise error_type(
            f"{located(path, tree, ['version'])}: version {found!r} of {kind} is unknown;"
            f" this FlexShard reads {version}"
        )
    try:
        return model.model_validate(data), tree
    except ValidationError as error:
        first = error.errors()[0]
        loc = [part for part in first["loc"] if isinstance(part, int) or part not in _UNION_BRANCHES]
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "missing":
            message = "this field is required"
        elif first["type"] == "extra_forbidden":
            message = "this field is unknown"
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise error_type(f"{located(path, tree, loc)}: {message}{more}") from error


def _check_keys(path: str | os.PathLike[str], node: Any, error_type: type[FlexShardError]) -> None:
    """YAML lets the last of two equal keys win; a person who wrote both meant something else."""
    if isinstance(node, yaml.SequenceNode):
        for child in node.value:
            _check_keys(path, child, error_type)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[str] = set()
    for key, value in node.value:
        name = str(key.value)
        if name in seen:
            raise error_type(f"{path}:{key.start_mark.line + 1}: {name}: this field is given twice; remove one")
        seen.add(name)
        _check_keys(path, value, error_type)


def located(path: str | os.PathLike[str], tree: yaml.Node, loc: Location) -> str:
    """``file:line: field`` of a place in a YAML tree; the nearest parent's line where the field itself is missing."""
    node, line = tree, tree.start_mark.line
    for part in loc:
        found = _child(node, part)
        if found is None:
            break
        node, line = found
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")
    return f"{path}:{line + 1}" + (f": {field}" if field else "")


def _child(node: Any, part: str | int) -> tuple[yaml.Node, int] | None:
    """A part of a node, and the line at which a reader looks for it: that of its key, or of its first character."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == str(part):
                return value, key.start_mark.line
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part], node.value[part].start_mark.line
    return None
