"""Checks before the first collective that all expected processes have joined, once each, and belong together.

The handshake is used twice: between workers (machines) when the agents start, and between towers when their strategies
are created. Each process publishes a message in the store. The first process, the *chief*, reads all messages, compares
them, and answers each process. The first process that finds a problem publishes it, so all fail with the same message
within seconds. Only a process whose index is taken, or that has another job's token, fails without the others.

[Note: one message, one answer] If all processes join within some seconds, each except the chief sends at most ten
requests to the store, however many processes there are. The more there are, the longer a process waits between two
looks. Values that must be equal are sent as a digest. If the digest of a process is different, the chief asks it for
the values, to name the difference.

[Note: replayed messages] A message may have been read in an earlier handshake with the same token, and be stored again
by another process. The chief publishes a new number. A message counts if it contains this number, and an answer if it
contains the number of the message. So each process can rely on the presence of all others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import math
import socket
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import NoReturn

import torch
from torch.distributed import Store, TCPStore

from towers.errors import HandshakeError, PortInUseError, StartupError, TowersError
from towers.joining.store import OWNER, TIMEOUT, Message, OtherJobError, SignedStore, new_nonce, serve_store
from towers.system import machine
from towers.system.messages import digest_of, join_address, printable
from towers.system.timeouts import Deadline, clock, run_with_timeout, wait_until
from towers.topology import JOB_TOKEN

Compare = Callable[[int, Message, int, Message], str | None]
"""(an index, its message, another index, its message) → the problem between the two, or None."""

Facts = Callable[[Sequence[Message]], Message]
"""The messages of all processes, in order → what all of them must know."""

_ABSENT = object()

FILES, CONNECTIONS = 1000, 3
"""Open files of a process that serves the store: its own, and the connections of each process that meets there."""

_FIRST_LOOK, _LATER_LOOKS = 0.005, 0.2  # seconds until the first look for an answer; the longest time between two
_GROWTH = 1.3  # of the time between two looks
_LOOKS = 4  # looks for the chief before the message is written; looks for an answer before one for all else
_LOOKS_PER_PROCESS = 0.0008  # seconds by which looks are later for each process
_NAME_SECONDS = 60.0
_EARLIER_SECONDS = 45.0  # a chief's wait for the end of an earlier one, which may be saving a checkpoint
_OWNER_SECONDS = 2.0  # time for a store to report its job
_SILENT_SECONDS = 20.0  # the time after which a waiting process reports the missing processes
_OTHERS_SECONDS = 5.0  # time for another process to name its terms, or the missing processes
_ENDED = "a message of an earlier handshake, or of a process that has ended"


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
                signed = SignedStore(store, self.token)
                if signed.read(OWNER) is None:
                    signed.publish(OWNER, {"host": socket.gethostname()}, refuse_other_jobs=True)
        except OtherJobError as error:
            raise HandshakeError(
                f"{self.kind} {self.index} (on {socket.gethostname()}) does not belong to the job that meets at "
                f"{address}: its store holds {error}; the address was read from {self.origin}. All processes of "
                f"a job have the same {JOB_TOKEN} or none (under torchrun without one, the same "
                "TORCHELASTIC_RUN_ID); look for variables left over from another job"
            ) from None
        return store

    def _serve(self, others: Sequence[str]) -> TCPStore:
        machine.allow_files(FILES + CONNECTIONS * len(self.names))
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
        self,
        store: Store,
        message: Message,
        terms: Message,
        compare: Compare,
        *,
        unique: Callable[[Message], Hashable] = lambda message: None,
        facts: Facts = lambda messages: {},
        lost: Callable[[], str] = lambda: "",
    ) -> Message:
        """Publishes ``message``, waits until the chief has compared all messages, and returns the chief's answer.

        Args:
            store: the store where all processes meet, and no others of this job.
            message: JSON values. All processes of a version have the same fields, with values of one type or None.
            terms: JSON values that usually are the same for all processes.
            compare: returns the problem between two messages that contain their terms. It is called if terms differ, or
                for two processes with the same ``unique`` value. Versions and fields are compared before.
            unique: returns a part of a message that should be another one for every process; None if there is none.
            facts: what the answer contains. Only the chief calls it.
            lost: returns why waiting is useless, or an empty string. After such a reason, the store stays, with the
                error for the others.

        Raises:
            StartupError: not all processes joined in time, and the message lists the missing ones; or waiting is
                useless.
            HandshakeError: ``index`` is taken by another process, or two messages do not fit together.
        """
        signed = SignedStore(store, self.token)
        own = {"host": socket.gethostname(), "versions": versions(), **message}
        handshake: _Chief | _Follower
        if self.index == 0:
            handshake = _Chief(self, signed, own, terms, lost, compare, unique, facts)
        else:
            handshake = _Follower(self, signed, own, terms, lost)
        with self.needs_server():
            try:
                return handshake.run()
            except TowersError:
                if self.serves and not lost():
                    handshake.wait_until_read()
                raise


class _Handshake:
    """One handshake, from the view of ``process``.

    Attributes:
        messages: the messages that have been read, by the process's index.
    """

    def __init__(
        self, process: Participant, store: SignedStore, own: Message, terms: Message, lost: Callable[[], str]
    ) -> None:
        self._process, self._store, self._terms, self._lost = process, store, terms, lost
        self._nonce = new_nonce()
        self._own: Message = {"nonce": self._nonce, **own, "terms": digest_of(terms), "to": None}
        self.messages: dict[int, Message] = {process.index: self._own}
        self._deadline = Deadline(process.seconds)
        self._pause = _FIRST_LOOK + _LOOKS_PER_PROCESS * len(process.names)
        self._longest = max(_LATER_LOOKS, 3 * self._pause)

    def _claim(self) -> None:
        """Publishes this process's message.

        Raises:
            HandshakeError: another process of this job has this index.
        """
        kind, index, own = self._process.kind, self._process.index, self._own
        stored = self._store.publish(self._key(index), own)
        if stored["nonce"] != self._nonce:
            other = printable(stored.get("host"), 64)
            raise HandshakeError(
                f"{kind} {index} is already taken by a process on {other}, and claimed by this one, on {own['host']}: "
                f"give each {kind} its own index; only a job with restarts takes a new one for one that has ended"
            )

    def _keep(self, key: str, message: Message) -> None:
        """Stores a message of this process again if another value has replaced it."""
        if self._store.read(key) != message:
            self._store.write(key, message)

    def _check_result(self) -> None:
        """Raises the error that a process has published.

        Raises:
            StartupError, HandshakeError: it has published one.
        """
        if (result := self._store.read(self._key("result"))) is not None:
            self._fail(result)

    def _sleep(self) -> None:
        clock.sleep(min(self._pause, max(self._deadline.remaining(), _FIRST_LOOK)))
        self._pause = min(self._longest, self._pause * _GROWTH)

    def _fail_without(self, missing: Mapping[int, str | None]) -> NoReturn:
        """Fails because processes are missing.

        Args:
            missing: by index, why its entry in the store does not count; None if there is none.
        """
        kind, names = self._process.kind, self._process.names
        described = ", ".join(
            f"{kind} {i} ({names[i]})" + (f" (its entry in the store is {reason})" if reason else "")
            for i, reason in missing.items()
        )
        self._fail_together(
            f"{len(missing)} of {len(names)} {kind}s did not join within {self._deadline.elapsed():.0f} s: "
            f"{described}; the list of {kind}s was read from {self._process.origin}",
            StartupError,
        )

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
        keys = [self._key(f"read{other}") for other in self.messages if other != self._process.index]
        wait_until(lambda: not keys or self._store.store.check(keys), 10.0)

    def _key(self, what: int | str) -> str:
        return f"{self._process.kind}/{what}"


class _Chief(_Handshake):
    """The process that compares all messages."""

    def __init__(
        self,
        process: Participant,
        store: SignedStore,
        own: Message,
        terms: Message,
        lost: Callable[[], str],
        compare: Compare,
        unique: Callable[[Message], Hashable],
        facts: Facts,
    ) -> None:
        super().__init__(process, store, own, terms, lost)
        self._compare, self._unique, self._facts = compare, unique, facts
        self._holders: dict[Hashable, int] = {unique(self._own): 0}  # by their unique values

    def run(self) -> Message:
        """Returns the answer that it has given to all processes."""
        kind, names, quiet = self._process.kind, self._process.names, Deadline(_SILENT_SECONDS)
        number: Message = {"nonce": self._nonce}
        self._claim()
        self._store.write(self._key("number"), number)
        keys = {i: self._key(i) for i in range(1, len(names))}
        while True:
            self._check_result()
            late = self._deadline.has_passed()
            for i in self._read(keys, one_by_one=late or self._pause >= self._longest):
                self._check(i)
            missing = {i: self._store.rejected.get(key) for i, key in keys.items() if i not in self.messages}
            if not missing:
                answer = self._facts([self.messages[i] for i in range(len(names))])
                self._answer({"facts": answer})
                self._store.write(self._key("met"), {})
                return answer
            if lost := self._lost():
                self._fail_together(lost, StartupError)
            if quiet.has_passed():
                self._process.say_waiting(", ".join(f"{kind} {i} ({names[i]})" for i in missing))
                quiet = Deadline(math.inf)
            if late:
                self._fail_without(missing)
            self._keep(self._key(0), self._own)
            self._keep(self._key("number"), number)
            self._sleep()

    def _read(self, keys: Mapping[int, str], *, one_by_one: bool) -> list[int]:
        """Reads the missing messages, and returns whose were there; with one request if all were."""
        missing = [i for i in keys if i not in self.messages]
        found = self._store.read_all([keys[i] for i in missing])
        if not found and one_by_one:
            found = [self._store.read(keys[i]) for i in missing]
        joined = []
        for i, message in zip(missing, found, strict=False):
            if message is not None and message.get("to", self._nonce) == self._nonce:  # without: of another version
                self.messages[i] = message
                joined.append(i)
            elif message is not None and message.get("to") is not None:
                self._store.rejected[keys[i]] = _ENDED
        return joined

    def _check(self, index: int) -> None:
        """Checks that a message fits the others. It compares versions first, because they determine the fields."""
        message, reference = self.messages[index], self._own
        place, other_place = (
            f"{self._process.kind} {i} (on {printable(self.messages[i].get('host'), 64)})" for i in (index, 0)
        )
        version, other_version = (printable(each.get("versions"), 200) for each in (message, reference))
        if version != other_version:
            self._fail_together(f"different versions: {version} on {place}, {other_version} on {other_place}")
        for field, value in reference.items():
            if not isinstance(message.get(field, _ABSENT), (str if value is None else type(value), type(None))):
                self._fail_together(
                    f"the message of {place} is damaged: {printable(field, 64)} is missing or of another kind"
                )
        if message["terms"] != reference["terms"]:
            self._check_pair(index, 0)
        if (unique := self._unique(message)) is not None and self._holders.setdefault(unique, index) != index:
            self._check_pair(index, self._holders[unique])

    def _check_pair(self, index: int, other: int) -> None:
        """Compares the messages of two processes, with their terms."""
        try:
            problem = self._compare(index, self._with_terms(index), other, self._with_terms(other))
        except RecursionError:  # hundreds of nested lists
            problem = f"the message of {self._process.kind} {index} is damaged"
        if problem is not None:
            self._fail_together(problem)

    def _with_terms(self, index: int) -> Message:
        """Returns the message of a process with its terms, which it is asked for if they are not the chief's."""
        message, key = self.messages[index], self._key(f"terms{index}")
        if message["terms"] == self._own["terms"]:
            return {**message, **self._terms}
        self._store.write(self._key(f"answer{index}"), {"nonce": message["nonce"], "asks": True})
        found: list[Message] = []

        def has_answered() -> bool:
            terms = self._store.read(key)
            found.extend([terms["terms"]] if terms is not None and terms.get("to") == self._nonce else [])
            return bool(found)

        if not wait_until(has_answered, _OTHERS_SECONDS + self._longest):
            self._fail_without({index: _ENDED})
        return {**message, **found[0]}

    def _fail(self, result: Message) -> NoReturn:
        self._answer({"failed": True})
        super()._fail(result)

    def _answer(self, answer: Message) -> None:
        """Answers the processes that have joined, each with the number of its message."""
        others = [(i, message["nonce"]) for i, message in self.messages.items() if i]
        self._store.write_all({self._key(f"answer{i}"): {"nonce": nonce, **answer} for i, nonce in others})


