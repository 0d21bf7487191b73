"""Every exception that FlexShard raises on purpose.

::

    FlexShardError
    ├── UnitError              a size, bandwidth or time that cannot be read
    ├── ClusterError           a cluster file, preset or level that does not fit together
    ├── DataError              access data, a batch or an observation that cannot be used (missing, broken, bad ids)
    │   └── ChangedDataError   files that changed, or went, while they were being read
    ├── ProfileError           an access profile that contradicts itself, or a broken profile file
    ├── TableError             a table whose fields contradict each other or its profile
    ├── JobError               a job file or an argument of ``solve`` that cannot be used
    ├── BudgetError            no placement fits the memory budget (``least_bytes`` would)
    ├── PlanError              a plan file that is broken, or a plan that is not for this model or job
    ├── CheckpointError        a checkpoint that is incomplete, damaged or of another model
    ├── SolverError            an external solver that returned without an answer
    ├── CommunicationError     a collective that failed or timed out while a plan was running
    ├── OutputError            a result that could not be written (nothing half-written is left)
    └── MissingDependencyError an extra that is not installed

All but the last four are ``ValueError`` too, so that code which knows nothing of FlexShard can catch them. A
message says what was expected, what came, where, and what to do. The command line prints it and exits with code 2.
"""

from __future__ import annotations

__all__ = [
    "BudgetError",
    "CacheError",
    "ChangedDataError",
    "CheckpointError",
    "ClusterError",
    "CommunicationError",
    "DataError",
    "FlexShardError",
    "JobError",
    "MissingDependencyError",
    "OutputError",
    "PlanError",
    "ProfileError",
    "SolverError",
    "TableError",
    "UnitError",
]


class FlexShardError(Exception):
    """Base of every exception that FlexShard raises on purpose."""


class UnitError(FlexShardError, ValueError):
    """A size, bandwidth or time that cannot be read."""


class ClusterError(FlexShardError, ValueError):
    """A cluster file, preset or level that does not fit together."""


class DataError(FlexShardError, ValueError):
    """Access data, a batch or an observation that cannot be used."""


class ChangedDataError(DataError):
    """Files that changed, or went, while they were being read."""


class ProfileError(FlexShardError, ValueError):
    """An access profile that contradicts itself, or a broken profile file."""


class TableError(FlexShardError, ValueError):
    """A table whose fields contradict each other or its profile."""


class JobError(FlexShardError, ValueError):
    """A job file or an argument of ``solve`` that cannot be used."""


class BudgetError(FlexShardError, ValueError):
    """No placement fits the memory budget.

    Attributes:
        least_bytes: the least memory per rank, in bytes, that some placement needs; of whole models what each needs at
            least, which may be too little, since shards that fit all ranks together need not fit them one by one.
        by_sums: whether the memory of all ranks together is too small; otherwise what fits in sum does not fit ranks.
    """

    def __init__(self, message: str, least_bytes: float, by_sums: bool = True) -> None:
        super().__init__(message)
        self.least_bytes, self.by_sums = least_bytes, by_sums

    def __reduce__(self) -> tuple[type[BudgetError], tuple[str, float, bool]]:
        return type(self), (str(self), self.least_bytes, self.by_sums)  # as other ranks get it


class PlanError(FlexShardError, ValueError):
    """A plan file that is broken or of another version, or a plan that is not for this model or job."""


class CheckpointError(FlexShardError, ValueError):
    """A checkpoint that is incomplete, damaged or of another model."""


class CacheError(FlexShardError, RuntimeError):
    """A cache of rows that is too small for a batch, or whose rows could not be moved."""


class CommunicationError(FlexShardError, RuntimeError):
    """A collective that failed or timed out while a plan was running."""


class SolverError(FlexShardError, RuntimeError):
    """An external solver that returned without an answer."""


class OutputError(FlexShardError, OSError):
    """A result that could not be written; nothing half-written is left.

    Attributes:
        reason: what the system said, without the file's name.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class MissingDependencyError(FlexShardError, ImportError):
    """An extra that is not installed."""
