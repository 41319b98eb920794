"""How workers (machines) find each other, with a deadline and names.

The chief worker serves a store at its own address of the cluster. Every worker publishes the cluster's description that
it was given, and all workers compare the descriptions. The same store then serves the agents and the towers, so one
address is enough.
"""

from __future__ import annotations

import dataclasses
import os
import sys

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo

from towers.errors import StartupError, TowersError
from towers.joining.participant import Participant
from towers.joining.store import Message
from towers.launching.failure_broadcast import replace_worker
from towers.launching.job import Job
from towers.launching.rendezvous import Rendezvous
from towers.system import machine
from towers.system.log import get_logger
from towers.system.text import canonical_address, split_address
from towers.system.timeouts import Deadline, clock
from towers.topology import FEWER_WORKERS

_PAUSE = 0.1

log = get_logger("towers")


class WorkersRendezvous(Rendezvous):
    """Meets the workers whose addresses a job lists."""

    def __init__(self, job: Job, token: str) -> None:
        super().__init__(job, token)
        self._doubt = ""  # why other workers may not find the chief, as a sentence
        self._keepalive_name = ""  # of this worker's keepalive connection to the chief, if it has one
        self._worker = Participant(
            kind="worker",
            index=job.worker,
            names=job.addresses,
            address=split_address(job.addresses[0]),
            chief_serves=True,
            origin=job.origin,
            token=token,
            seconds=job.startup_seconds,
        )

    def next_rendezvous(self) -> RendezvousInfo:
        """Meets all workers.

        Raises:
            StartupError: the address cannot be used, the chief does not answer, or workers are missing.
            HandshakeError: the workers' clusters, versions or job tokens differ, or two claim one index.
        """
        deadline = self._deadline()
        tcp = self._open_store(deadline.remaining())
        while not self._worker.serves and self._is_of_earlier_job(tcp, deadline):
            tcp = self._open_store(deadline.remaining())
        self.attempt += 1
        return self._meet(tcp, deadline.remaining())

    def _is_of_earlier_job(self, tcp: TCPStore, deadline: Deadline) -> bool:
        """Returns whether a store belongs to an earlier job in which this worker took part, after that job has ended.

        Raises:
            HandshakeError: the agent of that worker runs.
            StartupError: the job does not end in time.
        """
        job, agents = self._job, PrefixStore("workers/0", tcp)
        if not agents.check([f"worker/{job.worker}", "worker/confirmed0"]):
            return False
        try:
            replace_worker(agents, self._token, job.worker, job.worker)
            while not deadline.has_passed():
                agents.check(["worker/confirmed0"])
                clock.sleep(_PAUSE)
        except TowersError:
            raise
        except RuntimeError:  # of torch's store: the process that served it has ended
            return True
        raise StartupError(
            f"worker {job.worker} was started while an earlier job met at {job.addresses[0]} (from {job.origin}), and "
            f"that job has not ended within {deadline.elapsed():.0f} s: end its processes"
        )

    def _deadline(self) -> Deadline:
        """Returns how long workers wait for an attempt to start, and then for each other."""
        return Deadline(self._job.startup_seconds if self.attempt < 0 else self._job.rejoin_seconds)

    def _open_store(self, seconds: float) -> TCPStore:
        """Returns the store, which the chief serves and the others join within ``seconds``."""
        if self._worker.serves and self._tcp is not None:
            return self._tcp
        hosts = [split_address(address)[0] for address in self._job.addresses[1:]]
        self._tcp = dataclasses.replace(self._worker, seconds=seconds).open_store(hosts)
        if self._worker.serves and not machine.is_reached_at(*self._worker.address):
            self._doubt = (
                f"the address of worker 0, {self._job.addresses[0]} (from {self._job.origin}), does not lead to this "
                "machine, which is worker 0"
            )
            print(f"mirrored: {self._doubt}: no other worker will find it there", file=sys.stderr, flush=True)
        return self._tcp

    def _meet(self, tcp: TCPStore, seconds: float) -> RendezvousInfo:
        """Waits up to ``seconds`` for the workers of the present attempt, and compares their clusters."""
        job, info = self._job, self._info(tcp)
        os.environ.pop(FEWER_WORKERS, None)
        if len(self.members) < job.workers:
            os.environ[FEWER_WORKERS] = "1"
        if info.world_size > 1:
            names = [job.addresses[member] for member in self.members]
            worker = dataclasses.replace(self._worker, index=info.rank, names=names, seconds=seconds)
            try:
                given = {"addresses": list(job.addresses), "origin": job.origin, "restarts": bool(job.restarts)}
                message = {**given, "keepalive": self._keepalive_name}
                worker.handshake(info.store, message, compare_clusters, self.lost)
            except StartupError as error:
                raise StartupError(f"{error}; {self._doubt}") if self._doubt else error from None
        log.debug("worker %d of %d has joined the others at %s:%d", job.worker, job.workers, tcp.host, tcp.port)
        return info

    def lost(self) -> str:
        """Returns why waiting for the present attempt's workers is useless, as a sentence; empty if it is not."""
        return ""


def compare_clusters(index: int, message: Message, other: int, reference: Message) -> str | None:
    """Returns the difference between two workers' descriptions of their cluster, or None."""
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
    if message["restarts"] != reference["restarts"]:
        starts, ends = (index, other) if message["restarts"] else (other, index)
        return f"worker {starts} was given restarts, worker {ends} none: start all workers with the same options"
    return None
