"""What an ingestion job reads and makes of it, as people write it (DPP paper, section 4.1.2).

A *session* in this project is a user's; what the paper calls a session is a job here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from flexshard._internal import (
    DocumentFormat,
    PathLike,
    StrictModel,
    check_bytes,
    expand,
    first_repeated,
    load_yaml,
    located,
    save_yaml,
    there_are,
)
from flexshard.errors import DataError
from flexshard.ingestion.dense_transforms import BoxCox, Clamp, FillMissing, Logarithm, Logit, Normalize
from flexshard.ingestion.derived import Bucketize, Cross, Derived, NGrams, OnFeatures
from flexshard.ingestion.reader import SessionReader
from flexshard.ingestion.transforms import ClipIds, DropFeatures, DropIds, HashIds, MapIds, SortIds, Truncate

__all__ = ["IngestionSpec"]

FORMAT = DocumentFormat(
    "flexshard.ingestion", 1, "an ingestion job", "ingestion jobs", DataError, "see docs/ingestion.md for its fields"
)
Names = Annotated[list[str], Field(min_length=1)]
Positive = Annotated[int, Field(ge=1, lt=2**63)]
Id = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class _OfFeatures(StrictModel):
    """A transform of features, of all by default; with ``into``, of a copy of one."""

    features: Names | None = None
    into: str | None = None

    @model_validator(mode="after")
    def _one_into(self) -> Any:
        if self.into is not None and len(self.features or []) != 1:
            raise ValueError("'into' names a copy of one feature; give features one name")
        return self

    def make(self) -> Any:
        """What runs on batches."""
        if self.into is None:
            return OnFeatures(self.of(self.features))
        return Derived((self.features or [""])[0], self.into, self.of(None))

    def of(self, features: list[str] | None) -> Any:
        """The transform of these features."""
        raise NotImplementedError


class _Hash(_OfFeatures):
    op: Literal["hash_ids"]
    num_rows: Positive

    def of(self, features: list[str] | None) -> Any:
        return HashIds(self.num_rows, features=features)


class _Clip(_OfFeatures):
    op: Literal["clip_ids"]
    least: Id
    most: Id

    def of(self, features: list[str] | None) -> Any:
        return ClipIds(self.least, self.most, features=features)


class _Map(_OfFeatures):
    op: Literal["map_ids"]
    mapping: dict[Id, Id]
    default: Id = 0

    def of(self, features: list[str] | None) -> Any:
        return MapIds(self.mapping, default=self.default, features=features)


class _Sort(_OfFeatures):
    op: Literal["sort_ids"]

    def of(self, features: list[str] | None) -> Any:
        return SortIds(features=features)


class _Truncate(_OfFeatures):
    op: Literal["truncate"]
    length: Annotated[int, Field(ge=0)]
    keep: Literal["last", "first"] = "last"

    def of(self, features: list[str] | None) -> Any:
        return Truncate(self.length, keep=self.keep, features=features)


class _Drop(_OfFeatures):
    op: Literal["drop_ids"]
    ids: list[Id]

    def of(self, features: list[str] | None) -> Any:
        return DropIds(self.ids, features=features)


class _DropFeatures(StrictModel):
    op: Literal["drop_features"]
    features: Names

    def make(self) -> Any:
        return OnFeatures(DropFeatures(self.features))


class _Cross(StrictModel):
    op: Literal["cross"]
    features: Annotated[list[str], Field(min_length=2)]
    into: str
    num_rows: Positive

    def make(self) -> Any:
        return Cross(self.features, self.into, num_rows=self.num_rows)


class _NGrams(StrictModel):
    op: Literal["ngrams"]
    feature: str
    into: str
    n: Annotated[int, Field(ge=2)]
    num_rows: Positive

    def make(self) -> Any:
        return NGrams(self.feature, self.into, n=self.n, num_rows=self.num_rows)


class _Bucketize(StrictModel):
    op: Literal["bucketize"]
    column: str
    into: str
    boundaries: list[Finite]

    def make(self) -> Any:
        return Bucketize(self.column, self.into, boundaries=self.boundaries)


class _Normalize(StrictModel):
    op: Literal["normalize"]
    columns: Names
    mean: Finite = 0.0
    std: Finite = 1.0

    def make(self) -> Any:
        return Normalize(self.columns, mean=self.mean, std=self.std)


class _Log(StrictModel):
    op: Literal["log"]
    columns: Names

    def make(self) -> Any:
        return Logarithm(self.columns)


class _Clamp(StrictModel):
    op: Literal["clamp"]
    columns: Names
    least: Finite
    most: Finite

    def make(self) -> Any:
        return Clamp(self.columns, least=self.least, most=self.most)


class _Fill(StrictModel):
    op: Literal["fill_missing"]
    columns: Names
    value: Finite = 0.0

    def make(self) -> Any:
        return FillMissing(self.columns, value=self.value)


class _Logit(StrictModel):
    op: Literal["logit"]
    columns: Names
    margin: Finite = 1e-6

    def make(self) -> Any:
        return Logit(self.columns, margin=self.margin)


class _BoxCox(StrictModel):
    op: Literal["box_cox"]
    columns: Names
    power: Finite
    least: Finite = 1e-6

    def make(self) -> Any:
        return BoxCox(self.columns, power=self.power, least=self.least)


Step = Annotated[
    _Hash | _Clip | _Map | _Sort | _Truncate | _Drop | _DropFeatures | _Cross | _NGrams | _Bucketize | _Normalize
    | _Log | _Clamp | _Fill | _Logit | _BoxCox,
    Field(discriminator="op"),
]  # fmt: skip


def _names(step: Any, fields: tuple[str, ...]) -> list[str]:
    """What a transform names in some of its fields."""
    values = [getattr(step, field, None) or [] for field in fields]
    return [name for value in values for name in ([value] if isinstance(value, str) else value)]


class _Fields(StrictModel):
    """The fields, on their own."""

    paths: list[str] | str
    batch_size: Positive
    features: Names
    partitions: dict[str, Names] = Field(default_factory=dict)
    dense: list[str] = Field(default_factory=list)
    weights: dict[str, str] = Field(default_factory=dict)
    groups: list[Names] = Field(default_factory=list)
    partial: list[Names] = Field(default_factory=list)
    newest: Literal["last", "first"] = "last"
    max_shift: Annotated[int, Field(ge=0)] = 16
    session: str | None = None
    time: str | None = None
    whole_sessions: bool = False
    shuffle: bool | Literal["samples", "sessions"] = False
    shuffle_window: Positive | None = None
    seed: Annotated[int, Field(ge=0)] = 0
    epochs: Positive = 1
    lanes: Positive | None = None
    drop_last: bool = False
    pad_last: bool = False
    transforms: list[Step] = Field(default_factory=list)
    bad_batches: Literal["raise", "skip"] = "raise"
    dense_nulls: Literal["raise", "nan"] = "raise"
    read_gap: str | int | None = None

    @model_validator(mode="after")
    def _check(self) -> Any:
        twice = first_repeated([*self.features, *self.dense])
        if twice is not None:
            raise ValueError(f"column {twice!r} is named twice among features and dense columns")
        if self.drop_last and self.pad_last:
            raise ValueError("the last samples can be dropped or padded; drop_last and pad_last are both true")
        if self.session is None and (self.time is not None or self.whole_sessions or self.shuffle == "sessions"):
            raise ValueError("time, whole_sessions and shuffle: sessions are about sessions; name the session column")
        if self.read_gap is not None:
            check_bytes(self.read_gap, "read_gap", DataError, least=0)
        known = set(self.features)
        for number, step in enumerate(self.transforms):
            try:
                step.make()
            except (DataError, OverflowError) as error:
                raise ValueError(f"transforms[{number}]: {error}") from error
            names = _names(step, ("feature", "features"))
            for name in names:
                if name not in known:
                    raise ValueError(f"transforms[{number}]: no feature {name!r}; {there_are(sorted(known))}")
            for name in _names(step, ("column", "columns")):
                if name not in self.dense:
                    raise ValueError(f"transforms[{number}]: no dense column {name!r}; there are {self.dense}")
            known -= set(names) if isinstance(step, _DropFeatures) else set()
            for name in _names(step, ("into",)):
                if name in known:
                    raise ValueError(f"transforms[{number}]: feature {name!r} is there already; give another name")
                known.add(name)
        return self


class IngestionSpec(_Fields):
    """An ingestion job: dataset, projection, transforms, batches and their order. Plain values; two that are equal
    give the same batches.

    Attributes:
        paths: files, globs, folders or URLs.
        partitions: of folders called ``name=value``, those to read, by name.
        batch_size: of each rank.
        features, weights, dense, groups, partial, newest, max_shift, session, time, whole_sessions, shuffle,
            shuffle_window, seed, lanes, drop_last, pad_last, dense_nulls, read_gap: as for :class:`SessionReader`.
        transforms: what is done to batches, in order; each has ``op`` and its fields.
        epochs: passes over the dataset that ``flexshard ingest`` makes; a client gives one each time that it is gone
            through.
        bad_batches: what to do where rows cannot be read: ``raise``, or ``skip``, which gives the rank its last good
            batch again and counts it.
    """

    def __init__(self, **fields: Any) -> None:
        """Check the fields.

        Raises:
            DataError: one that is unknown, missing or wrong; names it.
        """
        try:
            super().__init__(**fields)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"]) or "the job"
            raise DataError(f"ingestion job: {field}: {first['msg'].removeprefix('Value error, ')}") from error

    @classmethod
    def load(cls, path: PathLike) -> IngestionSpec:
        """Read a YAML file.

        Raises:
            DataError: it cannot be read, or a field is wrong; names file, line and field.
        """
        try:
            fields, tree = load_yaml(path, _Fields, FORMAT)
        except RecursionError as error:
            raise DataError(f"{path}: a value contains itself") from error
        try:
            return cls(**fields.model_dump(exclude_unset=True))
        except DataError as error:
            raise DataError(f"{located(path, tree, [])}: {error}") from error

    @classmethod
    def of_json(cls, text: str) -> IngestionSpec:
        """From the JSON of its fields, whose keys are texts.

        Raises:
            ValueError: a field is wrong.
        """
        return cls(**_Fields.model_validate_json(text).model_dump(exclude_unset=True))

    def save(self, path: PathLike) -> None:
        """Write a YAML file, whole or not at all.

        Raises:
            OutputError: it could not be written.
        """
        save_yaml(path, FORMAT, self.model_dump(exclude_defaults=True))

    def reader(self, rank: int = 0, world_size: int = 1, *, prefetch: int = 0) -> SessionReader:
        """What reads the job's batches in one process.

        Raises:
            DataError: as :class:`SessionReader`; or no file is in the partitions.
        """
        return SessionReader(
            self._paths(),
            batch_size=self.batch_size,
            features=self.features,
            groups=self.groups,
            partial=self.partial,
            newest=self.newest,
            max_shift=self.max_shift,
            dense=self.dense,
            weights=self.weights,
            preprocess=[step.make() for step in self.transforms],
            session=self.session,
            time=self.time,
            whole_sessions=self.whole_sessions,
            rank=rank,
            world_size=world_size,
            lanes=self.lanes,
            drop_last=self.drop_last,
            pad_last=self.pad_last,
            shuffle=self.shuffle,
            shuffle_window=self.shuffle_window,
            seed=self.seed,
            prefetch=prefetch,
            dense_nulls=self.dense_nulls,
            read_gap=self.read_gap,
        )

    def stored_columns(self) -> list[str]:
        """Columns that the job reads."""
        named = [*self.features, *self.weights.values(), *self.dense, self.session, self.time]
        return list(dict.fromkeys(name for name in named if name is not None))

    def _paths(self) -> list[str] | str:
        if not self.partitions:
            return self.paths
        names = [source.name for source in expand(self.paths)]
        for key, values in self.partitions.items():
            for value in values:
                if not any(f"/{key}={value}/" in f"/{name}" for name in names):
                    raise DataError(f"no file is in partition {key}={value} of {self.paths}")
            names = [name for name in names if any(f"/{key}={value}/" in f"/{name}" for value in values)]
        return names
