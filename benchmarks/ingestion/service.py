"""The ingestion service against reading in the trainer's process, and against Ray Data.

800,000 samples of 20 ids and 2 numbers, ids hashed, numbers logarithms. Peers: ``pyarrow.dataset`` in the trainer's
process, with all its threads, the same transforms, a KeyedJaggedTensor a batch; Ray Data's documented way,
``map_batches`` of NumPy columns and ``iter_torch_batches``. Every rate is of an epoch after a first one, in turn.
"""

from __future__ import annotations

import random
import resource
import shutil
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from os import kill
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from flexshard._internal import as_text, new_grid
from flexshard.ingestion import HashIds, IngestionClient, IngestionSpec, SplitLedger, batch_hash
from flexshard.ingestion.service.workers import ProcessPool

__all__ = ["kills", "ledger", "rates", "stages", "trainer"]

ROWS, BATCH, ROUNDS, TABLE = 800_000, 4096, 5, 1_000_000
IDS, NUMBERS = [f"s{number}" for number in range(20)], ["d0", "d1"]


def job(folder: Path) -> IngestionSpec:
    """The job, and its data."""
    path = folder / "samples.parquet"
    if not path.exists():
        generator = np.random.default_rng(0)
        columns: dict[str, Any] = {name: generator.zipf(1.2, ROWS) % (1 << 40) for name in IDS}
        columns |= {name: generator.exponential(10, ROWS).astype(np.float32) for name in NUMBERS}
        pq.write_table(pa.table(columns), path, row_group_size=50_000, compression="zstd")
    return IngestionSpec(
        paths=str(path),
        batch_size=BATCH,
        features=IDS,
        dense=NUMBERS,
        transforms=[{"op": "hash_ids", "num_rows": TABLE}, {"op": "log", "columns": NUMBERS}],
    )


def long_job(folder: Path) -> IngestionSpec:
    """The same job on four times the data, so that the start of an epoch does not decide."""
    spec = job(folder)
    several = folder / "several"
    several.mkdir(exist_ok=True)
    for number in range(4):
        shutil.copy(folder / "samples.parquet", several / f"{number}.parquet")
    return IngestionSpec(**(spec.model_dump() | {"paths": str(several)}))


def in_process(folder: Path) -> Iterator[object]:
    """``pyarrow.dataset`` with its threads, and the same transforms."""
    hashed = HashIds(TABLE)
    lengths = torch.ones(BATCH * len(IDS), dtype=torch.int32)
    scanner = pads.dataset(folder / "samples.parquet").to_batches(columns=IDS + NUMBERS, batch_size=BATCH)
    for batch in scanner:
        values = torch.cat([torch.from_dlpack(batch.column(name)) for name in IDS])
        rows = batch.num_rows
        sparse = hashed(KeyedJaggedTensor(IDS, values, lengths=lengths[: rows * len(IDS)]))
        yield sparse, [torch.from_dlpack(batch.column(name)).clamp(min=0).log1p() for name in NUMBERS]


def ray_data(folder: Path) -> Iterator[object]:
    """As Ray's documentation has it: NumPy columns mapped by workers, tensors iterated over."""
    import ray.data

    def change(columns: dict[str, Any]) -> dict[str, Any]:
        values = torch.from_numpy(np.concatenate([columns[name] for name in IDS]))
        rows = len(columns[IDS[0]])
        hashed = HashIds(TABLE).change(values, torch.ones(len(values)), None)[0].numpy()
        found = {name: hashed[place * rows : (place + 1) * rows] for place, name in enumerate(IDS)}
        return found | {name: np.log1p(np.maximum(columns[name], 0)) for name in NUMBERS}

    data = ray.data.read_parquet(str(folder / "samples.parquet"))
    changed = data.map_batches(change, batch_size=BATCH, batch_format="numpy")
    for batch in changed.iter_torch_batches(batch_size=BATCH):
        values = torch.cat([batch[name] for name in IDS])
        yield KeyedJaggedTensor(IDS, values, lengths=torch.ones(len(values), dtype=torch.int32))


def rates(folder: Path, *, with_ray: bool) -> None:
    """Samples per second of an epoch, every way in turn."""
    spec = job(folder)
    clients: dict[str, IngestionClient] = {
        "2 processes": IngestionClient(spec, workers=2),
        "2 threads": IngestionClient(spec, workers=2, backend="threads"),
    }
    ways: dict[str, Callable[[], Any]] = {"pyarrow in process": lambda: in_process(folder), "reader": spec.reader}
    if with_ray:
        import ray.data

        # Room for Ray Data beside our actors, which wait while it works.
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
        ray.data.DataContext.get_current().enable_progress_bars = False
        clients["2 Ray actors"] = IngestionClient(spec, workers=2, backend="ray")
        ways["Ray Data"] = lambda: ray_data(folder)
    for name, client in clients.items():
        ways[name] = lambda client=client: client
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS + 1):
        for name, make in ways.items():
            start = time.perf_counter()
            for _ in make():
                pass
            times[name].append(time.perf_counter() - start)
    for client in clients.values():
        client.close()
    base = statistics.median(times["pyarrow in process"][1:])
    grid = new_grid(
        f"{ROWS:,} samples of {len(IDS)} ids, {ROUNDS} epochs in turn, medians", ["way"], ["samples/s", "of pyarrow's"]
    )
    for name, found in times.items():
        seconds = statistics.median(found[1:])
        grid.add_row(name, f"{ROWS / seconds:,.0f}", f"{base / seconds:.2f}")
    print(as_text(grid, 110), flush=True)
    if with_ray:
        ours = statistics.median(times["2 Ray actors"][1:])
        print(f"2 Ray actors over Ray Data: {statistics.median(times['Ray Data'][1:]) / ours:.1f}")


