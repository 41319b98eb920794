"""The files in examples/clusters, played: their commands, with the variables of their controllers, on two hosts.

The hosts are network namespaces, in which the pods have the names that their clusters give them; each pod has processes
of its own, of which the command is the first, as in a container.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

import mirrored
from mirrored import ClusterError
from tests.launching.test_start import TRAIN, train
from tests.support.controllers import CLUSTERS, Pod, pods_of, pytorch_job, read, slurm_tasks, words_for
from tests.support.hosts import in_container, on_host, two_hosts, write_hosts
from tests.support.jobs import ROOT
from tests.support.processes import family
from tests.support.programs import Program, run_command, start_program, variables_with
from tests.support.waiting import HANG, wait_until

pytestmark = pytest.mark.extended

FILES = ["tfjob.yaml", "pytorchjob.yaml", "trainjob.yaml", "compose.yaml"]
RESTARTS = str(ROOT / "tests" / "programs" / "restarts.py")

Hosts = list[tuple[str, str]]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """(namespace, address) of two hosts."""
    with two_hosts() as found:
        yield found


@functools.cache
def expected_loss(towers: int) -> float:
    """The last loss of so many towers of one host. Dropout lets it depend on their number."""
    return loss_in(mirrored.launch(train, devices=[f"cpu:{i}" for i in range(towers)])[0], towers)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The last line of two towers of one host that nothing disturbs."""
    words = ["mirrored", "run", "--towers", "2", RESTARTS, str(tmp_path_factory.mktemp("undisturbed"))]
    return run_command(words, code=0).stdout.splitlines()[-1]


def loss_in(text: str, towers: int) -> float:
    """The last loss, which one of the towers has printed."""
    [(count, loss)] = re.findall(r"^towers ([0-9]+), final loss ([0-9.e-]+)$", text, re.MULTILINE)
    assert int(count) == towers
    return float(loss)


class Containers:
    """A pod on each host, whose container is started again as long as it fails (``OnFailure``).

    Args:
        words: what Python runs in each.
        variables: of all of them, beside the pods' own.

    Attributes:
        ended: for each pod, exit code, output and errors of each container that has ended.
    """

    def __init__(self, hosts: Hosts, pods: Sequence[Pod], words: Sequence[Sequence[str]], **variables: str) -> None:
        self.ended: list[list[tuple[int, str, str]]] = [[] for _ in pods]
        self._hosts, self._pods, self._words, self._variables = hosts, pods, words, variables
        self._running: list[Program] = [self._start(index) for index in range(len(pods))]
        self._keepers = [threading.Thread(target=self._keep, args=(index,)) for index in range(len(pods))]
        for keeper in self._keepers:
            keeper.start()

    def _start(self, index: int) -> Program:
        pod = self._pods[index]
        before = in_container(self._hosts[index][0], pod.name)
        return start_program(self._words[index], env={**self._variables, **pod.variables}, before=before)

    def _keep(self, index: int) -> None:
        while True:
            output, errors = self._running[index].communicate()
            self.ended[index].append((self._running[index].returncode, output, errors))
            if self._running[index].returncode == 0 or len(self.ended[index]) > 20:
                return
            self._running[index] = self._start(index)

    def end_command(self, index: int) -> None:
        """Send SIGTERM to the command of a container, its first process."""
        os.kill(family(self._running[index].pid)[1], signal.SIGTERM)

    def kill(self, index: int) -> None:
        """Kill all processes of a container."""
        self._running[index].kill()

    def join(self) -> list[list[int]]:
        """Wait for the end of all; returns the exit codes of each pod's containers."""
        for keeper in self._keepers:
            keeper.join(HANG)
            if keeper.is_alive():
                for process in self._running:
                    process.kill()
        return [[code for code, _, _ in ended] for ended in self.ended]

    @property
    def output(self) -> str:
        """Of all containers."""
        return "".join(output for ended in self.ended for _, output, _ in ended)


def name_all(hosts: Hosts, pods: Sequence[Pod]) -> None:
    """Let all pods look each other up."""
    names = [(name, hosts[index][1]) for index, pod in enumerate(pods) for name in pod.names]
    for namespace, _ in hosts:
        write_hosts(namespace, names)


@pytest.mark.parametrize("file", FILES)
def test_what_the_files_start_comes_to_the_loss_of_one_host(file: str, hosts: Hosts, tmp_path: pathlib.Path) -> None:
    pods = pods_of(file)
    name_all(hosts, pods)
    containers = Containers(hosts, pods, [words_for(pod.command, TRAIN, tmp_path) for pod in pods])
    assert containers.join() == [[0], [0]], containers.ended
    towers = 2 if "TF_CONFIG" in pods[0].variables else 4
    assert loss_in(containers.output, towers) == pytest.approx(expected_loss(towers), rel=1e-6)
    where = "on cpu, gloo" if towers == 2 else "shared memory in and gloo across 2 hosts"
    assert where in containers.ended[0][0][2]


def test_a_chief_waits_for_its_own_name(hosts: Hosts, tmp_path: pathlib.Path) -> None:
    """DNS knows the service of a pod some time after the pod has started."""
    pods = pods_of("tfjob.yaml")
    for namespace, _ in hosts:
        write_hosts(namespace, [])
    words = [words_for(pod.command, TRAIN, tmp_path) for pod in pods]
    before = on_host(hosts[0][0])
    chief = start_program(words[0], before=before, env=pods[0].variables)
    line = chief.stderr.readline()
    assert line == "mirrored: digits-worker-0.default.svc (from TF_CONFIG) cannot be looked up yet: waiting 60 s\n"
    name_all(hosts, pods)
    worker = start_program(words[1], before=on_host(hosts[1][0]), env=pods[1].variables)
    ends = [(*process.communicate(), process.returncode) for process in (chief, worker)]
    assert [code for *_, code in ends] == [0, 0], ends


