"""Deduplicated batches among torch's pytrees, with the paths of their leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch.utils._pytree as pytree

__all__ = ["register"]


def register(
    kind: type,
    flatten: Callable[[Any], tuple[list[Any], Any]],
    unflatten: Callable[[Iterable[Any], Any], Any],
    *names: str,
) -> None:
    """Take a class up; ``names`` are its attributes that ``flatten`` gives, which are numbered where none are named."""

    def with_keys(tree: Any) -> tuple[list[tuple[Any, Any]], Any]:
        children, context = flatten(tree)
        keys = [pytree.GetAttrKey(name) for name in names] or [pytree.SequenceKey(i) for i in range(len(children))]
        return list(zip(keys, children, strict=True)), context

    pytree.register_pytree_node(
        kind,
        flatten,
        unflatten,
        serialized_type_name=f"flexshard.{kind.__name__}",
        flatten_with_keys_fn=with_keys,
    )
