"""One rank of the training benchmark."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import JaggedTensor, KeyedJaggedTensor

from benchmarks.recd import data  # noqa: F401 - puts the examples on the path
from flexshard._internal import write_text
from flexshard.costmodels import PhaseCurve, StepModel
from flexshard.embeddings import DedupedJagged, InverseKeyedJaggedTensor
from flexshard.executors import Observer
from flexshard.ingestion import SessionBatch
from recd_mind import News, distributed, reader_of

BATCH, LARGER, ROUNDS, WARM = 512, 1536, 12, 2
GROUPS = [["history"]]
CT, DE, DC = (
    "by session, plain (CT)",
    "by session, deduplicated lookups (CT+DE+JIS)",
    "by session, deduplicated compute (CT+DE+DC)",
)
ONCE = "by session, reader once per impression (NRMS)"
CONFIGURATIONS: dict[str, tuple[str, bool, bool, int]] = {  # data, deduplicated lookups and compute, batch size
    "in time, plain": ("in time", False, False, BATCH),
    CT: ("by session", False, False, BATCH),
    ONCE: ("by session", False, False, BATCH),
    DE: ("by session", True, False, BATCH),
    DC: ("by session", True, True, BATCH),
    "by session, larger batch (CT+DE+DC+B)": ("by session", True, True, LARGER),
    "shuffled, plain": ("shuffled", False, False, BATCH),
    "shuffled, deduplicated": ("shuffled", True, True, BATCH),
}


class Expanding(News):
    """Looks up distinct rows, but computes on every sample's own."""

    def forward(self, batch: SessionBatch) -> tuple[Tensor, Tensor]:
        """Loss, and a logit per sample."""
        found = self.lookup(batch.features)
        history = found["history"]
        readers = self.reader(history.expand() if isinstance(history, DedupedJagged) else history)
        logits = (readers * found["candidate"].values()).sum(1) + self.bias
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.dense["label"].float()), logits


class Impressions(News):
    """As NRMS is written for rows that are impressions: a history and the articles shown, the reader computed once."""

    def forward(self, batch: SessionBatch) -> tuple[Tensor, Tensor]:
        """Loss, and a logit per article shown."""
        found = self.lookup(batch.features)
        readers, shown = self.reader(found["history"]), found["candidate"]
        logits = (readers.repeat_interleave(shown.lengths(), 0) * shown.values()).sum(1) + self.bias
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.dense["label"].float()), logits


def by_impression(batch: SessionBatch) -> SessionBatch:
    """The same samples with a row per impression."""
    session = batch.dense["session"]
    first = torch.cat([torch.tensor([True]), session[1:] != session[:-1]]).nonzero().squeeze(1)
    shown = torch.diff(first, append=torch.tensor([session.numel()]))
    plain = batch.features.to_keyed_jagged()
    history, candidate = plain["history"], plain["candidate"]
    if not bool((candidate.lengths() == 1).all()):
        raise ValueError("a sample has one candidate")
    lengths = history.lengths()[first]
    kept = torch.repeat_interleave(history.offsets()[first] - torch.cumsum(lengths, 0) + lengths, lengths)
    ids = history.values()[kept + torch.arange(kept.numel())]
    both = torch.cat([ids, candidate.values()])
    features = KeyedJaggedTensor(["history", "candidate"], both, lengths=torch.cat([lengths, shown]))
    return SessionBatch(InverseKeyedJaggedTensor([], features), batch.dense, batch.phases)


@dataclass
class Run:
    """A model and its batches."""

    model: nn.Module
    optimizer: Any
    batches: list[SessionBatch]
    seconds: list[float]
    losses: list[float]


def main() -> None:
    job = json.loads(sys.argv[1])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    runs = {}
    for name, (path, lookups, compute, size) in CONFIGURATIONS.items():
        if name == ONCE and not job["impressions"]:
            continue
        torch.manual_seed(0)
        kind = Impressions if name == ONCE else News if compute or not lookups else Expanding
        model, optimizer = distributed(kind(job["items"]))
        how: dict[str, Any] = {"rank": dist.get_rank(), "world_size": dist.get_world_size(), "drop_last": True}
        how["session"] = "session" if path == "by session" else None
        reader = reader_of(Path(job["paths"][path]), GROUPS if lookups else [], size, **how)
        found = list(itertools.islice(reader, ROUNDS + WARM))
        found = [by_impression(batch) for batch in found] if name == ONCE else found
        few = torch.tensor(len(found))
        dist.all_reduce(few, dist.ReduceOp.MIN)
        runs[name] = Run(model, optimizer, found[: int(few)], [], [])
    bytes_of = {name: observed_bytes(run) for name, run in runs.items()}
    activations = {name: activation_bytes(run) for name, run in runs.items()}
    generator, in_order = np.random.default_rng(0), list(runs.values())
    for number in range(ROUNDS + WARM):
        for place in generator.permutation(len(runs)).tolist():  # nobody always follows the same
            run = in_order[place]
            batch = run.batches[number % len(run.batches)]
            seconds, loss = timed(lambda run=run, batch=batch: step(run, batch))
            run.losses.append(loss)
            if number >= WARM:
                run.seconds.append(seconds)
    model = step_model(runs[CT], runs[DE])
    base = model.throughput(BATCH)
    results = {}
    for name, run in runs.items():
        _, lookups, compute, size = CONFIGURATIONS[name]
        factor = statistics.fmean(batch.features.dedup_factor("history") for batch in run.batches)
        if name == ONCE:
            factor = statistics.fmean(size / batch.features.stride() for batch in run.batches)
        results[name] = {
            "batch_size": size,
            "dedup_factor": factor,
            "step_seconds": statistics.median(run.seconds),
            "samples_per_s": size * dist.get_world_size() / statistics.median(run.seconds),
            "activation_bytes": activations[name],
            "bytes": bytes_of[name],
            "loss_difference": difference(run, runs[CT]) if name in (ONCE, DE, DC) else None,
            "ratio": statistics.median(
                a / b for a, b in zip(run.seconds, runs["shuffled, plain"].seconds, strict=True)
            ),
        }
        if lookups and not name.startswith("shuffled"):
            results[name]["predicted_speedup"] = model.throughput(size, dedup_factor=factor, compute=compute) / base
    if dist.get_rank() == 0:
        write_text(job["result"], json.dumps({"configurations": results}))
    dist.barrier()
    os._exit(0)


