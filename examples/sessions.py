"""Logs of sessions for ``recd_mind.py``: MIND's impressions, one row per candidate, or generated ones."""

from __future__ import annotations

from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def write_mind(source: str, folder: Path, *, held_out: float = 0.1) -> tuple[Path, Path, int]:
    """The last impressions apart, rows in order of time, texts as numbers from 1 on.

    Returns:
        log to train on, log to measure on, and one more than the largest number of an article.
    """
    database = duckdb.connect()
    database.execute(
        f"""
        CREATE TABLE seen AS SELECT impression_id AS session, timestamp AS time, history, candidates, labels
        FROM read_parquet('{source}');
        CREATE TABLE articles AS SELECT name, row_number() OVER (ORDER BY name) AS id FROM (
            SELECT DISTINCT unnest(list_concat(history, candidates)) AS name FROM seen);
        CREATE TABLE histories AS SELECT session, list(id ORDER BY place) AS history FROM (
            SELECT session, unnest(history) AS name, generate_subscripts(history, 1) AS place FROM seen
        ) JOIN articles USING (name) GROUP BY session;
        CREATE TABLE rows AS SELECT r.session, r.time, coalesce(h.history, []) AS history, a.id AS candidate, r.label
        FROM (SELECT session, time, unnest(candidates) AS name, unnest(labels) AS label FROM seen) r
        JOIN articles a USING (name) LEFT JOIN histories h USING (session);
        """
    )
    (split,) = database.sql(f"SELECT quantile_disc(time, {1 - held_out}) FROM seen").fetchall()[0]
    folder.mkdir(parents=True, exist_ok=True)
    logs = folder / "log.parquet", folder / "held_out.parquet"
    for path, where in zip(logs, (f"time < {split}", f"time >= {split}"), strict=True):
        # Within a second, the log server writes in no order of sessions.
        query = f"SELECT * FROM rows WHERE {where} ORDER BY time, hash(session, candidate)"
        database.execute(f"COPY ({query}) TO '{path}' (FORMAT parquet, COMPRESSION zstd)")
    (items,) = database.sql("SELECT max(id) + 1 FROM articles").fetchall()[0]
    return *logs, int(items)


def write_generated(
    folder: Path,
    *,
    sessions: int = 3000,
    mean_samples: float = 16.5,
    same: float = 0.85,
    length: int = 60,
    items: int = 20_000,
    seed: int = 0,
    held_out: float = 0.1,
) -> tuple[Path, Path, int]:
    """Sessions with the statistics of the RecD paper: 16.5 samples, of which four in five repeat their history.

    All sessions last for the hour that the log is of. A reader reads articles of three topics, and clicks on those.

    Args:
        folder: to write to.
        sessions: how many.
        mean_samples: per session; geometric, so that a few are long.
        same: probability that the history stays from one sample to the next; else an article is added at its end and
            the oldest goes.
        length: mean length of a history.
        items: articles, of 50 topics.
        seed: of the random numbers.
        held_out: share of sessions, the last ones, to measure on.

    Returns:
        as :func:`write_mind`.
    """
    generator = np.random.default_rng(seed)
    topics = 50
    popularity = 1.0 / np.arange(1, items // topics + 1) ** 0.8
    popularity = np.cumsum(popularity / popularity.sum())

    def articles(topic: np.ndarray) -> np.ndarray:
        return 1 + topic + topics * np.searchsorted(popularity, generator.random(topic.size))

    counts = generator.geometric(1 / mean_samples, sessions)
    session = np.repeat(np.arange(sessions), counts)
    liked = generator.integers(0, topics, (sessions, 3))
    change = generator.random(session.size) >= same
    change[np.cumsum(counts) - counts] = False
    added = np.cumsum(change)
    added -= np.repeat(added[np.cumsum(counts) - counts], counts)  # articles added before each sample
    sizes = generator.integers(length // 2, 3 * length // 2 + 1, sessions)
    # What each reader reads, first to last: a history is a run of it.
    streams = sizes + np.bincount(session, change, sessions).astype(np.int64)
    reader = np.repeat(np.arange(sessions), streams)
    read = articles(liked[reader, generator.integers(0, 3, reader.size)])
    begins, each = (np.cumsum(streams) - streams)[session] + added, sizes[session]
    places = np.repeat(begins - (np.cumsum(each) - each), each) + np.arange(each.sum())
    history = pa.ListArray.from_arrays(np.concatenate([[0], np.cumsum(each)]).astype(np.int32), read[places])
    topic = generator.integers(0, topics, session.size)
    of_interest = generator.random(session.size) < 0.3
    topic = np.where(of_interest, liked[session, generator.integers(0, 3, session.size)], topic)
    click = generator.random(session.size) < np.where((topic[:, None] == liked[session]).any(axis=1), 0.5, 0.05)
    time = np.floor(3600e3 * generator.random(session.size))  # milliseconds
    time = time[np.lexsort((time, session))].astype(np.int64)  # ascending within a session
    columns = {"session": session, "time": time, "history": history, "candidate": articles(topic)}
    table = pa.table(columns | {"label": click.astype(np.int8)}).sort_by("time")
    folder.mkdir(parents=True, exist_ok=True)
    logs = folder / "log.parquet", folder / "held_out.parquet"
    last = table["session"].to_numpy() >= round(sessions * (1 - held_out))
    for path, rows in zip(logs, (~last, last), strict=True):
        pq.write_table(table.filter(pa.array(rows)), path, compression="zstd", compression_level=3)
    return *logs, items + topics + 1
