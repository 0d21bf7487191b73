"""Plans in TorchRec's and TorchEasyRec's own files: read and run there without FlexShard."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torchrec")

from flexshard import AccessProfile, Cluster, Plan, Table, solve
from flexshard.errors import PlanError
from flexshard.planner import TableConstraints, export_torcheasyrec, export_torchrec, modules_of
from flexshard.topologies import CollectiveRate, Level
from tests.commands import run

RATE = CollectiveRate(1e-6, 1e10)
CLUSTER = Cluster("c", 1, 2, 1e9, 0.0, (Level(1, None, RATE), Level(2, RATE, None)))

# What a user of TorchRec writes, with nothing of FlexShard's to import.
STOCK = """
import sys
sys.modules["flexshard"] = None
import torch, torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel

import os
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=rank, world_size=2)
plan = torch.load("plan.pt", weights_only=False)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        bags = [EmbeddingBagConfig(name=n, embedding_dim=16, num_embeddings=r, feature_names=[n]) for n, r in ROWS]
        self.bags = EmbeddingBagCollection(bags)
        self.words = EmbeddingCollection(
            [EmbeddingConfig(name="s", embedding_dim=16, num_embeddings=401, feature_names=["s"])]
        )

    def forward(self, batch):
        return self.bags(batch).values().sum(), self.words(batch)["s"].values().sum()

