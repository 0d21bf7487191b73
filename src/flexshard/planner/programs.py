"""Mixed-integer programs in PuLP, of which 3 and 4 give and tell results differently, solved by HiGHS on one thread."""

from __future__ import annotations

from typing import Any, Literal

__all__ = ["Outcome", "solve_program"]

Outcome = Literal["solution", "infeasible", "nothing"]


def solve_program(model: Any, *, gap: float, time_limit_seconds: float) -> Outcome:
    """Solve a program within a relative gap.

    Returns:
        "solution" if the variables hold one, proven or the best so far when time was up (it may still be fractional);
        "infeasible" if there is none; "nothing" if none was found.
    """
    import pulp  # takes longer to import than everything else of the planner

    result = model.solve(pulp.HiGHS(msg=False, gapRel=gap, timeLimit=time_limit_seconds, threads=1))
    # PuLP 3 returns a number and puts the status into the model; PuLP 4 returns both the status and whether it has one.
    status = int(getattr(result, "status", result))
    if status == -1:
        return "infeasible"
    has_solution = getattr(result, "has_solution", status in (0, 1))
    return "solution" if has_solution else "nothing"
