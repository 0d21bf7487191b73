"""Rows that are read together, next to each other: the index graph and its communities (EL-Rec paper, section IV)."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flexshard.errors import MissingDependencyError, TableError

__all__ = ["IndexGraph", "community_order", "index_graph"]

IntArray = npt.NDArray[np.int64]

_PAIRS_PER_ROW = 16  # that the graph has on average: with fewer, communities do not show
_COMPANIONS = 4  # kept of a row outside the graph


@dataclass(frozen=True)
class IndexGraph:
    """Which cold rows are read together; rows are positions less the number of hot ones.

    Attributes:
        edges: pairs of the more frequent cold rows, the smaller first, ascending; shape (edges, 2).
        counts: how often each was drawn; shape (edges,).
        companions: for each rarer row, those that were drawn from its batches, -1 where fewer were; shape (rare, 4).
    """

    edges: IntArray
    counts: IntArray
    companions: npt.NDArray[np.int32]


def index_graph(
    batches: Iterable[npt.NDArray[np.integer[Any]]],
    position_of: npt.NDArray[np.integer[Any]],
    hot: int,
    *,
    pairs_per_batch: int,
    max_pairs: int,
    seed: int,
) -> IndexGraph:
    """Pairs of cold rows that share a batch (Algorithm 2).

    The published algorithm takes every pair of a batch, which grows with the square of it. Here pairs are drawn, as
    many of each batch, among the most frequent cold rows, few enough for each to have some; reservoir sampling keeps at
    most ``max_pairs`` of all, each in proportion to the batches that it shares. Rarer rows keep a few companions.

    Args:
        batches: ids of each batch, any number of times each.
        position_of: position of every row in order of frequency; shape (E,).
        hot: rows of positions below it are hot, and take no part.
        pairs_per_batch: drawn of each batch.
        max_pairs: kept of all batches.
        seed: of the draws.
    """
    generator = np.random.default_rng(seed)
    most = max(max_pairs // _PAIRS_PER_ROW, 2)  # rows of the graph
    rare = max(position_of.size - hot - most, 0)
    companions, drawn = np.full((rare, _COMPANIONS), -1, np.int32), np.zeros(rare, np.int32)
    kept = np.zeros((0, 2), np.int64)
    waiting: list[IntArray] = []
    seen = held = 0
    for batch in batches:
        cold = np.unique(position_of[batch])
        cold = cold[cold >= hot].astype(np.int64) - hot
        frequent, others = np.split(cold, [np.searchsorted(cold, most)])
        if frequent.size and others.size:
            _accompany(companions, drawn, others - most, frequent, generator)
        if frequent.size < 2:
            continue
        count = min(pairs_per_batch, frequent.size * (frequent.size - 1) // 2)
        first = generator.integers(0, frequent.size, count)
        second = (first + generator.integers(1, frequent.size, count)) % frequent.size
        pairs = np.stack([frequent[np.minimum(first, second)], frequent[np.maximum(first, second)]], axis=1)
        waiting.append(pairs)
        held += count
        seen += count
        if held >= max_pairs:
            kept = _thinned(kept, waiting, seen, max_pairs, generator)
            waiting, held = [], 0
    kept = _thinned(kept, waiting, seen, max_pairs, generator)
    edges, counts = np.unique(kept, axis=0, return_counts=True) if kept.size else (kept, np.zeros(0, np.int64))
    return IndexGraph(edges, counts, companions)


def _accompany(
    companions: npt.NDArray[np.int32],
    drawn: npt.NDArray[np.int32],
    rows: IntArray,
    frequent: IntArray,
    generator: np.random.Generator,
) -> None:
    """Draw a companion for each of some rows; all that a row has met are kept with the same probability."""
    met = drawn[rows]
    slot = np.where(met < _COMPANIONS, met, (generator.random(rows.size) * (met + 1)).astype(np.int64))
    keeps = slot < _COMPANIONS
    companions[rows[keeps], slot[keeps]] = frequent[generator.integers(0, frequent.size, int(keeps.sum()))]
    drawn[rows] += 1


def _thinned(kept: IntArray, waiting: list[IntArray], seen: int, most: int, generator: np.random.Generator) -> IntArray:
    """At most ``most`` pairs, each of all that were seen with the same probability."""
    new = np.concatenate(waiting) if waiting else np.zeros((0, 2), np.int64)
    if seen <= most:
        return np.concatenate([kept, new])
    number = min(int(generator.binomial(most, new.shape[0] / seen)), new.shape[0])
    old = min(most - number, kept.shape[0])
    chosen = kept[generator.choice(kept.shape[0], old, replace=False)] if kept.size else kept
    return np.concatenate([chosen, new[generator.choice(new.shape[0], number, replace=False)]])


def community_order(graph: IndexGraph, cold: int, *, seed: int) -> IntArray:
    """Cold rows in their new order: communities one after the other, the one with the hottest row first; within one by
    frequency; rows of none where their frequency puts them last. Rarer rows join most of their companions.

    Args:
        graph: as :func:`index_graph` gives it.
        cold: rows in all.
        seed: of the communities' search (Louvain, which maximises modularity level by level; Blondel et al. 2008).

    Returns:
        positions less ``hot``, in order; shape (cold,).

    Raises:
        MissingDependencyError: igraph is not installed.
    """
    try:
        import igraph
    except ImportError as error:
        raise MissingDependencyError("communities need igraph; pip install 'flexshard[fast]'") from error
    rows, compact = np.unique(graph.edges, return_inverse=True)
    if rows.size and int(rows[-1]) >= cold:
        raise TableError(f"an edge names row {int(rows[-1])}, but there are {cold}")
    if not rows.size:
        return np.arange(cold)
    igraph.set_random_number_generator(random.Random(seed))
    companions = igraph.Graph(n=rows.size, edges=compact.reshape(-1, 2))
    member = np.full(cold, -1, np.int64)
    member[rows] = companions.community_multilevel(weights=graph.counts.tolist()).membership
    if graph.companions.size:
        member[cold - graph.companions.shape[0] :] = _joined(member, graph.companions)
    # Communities in order of their hottest row, whose position is the least.
    together = np.flatnonzero(member >= 0)
    hottest = np.full(int(member.max()) + 1, cold)
    np.minimum.at(hottest, member[together], together)
    together = together[np.lexsort((together, hottest[member[together]]))]
    return np.concatenate([together, np.flatnonzero(member < 0)])


def _joined(member: IntArray, companions: npt.NDArray[np.int32]) -> IntArray:
    """The community of most of each row's companions, the first of equals; -1 where they have none."""
    theirs = np.where(companions >= 0, member[companions], -1)
    votes = ((theirs[:, :, None] == theirs[:, None, :]) & (theirs >= 0)[:, None, :]).sum(axis=2)
    return theirs[np.arange(len(theirs)), votes.argmax(axis=1)]
