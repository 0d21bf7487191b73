"""Norms of logical tables, whose rows ranks hold copies of."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from flexshard.executors.sharding.module import ShardedRowsModule
from flexshard.executors.state.rows_by_id import own_block, read_rows

__all__ = ["table_norms"]


@torch.no_grad()
def table_norms(model: nn.Module, *, norm_type: float = 2.0) -> dict[str, float]:
    """Norm of every planned table of a model, each row counted once; every rank must call it.

    The parameters of a rank are the rows that it holds: norms over them count a row once for each copy.

    Args:
        model: with modules sharded by :class:`FlexShardEmbeddingCollectionSharder`.
        norm_type: p; ``inf`` for the largest element.

    Returns:
        by the table's name in the model's ``state_dict``.
    """
    result = {}
    for prefix, module in model.named_modules():
        if not isinstance(module, ShardedRowsModule):
            continue
        module.finish_writes()
        tables, sums = module.tables, []
        for table in range(len(tables.names)):
            total = torch.zeros((), dtype=torch.float64, device=tables.device)

            def add(rows: torch.Tensor, copies: int, total: torch.Tensor = total) -> None:
                part = rows.double().abs()
                if norm_type != float("inf"):
                    total += part.pow(norm_type).sum() / copies
                elif part.numel():
                    total.copy_(torch.maximum(total, part.max()))

            if tables.served(table) is not None:
                wanted = own_block(tables, table)
                read_rows(tables, table, "weight", wanted, len(wanted), lambda _, rows: add(rows, 1))
            else:
                values = tables.group_of(table).store.part("weight")
                for level, slots, _ in tables.held(table):
                    add(values[slots], tables.layout.world_size // tables.layout.group_sizes[level])
            sums.append(total)
        all_sums = torch.stack(sums)
        operation = dist.ReduceOp.MAX if norm_type == float("inf") else dist.ReduceOp.SUM
        dist.all_reduce(all_sums, op=operation, group=tables.process_group)
        norms = all_sums if norm_type == float("inf") else all_sums.pow(1 / norm_type)
        for name, norm in zip(tables.names, norms.tolist(), strict=True):
            inner = prefix.removeprefix("_dmp_wrapped_module.").removeprefix("module.")
            result[f"{inner}.{module.container}.{name}.weight".removeprefix(".")] = norm
    return result
