"""Which placement to choose: problems, methods, plans and their proofs, the frontier, baselines, compression; whole
models of any sharding types (whole_model/); the planners that TorchRec's DistributedModelParallel takes (torchrec/).

May import: embeddings, errors, units, _internal, topologies, profiling, tables, costmodels. No torch but in torchrec/.
"""

from typing import TYPE_CHECKING

from flexshard._internal.lazy import lazy_exports

if TYPE_CHECKING:
    from flexshard.planner.baselines.comparison import compare as compare
    from flexshard.planner.baselines.torchrec_choices import (
        TorchRecChoice as TorchRecChoice,
        price_choices as price_choices,
        torchrec_choices as torchrec_choices,
    )
    from flexshard.planner.baselines.whole_tables import whole_table_cost as whole_table_cost
    from flexshard.planner.budget import Budget as Budget, parse_budget as parse_budget
    from flexshard.planner.compression.choosing import plan_compression as plan_compression
    from flexshard.planner.compression.decision import (
        CompressionPlan as CompressionPlan,
        TableChoice as TableChoice,
        TableOption as TableOption,
        TTOption as TTOption,
    )
    from flexshard.planner.compression.decision_file import is_compression as is_compression
    from flexshard.planner.compression.measured_losses import (
        MeasuredLosses as MeasuredLosses,
        measure_losses as measure_losses,
    )
    from flexshard.planner.constraints import TableConstraints as TableConstraints
    from flexshard.planner.explanations.differences import (
        CacheChange as CacheChange,
        Move as Move,
        PlanDiff as PlanDiff,
        PooledMove as PooledMove,
        diff as diff,
    )
    from flexshard.planner.explanations.plan_text import costs_grid as costs_grid, plan_renderable as plan_renderable
    from flexshard.planner.explanations.pooled_text import PooledExplanation as PooledExplanation
    from flexshard.planner.explanations.reasons import TableExplanation as TableExplanation, explain as explain
    from flexshard.planner.exports import (
        export_torcheasyrec as export_torcheasyrec,
        export_torchrec as export_torchrec,
        modules_of as modules_of,
    )
    from flexshard.planner.frontier import pareto as pareto
    from flexshard.planner.frontier_points import ParetoCurve as ParetoCurve, ParetoPoint as ParetoPoint
    from flexshard.planner.job import Job as Job
    from flexshard.planner.job_file import job_files as job_files, load_job as load_job, save_job as save_job
    from flexshard.planner.marginal import MarginalCurve as MarginalCurve, marginal_curve as marginal_curve
    from flexshard.planner.methods import METHODS as METHODS
    from flexshard.planner.plan import (
        Alternative as Alternative,
        Plan as Plan,
        Settings as Settings,
        TableCache as TableCache,
        TablePlan as TablePlan,
        Tier as Tier,
    )
    from flexshard.planner.plan_file import cost_document as cost_document, plan_document as plan_document
    from flexshard.planner.pooled_plan import (
        PooledAlternative as PooledAlternative,
        PooledShard as PooledShard,
        PooledTablePlan as PooledTablePlan,
    )
    from flexshard.planner.problem import Problem as Problem, title_of as title_of
    from flexshard.planner.reductions import REDUCTIONS as REDUCTIONS
    from flexshard.planner.replanning import (
        Replan as Replan,
        TableMoves as TableMoves,
        moving_seconds as moving_seconds,
        replan as replan,
        row_moves as row_moves,
    )
    from flexshard.planner.same_job import options_beside as options_beside
    from flexshard.planner.solving import solve as solve
    from flexshard.planner.torchrec.adaptor import FlexShardPlanner as FlexShardPlanner
    from flexshard.planner.torchrec.left_to_torchrec import bag_part_of as bag_part_of, part_of as part_of
    from flexshard.planner.torchrec.model_tables import optimizer_class as optimizer_class
    from flexshard.planner.torchrec.optimal import OptimalShardingPlanner as OptimalShardingPlanner
    from flexshard.planner.torchrec.parameter_sharding import (
        FLEX_SHARD as FLEX_SHARD,
        FlexShardParameterSharding as FlexShardParameterSharding,
    )
    from flexshard.planner.translations import TRANSLATIONS as TRANSLATIONS

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "baselines.comparison": ["compare"],
        "baselines.torchrec_choices": ["TorchRecChoice", "price_choices", "torchrec_choices"],
        "baselines.whole_tables": ["whole_table_cost"],
        "budget": ["Budget", "parse_budget"],
        "compression.choosing": ["plan_compression"],
        "compression.decision": ["CompressionPlan", "TTOption", "TableChoice", "TableOption"],
        "compression.decision_file": ["is_compression"],
        "compression.measured_losses": ["MeasuredLosses", "measure_losses"],
        "constraints": ["TableConstraints"],
        "explanations.differences": ["CacheChange", "Move", "PlanDiff", "PooledMove", "diff"],
        "explanations.plan_text": ["costs_grid", "plan_renderable"],
        "explanations.pooled_text": ["PooledExplanation"],
        "explanations.reasons": ["TableExplanation", "explain"],
        "exports": ["export_torcheasyrec", "export_torchrec", "modules_of"],
        "frontier": ["pareto"],
        "frontier_points": ["ParetoCurve", "ParetoPoint"],
        "job": ["Job"],
        "job_file": ["job_files", "load_job", "save_job"],
        "marginal": ["MarginalCurve", "marginal_curve"],
        "methods": ["METHODS"],
        "plan": ["Alternative", "Plan", "Settings", "TableCache", "TablePlan", "Tier"],
        "plan_file": ["cost_document", "plan_document"],
        "pooled_plan": ["PooledAlternative", "PooledShard", "PooledTablePlan"],
        "problem": ["Problem", "title_of"],
        "replanning": ["Replan", "TableMoves", "moving_seconds", "replan", "row_moves"],
        "same_job": ["options_beside"],
        "reductions": ["REDUCTIONS"],
        "solving": ["solve"],
        "torchrec.adaptor": ["FlexShardPlanner"],
        "torchrec.left_to_torchrec": ["bag_part_of", "part_of"],
        "torchrec.optimal": ["OptimalShardingPlanner"],
        "torchrec.model_tables": ["optimizer_class"],
        "torchrec.parameter_sharding": ["FLEX_SHARD", "FlexShardParameterSharding"],
        "translations": ["TRANSLATIONS"],
    },
)

# Methods of values whose bodies stand in files that know the value.
VALUE_METHODS = {
    "Plan.save": "plan_file:save_plan",
    "Plan.load": "plan_file:load_plan",
    "Plan.fingerprint": "plan_file:fingerprint",
    "Plan.__str__": "explanations.plan_text:plan_text",
    "Plan._repr_html_": "explanations.plan_frames:plan_html",
    "Plan.to_frame": "explanations.plan_frames:frame_of_plan",
    "CompressionPlan.save": "compression.decision_file:save_decision",
    "CompressionPlan.load": "compression.decision_file:load_decision",
    "CompressionPlan.document": "compression.decision_file:decision_document",
    "CompressionPlan.explain": "compression.decision_text:explain_table",
}
