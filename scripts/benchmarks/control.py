"""Requests, bytes and seconds of the control plane for many towers, which are light processes without a model.

"start": N processes, forked from one that has loaded torch, find the store and compare each other as towers do before
their first collective. "requests" are those that one process sends to the store (the mean and the most), "bytes" go in
and out of the store, and "seconds" pass from the release of all processes until the last one has its answer; on few
cores, most of them are the computing time of N processes. Medians of the turns are printed.

"deadline" are the bytes in and out of the store while all towers pass the deadline of a collective, and look for the
reason. "heartbeats" are the requests per second of all processes while they train and no tower keeps waiting, and "one
waits" those while one of them does, counted over several intervals of a heartbeat. "reduce" is the time of a ``reduce``
of a number over Gloo, with the comparison of the towers' calls (median of 20), for up to 256 towers. "failure" is the
time from the report of a failure by the first host's agent until the agents of all hosts have it. "restart" is the time
in which the agents of all hosts meet for the next attempt, without the towers that they then start.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import command
import torch
from torch.distributed import Store, TCPStore

from towers.collectives import connecting, values
from towers.collectives.process_group import join_default_group
from towers.health import heartbeat
from towers.health.heartbeat import Heartbeat
from towers.health.status import Health, Wait
from towers.health.timeout_messages import timeout_error
from towers.joining import participant
from towers.joining.participant import Participant
from towers.joining.store import SignedStore, serve_store
from towers.launching.job import Job
from towers.launching.restarting.meeting import ChiefRendezvous, FollowerRendezvous
from towers.launching.supervising.attempt import Failed
from towers.launching.supervising.failure_broadcast import FailureBroadcast
from towers.options import CommunicationOptions
from towers.system import machine
from towers.system.timeouts import wait_until

TOKEN = "scripts/bench control"
HOST_TOWERS = 8  # towers of a simulated host
_PATIENCE = timedelta(minutes=10)
_MOST_CONNECTED = 256


@dataclass
class Sent:
    """What one process has sent to the store and received from it."""

    requests: int = 0
    count: int = 0  # of bytes

    def note(self, requests: int, *values: Any) -> None:
        self.requests += requests
        self.count += sum(len(value) for value in values)


class CountedStore(TCPStore):
    """Counts the requests of this process: ``get`` and ``multi_get`` wait for their keys before they read them."""

    sent = Sent()

    def set(self, key: str, value: Any) -> None:
        self.sent.note(1, key, value)
        super().set(key, value)

    def get(self, key: str) -> bytes:
        value = super().get(key)
        self.sent.note(2, key, key, value)
        return value

    def check(self, keys: list[str]) -> bool:
        self.sent.note(1, *keys)
        return super().check(keys)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self.sent.note(1, *keys)
        super().wait(keys, *timeout)

    def add(self, key: str, amount: int) -> int:
        self.sent.note(1, key, b"8 bytes.", b"8 bytes.")
        return super().add(key, amount)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        value = super().compare_set(key, expected, desired)
        self.sent.note(1, key, expected, desired, value)
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = super().multi_get(keys)
        self.sent.note(2, *keys, *keys, *values)
        return values

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        self.sent.note(1, *keys, *values)
        super().multi_set(keys, values)


def _tower(index: int, size: int, port: int) -> Participant:
    return Participant(
        kind="tower",
        index=index,
        names=[f"rank {i}" for i in range(size)],
        address=("127.0.0.1", port),
        chief_serves=False,
        origin="scripts/bench control",
        token=TOKEN,
        seconds=_PATIENCE.total_seconds(),
    )


def _start(index: int, size: int, port: int) -> None:
    """What a tower does before the first collective, up to the comparison."""
    tower = _tower(index, size, port)
    host = index // HOST_TOWERS
    own = {**machine.identity(*tower.address), "machine": f"{machine.host_identity()}/{host}"}
    device = torch.device("cpu", index % HOST_TOWERS)
    message, terms = connecting.description(own, device, CommunicationOptions())
    tower.handshake(tower.open_store(), message, terms, connecting.compare_towers, facts=connecting.network_of_all)


def in_forks(count: int, work: Callable[[int], object]) -> tuple[float, list[Any]]:
    """Runs ``work(index)`` in so many forks at once; returns the seconds until the last has ended, and the results."""
    release_read, release_write = os.pipe()
    children, pipes = [], []
    for index in range(count):
        result_read, result_write = os.pipe()
        if (child := os.fork()) == 0:
            try:
                os.close(release_write)
                os.read(release_read, 1)  # until all are there
                os.write(result_write, json.dumps(work(index)).encode())
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        os.close(result_write)
        children.append(child)
        pipes.append(result_read)
    os.close(release_read)
    started = time.monotonic()
    os.close(release_write)
    results = []
    for index, pipe in enumerate(pipes):
        with os.fdopen(pipe, "rb") as file:
            text = file.read()
        if not text:
            raise RuntimeError(f"process {index} of {count} has failed")
        results.append(json.loads(text))
    seconds = time.monotonic() - started
    for child in children:
        os.waitpid(child, 0)
    return seconds, results


def _measured_start(size: int) -> tuple[float, list[Sent]]:
    store: Store = serve_store("127.0.0.1", 0, "scripts/bench control", TOKEN)
    participant.TCPStore = CountedStore  # type: ignore[misc]

    def work(index: int) -> dict[str, int]:
        torch.set_num_threads(1)
        _start(index, size, store.port)  # type: ignore[attr-defined]
        return asdict(CountedStore.sent)

    seconds, results = in_forks(size, work)
    return seconds, [Sent(**result) for result in results]


def _beat(index: int, size: int, port: int, waits: bool) -> float:
    """A tower's heartbeats during some intervals; returns its requests per second."""
    health = Health()
    if waits and index == 0:
        health.waits = Wait("all", 1, range(size))
    tower, store = _tower(index, size, port), CountedStore("127.0.0.1", port, None, False, _PATIENCE)
    heart = Heartbeat(health, tower, SignedStore(store, TOKEN))
    interval = heartbeat.INTERVAL * max(1.0, size / heartbeat.PER_SECOND)
    time.sleep(2 * interval)  # the first heartbeats are over
    before, started = CountedStore.sent.requests, time.monotonic()
    time.sleep(3 * interval)
    made, seconds = CountedStore.sent.requests - before, time.monotonic() - started
    del heart
    return made / seconds


