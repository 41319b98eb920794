"""Everyone who should come has come, once, and belongs here: checked before the first collective.

Used twice: workers (machines) meet when the agents start, towers meet when their strategies are built. Each
lays a card into the store, waits for everybody's, and compares. Whoever sees something wrong writes a verdict
that all the others read, so that all fail with one text within seconds.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Store, TCPStore

from towers.errors import HandshakeError, PortInUseError, StartupError, TowersError

Card = dict[str, Any]
Compare = Callable[[int, Card, int, Card], str | None]
"""(an index, its card, another index, its card) → what is wrong between the two, or None."""


def serve_store(host: str, port: int, timeout: timedelta, origin: str) -> TCPStore:
    """Start the store at ``host:port`` (port 0: any free one), listening on that address only, where it can be.

    Raises:
        PortInUseError, StartupError: as of :func:`listen`.
    """
    listener = listen(host, port, origin)
    port = listener.getsockname()[1]
    # The store closes the socket it is given by number, so the Python object must let go of it.
    return TCPStore(host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach())


def listen(host: str, port: int, origin: str) -> socket.socket:
    """A socket that listens where the others expect the chief.

    Raises:
        PortInUseError: something listens there already.
        StartupError: ``host`` cannot be resolved, or the address cannot be used.
    """
    at = _join(host, port)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise StartupError(f"the chief's address {at} (from {origin}) cannot be resolved: {error}") from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        _bind(listener, host, address)
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
    return listener


def _bind(listener: socket.socket, host: str, address: Any) -> None:
    everywhere = ("::" if listener.family == socket.AF_INET6 else "0.0.0.0", address[1])
    if ipaddress.ip_address(address[0]).is_loopback and host not in ("localhost", address[0]):
        # The machine's own name, which Debian's /etc/hosts takes to loopback; others know it by another address.
        listener.bind(everywhere)
        return
    try:
        listener.bind(address)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        # The name leads to an address that no interface here has (a service address in front of this
        # machine): then the connections arrive on an address that is not known beforehand.
        listener.bind(everywhere)


def join_store(host: str, port: int, timeout: timedelta, deadline: float, who: str, origin: str) -> TCPStore:
    """Connect to the store that the chief serves at ``host:port``, waiting for it until ``deadline``.

    Args:
        deadline: in ``time.monotonic()`` seconds.
        who: who serves it, for the message.

    Raises:
        StartupError: nobody listened there before the deadline.
    """
    started = time.monotonic()
    while True:
        try:
            socket.create_connection((host, port), timeout=2.0).close()
            break
        except OSError as error:
            if time.monotonic() >= deadline:
                raise StartupError(
                    f"{who} did not answer at {_join(host, port)} within {time.monotonic() - started:.0f} s "
                    f"({error.strerror or error}); the address comes from {origin}: start it, or correct that"
                ) from None
        time.sleep(0.1)
    return _connect(host, port, timeout, deadline, who, origin)


def _connect(host: str, port: int, timeout: timedelta, deadline: float, who: str, origin: str) -> TCPStore:
    """Connect to what listens there, which may be no store: then torch waits without end, or throws frames."""
    found: list[TCPStore | str] = []

    def connect() -> None:
        try:
            found.append(TCPStore(host, port, None, False, timeout, wait_for_workers=False))
        except RuntimeError as error:
            found.append(str(error).splitlines()[0])

    thread = threading.Thread(target=connect, name="towers-connect", daemon=True)
    thread.start()
    thread.join(max(1.0, deadline - time.monotonic()))
    if found and not isinstance(found[0], str):
        return found[0]
    reason = f" ({found[0]})" if found else ""
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
    compare: Compare,
    serves: bool,
) -> list[Card]:
    """Lay down ``card``, wait for everybody's, and return all of them in order.

    Args:
        card: what the others should know; JSON values.
        kind: "worker" or "tower", for keys and messages.
        index: this one's index among ``names``.
        names: how messages call each of those who should come.
        deadline: in ``time.monotonic()`` seconds.
        origin: where it was read who should come.
        compare: what is wrong between two cards.
        serves: whether the store ends with this process: on failure it then waits until the others know.

    Raises:
        StartupError: not all came before the deadline; the message lists who is missing.
        HandshakeError: ``index`` is taken by another process, or ``compare`` found a difference.
    """
    started = time.monotonic()
    mine = {"host": socket.gethostname(), **card, "token": uuid.uuid4().hex}
    cards: dict[int, Card] = {index: mine}
    pause = 0.005
    try:
        _claim(store, mine, kind, index)
        while True:
            _read_verdict(store, kind)
            for i in range(len(names)):
                if i not in cards and store.check([_key(kind, i)]):
                    cards[i] = json.loads(store.get(_key(kind, i)))
                    _judge(store, kind, compare(i, cards[i], index, mine))
            if len(cards) == len(names):
                # All compare all with the first, so that nobody goes on where two others found a difference.
                for i in range(1, len(names)):
                    _judge(store, kind, compare(i, cards[i], 0, cards[0]))
                return [cards[i] for i in range(len(names))]
            if time.monotonic() >= deadline:
                missing = [f"{kind} {i} ({names[i]})" for i in range(len(names)) if i not in cards]
                waited = time.monotonic() - started
                _judge(
                    store,
                    kind,
                    f"{len(missing)} of {len(names)} {kind}s did not come within {waited:.0f} s: "
                    f"{', '.join(missing)}; who should come was read from {origin}",
                    StartupError,
                )
            time.sleep(pause)
            pause = min(0.2, pause * 1.5)
    except TowersError:
        if serves:
            _wait_until_read(store, kind, len(cards) - 1)
        raise
    except RuntimeError as error:  # what torch's store raises when its server is gone
        raise StartupError(f"{kind} 0 ({names[0]}) went away during the start-up: {error}") from None


def _key(kind: str, what: int | str) -> str:
    return f"{kind}/{what}"


def _claim(store: Store, card: Card, kind: str, index: int) -> None:
    found = json.loads(store.compare_set(_key(kind, index), "", json.dumps(card)))
    if found["token"] != card["token"]:
        raise HandshakeError(
            f"{kind} {index} is already taken by a process on {found['host']}; this one, on {card['host']}, "
            f"claims the same index: give each {kind} an index of its own"
        )


def _judge(store: Store, kind: str, wrong: str | None, error: type[TowersError] = HandshakeError) -> None:
    """Tell everybody that something is wrong, and fail with whatever was told first."""
    if wrong is not None:
        store.compare_set(_key(kind, "verdict"), "", json.dumps([error.__name__, wrong]))
        _read_verdict(store, kind)


def _read_verdict(store: Store, kind: str) -> None:
    if store.check([_key(kind, "verdict")]):
        name, text = json.loads(store.get(_key(kind, "verdict")))
        store.add(_key(kind, "read"), 1)
        raise (StartupError if name == StartupError.__name__ else HandshakeError)(text)


def _wait_until_read(store: Store, kind: str, others: int) -> None:
    end = time.monotonic() + 2.0
    while time.monotonic() < end and store.add(_key(kind, "read"), 0) <= others:
        time.sleep(0.02)


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
