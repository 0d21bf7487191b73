"""Rates measured on live hardware: collectives of a cluster's levels, lookups of dense and tensor-train tables.

May import: errors, units, _internal, topologies, tables, costmodels, embeddings. Needs torch where it measures.
"""

from typing import TYPE_CHECKING

from flexshard._internal.lazy import lazy_exports

if TYPE_CHECKING:
    from flexshard.calibration.batches import least_seconds as least_seconds, sample_batches as sample_batches
    from flexshard.calibration.cluster_rates import Fit as Fit, fit_rate as fit_rate, measure_cluster as measure_cluster
    from flexshard.calibration.dense_tables import DenseShape as DenseShape
    from flexshard.calibration.launch import Place as Place, process_group as process_group
    from flexshard.calibration.lookup_rates import calibrate as calibrate, train_step as train_step

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "batches": ["least_seconds", "sample_batches"],
        "cluster_rates": ["Fit", "fit_rate", "measure_cluster"],
        "dense_tables": ["DenseShape"],
        "launch": ["Place", "process_group"],
        "lookup_rates": ["calibrate", "train_step"],
    },
)
