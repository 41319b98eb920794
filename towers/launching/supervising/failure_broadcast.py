"""Messages between the agents of several workers: which tower of the job failed first, and which workers have ended.

[Note: failures of other workers] The first failure is sent to all workers through the agents' store. Every agent then
ends its own towers, even if none of them failed. An agent whose towers have only lost a peer reports which failure was
first. An agent whose towers have ended well publishes that and waits for the others. If a tower that ended early turns
out to be the cause, its worker fails with the rest.

[Note: a worker that is started again] An agent may find that its worker already takes part in the job. If the towers of
that worker have ended well, the job is ending, and the new agent waits for the next one. Otherwise it queries the
worker's other agent. If no answer arrives, the other agent was killed. The new agent then publishes that its worker was
started again, which is handled like other failures.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from torch.distributed import Store

from towers.errors import HandshakeError
from towers.joining.store import TIMEOUT, SignedStore
from towers.launching.supervising.attempt import Broadcast, Failed
from towers.system.messages import printable
from towers.system.timeouts import clock, in_time, wait_until

_PREFIX = "towers/failures"
_FAILURE, _ENDED, _KNOWN, _ASKED, _LIVES, _JOINS = "failure", "ended", "known", "asked", "lives", "joins"
_NEWS = "news"  # how often one of the keys that agents look for was written, so that they look for one number only
_ANSWER_SECONDS = 5.0  # the time in which a worker's running agent answers another one
_INTERVAL = 0.5  # seconds between two reads, at most
_INTERVAL_PER_WORKER = 0.05  # the same per worker of the job: up to ten workers together read twenty times a second
_PER_SECOND = 128  # the largest number of reads of all workers together
_SECONDS = 1.5  # for the store to answer, and for the others to read a published message

T = TypeVar("T")


def replace_worker(store: Store, token: str, place: int, worker: int) -> bool:
    """Ends an attempt that includes a worker whose agent was killed, see [Note: a worker that is started again].

    Args:
        store: of the attempt.
        place, worker: the worker's index among the workers of the attempt, and among those of the job.

    Returns:
        Whether the job continues. Otherwise the worker's towers have ended well, so the job is ending.

    Raises:
        HandshakeError: the worker's other agent runs.
    """
    signed = SignedStore(store, token).connect_again(_PREFIX, TIMEOUT)
    signed.write(f"{_ASKED}{place}", {})
    signed.add(_NEWS, 1)
    answers, ends = (f"{_LIVES}{place}", _FAILURE), f"{_ENDED}{place}"
    wait_until(lambda: any(signed.read(key) is not None for key in (*answers, ends)), _ANSWER_SECONDS, _INTERVAL / 2)
    if signed.read(ends) is not None:
        return False
    if (living := signed.read(f"{_LIVES}{place}")) is not None:
        host = printable(living.get("host"), 64)
        raise HandshakeError(
            f"worker {worker} is already taken by a process on {host}: end that one, or wait for its end"
        )
    sentence = f"worker {worker} was started again, on {socket.gethostname()}"
    signed.publish(_FAILURE, {"sentence": sentence, "kind": sentence})
    signed.add(_NEWS, 1)
    return True


def ask_to_join(store: Store, token: str, worker: int) -> None:
    """Requests another attempt that includes a worker which was absent when this one started.

    Args:
        store: of this attempt.
    """
    signed = SignedStore(store, token).connect_again(_PREFIX, TIMEOUT)
    signed.publish(_JOINS, {"worker": worker})
    signed.add(_NEWS, 1)


class FailureBroadcast(Broadcast):
    """One worker's side of the messages, see [Note: failures of other workers].

    Args:
        token: the job's.
        joinable: whether workers may join later. If so, a single worker listens, too.

    Attributes:
        joins: whether a worker has requested to join.
    """

    def __init__(self, token: str, joinable: bool = False) -> None:
        self.joins = False
        self._joinable, self._token = joinable, token
        self._store: Future[SignedStore] | None = None  # its own connection
        self._worker, self._workers = 0, 1
        self._interval = _INTERVAL
        self._knows = False  # whether it has read how the job ended, and the others should read it, too

    def listen(self, store: Store | None, worker: int, workers: int) -> None:
        """Listens in a thread, because a store whose host is gone may not answer."""
        if store is None or (workers == 1 and not self._joinable):
            return
        self._store = connected = Future[SignedStore]()
        self._worker, self._workers = worker, workers
        self._interval = max(min(_INTERVAL, _INTERVAL_PER_WORKER * workers), workers / _PER_SECOND)

        def listen() -> None:
            with contextlib.suppress(Exception):  # the store is gone, and with it the worker that served it
                signed, seen = SignedStore(store, self._token).connect_again(_PREFIX, TIMEOUT), -1
                connected.set_result(signed)
                while True:
                    before, seen = seen, signed.add(_NEWS, 0)
                    if seen != before:
                        if (message := signed.read(_FAILURE)) is not None:
                            break
                        if signed.read(f"{_ASKED}{worker}") is not None:
                            signed.write(f"{_LIVES}{worker}", {"host": socket.gethostname()})
                        self.joins = self._joinable and signed.read(_JOINS) is not None
                    clock.sleep(self._interval)
                in_time(_SECONDS, lambda: self._acknowledge(signed))
                self.received = Failed(printable(message.get("sentence")), printable(message.get("kind")))

        threading.Thread(target=listen, name="towers-broadcast", daemon=True).start()

    def _acknowledge(self, store: SignedStore) -> None:
        """Reports to worker 0, possibly again, that this worker has read how the job has ended."""
        store.write(f"{_KNOWN}{self._worker}", {})
        self._knows = True

    def _ask(self, call: Callable[[SignedStore], T]) -> T | None:
        """Returns the store's answer, or None if there is no store or it does not answer in time."""
        store = self._store
        return None if store is None else in_time(_SECONDS, lambda: call(store.result(_SECONDS)))

    def is_joined(self) -> bool:
        """Returns whether a worker has requested to join so far."""
        return self.joins or (self._joinable and self._ask(lambda store: store.read(_JOINS)) is not None)

    def first_failure(self, failed: Failed | None) -> Failed | None:
        """Returns the first failure, after the listener has read it back.

        Worker 0 can therefore wait until all workers have read it.
        """
        failed = failed or self._await_failure() or next((Failed(end, end) for end in self.ends()), None)
        if failed is not None and self._store is not None and self.received is None:
            message = dataclasses.asdict(failed)
            self._ask(lambda store: (store.publish(_FAILURE, message), store.add(_NEWS, 1)))
            wait_until(lambda: self.received is not None, _SECONDS + self._interval)
        return self.received or failed

    def miss(self, sentence: str) -> None:
        """Treats a lost worker as the first failure, without waiting until that worker has read it.

        The chief informs the others. If the chief is lost, the store through which a worker could inform others is
        lost, too.
        """
        failed = Failed(sentence, sentence)
        if self._worker == 0:
            self.first_failure(failed)
        self.received = self.received or failed
        self._knows = False

    def _await_failure(self) -> Failed | None:
        """Returns the first failure that another worker publishes, or None if none does within a moment."""
        wait_until(lambda: self._store is None or self.received is not None, _SECONDS + self._interval)
        return self.received

    def ends(self) -> list[str]:
        """Returns the messages that other workers have published about towers that ended well."""
        keys = [f"{_ENDED}{worker}" for worker in range(self._workers) if worker != self._worker]
        messages = self._ask(lambda store: [store.read(key) for key in keys]) or []
        return [printable(message.get("sentence")) for message in messages if message is not None]

    def await_ends(self, sentence: str, seconds: float) -> None:
        self._ask(lambda store: store.write(f"{_ENDED}{self._worker}", {"sentence": sentence}))
        keys = [f"{_ENDED}{worker}" for worker in range(self._workers) if worker != self._worker]

        def have_ended() -> bool:
            return not keys or bool(self._ask(lambda store: store.read_all(keys)))

        wait_until(lambda: self.received is not None or have_ended(), seconds, pause=self._interval / 2)
        if self.received is None:
            self._ask(self._acknowledge)

    def leave(self) -> None:
        if self._knows and self._worker == 0:
            keys = [f"{_KNOWN}{worker}" for worker in range(self._workers)]
            wait_until(lambda: bool(self._ask(lambda store: store.read_all(keys))), _SECONDS + self._interval)
