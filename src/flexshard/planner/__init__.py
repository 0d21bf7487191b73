"""Which placement to choose: solver, Pareto curve, baselines, the plan document, the planner for TorchRec."""

from typing import TYPE_CHECKING

from flexshard._values import from_extra
from flexshard.planner._choose import plan_compression
from flexshard.planner._compare import compare
from flexshard.planner._compression import CompressionPlan, TableChoice, TableOption, TTOption, is_compression
from flexshard.planner._diff import Move, PlanDiff, diff
from flexshard.planner._document import cost_document, plan_document
from flexshard.planner._explain import TableExplanation, explain
from flexshard.planner._job import Job, load_job, save_job
from flexshard.planner._marginal import MarginalCurve, marginal_curve
from flexshard.planner._pareto import ParetoCurve, ParetoPoint, pareto
from flexshard.planner._plan import Alternative, Plan, Settings, TablePlan, Tier
from flexshard.planner._render import costs_grid, plan_renderable
from flexshard.planner._solve import METHODS, solve
from flexshard.planner._whole_table import whole_table_cost

if TYPE_CHECKING:
    from flexshard.planner._sharding import FLEX_SHARD, FlexShardParameterSharding
    from flexshard.planner._torchrec_planner import FlexShardPlanner

__all__ = [
    "FLEX_SHARD",
    "METHODS",
    "Alternative",
    "CompressionPlan",
    "FlexShardParameterSharding",
    "FlexShardPlanner",
    "Job",
    "MarginalCurve",
    "Move",
    "ParetoCurve",
    "ParetoPoint",
    "Plan",
    "PlanDiff",
    "Settings",
    "TTOption",
    "TableChoice",
    "TableExplanation",
    "TableOption",
    "TablePlan",
    "Tier",
    "compare",
    "cost_document",
    "costs_grid",
    "diff",
    "explain",
    "is_compression",
    "load_job",
    "marginal_curve",
    "pareto",
    "plan_compression",
    "plan_document",
    "plan_renderable",
    "save_job",
    "solve",
    "whole_table_cost",
]

__getattr__ = from_extra(
    __name__,
    {
        "FLEX_SHARD": "_sharding",
        "FlexShardParameterSharding": "_sharding",
        "FlexShardPlanner": "_torchrec_planner",
    },
)
