"""Parameter servers in clusters of several nodes: TF_CONFIG's tasks as processes, and a Ray cluster that is there."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest
import torch

import mirrored
from tests.support.clusters import free_port, free_ports
from tests.support.processes import await_ends
from tests.support.programs import Program, end_of, run_program, start_program
from tests.support.waiting import wait_until

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.extended

from mirrored.cluster.resolver import ClusterError  # noqa: E402
from mirrored.evaluation import is_evaluator  # noqa: E402
from mirrored.parameter_server.nodes import _ip_of  # noqa: E402
from tests.cluster.test_tf_config import tf_config  # noqa: E402
from tests.parameter_server.processes import descendants  # noqa: E402

PROGRAM = """
import os, sys
import torch, mirrored
from mirrored.parameter_server.worker import current_worker_index

strategy = mirrored.ParameterServerStrategy(seed=0, startup_timeout_seconds=float(os.environ.get("DEADLINE", 300)))
with strategy.scope():
    model = torch.nn.Linear(3, 1)
    other = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], 0.01)
coordinator = mirrored.ClusterCoordinator(strategy)


def step():
    optimizer.zero_grad()
    (model(torch.ones(3)) + other(torch.ones(3))).square().backward()
    optimizer.step()
    return current_worker_index(), os.environ.get("TF_CONFIG", "").partition('"task": ')[2]


def train():
    values = [coordinator.schedule(step) for _ in range(40)]
    coordinator.join()
    return sorted(set(coordinator.fetch(values)))


for line in sys.stdin if sys.argv[1:] == ["asked"] else "\\n":
    for worker in train():
        print("computed by", *worker)
    print("trained", flush=True)
for value in model.state_dict().values():
    assert value.isfinite().all()
