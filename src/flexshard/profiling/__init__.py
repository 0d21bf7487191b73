"""Access profiles: how often each row of a table is read; counted from Parquet, arrays, histograms or Ray datasets
(count/), added up, compared over time, kept in files.

May import: errors, units, _internal. No torch.
"""

from typing import TYPE_CHECKING

from flexshard._internal.lazy import lazy_exports

if TYPE_CHECKING:
    from flexshard.profiling.count.frames import ids_of_frame as ids_of_frame
    from flexshard.profiling.count.parquet import columns_of as columns_of, read_samples as read_samples
    from flexshard.profiling.count.reuse import read_reuse_histogram as read_reuse_histogram
    from flexshard.profiling.drift_point import DriftPoint as DriftPoint
    from flexshard.profiling.encoding.encoding import EncodedColumn as EncodedColumn, encode as encode
    from flexshard.profiling.encoding.mapping import (
        Mapping as Mapping,
        load_mapping as load_mapping,
        mapping_path as mapping_path,
    )
    from flexshard.profiling.hashing import HASHES as HASHES, hash_to_rows as hash_to_rows, splitmix64 as splitmix64
    from flexshard.profiling.holdout import Holdout as Holdout
    from flexshard.profiling.moments import LengthMoments as LengthMoments
    from flexshard.profiling.profile import AccessProfile as AccessProfile
    from flexshard.profiling.profile_file import load_ranking as load_ranking
    from flexshard.profiling.row_counts import RowCounts as RowCounts, checked_whole as checked_whole
    from flexshard.profiling.same_ids import check_same_ids as check_same_ids
    from flexshard.profiling.synthetic import (
        power_law_probabilities as power_law_probabilities,
        write_power_law_sequences as write_power_law_sequences,
    )

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "count.frames": ["ids_of_frame"],
        "count.parquet": ["columns_of", "read_samples"],
        "count.reuse": ["read_reuse_histogram"],
        "drift_point": ["DriftPoint"],
        "encoding.encoding": ["EncodedColumn", "encode"],
        "encoding.mapping": ["Mapping", "load_mapping", "mapping_path"],
        "hashing": ["HASHES", "hash_to_rows", "splitmix64"],
        "holdout": ["Holdout"],
        "moments": ["LengthMoments"],
        "profile": ["AccessProfile"],
        "profile_file": ["load_ranking"],
        "row_counts": ["RowCounts", "checked_whole"],
        "same_ids": ["check_same_ids"],
        "synthetic": ["power_law_probabilities", "write_power_law_sequences"],
    },
)

# Methods of values whose bodies stand in files that know the value.
VALUE_METHODS = {
    "AccessProfile.from_ids": "count.arrays:profile_arrays",
    "AccessProfile.from_frame": "count.frames:profile_frame",
    "AccessProfile.to_frame": "count.frames:frame_of_profile",
    "AccessProfile.from_parquet": "count.parquet:profile_parquet",
    "AccessProfile.from_parquet_by": "count.by_column:profile_parquet_by",
    "AccessProfile.from_reuse_histogram": "count.reuse:read_reuse_histogram",
    "AccessProfile.from_ray": "count.ray_blocks:profile_ray",
    "AccessProfile.__add__": "merging:merge",
    "AccessProfile.drift": "drift:drift",
    "AccessProfile.save": "profile_file:save_profile",
    "AccessProfile.load": "profile_file:load_profile",
}
