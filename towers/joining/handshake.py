"""All processes that should come have come, once, and belong together: checked before the first collective.

The handshake is used twice: between workers (machines) when the agents start, and between towers when their strategies
are built. Each process publishes a message in the store, waits for everybody's, and compares them. The first that finds
something wrong publishes the result, which all the others read, so that all fail with one text within seconds.

[Note: replayed messages] A message may have been read in an earlier handshake with the same token, and be stored again
by somebody else. So a process that has found all messages confirms it by a digest of all their nonces, in which that of
its own new message is. The first process confirms last, when all others have: then every process knows that all are
there.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import socket
import sys
import uuid
from collections.abc import Callable, Sequence

import torch
from torch.distributed import Store

from towers.errors import HandshakeError, StartupError, TowersError
from towers.joining.store import Message, SignedStore
from towers.system.text import printable
from towers.system.timeouts import Deadline, clock, wait_until

Compare = Callable[[int, Message, int, Message], str | None]
"""(an index, its message, another index, its message) → what is wrong between the two, or None."""


def versions() -> dict[str, str]:
    """What must be equal on all workers and towers."""
    try:
        version = importlib.metadata.version("mirrored")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed"
    return {
        "mirrored": version,
        "torch": torch.version.__version__,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
    }


def exchange(
    store: Store,
    message: Message,
    *,
    kind: str,
    index: int,
    names: Sequence[str],
    deadline: Deadline,
    origin: str,
    token: str,
    compare: Compare,
    serves: bool,
) -> list[Message]:
    """Publish ``message``, wait for everybody's, and return all of them in order.

    Args:
        message: JSON values. All processes of a version have the same fields, with values of one type or None.
        kind: "worker" or "tower", for keys and texts.
        index: this process's index among ``names``.
        names: how error messages call each of the processes that should come.
        deadline: for all of them to come.
        origin: where it was read which processes should come.
        token: the job's. Messages with another one count as absent.
        compare: what is wrong between two messages; versions and fields are compared before.
        serves: whether the store ends with this process: on failure it then waits until the others have read why.

    Raises:
        StartupError: not all came before the deadline; the text lists those that are missing.
        HandshakeError: ``index`` is taken by another process, or two messages do not fit together.
    """
    board = _Board(SignedStore(store, token), kind, index)
    pause = 0.005
    messages: dict[int, Message] = {}
    try:
        mine = messages[index] = board.claim({"host": socket.gethostname(), "versions": versions(), **message})
        while True:
            board.raise_result()
            board.republish()
            for i in range(len(names)):
                if i not in messages and (theirs := board.message(i)) is not None:
                    messages[i] = theirs
                    board.fail_together(_compare(kind, compare, i, theirs, index, mine))
                    if len(messages) == len(names):
                        # All compare all with the first, so that none goes on where two others found a difference.
                        for other in range(1, len(names)):
                            board.fail_together(_compare(kind, compare, other, messages[other], 0, messages[0]))
                        pause = 0.005
            late = deadline.has_passed()
            missing = [i for i in range(len(names)) if i not in messages]
            if not missing:
                in_order = [messages[i] for i in range(len(names))]
                missing = board.unconfirmed(in_order, late=late)
                if not missing:
                    return in_order
            if late:
                described = ", ".join(f"{kind} {i} ({names[i]})" + board.rejected(i) for i in missing)
                board.fail_together(
                    f"{len(missing)} of {len(names)} {kind}s did not come within {deadline.elapsed():.0f} s: "
                    f"{described}; the list of {kind}s was read from {origin}",
                    StartupError,
                )
            clock.sleep(pause)
            pause = min(0.2, pause * 1.5)
    except TowersError:
        if serves:
            board.wait_until_read([i for i in messages if i != index])
        raise
    except RuntimeError as error:  # what torch's store raises when its server is gone
        raise StartupError(f"{kind} 0 ({names[0]}) went away during the start-up: {printable(str(error))}") from None


class _Board:
    """The messages of one handshake in the store, as the process with index ``index`` sees them."""

    def __init__(self, store: SignedStore, kind: str, index: int) -> None:
        self._store = store
        self._kind = kind
        self._index = index
        self._mine: Message = {}
        self._confirmed: set[int] = set()  # processes that have found the same messages

    def claim(self, message: Message) -> Message:
        """Publish this process's message.

        Raises:
            HandshakeError: another process of this job has this index.
        """
        self._mine = {"nonce": uuid.uuid4().hex, **message}
        stored = self._store.publish(self._key(self._index), self._mine)
        if stored["nonce"] != self._mine["nonce"]:
            other = printable(stored.get("host"), 64)
            raise HandshakeError(
                f"{self._kind} {self._index} is already taken by a process on {other}; this one, on {message['host']}, "
                f"claims the same index: give each {self._kind} an index of its own"
            )
        return self._mine

    def republish(self) -> None:
        """Store this process's message again if something else has been stored in its place."""
        stored = self.message(self._index)
        if stored is None or stored["nonce"] != self._mine["nonce"]:
            self._store.write(self._key(self._index), self._mine)

    def message(self, index: int) -> Message | None:
        """The message of process ``index``; None when there is none of this job."""
        return self._store.read(self._key(index))

    def unconfirmed(self, messages: Sequence[Message], *, late: bool) -> list[int]:
        """Processes that have not confirmed yet that they have found the same ``messages``; see [Note: replayed
        messages].

        Args:
            late: ask all; else all but the first process wait for the first only.
        """
        digest = hashlib.sha256("\0".join(str(message["nonce"]) for message in messages).encode()).hexdigest()
        others = [other for other in range(1, len(messages)) if other != self._index]
        if self._index == 0:
            missing = self._without(others, digest)
            if not missing:
                self._confirm(digest)
        else:
            self._confirm(digest)
            missing = self._without([0], digest)
            if missing and late:
                missing = self._without(others, digest) or missing
        for other in missing:
            self._store.rejected[self._key(other)] = "a message of an earlier handshake, or of a process that has ended"
        return missing

    def _without(self, others: Sequence[int], digest: str) -> list[int]:
        """Those of ``others`` that have not confirmed ``digest``."""
        for other in others:
            confirmation = self._store.read(self._key(f"confirmed{other}")) if other not in self._confirmed else None
            if confirmation is not None and confirmation.get("digest") == digest:
                self._confirmed.add(other)
        return [other for other in others if other not in self._confirmed]

    def _confirm(self, digest: str) -> None:
        self._store.write(self._key(f"confirmed{self._index}"), {"digest": digest})

    def rejected(self, index: int) -> str:
        """What an error message adds about a message that was rejected in the place of process ``index``."""
        reason = self._store.rejected.get(self._key(index))
        return f", in whose place there is {reason}" if reason else ""

    def fail_together(self, problem: str | None, error: type[TowersError] = HandshakeError) -> None:
        """If there is a problem, publish it as the result, and raise the result that was published first."""
        if problem is not None:
            result = {"error": error.__name__, "text": printable(problem)}
            self._fail(self._store.publish(self._key("result"), result))

    def raise_result(self) -> None:
        """Fail if a process of this job has published that something is wrong."""
        if (result := self._store.read(self._key("result"))) is not None:
            self._fail(result)

    def wait_until_read(self, others: Sequence[int]) -> None:
        """Return when the others have read the result; one that has ended meanwhile costs ten seconds."""
        keys = [self._key(f"read{other}") for other in others]
        wait_until(lambda: not keys or self._store.store.check(keys), 10.0)

    def _fail(self, result: Message) -> None:
        self._store.store.set(self._key(f"read{self._index}"), "")
        error = StartupError if result.get("error") == StartupError.__name__ else HandshakeError
        raise error(printable(result.get("text")))

    def _key(self, what: int | str) -> str:
        return f"{self._kind}/{what}"


def _compare(kind: str, compare: Compare, index: int, message: Message, other: int, reference: Message) -> str | None:
    """What is wrong between two messages: versions first, since they say what is in a message."""
    mine, theirs = message.get("versions"), reference.get("versions")
    if mine != theirs:
        return (
            f"different versions: {_list_versions(mine)} on {kind} {index}{_on_host(message)}, "
            f"{_list_versions(theirs)} on {kind} {other}{_on_host(reference)}"
        )
    for field, value in reference.items():
        fits = (str if value is None else type(value), type(None))
        if field not in message or not isinstance(message[field], fits):
            damage = f": {printable(field, 64)} is missing or of another kind"
            return f"the message of {kind} {index}{_on_host(message)} is damaged{damage}"
    try:
        return compare(index, message, other, reference)
    except RecursionError:  # hundreds of lists in one another
        return f"the message of {kind} {index}{_on_host(message)} is damaged"


def _on_host(message: Message) -> str:
    return f" (on {printable(message.get('host'), 64)})"


def _list_versions(versions: object) -> str:
    if not isinstance(versions, dict):
        return "unknown ones"
    return ", ".join(f"{printable(name, 32)} {printable(number, 64)}" for name, number in versions.items())
