"""Checks before the first collective that all expected processes have joined, once each, and belong together.

The handshake is used twice: between workers (machines) when the agents start, and between towers when their strategies
are created. Each process publishes a message in the store, waits for the messages of all processes, and compares them.
The first process that finds a problem publishes the result. All others read it, so all fail with the same message
within seconds. Only a process whose index is taken, or that has another job's token, fails without the others.

[Note: replayed messages] A message may have been read in an earlier handshake with the same token, and be stored again
by another process. So a process that has read all messages confirms them with a digest of all their nonces, including
the one of its own new message. The first process confirms last, after all others have confirmed. A process that reads
this confirmation can rely on the presence of all processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import math
import socket
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import NoReturn

import torch
from torch.distributed import Store, TCPStore

from towers.errors import HandshakeError, PortInUseError, StartupError, TowersError
from towers.joining.store import OWNER, TIMEOUT, Message, OtherJobError, SignedStore, serve_store
from towers.system import machine
from towers.system.messages import join_address, printable
from towers.system.timeouts import Deadline, clock, run_with_timeout, wait_until
from towers.topology import JOB_TOKEN

Compare = Callable[[int, Message, int, Message], str | None]
"""(an index, its message, another index, its message) → the problem between the two, or None."""

_ABSENT = object()
_NAME_SECONDS = 60.0
_EARLIER_SECONDS = 45.0  # a chief's wait for the end of an earlier one, which may be saving a checkpoint
_OWNER_SECONDS = 2.0  # time for a store to report its job
_SILENT_SECONDS = 20.0  # the time after which a waiting process reports the missing processes


def versions() -> str:
    """Returns the versions that must be equal on all workers and towers."""
    try:
        version = importlib.metadata.version("mirrored")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed"
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return f"mirrored {version}, torch {torch.version.__version__}, python {python}"


@dataclasses.dataclass(frozen=True)
class Participant:
    """One of the processes that meet in a store: the agents of several workers, or towers.

    Attributes:
        kind: "worker" or "tower", for keys and messages.
        index: this process's index among ``names``.
        names: the names of all expected processes in messages.
        address: host and port of the store.
        chief_serves: whether the first process serves the store, which then ends with it. Otherwise a launcher serves
            it.
        origin: the source of this description, for messages.
        token: the job's. Processes with another token are refused, and their messages count as absent.
        seconds: the time for which the processes wait for the store, and then for each other.
    """

    kind: str
    index: int
    names: Sequence[str]
    address: tuple[str, int]
    chief_serves: bool
    origin: str
    token: str = dataclasses.field(repr=False)
    seconds: float

    @property
    def serves(self) -> bool:
        """Whether this process serves the store."""
        return self.chief_serves and self.index == 0

    @property
    def server(self) -> str:
        """The process that serves the store, for messages."""
        return f"the chief ({self.kind} 0)" if self.chief_serves else "the launcher's store"

    def open_store(self, others: Sequence[str] = ()) -> TCPStore:
        """Returns the store where the processes meet, which this process serves or joins.

        If an earlier start of this job still serves its store at the address, the new one waits for its end.

        Args:
            others: hosts of the other processes, for :func:`towers.joining.store.serve_store`.

        Raises:
            PortInUseError, StartupError: the address cannot be used, or no store listened there in time.
            HandshakeError: the store is another job's. Nothing was written there.
        """
        if self.serves:
            self._await_own_name()
            return self._serve(others)
        deadline, address, server = Deadline(self.seconds), join_address(*self.address), self.server
        quiet = Deadline(_SILENT_SECONDS)
        while True:
            try:
                socket.create_connection(self.address, timeout=2.0).close()
                break
            except UnicodeError as error:
                raise StartupError(f"{address} (from {self.origin}) is not an address: {error}") from None
            except OSError as error:
                if deadline.has_passed():
                    raise StartupError(
                        f"{server} did not answer at {address} within {deadline.elapsed():.0f} s "
                        f"({error.strerror or error}); the address was read from {self.origin}: start it, or "
                        "correct the address"
                    ) from None
                if quiet.has_passed():
                    self.say_waiting(f"{server} at {address} (from {self.origin}), which does not answer yet")
                    quiet = Deadline(math.inf)
            clock.sleep(0.1)
        try:
            # If no store listens, torch's client waits forever, or raises an error that contains its frames.
            store = run_with_timeout(
                max(1.0, deadline.remaining()),
                lambda: TCPStore(*self.address, None, False, TIMEOUT, wait_for_workers=False),
            )
        except (TimeoutError, RuntimeError) as error:
            reason = "" if isinstance(error, TimeoutError) else f" ({str(error).splitlines()[0]})"
            raise StartupError(
                f"a program that is not {server} listens at {address}{reason}: another program has the port; the "
                f"address was read from {self.origin}: start {server} there, or correct the address"
            ) from None
        try:
            with self.needs_server():
                if self.chief_serves:  # a process that arrives before the signature would sign the store itself
                    store.wait([OWNER], timedelta(seconds=max(1.0, deadline.remaining())))
                own = {"host": socket.gethostname()}
                SignedStore(store, self.token).publish(OWNER, own, refuse_other_jobs=True)
        except OtherJobError as error:
            raise HandshakeError(
                f"{self.kind} {self.index} (on {socket.gethostname()}) does not belong to the job that meets at "
                f"{address}: its store holds {error}; the address was read from {self.origin}. All processes of "
                f"a job have the same {JOB_TOKEN} or none (under torchrun without one, the same "
                "TORCHELASTIC_RUN_ID); look for variables left over from another job"
            ) from None
        return store

    def _serve(self, others: Sequence[str]) -> TCPStore:
        earlier: Deadline | None = None
        while True:
            try:
                return serve_store(*self.address, self.origin, self.token, others)
            except PortInUseError:
                if earlier is None and self._is_served_by_this_job():
                    earlier = Deadline(min(self.seconds, _EARLIER_SECONDS))
                    print(
                        f"mirrored: another process of this job serves {join_address(*self.address)} (from "
                        f"{self.origin}), an earlier start or one with the same index: waiting "
                        f"{earlier.seconds:.0f} s for its end",
                        file=sys.stderr,
                        flush=True,
                    )
                if earlier is None or earlier.has_passed():
                    raise
                clock.sleep(0.1)

    def _is_served_by_this_job(self) -> bool:
        """Returns whether a store at the address was signed with this job's token."""

        def read_owner() -> bool:
            store = TCPStore(*self.address, None, False, timedelta(seconds=_OWNER_SECONDS), wait_for_workers=False)
            return SignedStore(store, self.token).read(OWNER) is not None

        try:
            return run_with_timeout(_OWNER_SECONDS, read_owner)
        except (TimeoutError, RuntimeError):
            return False

    def say_waiting(self, whom: str) -> None:
        """Prints on standard error for which processes this process waits, and for how long."""
        limit = "" if math.isinf(self.seconds) else f", for at most {self.seconds:.0f} s in all"
        print(f"mirrored: {self.kind} {self.index} waits for {whom}{limit}", file=sys.stderr, flush=True)

    def _await_own_name(self) -> None:
        """Waits until the name at which this process serves the store can be looked up.

        The DNS of Kubernetes resolves the name of a headless service's pod only some time after its process has
        started.
        """
        if machine.can_look_up(self.address[0]):
            return
        seconds, what = min(self.seconds, _NAME_SECONDS), f"{printable(self.address[0])} (from {self.origin})"
        print(f"mirrored: {what} cannot be looked up yet: waiting {seconds:.0f} s", file=sys.stderr, flush=True)
        wait_until(lambda: machine.can_look_up(self.address[0]), seconds, pause=0.2)

    @contextlib.contextmanager
    def needs_server(self) -> Iterator[None]:
        """Turns errors of torch's store, raised inside, into a :class:`StartupError` that names the serving process."""
        try:
            yield
        except TowersError:
            raise
        except RuntimeError as error:
            raise StartupError(f"{self.server} went away during the start-up: {printable(str(error))}") from None

    def handshake(
        self, store: Store, message: Message, compare: Compare, lost: Callable[[], str] = lambda: ""
    ) -> list[Message]:
        """Publishes ``message``, waits for the messages of all processes, and returns them in order.

        Args:
            store: the store where all processes meet, and no others of this job.
            message: JSON values. All processes of a version have the same fields, with values of one type or None.
            compare: returns the problem between two messages. Versions and fields are compared before.
            lost: returns why waiting is useless, or an empty string. After such a reason, the store stays, with the
                error for the others.

        Raises:
            StartupError: not all processes joined in time, and the message lists the missing ones; or waiting is
                useless.
            HandshakeError: ``index`` is taken by another process, or two messages do not fit together.
        """
        handshake = _Handshake(self, SignedStore(store, self.token), compare, lost)
        with self.needs_server():
            try:
                return handshake.run({"host": socket.gethostname(), "versions": versions(), **message})
            except TowersError:
                if self.serves and not lost():
                    handshake.wait_until_read()
                raise


