"""Memory and communication of a tensor-train table.

Legend: n ids of a batch, b bags, u distinct ids; n_k distinct prefixes of k digits (n_d = u); core k of shape
(p_k, r_{k-1}, q_k, r_k), Q_k = q_1 ... q_k (EL-Rec paper, sections III-A and III-B; docs/tensor_train.md).
"""

from __future__ import annotations

from itertools import accumulate
from operator import mul

from flexshard._internal import plain_sum
from flexshard.costmodels.collectives import collective
from flexshard.costmodels.cost import Cost
from flexshard.costmodels.overlap import Overlap
from flexshard.costmodels.tensor_train.reads import TTReads
from flexshard.costmodels.tensor_train.work import FLOAT_BYTES
from flexshard.tables import KEPT_SHARE, OPTIMIZERS, Table, TTShape
from flexshard.topologies import Cluster

__all__ = ["tensor_train_cost"]

ID_BYTES = 45.0  # of a lookup's ids: sorted, numbered and pooled by torch; measured, 2026-11-24


def tensor_train_cost(
    table: Table, cluster: Cluster, shape: TTShape, reads: TTReads, *, overlap: Overlap | None = None
) -> Cost:
    """Memory and communication of a table as a tensor train that every rank holds.

    Cores, their gradients, the bucket that is all-reduced and the optimizer's state are static, and so is the memory of
    products that a table keeps from step to step; rows of one batch, gradients and ids are dynamic. All in float32, as
    products are.
    """
    r, sizes = shape.bounds, list(accumulate(shape.dim_factors, mul))
    nbytes = float(FLOAT_BYTES * shape.parameters)
    state = OPTIMIZERS[table.optimizer].state_bytes_per_element
    products = plain_sum(reads.prefixes[k] * sizes[k] * r[k + 1] for k in range(1, shape.cores - 1))
    rate = cluster.level(1).all_reduce
    return Cost(
        static_memory_bytes=nbytes * (3.0 + state / FLOAT_BYTES) + FLOAT_BYTES * KEPT_SHARE * products,
        dynamic_memory_bytes=FLOAT_BYTES * (2.0 * reads.prefixes[-1] * shape.embedding_dim + products)
        + ID_BYTES * reads.ids,
        rows_read=reads.ids,
        collectives=() if rate is None else (collective("all_reduce", 1, rate, nbytes, overlap, "replicas"),),
        dynamic_memory_sigma_bytes=None,
    )
