"""TorchRec's BERT4Rec example under a FlexShard plan: which lines change, and what happens to its losses.

CHECKOUT is TorchRec's source tree. Its example runs on two ranks and on ratings in the form of MovieLens 1M, changed
where the printed diff says so. It trains with fused ADAM and weight decay, which FBGEMM has on CUDA only: on CPUs the
example does not run as it is, so losses are compared with those of its ``ddp`` mode, whose item table has FBGEMM's
update written out here. Needs pandas, as the example does.

    python -m benchmarks.bert4rec CHECKOUT
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import io
import logging
import os
import random
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.nn.modules.module import register_module_forward_hook

from benchmarks.timing import machine
from flexshard import AccessProfile, Cluster, Table, solve
from flexshard._internal import as_text, new_grid
from flexshard.executors import full_state_dict
from flexshard.executors.sharding.sequences import ShardedFlexShardEmbeddingCollection
from flexshard.topologies import CollectiveRate, Level

WORLD = 2
USERS, ITEMS, LENGTHS, EXPONENT = 600, 1200, (20, 60), 0.9
DIM, LENGTH, BATCH, EPOCHS = 32, 30, 32, 2
DECAY, BETAS, EPS = 0.01, (0.9, 0.999), 1e-8
TABLE = "item_embedding"
OPTIONS = (  # the scheduler is one that does something
    f"--dataset_name ml-1m --dataset_path . --max_len {LENGTH} --emb_dim {DIM} --mask_prob 0.2 --dupe_factor 1"
    f" --train_batch_size {BATCH} --val_batch_size {BATCH} --test_batch_size {BATCH} --num_epochs {EPOCHS}"
    " --decay_step 1 --gamma 0.5"
)
# What a user of FlexShard changes: expressions that match once, and what replaces them.
IMPORT = r"from torchrec\.distributed\.embedding import EmbeddingCollectionSharder\n"
WRAPPING = r"(?s)( +)model = DMP\(\n((?: +\w+=\w+,\n)+)( +)sharders=\[.*?\n\3\],\n"
EDITS = {
    IMPORT: "from flexshard import FlexShardEmbeddingCollectionSharder, FlexShardPlanner, Plan\n",
    WRAPPING: r"""\1sharders = [FlexShardEmbeddingCollectionSharder(fused_params)]
