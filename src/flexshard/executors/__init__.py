"""A plan on a real model: sharded modules, observation, replay, checkpoints."""

from typing import TYPE_CHECKING, Any

from flexshard.executors._layout import Layout, Piece

if TYPE_CHECKING:
    from flexshard.executors._sharded import ShardedFlexShardEmbeddingCollection
    from flexshard.executors._sharder import FlexShardEmbeddingCollectionSharder
    from flexshard.executors._translation import Translator

__all__ = [
    "FlexShardEmbeddingCollectionSharder",
    "Layout",
    "Piece",
    "ShardedFlexShardEmbeddingCollection",
    "Translator",
]

_NEED_TORCHREC = {
    "FlexShardEmbeddingCollectionSharder": "_sharder",
    "ShardedFlexShardEmbeddingCollection": "_sharded",
    "Translator": "_translation",
}


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCHREC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from flexshard._values import from_extra

    return from_extra(f"{__name__}.{_NEED_TORCHREC[name]}", name)
