"""Everyone who should come has come, once, and belongs here: checked before the first collective.

Used twice: workers (machines) meet when the agents start, towers meet when their strategies are built. Each
lays a card into the store, waits for everybody's, and compares. Whoever sees something wrong writes a verdict
that all the others read, so that all fail with one text within seconds.

A store takes what anybody writes. So cards and verdicts are sealed (:mod:`towers.cards`): who has another job token
than the store's owner is refused before it writes anything, and what others have written counts as not there.
"""

from __future__ import annotations

import errno
import importlib.metadata
import ipaddress
import socket
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Store, TCPStore

from towers import cards, network
from towers.cards import Card, NotACardError, OtherJobError, plain
from towers.errors import HandshakeError, PortInUseError, StartupError, TowersError
from towers.within import within

Compare = Callable[[int, Card, int, Card], str | None]
"""(an index, its card, another index, its card) → what is wrong between the two, or None."""

_OWNER = "towers/owner"
_ATTEMPTS = 20  # to lay a card down where strangers write


def versions() -> dict[str, str]:
    """What must be equal on all workers and towers."""
    try:
        own = importlib.metadata.version("mirrored")
    except importlib.metadata.PackageNotFoundError:
        own = "not installed"
    return {"mirrored": own, "torch": torch.__version__, "python": f"{sys.version_info.major}.{sys.version_info.minor}"}


def serve_store(
    host: str, port: int, timeout: timedelta, origin: str, token: str, others: Sequence[str] = ()
) -> TCPStore:
    """Start the store at ``host:port`` (port 0: any free one), listening on that address only, where it can be.

    Args:
        token: the job's; whoever has another is refused by :func:`join_store`.
        others: hosts from which others will come. They tell where to listen when ``host`` is a name that leads
            elsewhere from here than from there.

    Returns:
        The store; this machine's own processes reach it at its ``host`` and ``port``.

    Raises:
        PortInUseError, StartupError: as of :func:`listen`.
    """
    listener, host = listen(host, port, origin, others)
    port = listener.getsockname()[1]
    # The store closes the socket it is given by number, so the Python object must let go of it.
    store = TCPStore(host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach())
    store.set(_OWNER, cards.seal(token, _OWNER, {"host": socket.gethostname()}))
    return store


def listen(host: str, port: int, origin: str, others: Sequence[str] = ()) -> tuple[socket.socket, str]:
    """A socket that listens where the others expect the chief, and the host at which this machine reaches it.

    Args:
        others: as of :func:`serve_store`.

    Raises:
        PortInUseError: something listens there already.
        StartupError: ``host`` cannot be resolved, or the address cannot be used.
    """
    at = _join(host, port)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:  # the latter for what cannot be a name
        raise StartupError(f"the chief's address {at} (from {origin}) cannot be resolved: {error}") from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        reached = _bind(listener, host, address, others)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(
                errno.EADDRINUSE,
                f"EADDRINUSE: {at} (from {origin}), where the towers must meet, is in use by another process; "
                "end that process (an earlier run, or a second one that claims to be the chief), or name "
                "another port",
            ) from None
        raise StartupError(f"cannot listen on {at} (from {origin}): {error.strerror}") from None
    return listener, reached


def _bind(listener: socket.socket, host: str, address: Any, others: Sequence[str]) -> str:
    """Bind to ``address``, or to what it stands for. Returns the host at which this machine reaches it."""
    # The machine's own name, which Debian's /etc/hosts takes to loopback; others know it by another address.
    own_name = ipaddress.ip_address(address[0]).is_loopback and host not in ("localhost", address[0])
    towards = network.own_address(others) if own_name else None
    if not own_name or (towards and ipaddress.ip_address(towards).is_loopback):
        try:
            listener.bind(address)
            return host
        except OSError as error:
            # The name may lead to an address that no interface here has (a service address in front of this machine).
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            towards = network.own_address(others)
    if towards and (":" in towards) == (listener.family == socket.AF_INET6):
        listener.bind((towards, address[1]))
        return towards
    listener.bind(("::" if listener.family == socket.AF_INET6 else "0.0.0.0", address[1]))
    return host


