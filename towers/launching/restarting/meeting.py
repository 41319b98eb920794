"""How workers (machines) find each other, with a deadline and names, and meet again for each attempt.

The chief worker serves a store at its own address of the cluster. Every worker publishes the cluster's description that
it was given, and all workers compare the descriptions. The same store then serves the agents and the towers, so one
address is enough. With restarts, the chief starts each attempt, with all workers or some, and the others follow it.

[Note: members] The chief writes every attempt, with its number and its workers, into the store that it serves for all
workers. Each other worker keeps writing to this store which attempt it waits for. With ``min_towers``, the chief takes
the workers that have joined in time. The others request to join if more towers could train together with the waiting
workers. Without ``min_towers``, the chief takes all workers, and the handshake waits for them.

[Note: lost agents] The chief detects a killed agent at once, and an unreachable host when it has not answered for as
long as a collective may take. It then starts the next attempt. The others detect the same of the chief, and wait for
the next attempt (:mod:`towers.launching.restarting.keepalive`). A scheduler may have started a new agent in place of
one whose end the chief has not detected. The new agent finds that its worker already takes part in an attempt. It
requests the next one, which ends the present attempt on all workers. If the chief's agent was killed, a new store
listens at its address, and the others find its first attempt there.

[Note: jobs that are ending] A scheduler that restarts all workers starts some of them while the chief of the earlier
job still serves its store. An agent that has taken part in no attempt, and has not seen the job before its end, waits
for the next chief until its start-up deadline.
"""

from __future__ import annotations

import dataclasses
import os
import sys

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo

from towers.errors import StartupError, TowersError
from towers.joining.participant import CONNECTIONS, FILES, Participant
from towers.joining.store import Message, SignedStore, listen
from towers.launching.job import Job
from towers.launching.restarting.keepalive import KeepaliveConnection, KeepaliveServer
from towers.launching.restarting.policy import choose_members
from towers.launching.restarting.rendezvous import Rendezvous
from towers.launching.supervising.failure_broadcast import ask_to_join, replace_worker
from towers.system import machine
from towers.system.messages import canonical_address, get_logger, printable, split_address
from towers.system.timeouts import Deadline, clock, wait_until
from towers.topology import FEWER_WORKERS

_ATTEMPT, _KEEPALIVE, _PRESENT = "towers/attempt", "towers/keepalive", "towers/present"
"""Keys: of the present attempt; of the port for keepalive connections; of workers that wait, with their index."""

_READ_SECONDS = 10.0

_PAUSE, _PAUSE_PER_WORKER = 0.1, 0.006  # seconds between two looks, at least

log = get_logger("towers")


class WorkersRendezvous(Rendezvous):
    """Meets the workers whose addresses a job lists."""

    def __init__(self, job: Job, token: str) -> None:
        super().__init__(job, token)
        self._doubt = ""  # why other workers may not find the chief, as a sentence
        self._keepalive_name = ""  # of this worker's keepalive connection to the chief, if it has one
        self._pause = max(_PAUSE, _PAUSE_PER_WORKER * job.workers)
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
        if not agents.check([f"worker/{job.worker}", "worker/met"]):
            return False
        try:
            replace_worker(agents, self._token, job.worker, job.worker)
            while not deadline.has_passed():
                agents.check(["worker/met"])
                clock.sleep(self._pause)
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
        if self._worker.serves:
            machine.allow_files(FILES + CONNECTIONS * self._job.workers * (self._job.towers + 1))
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
                message = {"origin": job.origin, "keepalive": self._keepalive_name}
                terms = {"addresses": list(job.addresses), "restarts": bool(job.restarts)}
                worker.handshake(info.store, message, terms, compare_clusters, lost=self.lost)
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


def _waits(store: SignedStore, worker: int, after: int) -> str | None:
    """Returns the name of a worker's keepalive connection if it waits for an attempt after ``after``, or None."""
    message = store.read(f"{_PRESENT}{worker}")
    return message["keepalive"] if message is not None and int(message["after"]) >= after else None


