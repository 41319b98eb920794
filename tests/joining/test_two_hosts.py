"""Two hosts, played by network namespaces: separate interfaces and loopbacks, one cable between them."""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Iterator, Sequence

import pytest

from tests.faults.injection import DEADLINE, PROGRAM, differences, launched
from tests.support.clusters import tf_configs
from tests.support.hosts import ip, on_host, two_hosts, write_hosts
from tests.support.jobs import ROOT
from tests.support.processes import family
from tests.support.programs import Program, start_program
from tests.support.sockets import listening
from tests.support.waiting import wait_until
from towers.launching.job import Job, agent_command

pytestmark = pytest.mark.extended


@pytest.fixture
def hosts() -> Iterator[list[tuple[str, str]]]:
    """(namespace, address) of two hosts."""
    with two_hosts() as found:
        yield found


def name_as_debian_does(hosts: list[tuple[str, str]]) -> None:
    """Each host's own name leads it to 127.0.1.1, and the other host's to where that is."""
    for own, (namespace, _) in enumerate(hosts):
        addresses = ["127.0.1.1" if i == own else address for i, (_, address) in enumerate(hosts)]
        write_hosts(namespace, [(f"host{i}", address) for i, address in enumerate(addresses)])


def start_on(host: str, words: Sequence[str], config: str) -> Program:
    """Start Python on a host. One kernel runs both: what it says of itself must not give that away."""
    return start_program(words, before=on_host(host), env={"TF_CONFIG": config, "NCCL_HOSTID": host})


@pytest.mark.parametrize("named", [False, True])
def test_two_workers_on_two_hosts(hosts: list[tuple[str, str]], named: bool, tmp_path: pathlib.Path) -> None:
    if named:
        name_as_debian_does(hosts)
    addresses = [f"host{i}:4001" if named else f"{address}:4001" for i, (_, address) in enumerate(hosts)]
    processes = []
    until = f"until={tmp_path / 'seen'}"
    for index, (name, _) in enumerate(hosts):
        config = {"cluster": {"chief": addresses[:1], "worker": addresses[1:]}}
        config["task"] = {"type": "worker" if index else "chief", "index": 0}
        program = str(ROOT / "tests" / "programs" / "report.py")
        processes.append(start_on(name, [program, "two" if index else "one", until], json.dumps(config)))
    reports = [process.stdout.readline() for process in processes]
    found = [[listening(one) for one in family(process.pid)] for process in processes]
    (tmp_path / "seen").touch()
    outputs = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    # One tower on the first host, two on the second; each host's first tower shows.
    assert [json.loads(line)["towers"] for line in reports] == [3, 3]
    # The first host's agent has the store, each tower its Gloo: on the address that the other host reaches.
    (store, _, *towers), (agent, _, *others) = found  # the second ones are fork servers
    assert (store, agent) == ([(hosts[0][1], 4001)], [])
    for tower, own in zip([*towers, *others], [0, 1, 1], strict=True):
        assert {address for address, _ in tower} == {hosts[own][1]}
    assert (
        "mirrored: 3 towers of 2 workers on cpu, shared memory in and gloo across 2 hosts, 1 thread each"
        in outputs[0][1]
    )
    assert "mirrored:" not in outputs[1][1]


def train(hosts: list[tuple[str, str]], folder: pathlib.Path, *words: str) -> list[Program]:
    """Start the agents that tests/faults/program.py becomes as the workers of a cluster, one tower on each host."""
    addresses = tuple(f"{address}:4001" for _, address in hosts)
    program = [sys.executable, *PROGRAM, str(folder), "--towers", "1", "--deadline", str(DEADLINE), *words]
    jobs = [Job(1, index, 2, addresses, "TF_CONFIG") for index in range(2)]
    return [
        start_program(
            agent_command(jobs[index], program)[1:],
            env={"TF_CONFIG": tf_configs(addresses)[index], "NCCL_HOSTID": name},
            before=on_host(name),
        )
        for index, (name, _) in enumerate(hosts)
    ]


def test_a_cut_cable_ends_both_hosts_and_the_run_goes_on(hosts: list[tuple[str, str]], tmp_path: pathlib.Path) -> None:
    workers = train(hosts, tmp_path / "run", "--fault", "until cut:forward:1:7")
    wait_until((tmp_path / "run.fault").exists)
    ip("-n", hosts[0][0], "link", "set", "eth0", "down")
    (tmp_path / "run.cut").touch()
    outputs = [worker.communicate() for worker in workers]
    assert all(worker.returncode for worker in workers), outputs
    for own, (_, errors) in enumerate(outputs):
        last = errors.splitlines()[-1]
        assert last.startswith(f"mirrored: tower {own} on "), last
        assert "failed in step 8" in last
        assert f"tower {1 - own}" in last
    ip("-n", hosts[0][0], "link", "set", "eth0", "up")
    workers = train(hosts, tmp_path / "run")
    outputs = [worker.communicate() for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    assert "resuming from" in outputs[0][1]
    assert differences(json.loads(outputs[0][0]), launched(tmp_path / "whole", towers=2)) == []
