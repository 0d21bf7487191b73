"""Arguments of a reader that need each other, or contradict each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from flexshard._internal import check_int, first_repeated
from flexshard.embeddings import InverseKeyedJaggedTensor
from flexshard.errors import DataError

__all__ = ["check_arguments", "checked_groups", "checked_shuffle"]


def check_arguments(
    features: Sequence[str],
    *,
    dense_nulls: str,
    session: str | None,
    time: str | None,
    whole_sessions: bool,
    drop_last: bool,
    pad_last: bool,
) -> None:
    """Check those of :class:`SessionReader`; raises DataError."""
    if not features:
        raise DataError("a batch has at least one feature")
    twice = first_repeated(features)
    if twice is not None:
        raise DataError(f"feature {twice!r} is named twice")
    if dense_nulls not in ("raise", "nan"):
        raise DataError(f"dense_nulls is 'raise' or 'nan', found {dense_nulls!r}")
    if time is not None and session is None:
        raise DataError("times are in order within a session; name the session column too")
    if drop_last and pad_last:
        raise DataError("the last samples can be dropped or padded; drop_last and pad_last are both true")
    if whole_sessions and session is None:
        raise DataError("for batches of whole sessions, name the session column")


def checked_groups(
    features: Sequence[str],
    groups: Sequence[Sequence[str]],
    partial: Sequence[Sequence[str]],
    newest: str,
    max_shift: int,
    weights: Mapping[str, str],
) -> tuple[list[list[str]], list[list[str]]]:
    """Groups, exact and partial, that batches of these features can have; raises DataError."""
    if partial and weights:
        raise DataError(
            "lists that share ids have no weights, and features have them all or none; use 'groups', or no weights"
        )
    check_int(max_shift, "max_shift", DataError, least=0)
    nothing = pa.table({name: pa.array([], pa.large_list(pa.int64())) for name in features})
    InverseKeyedJaggedTensor.from_arrow(nothing, groups, partial=partial, newest=newest)
    return [list(group) for group in groups], [list(group) for group in partial]


def checked_shuffle(shuffle: bool | str, *, session: str | None, groups: bool, whole_sessions: bool) -> str | None:
    """What is shuffled: samples, sessions or nothing; raises DataError where that cannot be, or where there are groups
    that it would leave without use.
    """
    if shuffle is True:
        if session is None and groups:
            raise DataError(
                "shuffled samples hardly repeat what groups deduplicate; name the session column, or say"
                " shuffle='samples'"
            )
        shuffle = "samples" if session is None else "sessions"
    if shuffle not in (False, None, "samples", "sessions"):
        raise DataError(f"shuffle is 'samples', 'sessions', true or false, found {shuffle!r}")
    if shuffle == "sessions" and session is None:
        raise DataError("to shuffle sessions, name the session column")
    if shuffle == "samples" and whole_sessions:
        raise DataError("shuffled samples leave no whole sessions; say shuffle='sessions'")
    return shuffle or None
