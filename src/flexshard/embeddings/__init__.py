"""Tensors and modules that stand alone: rows in another order (ordering/), deduplicated batches (dedup/), tensor-train
tables (tensor_train/).

May import: errors, units, _internal, profiling, tables. Needs torch, but for IndexBijection.
"""

from typing import TYPE_CHECKING

from flexshard._internal.lazy import lazy_exports

if TYPE_CHECKING:
    from flexshard._internal import (
        Distinct as Distinct,
        JaggedArray as JaggedArray,
        distinct_rows as distinct_rows,
        jagged_of_arrow as jagged_of_arrow,
        shared_runs as shared_runs,
    )
    from flexshard.embeddings.dedup.collections import (
        DedupedEmbeddingBagCollection as DedupedEmbeddingBagCollection,
        DedupedEmbeddingCollection as DedupedEmbeddingCollection,
    )
    from flexshard.embeddings.dedup.group import DedupedGroup as DedupedGroup
    from flexshard.embeddings.dedup.inverse import InverseKeyedJaggedTensor as InverseKeyedJaggedTensor
    from flexshard.embeddings.dedup.jagged import DedupedJagged as DedupedJagged
    from flexshard.embeddings.dedup.keyed import arrow_columns as arrow_columns
    from flexshard.embeddings.dedup.modules import (
        Deduped as Deduped,
        DedupedCausal as DedupedCausal,
        DedupedPerSample as DedupedPerSample,
    )
    from flexshard.embeddings.dedup.partial import PartialJaggedTensor as PartialJaggedTensor
    from flexshard.embeddings.dedup.runs import Runs as Runs
    from flexshard.embeddings.dedup.selection import jagged_index_select as jagged_index_select
    from flexshard.embeddings.dedup.target_attention import TargetAttention as TargetAttention
    from flexshard.embeddings.ordering.bijection import IndexBijection as IndexBijection
    from flexshard.embeddings.ordering.reindexing import Reindex as Reindex
    from flexshard.embeddings.tensor_train.compressed import (
        CompressedEmbeddingBagCollection as CompressedEmbeddingBagCollection,
        CompressedEmbeddingCollection as CompressedEmbeddingCollection,
    )
    from flexshard.embeddings.tensor_train.compression import CompressedTable as CompressedTable, compress as compress
    from flexshard.embeddings.tensor_train.embedding import TTEmbedding as TTEmbedding, TTEmbeddingBag as TTEmbeddingBag
    from flexshard.embeddings.tensor_train.in_backward import updated_in_backward as updated_in_backward
    from flexshard.tables import TTShape as TTShape

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "dedup.collections": ["DedupedEmbeddingBagCollection", "DedupedEmbeddingCollection"],
        "dedup.group": ["DedupedGroup"],
        "dedup.inverse": ["InverseKeyedJaggedTensor"],
        "dedup.jagged": ["DedupedJagged"],
        "dedup.keyed": ["arrow_columns"],
        "dedup.modules": ["Deduped", "DedupedCausal", "DedupedPerSample"],
        "dedup.partial": ["PartialJaggedTensor"],
        "dedup.runs": ["Runs"],
        "dedup.selection": ["jagged_index_select"],
        "dedup.target_attention": ["TargetAttention"],
        "flexshard._internal": ["Distinct", "JaggedArray", "distinct_rows", "jagged_of_arrow", "shared_runs"],
        "flexshard.tables": ["TTShape"],
        "ordering.bijection": ["IndexBijection"],
        "ordering.reindexing": ["Reindex"],
        "tensor_train.compressed": ["CompressedEmbeddingBagCollection", "CompressedEmbeddingCollection"],
        "tensor_train.compression": ["CompressedTable", "compress"],
        "tensor_train.embedding": ["TTEmbedding", "TTEmbeddingBag"],
        "tensor_train.in_backward": ["updated_in_backward"],
    },
)

# Methods of values whose bodies stand in files that know the value.
VALUE_METHODS = {
    "IndexBijection.save": "ordering.bijection_file:save_bijection",
    "IndexBijection.load": "ordering.bijection_file:load_bijection",
    "InverseKeyedJaggedTensor.save": "dedup.inverse_file:save_batch",
    "InverseKeyedJaggedTensor.load": "dedup.inverse_file:load_batch",
}
