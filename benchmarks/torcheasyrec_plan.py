"""A plan in TorchEasyRec's own file, read by TorchEasyRec: does its planner give every table the type that ours chose?

Its planner is its checkout's (``tzrec/utils/plan_util.py``), with TorchRec as installed; only its generated protocol
buffers, which it has for annotations there, stand empty. Its planner places shards itself, as with checkpoints of its
own, so ranks are not compared.

    python -m benchmarks.torcheasyrec_plan CHECKOUT
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

import flexshard
from flexshard.errors import FlexShardError
from flexshard.planner import TableConstraints, export_torcheasyrec, modules_of

RANKS, BATCH, MODULE = 8, 512, "model.bags"
TYPES = {"tiny": "data_parallel", "small": "table_wise", "wide": "column_wise", "large": "row_wise", "huge": "row_wise"}
ROWS = {"tiny": 50, "small": 20_000, "wide": 400_000, "large": 3_000_000, "huge": 20_000_000}
DIMS = dict.fromkeys(ROWS, 64) | {"wide": 256}  # wide enough for shards of columns


def planned() -> flexshard.Plan:
    """Tables of five sizes on one node, of four types."""
    cluster = flexshard.Cluster.preset("dgx-h100", 1)
    tables = []
    for name, rows in ROWS.items():
        counts = flexshard.AccessProfile.from_ids(
            (torch.rand(100_000, generator=torch.Generator().manual_seed(rows)) ** 3 * rows).long().numpy(),
            num_rows=rows,
        )
        tables.append(flexshard.Table(name, rows, DIMS[name], counts, pooling="sum"))
    constraints = {name: TableConstraints(sharding_types=(kind,)) for name, kind in TYPES.items()}
    return flexshard.solve(tables, cluster, batch_size=BATCH, budget="20GiB", constraints=constraints)


class Model(nn.Module):
    """What has the tables, as TorchEasyRec nests it."""

    def __init__(self) -> None:
        super().__init__()
        meta = torch.device("meta")
        self.model = nn.Module()
        self.model.bags = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=DIMS[name], feature_names=[name])
                for name, rows in ROWS.items()
            ],
            device=meta,
        )


def their_planner(checkout: Path) -> Any:
    """TorchEasyRec's module that plans."""
    stubs = {name: ModuleType(name) for name in ("tzrec", "tzrec.protos", "tzrec.protos.feature_pb2")}
    vars(stubs["tzrec"])["__path__"] = [str(checkout / "tzrec")]
    vars(stubs["tzrec.protos"])["feature_pb2"] = stubs["tzrec.protos.feature_pb2"]
    vars(stubs["tzrec.protos.feature_pb2"])["__getattr__"] = lambda _: object
    sys.modules.update(stubs)
    return importlib.import_module("tzrec.utils.plan_util")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    checkout = parser.parse_args().checkout
    if not (checkout / "tzrec/utils/plan_util.py").is_file():
        parser.error(f"{checkout} is no source tree of TorchEasyRec")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    plan = planned()
    os.environ.update(LOCAL_WORLD_SIZE=str(RANKS), RANK="0", WORLD_SIZE=str(RANKS), FORCE_LOAD_SHARDING_PLAN="1")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    module = their_planner(checkout)
    model, found = Model(), {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan"
        export_torcheasyrec(plan, modules_of(plan, [MODULE]), path)
        for name, given in (("with the file", str(path)), ("without", None)):
            planner = module.create_planner(torch.device("cuda"), BATCH, given, model=model)
            theirs = planner.plan(model, module.get_default_sharders()).plan[MODULE]
            found[name] = {table: theirs[table].sharding_type for table in ROWS}
    print(f"{RANKS} ranks, {len(ROWS)} tables; type by our plan, by TorchEasyRec's planner with the file, and without")
    for table in ROWS:
        ours = plan.pooled[table].sharding_type
        print(f"{table:6} {ours:20} {found['with the file'][table]:20} {found['without'][table]}")
    same = all(found["with the file"][table] == plan.pooled[table].sharding_type for table in ROWS)
    print("the file decides all types" if same else "TYPES DIFFER")
    return 0 if same else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FlexShardError as error:
        sys.exit(f"error: {error}")
