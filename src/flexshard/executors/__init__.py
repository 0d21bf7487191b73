"""A plan on a real model: sharded modules (sharding/), what goes over the wire (comm/), the rows that a rank holds
(stores/), caches of those that known batches read (lookahead/), parameters, checkpoints and resharding (state/),
observation and replay (traffic/).

May import: errors, units, _internal, topologies, profiling, tables, costmodels, embeddings, planner. Needs torch,
FBGEMM and TorchRec, but for replay and what compares observations.
"""

from typing import TYPE_CHECKING

from flexshard._internal.lazy import lazy_exports

if TYPE_CHECKING:
    from flexshard.executors.comm.collectives import Collectives as Collectives
    from flexshard.executors.lookahead.pipeline import LookaheadPipeline as LookaheadPipeline
    from flexshard.executors.servers.embedding_servers import EmbeddingServers as EmbeddingServers
    from flexshard.executors.sharding.input_dist import start_input_dist as start_input_dist
    from flexshard.executors.sharding.pooled import (
        ShardedFlexShardEmbeddingBagCollection as ShardedFlexShardEmbeddingBagCollection,
    )
    from flexshard.executors.sharding.sequences import (
        ShardedFlexShardEmbeddingCollection as ShardedFlexShardEmbeddingCollection,
    )
    from flexshard.executors.sharding.sharders import (
        FlexShardEmbeddingBagCollectionSharder as FlexShardEmbeddingBagCollectionSharder,
        FlexShardEmbeddingCollectionSharder as FlexShardEmbeddingCollectionSharder,
    )
    from flexshard.executors.sharding.translation import Translator as Translator
    from flexshard.executors.state.checkpoints import (
        full_state_dict as full_state_dict,
        load_checkpoint as load_checkpoint,
        save_checkpoint as save_checkpoint,
    )
    from flexshard.executors.state.norms import table_norms as table_norms
    from flexshard.executors.state.resharding import Resharded as Resharded, reshard as reshard
    from flexshard.executors.stores.base import RowStore as RowStore
    from flexshard.executors.stores.memory import MemoryStore as MemoryStore
    from flexshard.executors.traffic.observation import (
        Observation as Observation,
        ObservedCall as ObservedCall,
        ObservedCollective as ObservedCollective,
    )
    from flexshard.executors.traffic.observer import Observer as Observer
    from flexshard.executors.traffic.predicted import (
        Comparison as Comparison,
        ComparisonLine as ComparisonLine,
        compare_observed as compare_observed,
        predicted_bytes as predicted_bytes,
    )
    from flexshard.executors.traffic.replayed import Replay as Replay, Traffic as Traffic
    from flexshard.executors.traffic.replaying import (
        Lookups as Lookups,
        replay as replay,
        split_by_rank as split_by_rank,
    )
    from flexshard.executors.traffic.timeline import save_timeline as save_timeline, timeline as timeline

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "comm.collectives": ["Collectives"],
        "lookahead.pipeline": ["LookaheadPipeline"],
        "servers.embedding_servers": ["EmbeddingServers"],
        "sharding.input_dist": ["start_input_dist"],
        "sharding.pooled": ["ShardedFlexShardEmbeddingBagCollection"],
        "sharding.sequences": ["ShardedFlexShardEmbeddingCollection"],
        "sharding.sharders": ["FlexShardEmbeddingBagCollectionSharder", "FlexShardEmbeddingCollectionSharder"],
        "sharding.translation": ["Translator"],
        "state.checkpoints": ["full_state_dict", "load_checkpoint", "save_checkpoint"],
        "state.norms": ["table_norms"],
        "state.resharding": ["Resharded", "reshard"],
        "stores.base": ["RowStore"],
        "stores.memory": ["MemoryStore"],
        "traffic.observation": ["Observation", "ObservedCall", "ObservedCollective"],
        "traffic.observer": ["Observer"],
        "traffic.predicted": ["Comparison", "ComparisonLine", "compare_observed", "predicted_bytes"],
        "traffic.replayed": ["Replay", "Traffic"],
        "traffic.replaying": ["Lookups", "replay", "split_by_rank"],
        "traffic.timeline": ["save_timeline", "timeline"],
    },
    deprecated={
        "Layout": "flexshard.costmodels:Layout",
        "Piece": "flexshard.costmodels:Piece",
        "calibrate": "flexshard.calibration:calibrate",
        "deal": "traffic.replaying:split_by_rank",
    },
)

# Methods of values whose bodies stand in files that know the value.
VALUE_METHODS = {
    "Observation.step_work": "traffic.predicted:step_work",
    "Observation.overlap": "traffic.predicted:overlap_observed",
    "Observation.document": "traffic.observation_file:observation_document",
    "Observation.save": "traffic.observation_file:save_observation",
    "Observation.load": "traffic.observation_file:load_observation",
}
