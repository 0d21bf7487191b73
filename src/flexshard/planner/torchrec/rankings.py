"""Which rows are how popular: the profiles behind a plan, found for each table of a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from flexshard._internal import PathLike
from flexshard.costmodels import rows_with_places
from flexshard.errors import PlanError
from flexshard.planner.plan import TablePlan
from flexshard.profiling import AccessProfile, load_ranking

__all__ = ["Profiles", "Rankings", "key_of"]

Profiles = Mapping[str, AccessProfile | PathLike]


def key_of(fqn: str, table: str, known: Mapping[str, object]) -> str | None:
    """How a table is keyed: by the module's full name and its own, or by its own alone."""
    return next((name for name in (f"{fqn}.{table}", table) if name in known), None)


class Rankings:
    """Profiles by table, given or named by a plan."""

    def __init__(self, profiles: Profiles, base: PathLike) -> None:
        """Profiles, or files of them; and the folder that a plan's own paths are relative to."""
        self.profiles, self._base = dict(profiles), Path(base)

    def profile(self, key: str) -> AccessProfile:
        """The profile that was given by a name."""
        return _loaded(self.profiles[key])

    def ranked_rows(self, fqn: str, name: str, table: TablePlan, world_size: int) -> npt.NDArray[np.int64] | None:
        """Ids of a table's rows that need places of their own, hottest first, of a profile file no more is read; None
        where all rows are one tier and no profile is at hand.

        Raises:
            PlanError: there is none where one is needed, or it is not the one that the plan was made from.
        """
        if not table.profile_digest:
            return None
        key = key_of(fqn, name, self.profiles)
        where: AccessProfile | PathLike | None = None if key is None else self.profiles[key]
        if where is None and table.profile_path is not None:
            where = self._base / table.profile_path
        if where is None:
            if len(table.tiers) == 1:
                return None  # any order will do
            raise PlanError(
                f"table {table.name!r}: the plan does not say which file ranks its rows; give FlexShardPlanner"
                f" profiles={{{table.name!r}: ...}}"
            )
        places = rows_with_places(table, world_size)
        if isinstance(where, AccessProfile):
            digest, ranked = where.digest, where.ranked_rows[:places] if places else None
        else:
            digest, ranked = load_ranking(where, places)
        if digest != table.profile_digest:
            shown = f"{where} " if not isinstance(where, AccessProfile) else ""
            raise PlanError(
                f"table {table.name!r}: profile {shown}is not the one that the plan was made from; plan again with it,"
                " or, where every rank makes its own profile, let them read one file"
            )
        return ranked


def _loaded(where: AccessProfile | PathLike) -> AccessProfile:
    return where if isinstance(where, AccessProfile) else AccessProfile.load(where)
