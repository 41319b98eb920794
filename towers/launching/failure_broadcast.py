"""Messages between the agents of several workers: which tower of the job failed first, and whose towers have ended.

[Note: failures of other workers] The first failure goes to all workers through the agents' store. An agent whose towers
have not failed ends them, and one whose towers have only lost a peer says whose failure was first. An agent whose
towers have ended well publishes that and waits for the others: when a tower that ended early turns out to be the cause,
its worker fails with the rest.

[Note: a worker that is started again] An agent may find that its worker takes part in the job already. If the towers of
that worker have ended well, the job is ending, and the new agent waits for the next one. Otherwise it asks the worker's
other agent for an answer. If none arrives, the other agent was killed, and the new one publishes that its worker was
started again: a failure like others.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from torch.distributed import Store

from towers.errors import HandshakeError
from towers.joining.store import TIMEOUT, SignedStore
from towers.launching.attempt import Broadcast
from towers.system.text import printable
from towers.system.timeouts import clock, in_time, wait_until

_PREFIX = "towers/failures"
_FAILURE, _ENDED, _KNOWN, _ASKED, _LIVES, _JOINS = "failure", "ended", "known", "asked", "lives", "joins"
_ANSWER_SECONDS = 5.0  # in which the living agent of a worker answers another one
_INTERVAL = 0.5  # seconds between two reads, at most
_INTERVAL_PER_WORKER = 0.05  # the same for each worker of the job: up to ten workers read twenty times a second in all
_SECONDS = 1.5  # for the store to answer, and for the others to read what is published

T = TypeVar("T")


def replace_worker(store: Store, token: str, place: int, worker: int) -> bool:
    """End an attempt in which a worker takes part whose agent was killed, see [Note: a worker that is started again].

    Args:
        store: of the attempt.
        place, worker: its index among the workers of the attempt, and among those of the job.

    Returns:
        Whether the job continues. Otherwise the worker's towers have ended well, so the job is ending.

    Raises:
        HandshakeError: the worker's agent lives.
    """
    signed = SignedStore(store, token).connect_again(_PREFIX, TIMEOUT)
    signed.write(f"{_ASKED}{place}", {})
    answers, ends = (f"{_LIVES}{place}", _FAILURE), f"{_ENDED}{place}"
    wait_until(lambda: any(signed.read(key) is not None for key in (*answers, ends)), _ANSWER_SECONDS, _INTERVAL / 2)
    if signed.read(ends) is not None:
        return False
    if (living := signed.read(f"{_LIVES}{place}")) is not None:
        host = printable(living.get("host"), 64)
        raise HandshakeError(
            f"worker {worker} is already taken by a process on {host}: end that one, or wait for its end"
        )
    signed.publish(_FAILURE, {"sentence": f"worker {worker} was started again, on {socket.gethostname()}"})
    return True


def ask_to_join(store: Store, token: str, worker: int) -> None:
    """Ask for another attempt, in which a worker takes part that was not there for this one.

    Args:
        store: of this attempt.
    """
    SignedStore(store, token).connect_again(_PREFIX, TIMEOUT).publish(_JOINS, {"worker": worker})


class FailureBroadcast(Broadcast):
    """One worker's side of it, see [Note: failures of other workers]. With one worker there are no others.

    Args:
        token: the job's.
        joinable: whether workers may join later, so that one worker alone listens, too.

    Attributes:
        joins: whether one has asked to.
    """

    def __init__(self, token: str, joinable: bool = False) -> None:
        self.joins = False
        self._joinable, self._token = joinable, token
        self._store: Future[SignedStore] | None = None  # a connection of its own
        self._worker, self._workers = 0, 1
        self._knows = False  # how the job has ended, as the others are to know, too

    def listen(self, store: Store | None, worker: int, workers: int) -> None:
        """In a thread: a store whose host is gone may not answer."""
        if store is None or (workers == 1 and not self._joinable):
            return
        self._store = connected = Future[SignedStore]()
        self._worker, self._workers = worker, workers
        interval = min(_INTERVAL, _INTERVAL_PER_WORKER * workers)

        def listen() -> None:
            with contextlib.suppress(Exception):  # the store is gone, and with it the worker that served it
                signed = SignedStore(store, self._token).connect_again(_PREFIX, TIMEOUT)
                connected.set_result(signed)
                while (message := signed.read(_FAILURE)) is None:
                    if signed.read(f"{_ASKED}{worker}") is not None:
                        signed.write(f"{_LIVES}{worker}", {"host": socket.gethostname()})
                    self.joins = self._joinable and signed.read(_JOINS) is not None
                    clock.sleep(interval)
                in_time(_SECONDS, lambda: self._acknowledge(signed))
                self.received = printable(message.get("sentence"))

        threading.Thread(target=listen, name="towers-broadcast", daemon=True).start()

    def _acknowledge(self, store: SignedStore) -> None:
        """Tell worker 0, perhaps again, that this worker knows how the job has ended."""
        store.write(f"{_KNOWN}{self._worker}", {})
        self._knows = True

    def _ask(self, call: Callable[[SignedStore], T]) -> T | None:
        """The store's answer; None where there is no store, or it does not answer in time."""
        store = self._store
        return None if store is None else in_time(_SECONDS, lambda: call(store.result(_SECONDS)))

    def is_joined(self) -> bool:
        """Whether a worker has asked to join, by now."""
        return self.joins or (self._joinable and self._ask(lambda store: store.read(_JOINS)) is not None)

    def first_failure(self, sentence: str | None) -> str | None:
        """It counts as received only when the listener has read it back, so worker 0 can wait until all know."""
        sentence = sentence or self._await_failure() or next(iter(self.ends()), None)
        if sentence is not None and self._store is not None and self.received is None:
            self._ask(lambda store: store.publish(_FAILURE, {"sentence": sentence}))
            wait_until(lambda: self.received is not None, _SECONDS)
        return self.received or sentence

    def miss(self, sentence: str) -> None:
        """Take a lost worker for the first failure, without waiting for it to read that.

        The chief tells the others; where the chief is lost, so is the store by which a worker could.
        """
        if self._worker == 0:
            self.first_failure(sentence)
        self.received = self.received or sentence
        self._knows = False

    def _await_failure(self) -> str | None:
        """What another worker publishes as the first failure; None when none does for a moment."""
        wait_until(lambda: self._store is None or self.received is not None, _SECONDS)
        return self.received

    def ends(self) -> list[str]:
        """What the other workers have published of towers that have ended well."""
        keys = [f"{_ENDED}{worker}" for worker in range(self._workers) if worker != self._worker]
        messages = self._ask(lambda store: [store.read(key) for key in keys]) or []
        return [printable(message.get("sentence")) for message in messages if message is not None]

    def await_ends(self, sentence: str, seconds: float) -> None:
        self._ask(lambda store: store.write(f"{_ENDED}{self._worker}", {"sentence": sentence}))
        others = self._workers - 1
        wait_until(lambda: self.received is not None or len(self.ends()) >= others, seconds, pause=_INTERVAL / 2)
        if self.received is None:
            self._ask(self._acknowledge)

    def leave(self) -> None:
        if self._knows and self._worker == 0:
            keys = [f"{_KNOWN}{worker}" for worker in range(self._workers)]
            wait_until(lambda: bool(self._ask(lambda store: store.read_all(keys))), _SECONDS)