def _requests_of_heartbeats(size: int, *, waits: bool) -> float:
    """Requests per second of all towers."""
    store: Any = serve_store("127.0.0.1", 0, "scripts/bench control", TOKEN)
    # A thread's connection of its own would not be counted.
    SignedStore.connect_again = lambda signed, *_: signed  # type: ignore[method-assign, assignment]
    return sum(in_forks(size, lambda index: _beat(index, size, store.port, waits))[1])


def _pass_deadline(index: int, size: int, port: int) -> int:
    """The bytes of a tower that looks for the reason why a collective does not end, while all towers do."""
    health = Health()
    tower, store = _tower(index, size, port), CountedStore("127.0.0.1", port, None, False, _PATIENCE)
    signed = SignedStore(store, TOKEN)
    health.heartbeat = Heartbeat(health, tower, signed)
    timeout_error(health, index, 1.0)
    store.add("over", 1)
    wait_until(lambda: store.add("over", 0) == size, _PATIENCE.total_seconds(), pause=1.0)
    return CountedStore.sent.count


def _bytes_of_deadline(size: int) -> int:
    store: Any = serve_store("127.0.0.1", 0, "scripts/bench control", TOKEN)
    SignedStore.connect_again = lambda signed, *_: signed  # type: ignore[method-assign, assignment]
    return sum(in_forks(size, lambda index: _pass_deadline(index, size, store.port))[1])


