"""A plan on a real model: sharded modules, observation, replay, checkpoints."""

from typing import TYPE_CHECKING

from flexshard._values import from_extra
from flexshard.executors._layout import Layout, Piece
from flexshard.executors._observation import Observation, ObservedCollective
from flexshard.executors._predicted import Comparison, ComparisonLine, compare_observed, predicted_bytes
from flexshard.executors._replay import Lookups, Replay, Traffic, deal, replay

if TYPE_CHECKING:
    from flexshard.executors._calibrate import calibrate
    from flexshard.executors._checkpoint import full_state_dict, load_checkpoint, save_checkpoint
    from flexshard.executors._observer import Observer
    from flexshard.executors._reshard import Resharded, reshard
    from flexshard.executors._sharded import ShardedFlexShardEmbeddingCollection
    from flexshard.executors._sharder import FlexShardEmbeddingCollectionSharder
    from flexshard.executors._translation import Translator

__all__ = [
    "Comparison",
    "ComparisonLine",
    "FlexShardEmbeddingCollectionSharder",
    "Layout",
    "Lookups",
    "Observation",
    "ObservedCollective",
    "Observer",
    "Piece",
    "Replay",
    "Resharded",
    "ShardedFlexShardEmbeddingCollection",
    "Traffic",
    "Translator",
    "calibrate",
    "compare_observed",
    "deal",
    "full_state_dict",
    "load_checkpoint",
    "predicted_bytes",
    "replay",
    "reshard",
    "save_checkpoint",
]

__getattr__ = from_extra(
    __name__,
    {
        "FlexShardEmbeddingCollectionSharder": "_sharder",
        "Observer": "_observer",
        "Resharded": "_reshard",
        "ShardedFlexShardEmbeddingCollection": "_sharded",
        "Translator": "_translation",
        "calibrate": "_calibrate",
        "full_state_dict": "_checkpoint",
        "load_checkpoint": "_checkpoint",
        "reshard": "_reshard",
        "save_checkpoint": "_checkpoint",
    },
)
