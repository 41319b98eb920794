"""How workers (machines) find each other: torchrun's rendezvous, with a deadline and names.

The chief worker serves a store at its own address of the cluster. Every worker publishes the cluster as it was given to
it, and all compare. The same store then serves the agents and the towers, so one address is enough.
"""

from __future__ import annotations

import sys
import uuid

from torch.distributed import PrefixStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from towers.errors import StartupError
from towers.joining.participant import Participant
from towers.joining.store import TIMEOUT, Message
from towers.launching.job import Job
from towers.system import machine
from towers.system.log import get_logger
from towers.system.text import canonical_address, split_address

log = get_logger("towers")


class Rendezvous(StaticTCPRendezvous):
    """Meets the workers that :class:`towers.launching.job.Job` lists; a single worker serves a store on loopback.

    Args:
        token: the job's.
    """

    def __init__(self, job: Job, token: str) -> None:
        host, port = split_address(job.addresses[0]) if job.addresses else ("127.0.0.1", 0)
        super().__init__(host, port, job.worker, job.workers, uuid.uuid4().hex, int(TIMEOUT.total_seconds()))
        self._job = job
        self._worker = Participant(
            kind="worker",
            index=job.worker,
            names=job.addresses,
            address=(host, port),
            chief_serves=True,
            origin=job.origin,
            token=token,
            seconds=job.startup_seconds,
        )

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet all workers. Called once, since the agent restarts nothing.

        Raises:
            StartupError: the address cannot be used, the chief does not answer, or workers are missing.
            HandshakeError: the workers' clusters, versions or job tokens differ, or two claim one index.
        """
        job, worker, doubt = self._job, self._worker, ""
        tcp = worker.open_store([split_address(address)[0] for address in job.addresses[1:]])
        if job.addresses and worker.serves and not machine.is_reached_at(*worker.address):
            doubt = (
                f"the address of worker 0, {job.addresses[0]} (from {job.origin}), does not lead to this machine, "
                "which is worker 0"
            )
            print(f"towers: {doubt}: no other worker will find it there", file=sys.stderr, flush=True)
        store = PrefixStore("workers", tcp)
        if job.workers > 1:
            try:
                message = {"addresses": list(job.addresses), "origin": job.origin}
                worker.handshake(store, message, compare_clusters)
            except StartupError as error:
                raise StartupError(f"{error}; {doubt}") if doubt else error from None
        log.debug("worker %d of %d has joined the others at %s:%d", job.worker, job.workers, tcp.host, tcp.port)
        return RendezvousInfo(store, job.worker, job.workers, RendezvousStoreInfo(tcp.host, tcp.port))


def compare_clusters(index: int, message: Message, other: int, reference: Message) -> str | None:
    """What differs between two workers' descriptions of their cluster, or None."""
    if other > index:
        return compare_clusters(other, reference, index, message)
    addresses, others = message["addresses"], reference["addresses"]
    text = f"the workers were given different clusters (worker {index} by {message['origin']}): "
    if len(addresses) != len(others):
        return (
            f"{text}worker {index} knows {len(addresses)} workers {addresses}, worker {other} knows {len(others)} "
            f"{others}"
        )
    for i, (a, b) in enumerate(zip(addresses, others, strict=True)):
        if canonical_address(a) != canonical_address(b):
            return f"{text}the address of worker {i} is {a} for worker {index} and {b} for worker {other}"
    return None
