"""A log of clicks: written at random or read from a file, and cut into the batches of a next-click model.

    python examples/clicks.py clicks.parquet       # writes a log to try the model on

Popularity of the written log follows Zipf's law. Every article has a few successors, drawn by popularity, and a click
often leads to one of them: a model that looks at the last click beats popularity.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from one_line import above_0, run_example

IntArray = npt.NDArray[np.int64]

MAX_HISTORY = 20  # clicks before the one to predict
RECENT = 1500  # clicks: what is popular now
CANDIDATE_HOURS = 24
LOG_SHARE = 0.998  # of the clicks in order of time; real logs have stragglers over weeks
SUCCESSORS = np.array([0.6, 0.3, 0.1])  # how often a click leads to the first, second, ... successor of its article
MORE = 0.65  # chance of another click after the second of a session


def write_log(
    path: Path, *, items: int, sessions: int, exponent: float = 1.0, follow: float = 0.7, seed: int = 0
) -> None:
    """Clicks half a minute apart, in sessions that start at any time in 16 days; ``follow`` of them are led by the one
    before.
    """
    rng = np.random.default_rng(seed)
    shares = np.arange(1, items + 1) ** -exponent
    popularity = rng.permutation(shares / shares.sum())  # ids say nothing about popularity
    successors = rng.choice(items, (items, len(SUCCESSORS)), p=popularity)
    lengths = np.minimum(1 + rng.geometric(1 - MORE, sessions), MAX_HISTORY)
    clicks = rng.choice(items, (sessions, lengths.max()), p=popularity)
    follows = rng.random(clicks.shape) < follow
    which = rng.choice(len(SUCCESSORS), clicks.shape, p=SUCCESSORS)
    for step in range(1, clicks.shape[1]):
        led = successors[clicks[:, step - 1], which[:, step]]
        clicks[:, step] = np.where(follows[:, step], led, clicks[:, step])
    place = np.arange(clicks.shape[1])
    starts = 1_700_000_000_000 + np.sort(rng.integers(0, 16 * 86_400_000, sessions))
    happens = place < lengths[:, None]
    columns = {
        "user_id": np.repeat(rng.integers(0, max(1, sessions // 3), sessions), lengths),
        "session_id": np.repeat(np.arange(sessions), lengths),
        "item_id": clicks[happens],
        "timestamp": (starts[:, None] + 30_000 * place)[happens],
    }
    pq.write_table(pa.table(columns), path, compression="zstd")


@dataclass(frozen=True)
class ClickLog:
    """Clicks twice, in order of time and by user, and the sessions in order of their last click.

    Attributes:
        num_items: articles; ``items`` counts them from 0.
        items, times: of the clicks in order of time.
        by_user: articles of the clicks in order of user, then time.
        start, opening, last: per session in ``by_user``: where its sample starts, its first click to predict, its last.
        closes: per session, its last click's place in order of time.
        order: places in order of time of the clicks in ``by_user``.
        readers: user of each session.
    """

    num_items: int
    items: IntArray
    times: IntArray
    by_user: IntArray
    start: IntArray
    opening: IntArray
    last: IntArray
    closes: IntArray
    order: IntArray
    readers: IntArray

    @property
    def num_sessions(self) -> int:
        """Samples."""
        return len(self.last)

    def recent(self, now: int, clicks: int) -> IntArray:
        """Reads per article in the last clicks before the place ``now`` in order of time."""
        return np.bincount(self.items[max(0, now - clicks) : now], minlength=self.num_items)

    def candidates(self, now: int) -> IntArray:
        """Articles that were read in the last hours before the place ``now`` in order of time."""
        since = np.searchsorted(self.times, self.times[now - 1] - CANDIDATE_HOURS * 3_600_000)
        return np.unique(self.items[since:now])

    def negatives(self, chosen: IntArray, number: int, rng: np.random.Generator) -> IntArray:
        """Articles drawn as often as they were read just before the chosen sessions end."""
        now = self.closes[chosen].min()
        return self.items[np.maximum(now - rng.integers(1, RECENT + 1, number), 0)]


def read_log(path: Path, num_sessions: int) -> ClickLog:
    """The log with its last ``num_sessions`` sessions as samples; earlier clicks serve as history.

    The file has the columns user_id, session_id, item_id and timestamp (milliseconds), one click per row, in any order.
    """
    table = pq.read_table(path, columns=["user_id", "session_id", "item_id", "timestamp"])
    user, session, item, times = (column.to_numpy() for column in table.columns)
    order = np.argsort(times, kind="stable")[: int(LOG_SHARE * len(times))]
    user, session, times = user[order], session[order], times[order]
    articles, items = np.unique(item[order], return_inverse=True)
    by_user = np.argsort(user, kind="stable")
    new_user = np.diff(user[by_user], prepend=-1) != 0
    new_session = new_user | (np.diff(session[by_user], prepend=-1) != 0)
    first = np.flatnonzero(new_session)
    last = np.append(first[1:], len(by_user)) - 1
    users_first = np.flatnonzero(new_user)[np.cumsum(new_user)[last] - 1]
    start = np.maximum(users_first, last - MAX_HISTORY)
    opening = np.maximum(first, start + 1)
    kept = np.flatnonzero(opening <= last)  # a first click alone says nothing
    kept = kept[np.argsort(by_user[last[kept]])][-num_sessions:]
    start, opening, last = start[kept], opening[kept], last[kept]
    readers = user[by_user[last]]
    return ClickLog(len(articles), items, times, items[by_user], start, opening, last, by_user[last], by_user, readers)


def ranges(start: IntArray, end: IntArray) -> tuple[IntArray, IntArray]:
    """All the integers from each start up to its end, one after the other, and how many there are of each."""
    lengths = end - start
    before = np.cumsum(lengths) - lengths
    return np.arange(lengths.sum()) + np.repeat(start - before, lengths), lengths


def write_lookups(path: Path, log: ClickLog, *, negatives_per_session: int, seed: int = 0) -> None:
    """Articles that training looks up for each session, a list a row: what ``flexshard profile`` counts."""
    rng = np.random.default_rng(seed)
    places, lengths = ranges(log.start, log.last + 1)
    drawn = np.maximum(log.closes[:, None] - rng.integers(1, RECENT + 1, (log.num_sessions, negatives_per_session)), 0)
    owner = np.repeat(np.arange(log.num_sessions), lengths)
    owner = np.concatenate([owner, np.repeat(np.arange(log.num_sessions), negatives_per_session)])
    looked_up = np.concatenate([log.by_user[places], log.items[drawn].ravel()])[np.argsort(owner, kind="stable")]
    ends = np.concatenate([[0], np.cumsum(lengths + negatives_per_session)])
    column = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(looked_up, pa.int32()))
    pq.write_table(pa.table({"articles": column}), path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a log of clicks at random.")
    parser.add_argument("output", type=Path)
    parser.add_argument("--items", type=above_0, default=20_000)
    parser.add_argument("--sessions", type=above_0, default=320_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write_log(args.output, items=args.items, sessions=args.sessions, seed=args.seed)


if __name__ == "__main__":
    run_example(main)
