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
from towers.launching.failure_broadcast import ask_to_join, replace_worker
from towers.launching.job import Job
from towers.system import machine
from towers.system.log import get_logger
from towers.system.text import canonical_address, printable, split_address
from towers.system.timeouts import Deadline, clock, wait_until

_ATTEMPT, _PRESENT = "towers/attempt", "towers/present"  # keys: of the present attempt, and of workers that wait
_PAUSE, _READ_SECONDS = 0.1, 10.0

log = get_logger("towers")


class JobEndedError(StartupError):
    """The chief begins no attempt any more.

    Attributes:
        code: the exit code of the job.
    """

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


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
        self._members = list(range(job.workers))  # of the present attempt
        self._seconds_left = Deadline(job.startup_seconds)
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
        """Meet all workers, for each attempt anew; with ``min_towers``, those that have come.

        Raises:
            JobEndedError: the chief has given up, or the job has ended without this worker.
            StartupError: the address cannot be used, the chief does not answer, or workers are missing.
            HandshakeError: the workers' clusters, versions or job tokens differ, or two claim one index.
        """
        job, doubt = self._job, ""
        while True:
            tcp = self._begin_attempt()
            if job.addresses and self._worker.serves and not machine.is_reached_at(*self._worker.address):
                doubt = (
                    f"the address of worker 0, {job.addresses[0]} (from {job.origin}), does not lead to this machine, "
                    "which is worker 0"
                )
                print(f"towers: {doubt}: no other worker will find it there", file=sys.stderr, flush=True)
            store, place = self._store_of(tcp), self._members.index(job.worker)
            if len(self._members) > 1:
                names = tuple(job.addresses[member] for member in self._members)
                worker = dataclasses.replace(self._worker, index=place, names=names, seconds=self._seconds)
                message = {"addresses": list(job.addresses), "origin": job.origin}
                try:
                    worker.handshake(store, message, compare_clusters)
                except StartupError as error:
                    if job.min_towers is not None and self.attempt > 0:
                        print(f"towers: {error}", file=sys.stderr, flush=True)
                        continue
                    raise StartupError(f"{error}; {doubt}") if doubt else error from None
            log.debug("worker %d of %d has joined the others at %s:%d", job.worker, job.workers, tcp.host, tcp.port)
            return RendezvousInfo(store, place, len(self._members), RendezvousStoreInfo(tcp.host, tcp.port))

    @property
    def leaves_out(self) -> bool:
        """Whether not all workers take part in the present attempt."""
        return len(self._members) < self._job.workers

    @property
    def _seconds(self) -> float:
        """How long workers wait for each other."""
        return self._job.startup_seconds if self.attempt <= 0 else self._job.rejoin_seconds

    def _begin_attempt(self) -> TCPStore:
        """The store. The chief writes the next attempt to it, its number and its workers; the others wait for that."""
        self._seconds_left = Deadline(self._job.startup_seconds if self.attempt < 0 else self._job.rejoin_seconds)
        worker = dataclasses.replace(self._worker, seconds=self._seconds_left.remaining())
        if worker.serves:
            hosts = [split_address(address)[0] for address in self._job.addresses[1:]]
            self._tcp = self._tcp or worker.open_store(hosts)
            self.attempt += 1
            self._members = self._choose_members(self._tcp)
            self._say({"members": self._members})
            return self._tcp
        while True:
            try:
                self._tcp = worker.open_store()
                self._follow(self._tcp)
                return self._tcp
            except TowersError:
                raise
            except RuntimeError:  # of torch's store: the chief has ended, and another one may take its place
                if self._seconds_left.has_passed():
                    seconds = self._seconds_left.elapsed()
                    raise StartupError(f"the chief went away, and did not come back within {seconds:.0f} s") from None
                clock.sleep(_PAUSE)

    def _choose_members(self, tcp: TCPStore) -> list[int]:
        """The workers of the next attempt; with ``min_towers``, as many of those that have come as can take part.

        Raises:
            StartupError: too few have come.
        """
        job, everybody = self._job, list(range(self._job.workers))
        if job.min_towers is None:
            return everybody
        after = self.attempt - 1
        wait_until(lambda: self._waiting(tcp, after) == everybody[1:], self._seconds_left.remaining(), _PAUSE)
        present = [0, *self._waiting(tcp, after)]
        for count in range(len(present), 0, -1):
            towers = count * job.towers
            if towers >= job.min_towers and (job.virtual_towers or towers) % towers == 0:
                if count < job.workers:
                    print(
                        f"towers: {towers} towers on {count} of {job.workers} workers go on",
                        file=sys.stderr,
                        flush=True,
                    )
                return present[:count]
        raise StartupError(
            f"{len(present)} of {job.workers} workers have come within {self._seconds_left.elapsed():.0f} s, which are "
            f"too few for min_towers={job.min_towers}"
        )

    def _waiting(self, tcp: TCPStore, after: int) -> list[int]:
        """The workers that wait for another attempt than this one and those before."""
        signed = SignedStore(tcp, self._token)
        messages = {worker: signed.read(f"{_PRESENT}{worker}") for worker in range(1, self._job.workers)}
        return [worker for worker, message in messages.items() if message and int(message["after"]) >= after]

    def _follow(self, tcp: TCPStore) -> None:
        """Wait for an attempt that this worker has no part in yet.

        Raises:
            JobEndedError: the chief has given up, or the job has ended.
            StartupError: the chief begins no other attempt.
        """
        job, signed, waits = self._job, SignedStore(tcp, self._token), True
        while True:
            signed.write(f"{_PRESENT}{job.worker}", {"after": self.attempt})
            message = signed.read(_ATTEMPT)
            if message is not None and "end" in message:
                tcp.set(f"{_ATTEMPT}/read{job.worker}", "")
                raise JobEndedError(printable(message["end"]), int(message["code"]))
            if message is not None and message != self._followed:
                is_new, self._followed, self.attempt = self.attempt < 0, message, int(message["number"])
                self._members = [int(member) for member in message.get("members", range(job.workers))]
                store = self._store_of(tcp)
                waits = job.worker in self._members
                if not waits:
                    ask_to_join(store, self._token, job.worker)
                elif is_new and job.restarts and SignedStore(store, self._token).read(f"worker/{job.worker}"):
                    replace_worker(store, self._token, job.worker)
                else:
                    return
            if waits and self._seconds_left.has_passed():
                raise StartupError(f"the chief began no attempt within {self._seconds_left.elapsed():.0f} s")
            clock.sleep(_PAUSE)

    def end(self, text: str, code: int, *, given_up: bool) -> None:
        """The job ends: tell the workers that wait for another attempt, and wait until they know.

        Args:
            text, code: how.
            given_up: those of this attempt will wait, too.
        """
        tcp = self._tcp
        if self._worker.serves and tcp is not None and self._job.workers > 1 and self._job.restarts:
            workers = {*self._waiting(tcp, self.attempt), *(self._members[1:] if given_up else ())}
            self._say({"end": text, "code": code})
            keys = [f"{_ATTEMPT}/read{worker}" for worker in workers]
            wait_until(lambda: not keys or tcp.check(keys), _READ_SECONDS)

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