@pytest.mark.parametrize("file", ["tfjob.yaml", "compose.yaml"])
def test_a_killed_container_joins_the_others(file: str, hosts: Hosts, undisturbed: str, tmp_path: pathlib.Path) -> None:
    """The other one is not started again."""
    pods = pods_of(file)
    name_all(hosts, pods)
    words = [words_for(pod.command, RESTARTS, tmp_path, str(tmp_path)) for pod in pods]
    containers = Containers(hosts, pods, words, FAIL="4:wait:0", TOWERS="1")
    wait_until((tmp_path / "failed4").exists)
    containers.kill(1)
    wait_until(lambda: bool(containers.ended[1]))
    (tmp_path / "go").touch()
    assert containers.join() == [[0], [-signal.SIGKILL, 0]], containers.ended
    assert undisturbed in containers.output


@pytest.mark.parametrize("file", ["tfjob.yaml", "pytorchjob.yaml"])
def test_pods_that_are_told_to_end_go_on_from_their_checkpoint(
    file: str, hosts: Hosts, undisturbed: str, tmp_path: pathlib.Path
) -> None:
    """All save. Under torchrun, which ends with a code of its own, too."""
    pods = one_tower_each(file)
    name_all(hosts, pods)
    words = [words_for(pod.command, RESTARTS, tmp_path, str(tmp_path)) for pod in pods]
    containers = Containers(hosts, pods, words, FAIL="4:wait:0", TOWERS="1")
    wait_until((tmp_path / "failed4").exists)
    containers.end_command(1)
    (tmp_path / "go").touch()
    codes = containers.join()
    assert [ended[-1] for ended in codes] == [0, 0], containers.ended
    assert undisturbed in containers.output
    if file == "tfjob.yaml":
        assert codes == [[75, 0], [75, 0]]


def one_tower_each(file: str) -> list[Pod]:
    """The pods of a file, each for one tower."""
    [job] = read(file)
    if job["kind"] == "TFJob":
        return pods_of(file)
    job["spec"]["nprocPerNode"] = "1"
    return pytorch_job(job)


@pytest.mark.parametrize("towers", ["auto", "1"])
def test_a_pod_of_a_pytorch_job_may_be_a_tower_itself(towers: str, hosts: Hosts, tmp_path: pathlib.Path) -> None:
    [job] = read("pytorchjob.yaml")
    job["spec"]["nprocPerNode"] = towers
    pods = pytorch_job(job)
    name_all(hosts, pods)
    words = [words_for(["python", *pod.command[1:]], TRAIN, tmp_path) for pod in pods]
    containers = Containers(hosts, pods, words)
    assert containers.join() == [[0], [0]], containers.ended
    assert loss_in(containers.output, 2) == pytest.approx(expected_loss(2), rel=1e-6)


@pytest.mark.row(74)
@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("pytorchjob.yaml", "PET_NPROC_PER_NODE is 2, so RANK counts machines and WORLD_SIZE towers"),
        ("trainjob.yaml", "PET_NNODES is 2, for torchrun, but torchrun has not started this process"),
    ],
)
def test_pods_that_need_torchrun_say_so(file: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in pods_of(file)[0].variables.items():
        monkeypatch.setenv(name, value)
    for kind in (mirrored.MirroredStrategy, mirrored.MultiWorkerMirroredStrategy):
        with pytest.raises(ClusterError, match=text):
            kind()


Sbatch = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def sbatch(hosts: Hosts, tmp_path: pathlib.Path) -> Sbatch:
    """Starts the batch script with a program in place of the digits, where srun and scontrol are played."""
    script = CLUSTERS / "slurm.sbatch"
    for name in ("srun", "scontrol"):
        file = tmp_path / name
        program = ROOT / "tests" / "programs" / "slurm.py"
        file.write_text(f'#!/bin/sh\nexec {sys.executable} {program} {name} "$@"\n')
        file.chmod(0o755)
    for namespace, _ in hosts:
        write_hosts(namespace, [(f"node{index}", address) for index, (_, address) in enumerate(hosts)])
    tasks = []
    for variables in slurm_tasks(script):
        node = variables["SLURM_NODEID"]  # one kernel runs both: what it says of itself must not give that away
        tasks.append((on_host(hosts[int(node)][0]), {**variables, "NCCL_HOSTID": node}))

    def start(*program: str, **variables: str) -> subprocess.Popen[str]:
        path = f"{tmp_path}:{os.environ['PATH']}"
        own = {"PROGRAM": json.dumps(program), "TASKS": json.dumps(tasks), "COMMANDS": str(tmp_path / "commands")}
        own |= {"PATH": path, "SLURM_JOB_ID": "4711", "SLURM_CPUS_PER_TASK": "8", **variables}
        pipe = subprocess.PIPE
        return subprocess.Popen([script], env=variables_with(own), cwd=tmp_path, stdout=pipe, stderr=pipe, text=True)

    return start


def test_the_batch_script_comes_to_the_loss_of_one_host(sbatch: Sbatch, tmp_path: pathlib.Path) -> None:
    process = sbatch(TRAIN)
    output, errors = process.communicate(timeout=HANG)
    assert process.returncode == 0, errors
    assert loss_in(output, 4) == pytest.approx(expected_loss(4), rel=1e-6)
    [command] = (tmp_path / "commands").read_text().splitlines()
    assert command == "srun --kill-on-bad-exit=0 python examples/digits.py --checkpoints results/digits/checkpoints"