\1plan = FlexShardPlanner(Plan.load("plan.json")).collective_plan(model_bert4rec, sharders)
\1model = DMP(
\2\3plan=plan,
\3sharders=sharders,
""",
}


# -- the example, its data and its plan


def edited(source: str) -> str:
    """The example's main file with FlexShard's lines."""
    for pattern, replacement in EDITS.items():
        source, number = re.subn(pattern, replacement, source)
        assert number == 1, f"{pattern!r} matches {number} times: another release of TorchRec?"
    return source


def write_ratings(path: Path) -> None:
    """Ratings as MovieLens 1M has them; popularity follows a power law."""
    generator, p, lines = np.random.default_rng(0), 1.0 / np.arange(1, ITEMS + 1) ** EXPONENT, []
    for user in range(1, USERS + 1):
        items = generator.choice(ITEMS, generator.integers(*LENGTHS), replace=False, p=p / p.sum()) + 1
        lines += [f"{user}::{item}::{1 + item % 5}::{second}\n" for second, item in enumerate(items)]
    path.write_text("".join(lines))


def write_plan(example: ModuleType) -> str:
    """Profile what the example looks up, and plan for two ranks with some of the rows copied to both."""
    seed(0)
    raw = example.get_raw_dataframe("ml-1m", 0, 0, 0, 0, ".")
    data = example.Bert4RecPreprocsser(raw, 0, 5, 0, "ml-1m", LENGTH, 0.2, 1).get_processed_dataframes()
    sequences, rows = np.array(data["train"]["seqs"].tolist()), len(data["smap"]) + 2
    ids = AccessProfile.from_ids(sequences.ravel(), num_rows=rows, lengths=np.full(len(sequences), LENGTH))
    ids.save("items.profile.parquet")
    rate = CollectiveRate(0.0, 1e10)
    cluster = Cluster("two ranks", 1, WORLD, 1e9, 0.0, (Level(1, None, rate), Level(WORLD, rate, None)))
    profile = AccessProfile.load("items.profile.parquet")
    table = Table(TABLE, rows, DIM, profile, optimizer="adam")
    plan = solve([table], cluster, batch_size=BATCH, budget="+96KiB", index_dedup=False)
    plan.save("plan.json")
    return f"{rows} rows: " + ", ".join(f"{tier.rows} {tier.strategy}" for tier in plan.tables[TABLE].tiers)


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 - what the example draws from
    torch.manual_seed(number)


def load(name: str) -> ModuleType:
    sys.modules.pop(name, None)
    return importlib.import_module(name)


# -- what is compared


class ReferenceTable:
    """The item table of the unsharded model, and FBGEMM's update of it.

    Attributes:
        rows: which are updated: "read" by a batch on any rank, as FBGEMM does it, or with a "gradient".
        steps: what bias correction counts: "forwards", evaluations too, as FBGEMM does it, or "updates".
        decay: decoupled weight decay.
    """

    def __init__(self, rows: str, steps: str, decay: float) -> None:
        self.rows, self.steps, self.decay = rows, steps, decay
        self.forwards = self.updates = self.read_in_vain = 0

    def wrap(self, module: Any, **options: Any) -> Any:
        """In place of the example's ``DDP``."""
        collection = module.history.ec
        self.weight = collection.embeddings[TABLE].weight
        self.mean, self.square = torch.zeros_like(self.weight), torch.zeros_like(self.weight)
        collection.register_forward_pre_hook(self._looked_up)
        return torch.nn.parallel.DistributedDataParallel(module, **options)

    def _looked_up(self, module: Any, batch: Any) -> None:
        self.forwards += 1
        if module.training:
            self.read = torch.zeros(len(self.weight), dtype=torch.int32, device=self.weight.device)
            self.read[batch[0].values()] = 1
            dist.all_reduce(self.read, dist.ReduceOp.MAX)

    @torch.no_grad()
    def update(self, learning_rate: float) -> None:
        """m, v as Adam's, w -= lr (m̂ / (√v̂ + ε) + λw), as in FBGEMM's ``codegen/genscript/optimizers.py``."""
        self.updates += 1
        gradient, self.weight.grad = self.weight.grad, None
        moved = (gradient != 0).any(1)
        self.read_in_vain += int((self.read.bool() & ~moved).sum())
        rows = torch.nonzero(self.read if self.rows == "read" else moved).view(-1)
        step, g, w = self.forwards if self.steps == "forwards" else self.updates, gradient[rows], self.weight[rows]
        mean = BETAS[0] * self.mean[rows] + (1 - BETAS[0]) * g
        square = BETAS[1] * self.square[rows] + (1 - BETAS[1]) * g * g
        change = mean / (1 - BETAS[0] ** step) / ((square / (1 - BETAS[1] ** step)).sqrt() + EPS) + self.decay * w
        self.mean[rows], self.square[rows], self.weight[rows] = mean, square, w - learning_rate * change


@dataclass
class Result:
    """Losses, shape (ranks, steps); metrics and weights, on rank 0; the largest difference between copies of a row."""

    losses: np.ndarray
    metrics: list[dict[str, float]]
    weights: dict[str, torch.Tensor]
    copies: float | None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def run(name: str, mode: str, *, decay: float = DECAY, first: int = 0, **patches: Any) -> Result:
    """Run the example's ``main`` with other names patched in; ``first``: seed of this rank's data and weights."""
    example, metrics, models = load(name), [], []
    vars(example).update(patches)
    mean, train, mine = example._dict_mean, example.train_val_test, []

    def seeded(model: Any, *args: Any) -> None:
        models.append(model)
        torch.manual_seed(1 + dist.get_rank())  # dropout, whatever was drawn while the model was sharded
        train(model, *args)

    def record(part: Any, _: Any, loss: torch.Tensor) -> None:
        if isinstance(part, torch.nn.CrossEntropyLoss):
            mine.append(loss.item())

    example._dict_mean = lambda given: metrics.append(mean(given)) or metrics[-1]
    example.train_val_test = seeded
    seed(first)
    with quiet(), register_module_forward_hook(record):
        example.main(f"{OPTIONS} --weight_decay {decay} --mode {mode}".split())
    losses: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(losses, mine)
    weights = {name.removeprefix("module."): value for name, value in full_state_dict(models[0]).items()}
    return Result(np.array(losses), metrics, weights, _difference_of_copies(models[0]))


def _difference_of_copies(model: Any) -> float | None:
    for part in model.modules():
        if isinstance(part, ShardedFlexShardEmbeddingCollection):
            values = part.tables.group_of(0).store.values[part.tables.held(0)[0][1]]  # of rows that every rank has
            copies = [torch.empty_like(values) for _ in range(WORLD)]
            dist.all_gather(copies, values)
            return float((copies[0] - copies[1]).abs().max())
    return None


def rank_main(rank: int, store: str) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    sys.path.insert(0, str(Path("example").resolve()))
    os.environ.update(LOCAL_WORLD_SIZE=str(WORLD), LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(WORLD))
    torch.set_num_threads(1)
    dist.init_process_group(init_method=f"file://{store}", rank=rank, world_size=WORLD)
    stock, ours = "bert4rec_main", "bert4rec_flexshard"
    adagrad = {"decay": 0.0, "EmbOptimType": SimpleNamespace(ADAM=EmbOptimType.EXACT_ROWWISE_ADAGRAD)}

    def reference(rows: str, steps: str, decay: float = DECAY) -> tuple[Result, ReferenceTable]:
        table = ReferenceTable(rows, steps, decay)

        class Adam(torch.optim.Adam):
            def step(self, closure: Any = None) -> Any:
                table.update(self.param_groups[0]["lr"])
                return super().step(closure)

        optim = SimpleNamespace(Adam=Adam, lr_scheduler=torch.optim.lr_scheduler)
        return run(stock, "ddp", DDP=table.wrap, optim=optim), table

    base = run(ours, "dmp")
    others: dict[str, tuple[Result, Result]] = {}
    try:
        others["the example as it is"] = run(stock, "dmp"), base
    except AssertionError as error:
        if rank == 0:
            print(f"The example as it is, mode dmp: {error}")
    read, table = reference("read", "updates")
    others["reference: rows read, updates"] = read, base
    others["the same without the table's decay"] = reference("read", "updates", 0.0)[0], base
    others["reference: rows with a gradient, updates"] = reference("gradient", "updates")[0], base
    others["reference: rows read, forwards (FBGEMM)"] = reference("read", "forwards")[0], base
    others["mode ddp as it is: Adam of all rows, L2"] = run(stock, "ddp"), base
    others["mode dmp, row-wise Adagrad in both"] = run(stock, "dmp", **adagrad), run(ours, "dmp", **adagrad)
    own = run(ours, "dmp", first=rank)
    if rank == 0:
        report(others)
        print(f"{table.read_in_vain} times a row was read and had a gradient of 0.")
        print(f"Copies of a row differ by {base.copies:.1e}; where ranks draw weights of their own, {own.copies:.1e}.")
    dist.destroy_process_group()


def report(others: dict[str, tuple[Result, Result]]) -> None:
    """Every comparison: largest difference of losses over ranks and steps, of metrics, and of weights."""
    columns = ["losses, first 50", "losses, all", "recall, NDCG", "item table", "dense part"]
    grid = new_grid("FlexShard beside: largest absolute difference", ["beside"], columns)
    for name, (other, ours) in others.items():
        losses = np.abs(other.losses - ours.losses)
        metrics = [abs(a[key] - b[key]) for a, b in zip(other.metrics, ours.metrics, strict=True) for key in a]
        weights = {key: float((value - other.weights[key]).abs().max()) for key, value in ours.weights.items()}
        table = weights.pop(f"history.ec.embeddings.{TABLE}.weight")
        values = [losses[:, :50].max(), losses.max(), max(metrics), table, max(weights.values())]
        grid.add_row(name, *(f"{value:.1e}" for value in values))
    print(as_text(grid))
    _, ours = next(iter(others.values()))
    steps, metrics = ours.losses.mean(0), {key: round(float(value), 4) for key, value in ours.metrics[-1].items()}
    print(f"{len(steps)} steps, losses {steps[0]:.3f} to {steps[-1]:.3f}; test {metrics}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="TorchRec's source tree, release 1.8.0")
    source = parser.parse_args().checkout.resolve() / "examples" / "bert4rec"
    if not source.is_dir():
        parser.error(f"{source} is not there")
    print(machine())
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        shutil.copytree(source, "example")
        before = Path("example/bert4rec_main.py").read_text()
        after = edited(before)
        Path("example/bert4rec_flexshard.py").write_text(after)
        print("\n".join(difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")))
        write_ratings(Path("ratings.dat"))
        sys.path.insert(0, str(Path("example").resolve()))
        with quiet():
            plan = write_plan(load("bert4rec_main"))
        print(f"\n{USERS} users, {plan}", flush=True)
        mp.spawn(rank_main, args=(f"{folder}/store",), nprocs=WORLD)


if __name__ == "__main__":
    main()
