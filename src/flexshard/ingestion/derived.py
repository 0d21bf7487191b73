"""Features that a batch's other features and columns give (DPP paper, section 2.2).

What is derived from features of one group is computed once per distinct row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from flexshard._internal import check_int
from flexshard.embeddings import DedupedGroup, InverseKeyedJaggedTensor
from flexshard.errors import DataError
from flexshard.ingestion.batch import SessionBatch
from flexshard.ingestion.transforms import DedupedTransform, folded, splitmix64

__all__ = ["Bucketize", "Cross", "Derived", "NGrams", "OnFeatures"]

Lists = tuple[torch.Tensor, torch.Tensor]  # values and lengths


class OnFeatures:
    """Transforms of a batch's features, once per distinct row."""

    def __init__(self, *transforms: Callable[[KeyedJaggedTensor], KeyedJaggedTensor]) -> None:
        self._transform = DedupedTransform(*transforms)

    def __call__(self, batch: SessionBatch) -> SessionBatch:
        """The batch with its features changed."""
        return replace(batch, features=self._transform(batch.features))


class Derived:
    """A feature made of others, row by row; its transforms may be any of one feature."""

    def __init__(self, feature: str, into: str, *transforms: Callable[[KeyedJaggedTensor], KeyedJaggedTensor]) -> None:
        """Copy ``feature`` to ``into`` and transform it there: a user's pages to their categories, say."""
        self._inputs, self._into, self._transforms = [feature], into, transforms

    def __call__(self, batch: SessionBatch) -> SessionBatch:
        """The batch with one feature more.

        Raises:
            DataError: a feature that is not there, or one of the new name that is.
        """
        return replace(batch, features=_with_feature(batch.features, self._inputs, self._into, self.change))

    def change(self, inputs: Sequence[Lists]) -> Lists:
        """Values and lengths of the new feature, from those of its inputs."""
        values, lengths = inputs[0]
        batch = KeyedJaggedTensor(keys=[self._into], values=values, lengths=lengths)
        for transform in self._transforms:
            batch = transform(batch)
        return batch.values(), batch.lengths()


class Cross(Derived):
    """Every combination of one id of each feature, folded into a table's rows."""

    def __init__(self, features: Sequence[str], into: str, *, num_rows: int) -> None:
        """Combine two features or more.

        Raises:
            DataError: fewer than two, or no rows.
        """
        if isinstance(features, str) or len(features) < 2:
            raise DataError(f"a cross is of two features or more, found {features!r}")
        self._inputs, self._into = list(features), into
        self.num_rows = check_int(num_rows, "num_rows", DataError)

    def change(self, inputs: Sequence[Lists]) -> Lists:
        """See the class."""
        values, lengths = splitmix64(inputs[0][0].long()), inputs[0][1].long()
        for other, each in inputs[1:]:
            each = each.long()
            number = lengths * each
            row = torch.repeat_interleave(torch.arange(number.numel()), number)
            within = torch.arange(row.numel()) - (torch.cumsum(number, 0) - number)[row]
            first = (torch.cumsum(lengths, 0) - lengths)[row] + within // each[row]
            second = (torch.cumsum(each, 0) - each)[row] + within % each[row]
            values = splitmix64(values[first] ^ other.long()[second])
            lengths = number
        return folded(values, self.num_rows), lengths


class NGrams(Derived):
    """Every ``n`` ids of a row that follow each other, folded into a table's rows."""

    def __init__(self, feature: str, into: str, *, n: int, num_rows: int) -> None:
        """Combine ids of a feature.

        Raises:
            DataError: ``n`` below 2, or no rows.
        """
        self._inputs, self._into = [feature], into
        self.n = check_int(n, "n", DataError, least=2)
        self.num_rows = check_int(num_rows, "num_rows", DataError)

    def change(self, inputs: Sequence[Lists]) -> Lists:
        """See the class."""
        values, lengths = inputs[0][0].long(), inputs[0][1].long()
        number = (lengths - self.n + 1).clamp(min=0)
        row = torch.repeat_interleave(torch.arange(number.numel()), number)
        first = (torch.cumsum(lengths, 0) - lengths)[row] + (
            torch.arange(row.numel()) - (torch.cumsum(number, 0) - number)[row]
        )
        mixed = splitmix64(values[first])
        for further in range(1, self.n):
            mixed = splitmix64(mixed ^ values[first + further])
        return folded(mixed, self.num_rows), number


