"""A plan as one page for people: what was decided and why, in a file that needs no network.

May import: errors, units, _internal, topologies, profiling, tables, costmodels, planner, executors.
"""

from typing import TYPE_CHECKING

from flexshard._internal.lazy import lazy_exports

if TYPE_CHECKING:
    from flexshard.report.page import write_report as write_report

__getattr__, __dir__, __all__ = lazy_exports(__name__, {"page": ["write_report"]})
