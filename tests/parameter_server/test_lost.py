"""Workers and servers that are killed, from outside and in the middle of what they do."""

from __future__ import annotations

import asyncio
import functools
import os
import pathlib
import re
import resource
import signal
import threading
import time
import traceback
from typing import Any

import pytest
import torch

from tests.support.jobs import ROOT
from tests.support.processes import await_ends
from tests.support.programs import end_of, run_program, start_program
from tests.support.waiting import HANG, forever, wait_until

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.extended

from mirrored.parameter_server.layout import Part, Values  # noqa: E402
from mirrored.parameter_server.servers import Server, ServerLostError  # noqa: E402
from tests.parameter_server.processes import descendants  # noqa: E402
from tests.parameter_server.training import Training  # noqa: E402


@pytest.fixture
def training() -> Training:
    return Training()


def kill(actor: Any) -> None:
    """Kill an actor's process, between two of its calls."""
    os.kill(ray.get(actor.__ray_call__.remote(lambda actor: os.getpid())), signal.SIGKILL)


def wait_in(place: pathlib.Path) -> None:
    """Write this process' number into a file that is not there yet, and wait to be killed."""
    if not place.exists():
        unfinished = place.with_suffix(".unfinished")
        unfinished.write_text(str(os.getpid()))
        unfinished.rename(place)
        forever()


def kill_who_waits_in(place: pathlib.Path) -> None:
    wait_until(place.exists)
    os.kill(int(place.read_text()), signal.SIGKILL)


def test_ten_workers_killed_in_their_steps_lose_no_call(training: Training, tmp_path: pathlib.Path) -> None:
    step = training.step

    def step_and_wait(number: int, batches: Any) -> int:
        step(batches)  # which has been pushed when the worker is killed
        if number % 20 == 10:
            wait_in(tmp_path / str(number))
        return number

    values = [training.coordinator.schedule(step_and_wait, args=(number, training.batches)) for number in range(200)]
    for number in range(10, 200, 20):
        kill_who_waits_in(tmp_path / str(number))
    training.coordinator.join()
    assert training.coordinator.fetch(values) == list(range(200))
    assert {int(entry["step"]) for entry in training.adam.state_dict()["state"].values()} == {200}


def test_workers_killed_between_calls(training: Training) -> None:
    training.train(2)
    for worker in training.strategy._workers:
        kill(worker)
    assert len(training.train(4)) == 4


def test_a_worker_killed_while_it_makes_its_data(training: Training, tmp_path: pathlib.Path) -> None:
    def data() -> list[int]:
        wait_in(tmp_path / "data")
        return [5]

    values = iter(training.coordinator.create_per_worker_dataset(data))
    value = training.coordinator.schedule(lambda values: next(values), args=(values,))
    kill_who_waits_in(tmp_path / "data")
    assert value.fetch() == 5


def test_an_error_while_a_worker_is_lost(training: Training, tmp_path: pathlib.Path) -> None:
    def fail() -> None:
        wait_until((tmp_path / "worker").exists)
        raise KeyError("no such word")

    training.coordinator.schedule(functools.partial(wait_in, tmp_path / "worker"))
    training.coordinator.schedule(fail)
    kill_who_waits_in(tmp_path / "worker")
    with pytest.raises(KeyError, match="no such word"):
        training.coordinator.join()
    assert len(training.train(4)) == 4


def test_what_the_chief_reads_while_a_worker_is_lost(training: Training, tmp_path: pathlib.Path) -> None:
    value = training.coordinator.schedule(lambda: [1, 2])
    assert value.fetch() == [1, 2]
    training.coordinator.schedule(functools.partial(wait_in, tmp_path / "worker"))
    wait_until((tmp_path / "worker").exists)
    read = threading.Event()

    def read_on() -> None:
        while not training.coordinator.done():
            assert training.model.state_dict()["dense.1.weight"].shape == (7, 4)
            read.set()

    reader = threading.Thread(target=read_on)
    reader.start()
    assert read.wait(HANG)
    kill_who_waits_in(tmp_path / "worker")
    training.coordinator.join()
    reader.join()
    assert value.fetch() == [1, 2]


