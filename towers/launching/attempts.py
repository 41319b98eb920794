"""Attempts at a job of several workers: the chief begins each, with all workers or some, and the others follow it.

[Note: who takes part] The chief writes every attempt, with its number and its workers, into the store that it serves
for all of them. The others write there again and again for which attempt they wait. With ``min_towers`` the chief takes
those that have come in time, and the others ask to join; without, it takes all, and the handshake waits for them.

An agent that a scheduler has started in place of a killed one finds that its worker takes part in an attempt already.
It asks for the next one, which ends the present attempt on all workers. Where it was the chief's, a new store listens
at its address, and the others find the first attempt of it there.
"""

from __future__ import annotations

import os
import sys

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo

from towers.errors import StartupError, TowersError
from towers.joining.store import Message, SignedStore
from towers.launching.failure_broadcast import ask_to_join, replace_worker
from towers.launching.job import Job
from towers.launching.members import choose_members
from towers.launching.workers import WorkersRendezvous
from towers.system.text import printable
from towers.system.timeouts import Deadline, clock, wait_until
from towers.topology import FEWER_WORKERS

_ATTEMPT, _PRESENT = "towers/attempt", "towers/present"  # keys: of the present attempt, and of workers that wait
_PAUSE, _READ_SECONDS = 0.1, 10.0


class JobEndedError(StartupError):
    """The chief begins no attempt any more.

    Attributes:
        code: the exit code of the job.
    """

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class AttemptsRendezvous(WorkersRendezvous):
    """Meets the workers of each attempt, see [Note: who takes part]."""

    def __init__(self, job: Job, token: str) -> None:
        super().__init__(job, token)
        self._followed: Message | None = None  # what the chief has written of the present attempt, with a nonce

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the workers of the next attempt.

        Raises:
            JobEndedError: the chief has given up, or the job has ended without this worker.
            StartupError, HandshakeError: see :meth:`WorkersRendezvous.next_rendezvous`.
        """
        job = self._job
        while True:
            deadline = Deadline(job.startup_seconds if self.attempt < 0 else job.rejoin_seconds)
            tcp = self._begin(deadline) if self._worker.serves else self._follow(deadline)
            os.environ.pop(FEWER_WORKERS, None)
            if len(self.members) < job.workers:
                os.environ[FEWER_WORKERS] = "1"
            try:
                return self._meet(tcp, deadline.seconds)
            except StartupError as error:
                if job.min_towers is None or self.attempt == 0:
                    raise
                print(f"towers: {error}", file=sys.stderr, flush=True)

    def _begin(self, deadline: Deadline) -> TCPStore:
        """Write the next attempt into the chief's store; returns that.

        Raises:
            StartupError: too few workers have come.
        """
        tcp, job = self._open_store(deadline.seconds), self._job
        if job.min_towers is not None:
            everybody = list(range(job.workers))
            wait_until(lambda: self._present(tcp) == everybody, deadline.remaining(), _PAUSE)
            present = self._present(tcp)
            self.members = choose_members(job, present)
            if not self.members:
                raise StartupError(
                    f"{len(present)} of {job.workers} workers have come within {deadline.elapsed():.0f} s, which are "
                    f"too few for min_towers={job.min_towers}"
                )
            if (count := len(self.members)) < job.workers:
                text = f"towers: {count * job.towers} towers on {count} of {job.workers} workers go on"
                print(text, file=sys.stderr, flush=True)
        self.attempt += 1
        self._say(tcp, {"members": self.members})
        return tcp

    def _present(self, tcp: TCPStore) -> list[int]:
        """The chief, and the workers that wait for another attempt than the present one and those before."""
        signed = SignedStore(tcp, self._token)
        messages = {worker: signed.read(f"{_PRESENT}{worker}") for worker in range(1, self._job.workers)}
        waiting = [worker for worker, message in messages.items() if message and int(message["after"]) >= self.attempt]
        return [0, *waiting]

    def _follow(self, deadline: Deadline) -> TCPStore:
        """Wait for an attempt that this worker has no part in yet; returns the chief's store.

        Raises:
            JobEndedError: the chief has given up, or the job has ended.
            StartupError: the chief begins no other attempt.
        """
        while True:
            try:
                tcp = self._open_store(deadline.remaining())
                self._await_attempt(tcp, deadline)
                return tcp
            except TowersError:
                raise
            except RuntimeError:  # of torch's store: the chief has ended, and another one may take its place
                if deadline.has_passed():
                    seconds = deadline.elapsed()
                    raise StartupError(f"the chief went away, and did not come back within {seconds:.0f} s") from None
                clock.sleep(_PAUSE)

    def _await_attempt(self, tcp: TCPStore, deadline: Deadline) -> None:
        job, signed, waits = self._job, SignedStore(tcp, self._token), True
        while True:
            signed.write(f"{_PRESENT}{job.worker}", {"after": self.attempt})
            message = signed.read(_ATTEMPT)
            if message is not None and "end" in message:
                tcp.set(f"{_ATTEMPT}/read{job.worker}", "")
                raise JobEndedError(printable(message["end"]), int(message["code"]))
            if message is not None and message != self._followed:
                is_new, self._followed, self.attempt = self.attempt < 0, message, int(message["number"])
                self.members = [int(member) for member in message["members"]]
                agents, waits = self._agents_store(tcp), job.worker in self.members
                if not waits:
                    ask_to_join(agents, self._token, job.worker)
                elif is_new and SignedStore(agents, self._token).read(f"worker/{self._info(tcp).rank}"):
                    replace_worker(agents, self._token, self._info(tcp).rank, job.worker)
                else:
                    return
            if waits and deadline.has_passed():
                raise StartupError(f"the chief began no attempt within {deadline.elapsed():.0f} s")
            clock.sleep(_PAUSE)

    def end(self, text: str, code: int, *, given_up: bool) -> None:
        """The job ends: tell the workers that wait for another attempt, and wait until they know.

        Args:
            text, code: how.
            given_up: those of this attempt will wait, too.
        """
        tcp = self._tcp
        if self._worker.serves and tcp is not None:
            workers = {*self._present(tcp), *(self.members if given_up else ())} - {0}
            self._say(tcp, {"end": text, "code": code})
            keys = [f"{_ATTEMPT}/read{worker}" for worker in workers]
            wait_until(lambda: not keys or tcp.check(keys), _READ_SECONDS)

    def _say(self, tcp: TCPStore, message: Message) -> None:
        SignedStore(tcp, self._token).write(_ATTEMPT, {"number": self.attempt, **message})