batch = KeyedJaggedTensor.from_lengths_sync(
    ["a", "b", "c", "s"], torch.tensor([1, 49, 3, 6, 5, 8, 400, 7]), torch.tensor([1, 1, 1, 1, 1, 0, 0, 3])
)
alone = [float(one) for one in Model()(batch)]
model = DistributedModelParallel(
    Model(), plan=plan, sharders=[EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()],
    device=torch.device("cpu"), init_data_parallel=True,
)
assert model.plan.plan.keys() == {"bags", "words"}, model.plan
reference = Model()
for name, weight in model.state_dict().items():  # ranks drew alike; shards hold their part of it
    whole = reference.state_dict()[name]
    for shard in weight.local_shards() if hasattr(weight, "local_shards") else []:
        (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        shard.tensor.copy_(whole[row : row + rows, column : column + columns])
    if not hasattr(weight, "local_shards"):
        weight.copy_(whole)
found = [float(one) for one in model(batch)]
assert all(abs(a - b) < 1e-4 for a, b in zip(alone, found)), (alone, found)
print("ok", sorted({p.sharding_type for m in plan.plan.values() for p in m.values()}), flush=True)
dist.destroy_process_group()
os._exit(0)  # gloo's threads end with their group, which the model still holds; later they may abort it all
"""


def profile(rows: int) -> AccessProfile:
    return AccessProfile.from_counts(np.ceil(5_000 / np.arange(1, rows + 1)).astype(np.int64), 1_000)


def planned(**how: Any) -> Plan:
    tables = [
        Table(name, rows, 16, profile(rows), pooling="sum") for name, rows in (("a", 1000), ("b", 50), ("c", 777))
    ]
    return solve([*tables, Table("s", 401, 16, profile(401))], CLUSTER, batch_size=64, tiers=1, **how)


def test_stock_torchrec_reads_and_runs_it(tmp_path: Path) -> None:
    plan = planned(constraints={"s": TableConstraints(sharding_types=["row_wise"])})
    modules = modules_of(plan, ["bags", "s=words"])
    assert modules == {"a": "bags", "b": "bags", "c": "bags", "s": "words"}
    export_torchrec(plan, modules, tmp_path / "plan.pt", device="cpu")
    script = STOCK.replace("ROWS", "(('a', 1000), ('b', 50), ('c', 777))")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", script],
            cwd=tmp_path,
            env=os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=240) for process in ranks]
    for process, (out, errors) in zip(ranks, said, strict=True):
        assert process.returncode == 0, errors
        assert out.startswith("ok")


def test_torcheasyrecs_plan_names_types_kernels_and_ranks(tmp_path: Path) -> None:
    plan = planned()
    export_torcheasyrec(plan, modules_of(plan, ["model.ebc", "s=model.ec"]), tmp_path / "plan")
    document = json.loads((tmp_path / "plan").read_text())
    assert document.keys() == {"model.ebc", "model.ec"}
    for name, table in plan.pooled.items():
        assert document["model.ec" if name == "s" else "model.ebc"][name] == {
            "sharding_type": table.sharding_type,
            "compute_kernel": table.compute_kernel,
            "ranks": [shard.rank for shard in table.shards],
        }
    assert document["model.ec"]["s"]["sharding_type"] in ("row_wise", "data_parallel")
    plan.save(tmp_path / "plan.json")
    how = ("export", "plan.json", "--module", "model.ebc", "--module", "s=model.ec", "-o", "other", "--to")
    done = run(tmp_path, *how, "torcheasyrec", "--device", "cpu")
    assert (done.returncode, "--device is about plans of TorchRec" in done.stderr) == (2, True)
    assert run(tmp_path, *how, "torcheasyrec").returncode == 0
    assert (tmp_path / "other").read_bytes() == (tmp_path / "plan").read_bytes()


def test_tiers_and_tables_of_no_module_are_refused_by_name(tmp_path: Path) -> None:
    cluster = Cluster("c", 2, 2, 1e12, 0.0, (Level(1, None, RATE), Level(2, RATE, RATE), Level(4, RATE, None)))
    tiered = solve([Table("s", 40_000, 16, profile(40_000))], cluster, batch_size=64)
    assert len(tiered.tables["s"].tiers) > 1
    with pytest.raises(PlanError, match="table 's' has tiers"):
        export_torchrec(tiered, {"s": "words"}, tmp_path / "plan.pt")
    assert not list(tmp_path.iterdir())
    with pytest.raises(PlanError, match="which module has table 's'"):
        modules_of(tiered, [])
    with pytest.raises(PlanError, match="no table 'x'; there are s"):
        modules_of(tiered, ["x=words"])
    with pytest.raises(PlanError, match="module sparse has table 'c', which is pooled, and 's', which is not"):
        modules_of(planned(), ["sparse"])
    with pytest.raises(PlanError, match="bags and words are both the module of all tables"):
        modules_of(tiered, ["bags", "words"])
    with pytest.raises(PlanError, match="table 's' is in module bags already"):
        modules_of(tiered, ["s=bags", "s=words"])


def test_names_are_those_in_their_modules(tmp_path: Path) -> None:
    """A plan of several modules that have tables of one name is keyed by both."""
    tables = [Table(name, 100, 16, profile(100), pooling="sum") for name in ("user.t", "item.t", "a=b")]
    plan = solve(tables, CLUSTER, batch_size=64)
    modules = modules_of(plan, ["user.t=user", "item.t=item", "a=b=other"])
    export_torcheasyrec(plan, modules, tmp_path / "plan")
    document = json.loads((tmp_path / "plan").read_text())
    assert {module: list(found) for module, found in document.items()} == {
        "user": ["t"],
        "item": ["t"],
        "other": ["a=b"],
    }


def test_sequences_that_torchrec_cannot_run_on_cpus(tmp_path: Path) -> None:
    small = solve([Table("s", 5, 16, profile(5))], CLUSTER, batch_size=64, tiers=1, budget="1GB")
    assert [tier.group_size for tier in small.tables["s"].tiers] == [1]
    with pytest.raises(PlanError, match="table 's' has a copy on every rank"):
        export_torchrec(small, {"s": "words"}, tmp_path / "plan.pt", device="cpu")
    export_torchrec(small, {"s": "words"}, tmp_path / "plan.pt")
    asked = {"s": TableConstraints(sharding_types=["row_wise"])}
    empty = solve([Table("s", 1, 16, profile(1))], CLUSTER, batch_size=64, constraints=asked)
    with pytest.raises(PlanError, match="table 's' leaves some ranks without rows"):
        export_torchrec(empty, {"s": "words"}, tmp_path / "plan.pt", device="cpu")
    one = Cluster("one", 1, 1, 1e9, 0.0, (Level(1, None, None),))
    export_torcheasyrec(solve([Table("s", 5, 16, profile(5))], one, batch_size=64), {"s": "words"}, tmp_path / "one")
    assert json.loads((tmp_path / "one").read_text())["words"]["s"]["sharding_type"] == "row_wise"


def test_types_are_said(tmp_path: Path) -> None:
    solve([Table("s", 401, 16, profile(401), dtype="float16")], CLUSTER, batch_size=64).save(tmp_path / "plan.json")
    done = run(tmp_path, "export", "plan.json", "--module", "words", "-o", "out", "--to", "torcheasyrec")
    assert "which has to have these tables as they were planned: s float16" in done.stdout
