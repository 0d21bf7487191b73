"""What one placement costs: memory, bytes, seconds; for whole tables and for sets of rows."""

from flexshard._dedup import combined_dedup_factor, dedup_factor, dedup_len
from flexshard.costmodels._cost import QUANTILE, Collective, CollectiveKind, Cost, Overlap, OverlapLike, overlap_of
from flexshard.costmodels._lines import Breakpoints, RowLines, breakpoints, normalized_costs, row_lines
from flexshard.costmodels._placement import collective, column_wise_cost, placement_cost, strategy_name, table_wise_cost
from flexshard.costmodels._reduction import (
    REDUCTIONS,
    SLOT_BYTES,
    gathered_bytes,
    sparse_reduction,
    touched_rows,
)
from flexshard.costmodels._step import PhaseCurve, StepModel
from flexshard.costmodels._table import DTYPE_BYTES, OPTIMIZERS, Table, expected_distinct, translation_bytes
from flexshard.costmodels._tensor_train import ShapeRates, TTRates, TTReads, TTWork, fit_rates, tensor_train_cost

__all__ = [
    "DTYPE_BYTES",
    "OPTIMIZERS",
    "QUANTILE",
    "REDUCTIONS",
    "SLOT_BYTES",
    "Breakpoints",
    "Collective",
    "CollectiveKind",
    "Cost",
    "Overlap",
    "OverlapLike",
    "PhaseCurve",
    "RowLines",
    "ShapeRates",
    "StepModel",
    "TTRates",
    "TTReads",
    "TTWork",
    "Table",
    "breakpoints",
    "collective",
    "column_wise_cost",
    "combined_dedup_factor",
    "dedup_factor",
    "dedup_len",
    "expected_distinct",
    "fit_rates",
    "gathered_bytes",
    "normalized_costs",
    "overlap_of",
    "placement_cost",
    "row_lines",
    "sparse_reduction",
    "strategy_name",
    "table_wise_cost",
    "tensor_train_cost",
    "touched_rows",
    "translation_bytes",
]
