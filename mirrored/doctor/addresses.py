"""The address where towers meet: can it be resolved, is it this machine's, can it be served, can it be reached?"""

from __future__ import annotations

import errno
import ipaddress
import os
import pathlib
import re
import socket
from collections.abc import Iterator, Sequence

from mirrored.doctor.finding import Finding, ok, problem, warning
from towers.errors import PortInUseError, StartupError
from towers.joining.store import listen
from towers.system.timeouts import run_all_with_timeout

_RESOLVING = 5.0  # seconds
_CONNECTING = 3.0
_LISTENING = "0A"  # in /proc/net/tcp


def resolve(hosts: Sequence[str]) -> list[list[str] | OSError]:
    """The numeric addresses of each host, all at once, or why there are none (TimeoutError is an OSError)."""

    def numeric(host: str) -> list[str]:
        return list(dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(host, None)))

    found = run_all_with_timeout(_RESOLVING, [lambda host=host: numeric(host) for host in hosts])  # type: ignore[misc]
    return [_as_error(answer) if isinstance(answer, BaseException) else answer for answer in found]


def _as_error(error: BaseException) -> OSError:
    return error if isinstance(error, OSError) else OSError(str(error))  # a name that is none raises a UnicodeError


def is_loopback(address: str) -> bool:
    """Whether a numeric address never leaves the machine."""
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def is_own(address: str) -> bool:
    """Whether a numeric address belongs to an interface of this machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            return error.errno != errno.EADDRNOTAVAIL
    return True


def check_can_serve(subject: str, host: str, port: int, origin: str) -> Finding:
    """Whether the store can be served there, as the chief does."""
    try:
        listen(host, port, origin)[0].close()
    except PortInUseError:
        who = holder(port)
        return problem(
            subject,
            f"port {port} of {host}, where this machine has to serve the store, is in use by {who}",
            "end that program (an earlier run?), or name another port on all workers; if it is this very job that "
            "runs now, all is well",
        )
    except StartupError as error:
        return problem(subject, str(error), f"name an address of this machine as the chief's in {origin}")
    return ok(subject, f"port {port} of {host} is free for the store")


def check_can_reach(subject: str, host: str, port: int, origin: str) -> Finding:
    """Whether the chief's store answers there: that it does not yet is no problem, that nothing does is one."""
    at = f"the chief at {host}:{port} (from {origin})"
    try:
        socket.create_connection((host, port), timeout=_CONNECTING).close()
    except ConnectionRefusedError:
        return warning(
            subject,
            f"{at} can be reached, but nothing listens on that port",
            "all is well if the chief has not been started yet; else it listens on another port, or a firewall refuses",
        )
    except OSError as error:
        fix = f"correct the chief's address in {origin}, or let the network and its firewalls lead there"
        return problem(subject, f"{at} cannot be reached: {error.strerror or error}", fix)
    return ok(subject, f"{at} answers")


def holder(port: int) -> str:
    """The process that listens on a TCP port of this machine, as far as we may know."""
    inodes = set(_listening_on(port))
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            names = {os.readlink(entry) for entry in (process / "fd").iterdir()}
            if any(f"socket:[{inode}]" in names for inode in inodes):
                words = (process / "cmdline").read_bytes().split(b"\0")
                command = b" ".join(words).decode(errors="replace").strip()
                return f"process {process.name} ({command[:80]})"
        except OSError:  # another user's, or gone meanwhile
            continue
    return "another process"


def _listening_on(port: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        try:
            lines = pathlib.Path("/proc/net", table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if words[3] == _LISTENING and re.fullmatch(f".*:{port:04X}", words[1]):
                yield words[9]