def step(run: Run, batch: SessionBatch) -> float:
    run.optimizer.zero_grad()
    loss, _ = run.model(batch)
    loss.backward()
    run.optimizer.step()
    return float(loss.detach())


def timed(work: Callable[[], float]) -> tuple[float, float]:
    """Seconds until the slowest rank is done, and what it returned."""
    dist.barrier()
    start = time.perf_counter()
    found = work()
    dist.barrier()
    return time.perf_counter() - start, found


def difference(run: Run, other: Run) -> float:
    """The largest relative difference of losses, step by step, over all ranks."""
    worst = max(abs(a - b) / abs(b) for a, b in zip(run.losses, other.losses, strict=True))
    found = torch.tensor(worst)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def activation_bytes(run: Run) -> float:
    """What the forward pass keeps for the backward pass, each storage once; the mean over ranks."""
    seen: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    parameters = {p.untyped_storage().data_ptr() for p in run.model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss, _ = run.model(run.batches[0])
    loss.backward()
    run.optimizer.zero_grad()
    total = torch.tensor(float(sum(size for place, size in seen.items() if place not in parameters)))
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def observed_bytes(run: Run) -> dict[str, float]:
    """Bytes of a rank and step by collective, of one step."""
    with Observer() as observer:
        step(run, run.batches[0])
        observer.step()
    return {f"{c.kind}@{c.group_size} {c.content}": c.bytes for c in observer.result().collectives}


def step_model(plain: Run, expanding: Run) -> StepModel:
    """Phases of a plain step at some sizes, timed one by one, as the cost model wants them."""
    lines: dict[str, list[tuple[float, float]]] = {"lookup": [], "compute": [], "rest": [], "expand": []}
    news: Any = plain.model.module
    for share in (32, 16, 4, 1):
        times: dict[str, list[float]] = {name: [] for name in lines}
        for batch in plain.batches[:8]:
            part = cut(batch, batch.features.stride() // share)
            rows = part.features.stride()
            found = news.lookup(part.features)
            history = found["history"]
            times["lookup"].append(timed(lambda p=part: look_up(news, p))[0])
            times["compute"].append(timed(lambda h=history: attend(news, h))[0])
            times["rest"].append(timed(lambda p=part: step(plain, p))[0])
            times["expand"].append(timed(lambda h=history: expand(h))[0])
        median = {name: statistics.median(found) for name, found in times.items()}
        median["rest"] = max(median["rest"] - median["lookup"] - median["compute"], 0.0)
        for name in lines:
            lines[name].append((rows, median[name]))
    del expanding
    return StepModel(**{name: PhaseCurve(tuple(points)) for name, points in lines.items()})


def cut(batch: SessionBatch, rows: int) -> SessionBatch:
    """The first rows of a plain batch."""
    whole = batch.features.to_keyed_jagged()
    stride = whole.stride()
    values, lengths = [], []
    for place, key in enumerate(whole.keys()):
        own = whole.lengths()[place * stride : place * stride + rows]
        lengths.append(own)
        values.append(whole[key].values()[: int(own.sum())])
    features = KeyedJaggedTensor(keys=whole.keys(), values=torch.cat(values), lengths=torch.cat(lengths), stride=rows)
    dense = {name: tensor[:rows] for name, tensor in batch.dense.items()}
    return SessionBatch(InverseKeyedJaggedTensor([], features), dense, batch.phases)


def look_up(news: Any, batch: SessionBatch) -> float:
    found = news.lookup(batch.features)
    values = found["history"].values()
    torch.autograd.backward(
        [values, found["candidate"].values()], [torch.zeros_like(values), torch.zeros_like(found["candidate"].values())]
    )
    return 0.0


def attend(news: Any, history: Any) -> float:
    values = history.values().detach().requires_grad_()
    readers = news.reader(JaggedTensor(values, lengths=history.lengths()))
    readers.backward(torch.zeros_like(readers))
    return 0.0


def expand(history: Any) -> float:
    values = history.values().detach().requires_grad_()
    rows = DedupedJagged(values, history.lengths(), torch.arange(history.lengths().numel()))
    found = rows.expand().values()
    found.backward(torch.zeros_like(found))
    return 0.0


if __name__ == "__main__":
    main()
