"""Agents that start while an earlier job of the same workers is ending: they wait for the next chief."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import PrefixStore, TCPStore

from tests.support.clusters import free_port
from tests.support.waiting import HANG, wait_until
from towers import PortInUseError
from towers.joining.store import SignedStore, serve_store
from towers.launching.job import Job
from towers.launching.restarting.meeting import (
    _ATTEMPT,
    _PRESENT,
    ChiefRendezvous,
    FollowerRendezvous,
    WorkersRendezvous,
)

TOKEN = "a token"


def job(worker: int, port: int, restarts: int = 0) -> Job:
    addresses = (f"127.0.0.1:{port}", "127.0.0.1:1")
    return Job(1, worker, 2, addresses, "TF_CONFIG", restarts=restarts, startup_seconds=HANG)


class EarlierJob:
    """The store of a job that two workers take part in, as its chief and its agents write it."""

    def __init__(self, port: int) -> None:
        self.store: TCPStore | None = serve_store("127.0.0.1", port, "a test", TOKEN)
        self.write("worker/1", {"host": "here"}, "workers/0")
        self.write("worker/met", {}, "workers/0")

    def write(self, key: str, message: dict[str, Any], *prefixes: str) -> None:
        store: Any = self.store
        for prefix in prefixes:
            store = PrefixStore(prefix, store)
        SignedStore(store, TOKEN).write(key, message)

    def end_towers(self) -> None:
        """The towers of worker 1 end, and its agent."""
        self.write("ended1", {"sentence": "tower 1 ended"}, "workers/0", "towers/failures")

    def end(self) -> None:
        """The process that serves the store ends."""
        self.store = None
        gc.collect()


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def earlier(port: int) -> EarlierJob:
    return EarlierJob(port)


def meet_chief(waiting: Any, chief: WorkersRendezvous) -> None:
    """The chief and the worker that waits take part in the first attempt of a job."""
    assert not waiting.done()
    info = chief.next_rendezvous()
    assert (info.rank, waiting.result(HANG).rank) == (0, 1)


@pytest.mark.parametrize("towers_have_ended", [True, False])
def test_a_worker_of_a_job_with_restarts_waits(towers_have_ended: bool, port: int, earlier: EarlierJob) -> None:
    """Its own towers have ended in the earlier job, or the whole job has."""
    follower = FollowerRendezvous(job(1, port, restarts=1), TOKEN)
    end = {"number": 0, "end": "preempted", "code": 75}
    if towers_have_ended:
        earlier.write(_ATTEMPT, {"number": 0, "members": [0, 1]})
        earlier.end_towers()
    else:
        earlier.write(_ATTEMPT, end)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(follower.next_rendezvous)
        if towers_have_ended:
            wait_until(lambda: earlier.store.check([f"{_PRESENT}1"]))
            earlier.write(_ATTEMPT, end)
        wait_until(lambda: earlier.store.check([f"{_ATTEMPT}/read1"]))
        earlier.end()
        meet_chief(waiting, ChiefRendezvous(job(0, port, restarts=1), TOKEN))


def test_a_worker_of_a_job_without_restarts_waits(port: int, earlier: EarlierJob) -> None:
    earlier.end_towers()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(WorkersRendezvous(job(1, port), TOKEN).next_rendezvous)
        wait_until(lambda: earlier.store.check(["workers/0/towers/failures/asked1"]))
        earlier.end()
        meet_chief(waiting, WorkersRendezvous(job(0, port), TOKEN))


def test_a_chief_waits_for_the_end_of_an_earlier_one(
    port: int, earlier: EarlierJob, capfd: pytest.CaptureFixture[str]
) -> None:
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(WorkersRendezvous(job(0, port), TOKEN)._open_store, HANG)
        printed: list[str] = []
        wait_until(lambda: bool(printed.append(capfd.readouterr().err) or "".join(printed)))
        earlier.end()
        assert waiting.result(HANG).port == port
    said = (
        f"mirrored: another process of this job serves 127.0.0.1:{port} (from TF_CONFIG), an earlier start or one with "
    )
    assert "".join(printed).startswith(said)


def test_a_chief_does_not_wait_for_the_end_of_another_job(port: int, earlier: EarlierJob) -> None:
    with pytest.raises(PortInUseError):
        WorkersRendezvous(job(0, port), "another token")._open_store(HANG)
