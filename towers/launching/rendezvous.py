"""How workers (machines) find each other: torchrun's rendezvous, with a deadline and names.

The chief worker serves a store at its own address of the cluster. Every worker publishes the cluster as it was given to
it, and all compare. The same store then serves the agents and the towers, so one address is enough. Attempts at a job
have keys of their own in it (:mod:`towers.launching.restarts`).
"""

from __future__ import annotations

import dataclasses
import sys
import uuid

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from towers.errors import StartupError, TowersError
from towers.joining.participant import Participant
from towers.joining.store import TIMEOUT, Message, SignedStore
from towers.launching.failure_broadcast import replace_worker
from towers.launching.job import Job
from towers.system import machine
from towers.system.log import get_logger
from towers.system.text import canonical_address, printable, split_address
from towers.system.timeouts import Deadline, clock, wait_until

_ATTEMPT = "towers/attempt"  # the key of the present attempt
_PAUSE, _READ_SECONDS = 0.1, 10.0

log = get_logger("towers")


class Rendezvous(StaticTCPRendezvous):
    """Meets the workers that :class:`towers.launching.job.Job` lists; a single worker serves a store on loopback.

    Attributes:
        attempt: the number of the present attempt at the job, from 0, which the chief counts.

    Args:
        token: the job's.
    """

    def __init__(self, job: Job, token: str) -> None:
        host, port = split_address(job.addresses[0]) if job.addresses else ("127.0.0.1", 0)
        super().__init__(host, port, job.worker, job.workers, uuid.uuid4().hex, int(TIMEOUT.total_seconds()))
        self.attempt = -1
        self._job, self._token = job, token
        self._tcp: TCPStore | None = None
        self._followed: Message | None = None  # what the chief has written of the present attempt, with a nonce
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
        """Meet all workers, for each attempt anew.

        Raises:
            StartupError: the address cannot be used, the chief does not answer or has given up, or workers are missing.
            HandshakeError: the workers' clusters, versions or job tokens differ, or two claim one index.
        """
        job, worker, doubt = self._job, self._worker, ""
        tcp = self._begin_attempt()
        if job.addresses and worker.serves and not machine.is_reached_at(*worker.address):
            doubt = (
                f"the address of worker 0, {job.addresses[0]} (from {job.origin}), does not lead to this machine, "
                "which is worker 0"
            )
            print(f"towers: {doubt}: no other worker will find it there", file=sys.stderr, flush=True)
        store = self._store_of(tcp)
        if job.workers > 1:
            try:
                message = {"addresses": list(job.addresses), "origin": job.origin}
                worker.handshake(store, message, compare_clusters)
            except StartupError as error:
                raise StartupError(f"{error}; {doubt}") if doubt else error from None
        log.debug("worker %d of %d has joined the others at %s:%d", job.worker, job.workers, tcp.host, tcp.port)
        return RendezvousInfo(store, job.worker, job.workers, RendezvousStoreInfo(tcp.host, tcp.port))

    def _begin_attempt(self) -> TCPStore:
        """The store. The chief writes the number of the next attempt to it, and the others wait for that."""
        job, seconds = self._job, self._job.startup_seconds if self.attempt < 0 else self._job.rejoin_seconds
        worker = dataclasses.replace(self._worker, seconds=seconds)
        if worker.serves:
            hosts = [split_address(address)[0] for address in job.addresses[1:]]
            self._tcp = self._tcp or worker.open_store(hosts)
            self.attempt += 1
            self._say({})
            return self._tcp
        deadline = Deadline(seconds)
        while True:
            try:
                self._tcp = worker.open_store()
                self._follow(self._tcp, deadline)
                return self._tcp
            except TowersError:
                raise
            except RuntimeError:  # of torch's store: the chief has ended, and another one may take its place
                if deadline.has_passed():
                    raise StartupError(f"the chief went away, and did not come back within {seconds:.0f} s") from None
                clock.sleep(_PAUSE)

    def _follow(self, tcp: TCPStore, deadline: Deadline) -> None:
        """Wait for an attempt that this worker has no part in yet.

        Raises:
            StartupError: the chief has given up, or begins no other attempt.
        """
        job, signed = self._job, SignedStore(tcp, self._token)
        while True:
            message = signed.read(_ATTEMPT)
            if message is not None and "end" in message:
                tcp.set(f"{_ATTEMPT}/read{job.worker}", "")
                raise StartupError(printable(message["end"]))
            if message is not None and message != self._followed:
                is_new, self._followed, self.attempt = self.attempt < 0, message, int(message["number"])
                store = self._store_of(tcp)
                if not (is_new and job.restarts and SignedStore(store, self._token).read(f"worker/{job.worker}")):
                    return
                replace_worker(store, self._token, job.worker)
            if deadline.has_passed():
                raise StartupError(f"the chief began no attempt within {deadline.elapsed():.0f} s")
            clock.sleep(_PAUSE)

    def end(self, text: str) -> None:
        """The chief gives up: tell the others, and wait until they know, but not for those that have ended."""
        if self._worker.serves and self._tcp is not None and self._job.workers > 1 and self._job.restarts:
            self._say({"end": text})
            keys = [f"{_ATTEMPT}/read{worker}" for worker in range(1, self._job.workers)]
            wait_until(lambda: self._tcp is None or self._tcp.check(keys), _READ_SECONDS)

    def _say(self, message: Message) -> None:
        assert self._tcp is not None
        SignedStore(self._tcp, self._token).write(_ATTEMPT, {"number": self.attempt, **message})

    def _store_of(self, tcp: TCPStore) -> Store:
        """The agents' keys of the present attempt."""
        return PrefixStore(f"workers/{self.attempt}", tcp)


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
