"""Which splits are whose, who reads them, and what became of them: the master of an ingestion job (DPP paper, 4.1.2).

Nothing here knows processes, files or tensors. Who trains says where it stands; what is lost is read again, and what
a client has already it drops, so that leases only bound double work. All of it can be rebuilt from the clients' places.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["ClientAccount", "Lease", "SplitLedger"]


@dataclass(frozen=True)
class Lease:
    """One split, given to one worker for one client.

    Attributes:
        number: of the lease; a split that is read again has another.
        client: who waits for it.
        split: number of it among the client's.
        worker: who reads it.
    """

    number: int
    client: int
    split: int
    worker: int


@dataclass
class ClientAccount:
    """What one client was given.

    Attributes:
        splits: that it has to take in all.
        next: the first that was never given out.
        again: those to be given out again, the earliest first.
        taken: those that it has whole.
        reissued: leases that were lost or failed.
    """

    splits: int
    next: int = 0
    again: deque[int] = field(default_factory=deque)
    taken: int = 0
    reissued: int = 0


class SplitLedger:
    """Gives out splits in each client's order, to the least busy of the workers that the client may talk to."""

    def __init__(self, *, fan_out: int = 16) -> None:
        """Let each client talk to up to ``fan_out`` workers (the paper's partitioned round robin)."""
        self._fan_out = fan_out
        self._clients: dict[int, ClientAccount] = {}
        self._leases: dict[int, Lease] = {}
        self._busy: dict[int, set[int]] = {}  # numbers of leases, by worker
        self._workers: list[int] = []  # in the order in which they came
        self._numbers = 0

    @property
    def workers(self) -> list[int]:
        """All that may be given work."""
        return list(self._workers)

    def account(self, client: int) -> ClientAccount:
        """Of a client; KeyError where it has not come."""
        return self._clients[client]

    def attach(self, client: int, splits: int, *, first: int = 0) -> None:
        """A client comes, or comes again from another place: of what it was given before, nothing counts any more.

        ``first`` splits it has, or was given by a master that is no more.
        """
        for lease in [lease for lease in self._leases.values() if lease.client == client]:
            self._end(lease)
        self._clients[client] = ClientAccount(splits, first, taken=first)

    def detach(self, client: int) -> None:
        """A client goes."""
        if client in self._clients:
            self.attach(client, 0)
            del self._clients[client]

    def add_worker(self, worker: int) -> None:
        """A worker comes."""
        self._busy.setdefault(worker, set())
        if worker not in self._workers:
            self._workers.append(worker)

    def retire_worker(self, worker: int) -> None:
        """A worker is given nothing more; what it has, it reads."""
        if worker in self._workers:
            self._workers.remove(worker)

    def lose_worker(self, worker: int) -> list[Lease]:
        """A worker died: what it read and was not taken has to be read again. Returns that."""
        lost = [self._leases[number] for number in sorted(self._busy.get(worker, ()))]
        for lease in lost:
            self.give_back(lease)
        self._busy.pop(worker, None)
        self.retire_worker(worker)
        return lost

    def lease(self, client: int) -> Lease | None:
        """The client's next split, and who reads it; None if there is none left, or nobody to read it."""
        account = self._clients[client]
        if not self._workers or not self.has_work(client):
            return None
        if account.again:
            split = account.again.popleft()
        else:
            split, account.next = account.next, account.next + 1
        return self._leased(client, split, None)

    def has_work(self, client: int) -> bool:
        """Whether there are splits that a client has not been given."""
        account = self._clients[client]
        return bool(account.again) or account.next < account.splits

    def again(self, lease: Lease) -> Lease:
        """The same split once more, by another worker if there is one; also of a lease that is not known here."""
        if self._end(lease):
            self._clients[lease.client].reissued += 1
        return self._leased(lease.client, lease.split, lease.worker)

    def finish(self, lease: Lease) -> None:
        """The client has all of it."""
        if self._end(lease):
            self._clients[lease.client].taken += 1

    def give_back(self, lease: Lease) -> None:
        """It failed, or was lost: somebody reads it again, before anything that comes later."""
        if self._end(lease):
            account = self._clients[lease.client]
            account.reissued += 1
            account.again = deque(sorted([*account.again, lease.split]))

    def outstanding(self, client: int) -> int:
        """Splits that a client was given and does not have whole."""
        account = self._clients[client]
        return account.next - account.taken - len(account.again)

    def _leased(self, client: int, split: int, avoid: int | None) -> Lease:
        worker = min(self._within_reach(client), key=lambda one: (one == avoid, len(self._busy[one]), one))
        self._numbers += 1
        lease = Lease(self._numbers, client, split, worker)
        self._leases[lease.number] = lease
        self._busy[worker].add(lease.number)
        return lease

    def _within_reach(self, client: int) -> Sequence[int]:
        if len(self._workers) <= self._fan_out:
            return self._workers
        # Neighbours of clients are other workers, as long as there are enough.
        first = client * self._fan_out
        return [self._workers[(first + index) % len(self._workers)] for index in range(self._fan_out)]

    def _end(self, lease: Lease) -> bool:
        """Forget a lease; False if it was forgotten already."""
        if self._leases.pop(lease.number, None) is None:
            return False
        self._busy.get(lease.worker, set()).discard(lease.number)
        return True
