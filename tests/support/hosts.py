"""Hosts that network namespaces simulate: separate interfaces and loopbacks, one cable between two of them.

The functions ``on_host``, ``in_container`` and ``on_small_disk`` return words that stand in front of a command.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import subprocess
from collections.abc import Iterator, Sequence

import pytest


def ip(*words: str) -> subprocess.CompletedProcess[bytes]:
    """Run iproute2's command."""
    return subprocess.run(["ip", *words], capture_output=True)


@contextlib.contextmanager
def namespaces(*letters: str) -> Iterator[list[str]]:
    """Inside, there are network namespaces, whose names are yielded. Skips the test where there can be none."""
    names = [f"towers{os.getpid()}{letter}" for letter in letters]
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need iproute2")
    if ip("netns", "add", names[0]).returncode:
        pytest.skip("network namespaces need permission to create them")
    try:
        for name in names[1:]:
            ip("netns", "add", name)
        for name in names:
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)
            shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)


@contextlib.contextmanager
def two_hosts() -> Iterator[list[tuple[str, str]]]:
    """Inside, there are two hosts; yields namespace and address of each. Skips the test where there can be none."""
    with namespaces("a", "b") as names:
        ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        found = []
        for number, name in enumerate(names, start=1):
            address = f"10.77.0.{number}"
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            found.append((name, address))
        yield found


def write_hosts(namespace: str, names: Sequence[tuple[str, str]]) -> None:
    """Let a host look up these (name, address), and localhost. Its running processes see a change at once."""
    folder = pathlib.Path("/etc/netns", namespace)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in names))


def on_host(namespace: str) -> list[str]:
    """Words that run a command on a host, as this same process."""
    return ["ip", "netns", "exec", namespace]


def in_container(namespace: str, name: str) -> list[str]:
    """Words that run a command as the first process of a container on a host, which ends with the process of the words.

    Args:
        name: the container's own host name.
    """
    container = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return [*on_host(namespace), *container, "sh", "-c", 'echo "$0" >/proc/sys/kernel/hostname; exec "$@"', name]


def on_small_disk(folder: pathlib.Path, size: int) -> list[str]:
    """Words that run a command for which a disk of so many bytes is mounted at a folder, as this same process."""
    return ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs -o size={size} none "$0" && exec "$@"', str(folder)]
