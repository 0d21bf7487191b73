"""How much more than the mean the busiest rank sends: with each table's rows dealt to the ranks from where the plan has
it, all of them from rank 0, or in blocks of consecutive rows as TorchRec's row-wise sharding has them.

Plans are made from the first half of each log, and replayed on batches of its second half in order. Ids are numbered as
they come (sorted), and by popularity, as ``flexshard encode`` does. No GPU and no network is needed.

    python -m benchmarks.holders DATA
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice, product
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
import pyarrow.parquet as pq

import flexshard
from benchmarks.row_balance import by_popularity
from flexshard import AccessProfile, Cluster, Plan, Table
from flexshard._internal import as_text, new_grid
from flexshard.executors import Lookups, replay, split_by_rank

DIM, LOOKUPS, STEPS = 64, 100, 12
CLICKS = ("user_id", "item_id", "click_environment", "click_deviceGroup", "click_os", "click_country", "click_region")
Samples = dict[str, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]  # of each table: ids, and how many of each


def globo(folder: Path) -> Samples:
    """Every click a sample: one id of each table."""
    log = pq.read_table(folder / "globo_clicks.parquet").sort_by([("timestamp", "ascending")])
    return {name: (numbered(log[name].to_numpy()), np.ones(log.num_rows, np.int64)) for name in CLICKS}


def ecommerce(folder: Path) -> Samples:
    """Every 100 lookups a sample: those of each of 30 tables."""
    log = pq.read_table(folder / "ecommerce_orm_busy.parquet")
    number = log.num_rows // LOOKUPS
    sample, found = np.arange(log.num_rows) // LOOKUPS, {}
    for table in pc.unique(log["table_id"]).to_pylist():
        here = pc.equal(log["table_id"], table).to_numpy() & (sample < number)
        ids = numbered(log["entity_id"].to_numpy()[here])
        found[f"t{table}"] = ids, np.bincount(sample[here], minlength=number)
    return found


def numbered(values: npt.NDArray[np.generic]) -> npt.NDArray[np.int64]:
    """Values by their order."""
    return np.unique(values, return_inverse=True)[1].astype(np.int64)


def part(samples: Samples, first: int, end: int) -> Samples:
    """Some of the samples."""
    found = {}
    for name, (ids, lengths) in samples.items():
        starts = np.concatenate([[0], np.cumsum(lengths)])
        found[name] = ids[starts[first] : starts[end]], lengths[first:end]
    return found


def busiest(plan: Plan, profiles: Mapping[str, AccessProfile], samples: Samples) -> float:
    """Bytes of rows that the busiest rank sends over the mean's, at the level that sends most; mean of the steps."""
    sent = [one.sent for one in replay(plan, steps_of(plan, samples), profiles).traffic if one.content == "embeddings"]
    most = max(sent, key=np.sum)
    return float((most.max(axis=1) / most.mean(axis=1)).mean())


def steps_of(plan: Plan, samples: Samples) -> list[dict[str, Lookups]]:
    """The first batches of all ranks."""
    batches = split_by_rank(samples, world_size=plan.cluster.world_size, batch_size=plan.settings.batch_size)
    return list(islice(batches, STEPS))


def in_blocks(plan: Plan, samples: Samples) -> float:
    """The same where every rank has consecutive rows of every table, as in TorchRec's row-wise sharding."""
    world, found = plan.cluster.world_size, []
    for step in steps_of(plan, samples):
        served = np.zeros(world)
        for name, lookups in step.items():
            rows, ids, ranks = plan.tables[name].rows, lookups.ids, lookups.ranks.astype(np.int64)
            if plan.tables[name].index_dedup:
                ids = np.unique(ranks * rows + ids) % rows
            served += np.bincount(ids // -(-rows // world), minlength=world)
        found.append(served.max() / served.mean())
    return float(np.mean(found))


def priced(plan: Plan) -> float:
    """The same as the plan has it: by its hottest row alone."""
    most = max((one for one in plan.predicted.collectives if one.content == "embeddings"), key=lambda one: one.nbytes)
    return 1 + most.excess_bytes / most.nbytes


def from_rank_0(plan: Plan) -> Plan:
    """The same with every tier beginning at rank 0 of its groups."""
    tables = {
        name: replace(table, tiers=tuple(replace(tier, first_holder=0) for tier in table.tiers))
        for name, table in plan.tables.items()
    }
    return replace(plan, tables=tables)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="folder of globo_clicks.parquet and ecommerce_orm_busy.parquet")
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args()
    columns = ["log", "ids", "ranks", "placement", "ids once", "in blocks", "from rank 0", "as planned", "priced"]
    grid = new_grid("Rows that the busiest rank sends, over the mean", columns[:5], columns[5:])
    for name, read in (("Globo.com", globo), ("e-commerce", ecommerce)):
        as_logged = read(args.data)
        popular = {table: (by_popularity(ids), lengths) for table, (ids, lengths) in as_logged.items()}
        for numbering, samples in (("sorted", as_logged), ("by popularity", popular)):
            number = len(next(iter(samples.values()))[1])
            later, tables = part(samples, number // 2, number), []
            for table, (ids, lengths) in part(samples, 0, number // 2).items():
                rows = int(samples[table][0].max()) + 1
                tables.append(Table(table, rows, DIM, AccessProfile.from_ids(ids, lengths=lengths, num_rows=rows)))
            profiles = {table.name: table.profile for table in tables}
            for nodes, (tiers, once) in product((1, 4), ((1, False), (1, True), (3, "auto"))):
                cluster = Cluster.preset("dgx-h100", nodes=nodes)
                plan = flexshard.solve(tables, cluster, batch_size=args.batch_size, tiers=tiers, index_dedup=once)
                found = [busiest(one, profiles, later) for one in (from_rank_0(plan), plan)]
                cells = name, numbering, str(cluster.world_size), "row-wise" if tiers == 1 else "tiers", str(once)
                blocks = f"{in_blocks(plan, later):.2f}" if tiers == 1 else ""
                grid.add_row(*cells, blocks, *(f"{one:.2f}" for one in (*found, priced(plan))))
    print(as_text(grid))
    return 0


if __name__ == "__main__":
    sys.exit(main())
