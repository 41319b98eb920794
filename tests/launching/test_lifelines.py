"""Agents that end while the others wait for them are missed at once, however long these might wait."""

from __future__ import annotations

import pathlib
import socket
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore

from tests.support.clusters import free_port
from tests.support.restarts import Workers
from tests.support.waiting import HANG, wait_until
from towers.launching.lifelines import Lifelines, connect_lifeline


def test_a_lifeline_that_closes_tells_its_name() -> None:
    lifelines = Lifelines(socket.create_server(("127.0.0.1", 0)))
    one, other = (connect_lifeline("127.0.0.1", lifelines.port, letter * 32) for letter in "ab")
    stranger = socket.create_connection(("127.0.0.1", lifelines.port))
    stranger.sendall(b"\xff" * 100)
    assert lifelines.closed() == set()
    one.close()
    wait_until(lambda: "a" * 32 in lifelines.closed())
    stranger.close()
    wait_until(lambda: len(lifelines.closed()) == 2)
    assert "b" * 32 not in lifelines.closed()
    other.close()
    wait_until(lambda: "b" * 32 in lifelines.closed())


def test_where_nobody_listens_there_is_no_lifeline() -> None:
    assert connect_lifeline("127.0.0.1", free_port(), "a" * 32) is None


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
    assert f"towers: the agent of worker 1 ({workers.addresses[1]}) has ended\n" in ends[0][1]
    assert ends[0][0].startswith("goes on after step 0\n")


def test_an_agent_that_ends_before_its_towers_have_met_the_others(tmp_path: pathlib.Path) -> None:
    workers = Workers(tmp_path, started=1)
    first = workers.start(1, "ends its agent")
    first.communicate()
    await_worker(workers, 0, attempt=1)
    workers.agents.append(workers.start(1))
    (output, errors, code), (_, _, other) = workers.end()
    assert (code, other) == (0, 0), errors
    ended = f"towers: the agent of worker 1 ({workers.addresses[1]}) has ended\n"
    assert f"{ended}towers: all start again (1 of 2 restarts)\n" in errors
    assert output.startswith("goes on after step 0\n")


def test_an_agent_that_is_killed_while_its_towers_train(tmp_path: pathlib.Path) -> None:
    """The chief begins the next attempt before anybody asks for it, and though its own tower waits for nobody."""
    workers = Workers(tmp_path, FAIL="4:wait:0")
    wait_until((tmp_path / "failed4").exists)
    workers.agents[1].kill()
    workers.agents[1].communicate()
    await_worker(workers, 0, attempt=1)
    workers.agents[1] = workers.start(1)
    (tmp_path / "go").touch()
    (output, errors, code), (_, _, other) = workers.end()
    assert (code, other) == (0, 0), errors
    assert f"the agent of worker 1 ({workers.addresses[1]}) has ended\n" in errors
    assert output.splitlines()[:2] == ["goes on after step 0", "goes on after step 2"]
