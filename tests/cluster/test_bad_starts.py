"""Workers and towers that cannot start together: the type, the wording and the time of each error."""

from __future__ import annotations

import json
import pathlib
import re
import socket
import sys
from typing import Any

import pytest
from torch.distributed import HashStore, Store

from tests.support.clusters import free_port, start_agent, torchrun_variables
from tests.support.handshakes import together, tower
from tests.support.programs import run_program, start_function
from tests.support.waiting import HANG, wait_until
from towers import HandshakeError, PortInUseError, StartupError
from towers.joining.participant import Participant, versions
from towers.joining.store import Message, serve_store
from towers.launching.job import Job
from towers.launching.starting import agent


def worker_job(worker: int, addresses: list[str], seconds: float = HANG) -> Job:
    return Job(1, worker, len(addresses), tuple(addresses), "TF_CONFIG", startup_seconds=seconds)


def run_agents(*configurations: Job) -> list[str]:
    """Real agents at the same time, one process each, which all fail; their standard errors in order."""
    agents = [start_agent(one, "-c", "print('ran')") for one in configurations]
    errors = [agent.communicate()[1] for agent in agents]
    assert [agent.returncode for agent in agents] == [1] * len(agents), errors
    return errors


@pytest.mark.extended
@pytest.mark.row(12)
def test_clusters_differ_between_workers() -> None:
    first, second = f"127.0.0.1:{free_port()}", "127.0.0.1:2222"
    for text in run_agents(worker_job(0, [first, second]), worker_job(1, [first, "127.0.0.1:3333"])):
        assert "the workers were given different clusters (worker 1 by TF_CONFIG)" in text
        assert "the address of worker 1 is 127.0.0.1:3333 for worker 1 and 127.0.0.1:2222 for worker 0" in text
        assert len(text.splitlines()) == 1
    for text in run_agents(worker_job(0, [first, second]), worker_job(1, [first, second, "127.0.0.1:4"])):
        assert "worker 1 knows 3 workers" in text


@pytest.mark.extended
@pytest.mark.row(13)
def test_left_over_cluster() -> None:
    address = f"127.0.0.1:{free_port()}"
    [text] = run_agents(worker_job(1, [address, "127.0.0.1:2"], seconds=1.0))
    assert re.search(rf"the chief \(worker 0\) did not answer at {address} within \d+ s", text)
    assert "the address was read from TF_CONFIG" in text


@pytest.mark.extended
@pytest.mark.row(19)
def test_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(PortInUseError, match=rf"EADDRINUSE: 127.0.0.1:{port} \(from a test\).* is in use") as error:
            serve_store("127.0.0.1", port, "a test", "")
        assert isinstance(error.value, OSError)
        [text] = run_agents(worker_job(0, [f"127.0.0.1:{port}", "127.0.0.1:2"]))
        assert f"EADDRINUSE: 127.0.0.1:{port} (from TF_CONFIG)" in text


def wait_for_a_worker_at_first(job: str) -> None:
    """The agent of worker 0, whose seconds begin when worker 2 has come."""
    handshake = Participant.handshake

    def wait_at_first(worker: Participant, store: Store, *others: Any, **more: Any) -> Message:
        wait_until(lambda: store.check(["worker/2"]))
        return handshake(worker, store, *others, **more)

    Participant.handshake = wait_at_first  # type: ignore[method-assign]
    agent.run(Job.from_json(job), [sys.executable, "-c", "print('ran')"])


@pytest.mark.extended
@pytest.mark.row(20)
def test_a_worker_never_starts() -> None:
    addresses = [f"127.0.0.1:{free_port()}", "127.0.0.1:2", "127.0.0.1:3"]
    chief = start_function(wait_for_a_worker_at_first, worker_job(0, addresses, seconds=1.0).to_json())
    other = start_agent(worker_job(2, addresses), "-c", "print('ran')")
    for worker in (chief, other):
        _, text = worker.communicate()
        assert worker.returncode == 1
        assert "1 of 3 workers did not join within" in text
        assert "worker 1 (127.0.0.1:2); the list of workers was read from TF_CONFIG" in text
        assert len(text.splitlines()) == 1


@pytest.mark.extended
@pytest.mark.row(20)
def test_a_tower_never_starts() -> None:
    program = (
        "import mirrored; mirrored.MirroredStrategy("
        "communication=mirrored.CommunicationOptions(startup_timeout_seconds=1))"
    )
    result = run_program(["-c", program], env=torchrun_variables(MASTER_PORT=str(free_port())), code=1)
    last = result.stderr.strip().splitlines()[-1]
    assert re.match(r"towers.errors.StartupError: 1 of 2 towers did not join within \d+ s: tower 1 \(rank 1\)", last)


@pytest.mark.extended
@pytest.mark.row(20)
def test_something_else_answers() -> None:
    """A program of another kind has the chief's port: it takes the connection, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        addresses = [f"127.0.0.1:{server.getsockname()[1]}", "127.0.0.1:2"]
        [text] = run_agents(worker_job(1, addresses, seconds=2.0))
    assert f"a program that is not the chief (worker 0) listens at {addresses[0]}" in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize("what", ["torch", "python", "mirrored"])
@pytest.mark.row(23)
def test_versions_differ(what: str) -> None:
    store = HashStore()

    def come(store: Store, index: int) -> str:
        different = re.sub(rf"(?<={what} )[^,]*", "0.0", versions()) if index else versions()
        message = {"versions": different, "host": f"h{index}"}
        with pytest.raises(HandshakeError) as caught:
            worker = tower(index, kind="worker", token="")
            worker.handshake(store, message, {}, lambda *_: pytest.fail("versions come first"))
        return str(caught.value)

    first, second = together(come, store, store)
    assert first == second
    assert "different versions: " in first
    assert f"{versions()} on worker 0 (on h0)" in first
    assert re.search(rf"{what} 0.0\b[^(]* on worker 1 \(on h1\)", first)


def test_a_chief_address_that_cannot_be_resolved() -> None:
    with pytest.raises(StartupError, match=r"no-such-host.invalid:1 \(from a test\) cannot be resolved"):
        serve_store("no-such-host.invalid", 1, "a test", "")


@pytest.mark.extended
def test_a_chief_whose_address_is_another_machines_says_so_at_once(tmp_path: pathlib.Path) -> None:
    """192.0.2.0/24 is for documentation: nobody has such an address."""
    config = {"cluster": {"worker": ["192.0.2.7:2222", "127.0.0.1:2223"]}, "task": {"type": "worker", "index": 0}}
    script = tmp_path / "script.py"
    options = "mirrored.CommunicationOptions(startup_timeout_seconds=3)"
    script.write_text(f"import mirrored; mirrored.MultiWorkerMirroredStrategy(communication={options})")
    result = run_program([str(script)], env={"TF_CONFIG": json.dumps(config)}, code=1)
    doubt = "the address of worker 0, 192.0.2.7:2222 (from TF_CONFIG), does not lead to this machine, which is worker 0"
    said = result.stderr.splitlines()
    assert f"mirrored: {doubt}: no other worker will find it there" in said
    assert said[-1].endswith(doubt)
