"""What a placement costs: the layout of rows over ranks, collectives, memory, bytes and seconds; of whole tables,
sets of rows and tensor trains; steps with deduplicated batches.

May import: errors, units, _internal, topologies, profiling, tables. No torch.
"""

from typing import TYPE_CHECKING

from flexshard._internal.lazy import lazy_exports

if TYPE_CHECKING:
    from flexshard.costmodels.collectives import (
        NUMBER_BYTES as NUMBER_BYTES,
        SLOT_BYTES as SLOT_BYTES,
        STATUS_NUMBERS as STATUS_NUMBERS,
        RowWidths as RowWidths,
        StepCollective as StepCollective,
        TableClass as TableClass,
        classes_of as classes_of,
        collective as collective,
        collectives_between as collectives_between,
        idle_seconds as idle_seconds,
        kind_of as kind_of,
        priced as priced,
        step_collectives as step_collectives,
        with_excess as with_excess,
        with_hottest as with_hottest,
    )
    from flexshard.costmodels.cost import (
        QUANTILE as QUANTILE,
        Collective as Collective,
        CollectiveKind as CollectiveKind,
        Cost as Cost,
    )
    from flexshard.costmodels.frames import (
        Frame as Frame,
        bundles as bundles,
        class_runs as class_runs,
        expected_padding as expected_padding,
        segment_bytes as segment_bytes,
    )
    from flexshard.costmodels.fullest_rank import (
        BATCH_SHARES as BATCH_SHARES,
        Loads as Loads,
        ServedRows as ServedRows,
        batch_lengths as batch_lengths,
        fullest_bytes as fullest_bytes,
        lookup_bytes as lookup_bytes,
    )
    from flexshard.costmodels.holders import apart as apart, by_rank as by_rank, first_holders as first_holders
    from flexshard.costmodels.layout import (
        Layout as Layout,
        Piece as Piece,
        PlacedTable as PlacedTable,
        rows_with_places as rows_with_places,
    )
    from flexshard.costmodels.local_rates import LocalRates as LocalRates, TableRates as TableRates
    from flexshard.costmodels.lookahead import (
        LookaheadReads as LookaheadReads,
        cached_share as cached_share,
        cached_shares as cached_shares,
        distinct_of_stretches as distinct_of_stretches,
        log_unread as log_unread,
        longest_lookahead as longest_lookahead,
        lookahead_reads as lookahead_reads,
        lookahead_reads_of_stretches as lookahead_reads_of_stretches,
        read_chance as read_chance,
        stretches_of as stretches_of,
    )
    from flexshard.costmodels.overlap import (
        Overlap as Overlap,
        OverlapLike as OverlapLike,
        hidden_share as hidden_share,
        overlap_names as overlap_names,
        overlap_of as overlap_of,
    )
    from flexshard.costmodels.placement import (
        column_wise_cost as column_wise_cost,
        placement_cost as placement_cost,
        strategy_name as strategy_name,
        table_wise_cost as table_wise_cost,
    )
    from flexshard.costmodels.pooled import PooledCosts as PooledCosts
    from flexshard.costmodels.pooled_options import (
        CUT_BY_ROWS as CUT_BY_ROWS,
        POOLED_KERNELS as POOLED_KERNELS,
        POOLED_LOADS as POOLED_LOADS,
        POOLED_TYPES as POOLED_TYPES,
        SEQUENCE_TYPES as SEQUENCE_TYPES,
        SHARED_CALLS as SHARED_CALLS,
        PooledOption as PooledOption,
    )
    from flexshard.costmodels.pooled_shards import column_width as column_width
    from flexshard.costmodels.pooled_totals import pooled_cost as pooled_cost
    from flexshard.costmodels.replica_reduction import (
        gathered_bytes as gathered_bytes,
        row_reduction_seconds as row_reduction_seconds,
        touched_rows as touched_rows,
    )
    from flexshard.costmodels.row_cost_lines import (
        Breakpoints as Breakpoints,
        RowLines as RowLines,
        breakpoints as breakpoints,
        normalized_costs as normalized_costs,
        row_lines as row_lines,
    )
    from flexshard.costmodels.step import PhaseCurve as PhaseCurve, StepModel as StepModel
    from flexshard.costmodels.step_time import (
        PHASES as PHASES,
        Phase as Phase,
        StepWork as StepWork,
        phase_of as phase_of,
        row_wise_gradients as row_wise_gradients,
        step_phases as step_phases,
        step_seconds as step_seconds,
    )
    from flexshard.costmodels.tensor_train.cost import tensor_train_cost as tensor_train_cost
    from flexshard.costmodels.tensor_train.rates import (
        ShapeRates as ShapeRates,
        TTRates as TTRates,
        fit_rates as fit_rates,
    )
    from flexshard.costmodels.tensor_train.reads import TTReads as TTReads
    from flexshard.costmodels.tensor_train.work import TTWork as TTWork
    from flexshard.costmodels.two_stages import (
        NodeReads as NodeReads,
        has_two_stages as has_two_stages,
        two_stage_cost as two_stage_cost,
    )

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "cost": ["Collective", "CollectiveKind", "Cost", "QUANTILE"],
        "frames": ["Frame", "bundles", "class_runs", "expected_padding", "segment_bytes"],
        "fullest_rank": [
            "BATCH_SHARES",
            "Loads",
            "ServedRows",
            "batch_lengths",
            "fullest_bytes",
            "lookup_bytes",
        ],
        "holders": ["apart", "by_rank", "first_holders"],
        "layout": ["Layout", "Piece", "PlacedTable", "rows_with_places"],
        "local_rates": ["LocalRates", "TableRates"],
        "lookahead": [
            "LookaheadReads",
            "cached_share",
            "cached_shares",
            "distinct_of_stretches",
            "log_unread",
            "longest_lookahead",
            "lookahead_reads",
            "lookahead_reads_of_stretches",
            "read_chance",
            "stretches_of",
        ],
        "overlap": ["Overlap", "OverlapLike", "hidden_share", "overlap_names", "overlap_of"],
        "placement": ["column_wise_cost", "placement_cost", "strategy_name", "table_wise_cost"],
        "pooled": ["PooledCosts"],
        "pooled_options": [
            "CUT_BY_ROWS",
            "POOLED_KERNELS",
            "POOLED_LOADS",
            "POOLED_TYPES",
            "SEQUENCE_TYPES",
            "SHARED_CALLS",
            "PooledOption",
        ],
        "pooled_shards": ["column_width"],
        "pooled_totals": ["pooled_cost"],
        "replica_reduction": ["gathered_bytes", "row_reduction_seconds", "touched_rows"],
        "row_cost_lines": ["Breakpoints", "RowLines", "breakpoints", "normalized_costs", "row_lines"],
        "step": ["PhaseCurve", "StepModel"],
        "collectives": [
            "NUMBER_BYTES",
            "SLOT_BYTES",
            "STATUS_NUMBERS",
            "RowWidths",
            "StepCollective",
            "TableClass",
            "classes_of",
            "collective",
            "collectives_between",
            "idle_seconds",
            "kind_of",
            "priced",
            "step_collectives",
            "with_excess",
            "with_hottest",
        ],
        "step_time": [
            "PHASES",
            "Phase",
            "StepWork",
            "phase_of",
            "row_wise_gradients",
            "step_phases",
            "step_seconds",
        ],
        "tensor_train.cost": ["tensor_train_cost"],
        "tensor_train.rates": ["ShapeRates", "TTRates", "fit_rates"],
        "tensor_train.reads": ["TTReads"],
        "tensor_train.work": ["TTWork"],
        "two_stages": ["NodeReads", "has_two_stages", "two_stage_cost"],
    },
    deprecated={
        "DTYPE_BYTES": "flexshard.tables.data_types:DTYPE_BYTES",
        "OPTIMIZERS": "flexshard.tables.optimizers.registry:STATE_BYTES",
        "REDUCTIONS": "flexshard.planner:REDUCTIONS",
        "Table": "flexshard.tables:Table",
        "combined_dedup_factor": "flexshard.tables:combined_dedup_factor",
        "dedup_factor": "flexshard.tables:dedup_factor",
        "dedup_len": "flexshard.tables:dedup_len",
        "expected_distinct": "flexshard.tables:expected_distinct",
        "translation_bytes": "flexshard.tables:translation_bytes",
    },
)

# Methods of values whose bodies stand in files that know the value.
VALUE_METHODS = {
    "TTRates.save": "tensor_train.rates_file:save_rates",
    "TTRates.load": "tensor_train.rates_file:load_rates",
}
