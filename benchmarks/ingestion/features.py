"""Generated samples with thousands of features in maps, and logs of the jobs that read some of them, shaped as in the
DPP paper (Tables 5 and 6, Figure 7).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from flexshard.ingestion import ProjectionLog

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
FLOATS, SPARSE = "floats", "sparse"
_CHUNK_ROWS = 256
_STEEPNESS = 3.0  # of lengths over popularity, so that a job of RM1 reads some 37 % of bytes (Table 6)
_PICKED = 0.42  # spread of what jobs pick, so that 39 % of bytes serve 80 % of RM1's reads (Figure 7)


@dataclass(frozen=True)
class Shape:
    """A dataset of Table 6, and what a job reads of it (Table 5)."""

    floats: int
    sparse: int
    coverage: float
    length: float
    used_floats: int
    used_sparse: int

    def scaled(self, factor: float) -> Shape:
        """With as many times fewer features."""
        counts = (self.floats, self.sparse, self.used_floats, self.used_sparse)
        floats, sparse, used_floats, used_sparse = (max(1, round(count / factor)) for count in counts)
        return Shape(floats, sparse, self.coverage, self.length, used_floats, used_sparse)


RM1 = Shape(12115, 1763, 0.45, 25.97, 1221, 298)


@dataclass(frozen=True)
class Features:
    """Each feature's popularity (0 for the most popular), coverage and mean length; floats first, then lists."""

    shape: Shape
    place: FloatArray
    coverage: FloatArray
    length: FloatArray

    @property
    def names(self) -> list[str]:
        """Columns, as keys of maps."""
        numbers = [*range(self.shape.floats), *range(self.shape.sparse)]
        maps = [FLOATS] * self.shape.floats + [SPARSE] * self.shape.sparse
        return [f"{name}/{number}" for name, number in zip(maps, numbers, strict=True)]

    def kinds(self) -> list[tuple[IntArray, int]]:
        """Features of each kind in order of popularity, and how many of them a job reads."""
        first = np.arange(self.shape.floats)
        second = np.arange(self.shape.floats, self.place.size)
        counts = (self.shape.used_floats, self.shape.used_sparse)
        return [
            (kind[np.argsort(self.place[kind])], count) for kind, count in zip((first, second), counts, strict=True)
        ]


def make_features(shape: Shape, seed: int = 0) -> Features:
    """Popular features have more coverage and longer lists (section 4.2.1); means are those of the table."""
    rng = np.random.default_rng(seed)
    total = shape.floats + shape.sparse
    place = np.concatenate([(rng.permutation(count) + 0.5) / count for count in (shape.floats, shape.sparse)])
    coverage = np.clip((1.6 - 1.2 * place) * np.exp(0.35 * rng.standard_normal(total)), 0.01, None)
    coverage = np.clip(coverage * shape.coverage / coverage.mean(), 0.01, 1)
    length = np.exp(0.6 * rng.standard_normal(total) - _STEEPNESS * place)
    length = np.maximum(length * shape.length / length[shape.floats :].mean(), 1)
    return Features(shape, place, coverage, length)


def write_maps(path: Path, features: Features, rows: int, *, group_rows: int = 1024, seed: int = 1) -> None:
    """Samples with a map of floats, one of lists of ids, and a label."""
    rng = np.random.default_rng(seed)
    cut = features.shape.floats
    kinds = {
        "label": pa.float32(),
        FLOATS: pa.map_(pa.int32(), pa.float32()),
        SPARSE: pa.map_(pa.int32(), pa.list_(pa.int64())),
    }
    with pq.ParquetWriter(path, pa.schema(list(kinds.items())), compression="zstd") as writer:
        for first in range(0, rows, group_rows):
            parts = []
            for start in range(first, min(rows, first + group_rows), _CHUNK_ROWS):
                size = min(rows, first + group_rows, start + _CHUNK_ROWS) - start
                offsets, keys = _present(rng, features.coverage[:cut], size)
                values = pa.array(np.round(rng.lognormal(size=keys.size), 4).astype(np.float32))
                floats = pa.MapArray.from_arrays(pa.array(offsets), pa.array(keys), values)
                offsets, keys = _present(rng, features.coverage[cut:], size)
                lengths = rng.poisson(features.length[cut:][keys] - 1) + 1
                ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
                ids = pa.array((1e6 * rng.random(ends[-1]) ** 4).astype(np.int64))  # a few are had often
                lists = pa.ListArray.from_arrays(pa.array(ends), ids)
                sparse = pa.MapArray.from_arrays(pa.array(offsets), pa.array(keys), lists)
                label = pa.array((rng.random(size) < 0.2).astype(np.float32))
                columns = [
                    column.cast(kind) for column, kind in zip((label, floats, sparse), kinds.values(), strict=True)
                ]
                parts.append(pa.table(dict(zip(kinds, columns, strict=True))))
            writer.write_table(pa.concat_tables(parts), row_group_size=group_rows)


def _present(rng: np.random.Generator, coverage: FloatArray, rows: int) -> tuple[IntArray, IntArray]:
    """Where each row's keys start, and the keys that rows have."""
    row, key = np.nonzero(rng.random((rows, coverage.size)) < coverage)
    offsets = np.searchsorted(row, np.arange(rows + 1))
    return offsets.astype(np.int32), key.astype(np.int32)


def independent_jobs(features: Features, jobs: int, seed: int) -> ProjectionLog:
    """Jobs that pick every feature by itself, popular ones rather."""
    rng, names = np.random.default_rng(seed), features.names
    found = []
    for _ in range(jobs):
        chosen: list[int] = []
        for kind, count in features.kinds():
            spread = _PICKED * count / kind.size
            wish = features.place[kind] + spread * rng.logistic(size=kind.size)
            chosen += kind[np.argsort(wish)[:count]].tolist()
        found.append(["label", *(names[number] for number in chosen)])
    return ProjectionLog.of(found)


def family_jobs(features: Features, jobs: int, seed: int, *, core: float = 0.5, families: int = 60) -> ProjectionLog:
    """Jobs that all read the most popular features, and take the others by families, whole ones rather than parts."""
    rng, names = np.random.default_rng(seed), features.names
    mixed = np.random.default_rng(99)
    common, blocks = [], []
    for kind, count in features.kinds():
        rest = kind[round(core * count) :]
        near = np.argsort(np.arange(rest.size) / rest.size + 0.1 * mixed.standard_normal(rest.size))
        common.append(kind[: round(core * count)])
        blocks.append(np.array_split(rest[near], families))
    found = []
    for _ in range(jobs):
        order = np.argsort(np.arange(families) / families + 0.2 * rng.logistic(size=families))
        chosen: list[int] = []
        for (_, count), base, block in zip(features.kinds(), common, blocks, strict=True):
            extra = np.concatenate([block[number] for number in order])[: count - base.size]
            chosen += [*base.tolist(), *extra.tolist()]
        found.append(["label", *(names[number] for number in chosen)])
    return ProjectionLog.of(found)