class Bucketize:
    """A feature of one id per sample: how many of some boundaries a dense column's number has reached (NaN: all, as
    ``torch.bucketize`` has it).
    """

    def __init__(self, column: str, into: str, *, boundaries: Sequence[float]) -> None:
        """Cut a column at ``boundaries``.

        Raises:
            DataError: none, or not in ascending order.
        """
        self._column, self._into = column, into
        self._boundaries = torch.tensor(list(boundaries), dtype=torch.float64)
        if not self._boundaries.numel() or (self._boundaries.diff() <= 0).any():
            raise DataError(f"boundaries ascend, and there is one at least; found {list(boundaries)}")

    def __call__(self, batch: SessionBatch) -> SessionBatch:
        """The batch with one feature more.

        Raises:
            DataError: a column that is not there, or of lists.
        """
        values = batch.dense.get(self._column)
        if values is None or values.dim() != 1:
            raise DataError(f"no dense column {self._column!r} of a number per sample to cut into buckets")
        ids = torch.bucketize(values.double(), self._boundaries, right=True)
        return replace(batch, features=_added(batch.features, self._into, (ids, torch.ones_like(ids)), None))


def _with_feature(
    features: InverseKeyedJaggedTensor, inputs: Sequence[str], name: str, change: Callable[[Sequence[Lists]], Lists]
) -> InverseKeyedJaggedTensor:
    groups = {id(group): group for group in (features.group_of(key) for key in inputs) if group is not None}
    if len(groups) == 1 and all(features.group_of(key) is not None for key in inputs):
        group = next(iter(groups.values()))
        return _added(features, name, change([_lists(group.lists()[key]) for key in inputs]), group)
    plain = features.to_keyed_jagged() if groups else features.plain
    assert plain is not None
    return _added(features, name, change([_lists(plain[key]) for key in inputs]), None)


def _lists(jagged: JaggedTensor) -> Lists:
    return jagged.values(), jagged.lengths()


def _added(
    features: InverseKeyedJaggedTensor, name: str, lists: Lists, group: DedupedGroup | None
) -> InverseKeyedJaggedTensor:
    """The batch with one feature more, in a group or in none; it weighs 1 where others have weights."""
    if name in features.keys():
        raise DataError(f"feature {name!r} is in the batch already; derive it into another name")
    weighted = any(
        part.weights_or_none() is not None
        for part in [*(each.jagged for each in features.groups), features.plain]
        if part is not None
    )
    groups: list[DedupedGroup] = []
    for each in features.groups:
        groups += each.of_lists(_appended(each.lists(), name, lists, weighted)) if each is group else [each]
    plain = features.plain if group is not None else _appended(features.plain, name, lists, weighted)
    return InverseKeyedJaggedTensor(groups, plain, [*features.keys(), name])


def _appended(jagged: KeyedJaggedTensor | None, name: str, lists: Lists, weighted: bool) -> KeyedJaggedTensor:
    values, lengths = lists
    ones = torch.ones(values.numel(), dtype=torch.float32) if weighted else None
    if jagged is None:
        return KeyedJaggedTensor(keys=[name], values=values, lengths=lengths, weights=ones, stride=lengths.numel())
    return KeyedJaggedTensor(
        keys=[*jagged.keys(), name],
        values=torch.cat([jagged.values(), values.to(jagged.values().dtype)]),
        lengths=torch.cat([jagged.lengths(), lengths.to(jagged.lengths().dtype)]),
        weights=None if ones is None else torch.cat([jagged.weights(), ones]),
        stride=jagged.stride(),
    )
