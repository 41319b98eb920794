"""This machine's names, and where they lead."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping

from mirrored.doctor import addresses
from mirrored.doctor.finding import Finding, note, ok, problem, warning

_SLOW = 1.0  # seconds
_SUBJECT = "host name"


def check(environ: Mapping[str, str]) -> Iterator[Finding]:
    """The host name and localhost."""
    host = socket.gethostname()
    started = time.monotonic()
    own, local = addresses.resolve([host, "localhost"])
    took = time.monotonic() - started
    if isinstance(own, OSError):
        yield warning(
            _SUBJECT,
            f"{host!r} does not resolve ({own.strerror or own}); towers of this machine do not need it, but clusters "
            "that call it so do",
            f"add '127.0.1.1 {host}' to /etc/hosts, or its real address",
        )
    else:
        yield from _leads_to(host, own)
    if isinstance(local, OSError):
        yield problem("localhost", f"does not resolve ({local})", "add '127.0.0.1 localhost' to /etc/hosts")
    elif "127.0.0.1" not in local:
        yield warning(
            "localhost",
            f"leads to {', '.join(local)} and not to 127.0.0.1",
            "add '127.0.0.1 localhost' to /etc/hosts",
        )
    if took > _SLOW:
        yield warning(
            "name server",
            f"resolving {host!r} and localhost took {took:.1f} s",
            "add both to /etc/hosts, or mend /etc/resolv.conf: every start of towers waits for it",
        )


def _leads_to(host: str, found: list[str]) -> Iterator[Finding]:
    what = f"{host} is {', '.join(found)}"
    strangers = [address for address in found if not addresses.is_own(address)]
    if strangers:
        yield warning(
            _SUBJECT,
            f"{what}, but {', '.join(strangers)} belongs to no interface of this machine",
            "correct /etc/hosts or the name server, or name this machine by its address in the cluster",
        )
    elif all(addresses.is_loopback(address) for address in found):
        yield note(
            _SUBJECT,
            f"{what}, which other machines cannot reach; a chief that is named so listens on all interfaces, and "
            "the others have to know the name by another address",
        )
    elif all(":" in address for address in found):
        yield note(_SUBJECT, f"{what}: IPv6 only; in TF_CONFIG its address goes into brackets")
    else:
        yield ok(_SUBJECT, what)
