"""Access profiles: how often each row is read; built from Parquet, merged, sampled, drift."""

from flexshard.profiling._drift import DriftPoint
from flexshard.profiling._generate import power_law_probabilities, write_power_law_sequences
from flexshard.profiling._hashing import HASHES, hash_to_rows, splitmix64
from flexshard.profiling._moments import LengthMoments
from flexshard.profiling._parquet import read_samples
from flexshard.profiling._profile import AccessProfile, Holdout
from flexshard.profiling._ranking import RowCounts, checked_whole
from flexshard.profiling._reuse import read_reuse_histogram

__all__ = [
    "HASHES",
    "AccessProfile",
    "DriftPoint",
    "Holdout",
    "LengthMoments",
    "RowCounts",
    "checked_whole",
    "hash_to_rows",
    "power_law_probabilities",
    "read_reuse_histogram",
    "read_samples",
    "splitmix64",
    "write_power_law_sequences",
]
