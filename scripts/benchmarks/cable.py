"""Hosts that are network namespaces of this machine, and cables of a chosen rate and delay between them.

A further namespace is the switch: a bridge, with one cable to each host. A token bucket (``tbf``) limits the rate at
either end of a cable, for each direction. Where there is a delay, a program is in the place of switch and cables
(:mod:`relay`), and the rate is limited where packets leave a host. Nothing of it is seen from outside of these
namespaces, and it ends with them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence

import relay

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
    if delay and not os.path.exists(relay.TUN):
        raise CannotPlayError(f"delays need TUN devices ({relay.TUN}), which this kernel does not have")
    _remove_those_of_the_dead()
    names = [f"{_PREFIX}-{os.getpid()}-{number}" for number in range(count)]
    switch = f"{_PREFIX}-{os.getpid()}-switch"
    with contextlib.ExitStack() as stack:
        for name in (*names, switch):
            stack.callback(subprocess.run, ["ip", "netns", "del", name], capture_output=True)
            _run("ip", "netns", "add", name)
        if delay:
            stack.enter_context(relay.start(delay, names))
        else:
            _connect(names, switch, rate)
        addresses = [f"10.78.0.{number + 1}" for number in range(count)]
        for name, address in zip(names, addresses, strict=True):
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            _limit(name, "eth0", rate)
        yield list(zip(names, addresses, strict=True))


def _connect(names: Sequence[str], switch: str, rate: float | None) -> None:
    """Lay cables from the hosts to a switch."""
    _run("ip", "-n", switch, "link", "add", "bridge", "up", "type", "bridge")
    for number, name in enumerate(names):
        port = f"port{number}"
        _run(*f"ip link add eth0 netns {name} type veth peer name {port} netns {switch}".split())
        _run(*f"ip -n {switch} link set {port} master bridge up".split())
        _limit(switch, port, rate)


def _limit(namespace: str, device: str, rate: float | None) -> None:
    """Limit the rate, in Gbit/s, at which packets leave by a device."""
    if rate is not None:
        burst = max(_LEAST_BURST, round(rate * 1e9 / 8 * 1e-3))
        words = f"qdisc add dev {device} root tbf rate {rate}gbit burst {burst} latency 100ms"
        _run("tc", "-n", namespace, *words.split())


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise CannotPlayError(f"{' '.join(command)}: {result.stderr.strip() or f'exit code {result.returncode}'}")


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
