"""Descriptions of clusters and devices that cannot be right: the type, wording and time of each error."""

from __future__ import annotations

import json
import pathlib
import re
import socket
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore

import mirrored
from mirrored.cluster import (
    ClusterError,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    TorchrunClusterResolver,
    resolve,
    slurm,
)
from mirrored.doctor.resources import check_cores
from tests.support.jobs import run_program
from tests.support.waiting import at_most
from towers import HandshakeError, PortInUseError, StartupError
from towers.collectives.connecting import compare_towers
from towers.joining import handshake
from towers.joining.store import serve_store
from towers.launching import rendezvous
from towers.launching.job import Job, agent_command
from towers.system import devices, machine

PROC_NET_TCP = pathlib.Path("/proc/net/tcp")


@pytest.fixture(autouse=True)
def quickly() -> Iterator[None]:
    """No bad input may hang."""
    with at_most(20):
        yield


def tf_config(text: object) -> TFConfigClusterResolver:
    return TFConfigClusterResolver({"TF_CONFIG": text if isinstance(text, str) else json.dumps(text)})


def two_workers(**task: object) -> dict[str, object]:
    return {"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 0, **task}}


def refused(text: object, words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        tf_config(text)


@pytest.mark.row(1)
def test_not_json() -> None:
    refused('{\n  "cluster": {]\n}', r"TF_CONFIG is not JSON: .* at line 2, column 15")


@pytest.mark.row(2)
def test_empty(caplog: pytest.LogCaptureFixture) -> None:
    assert resolve({"TF_CONFIG": ""}).workers == 1
    assert caplog.messages == ["TF_CONFIG is set but empty: taken as unset"]


@pytest.mark.parametrize(("text", "kind"), [("[]", "a list"), ("3", "a number"), ('"x"', "a text"), ("null", "null")])
@pytest.mark.row(3)
def test_no_object(text: str, kind: str) -> None:
    refused(text, f"TF_CONFIG must be a JSON object with 'cluster' and 'task', not {kind}")


@pytest.mark.row(4)
def test_no_task_or_index() -> None:
    refused({"cluster": {"worker": ["a:1"]}}, "TF_CONFIG: task is missing")
    refused({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker"}}, "TF_CONFIG: task.index is missing")
    refused({"cluster": {"worker": ["a:1"]}, "task": {"index": 0}}, "TF_CONFIG: task.type is missing")


@pytest.mark.row(5)
def test_index_too_large() -> None:
    refused(two_workers(index=2), "task.index is 2, but cluster.worker has 2 addresses: it goes from 0 to 1")


@pytest.mark.row(6)
def test_negative_index() -> None:
    refused(two_workers(index=-1), "task.index is -1, but .* it goes from 0 to 1")


@pytest.mark.row(7)
def test_index_as_text() -> None:
    assert tf_config(two_workers(index="1")).worker == 1
    refused(two_workers(index="one"), "task.index is 'one', but must be a whole number")
    refused(two_workers(index=True), "task.index is True, but must be a whole number")


@pytest.mark.row(8)
def test_the_same_address_twice() -> None:
    config = {"cluster": {"chief": ["a:1"], "worker": ["b:1", "a:1"]}, "task": {"type": "chief", "index": 0}}
    refused(config, r"cluster.chief\[0\] and cluster.worker\[1\] are the same address, a:1")
    config = {"cluster": {"worker": ["a.b:1", "A.b:01"]}, "task": {"type": "worker", "index": 0}}
    refused(config, r"cluster.worker\[0\] and cluster.worker\[1\] are the same address, A.b:01")


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("a", r"cluster.worker\[0\] is 'a', but must be 'host:port'$"),
        ("a:0", r"cluster.worker\[0\] is 'a:0': ports go from 1 to 65535"),
        ("a:70000", "ports go from 1 to 65535"),
        ("a:" + "9" * 5000, "must be 'host:port'"),
        ("a,b:1", "must be 'host:port'"),
        ("-a:1", "must be 'host:port'"),
        ("a..b:1", "must be 'host:port'"),
        ("[1::2::3]:1", "must be 'host:port'"),
        ("::1:2222", "put an IPv6 address in brackets"),
        (7, r"cluster.worker\[0\] must be a text 'host:port', not a number"),
    ],
)
@pytest.mark.row(9)
def test_addresses(address: object, words: str) -> None:
    refused({"cluster": {"worker": [address]}, "task": {"type": "worker", "index": 0}}, words)


@pytest.mark.row(9)
def test_ipv6_in_brackets() -> None:
    config = {"cluster": {"worker": ["[::1]:2222", "[fe80::1]:1"]}, "task": {"type": "worker", "index": 0}}
    assert tf_config(config).addresses == ("[::1]:2222", "[fe80::1]:1")


@pytest.mark.row(10)
def test_unknown_task_and_two_chiefs() -> None:
    refused(two_workers(type="boss"), "task.type is 'boss', but must be a job of the cluster: worker")
    refused({"cluster": {"boss": ["a:1"]}, "task": {}}, "unknown job 'boss'; jobs are chief, worker, evaluator")
    config = {"cluster": {"chief": ["a:1", "b:1"]}, "task": {"type": "chief", "index": 0}}
    refused(config, "cluster.chief names 2 addresses; there is one chief")


@pytest.mark.row(11)
def test_ps_and_evaluator() -> None:
    refused({"cluster": {"ps": ["a:1"], "worker": ["b:1"]}}, "no parameter servers: remove the job 'ps'")
    config = {
        "cluster": {"worker": ["a:1", "b:1"], "evaluator": ["c:1"]},
        "task": {"type": "evaluator", "index": 0},
    }
    resolver = tf_config(config)
    assert (resolver.worker, resolver.workers) == (0, 1)
    assert resolver.task_type == "evaluator"


def worker_job(worker: int, addresses: list[str], seconds: float = 3.0) -> Job:
    return Job(
        towers=1,
        worker=worker,
        workers=len(addresses),
        addresses=tuple(addresses),
        origin="TF_CONFIG",
        startup_seconds=seconds,
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def run_agents(*configurations: Job) -> list[tuple[str, int]]:
    """Real agents at the same time, one process each; (standard error, exit code) of each in order."""
    program = [sys.executable, "-c", "print('ran')"]
    processes = [
        subprocess.Popen(agent_command(one, program), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for one in configurations
    ]
    return [(process.communicate(timeout=20)[1], process.returncode) for process in processes]


@pytest.mark.row(12)
def test_clusters_differ_between_workers() -> None:
    first, second = f"127.0.0.1:{free_port()}", "127.0.0.1:2222"
    for text, code in run_agents(worker_job(0, [first, second]), worker_job(1, [first, "127.0.0.1:3333"])):
        assert code == 1
        assert "the workers were given different clusters (worker 1 by TF_CONFIG)" in text
        assert "the address of worker 1 is 127.0.0.1:3333 for worker 1 and 127.0.0.1:2222 for worker 0" in text
        assert len(text.splitlines()) == 1
    for text, code in run_agents(worker_job(0, [first, second]), worker_job(1, [first, second, "127.0.0.1:4"])):
        assert code == 1
        assert "worker 1 knows 3 workers" in text


@pytest.mark.row(13)
def test_left_over_cluster() -> None:
    address = f"127.0.0.1:{free_port()}"
    [(text, code)] = run_agents(worker_job(1, [address, "127.0.0.1:2"], seconds=1.0))
    assert code == 1
    assert f"the chief (worker 0) did not answer at {address} within 1 s" in text
    assert "the address comes from TF_CONFIG" in text


@pytest.mark.row(14)
def test_tf_config_and_world_size_disagree() -> None:
    environ = {"TF_CONFIG": json.dumps(two_workers()), **torchrun_variables(), "WORLD_SIZE": "1"}
    with pytest.raises(ClusterError, match="TF_CONFIG says worker 0 of 2, the variables RANK.* say worker 0 of 1"):
        resolve(environ)


@pytest.mark.row(15)
def test_two_processes_claim_one_rank() -> None:
    store = HashStore()
    arguments = {
        "kind": "tower",
        "names": ["rank 0", "rank 1"],
        "origin": "a test",
        "token": "",
        "compare": lambda *_: None,
        "serves": False,
    }
    with pytest.raises(StartupError):  # the first one comes and waits for tower 1
        handshake.exchange(store, {}, index=0, deadline=time.monotonic(), **arguments)
    with pytest.raises(HandshakeError, match="tower 0 is already taken by a process on"):
        handshake.exchange(store, {}, index=0, deadline=time.monotonic() + 5, **arguments)


def torchrun_variables(**changes: str) -> dict[str, str]:
    return {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", **changes}


@pytest.mark.row(16)
def test_missing_variables_are_named_at_once() -> None:
    with pytest.raises(ClusterError, match="RANK, MASTER_ADDR, MASTER_PORT not set; start with torchrun"):
        TorchrunClusterResolver({"WORLD_SIZE": "2"})
    with pytest.raises(ClusterError, match="RANK, LOCAL_WORLD_SIZE not set"):
        TorchrunClusterResolver(torchrun_variables(LOCAL_RANK="0", RANK=""))


@pytest.mark.row(17)
def test_rank_not_below_world_size() -> None:
    with pytest.raises(ValueError, match="RANK is 2, but WORLD_SIZE is 2: it goes from 0 to 1"):
        TorchrunClusterResolver(torchrun_variables(RANK="2"))
    with pytest.raises(ValueError, match="LOCAL_RANK is 1, but LOCAL_WORLD_SIZE is 1"):
        TorchrunClusterResolver(torchrun_variables(LOCAL_RANK="1", LOCAL_WORLD_SIZE="1"))


@pytest.mark.parametrize("text", ["x", "-1", "1.0", "9" * 5000])
@pytest.mark.row(18)
def test_not_a_number(text: str) -> None:
    with pytest.raises(ClusterError, match="RANK=.* is not a whole number from 0"):
        TorchrunClusterResolver(torchrun_variables(RANK=text))


@pytest.mark.row(19)
def test_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(PortInUseError, match=rf"EADDRINUSE: 127.0.0.1:{port} \(from a test\).* is in use") as error:
            serve_store("127.0.0.1", port, timedelta(seconds=5), "a test", "")
        assert isinstance(error.value, OSError)
        [(text, code)] = run_agents(worker_job(0, [f"127.0.0.1:{port}", "127.0.0.1:2"]))
        assert code == 1
        assert f"EADDRINUSE: 127.0.0.1:{port} (from TF_CONFIG)" in text


@pytest.mark.row(20)
def test_a_worker_never_starts() -> None:
    addresses = [f"127.0.0.1:{free_port()}", "127.0.0.1:2", "127.0.0.1:3"]
    for text, code in run_agents(worker_job(0, addresses, seconds=2.0), worker_job(2, addresses, seconds=2.0)):
        assert code == 1
        assert "1 of 3 workers did not come within" in text
        assert "worker 1 (127.0.0.1:2); the list of workers was read from TF_CONFIG" in text
        assert len(text.splitlines()) == 1


@pytest.mark.row(20)
def test_a_tower_never_starts() -> None:
    program = (
        "import mirrored; mirrored.MirroredStrategy("
        "communication=mirrored.CommunicationOptions(startup_timeout_seconds=1))"
    )
    result = run_program(["-c", program], env=torchrun_variables(MASTER_PORT=str(free_port())))
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("towers.errors.StartupError: 1 of 2 towers did not come within 1 s: tower 1 (rank 1)")


@pytest.mark.row(20)
def test_something_else_answers() -> None:
    """A program of another kind has the chief's port: it takes the connection, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        addresses = [f"127.0.0.1:{server.getsockname()[1]}", "127.0.0.1:2"]
        [(text, code)] = run_agents(worker_job(1, addresses, seconds=2.0))
    assert code == 1
    assert f"what listens at {addresses[0]} does not answer as the chief (worker 0) would" in text
    assert len(text.splitlines()) == 1


@pytest.mark.row(21)
def test_no_visible_gpu() -> None:
    result = run_program(
        ["-c", "import mirrored; print(mirrored.MirroredStrategy().device)"], env={"CUDA_VISIBLE_DEVICES": ""}
    )
    assert result.stdout == "cpu\n"
    assert "mirrored: 1 tower on cpu" in result.stderr
    wanted = devices.parse_all(["cuda:0", "cuda:1"])
    with pytest.raises(ValueError, match="cuda:0, cuda:1 asked for, but this process sees no GPU"):
        devices.check_exist(wanted, gpus=0)
    with pytest.raises(ValueError, match="cuda:1 asked for, but this process sees only 1 GPU; check CUDA_VISIBLE"):
        devices.check_exist(wanted, gpus=1)


@pytest.mark.row(22)
def test_more_towers_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "count_gpus", lambda: 2)
    assert devices.for_tower(1, 2, None, "torchrun") == torch.device("cuda", 1)
    with pytest.raises(ValueError, match=r"4 towers .* \(from torchrun\), but only 2 GPUs: start at most 2"):
        devices.for_tower(0, 4, None, "torchrun")


def test_one_visible_gpu_for_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As srun --gpus-per-task=1 shows them; that they differ is checked in the handshake."""
    monkeypatch.setattr(devices, "count_gpus", lambda: 1)
    assert devices.for_tower(3, 4, None, "srun") == torch.device("cuda", 0)
    assert devices.for_tower(3, 4, [torch.device("cuda", 0)], "srun") == torch.device("cuda", 0)
    with pytest.raises(ValueError, match=r"2 towers .*, but only 1 GPU: .* devices=\['cpu:0', 'cpu:1'\]"):
        devices.for_tower(0, 2, None, "launch", sees_all=True)


@pytest.mark.parametrize("what", ["torch", "python", "mirrored"])
@pytest.mark.row(23)
def test_versions_differ(what: str) -> None:
    store = HashStore()

    def come(index: int) -> str:
        versions = {**handshake.versions(), **({what: "0.0"} if index else {})}
        with pytest.raises(HandshakeError) as refused:
            handshake.exchange(
                store,
                {"versions": versions, "host": f"h{index}"},
                kind="worker",
                index=index,
                names=["a:1", "b:1"],
                deadline=time.monotonic() + 10,
                origin="a test",
                token="",
                compare=lambda *_: pytest.fail("versions come first"),
                serves=False,
            )
        return str(refused.value)

    with ThreadPoolExecutor() as threads:
        first, second = threads.map(come, range(2))
    assert first == second
    assert "different versions: " in first
    for index, number in ((0, handshake.versions()[what]), (1, "0.0")):
        assert re.search(rf"{what} {re.escape(number)}\b[^(]* on worker {index} \(on h{index}\)", first)


def test_two_towers_on_one_gpu_are_found_before_nccl_starts() -> None:
    message = {"options": {}, "host": "h", "machine": "m", "device": "cuda:0", "gpu": "GPU-1"}
    text = compare_towers(1, message, 0, message)
    assert text.startswith("tower 1 (on h) and tower 0 (on h) use the same GPU, cuda:0")
    assert compare_towers(1, {**message, "machine": "other"}, 0, message) is None


SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[03-05]",
    "SLURM_JOB_ID": "1000",
    "SLURM_STEP_ID": "2",
}


def test_slurm_variables() -> None:
    environ = SLURM
    assert slurm.present(environ)
    topology = SlurmClusterResolver(environ).topology
    assert topology is not None
    assert (topology.index, topology.size, topology.local_index, topology.local_size) == (3, 5, 1, 2)
    assert (topology.worker, topology.workers) == (1, 3)
    assert topology.address == ("gpu03", 12000 + 7002)
    assert topology.serves_store
    with pytest.raises(ClusterError, match="SLURM_LOCALID is 2, but tasks on this node is 2"):
        SlurmClusterResolver({**environ, "SLURM_LOCALID": "2"})
    with pytest.raises(ClusterError, match="SLURM_LOCALID, SLURM_NODEID are not set"):
        SlurmClusterResolver({**environ, "SLURM_LOCALID": "", "SLURM_NODEID": ""})
    assert not slurm.present({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}), "a batch script is no task"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("SLURM_STEP_ID", "\u00b2", "SLURM_STEP_ID='\u00b2' is not a whole number"),
        ("SLURM_STEP_ID", "9" * 5000, "SLURM_STEP_ID=.* is not a whole number"),
        ("SLURM_PROCID", "\u00b2", "SLURM_PROCID='\u00b2' is not a whole number"),
        ("SLURM_PROCID", "\uff13", "SLURM_PROCID='\uff13' is not a whole number"),
        ("MASTER_PORT", "65536", "MASTER_PORT is 65536; ports go from 1 to 65535"),
        ("SLURM_STEP_NUM_TASKS", "1000001", "SLURM_STEP_NUM_TASKS is 1000001, but must be from 1 to 1000000"),
        ("SLURM_STEP_NUM_NODES", "65536", "SLURM_STEP_NUM_NODES is 65536, but SLURM_STEP_NUM_TASKS is only 5"),
        ("SLURM_STEP_TASKS_PER_NODE", "65536(x3)", "tasks on this node is 65536, but SLURM_STEP_NUM_TASKS is only 5"),
        ("SLURM_STEP_TASKS_PER_NODE", "\u00b2(x3)", "is no list of numbers of tasks"),
        ("SLURM_STEP_TASKS_PER_NODE", "\uff12(x3)", "is no list of numbers of tasks"),
        ("SLURM_STEP_TASKS_PER_NODE", "2(x1000000000)", "is no list of numbers of tasks"),
        ("SLURM_STEP_TASKS_PER_NODE", "1(x999999999)", "SLURM_LOCALID is 1, but tasks on this node is 1"),
        ("SLURM_STEP_TASKS_PER_NODE", "2,,", "is no list of numbers of tasks"),
        ("SLURM_STEP_TASKS_PER_NODE", "2", "is of 1 nodes, but this is node 1"),
        ("SLURM_STEP_TASKS_PER_NODE", "2(x0),2", "is of 1 nodes, but this is node 1"),
        ("SLURM_STEP_TASKS_PER_NODE", "2(x\u00b2)", "is no list of numbers of tasks"),
    ],
)
def test_wrong_slurm_variables_are_named(name: str, value: str, words: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ClusterError, match=words) as caught:
            SlurmClusterResolver({**SLURM, name: value})
        assert tracemalloc.get_traced_memory()[1] < 2**20, "it takes no memory"
    finally:
        tracemalloc.stop()
    assert str(caught.value).startswith("SLURM's variables: ")


def test_a_run_of_a_billion_nodes_is_counted_at_once() -> None:
    topology = SlurmClusterResolver({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(x999999999)"}).topology
    assert topology is not None
    assert topology.local_size == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"WORLD_SIZE": "1000000000000"}, "WORLD_SIZE is 1000000000000, but must be from 1 to 1000000"),
        ({"RANK": "\u00b2"}, "RANK='\u00b2' is not a whole number"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT is 65536; ports go from 1 to 65535"),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "65536"}, "LOCAL_WORLD_SIZE is 65536, but WORLD_SIZE is only 2"),
        (
            {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1000000000"},
            "GROUP_WORLD_SIZE is 1000000000, but WORLD_SIZE is only 2",
        ),
        ({"TORCHELASTIC_RESTART_COUNT": "\u00b2"}, "TORCHELASTIC_RESTART_COUNT='\u00b2' is not a whole number"),
    ],
)
def test_absurd_numbers_of_torchruns_variables_are_named(changes: dict[str, str], words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        TorchrunClusterResolver(torchrun_variables(**changes))


@pytest.mark.parametrize("stated", ["\u00b2", "9" * 5000, "-1", "4,2"])
def test_a_number_of_threads_that_is_none_is_left_to_openmp(stated: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", stated)
    assert machine.share_out_threads(2) == f"{before} thread{'s' if before > 1 else ''} each"
    assert list(check_cores({"OMP_NUM_THREADS": stated}))


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [("a", "a"), ("a,b", "a"), ("gpu[03-05,9],x1", "gpu03"), ("r[1,2]n[7-8]", "r1n7"), ("n-a[10]", "n-a10")],
)
def test_first_slurm_host(nodelist: str, host: str) -> None:
    assert slurm.first_host(nodelist) == host


def test_explicit_devices_that_contradict_the_launcher() -> None:
    with pytest.raises(ValueError, match=r"devices names 1 \(cpu:0\), but 2 towers were started .* \(from torchrun\)"):
        devices.for_tower(0, 2, ["cpu:0"], "torchrun")


def test_devices() -> None:
    assert [str(d) for d in devices.parse_all(["/gpu:1", "GPU:0", "cuda:2", "/device:GPU:3"])] == [
        "cuda:1",
        "cuda:0",
        "cuda:2",
        "cuda:3",
    ]
    for wrong, words in (
        (["cpu", "cpu"], "cpu:0 more than once"),
        (["cpu:0", "cuda:0"], "mixes CPUs and GPUs"),
        (["tpu:0"], "device 'tpu:0' is not understood"),
        ([], "devices is empty"),
    ):
        with pytest.raises(ValueError, match=words):
            devices.parse_all(wrong)
    with pytest.raises(TypeError, match="must be a list of devices"):
        mirrored.MirroredStrategy("cpu:0")
    with pytest.raises(TypeError, match="must be a list of devices, such as .* not 2"):
        mirrored.MirroredStrategy(2)  # type: ignore[arg-type]


def test_options_are_checked() -> None:
    for field, value in (("bucket_bytes", 1.5), ("bucket_bytes", True), ("timeout_seconds", float("inf"))):
        with pytest.raises(ValueError, match=f"{field} is .* but must be a positive"):
            mirrored.CommunicationOptions(**{field: value})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="wire_dtype is 'float8', but must be one of same, bfloat16"):
        mirrored.CommunicationOptions(wire_dtype="float8")


def test_a_chief_address_that_cannot_be_resolved() -> None:
    with pytest.raises(StartupError, match=r"no-such-host.invalid:1 \(from a test\) cannot be resolved"):
        serve_store("no-such-host.invalid", 1, timedelta(seconds=5), "a test", "")


@pytest.mark.skipif(not PROC_NET_TCP.exists(), reason="reads Linux's table of sockets")
def test_the_store_listens_on_its_address_only() -> None:
    store = serve_store("127.0.0.1", 0, timedelta(seconds=5), "a test", "")
    table = [line.split() for line in PROC_NET_TCP.read_text().splitlines()[1:]]
    listening = [local for _, local, _, state, *_ in table if state == "0A" and local.endswith(f":{store.port:04X}")]
    assert listening == [f"0100007F:{store.port:04X}"]


def test_a_chief_whose_address_is_another_machines_says_so_at_once(tmp_path: pathlib.Path) -> None:
    """192.0.2.0/24 is for documentation: nobody has such an address."""
    config = {"cluster": {"worker": ["192.0.2.7:2222", "127.0.0.1:2223"]}, "task": {"type": "worker", "index": 0}}
    script = tmp_path / "script.py"
    options = "mirrored.CommunicationOptions(startup_timeout_seconds=3)"
    script.write_text(f"import mirrored; mirrored.MultiWorkerMirroredStrategy(communication={options})")
    result = run_program([str(script)], env={"TF_CONFIG": json.dumps(config)})
    assert result.returncode == 1
    doubt = "the address of worker 0, 192.0.2.7:2222 (from TF_CONFIG), does not lead to this machine, which is worker 0"
    said = result.stderr.splitlines()
    assert f"towers: {doubt}: no other worker will find it there" in said
    assert said[-1].endswith(doubt)


def test_two_spellings_of_one_address_are_one() -> None:
    for one, other in (("[::1]:5", "[0:0:0::1]:5"), ("Host:5", "host:5"), ("localhost:5", "127.0.0.1:5")):
        config = {"cluster": {"worker": [one, other]}, "task": {"type": "worker", "index": 0}}
        refused(config, r"cluster.worker\[0\] and cluster.worker\[1\] are the same address")
        assert rendezvous.compare_clusters(0, message_of(one), 1, message_of(other)) is None


def message_of(address: str) -> dict[str, object]:
    return {"origin": "TF_CONFIG", "addresses": [address, "b:2"]}
