"""Hosts that are network namespaces of this machine, and cables of a chosen rate and delay between them.

A further namespace is the switch: a bridge, with one cable to each host. A token bucket (``tbf``) at either end of a
cable limits the rate of each direction; ``netem`` delays what leaves a host. Nothing of it is seen from outside of
these namespaces, and it ends with them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence

_PREFIX = "towers-bench"
_LEAST_BURST = 2**17  # bytes; two of the largest packets that are handed over in one piece


class CannotPlayError(Exception):
    """Hosts, or cables as they are asked for, cannot be played here."""


@contextlib.contextmanager
def hosts(count: int, rate: float | None, delay: float) -> Iterator[list[tuple[str, str]]]:
    """Inside, there are hosts with cables between them.

    Args:
        rate: of a cable, in Gbit/s; None: as fast as the machine copies.
        delay: from one host to another, in ms.

    Yields:
        Namespace and address of each.

    Raises:
        CannotPlayError: the text says what is missing.
    """
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        raise CannotPlayError("hosts are played by network namespaces, which need root, and iproute2's ip and tc")
    _remove_those_of_the_dead()
    names = [f"{_PREFIX}-{os.getpid()}-{number}" for number in range(count)]
    switch = f"{_PREFIX}-{os.getpid()}-switch"
    try:
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "bridge", "up", "type", "bridge")
        places = []
        for number, name in enumerate(names):
            port, address = f"port{number}", f"10.78.0.{number + 1}"
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run(*f"ip link add eth0 netns {name} type veth peer name {port} netns {switch}".split())
            _run(*f"ip -n {switch} link set {port} master bridge up".split())
            _run(*f"ip -n {name} addr add {address}/24 dev eth0".split())
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            _shape(name, "eth0", rate, delay)
            _shape(switch, port, rate, 0.0)
            places.append((name, address))
        yield places
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _shape(namespace: str, device: str, rate: float | None, delay: float) -> None:
    """Limit what leaves by a device, and delay it."""
    add, parent = ["tc", "-n", namespace, "qdisc", "add", "dev", device], ["root"]
    if delay:
        netem = ["netem", "delay", f"{delay}ms", "limit", "1000000"]
        if _fails(*add, *parent, "handle", "1:", *netem):
            raise CannotPlayError("delays need netem, which this kernel does not have (CONFIG_NET_SCH_NETEM)")
        parent = ["parent", "1:"]
    if rate is not None:
        burst = max(_LEAST_BURST, round(rate * 1e9 / 8 * 1e-3))
        _run(*add, *parent, "handle", "2:", "tbf", "rate", f"{rate}gbit", "burst", str(burst), "latency", "100ms")


def _fails(*command: str) -> str:
    """Run a command; returns what it says where it fails, else nothing."""
    result = subprocess.run(command, capture_output=True, text=True)
    return (result.stderr.strip() or f"exit code {result.returncode}") if result.returncode else ""


def _run(*command: str) -> None:
    if problem := _fails(*command):
        raise CannotPlayError(f"{' '.join(command)}: {problem}")


def _remove_those_of_the_dead() -> None:
    """Remove the namespaces of benchmarks that were killed and could not."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.splitlines()
    for name in (line.split()[0] for line in listed if line.startswith(f"{_PREFIX}-")):
        if not os.path.exists(f"/proc/{name.removeprefix(_PREFIX).split('-')[1]}"):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def start_in(namespace: str, command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    """Start a program on a host; it takes it for another host than those of other names."""
    return subprocess.Popen(
        ["ip", "netns", "exec", namespace, *command],
        env={**os.environ, **environment, "NCCL_HOSTID": namespace},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