def stages(folder: Path) -> None:
    """CPU time of a worker by stage, and the bytes that each moves: at least what it takes in and gives (Figures 4, 5).

    Counters of the memory itself are not to be had in a virtual machine; caches may serve some of these bytes.
    """
    spec = job(folder)
    reader = spec.reader()
    torch.set_num_threads(1)
    list(reader)
    phases = [batch.phases for batch in reader]
    samples = sum(phase.samples for phase in phases)
    stored, sent = (sum(getattr(phase, name) for phase in phases) for name in ("bytes_read", "bytes_sent"))
    decoded = samples * (8 * len(IDS) + 4 * len(NUMBERS))
    moved = {"fill": stored + decoded, "convert": decoded + sent, "process": 2 * sent}
    seconds = {name: sum(getattr(phase, f"{name}_seconds") for phase in phases) for name in moved}
    block = np.ones(1 << 28, np.uint8)
    other = np.ones_like(block)
    copy = statistics.median(_seconds(lambda: np.copyto(other, block)) for _ in range(ROUNDS))
    copied = 2 * block.nbytes / copy
    grid = new_grid(
        f"A worker on one thread; copying memory moves {copied / 1e9:.1f} GB/s here",
        ["stage"],
        ["of its time", "ns per sample", "bytes per sample", "GB/s", "of copying"],
    )
    titles = {"fill": "extract (read, decode)", "convert": "to tensors", "process": "transform"}
    for name, title in titles.items():
        rate = moved[name] / seconds[name]
        grid.add_row(
            title,
            f"{seconds[name] / sum(seconds.values()):.0%}",
            f"{1e9 * seconds[name] / samples:.0f}",
            f"{moved[name] / samples:.0f}",
            f"{rate / 1e9:.2f}",
            f"{rate / copied:.0%}",
        )
    print(as_text(grid, 110), flush=True)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def trainer(folder: Path) -> None:
    """A trainer that sleeps for its step: what it waits with batches made in line, on one thread, and with workers.

    (With torch's threads on both cores, making batches in line takes what two workers take, and leaves nothing to win.)
    """
    spec = long_job(folder)
    reader = spec.reader()
    torch.set_num_threads(1)
    list(reader)
    start = time.perf_counter()
    count = sum(1 for _ in reader)
    each = (time.perf_counter() - start) / count
    step = each * 0.44 / 0.56  # Table 2: 56 % of the time in line
    waits: dict[str, float] = {}
    waits["in line"] = waiting(reader, step)
    for workers in (1, 2):
        with IngestionClient(spec, workers=workers) as client:
            list(client)
            waits[f"{workers} processes"] = waiting(client, step)
    grid = new_grid(
        f"A step of {1e3 * step:.1f} ms (asleep), a batch takes {1e3 * each:.1f} ms", ["batches"], ["waits"]
    )
    for name, share in waits.items():
        grid.add_row(name, f"{share:.1%}")
    print(as_text(grid, 110), flush=True)


def waiting(batches: Any, step: float) -> float:
    """Share of the time that a trainer waits, after its first batch."""
    waited = trained = 0.0
    found = iter(batches)
    batch = next(found)
    while batch is not None:
        start = time.perf_counter()
        following = next(found, None)
        waited += time.perf_counter() - start
        start = time.perf_counter()
        batch = following  # the one before is let go here, as a trainer's loop does
        time.sleep(step)
        trained += time.perf_counter() - start
    return waited / (waited + trained)


def kills(folder: Path, number: int) -> None:
    """Processes killed at random times, as long as batches come in between: the same hashes, and every row once."""
    spec = job(folder)
    expected = [batch_hash(batch) for batch in spec.reader()]
    done, generator, epochs, rows = 0, random.Random(0), 0, 0
    with IngestionClient(spec, workers=2) as client:
        pool, over = client._pool, threading.Event()
        assert isinstance(pool, ProcessPool)

        def work() -> None:
            nonlocal done
            before = -1
            while done < number and not over.is_set():
                time.sleep(generator.uniform(0.0, 0.5))
                if pool.pids and rows != before:
                    before = rows
                    kill(generator.choice(pool.pids), signal.SIGKILL)
                    done += 1

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        while done < number:
            found = []
            for batch in client:
                found.append(batch_hash(batch))
                rows += batch.phases.samples
            assert found == expected, "batches differ"
            epochs += 1
        over.set()
        print(
            f"{done} kills in {epochs} epochs of {len(expected)} batches: the same hashes, {rows:,} rows of"
            f" {epochs * ROWS:,}; {client.stats.restarts} splits read again"
        )


def ledger(workers: int = 10_000, splits: int = 1_000_000, clients: int = 128) -> None:
    """The master alone: leases and ends of a large job, some of them lost."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    book, generator = SplitLedger(), random.Random(0)
    for worker in range(workers):
        book.add_worker(worker)
    for client in range(clients):
        book.attach(client, splits // clients)
    decisions, held = 0, []
    start = time.perf_counter()
    alive = True
    while alive:
        alive = False
        for client in range(clients):
            for _ in range(workers // clients):
                lease = book.lease(client)
                if lease is not None:
                    held.append(lease)
                    alive = True
        for lease in held:
            book.finish(book.again(lease) if generator.random() < 0.01 else lease)
        decisions += 2 * len(held)
        held.clear()
    seconds = time.perf_counter() - start
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    print(
        f"ledger: {workers:,} workers, {splits // clients * clients:,} splits, {clients} clients:"
        f" {decisions / seconds:,.0f} decisions/s, {grown:.2f} GiB more"
    )
