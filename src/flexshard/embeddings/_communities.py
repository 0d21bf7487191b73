"""Rows that are read together, next to each other: the index graph and its communities (EL-Rec paper, section IV)."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from flexshard.errors import MissingDependencyError, TableError

__all__ = ["community_order", "index_graph"]

IntArray = npt.NDArray[np.int64]


def index_graph(
    batches: Iterable[npt.NDArray[np.integer[Any]]],
    rank_of: npt.NDArray[np.integer[Any]],
    hot: int,
    *,
    pairs_per_batch: int,
    max_pairs: int,
    seed: int,
) -> tuple[IntArray, IntArray]:
    """Pairs of cold rows that share a batch, and how often (Algorithm 2).

    The published algorithm takes every pair of a batch, which grows with the square of it; here pairs are drawn, as
    many of each batch, and reservoir sampling keeps at most ``max_pairs`` of all: a pair is kept in proportion to the
    batches that it shares.

    Args:
        batches: ids of each batch, any number of times each.
        rank_of: rank of every row by frequency; shape (E,).
        hot: rows of rank below it are hot, and take no part.
        pairs_per_batch: drawn of each batch.
        max_pairs: kept of all batches.
        seed: of the draws.

    Returns:
        pairs of ranks less ``hot``, the smaller first, ascending, shape (edges, 2), and their counts.
    """
    generator = np.random.default_rng(seed)
    kept = np.zeros((0, 2), np.int64)
    waiting: list[IntArray] = []
    seen = held = 0
    for batch in batches:
        cold = np.unique(rank_of[batch])
        cold = cold[cold >= hot].astype(np.int64) - hot
        if cold.size < 2:
            continue
        count = min(pairs_per_batch, cold.size * (cold.size - 1) // 2)
        first = generator.integers(0, cold.size, count)
        second = (first + generator.integers(1, cold.size, count)) % cold.size
        pairs = np.stack([cold[np.minimum(first, second)], cold[np.maximum(first, second)]], axis=1)
        waiting.append(pairs)
        held += count
        seen += count
        if held >= max_pairs:
            kept = _thinned(kept, waiting, seen - held, seen, max_pairs, generator)
            waiting, held = [], 0
    kept = _thinned(kept, waiting, seen - held, seen, max_pairs, generator)
    edges, counts = np.unique(kept, axis=0, return_counts=True) if kept.size else (kept, np.zeros(0, np.int64))
    return edges, counts


def _thinned(
    kept: IntArray, waiting: list[IntArray], before: int, seen: int, most: int, generator: np.random.Generator
) -> IntArray:
    """At most ``most`` pairs, each of all that were seen with the same probability."""
    new = np.concatenate(waiting) if waiting else np.zeros((0, 2), np.int64)
    if seen <= most:
        return np.concatenate([kept, new])
    share = new.shape[0] / seen if seen else 0.0
    number = min(int(generator.binomial(most, share)), new.shape[0])
    old = min(most - number, kept.shape[0])
    chosen = kept[generator.choice(kept.shape[0], old, replace=False)] if before else kept
    return np.concatenate([chosen, new[generator.choice(new.shape[0], number, replace=False)]])


def community_order(edges: IntArray, counts: IntArray, cold: int, *, seed: int) -> IntArray:
    """Cold rows in their new order: communities one after the other, the one with the hottest row first; within one by
    frequency; rows in no edge where their frequency puts them last.

    Args:
        edges, counts: as :func:`index_graph` gives them.
        cold: rows in all.
        seed: of the communities' search (Louvain, which maximises modularity level by level; Blondel et al. 2008).

    Returns:
        ranks less ``hot``, in order; shape (cold,).

    Raises:
        MissingDependencyError: igraph is not installed.
    """
    try:
        import igraph
    except ImportError as error:
        raise MissingDependencyError("communities need igraph; pip install 'flexshard[fast]'") from error
    if edges.size and int(edges.max()) >= cold:
        raise TableError(f"an edge names row {int(edges.max())}, but there are {cold}")
    rows, compact = np.unique(edges, return_inverse=True)
    if not rows.size:
        return np.arange(cold)
    igraph.set_random_number_generator(random.Random(seed))
    graph = igraph.Graph(n=rows.size, edges=compact.reshape(-1, 2))
    member = np.array(graph.community_multilevel(weights=counts.tolist()).membership)
    # Communities in order of their hottest row, whose rank is the least.
    hottest = np.full(int(member.max()) + 1, cold)
    np.minimum.at(hottest, member, rows)
    together = rows[np.lexsort((rows, hottest[member]))]
    alone = np.ones(cold, bool)
    alone[rows] = False
    return np.concatenate([together, np.flatnonzero(alone)])
