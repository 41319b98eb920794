"""Sockets listen where they are needed, and nowhere else. Seen from outside, in the kernel's tables."""

from __future__ import annotations

import functools
import ipaddress
import os
import pathlib
import shutil
import socket
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.clusters import free_port, tf_configs
from tests.support.commands import start_command, start_script
from tests.support.jobs import ROOT, start_program
from tests.support.sockets import family, ip, listening, unix_sockets
from tests.support.two_hosts import enter_host
from tests.support.waiting import HANG
from towers.system.machine import address_towards, interface_of, interface_variables

pytestmark = [
    pytest.mark.skipif(not pathlib.Path("/proc/net/tcp").exists(), reason="reads Linux's tables of sockets"),
    pytest.mark.slow,
]

WAITS = str(ROOT / "tests" / "programs" / "waits.py")
TORCHRUN = ["torchrun", "--standalone", "--nproc-per-node", "2"]

Enter = Callable[[], None] | None


@pytest.fixture(scope="module")
def outside() -> Iterator[Enter]:
    """Puts a process onto a host whose own name leads to an address that others reach.

    There, what binds to the host's name is seen to. Without the right to make such a host, this one does (None).
    """
    name = f"sockets{os.getpid()}"
    if shutil.which("ip") is None or ip("netns", "add", name).returncode:
        yield None
        return
    try:
        folder = pathlib.Path("/etc/netns", name)
        folder.mkdir(parents=True)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n10.78.0.1 {socket.gethostname()}\n")
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", "eth1")
        ip("-n", name, "addr", "add", "10.78.0.1/24", "dev", "eth0")
        for device in ("eth0", "eth1"):
            assert ip("-n", name, "link", "set", device, "up").returncode == 0
        yield functools.partial(enter_host, name)
    finally:
        ip("netns", "del", name)
        shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)


def start_new(words: list[str], *, enter: Enter) -> subprocess.Popen[str]:
    """Start ``python …`` without a fork of the tests: its towers come from the agent's own fork server."""
    return start_program(words, preexec_fn=enter)


def wait_until_ready(process: Any) -> None:
    """Return when it says so; Gloo of torch 2.9 may say something before."""
    guard = threading.Timer(HANG, process.kill)
    guard.start()
    ready = "ready\n" in iter(process.stdout.readline, "")
    guard.cancel()
    assert ready, process.communicate(timeout=HANG)[1]


def end(process: Any) -> None:
    process.terminate()
    process.communicate(timeout=HANG)


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (start_new, [WAITS, "two", "gloo"]),
        (start_command, ["mirrored", "run", "--towers", "2", WAITS, "group"]),
        (start_script, [WAITS, "launch"]),
        (start_command, [*TORCHRUN, WAITS, "gloo"]),
    ],
    ids=["python", "beside a group of the user's", "launch", "torchrun"],
)
def test_on_one_host_nothing_listens_beyond_loopback(start: Any, words: list[str], outside: Enter) -> None:
    process = start(words, enter=outside)
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


def test_workers_on_a_loopback_address_keep_to_it(outside: Enter) -> None:
    workers = []
    try:
        for text in tf_configs([f"127.0.0.1:{free_port()}", "127.0.0.1:1"]):
            workers.append(start_script([WAITS], enter=outside, env={"TF_CONFIG": text}))
        wait_until_ready(workers[0])
        found = [address for worker in workers for one in family(worker.pid) for address, _ in listening(one)]
        assert len(found) >= 3, "the store, and each tower's Gloo"
        assert set(found) == {"127.0.0.1"}
    finally:
        for worker in workers:
            end(worker)
