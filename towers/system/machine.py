"""This machine: its identity, its cores and memory, and the network interfaces that towers use.

[Note: the interface is looked up] Left alone, Gloo listens at the address that the machine's name resolves to: on
Debian a loopback address, which other machines cannot reach, elsewhere one that the outside can reach. NCCL takes the
first interface that looks good. So towers that share a machine and a network namespace (the handshake shows it) listen
on loopback, and other towers on the interface that leads to the chief. The agent and ``launch`` put loopback into the
environment of the towers of one machine, so that it also holds for groups that a script makes before its strategy.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import re
import socket
import sys
from collections.abc import Mapping, MutableMapping, Sequence

import torch

THREADS = "TOWERS_THREADS"
"""Environment variable with the value of ``OMP_NUM_THREADS`` that the agent, and not the user, has chosen."""

_GLOO = "GLOO_SOCKET_IFNAME"
_NCCL = "NCCL_SOCKET_IFNAME"

_REACH_SECONDS = 3.0


def host_identity() -> str:
    """A text that is equal for two processes exactly when they run on one machine (and one boot of it).

    The kernel's boot id, else the host name. ``NCCL_HOSTID``, when set, speaks for itself: NCCL takes
    processes with different values for different hosts, and so do we.
    """
    if stated := os.environ.get("NCCL_HOSTID"):
        return stated
    with contextlib.suppress(OSError):
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def network_identity() -> str:
    """A text that is equal for two processes of one machine exactly when they share its network interfaces."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/net")
    return "the machine's own"


def identity(host: str, port: int) -> dict[str, str | None]:
    """This machine as others compare it: ``machine``, ``network`` and its own ``address`` on the way to ``host``."""
    return {"machine": host_identity(), "network": network_identity(), "address": address_towards(host, port)}


def cores() -> int:
    """How many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_per_tower(local_size: int) -> int:
    """The default number of intra-op threads: the machine's cores shared out among its towers."""
    return max(1, cores() // local_size)


def set_default_threads(environ: MutableMapping[str, str], local_size: int) -> None:
    """Sets ``OMP_NUM_THREADS`` for towers, unless it is set, and records that the user did not choose this value."""
    if not environ.get("OMP_NUM_THREADS"):
        environ["OMP_NUM_THREADS"] = environ[THREADS] = str(threads_per_tower(local_size))


def share_out_threads(local_size: int, *, alone: bool = False) -> str:
    """Sets this tower's number of intra-op threads, and returns it for the log.

    An ``OMP_NUM_THREADS`` of the user, or of torchrun, which sets it to 1, takes precedence.

    Args:
        alone: one thread, whatever the number of cores and towers. Kernels that divide a sum among threads compute
            other bits with another number of threads.
    """
    stated = os.environ.get("OMP_NUM_THREADS")
    if stated and not (alone and stated == os.environ.get(THREADS)):
        if re.fullmatch("[0-9]{1,9}", stated) and int(stated) > 0:
            torch.set_num_threads(int(stated))
    elif alone:
        torch.set_num_threads(1)
    elif local_size > 1:
        torch.set_num_threads(threads_per_tower(local_size))
    count = torch.get_num_threads()
    return f"{count} thread{'s' if count > 1 else ''} each"


def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees, for its next allocation (glibc).

    A training step frees and allocates tensors of the same sizes over and over. glibc gives large ones back to the
    kernel each time, and each page of the next one is then a fault: a quarter of a step of 10 million parameters.
    Tensors of 256 MB and more, and what is free beyond 1 GB, still go back.
    ``MALLOC_MMAP_THRESHOLD_``, ``MALLOC_TRIM_THRESHOLD_`` and ``GLIBC_TUNABLES`` win when they are set.
    """
    if any(os.environ.get(name) for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3  # as <malloc.h> numbers them
        mallopt(mmap_threshold, 2**28)
        mallopt(trim_threshold, 2**30)


def loopback_interface() -> str:
    """The name of the network interface that never leaves this machine."""
    return "lo0" if sys.platform == "darwin" else "lo"


def address_towards(host: str, port: int) -> str | None:
    """This machine's own address on the way to ``host``; None when there is no way."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # connecting a datagram socket sends nothing
            return str(probe.getsockname()[0])
    except (OSError, ValueError):  # the latter for what cannot be a name
        return None


def can_look_up(host: str) -> bool:
    """Whether a name leads to an address now. An invalid name counts, too: it never will be found."""
    try:
        return bool(socket.getaddrinfo(host, None))
    except (OSError, UnicodeError) as error:
        return isinstance(error, UnicodeError)


def is_reached_at(host: str, port: int) -> bool:
    """Whether an address at which this machine listens is its own, or one in front of it that leads here."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address[0], 0))
        return True
    return answers(host, port, _REACH_SECONDS)


def answers(host: str, port: int, seconds: float = 10.0) -> bool:
    """Whether something listens at an address, and can be reached in time."""
    with contextlib.suppress(OSError):
        socket.create_connection((host, port), timeout=seconds).close()
        return True
    return False


def interfaces() -> dict[str, str | None]:
    """The network interfaces of this machine and their IPv4 addresses; None where an address cannot be read."""
    addresses: dict[str, str | None] = {name: None for _, name in socket.if_nameindex()}
    if not sys.platform.startswith("linux"):
        return addresses
    import fcntl

    get_address = 0x8915  # SIOCGIFADDR: struct ifreq in, its address at bytes 20 to 24 out
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in addresses:
            with contextlib.suppress(OSError):
                request = name.encode()[:15].ljust(256, b"\0")
                answer = fcntl.ioctl(probe.fileno(), get_address, request)
                addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses


def interface_of(address: str) -> str | None:
    """The name of the network interface with ``address``; None when none is known."""
    if ":" in address and sys.platform.startswith("linux"):
        return _interface_of_ipv6(address)
    return next((name for name, other in interfaces().items() if other == address), None)


def _interface_of_ipv6(address: str) -> str | None:
    wanted = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/net/if_inet6").read_text().splitlines():
            number, *_, name = line.split()
            if number == wanted:
                return name
    return None


def own_address(others: Sequence[str]) -> str | None:
    """This machine's address on the way to all of ``others`` (host names); None when there is not exactly one."""
    addresses = {address_towards(host, 1) for host in others}
    return addresses.pop() if len(addresses) == 1 else None


def listen_on(interface: str | None = None) -> None:
    """Let Gloo and NCCL of this process, and of those it starts, listen on ``interface`` alone, by default loopback.

    See [Note: the interface is looked up].
    """
    os.environ.update(interface_variables(interface or loopback_interface(), os.environ))


def interface_variables(interface: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that let Gloo and NCCL listen there; those in ``environ`` are the user's, and stay."""
    wanted = {_GLOO: interface}
    if not _nccl_is_configured(environ):
        wanted[_NCCL] = f"={interface}"  # without the sign it would be the beginning of a name
    return {name: value for name, value in wanted.items() if name not in environ}


def _nccl_is_configured(environ: Mapping[str, str]) -> bool:
    """Whether a file of the user's or the machine's tells NCCL its interface, which a variable would override."""
    files = [environ.get("NCCL_CONF_FILE") or os.path.expanduser("~/.nccl.conf"), "/etc/nccl.conf"]
    for file in files:
        try:
            if _NCCL in pathlib.Path(file).read_text(errors="replace"):
                return True
        except OSError:  # there is no such file
            continue
    return False