class _Follower(_Handshake):
    """A process that waits for the chief's answer."""

    def run(self) -> Message:
        """Returns the answer."""
        for _ in range(_LOOKS):  # so that the message is mostly written once
            if (number := self._number()) is not None or self._deadline.has_passed():
                break
            self._sleep()
        self._own["to"] = number
        self._claim()
        look = 0
        while True:
            look += 1
            if self._own["to"] is None:
                self._address(self._number())
            elif (answer := self._answer()) is not None:
                return answer
            late = self._deadline.has_passed()
            if look % _LOOKS == 0 or late:
                self._check_result()
                self._address(self._number())
                self._keep(self._key(self._process.index), self._own)
            if lost := self._lost():
                self._fail_together(lost, StartupError)
            if late:
                first = self._store.publish(self._key("late"), {"nonce": self._nonce})
                if first["nonce"] != self._nonce:  # one process looks for the missing ones
                    wait_until(
                        lambda: self._store.read(self._key("result")) is not None, _OTHERS_SECONDS + self._longest
                    )
                    self._check_result()
                self._fail_without(self._missing())
            self._sleep()

    def _number(self) -> str | None:
        """Returns the chief's number, or None if it has not joined."""
        number = self._store.read(self._key("number"))
        return None if number is None else str(number["nonce"])

    def _answer(self) -> Message | None:
        """Returns the chief's answer, or None if it has not answered. It may ask for this process's terms instead."""
        index, to = self._process.index, self._own["to"]
        answer = self._store.read(self._key(f"answer{index}"))
        if answer is None or answer["nonce"] != self._nonce:
            return None
        if "facts" in answer:
            facts: Message = answer["facts"]
            return facts
        if "asks" in answer:
            self._store.write(self._key(f"terms{index}"), {"to": to, "terms": self._terms})
        self._check_result()
        return None

    def _address(self, number: str | None) -> None:
        """Writes the message with the chief's number, unless it has that already."""
        if number != self._own["to"]:
            self._own["to"] = number
            self._store.write(self._key(self._process.index), self._own)

    def _missing(self) -> dict[int, str | None]:
        """Returns the processes that have not joined, each with the reason why its entry does not count, if it has one.

        If all others wait for the chief, that is the chief.
        """
        own, missing = self._process.index, dict[int, str | None]()
        for i in range(len(self._process.names)):
            key = self._key(i)
            message = self._own if i == own else self._store.read(key)
            if message is None:
                missing[i] = self._store.rejected.get(key)
            elif i and message.get("to") not in (None, self._own["to"]):
                missing[i] = _ENDED
        return missing or {0: _ENDED}
