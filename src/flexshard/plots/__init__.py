"""Pictures: the figures of the papers for any profile, plan or dataset.

May import: all rooms but report, cli. Needs matplotlib, which is imported when something is drawn.
"""

from typing import TYPE_CHECKING

from flexshard._internal.lazy import lazy_exports

if TYPE_CHECKING:
    from flexshard.plots.planning import (
        plot_marginal as plot_marginal,
        plot_normalized_costs as plot_normalized_costs,
        plot_pareto as plot_pareto,
        plot_skew as plot_skew,
    )
    from flexshard.plots.ranks import plot_ranks as plot_ranks
    from flexshard.plots.sessions import plot_duplication as plot_duplication, plot_sessions as plot_sessions
    from flexshard.plots.steps import plot_step as plot_step
    from flexshard.plots.style import PICTURE_SUFFIXES as PICTURE_SUFFIXES
    from flexshard.plots.traffic import plot_reduction as plot_reduction

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "planning": ["plot_marginal", "plot_normalized_costs", "plot_pareto", "plot_skew"],
        "ranks": ["plot_ranks"],
        "sessions": ["plot_duplication", "plot_sessions"],
        "steps": ["plot_step"],
        "style": ["PICTURE_SUFFIXES"],
        "traffic": ["plot_reduction"],
    },
)
