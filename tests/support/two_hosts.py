"""Two hosts, played by network namespaces: separate interfaces and loopbacks, one cable between them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import shutil
import signal
import socket
from collections.abc import Iterator, Sequence

import pytest

from tests.support.sockets import ip


@contextlib.contextmanager
def two_hosts() -> Iterator[list[tuple[str, str]]]:
    """Inside, there are two hosts; yields namespace and address of each. Skips the test where there can be none."""
    names = [f"towers{os.getpid()}{letter}" for letter in "ab"]
    if shutil.which("ip") is None or ip("netns", "add", names[0]).returncode:
        pytest.skip("network namespaces need iproute2 and the right to make them")
    try:
        ip("netns", "add", names[1])
        ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        found = []
        for number, name in enumerate(names, start=1):
            address = f"10.77.0.{number}"
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
            found.append((name, address))
        yield found
    finally:
        for name in names:
            ip("netns", "del", name)
            shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)


def write_hosts(namespace: str, names: Sequence[tuple[str, str]]) -> None:
    """Let (name, address) be what a host can look up, beside localhost. A process on it sees it at once."""
    folder = pathlib.Path("/etc/netns", namespace)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in names))


_NEWNS, _NEWUTS, _NEWPID, _NEWNET = 0x00020000, 0x04000000, 0x20000000, 0x40000000  # <sched.h>, <sys/mount.h>, …
_MS_BIND, _MS_REC, _MS_SLAVE, _PR_SET_PDEATHSIG = 4096, 16384, 1 << 19, 1


def enter_host(namespace: str) -> None:
    """Put this process onto a host, as ``ip netns exec`` does."""
    with open(f"/run/netns/{namespace}") as file:
        _call("setns", file.fileno(), _NEWNET)
    _mount_for_itself()
    for own in pathlib.Path("/etc/netns", namespace).glob("*"):
        _call("mount", bytes(own), b"/etc/" + own.name.encode(), None, _MS_BIND, None)


def mount_own(kind: bytes, folder: str, options: bytes) -> None:
    """Mount a file system on a folder, for this process alone."""
    _mount_for_itself()
    _call("mount", kind, os.fsencode(folder), kind, 0, options)


def _mount_for_itself() -> None:
    """What this process mounts from here on is there for it and its children only."""
    _call("unshare", _NEWNS)
    _call("mount", None, b"/", None, _MS_REC | _MS_SLAVE, None)


def enter_container(namespace: str, name: str) -> None:
    """Go on as the first process of a container on a host, which ends with the process that called this.

    Args:
        name: the container's own host name.
    """
    enter_host(namespace)
    _call("unshare", _NEWUTS | _NEWPID)
    socket.sethostname(name)
    if child := os.fork():
        number = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if number < 0:
            signal.signal(-number, signal.SIG_DFL)
            os.kill(os.getpid(), -number)
        os._exit(number)
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL)
    _call("mount", b"proc", b"/proc", b"proc", 0, None)


def _call(name: str, *args: object) -> None:
    """Call a function of the C library."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*args):
        raise OSError(ctypes.get_errno(), f"{name}{args}: {os.strerror(ctypes.get_errno())}")
