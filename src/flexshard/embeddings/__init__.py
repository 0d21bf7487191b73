"""Tensors and modules that stand alone: the index bijection, deduplicated batches, tensor-train tables."""

from typing import TYPE_CHECKING

from flexshard._jagged import Distinct, JaggedArray, distinct_rows, jagged_of_arrow, shared_runs
from flexshard._tt_shape import TTShape
from flexshard._values import from_extra
from flexshard.embeddings._bijection import IndexBijection

if TYPE_CHECKING:
    from flexshard.embeddings._deduped import (
        Deduped,
        DedupedEmbeddingBagCollection,
        DedupedEmbeddingCollection,
        DedupedJagged,
    )
    from flexshard.embeddings._inverse import DedupedGroup, InverseKeyedJaggedTensor
    from flexshard.embeddings._partial import PartialJaggedTensor
    from flexshard.embeddings._reindex import Reindex
    from flexshard.embeddings._select import jagged_index_select
    from flexshard.embeddings._tt_compress import (
        CompressedEmbeddingBagCollection,
        CompressedEmbeddingCollection,
        CompressedTable,
        compress,
    )
    from flexshard.embeddings._tt_embedding import TTEmbedding, TTEmbeddingBag

__all__ = [
    "CompressedEmbeddingBagCollection",
    "CompressedEmbeddingCollection",
    "CompressedTable",
    "Deduped",
    "DedupedEmbeddingBagCollection",
    "DedupedEmbeddingCollection",
    "DedupedGroup",
    "DedupedJagged",
    "Distinct",
    "IndexBijection",
    "InverseKeyedJaggedTensor",
    "JaggedArray",
    "PartialJaggedTensor",
    "Reindex",
    "TTEmbedding",
    "TTEmbeddingBag",
    "TTShape",
    "compress",
    "distinct_rows",
    "jagged_index_select",
    "jagged_of_arrow",
    "shared_runs",
]

__getattr__ = from_extra(
    __name__,
    {
        "CompressedEmbeddingBagCollection": "_tt_compress",
        "CompressedEmbeddingCollection": "_tt_compress",
        "CompressedTable": "_tt_compress",
        "Deduped": "_deduped",
        "DedupedEmbeddingBagCollection": "_deduped",
        "DedupedEmbeddingCollection": "_deduped",
        "DedupedGroup": "_inverse",
        "DedupedJagged": "_deduped",
        "InverseKeyedJaggedTensor": "_inverse",
        "PartialJaggedTensor": "_partial",
        "Reindex": "_reindex",
        "TTEmbedding": "_tt_embedding",
        "TTEmbeddingBag": "_tt_embedding",
        "compress": "_tt_compress",
        "jagged_index_select": "_select",
    },
)