def join_store(
    host: str, port: int, timeout: timedelta, deadline: float, who: str, origin: str, token: str, name: str
) -> TCPStore:
    """Connect to the store that the chief serves at ``host:port``, waiting for it until ``deadline``.

    Args:
        deadline: in ``time.monotonic()`` seconds.
        who: who serves it, for the message.
        token: the job's.
        name: who this is, for the message.

    Raises:
        StartupError: nobody listened there before the deadline.
        HandshakeError: the store is another job's. Nothing was written there.
    """
    started = time.monotonic()
    while True:
        try:
            socket.create_connection((host, port), timeout=2.0).close()
            break
        except UnicodeError as error:
            raise StartupError(f"{_join(host, port)} (from {origin}) is no address: {error}") from None
        except OSError as error:
            if time.monotonic() >= deadline:
                raise StartupError(
                    f"{who} did not answer at {_join(host, port)} within {time.monotonic() - started:.0f} s "
                    f"({error.strerror or error}); the address comes from {origin}: start it, or correct that"
                ) from None
        time.sleep(0.1)
    store = _connect(host, port, timeout, deadline, who, origin)
    # Who serves it has said whose it is; torchrun has not: there, who comes first says it.
    try:
        _lay_down(store, token, _OWNER, {"host": socket.gethostname()}, refuses_others=True)
    except OtherJobError as other:
        raise HandshakeError(
            f"{name} (on {socket.gethostname()}) is not of the job that meets at {_join(host, port)}: there lies "
            f"{other}; the address comes from {origin}. All processes of a job have the same {cards.JOB_TOKEN} or none "
            "(under torchrun without one, the same TORCHELASTIC_RUN_ID); look for variables left over from another job"
        ) from None
    except TowersError:
        raise
    except RuntimeError as error:
        raise StartupError(f"{who} went away during the start-up: {plain(str(error))}") from None
    return store


def _connect(host: str, port: int, timeout: timedelta, deadline: float, who: str, origin: str) -> TCPStore:
    """Connect to what listens there, which may be no store: then torch waits without end, or throws frames."""
    reason = ""
    try:
        return within(
            max(1.0, deadline - time.monotonic()),
            lambda: TCPStore(host, port, None, False, timeout, wait_for_workers=False),
        )
    except TimeoutError:
        pass
    except RuntimeError as error:
        reason = f" ({str(error).splitlines()[0]})"
    raise StartupError(
        f"what listens at {_join(host, port)} does not answer as {who} would{reason}: another program has the port; "
        f"the address comes from {origin}: start {who} there, or correct that"
    )


def meet(
    store: Store,
    card: Card,
    *,
    kind: str,
    index: int,
    names: Sequence[str],
    deadline: float,
    origin: str,
    token: str,
    compare: Compare,
    serves: bool,
) -> list[Card]:
    """Lay down ``card``, wait for everybody's, and return all of them in order.

    Args:
        card: what the others should know; JSON values. All processes of a version have the same fields, with values
            of one type or None.
        kind: "worker" or "tower", for keys and messages.
        index: this one's index among ``names``.
        names: how messages call each of those who should come.
        deadline: in ``time.monotonic()`` seconds.
        origin: where it was read who should come.
        token: the job's. Cards with another count as not there.
        compare: what is wrong between two cards; versions and fields are compared before.
        serves: whether the store ends with this process: on failure it then waits until the others know.

    Raises:
        StartupError: not all came before the deadline; the message lists who is missing.
        HandshakeError: ``index`` is taken by another process, or two cards do not fit together.
    """
    table = _Table(store, kind, index, token)
    started = time.monotonic()
    pause = 0.005
    found: dict[int, Card] = {}
    try:
        mine = found[index] = table.claim({"host": socket.gethostname(), "versions": versions(), **card})
        while True:
            table.read_verdict()
            for i in range(len(names)):
                if i not in found and (theirs := table.card(i)) is not None:
                    found[i] = theirs
                    table.judge(_compare(kind, compare, i, theirs, index, mine))
            if len(found) == len(names):
                # All compare all with the first, so that nobody goes on where two others found a difference.
                for i in range(1, len(names)):
                    table.judge(_compare(kind, compare, i, found[i], 0, found[0]))
                return [found[i] for i in range(len(names))]
            if time.monotonic() >= deadline:
                missing = [
                    f"{kind} {i} ({names[i]})" + table.instead_of(i) for i in range(len(names)) if i not in found
                ]
                waited = time.monotonic() - started
                table.judge(
                    f"{len(missing)} of {len(names)} {kind}s did not come within {waited:.0f} s: "
                    f"{', '.join(missing)}; who should come was read from {origin}",
                    StartupError,
                )
            time.sleep(pause)
            pause = min(0.2, pause * 1.5)
    except TowersError:
        if serves:
            table.wait_until_read([i for i in found if i != index])
        raise
    except RuntimeError as error:  # what torch's store raises when its server is gone
        raise StartupError(f"{kind} 0 ({names[0]}) went away during the start-up: {plain(str(error))}") from None


