"""Tensors and modules that stand alone: the index bijection."""

from flexshard.embeddings._bijection import IndexBijection

__all__ = ["IndexBijection"]
