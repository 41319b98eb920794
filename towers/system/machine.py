"""This machine: its identity, its cores and memory, and the network interfaces that towers use.

[Note: the interface is looked up] By default, Gloo listens at the address that the machine's name resolves to. On
Debian, that is a loopback address, which other machines cannot reach; on other systems, one that is reachable from
outside. NCCL takes the first suitable interface. So towers that share a machine and a network namespace (the handshake
shows it) listen on loopback, and other towers on the interface that leads to the chief. The agent and ``launch`` put
loopback into the environment of the towers of one machine, so that it also applies to groups that a script makes before
its strategy.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import re
import resource
import signal
import socket
import sys
from collections.abc import Mapping, MutableMapping, Sequence

import torch

THREADS = "TOWERS_THREADS"
"""Environment variable with the value of ``OMP_NUM_THREADS`` that the agent, and not the user, has chosen."""

_GLOO = "GLOO_SOCKET_IFNAME"
_NCCL = "NCCL_SOCKET_IFNAME"

_REACH_SECONDS = 3.0
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>


def host_identity() -> str:
    """Returns a text that is equal for two processes exactly when they run on one machine (and one boot of it).

    It is the kernel's boot id, or the host name if there is none. ``NCCL_HOSTID``, if set, takes precedence: NCCL
    treats processes with different values as different hosts, and so does ``mirrored``.
    """
    if stated := os.environ.get("NCCL_HOSTID"):
        return stated
    with contextlib.suppress(OSError):
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def network_identity() -> str:
    """Returns a text that is equal for two processes of one machine exactly when they share its network interfaces."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/net")
    return "the machine's own"


def identity(host: str, port: int) -> dict[str, str | None]:
    """Returns this machine for comparisons: ``machine``, ``network`` and its own ``address`` on the way to ``host``."""
    return {"machine": host_identity(), "network": network_identity(), "address": address_towards(host, port)}


def allow_files(count: int) -> None:
    """Lets this process have so many open files and connections, if it may; often, 1,024 are allowed at first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def cores() -> int:
    """Returns the number of cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_per_tower(local_size: int) -> int:
    """Returns the default number of intra-op threads: the machine's cores divided by its towers."""
    return max(1, cores() // local_size)


def set_default_threads(environ: MutableMapping[str, str], local_size: int) -> None:
    """Sets ``OMP_NUM_THREADS`` for towers, unless it is set, and records that the user did not choose this value."""
    if not environ.get("OMP_NUM_THREADS"):
        environ["OMP_NUM_THREADS"] = environ[THREADS] = str(threads_per_tower(local_size))


def divide_threads(local_size: int, *, alone: bool = False) -> str:
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
    """Lets this process keep the memory that it frees, for its next allocation (glibc).

    A training step repeatedly frees and allocates tensors of the same sizes. glibc returns large ones to the kernel
    each time, and each page of the next one then causes a fault: a quarter of a step of 10 million parameters. Tensors
    of 256 MB and more, and free memory beyond 1 GB, are still returned. ``MALLOC_MMAP_THRESHOLD_``,
    ``MALLOC_TRIM_THRESHOLD_`` and ``GLIBC_TUNABLES`` take precedence if they are set.
    """
    _set_malloc(mmap_threshold=2**28, trim_threshold=2**30)


def return_freed_memory() -> None:
    """Lets this process return tensors of 1 MB and more to the kernel when it frees them (glibc).

    The same variables as for :func:`keep_freed_memory` take precedence.
    """
    _set_malloc(mmap_threshold=2**20, trim_threshold=2**20)


def _set_malloc(*, mmap_threshold: int, trim_threshold: int) -> None:
    if any(os.environ.get(name) for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-3, mmap_threshold)  # the numbers are those of <malloc.h>
        mallopt(-1, trim_threshold)


def loopback_interface() -> str:
    """Returns the name of the network interface that never leaves this machine."""
    return "lo0" if sys.platform == "darwin" else "lo"


def address_towards(host: str, port: int) -> str | None:
    """Returns this machine's own address on the way to ``host``, or None if there is no way."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # connecting a datagram socket sends nothing
            return str(probe.getsockname()[0])
    except (OSError, ValueError):  # ValueError: not a possible name
        return None


def can_look_up(host: str) -> bool:
    """Returns whether a name now resolves to an address; for an invalid name True, because waiting is useless."""
    try:
        return bool(socket.getaddrinfo(host, None))
    except (OSError, UnicodeError) as error:
        return isinstance(error, UnicodeError)


def is_reached_at(host: str, port: int) -> bool:
    """Returns whether an address at which this machine listens is its own, or one in front of it that leads here."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address[0], 0))
        return True
    return answers(host, port, _REACH_SECONDS)


def answers(host: str, port: int, seconds: float = 10.0) -> bool:
    """Returns whether a process listens at an address, and can be reached in time."""
    with contextlib.suppress(OSError):
        socket.create_connection((host, port), timeout=seconds).close()
        return True
    return False


def interfaces() -> dict[str, str | None]:
    """Returns the network interfaces of this machine and their IPv4 addresses, or None if an address cannot be read."""
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
    """Returns the name of the network interface with ``address``, or None if none is known."""
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
    """Returns this machine's address on the way to all of ``others`` (host names), or None if it is not exactly one."""
    addresses = {address_towards(host, 1) for host in others}
    return addresses.pop() if len(addresses) == 1 else None


def listen_on(interface: str | None = None) -> None:
    """Lets Gloo and NCCL of this process and its children listen on ``interface`` only. Default: loopback.

    See [Note: the interface is looked up].
    """
    os.environ.update(interface_variables(interface or loopback_interface(), os.environ))


def interface_variables(interface: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables with which Gloo and NCCL listen there, except variables in ``environ``, the user's."""
    wanted = {_GLOO: interface}
    if not _nccl_is_configured(environ):
        wanted[_NCCL] = f"={interface}"  # without the sign, it would be the start of a name
    return {name: value for name, value in wanted.items() if name not in environ}


def _nccl_is_configured(environ: Mapping[str, str]) -> bool:
    """Returns whether a file of the user or the machine sets NCCL's interface, which a variable would override."""
    files = [environ.get("NCCL_CONF_FILE") or os.path.expanduser("~/.nccl.conf"), "/etc/nccl.conf"]
    for file in files:
        try:
            if _NCCL in pathlib.Path(file).read_text(errors="replace"):
                return True
        except OSError:  # the file does not exist
            continue
    return False


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Makes the kernel send this process a signal when the thread that has started it ends, for any reason."""
    with contextlib.suppress(AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, number)