def test_a_server_that_is_killed_ends_all(training: Training) -> None:
    training.train(2)
    kill(training.strategy._servers.actors[1])
    with pytest.raises(
        ServerLostError, match="parameter server 1 .* and with it rows 25 to 49 of Words.table.weight, "
    ):
        training.train(50)
    with pytest.raises(ServerLostError):
        training.coordinator.schedule(training.step, args=(training.batches,))
    with pytest.raises(ServerLostError):
        training.coordinator.join()
    with pytest.raises(ServerLostError):
        training.coordinator.done()


def test_a_server_and_a_worker_that_are_killed(training: Training, tmp_path: pathlib.Path) -> None:
    training.coordinator.schedule(functools.partial(wait_in, tmp_path / "worker"))
    wait_until((tmp_path / "worker").exists)
    kill(training.strategy._servers.actors[0])
    kill_who_waits_in(tmp_path / "worker")
    with pytest.raises(ServerLostError, match="parameter server 0 "):
        training.train(50)


def test_a_server_without_memory_is_named(tmp_path: pathlib.Path) -> None:
    training = Training(workers=1)
    training.train(1)

    def limit_memory(server: Any) -> None:
        resource.setrlimit(resource.RLIMIT_AS, (1, resource.RLIM_INFINITY))

    large = training.strategy._servers.actors[1].__ray_call__.remote(limit_memory)
    ray.get(large)
    with pytest.raises((RuntimeError, MemoryError)) as error:
        training.train(1)
    assert "parameter server 1" in "".join(traceback.format_exception(error.value))


def test_a_late_request_of_a_finished_call_changes_nothing() -> None:
    """A worker that Ray has lost may still run: its call was repeated by another one, and is over."""
    server, part = Server(0), Part(0, 0, 0, 0)

    async def requests() -> list[float]:
        await server.assign(Values({part: torch.zeros(())}))
        found = []
        for call, first in ((1, 1), (1, 1), (2, 1), (3, 3), (2, 1), (3, 3)):
            await server.add(Values({part: torch.ones(())}), (call, first, 0))
            changed, _, _ = await server.pull({part: -1}, None)
            found.append(float(changed[part]))
        return found

    assert asyncio.run(requests()) == [1, 1, 2, 3, 3, 3]


OUT_OF_MEMORY = """
import ray
from mirrored.parameter_server.servers import Server, Servers

ray.init("local", _system_config={"memory_usage_threshold": 0.001, "memory_monitor_refresh_ms": 100})
servers = Servers([ray.remote(Server).remote(0)])
while True:
    servers.ask_all("flush", 0)
"""


@pytest.mark.row(67)
def test_a_server_that_ray_kills_to_save_memory() -> None:
    result = run_program(["-c", OUT_OF_MEMORY], env={"RAY_AUTH_MODE": "disabled"}, code=1)
    assert re.search(r"ServerLostError: parameter server 0 \(out of memory: .* has ended", result.stderr)


@pytest.mark.seconds
def test_the_script_of_a_lost_server_ends_and_goes_on(tmp_path: pathlib.Path) -> None:
    program = [str(ROOT / "examples" / "recommender.py"), "--rows", "5000", "--steps", "30", "--workers", "2"]
    program += ["--checkpoints", str(tmp_path)]
    process = start_program([*program, "--epochs", "1000"], env={"PYTHONUNBUFFERED": "1"})
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("epoch 3"):
            break
    below = descendants(process.pid)
    server = next(number for number, command in below.items() if command.startswith("ray::Server"))
    os.kill(server, signal.SIGKILL)
    killed = time.monotonic()
    _, errors = end_of(process, 1)
    assert time.monotonic() - killed < 15
    assert re.search(
        r"ServerLostError: parameter server [01] .* ended, and with it .*Recommender\.table\.weight", errors
    )
    await_ends(*below)

    steps = max(int(path.name.removeprefix("step-")) for path in tmp_path.glob("step-*"))
    again = run_program([*program, "--epochs", str(steps // 30 + 1)], code=0)
    assert f"(step {steps})" in again.stderr
    assert re.findall(r"^epoch (\d+):", again.stdout, re.MULTILINE) == [str(steps // 30 + 1)]
