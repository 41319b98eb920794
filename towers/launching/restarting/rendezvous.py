"""The meeting point of an agent and its towers, in the form that torchrun needs. A single worker serves it on loopback.

Several workers meet through :mod:`towers.launching.restarting.meeting`.
"""

from __future__ import annotations

import uuid

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from towers.joining.store import TIMEOUT, serve_store
from towers.launching.job import Job


class Rendezvous(StaticTCPRendezvous):
    """Serves the store of a single worker.

    Attributes:
        attempt: the number of the present attempt at the job, from 0.
        members: the workers that take part in it.

    Args:
        token: the job's.
    """

    def __init__(self, job: Job, token: str) -> None:
        super().__init__("127.0.0.1", 0, job.worker, job.workers, uuid.uuid4().hex, int(TIMEOUT.total_seconds()))
        self.attempt = -1
        self.members = list(range(job.workers))
        self._job, self._token = job, token
        self._tcp: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Starts the next attempt.

        Raises:
            StartupError: no port can be opened on loopback.
        """
        self._tcp = self._tcp or serve_store("127.0.0.1", 0, self._job.origin, self._token)
        self.attempt += 1
        return self._info(self._tcp)

    def _info(self, tcp: TCPStore) -> RendezvousInfo:
        """Returns the description of the present attempt that torch's agent needs."""
        place, address = self.members.index(self._job.worker), RendezvousStoreInfo(tcp.host, tcp.port)
        return RendezvousInfo(self._agents_store(tcp), place, len(self.members), address)

    def _agents_store(self, tcp: TCPStore) -> Store:
        """Returns the agents' keys of the present attempt."""
        return PrefixStore(f"workers/{self.attempt}", tcp)
