"""An embedding table as planning sees it: sizes, what a replica costs, and how often rows are read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexshard._internal import check_finite, check_int, first_repeated
from flexshard.errors import TableError
from flexshard.profiling import AccessProfile
from flexshard.tables.data_types import DATA_TYPES
from flexshard.tables.optimizers.registry import OPTIMIZERS

__all__ = ["Table", "check_table_name", "expected_distinct", "place_bytes", "translation_bytes"]

FloatArray = npt.NDArray[np.float64]
POOLINGS = ("none", "sum", "mean")
_MOST_KAPPA = 1e6


def check_table_name(name: object) -> None:
    """Raises TableError for what can be no table's name."""
    if not isinstance(name, str):
        raise TableError(f"a table's name is a text, found {name!r}")
    if not name.strip() or not name.isprintable():
        raise TableError(f"a table's name is a text of one line, found {name!r}")


@dataclass(frozen=True, eq=False)
class Table:
    """One embedding table.

    Attributes:
        name: as in the model.
        rows: E.
        dim: D.
        profile: how often its rows are read; the path of a file that has it will do.
        dtype: of weights and activations ("float64", "float32", "float16", "bfloat16"); s bytes each. Gradients of
            16-bit tables are float32.
        optimizer: "sgd", "rowwise_adagrad", "adagrad", "adam", "partial_rowwise_adam" or "lars_sgd".
        replication_multiplier: κ, bytes that a rank spends per byte of replicated weight. By default weights, dense
            gradient and communication bucket (1 each) and the optimizer's state.
        features: names of the features that look rows up.
        dedup_factor: ids of a batch per id that deduplicated batches look up (RecD paper, section 4.2); of several
            features, of all their ids together (:func:`combined_dedup_factor`). 1 if batches are not deduplicated, or
            if the profile counts distinct lists alone.
        pooling: what is made of a sample's rows: nothing ("none", as ``EmbeddingCollection`` has them), or their "sum"
            or "mean" (``EmbeddingBagCollection``).

    Raises:
        TableError: a field is out of range, or the profile is of a larger table.
    """

    name: str
    rows: int
    dim: int
    profile: AccessProfile
    dtype: str = "float32"
    optimizer: str = "rowwise_adagrad"
    replication_multiplier: float | None = None
    features: Sequence[str] = ()
    dedup_factor: float = 1.0
    pooling: str = "none"

    def __post_init__(self) -> None:
        where = f"table {self.name!r}"
        check_table_name(self.name)
        if isinstance(self.features, str) or not isinstance(self.features, Sequence):
            raise TableError(f"{where}: features must be a list of names, found {self.features!r}")
        stray = next((feature for feature in self.features if not isinstance(feature, str)), None)
        if stray is not None:
            raise TableError(f"{where}: features must be a list of names, found {stray!r} in it")
        if "" in self.features:
            raise TableError(f"{where}: a feature's name is empty; features need names")
        twice = first_repeated(self.features)
        if twice is not None:
            raise TableError(f"{where}: feature {twice!r} is named twice; name each once")
        object.__setattr__(self, "features", tuple(self.features))
        if isinstance(self.profile, str | os.PathLike):
            object.__setattr__(self, "profile", AccessProfile.load(self.profile))
        if not isinstance(self.profile, AccessProfile):
            raise TableError(
                f"{where}: profile must be an AccessProfile or the path of one, found {self.profile!r};"
                " AccessProfile.from_parquet makes one"
            )
        for field in ("rows", "dim"):
            object.__setattr__(self, field, check_int(getattr(self, field), f"{where}: {field}", TableError))
        if self.rows * self.dim > 1 << 60:
            raise TableError(f"{where}: {self.rows:,} rows of {self.dim:,} are more than any cluster holds")
        if not isinstance(self.dtype, str) or self.dtype not in DATA_TYPES:
            raise TableError(f"{where}: dtype must be one of {', '.join(DATA_TYPES)}, found {self.dtype!r}")
        if not isinstance(self.optimizer, str) or self.optimizer not in OPTIMIZERS:
            raise TableError(f"{where}: optimizer must be one of {', '.join(OPTIMIZERS)}, found {self.optimizer!r}")
        if self.replication_multiplier is not None:
            try:
                kappa = float(self.replication_multiplier)
            except (TypeError, ValueError, OverflowError) as error:
                found = self.replication_multiplier
                raise TableError(f"{where}: replication_multiplier must be a number, found {found!r}") from error
            if not 1 <= kappa <= _MOST_KAPPA:
                raise TableError(
                    f"{where}: replication_multiplier must be at least 1 (the weights) and at most {_MOST_KAPPA:,.0f},"
                    f" found {kappa:g}"
                )
            object.__setattr__(self, "replication_multiplier", kappa)
        factor = check_finite(self.dedup_factor, f"{where}: dedup_factor", TableError)
        if factor < 1:
            raise TableError(f"{where}: dedup_factor must be at least 1 (nothing repeats), found {factor}")
        object.__setattr__(self, "dedup_factor", factor)
        if factor > 1 and self.profile.distinct_batch is not None:
            raise TableError(
                f"{where}: has dedup_factor {factor:g}, but its profile counts each distinct list once per"
                f" {self.profile.distinct_batch:,} rows already; leave dedup_factor out, or profile without"
                " --distinct-batch"
            )
        if self.pooling not in POOLINGS:
            raise TableError(f"{where}: pooling must be one of {', '.join(POOLINGS)}, found {self.pooling!r}")
        if self.profile.num_rows > self.rows:
            raise TableError(
                f"{where}: has {self.rows:,} rows, but its profile is of {self.profile.num_rows:,};"
                " use the profile of this table, or build it with the table's number of rows"
            )

    @property
    def is_pooled(self) -> bool:
        """Whether rows are added up where they are looked up."""
        return self.pooling != "none"

    @property
    def row_bytes(self) -> int:
        """D·s: bytes of one row's weights."""
        return self.dim * DATA_TYPES[self.dtype].nbytes

    @property
    def state_multiplier(self) -> float:
        """Bytes of optimizer state per byte of weight."""
        return OPTIMIZERS[self.optimizer].state_bytes(self.dim) / self.row_bytes

    @property
    def kappa_replicated(self) -> float:
        """κ of a row that has copies (g < U): weights, dense gradient, communication bucket, optimizer state."""
        if self.replication_multiplier is not None:
            return self.replication_multiplier
        kind = DATA_TYPES[self.dtype]
        return 1.0 + 2.0 * kind.gradient_bytes / kind.nbytes + self.state_multiplier

    @property
    def kappa_sharded(self) -> float:
        """κ_U of a row without copies (g = U): weights and fused optimizer state."""
        return 1.0 + self.state_multiplier

    def reads(self, batch_size: int, *, index_dedup: bool = False) -> FloatArray:
        """w: expected accesses per rank and iteration of a row of each distinct count, descending; shape (K,)."""
        distinct = self.distinct_samples(batch_size)
        if index_dedup:
            return _descending(expected_distinct(self.profile.sample_share, distinct), self.profile.rows)
        return distinct * (self.profile.counts / self.profile.num_samples)

    def lookups(self, batch_size: int) -> float:
        """B·L: expected ids of a rank's batch."""
        return self.distinct_samples(batch_size) * self.profile.avg_length

    def distinct_samples(self, batch_size: int) -> float:
        """B / DedupFactor: samples of a batch whose lists are looked up, each distinct one once."""
        return batch_size / self.dedup_factor

    def length_variation(self, batch_size: int) -> float | None:
        """Standard deviation over mean of the ids of a rank's batch; None where the profile knows no lengths.

        Distinct samples are taken as independent, so a batch varies less than a sample by the root of their number.
        """
        lengths = self.profile.lengths
        if lengths is None or lengths.total == 0:
            return None
        return float(np.sqrt(lengths.variance / self.distinct_samples(batch_size)) / lengths.mean)