class _Handshake:
    """One handshake, from the view of ``process``."""

    def __init__(self, process: Participant, store: SignedStore, compare: Compare, lost: Callable[[], str]) -> None:
        self._process, self._store, self._compare, self._lost = process, store, compare, lost
        self._messages: dict[int, Message] = {}  # the messages that have been read, by the process's index

    def run(self, message: Message) -> list[Message]:
        """Returns all messages in order, after all processes have read them."""
        deadline, quiet, pause = Deadline(self._process.seconds), Deadline(_SILENT_SECONDS), 0.005
        kind, names = self._process.kind, self._process.names
        self._claim(message)
        while True:
            if (result := self._store.read(self._key("result"))) is not None:
                self._fail(result)
            self._republish()
            if self._read_messages():
                pause = 0.005
            late = deadline.has_passed()
            missing = [i for i in range(len(names)) if i not in self._messages] or self._unconfirmed(late=late)
            if not missing:
                return self._in_order()
            if lost := self._lost():
                self._fail_together(lost, StartupError)
            if self._process.index == 0 and quiet.has_passed():
                self._process.say_waiting(", ".join(f"{kind} {i} ({names[i]})" for i in missing))
                quiet = Deadline(math.inf)
            if late:
                reasons = {i: self._store.rejected.get(self._key(i)) for i in missing}
                described = ", ".join(
                    f"{kind} {i} ({names[i]})" + (f" (its entry in the store is {reason})" if reason else "")
                    for i, reason in reasons.items()
                )
                self._fail_together(
                    f"{len(missing)} of {len(names)} {kind}s did not join within {deadline.elapsed():.0f} s: "
                    f"{described}; the list of {kind}s was read from {self._process.origin}",
                    StartupError,
                )
            clock.sleep(pause)
            pause = min(0.2, pause * 1.5)

    def _claim(self, message: Message) -> None:
        """Publishes this process's message.

        Raises:
            HandshakeError: another process of this job has this index.
        """
        own = {"nonce": uuid.uuid4().hex, **message}
        kind, index = self._process.kind, self._process.index
        stored = self._store.publish(self._key(index), own)
        if stored["nonce"] != own["nonce"]:
            other = printable(stored.get("host"), 64)
            raise HandshakeError(
                f"{kind} {index} is already taken by a process on {other}, and claimed by this one, on {own['host']}: "
                f"give each {kind} its own index; only a job with restarts takes a new one for one that has ended"
            )
        self._messages[index] = own

    def _republish(self) -> None:
        """Stores this process's message again if another value has replaced it."""
        key, own = self._key(self._process.index), self._messages[self._process.index]
        stored = self._store.read(key)
        if stored is None or stored["nonce"] != own["nonce"]:
            self._store.write(key, own)

    def _read_messages(self) -> bool:
        """Reads and compares the messages that have arrived, and returns whether the last one is among them."""
        count, own = len(self._process.names), self._process.index
        before = len(self._messages)
        for i in range(count):
            if i not in self._messages and (message := self._store.read(self._key(i))) is not None:
                self._messages[i] = message
                self._check(i, own)
        if before == count or len(self._messages) < count:
            return False
        for i in range(1, count):  # if two others differ from each other, they do not confirm
            self._check(i, 0)
        return True

    def _in_order(self) -> list[Message]:
        return [self._messages[i] for i in range(len(self._process.names))]

    def _unconfirmed(self, *, late: bool) -> list[int]:
        """Returns the processes that have not yet confirmed the same messages; see [Note: replayed messages].

        Args:
            late: whether to list all processes that have not confirmed. Before, process 0 waits for all others, and the
                others wait only for process 0.
        """
        index = self._process.index
        digest = hashlib.sha256("\0".join(str(message["nonce"]) for message in self._in_order()).encode()).hexdigest()
        others = [other for other in range(1, len(self._messages)) if other != index]
        missing = self._without(others if index == 0 else [0], digest)
        if index != 0 or not missing:
            self._store.write(self._key(f"confirmed{index}"), {"digest": digest})
        if missing and late:
            missing = self._without(others, digest) or missing
        for other in missing:
            self._store.rejected[self._key(other)] = "a message of an earlier handshake, or of a process that has ended"
        return missing

    def _without(self, others: Sequence[int], digest: str) -> list[int]:
        """Returns those of ``others`` that have not confirmed ``digest``."""
        confirmations = {other: self._store.read(self._key(f"confirmed{other}")) or {} for other in others}
        return [other for other, confirmation in confirmations.items() if confirmation.get("digest") != digest]

    def _check(self, index: int, other: int) -> None:
        """Checks that two messages fit together. It compares versions first, because they determine the fields."""
        message, reference = self._messages[index], self._messages[other]
        place, other_place = (
            f"{self._process.kind} {i} (on {printable(self._messages[i].get('host'), 64)})" for i in (index, other)
        )
        version, other_version = (printable(each.get("versions"), 200) for each in (message, reference))
        if version != other_version:
            self._fail_together(f"different versions: {version} on {place}, {other_version} on {other_place}")
        for field, value in reference.items():
            if not isinstance(message.get(field, _ABSENT), (str if value is None else type(value), type(None))):
                self._fail_together(
                    f"the message of {place} is damaged: {printable(field, 64)} is missing or of another kind"
                )
        try:
            problem = self._compare(index, message, other, reference)
        except RecursionError:  # hundreds of nested lists
            problem = f"the message of {place} is damaged"
        if problem is not None:
            self._fail_together(problem)

    def _fail_together(self, problem: str, error: type[TowersError] = HandshakeError) -> NoReturn:
        """Publishes ``problem`` as the result, and raises the result that was published first."""
        result = {"error": error.__name__, "text": printable(problem)}
        self._fail(self._store.publish(self._key("result"), result))

    def _fail(self, result: Message) -> NoReturn:
        self._store.store.set(self._key(f"read{self._process.index}"), "")
        error = StartupError if result.get("error") == StartupError.__name__ else HandshakeError
        raise error(printable(result.get("text")))

    def wait_until_read(self) -> None:
        """Waits until the other joined processes have read the result, at most ten seconds if one of them has ended."""
        keys = [self._key(f"read{other}") for other in self._messages if other != self._process.index]
        wait_until(lambda: not keys or self._store.store.check(keys), 10.0)

    def _key(self, what: int | str) -> str:
        return f"{self._process.kind}/{what}"
