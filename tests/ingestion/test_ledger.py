"""Who is given which split, and how many workers there should be; no files, no processes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from flexshard.errors import DataError
from flexshard.ingestion import SplitLedger, adjusted_workers, workers_needed
from flexshard.ingestion.service.ledger import Lease


def test_splits_come_in_order_to_the_least_busy() -> None:
    ledger = SplitLedger()
    ledger.attach(0, 4)
    assert ledger.lease(0) is None  # nobody to read
    ledger.add_worker(0)
    ledger.add_worker(1)
    leases = [ledger.lease(0) for _ in range(5)]
    assert [(lease.split, lease.worker) for lease in leases if lease] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert leases[4] is None
    assert ledger.outstanding(0) == 4
    first = leases[0]
    assert first is not None
    again = ledger.again(first)
    assert (again.split, again.worker) == (0, 1)  # by another one
    ledger.finish(first)  # an answer that comes too late counts for nothing
    assert ledger.outstanding(0) == 4
    ledger.finish(again)
    assert (ledger.outstanding(0), ledger.account(0).reissued) == (3, 1)
    assert [lease.split for lease in ledger.lose_worker(1)] == [1, 3]
    back = ledger.lease(0)
    assert back is not None
    assert (back.split, back.worker) == (1, 0)
    ledger.attach(0, 4, first=2)  # the client comes again from a checkpoint
    lease = ledger.lease(0)
    assert lease is not None
    assert (lease.split, ledger.outstanding(0)) == (2, 1)
    ledger.detach(0)
    with pytest.raises(KeyError):
        ledger.account(0)


def test_clients_talk_to_few_workers() -> None:
    ledger = SplitLedger(fan_out=4)
    for worker in range(100):
        ledger.add_worker(worker)
    met: list[set[int]] = []
    for client in range(25):
        ledger.attach(client, 40)
        leases = [ledger.lease(client) for _ in range(40)]
        met.append({lease.worker for lease in leases if lease})
    assert all(len(each) == 4 for each in met)
    assert set().union(*met) == set(range(100))  # and all workers are used


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_every_split_is_read_whatever_dies(data: st.DataObject) -> None:
    """Leases, ends, losses and workers that come and go in any order: each split is taken, and taken once."""
    clients = {client: data.draw(st.integers(0, 6)) for client in range(data.draw(st.integers(1, 3)))}
    ledger, workers = SplitLedger(fan_out=2), 2
    ledger.add_worker(0)
    ledger.add_worker(1)
    for client, splits in clients.items():
        ledger.attach(client, splits)
    held: list[Lease] = []
    taken: list[tuple[int, int]] = []
    for _ in range(data.draw(st.integers(0, 40))):
        what = data.draw(st.sampled_from(["lease", "finish", "again", "lose", "add", "retire"]))
        if what == "lease":
            lease = ledger.lease(data.draw(st.sampled_from(sorted(clients))))
            held += [lease] if lease else []
        elif what == "add":
            ledger.add_worker(workers)
            workers += 1
        elif what in ("lose", "retire") and len(ledger.workers) > 1:
            worker = data.draw(st.sampled_from(ledger.workers))
            if what == "retire":
                ledger.retire_worker(worker)
                continue
            lost = ledger.lose_worker(worker)
            held = [lease for lease in held if lease not in lost]
        elif held and what == "finish":
            lease = held.pop(data.draw(st.integers(0, len(held) - 1)))
            ledger.finish(lease)
            taken.append((lease.client, lease.split))
        elif held and what == "again":
            held.append(ledger.again(held.pop(data.draw(st.integers(0, len(held) - 1)))))
    for client in clients:
        while lease := ledger.lease(client):
            held.append(lease)
    for lease in held:
        ledger.finish(lease)
        taken.append((lease.client, lease.split))
    assert sorted(taken) == [(client, split) for client, splits in clients.items() for split in range(splits)]
    assert all(ledger.outstanding(client) == 0 for client in clients)


@pytest.mark.parametrize(
    ("demand", "rate", "nodes"),
    [(16.50, 0.68, 24.16), (4.69, 0.50, 9.44), (12.00, 0.22, 55.22)],
    ids=["RM1", "RM2", "RM3"],
)
def test_nodes_of_the_papers_table_4(demand: float, rate: float, nodes: float) -> None:
    """GB/s of Tables 3 and 4, which the paper prints to two digits; its node counts are of what it did not round."""
    least, most = (workers_needed(demand - 0.005, rate + 0.005), workers_needed(demand + 0.005, rate - 0.005))
    assert least <= nodes <= most
    assert workers_needed(demand, rate) == pytest.approx(nodes, rel=0.015)


def test_workers_follow_from_what_clients_wait() -> None:
    assert adjusted_workers(4, 0.56, 0.0) == 10  # of Table 2: 56 % of the time
    assert adjusted_workers(4, 0.04, 0.0) == 4
    assert adjusted_workers(4, 0.0, 1.0) == 3
    assert adjusted_workers(4, 0.0, 0.5) == 4
    assert adjusted_workers(1, 0.0, 1.0) == 1
    assert adjusted_workers(4, 1.0, 0.0) == 16
    assert adjusted_workers(40, 1.0, 0.0) == 64
    for demand, rate in ((-1.0, 1.0), (1.0, 0.0), (float("nan"), 1.0)):
        with pytest.raises(DataError, match="follow from a demand and a rate above 0"):
            workers_needed(demand, rate)
