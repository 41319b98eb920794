"""How workers (machines) find each other: torchrun's rendezvous, with a deadline and names.

The chief worker serves a store at its own address of the cluster. Every worker publishes the cluster as it was given to
it, and all compare. The same store then serves the agents and the towers, so one address is enough.
"""

from __future__ import annotations

import sys
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from towers.errors import StartupError
from towers.joining import handshake
from towers.joining.store import Message, join_store, serve_store
from towers.launching.job import Job
from towers.system import machine
from towers.system.log import get_logger
from towers.system.text import canonical_address, split_address
from towers.system.timeouts import Deadline

_STORE_TIMEOUT = timedelta(minutes=10)

log = get_logger("towers")


class Rendezvous(StaticTCPRendezvous):
    """Meets the workers that :class:`towers.launching.job.Job` lists; a single worker serves a store on loopback.

    Args:
        token: of the job.
    """

    def __init__(self, job: Job, run_id: str, token: str) -> None:
        host, port = split_address(job.addresses[0]) if job.addresses else ("127.0.0.1", 0)
        super().__init__(host, port, job.worker, job.workers, run_id, int(_STORE_TIMEOUT.total_seconds()))
        self._job = job
        self._token = token
        self._doubt = ""

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet all workers. Called once, since the agent restarts nothing.

        Raises:
            StartupError: the address cannot be used, the chief does not answer, or workers are missing.
            HandshakeError: the workers' clusters, versions or job tokens differ, or two claim one index.
        """
        job = self._job
        deadline = Deadline(job.startup_seconds)
        tcp = self._serve() if job.worker == 0 else self._join(deadline)
        store = PrefixStore("workers", tcp)
        if job.workers > 1:
            try:
                handshake.exchange(
                    store,
                    {"addresses": list(job.addresses), "origin": job.origin},
                    kind="worker",
                    index=job.worker,
                    names=job.addresses,
                    deadline=deadline,
                    origin=job.origin,
                    token=self._token,
                    compare=compare_clusters,
                    serves=job.worker == 0,
                )
            except StartupError as error:
                raise StartupError(f"{error}; {self._doubt}") if self._doubt else error from None
        log.debug("worker %d of %d has joined the others at %s:%d", job.worker, job.workers, tcp.host, tcp.port)
        return RendezvousInfo(store, job.worker, job.workers, RendezvousStoreInfo(tcp.host, tcp.port))

    def _serve(self) -> TCPStore:
        job = self._job
        others = [split_address(address)[0] for address in job.addresses[1:]]
        store = serve_store(self.master_addr, self.master_port, _STORE_TIMEOUT, job.origin, self._token, others)
        if job.addresses and not machine.is_reached_at(self.master_addr, self.master_port):
            self._doubt = (
                f"the address of worker 0, {job.addresses[0]} (from {job.origin}), does not lead to this "
                "machine, which is worker 0"
            )
            print(f"towers: {self._doubt}: no other worker will find it there", file=sys.stderr, flush=True)
        return store

    def _join(self, deadline: Deadline) -> TCPStore:
        job, chief = self._job, "the chief (worker 0)"
        name = f"worker {job.worker}"
        return join_store(
            self.master_addr, self.master_port, _STORE_TIMEOUT, deadline, chief, job.origin, self._token, name
        )


def compare_clusters(index: int, message: Message, other: int, reference: Message) -> str | None:
    """What differs between two workers' descriptions of their cluster, or None."""
    if other > index:
        return compare_clusters(other, reference, index, message)
    mine, theirs = message["addresses"], reference["addresses"]
    text = f"the workers were given different clusters (worker {index} by {message['origin']}): "
    if len(mine) != len(theirs):
        return f"{text}worker {index} knows {len(mine)} workers {mine}, worker {other} knows {len(theirs)} {theirs}"
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        if canonical_address(a) != canonical_address(b):
            return f"{text}the address of worker {i} is {a} for worker {index} and {b} for worker {other}"
    return None
