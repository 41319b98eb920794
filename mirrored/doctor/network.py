"""Checks the network: interfaces, and the address where towers rendezvous."""

from __future__ import annotations

import errno
import ipaddress
import os
import pathlib
import socket
from collections.abc import Iterator, Mapping, Sequence

from mirrored.doctor.findings import Finding, ok, problem, warning
from towers.errors import PortInUseError, StartupError
from towers.joining.store import listen
from towers.system import devices, machine
from towers.system.timeouts import run_all_with_timeout

_RESOLVE_SECONDS = 5.0
_CONNECT_SECONDS = 3.0
_LISTENING = "0A"  # the state in /proc/net/tcp
_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def check_interfaces(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Checks the interfaces of this machine, and those that Gloo and NCCL are configured to use."""
    interfaces = machine.interfaces()
    listed = ", ".join(f"{name} {address}" if address else f"{name} (no IPv4)" for name, address in interfaces.items())
    yield ok("interfaces", listed or "none")
    for variable in (_GLOO, _NCCL):
        if value := environ.get(variable):
            yield _check_chosen(variable, value, interfaces)


def _check_chosen(variable: str, value: str, interfaces: Mapping[str, str | None]) -> Finding:
    """Checks whether the interfaces that a variable selects exist and lead to other machines.

    Gloo takes complete names, and fails if one does not exist. NCCL takes prefixes of names, complete names after
    ``=``, and names to exclude after ``^``.
    """
    if variable == _GLOO:
        words, exact, excluded = value.split(","), True, False
    else:
        words, exact, excluded = value.lstrip("^=").split(","), "=" in value[:2], value.startswith("^")
    fix = f"unset {variable} (towers choose by themselves), or name one of {', '.join(interfaces)}"
    missing = [word for word in words if word not in interfaces]
    if variable == _GLOO and missing:
        return problem(variable, f"names {', '.join(map(repr, missing))}, which this machine does not have", fix)
    chosen = [name for name in interfaces if any(name == w if exact else name.startswith(w) for w in words) != excluded]
    what = f"chooses {', '.join(chosen)}"
    if not chosen:
        severe = problem if devices.count_of("cuda") > 1 else warning
        return severe(variable, f"is {value!r}, which leaves none of this machine's interfaces", fix)
    if not any(interfaces[name] for name in chosen):
        return warning(variable, f"{what}, without an IPv4 address", f"unset {variable}, or name one with an address")
    if set(chosen) == {machine.loopback_interface()}:
        fix = f"unset {variable}, unless all towers run on this machine"
        return warning(variable, f"{what}: other machines cannot be reached through it", fix)
    return ok(variable, what)


def look_up(hosts: Sequence[str]) -> list[list[str] | OSError]:
    """Returns the numeric addresses of each host, or the error (also TimeoutError). All are looked up in parallel."""

    def addresses(host: str) -> list[str]:
        return list(dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(host, None)))

    results = run_all_with_timeout(_RESOLVE_SECONDS, [lambda host=host: addresses(host) for host in hosts])  # type: ignore[misc]
    return [  # a malformed name raises UnicodeError
        OSError(str(result)) if isinstance(result, BaseException) and not isinstance(result, OSError) else result
        for result in results
    ]


def is_loopback(address: str) -> bool:
    """Returns whether traffic to a numeric address stays on the machine."""
    return ipaddress.ip_address(address).is_loopback


def is_local(address: str) -> bool:
    """Returns whether a numeric address belongs to an interface of this machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            return error.errno != errno.EADDRNOTAVAIL
    return True


def check_chief(host: str, port: int, origin: str, *, is_chief: bool) -> Finding:
    """Checks whether the store can be served at the chief's address, or reached there from another worker.

    A store that does not answer yet is a warning. An address that cannot be reached is a problem.

    Args:
        origin: the source of the address, for messages.
    """
    return _check_can_serve(host, port, origin) if is_chief else _check_can_reach(host, port, origin)


def _check_can_serve(host: str, port: int, origin: str) -> Finding:
    subject = "chief's port"
    try:
        listen(host, port, origin)[0].close()
    except PortInUseError:
        return problem(
            subject,
            f"port {port} of {host}, where this machine has to serve the store, is in use by {_holder(port)}",
            "end that program (an earlier run?), or name another port on all workers; if it belongs to this very job, "
            "which is running, all is well",
        )
    except StartupError as error:
        return problem(subject, str(error), f"name an address of this machine as the chief's in {origin}")
    return ok(subject, f"port {port} of {host} is free for the store")


def _check_can_reach(host: str, port: int, origin: str) -> Finding:
    subject, chief = "chief", f"the chief at {host}:{port} (from {origin})"
    try:
        socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
    except ConnectionRefusedError:
        return warning(
            subject,
            f"{chief} can be reached, but nothing listens on that port",
            (
                "this is normal if the chief has not started yet; otherwise it listens on another port, or a "
                "firewall refuses"
            ),
        )
    except OSError as error:
        fix = f"correct the chief's address in {origin}, or open the network and its firewalls to it"
        return problem(subject, f"{chief} cannot be reached: {error.strerror or error}", fix)
    return ok(subject, f"{chief} answers")


def _holder(port: int) -> str:
    """Returns the process that listens on a TCP port of this machine, if this user may see it."""
    inodes = set(_listening_on(port))
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            names = {os.readlink(entry) for entry in (process / "fd").iterdir()}
            if any(f"socket:[{inode}]" in names for inode in inodes):
                words = (process / "cmdline").read_bytes().split(b"\0")
                command = b" ".join(words).decode(errors="replace").strip()
                return f"process {process.name} ({command[:80]})"
        except OSError:  # another user's process, or one that has ended
            continue
    return "another process"


def _listening_on(port: int) -> Iterator[str]:
    """Yields the inodes of the sockets that listen on a TCP port."""
    for table in ("tcp", "tcp6"):
        try:
            lines = pathlib.Path("/proc/net", table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if words[3] == _LISTENING and words[1].endswith(f":{port:04X}"):
                yield words[9]
