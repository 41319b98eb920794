"""Agents that end while the others wait for them are missed at once, however long these might wait."""

from __future__ import annotations

import contextlib
import pathlib
import signal
import socket
import time
from datetime import timedelta

import pytest
from torch.distributed import PrefixStore, TCPStore

from tests.support.clusters import free_port
from tests.support.hosts import ip, on_host, two_hosts
from tests.support.programs import Program, start_program
from tests.support.restarts import Workers
from tests.support.waiting import HANG, wait_until
from towers.errors import StartupError
from towers.launching.job import Job
from towers.launching.restarting.keepalive import KeepaliveConnection, KeepaliveServer
from towers.launching.restarting.meeting import FollowerRendezvous
from towers.launching.supervising.failure_broadcast import FailureBroadcast
from towers.system.timeouts import run_with_timeout

pytestmark = pytest.mark.extended


@pytest.fixture
def server() -> KeepaliveServer:
    return KeepaliveServer(socket.create_server(("127.0.0.1", 0)), 1.0)


def test_a_connection_that_closes_tells_its_name(server: KeepaliveServer) -> None:
    one, other = (KeepaliveConnection("127.0.0.1", server.port, 1.0) for _ in range(2))
    stranger = socket.create_connection(("127.0.0.1", server.port))
    stranger.sendall(b"\xff" * 100)
    assert server.lost() == {}
    one._line.close()
    wait_until(lambda: one.name in server.lost())
    stranger.close()
    wait_until(lambda: len(server.lost()) == 2)
    assert other.name not in server.lost()
    other._line.close()
    wait_until(lambda: other.name in server.lost())


@pytest.mark.parametrize("goodbye", [False, True])
def test_a_chief_that_ends_without_a_goodbye_is_detected(goodbye: bool, server: KeepaliveServer) -> None:
    line = KeepaliveConnection("127.0.0.1", server.port, 1.0)
    wait_until(lambda: server.lost() == {} and len(server._names) == 1)
    assert line.lost() == ""
    if goodbye:
        server.say_goodbye()
    for end in server._names:
        end.close()
    wait_until(lambda: line.lost() != "" or line._line is None)
    assert line.lost() == ("" if goodbye else "has ended")
    assert line.has_ended == goodbye


def test_a_worker_does_not_wait_for_a_chief_that_has_ended_the_job(server: KeepaliveServer) -> None:
    """Where its towers took so long to end that the chief has gone before it could ask how."""
    follower = FollowerRendezvous(Job(1, 1, 2, (f"127.0.0.1:{free_port()}", "127.0.0.1:1"), restarts=1), "")
    follower._has_met = True
    follower._keepalive = KeepaliveConnection("127.0.0.1", server.port, 1.0)
    wait_until(lambda: server.lost() == {} and len(server._names) == 1)
    server.say_goodbye()
    wait_until(lambda: not follower.lost() and follower._keepalive.has_ended)
    with pytest.raises(StartupError, match="the chief has ended the job"):
        follower.next_rendezvous()


def test_where_nobody_listens_there_is_no_keepalive() -> None:
    assert KeepaliveConnection("127.0.0.1", free_port(), 1.0).lost() == ""


ENDS = """
import socket, sys, time
from towers.launching.restarting.keepalive import KeepaliveConnection, KeepaliveServer

host, port = sys.argv[1:]
chief = KeepaliveServer(socket.create_server((host, 0)), 1.0) if port == "0" else None
line = chief or KeepaliveConnection(host, int(port), 1.0)
print(chief.port if chief else line.name, flush=True)
while not (end := line.lost()):
    time.sleep(0.05)
print(end, flush=True)
"""


def test_a_host_that_does_not_answer_is_missed_and_one_whose_agent_is_stopped_is_not() -> None:
    with two_hosts() as hosts, contextlib.ExitStack() as stack:
        (first, address), (second, _) = hosts

        def start(host: str, port: str) -> tuple[Program, str]:
            process = start_program(["-c", ENDS, address, port], before=on_host(host))
            stack.callback(process.kill)
            return process, process.stdout.readline().strip()

        chief, port = start(first, "0")
        worker, name = start(second, port)
        chief.send_signal(signal.SIGSTOP)
        time.sleep(6)  # more than twice the deadline
        assert worker.poll() is None
        chief.send_signal(signal.SIGCONT)
        ip("-n", first, "link", "set", "eth0", "down")
        outputs = [process.communicate()[0] for process in (chief, worker)]
    end = "cannot be reached: its host, or the network, does not answer"
    assert outputs == [f"{ {name: end} }\n", f"{end}\n"]


def await_worker(workers: Workers, worker: int, attempt: int) -> None:
    """Wait until a worker takes part in an attempt, of which the chief's store knows."""
    host, port = workers.addresses[0].split(":")
    store = PrefixStore(f"workers/{attempt}", TCPStore(host, int(port), None, False, timedelta(seconds=HANG)))
    wait_until(lambda: store.check([f"worker/{worker}"]))


def test_an_agent_that_ends_while_workers_are_missing(tmp_path: pathlib.Path) -> None:
    """The third worker comes late. The second has come, ends, and is started anew."""
    workers = Workers(tmp_path, count=3)
    await_worker(workers, 1, attempt=0)
    workers.agents[1].kill()
    workers.agents[1].communicate()
    await_worker(workers, 0, attempt=1)
    workers.agents[1:] = [workers.start(1), workers.start(2)]
    ends = workers.end()
    assert [code for *_, code in ends] == [0, 0, 0], ends
    assert f"mirrored: the agent of worker 1 ({workers.addresses[1]}) has ended\n" in ends[0][1]
    assert ends[0][0].startswith("goes on after step 0\n")


def test_an_agent_that_ends_before_its_towers_have_met_the_others(tmp_path: pathlib.Path) -> None:
    workers = Workers(tmp_path, started=1)
    first = workers.start(1, "ends its agent")
    first.communicate()
    await_worker(workers, 0, attempt=1)
    workers.agents.append(workers.start(1))
    (output, errors, code), (_, _, other) = workers.end()
    assert (code, other) == (0, 0), errors
    ended = f"mirrored: the agent of worker 1 ({workers.addresses[1]}) has ended\n"
    assert f"{ended}mirrored: restarting all towers (1 of 2 restarts)\n" in errors
    assert output.startswith("goes on after step 0\n")


def test_an_agent_that_is_killed_while_its_towers_train_and_the_one_in_its_place_too(tmp_path: pathlib.Path) -> None:
    """The chief begins the next attempt before anybody asks for it, and though its own tower waits for nobody."""
    workers = Workers(tmp_path, FAIL="4:wait:0,6:wait:0")
    for attempt, step in enumerate((4, 6), start=1):
        wait_until((tmp_path / f"failed{step}").exists)
        workers.agents[1].kill()
        workers.agents[1].communicate()
        await_worker(workers, 0, attempt)
        workers.agents[1] = workers.start(1)
        (tmp_path / f"go{step}").touch()
    (output, errors, code), (_, _, other) = workers.end()
    assert (code, other) == (0, 0), errors
    assert errors.count(f"the agent of worker 1 ({workers.addresses[1]}) has ended\n") == 2
    assert output.splitlines()[:3] == [f"goes on after step {step}" for step in (0, 2, 4)]


def test_a_chief_that_ends_while_workers_begin_to_listen_keeps_nobody_waiting() -> None:
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    store = TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=10))
    del server
    run_with_timeout(HANG, lambda: FailureBroadcast("").listen(store, 1, 2))
