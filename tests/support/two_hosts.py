"""Two hosts, played by network namespaces: separate interfaces and loopbacks, one cable between them."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
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