def _descending(reads: FloatArray, rows: npt.NDArray[np.int64]) -> FloatArray:
    """Means of neighbouring counts where reads of rows that are read more often are fewer, since samples repeat them:
    tiers are ranges in order of counts. Sums over all rows stay as they are.
    """
    if np.all(reads[1:] <= reads[:-1]):
        return reads
    from scipy.optimize import isotonic_regression  # takes longer to import than everything else here

    return np.asarray(isotonic_regression(reads, weights=rows, increasing=False).x)


def translation_bytes(rows: int, places: int | None = None) -> int:
    """The most that looking up where a row lives takes, in bytes per rank.

    Args:
        rows: of the table.
        places: rows that need a place of their own, where the others are dealt to the ranks by id: a set of them in two
            bits a row, and a place for each. None where all rows do, which are then listed.
    """
    place = place_bytes(rows)
    return rows * place if places is None else (rows // 64 + 1) * 16 + places * place


def place_bytes(rows: int) -> int:
    """Bytes of a row's place: four, or eight in a table of 2^31 rows or more."""
    return 4 if rows < 1 << 31 else 8


def expected_distinct(p: npt.ArrayLike, batch_size: float | FloatArray) -> FloatArray:
    """Probability that a row is read at all in a batch of independent samples: ``1 - (1-c)^B`` for c < 1, else 1.

    Args:
        p: c, the share of samples that contain a row; its expected appearances in one where none repeats it.
        batch_size: B; or that of each row.
    """
    values = np.asarray(p, dtype=np.float64)
    return np.asarray(-np.expm1(batch_size * np.log1p(-np.minimum(values, 1.0 - 2**-53))))