class JobEndedError(StartupError):
    """The chief starts no further attempt.

    Attributes:
        code: the exit code of the job.
    """

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class ChiefRendezvous(WorkersRendezvous):
    """Starts each attempt, see [Note: members]."""

    def __init__(self, job: Job, token: str) -> None:
        super().__init__(job, token)
        self._keepalive_server: KeepaliveServer | None = None
        self._gone: set[str] = set()  # keepalive connections that had ended when the present attempt started

    def next_rendezvous(self) -> RendezvousInfo:
        """Starts the next attempt, and meets its workers. If one of them is lost, it starts another attempt.

        Raises:
            StartupError, HandshakeError: see :meth:`WorkersRendezvous.next_rendezvous`.
        """
        job, losses = self._job, 0
        while True:
            deadline = self._deadline()
            tcp = self._open_store(deadline.seconds)
            self._begin(tcp, deadline)
            try:
                return self._meet(tcp, deadline.seconds)
            except StartupError as error:
                losses += 1
                with_fewer = job.min_towers is not None and self.attempt > 0
                if not with_fewer and not (self.lost() and losses <= job.restarts):
                    raise
                print(f"mirrored: {error}", file=sys.stderr, flush=True)

    def _begin(self, tcp: TCPStore, deadline: Deadline) -> None:
        """Writes the next attempt into the store.

        Raises:
            StartupError: too few workers have joined.
        """
        job = self._job
        if self._keepalive_server is None:
            hosts = [split_address(address)[0] for address in job.addresses]
            self._keepalive_server = KeepaliveServer(
                listen(hosts[0], 0, job.origin, hosts[1:])[0], job.collective_seconds
            )
            SignedStore(tcp, self._token).write(_KEEPALIVE, {"port": self._keepalive_server.port})
        self._gone = set(self._keepalive_server.lost())
        if job.min_towers is not None:
            everybody = list(range(job.workers))
            wait_until(lambda: self._present(tcp) == everybody, deadline.remaining(), self._pause)
            present = self._present(tcp)
            self.members = choose_members(job, present)
            if not self.members:
                raise StartupError(
                    f"{len(present)} of {job.workers} workers have joined within {deadline.elapsed():.0f} s, too "
                    f"few for min_towers={job.min_towers}"
                )
            if (count := len(self.members)) < job.workers:
                print(f"mirrored: the job continues with {count} of {job.workers} workers", file=sys.stderr, flush=True)
        self.attempt += 1
        self._say(tcp, {"members": self.members})

    def _present(self, tcp: TCPStore) -> list[int]:
        """Returns the indices of this worker and of the workers that wait for an attempt after the present one."""
        lost, signed = (None, *self._lost_agents()), SignedStore(tcp, self._token)
        return [0, *(each for each in range(1, self._job.workers) if _waits(signed, each, self.attempt) not in lost)]

    def lost(self) -> str:
        ends = {name: end for name, end in self._lost_agents().items() if name not in self._gone}
        for worker, name in self._keepalives_of_members(self._tcp).items() if self._tcp is not None and ends else ():
            if name in ends:
                return f"the agent of worker {worker} ({self._job.addresses[worker]}) {ends[name]}"
        return ""

    def _lost_agents(self) -> dict[str, str]:
        return self._keepalive_server.lost() if self._keepalive_server is not None else {}

    def _keepalives_of_members(self, tcp: TCPStore) -> dict[int, str | None]:
        """Returns the names of the present attempt's keepalive connections; None for workers that have not joined."""
        signed, waiting = (SignedStore(store, self._token) for store in (self._agents_store(tcp), tcp))
        names: dict[int, str | None] = {}
        for place, worker in enumerate(self.members):
            claim = signed.read(f"worker/{place}")  # another agent may already wait for the place of this one
            names[worker] = claim.get("keepalive") if claim else _waits(waiting, worker, self.attempt - 1)
        return names

    def end(self, text: str, code: int, *, given_up: bool) -> None:
        """Ends the job: informs the workers that wait for another attempt, and waits until they have read it.

        Args:
            text, code: the reason and the exit code.
            given_up: whether the workers of this attempt will wait for another attempt, too.
        """
        if (tcp := self._tcp) is not None:

            def have_read() -> bool:
                ended, members = (None, *self._lost_agents()), self._keepalives_of_members(tcp) if given_up else {}
                workers = {*self._present(tcp), *(worker for worker in members if members[worker] not in ended)} - {0}
                keys = [f"{_ATTEMPT}/read{worker}" for worker in workers]
                return not keys or tcp.check(keys)

            self._say(tcp, {"end": text, "code": code})
            wait_until(have_read, _READ_SECONDS)
        if self._keepalive_server is not None:
            self._keepalive_server.say_goodbye()

    def _say(self, tcp: TCPStore, message: Message) -> None:
        SignedStore(tcp, self._token).write(_ATTEMPT, {"number": self.attempt, **message})