class _Table:
    """Where the cards of one meeting lie, as the process with index ``index`` sees it."""

    def __init__(self, store: Store, kind: str, index: int, token: str) -> None:
        self._store = store
        self._kind = kind
        self._index = index
        self._token = token
        self._strangers: dict[int, str] = {}

    def claim(self, card: Card) -> Card:
        """Take this process's place.

        Raises:
            HandshakeError: another process of this job has it.
        """
        found = _lay_down(self._store, self._token, self._place(self._index), card)
        if found is not card:
            other = plain(found.get("host"), 64)
            raise HandshakeError(
                f"{self._kind} {self._index} is already taken by a process on {other}; this one, on {card['host']}, "
                f"claims the same index: give each {self._kind} an index of its own"
            )
        return card

    def card(self, index: int) -> Card | None:
        """The card of ``index``; None when it has not come, or only a stranger in its place."""
        place = self._place(index)
        if not self._store.check([place]):
            return None
        try:
            return cards.unseal(self._token, place, self._store.get(place))
        except NotACardError as stranger:
            self._strangers[index] = str(stranger)
            return None

    def instead_of(self, index: int) -> str:
        """What a message adds about who came in the place of ``index``, if anybody did."""
        return f", in whose place lies {self._strangers[index]}" if index in self._strangers else ""

    def judge(self, wrong: str | None, error: type[TowersError] = HandshakeError) -> None:
        """Tell everybody that something is wrong, and fail with whatever was told first."""
        if wrong is not None:
            said = {"error": error.__name__, "text": plain(wrong)}
            self._fail(_lay_down(self._store, self._token, self._place("verdict"), said))

    def read_verdict(self) -> None:
        """Fail if somebody of this job has found something wrong."""
        place = self._place("verdict")
        if self._store.check([place]):
            try:
                said = cards.unseal(self._token, place, self._store.get(place))
            except NotACardError:
                return
            self._fail(said)

    def wait_until_read(self, others: Sequence[int]) -> None:
        """Give the others a moment to read the verdict."""
        end = time.monotonic() + 2.0
        while others and time.monotonic() < end and not self._store.check([self._place(f"read{i}") for i in others]):
            time.sleep(0.02)

    def _fail(self, verdict: Card) -> None:
        self._store.set(self._place(f"read{self._index}"), "")
        error = StartupError if verdict.get("error") == StartupError.__name__ else HandshakeError
        raise error(plain(verdict.get("text")))

    def _place(self, what: int | str) -> str:
        return f"{self._kind}/{what}"


def _lay_down(store: Store, token: str, place: str, card: Card, *, refuses_others: bool = False) -> Card:
    """Lay ``card`` down where no card of this job lies, and return what lies there then.

    Args:
        refuses_others: leave another job's card there.

    Raises:
        OtherJobError: it was left.
        HandshakeError: somebody writes there without end.
    """
    text = cards.seal(token, place, card)
    expected: str | bytes = ""
    for _ in range(_ATTEMPTS):
        found = store.compare_set(place, expected, text)  # type: ignore[arg-type]  # takes bytes as well
        if found == text.encode():
            return card
        try:
            return cards.unseal(token, place, found)
        except NotACardError as stranger:
            if refuses_others and isinstance(stranger, OtherJobError):
                raise
            expected = "" if found == expected else found  # equal: it was there, and is gone
    raise HandshakeError(f"a stranger keeps writing to {place} in the store where this job meets")


def _compare(kind: str, compare: Compare, index: int, card: Card, other: int, reference: Card) -> str | None:
    """What is wrong between two cards: versions first, since they say what is in a card."""
    here, there = (plain(one.get("host"), 64) for one in (card, reference))
    mine, theirs = card.get("versions"), reference.get("versions")
    if mine != theirs:
        a, b = (_said(one) for one in (mine, theirs))
        return f"different versions: {a} on {kind} {index} (on {here}), {b} on {kind} {other} (on {there})"
    for field, value in reference.items():
        fits = (str if value is None else type(value), type(None))
        if field not in card or not isinstance(card[field], fits):
            return (
                f"the card of {kind} {index} (on {here}) is damaged: {plain(field, 64)} is missing or of another kind"
            )
    try:
        return compare(index, card, other, reference)
    except RecursionError:  # hundreds of lists in one another
        return f"the card of {kind} {index} (on {here}) is damaged"


def _said(stated: object) -> str:
    if not isinstance(stated, dict):
        return "unknown ones"
    return ", ".join(f"{plain(name, 32)} {plain(number, 64)}" for name, number in stated.items())


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
