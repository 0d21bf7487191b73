"""YAML that people write: checked by a pydantic model, with errors that name file, line and field."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from flexshard._internal.documents import DocumentFormat
from flexshard._internal.files import PathLike, read_text, write_text
from flexshard.errors import FlexShardError

__all__ = ["StrictModel", "load_yaml", "located", "save_yaml"]

ModelT = TypeVar("ModelT", bound=BaseModel)
Location = Sequence[str | int]

# Pydantic puts the branch of a union that it tried into a field's place.
_UNION_BRANCHES = ("str", "dict[str,float]", "int", "float", "bool")
_OTHER_BASE = re.compile(r"[-+]?(0[0-7_]+$|[\d_]+:)")
_EXPONENT = re.compile(r"([-+]?)(\d+\.?\d*)[eE]([-+]?)(\d+)")


class StrictModel(BaseModel):
    """A mapping in which an unknown field, a value of another type or an infinite number is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def save_yaml(path: PathLike, kind: DocumentFormat, body: Mapping[str, Any]) -> None:
    """Write a YAML document whole or not at all.

    Raises:
        OutputError: it could not be written.
    """
    write_text(path, yaml.safe_dump(kind.stamped(body), sort_keys=False, allow_unicode=True))


def load_yaml(path: PathLike, model: type[ModelT], kind: DocumentFormat) -> tuple[ModelT, yaml.Node]:
    """Read a YAML document and check it by a model of its fields.

    Returns the model and the composed tree, with which :func:`located` finds the line of a field.

    Raises:
        error_type: of the kind; not readable, not YAML, of another format or version, or not what the model asks for.
    """
    error_type = kind.error_type
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
        raise error_type(f"{path}: expected a YAML mapping with 'format: {kind.name}', found {type(data).__name__}")
    try:
        _check_nodes(path, tree, error_type)
    except RecursionError as error:
        raise error_type(f"{path}: not valid YAML: something in it is a part of itself, or too deep") from error
    if data.pop("format", None) != kind.name:
        raise error_type(f"{located(path, tree, ['format'])}: expected 'format: {kind.name}' in this file")
    kind.check_version(data.pop("version", None), located(path, tree, ["version"]))
    try:
        return model.model_validate(data), tree
    except ValidationError as error:
        # A field that is unknown is more often than not the misspelt one that another error misses.
        errors = error.errors()
        first = min(errors, key=lambda found: found["type"] != "extra_forbidden")
        # Of what a field may be, the one that it is nearest to: whose own parts are wrong.
        first = max((one for one in errors if _field(one) == _field(first)), key=lambda one: len(one["loc"]))
        loc = [part for part in first["loc"] if isinstance(part, int) or part not in _UNION_BRANCHES]
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "missing":
            message = "this field is required"
        elif first["type"] == "extra_forbidden":
            message = "this field is unknown" + _hint(model, loc)
        elif first["type"] == "string_type":
            message = f"expected text, found {first['input']!r}; put a text in quotes"
        elif first["type"] == "model_type":
            message = f"expected fields, each with its value, found {first['input']!r}"
        elif first["type"].startswith(("int_", "float_")) and (number := _EXPONENT.fullmatch(str(first["input"]))):
            as_yaml = _as_yaml(number, whole=first["type"].startswith("int_"))
            message = f"YAML takes {first['input']} for a text; write {as_yaml}"
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise error_type(f"{located(path, tree, loc)}: {message}{more}") from error


def _as_yaml(number: re.Match[str], *, whole: bool) -> str:
    """How YAML wants a number with an exponent that it took for a text; ``whole`` where the field has to be."""
    value = float(number[0])
    if whole and abs(value) < 1 << 53 and value.is_integer():
        return f"{value:.0f}"
    sign, digits, of_power, power = number.groups()
    return f"{sign}{digits}{'' if '.' in digits else '.0'}e{of_power or '+'}{power}"


def _field(error: Any) -> Any:
    """Where an error is, up to the first of the branches that the field may be."""
    loc = error["loc"]
    return loc[: next((at for at, part in enumerate(loc) if part in _UNION_BRANCHES), len(loc))]


def _hint(model: type[BaseModel], loc: Sequence[str | int]) -> str:
    """Where an unknown field would be known, if at one other place, or which one its name is nearest to."""
    name, fields = str(loc[-1]), _fields(model)
    if name in fields:
        owner, *others = fields[name]
        if others or owner in ({str(part) for part in loc[:-1]} or {""}):
            return ""
        return f" here; it belongs {f'to {owner}' if owner else 'at the top'}"
    nearest = difflib.get_close_matches(name, sorted(fields), n=1)
    return f"; do you mean {nearest[0]}?" if nearest else ""


def _fields(model: type[BaseModel]) -> dict[str, list[str]]:
    """Names of a model's fields, and of those of the models in them, as people write them; of which fields each is."""
    names: dict[str, list[str]] = {}
    parts: list[tuple[Any, str]] = [(model, "")]
    while parts:
        part, owner = parts.pop(0)
        if isinstance(part, type) and issubclass(part, BaseModel):
            for name, field in part.model_fields.items():
                owners = names.setdefault(field.alias or name, [])
                if owner not in owners:
                    owners.append(owner)
                parts.append((field.annotation, field.alias or name))
        parts += [(one, owner) for one in get_args(part)]
    return names


def _check_nodes(path: PathLike, node: Any, error_type: type[FlexShardError]) -> None:
    """YAML lets the last of two equal keys win, and takes 0256 for 174 and 4:16 for 256; a person meant something
    else.
    """
    if isinstance(node, yaml.SequenceNode):
        for child in node.value:
            _check_nodes(path, child, error_type)
    if isinstance(node, yaml.ScalarNode) and node.tag.endswith((":int", ":float")) and _OTHER_BASE.match(node.value):
        taken = yaml.safe_load(node.value)
        raise error_type(
            f"{path}:{node.start_mark.line + 1}: YAML takes {node.value} for {taken}; write a number in digits that do"
            " not begin with 0, without colons, and a text in quotes"
        )
    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[str] = set()
    for key, value in node.value:
        name = str(key.value)
        if name in seen:
            raise error_type(f"{path}:{key.start_mark.line + 1}: {name}: this field is given twice; remove one")
        seen.add(name)
        _check_nodes(path, value, error_type)


def located(path: PathLike, tree: yaml.Node, loc: Location) -> str:
    """``file:line: field`` of a place in a YAML tree; the nearest parent's line where the field itself is missing."""
    node, line = tree, tree.start_mark.line
    for part in loc:
        child = _child(node, part)
        if child is None:
            break
        node, line = child
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
