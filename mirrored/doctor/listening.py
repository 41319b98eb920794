"""Can programs on this machine listen, and reach each other?"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping

from mirrored.doctor import addresses
from mirrored.doctor.finding import Finding, ok, problem, warning

_SECONDS = 3.0


def check(environ: Mapping[str, str]) -> Iterator[Finding]:
    """A connection through loopback, and one through the address of the host's name."""
    failed = _connect("127.0.0.1")
    if failed:
        yield problem(
            "loopback",
            f"a program cannot be reached at 127.0.0.1: {failed}",
            "towers meet there: bring the interface up (ip link set lo up), or let the firewall pass it",
        )
    else:
        yield ok("loopback", "programs reach each other at 127.0.0.1")
    (found,) = addresses.resolve([socket.gethostname()])
    if isinstance(found, OSError):
        return  # the check of the names says so
    for address in found:
        if address == "127.0.0.1" or not addresses.is_own(address):
            continue
        failed = _connect(address)
        if failed:
            yield warning(
                "own address",
                f"a program cannot be reached at {address}, which this machine's name leads to: {failed}",
                "clusters that know this machine by it cannot meet here: look at its interfaces and its firewall",
            )
        else:
            yield ok("own address", f"programs reach each other at {address}")


def _connect(address: str) -> str | None:
    """Why a program that listens on ``address`` cannot be reached there; None when it can."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind((address, 0))
            listener.listen(1)
            socket.create_connection(listener.getsockname()[:2], timeout=_SECONDS).close()
    except OSError as error:
        return str(error.strerror or error)
    return None