def _reduce(index: int, size: int, port: int) -> float:
    """Seconds of a reduced number, between processes that Gloo connects."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, None, False, _PATIENCE)
    comm = join_default_group(store, index, size, torch.device("cpu"), "gloo", _PATIENCE, "same")
    times = []
    for _ in range(20):
        started = time.monotonic()
        values.reduce(comm, "sum", 1.0)
        times.append(time.monotonic() - started)
    comm.barrier()
    return statistics.median(times)


def _seconds_of_reduce(size: int) -> float:
    store: Any = serve_store("127.0.0.1", 0, "scripts/bench control", TOKEN)
    return statistics.median(in_forks(size, lambda index: _reduce(index, size, store.port))[1])


def _learn_of_failure(index: int, size: int, port: int) -> float:
    """When an agent has learned of the failure that the first agent reports once all listen, in monotonic seconds."""
    store = TCPStore("127.0.0.1", port, None, False, _PATIENCE)
    broadcast = FailureBroadcast(TOKEN)
    broadcast.listen(store, index, size)
    store.add("listens", 1)
    if index == 0:
        wait_until(lambda: store.add("listens", 0) == size, _PATIENCE.total_seconds())
        started = time.monotonic()
        broadcast.first_failure(Failed("tower 0 failed", "a failure"))
        return started
    wait_until(lambda: broadcast.received is not None, _PATIENCE.total_seconds())
    return time.monotonic()


def _seconds_of_failure(hosts: int) -> float:
    store: Any = serve_store("127.0.0.1", 0, "scripts/bench control", TOKEN)
    started, *learned = in_forks(hosts, lambda index: _learn_of_failure(index, hosts, store.port))[1]
    return max(learned, default=started) - started


def _meet_again(index: int, hosts: int, port: int) -> tuple[float, float]:
    """When an agent starts to look for the second attempt, and when it has met the others, in monotonic seconds."""
    addresses = tuple(f"127.0.0.1:{port + each}" for each in range(hosts))
    job = Job(HOST_TOWERS, index, hosts, addresses, origin="scripts/bench control", restarts=1)
    rendezvous = (FollowerRendezvous if index else ChiefRendezvous)(job, TOKEN)
    seconds = time.monotonic() + _PATIENCE.total_seconds()
    info = rendezvous.next_rendezvous()
    info.store.add("over", 1)
    wait_until(lambda: info.store.add("over", 0) == hosts, seconds - time.monotonic())
    started = time.monotonic()
    again = rendezvous.next_rendezvous()
    met = time.monotonic()
    again.store.add("over", 1)
    if index == 0:  # serves the store
        wait_until(lambda: again.store.add("over", 0) == hosts, seconds - time.monotonic())
    return started, met


def _seconds_of_restart(hosts: int) -> float:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    started, met = zip(*in_forks(hosts, lambda index: _meet_again(index, hosts, port))[1], strict=True)
    return max(met) - min(started)


def main(arguments: Sequence[str]) -> None:
    parser = command.parser("control", __doc__, turns=3, towers=None)
    parser.add_argument("--sizes", default="8,32,64,128,256,1024", help="numbers of towers, comma-separated")
    options = parser.parse_args(arguments)
    head = f"{'towers':>7}{'hosts':>7}{'seconds':>9}{'requests':>10}{'the most':>10}{'bytes':>12}"
    head = f"{head}{'deadline':>14}{'heartbeats':>12}{'one waits':>11}"
    print(f"{head}{'reduce, ms':>12}{'failure, s':>12}{'restart, s':>12}")
    for size in map(int, options.sizes.split(",")):
        turns = [_measured_start(size) for _ in range(options.turns)]
        seconds = statistics.median(turn[0] for turn in turns)
        requests = [sent.requests for sent in turns[-1][1]]
        count = sum(sent.count for sent in turns[-1][1])
        hosts = -(-size // HOST_TOWERS)
        mean = statistics.mean(requests)
        calm, watched = (_requests_of_heartbeats(size, waits=waits) for waits in (False, True))
        row = f"{size:>7}{hosts:>7}{seconds:>9.2f}{mean:>10.1f}{max(requests[1:]):>10}{count:>12,}"
        row += f"{_bytes_of_deadline(size):>14,}"
        reduced = f"{1000 * _seconds_of_reduce(size):.2f}" if size <= _MOST_CONNECTED else ""
        failure = _seconds_of_failure(hosts)
        restart = f"{_seconds_of_restart(hosts):.2f}" if hosts > 1 else ""
        print(f"{row}{calm:>12.0f}{watched:>11.0f}{reduced:>12}{failure:>12.2f}{restart:>12}", flush=True)
