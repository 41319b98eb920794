"""Sockets listen where they are needed, and nowhere else. Seen from outside, in the kernel's tables."""

from __future__ import annotations

import ipaddress
import pathlib
import socket
import stat
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.clusters import free_port, tf_configs
from tests.support.hosts import ip, namespaces, on_host, write_hosts
from tests.support.jobs import ROOT
from tests.support.processes import family
from tests.support.programs import Program, start_command, start_program
from tests.support.sockets import listening, unix_sockets
from towers.system.machine import address_towards, interface_of, interface_variables

pytestmark = [
    pytest.mark.skipif(not pathlib.Path("/proc/net/tcp").exists(), reason="reads Linux's tables of sockets"),
    pytest.mark.extended,
]

WAITS = str(ROOT / "tests" / "programs" / "waits.py")
TORCHRUN = ["torchrun", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def outside() -> Iterator[list[str]]:
    """Words that run a command on a host whose own name leads to an address that others reach.

    There, an address that a process binds to by the host's name can be told from loopback.
    """
    with namespaces("s") as [name]:
        write_hosts(name, [(socket.gethostname(), "10.78.0.1")])
        ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", "eth1")
        ip("-n", name, "addr", "add", "10.78.0.1/24", "dev", "eth0")
        for device in ("eth0", "eth1"):
            assert ip("-n", name, "link", "set", device, "up").returncode == 0
        yield on_host(name)


def wait_until_ready(program: Program) -> None:
    """Return when it prints that it is ready; Gloo of torch 2.9 may print something before."""
    assert "ready\n" in program.stdout, program.communicate()[1]


def end(program: Program) -> None:
    program.terminate()
    program.communicate()


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (start_program, [WAITS, "two", "gloo"]),
        (start_command, ["mirrored", "run", "--towers", "2", WAITS, "group"]),
        (start_program, [WAITS, "launch"]),
        (start_command, [*TORCHRUN, WAITS, "gloo"]),
    ],
    ids=["python", "beside a group of the user's", "launch", "torchrun"],
)
def test_on_one_host_nothing_listens_beyond_loopback(start: Any, words: list[str], outside: list[str]) -> None:
    process = start(words, before=outside)
    try:
        wait_until_ready(process)
        # torchrun's own process is torchrun's: it listens everywhere.
        processes = family(process.pid)[1 if "torchrun" in words else 0 :]
        assert len(processes) >= 2
        found = [address for one in processes for address, _ in listening(one)]
        assert len(found) >= 2, "towers that communicate through c10d listen somewhere"
        assert {address for address in found if not ipaddress.ip_address(address).is_loopback} == set()
        # Who reaches the fork server can let it run anything: it has no name that other users could connect to.
        assert {stat.S_IMODE(path.parent.stat().st_mode) for path in unix_sockets(processes)} <= {0o700}
        assert len(unix_sockets(processes)) == ("launch" in words)
    finally:
        end(process)


def test_what_the_user_says_about_interfaces_wins(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "nccl.conf"
    file.write_text("NCCL_DEBUG=WARN\n")
    environ = {"NCCL_CONF_FILE": str(file)}
    assert interface_variables("eth1", environ) == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}
    assert interface_variables("eth1", {**environ, "GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib"}) == {}
    file.write_text("NCCL_SOCKET_IFNAME=ib0\n")
    assert interface_variables("eth1", environ) == {"GLOO_SOCKET_IFNAME": "eth1"}


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_interface_of_an_address(address: str) -> None:
    if ":" in address and not pathlib.Path("/proc/net/if_inet6").read_text():
        pytest.skip("this machine has no IPv6")
    assert address_towards(address, 1) == address
    assert interface_of(address) == "lo"
    assert interface_of("192.0.2.255") is interface_of("2001:db8::ff") is None


def test_workers_on_a_loopback_address_keep_to_it(outside: list[str]) -> None:
    workers = []
    try:
        for text in tf_configs([f"127.0.0.1:{free_port()}", "127.0.0.1:1"]):
            workers.append(start_program([WAITS], before=outside, env={"TF_CONFIG": text}))
        wait_until_ready(workers[0])
        found = [address for worker in workers for one in family(worker.pid) for address, _ in listening(one)]
        assert len(found) >= 3, "the store, and each tower's Gloo"
        assert set(found) == {"127.0.0.1"}
    finally:
        for worker in workers:
            end(worker)
