"""Whether two profiles mean the same by an id, and by a lookup of it."""

from __future__ import annotations

from filecmp import cmp as same_content
from pathlib import Path
from typing import TYPE_CHECKING

from flexshard.errors import ProfileError

if TYPE_CHECKING:
    from flexshard.profiling.profile import AccessProfile

__all__ = ["check_same_ids"]


def check_same_ids(older: AccessProfile, newer: AccessProfile, table: str = "") -> None:
    """Whether a row of one profile is that row of the other, as far as they say.

    Where one does not know by which mapping its log was encoded, it is taken to be the other's.

    Args:
        table: its name, for messages; the profiles' own by default.

    Raises:
        ProfileError: ids were hashed in one only, or otherwise, or mapped by two files that differ; or distinct lists
            count once per batch in one of them only.
    """
    name = table or older.table or newer.table
    if older.hash != newer.hash:
        hashed = [one.hash or "no hash" for one in (older, newer)]
        raise ProfileError(
            f"table {name!r}: the profiles' rows are not the same ids, which went through {hashed[0]} in the older and"
            f" {hashed[1]} in the newer one; profile the newer data with the options of the older"
        )
    if (older.distinct_batch is None) != (newer.distinct_batch is None):
        counted = ["all lookups" if one.distinct_batch is None else "distinct lists" for one in (older, newer)]
        raise ProfileError(
            f"table {name!r}: the profiles count {counted[0]} in the older and {counted[1]} in the newer one; profile"
            " the newer data with the options of the older"
        )
    digests, files = (older.encoded_by, newer.encoded_by), (older.mapping, newer.mapping)
    if None not in digests:
        alike = digests[0] == digests[1]
    else:
        alike = None in files or _same_file(str(files[0]), str(files[1]))
    if alike:
        return
    which, where = "which two mappings numbered", ""
    if None not in files:
        names = [Path(str(file)).name for file in files]
        which = f"which {names[0]} mapped in the older and {names[1]} in the newer one"
        where = f" ({files[0]}, {files[1]})"
    raise ProfileError(
        f"table {name!r}: the profiles' rows are not the same values, {which}{where}; profile the newer data with the"
        " mapping of the older (--mapping)"
    )


def _same_file(one: str, other: str) -> bool:
    """By name or, where both are there, by what is in them."""
    if one == other:
        return True
    return all(Path(path).is_file() for path in (one, other)) and same_content(one, other, shallow=False)
