"""Everyone who should come has come, once, and belongs here: checked before the first collective.

Used twice: workers (machines) meet when the agents start, towers meet when their strategies are built. Each
lays a card into the store, waits for everybody's, and compares. Whoever sees something wrong writes a verdict
that all the others read, so that all fail with one text within seconds.

A store takes what anybody writes. So cards and verdicts are sealed (:mod:`towers.joining.messages`): who has another
job token than the store's owner is refused before it writes anything, and what others have written counts as not there.
Cards of an earlier meeting count as not there, too: see :class:`towers.joining.exchange.Table`.
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

from towers.errors import HandshakeError, PortInUseError, StartupError, TowersError
from towers.joining import messages
from towers.joining.exchange import Table, lay_down
from towers.joining.messages import Card, OtherJobError, plain
from towers.system import network
from towers.system.run_with_timeout import within

Compare = Callable[[int, Card, int, Card], str | None]
"""(an index, its card, another index, its card) → what is wrong between the two, or None."""

_OWNER = "towers/owner"


def versions() -> dict[str, str]:
    """What must be equal on all workers and towers."""
    try:
        own = importlib.metadata.version("mirrored")
    except importlib.metadata.PackageNotFoundError:
        own = "not installed"
    return {
        "mirrored": own,
        "torch": torch.version.__version__,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
    }


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
    store.set(_OWNER, messages.seal(token, _OWNER, {"host": socket.gethostname()}))
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
        lay_down(store, token, _OWNER, {"host": socket.gethostname()}, refuses_others=True)
    except OtherJobError as other:
        raise HandshakeError(
            f"{name} (on {socket.gethostname()}) is not of the job that meets at {_join(host, port)}: there lies "
            f"{other}; the address comes from {origin}. All processes of a job have the same {messages.JOB_TOKEN} "
            "or none (under torchrun without one, the same TORCHELASTIC_RUN_ID); look for variables left over from "
            "another job"
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
    table = Table(store, kind, index, token)
    started = time.monotonic()
    pause = 0.005
    found: dict[int, Card] = {}
    try:
        mine = found[index] = table.claim({"host": socket.gethostname(), "versions": versions(), **card})
        while True:
            table.read_verdict()
            table.stay()
            for i in range(len(names)):
                if i not in found and (theirs := table.card(i)) is not None:
                    found[i] = theirs
                    table.judge(_compare(kind, compare, i, theirs, index, mine))
                    if len(found) == len(names):
                        # All compare all with the first, so that nobody goes on where two others found a difference.
                        for other in range(1, len(names)):
                            table.judge(_compare(kind, compare, other, found[other], 0, found[0]))
                        pause = 0.005
            late = time.monotonic() >= deadline
            missing = [i for i in range(len(names)) if i not in found]
            if not missing:
                missing = table.not_here(len(names), late=late)
                if not missing:
                    return [found[i] for i in range(len(names))]
            if late:
                described = ", ".join(f"{kind} {i} ({names[i]})" + table.instead_of(i) for i in missing)
                waited = time.monotonic() - started
                table.judge(
                    f"{len(missing)} of {len(names)} {kind}s did not come within {waited:.0f} s: "
                    f"{described}; who should come was read from {origin}",
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