class FollowerRendezvous(WorkersRendezvous):
    """Waits for the chief's next attempt, see [Note: members]."""

    def __init__(self, job: Job, token: str) -> None:
        super().__init__(job, token)
        self._followed: Message | None = None  # the chief's message on the present attempt, with a nonce
        self._keepalive: KeepaliveConnection | None = None
        self._has_met = False  # whether this worker has met the workers of an attempt

    def next_rendezvous(self) -> RendezvousInfo:
        """Meets the workers of the chief's next attempt.

        Raises:
            JobEndedError: the chief has given up, or the job has ended without this worker.
            StartupError, HandshakeError: see :meth:`WorkersRendezvous.next_rendezvous`.
        """
        while True:
            deadline = self._deadline()
            tcp = self._follow(deadline)
            try:
                info = self._meet(tcp, deadline.seconds)
            except StartupError as error:  # the chief decides
                print(f"mirrored: {error}", file=sys.stderr, flush=True)
            else:
                self._has_met = True
                return info

    def _follow(self, deadline: Deadline) -> TCPStore:
        """Waits for an attempt in which this worker has not taken part yet, and returns the chief's store.

        Raises:
            JobEndedError: the chief has given up, or the job has ended.
            StartupError: the chief has ended the job, does not answer, or did not rejoin in time.
        """
        while True:
            if not self.lost() and self._keepalive is not None and self._keepalive.has_ended:
                if self._has_met:
                    raise StartupError("the chief has ended the job; its last lines name the cause")
                self._keepalive, self.attempt = None, -1  # see [Note: jobs that are ending]
            tcp = self._open_store(deadline.remaining())
            try:
                self._await_attempt(tcp)
                return tcp
            except TowersError:
                raise
            except RuntimeError:  # of torch's store: the chief has ended, and another chief may take its place
                deadline.restart()

    def _await_attempt(self, tcp: TCPStore) -> None:
        job, signed, asks, has_seen_job = self._job, SignedStore(tcp, self._token), False, self._has_met
        while True:
            has_begun = self.attempt < 0 and tcp.check(["workers/0/worker/0"])
            message, port = signed.read(_ATTEMPT), signed.read(_KEEPALIVE)  # the chief writes the port first
            if message is None and has_begun:  # by a chief without restarts; the handshake refuses it
                message = {"number": 0, "members": self.members}
            if port is not None and (self._keepalive is None or self._keepalive.port != port["port"] or self.lost()):
                self._keepalive = KeepaliveConnection(
                    self._worker.address[0], int(port["port"]), job.collective_seconds
                )
                self._keepalive_name = self._keepalive.name
            signed.write(f"{_PRESENT}{job.worker}", {"after": self.attempt, "keepalive": self._keepalive_name})
            if message is not None and "end" in message:
                tcp.set(f"{_ATTEMPT}/read{job.worker}", "")
                if has_seen_job:
                    raise JobEndedError(printable(message["end"]), int(message["code"]))
                clock.sleep(self._pause)  # until the store is gone, see [Note: jobs that are ending]
                continue
            has_seen_job = True
            if message is not None and message != self._followed:
                is_new, self._followed, self.attempt = self.attempt < 0, message, int(message["number"])
                self.members = [int(member) for member in message["members"]]
                agents, asks = self._agents_store(tcp), job.worker not in self.members
                if is_new and not asks and SignedStore(agents, self._token).read(f"worker/{self._info(tcp).rank}"):
                    has_seen_job = replace_worker(agents, self._token, self._info(tcp).rank, job.worker)
                elif not asks:
                    return
            if asks:
                waiting = [each for each in range(1, job.workers) if _waits(signed, each, self.attempt) is not None]
                if len(choose_members(job, sorted({*self.members, *waiting}))) > len(self.members):
                    asks = False
                    ask_to_join(self._agents_store(tcp), self._token, job.worker)
            clock.sleep(self._pause)

    def lost(self) -> str:
        end = self._keepalive.lost() if self._keepalive is not None else ""
        return f"the chief's agent ({self._job.addresses[0]}) {end}" if end else ""