print("done")
"""


@pytest.fixture
def program(tmp_path: pathlib.Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return str(path)


@pytest.fixture
def tasks(program: str) -> Iterator[Tasks]:
    tasks = Tasks(program)
    yield tasks
    tasks.kill()


class Tasks:
    """The tasks of a cluster on this machine, each a process that a test starts."""

    def __init__(self, program: str, workers: int = 2, servers: int = 1) -> None:
        counts = {"chief": 1, "worker": workers, "ps": servers}
        ports = iter(free_ports(sum(counts.values())))
        self.program = program
        self.cluster = {job: [f"127.0.0.1:{next(ports)}" for _ in range(count)] for job, count in counts.items()}
        self.processes: list[Program] = []

    def start(self, job: str, index: int = 0, **variables: str) -> Program:
        config = json.dumps({"cluster": self.cluster, "task": {"type": job, "index": index}})
        env = {"TF_CONFIG": config, "MIRRORED_JOB_TOKEN": "a secret", "RAY_AUTH_TOKEN": "", **variables}
        process = start_program([self.program, "asked"], env=env, stdin=subprocess.PIPE)
        self.processes.append(process)
        return process

    def start_all(self) -> list[Program]:
        return [self.start(job, index) for job, addresses in self.cluster.items() for index in range(len(addresses))]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


def ray_with(folder: pathlib.Path, name: str, text: str) -> str:
    """The value of ``PYTHONPATH`` for a Ray that is this one, except for one file."""
    original, overlay = pathlib.Path(ray.__file__).parent, folder / "other" / "ray"
    overlay.mkdir(parents=True)
    for part in pathlib.PurePath(name).parts:
        for entry in original.iterdir():
            if entry.name not in (part, "__pycache__"):
                (overlay / entry.name).symlink_to(entry)
        original, overlay = original / part, overlay / part
        if original.is_dir():
            overlay.mkdir()
    overlay.write_text(text)
    overlay.chmod(0o755)
    return os.pathsep.join([str(folder / "other"), os.environ.get("PYTHONPATH", "")])


def train(chief: Program) -> set[str]:
    """Let the chief train for an epoch; returns which workers have taken part."""
    assert chief.stdin is not None
    assert chief.stdout is not None
    chief.stdin.write("\n")
    chief.stdin.flush()
    workers = set()
    while (line := chief.stdout.readline()) != "trained\n":
        assert line, chief.communicate()
        if line.startswith("computed by "):  # else it is Ray's
            workers.add(line.split()[2])
    return workers


def test_a_cluster_is_played(program: str) -> None:
    result = run_program(["-m", "mirrored", "cluster", "--workers", "2", "--ps", "2", program], code=0)
    lines = result.stdout.splitlines()
    assert lines[-1] == "done"
    computed = {line for line in lines if line.startswith("computed by")}
    assert computed <= {f'computed by {i} {{"type": "worker", "index": {i}}}}}' for i in range(2)}
    assert computed
    assert "2 workers and 2 servers, started by python with TF_CONFIG" in result.stderr


@pytest.mark.row(63)
def test_tasks_that_do_not_come_are_named(tasks: Tasks) -> None:
    for seconds in ("20", "60", "180"):  # on a busy machine, the Ray node of worker 1 starts later
        chief, worker = tasks.start("chief", DEADLINE=seconds), tasks.start("worker", 1)
        _, errors = end_of(chief, 1)
        if tasks.cluster["worker"][1] not in errors.rpartition("StartupError")[2]:
            break
        worker.kill()
    missing = f"worker:0 ({tasks.cluster['worker'][0]}), ps:0 ({tasks.cluster['ps'][0]})"
    assert f"StartupError: {missing} did not join within {seconds} s: start the script there" in errors
    end_of(worker, 0)
    _, errors = end_of(tasks.start("ps", DEADLINE="1"), 1)
    assert f"StartupError: the chief did not connect to {tasks.cluster['chief'][0]} within 1 s" in errors


def test_a_worker_whose_task_is_killed_is_not_waited_for_and_comes_back(tasks: Tasks) -> None:
    chief, first, second, server = tasks.start_all()
    while train(chief) != {"0", "1"}:
        pass
    below = descendants(second.pid)
    (folder,) = {found for command in below.values() for found in re.findall(r"--temp-dir=(\S+)", command)}
    assert pathlib.Path(folder).exists()
    second.kill()
    while train(chief) != {"0"}:
        pass
    await_ends(*below)
    wait_until(lambda: not pathlib.Path(folder).exists())
    again = tasks.start("worker", 1)
    while train(chief) != {"0", "1"}:
        pass
    assert "done" in end_of(chief, 0)[0]
    for node in (first, again, server):
        assert "nothing listens at" in end_of(node, 0)[1]


def test_a_node_that_starts_too_slowly_is_started_again(tasks: Tasks, tmp_path: pathlib.Path) -> None:
    raylet = "core/src/ray/raylet/raylet"
    real = pathlib.Path(ray.__file__).parent / raylet
    first_hangs = f'#!/bin/sh\nmkdir "{tmp_path}/started" && exec sleep 1000\nexec "{real}" "$@"\n'
    slow = tasks.start("ps", PYTHONPATH=ray_with(tmp_path, raylet, first_hangs))
    chief, *workers = tasks.start("chief"), tasks.start("worker", 0), tasks.start("worker", 1)
    train(chief)
    assert "done" in end_of(chief, 0)[0]
    assert "the node of ps:0 did not start in the time that Ray gives it" in end_of(slow, 0)[1]
    for worker in workers:
        end_of(worker, 0)


@pytest.mark.seconds
@pytest.mark.row(67)
def test_a_server_whose_task_is_killed_ends_all(tasks: Tasks) -> None:
    chief, *workers, server = tasks.start_all()
    train(chief)
    server.kill()
    start = time.monotonic()
    _, errors = chief.communicate("\n" * 1000)  # it trains on
    for worker in workers:
        end_of(worker, 0)
    seconds = time.monotonic() - start
    assert chief.returncode == 1
    assert re.search(r"ServerLostError: parameter server 0.* has ended, and with it Linear\.weight", errors)
    print(f"all ended {seconds:.1f} s after the server")
    assert seconds < 15


def test_a_chief_that_is_killed_ends_all(tasks: Tasks) -> None:
    chief, *nodes = tasks.start_all()
    train(chief)
    chief.kill()
    for node in nodes:
        assert "nothing listens at" in end_of(node, 0)[1]


@pytest.mark.row(64)
def test_tasks_have_to_have_one_secret(tasks: Tasks) -> None:
    _, errors = end_of(tasks.start("chief", MIRRORED_JOB_TOKEN=""), 1)
    assert "StartupError: the tasks of TF_CONFIG run code that they receive" in errors
    tasks.start("chief")
    _, errors = end_of(tasks.start("ps", MIRRORED_JOB_TOKEN="another secret"), 1)
    assert f"StartupError: ps:0 at {tasks.cluster['ps'][0]} has ended as a node of the Ray cluster at" in errors
    assert "token" in errors


@pytest.mark.row(64)
def test_another_version_of_ray(tasks: Tasks, tmp_path: pathlib.Path) -> None:
    tasks.start("chief")
    path = ray_with(tmp_path, "_version.py", 'version = "2.1.0"\ncommit = ""\n')
    _, errors = end_of(tasks.start("worker", 1, PYTHONPATH=path), 1)
    assert f"StartupError: worker:1 at {tasks.cluster['worker'][1]} has ended as a node of the Ray cluster at" in errors
    assert re.search(rf"Version mismatch: [\s\S]*Ray: {re.escape(ray.__version__)}[\s\S]*Ray: 2\.1\.0", errors)


def test_the_address_of_a_task() -> None:
    assert {_ip_of(f"{host}:1") for host in ("127.0.0.1", "localhost")} == {"127.0.0.1"}
    assert _ip_of("[::1]:1") in ("::1", None)  # None: no IPv6 here
    for host in ("nowhere.invalid", "203.0.113.7"):  # no name, and no address of this machine
        assert _ip_of(f"{host}:1") is None


CLUSTER = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}


@pytest.mark.parametrize(
    ("missing", "job"), [("chief", "worker"), ("worker", "chief"), ("ps", "chief"), ("ps", "worker")]
)
@pytest.mark.row(62)
def test_a_cluster_without_some_job(missing: str, job: str) -> None:
    cluster = {name: addresses for name, addresses in CLUSTER.items() if name != missing}
    with pytest.raises(ClusterError, match=f"TF_CONFIG: cluster has no '{missing}' task, but parameter servers need"):
        mirrored.ParameterServerStrategy(tf_config({"cluster": cluster, "task": {"type": job, "index": 0}}))


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"workers": 0}, "0 worker was asked for, but there has to be one at least"),
        ({"servers": 2}, "2 ps were asked for, but TF_CONFIG has 1: leave the number out"),
        ({"staleness": -1}, "staleness is -1, but must be 0 or more steps"),
        ({"replicas_to_aggregate": 3}, "replicas_to_aggregate is 3, but must be from 1 to 2"),
    ],
)
@pytest.mark.row(62)
def test_numbers_that_the_cluster_does_not_have(numbers: dict[str, int], words: str) -> None:
    resolver = tf_config({"cluster": CLUSTER, "task": {"type": "chief", "index": 0}})
    with pytest.raises(ValueError, match=words):
        mirrored.ParameterServerStrategy(resolver, **numbers)


def test_the_evaluator_has_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = {**CLUSTER, "evaluator": ["e:1"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "evaluator", "index": 0}}))
    strategy = mirrored.ParameterServerStrategy()
    assert is_evaluator(strategy)
    with strategy.scope():
        model = torch.nn.Linear(1, 1)
    assert model.state_dict()["weight"].isfinite()
    coordinator = mirrored.ClusterCoordinator(strategy)
    with pytest.raises(RuntimeError, match="this is the evaluator, which has no workers"):
        coordinator.schedule(lambda: None)
    with pytest.raises(RuntimeError, match="this is the evaluator, which has no workers"):
        coordinator.create_per_worker_dataset([1])


def test_a_ray_cluster_that_is_there(program: str) -> None:
    port = free_port()
    options = ["--head", f"--port={port}", "--include-dashboard=false", "--block"]
    secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a secret of this test, long enough"}
    head = start_program(["-m", "ray.scripts.scripts", "start", *options], env=secret)
    try:
        assert head.stdout is not None
        while "Ray runtime started" not in head.stdout.readline():
            assert head.poll() is None
        env = {**secret, "RAY_ADDRESS": f"127.0.0.1:{port}"}
        chief = start_program([program, "asked"], env=env, stdin=subprocess.PIPE)
        while train(chief) != {"0", "1"}:
            pass
        kill_one(head.pid, "Worker")
        while train(chief) != {"0", "1"}:
            pass
        kill_one(head.pid, "Server")
        _, errors = chief.communicate("\n" * 1000)
        result = run_program([program], env=env, code=0)
    finally:
        head.terminate()
        head.communicate()
    assert chief.returncode == 1
    assert "ServerLostError: parameter server 0 (pid: " in errors
    assert f"2 workers and 1 servers, started by the Ray cluster at 127.0.0.1:{port}" in errors
    assert "done" in result.stdout


def kill_one(ancestor: int, kind: str) -> None:
    """Kill a worker or a server of a Ray cluster."""
    os.kill(next(pid for pid, line in descendants(ancestor).items() if line.startswith(f"ray::{kind}")), signal.SIGKILL)


def test_ray_was_in_this_process_before(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    before = "import ray, mirrored; ray.init('local', include_dashboard=False); ray.shutdown()"
    program = f"{before}; mirrored.ParameterServerStrategy(workers=1, servers=1)"
    run_program(["-c", program], env={"HOME": str(tmp_path)}, code=0)
