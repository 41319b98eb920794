"""The variables of torchrun and SLURM, right and wrong."""

from __future__ import annotations

import tracemalloc

import pytest
import torch

from mirrored import ClusterError, SlurmClusterResolver, TorchrunClusterResolver
from mirrored.cluster import launchers
from mirrored.doctor.resources import check_cores
from tests.support.clusters import torchrun_variables
from towers.system import machine


@pytest.mark.row(16)
def test_missing_variables_are_named_at_once() -> None:
    with pytest.raises(ClusterError, match="RANK, MASTER_ADDR, MASTER_PORT not set; start with torchrun"):
        TorchrunClusterResolver({"WORLD_SIZE": "2"})
    with pytest.raises(ClusterError, match="RANK, LOCAL_WORLD_SIZE not set"):
        TorchrunClusterResolver(torchrun_variables(LOCAL_RANK="0", RANK=""))


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
    assert launchers.srun_is_present(environ)
    topology = SlurmClusterResolver(environ).topology
    assert (topology.index, topology.size, topology.local_index, topology.local_size) == (3, 5, 1, 2)
    assert (topology.worker, topology.workers) == (1, 3)
    assert topology.address == ("gpu03", 12000 + 7002)
    assert topology.chief_serves
    with pytest.raises(ClusterError, match="SLURM_LOCALID, SLURM_NODEID are not set"):
        SlurmClusterResolver({**environ, "SLURM_LOCALID": "", "SLURM_NODEID": ""})
    assert not launchers.srun_is_present({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}), "a batch script is no task"


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
        (
            "SLURM_STEP_TASKS_PER_NODE",
            "65536(x3)",
            "the number of tasks on this node is 65536, but SLURM_STEP_NUM_TASKS is only 5",
        ),
        ("SLURM_STEP_TASKS_PER_NODE", "\u00b2(x3)", "is not a list of numbers of tasks"),
        ("SLURM_STEP_TASKS_PER_NODE", "\uff12(x3)", "is not a list of numbers of tasks"),
        ("SLURM_STEP_TASKS_PER_NODE", "2(x1000000000)", "is not a list of numbers of tasks"),
        ("SLURM_STEP_TASKS_PER_NODE", "1(x999999999)", "SLURM_LOCALID is 1, but the number of tasks on this node is 1"),
        ("SLURM_STEP_TASKS_PER_NODE", "2,,", "is not a list of numbers of tasks"),
        ("SLURM_STEP_TASKS_PER_NODE", "2", "is of 1 nodes, but this is node 1"),
        ("SLURM_STEP_TASKS_PER_NODE", "2(x0),2", "is of 1 nodes, but this is node 1"),
        ("SLURM_STEP_TASKS_PER_NODE", "2(x\u00b2)", "is not a list of numbers of tasks"),
        ("SLURM_LOCALID", "2", "SLURM_LOCALID is 2, but the number of tasks on this node is 2"),
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
    assert topology.local_size == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"WORLD_SIZE": "1000000000000"}, "WORLD_SIZE is 1000000000000, but must be from 1 to 1000000"),
        ({"RANK": "\u00b2"}, "RANK='\u00b2' is not a whole number"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT is 65536; ports go from 1 to 65535"),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "65536"}, "LOCAL_WORLD_SIZE is 65536, but WORLD_SIZE is only 2"),
        ({"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1000000000"}, "GROUP_WORLD_SIZE is 10{9}, but WORLD_SIZE is only 2"),
        ({"TORCHELASTIC_RESTART_COUNT": "\u00b2"}, "TORCHELASTIC_RESTART_COUNT='\u00b2' is not a whole number"),
        ({"RANK": "2"}, "RANK is 2, but WORLD_SIZE is 2: it goes from 0 to 1"),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK is 1, but LOCAL_WORLD_SIZE is 1"),
        *(({"RANK": text}, "RANK=.* is not a whole number from 0") for text in ("x", "-1", "1.0", "9" * 5000)),
    ],
)
@pytest.mark.row(17, 18)
def test_wrong_numbers_of_torchruns_variables_are_named(changes: dict[str, str], words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        TorchrunClusterResolver(torchrun_variables(**changes))


@pytest.mark.parametrize("stated", ["\u00b2", "9" * 5000, "-1", "4,2"])
def test_a_number_of_threads_that_is_none_is_left_to_openmp(stated: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", stated)
    assert machine.divide_threads(2) == f"{before} thread{'s' if before > 1 else ''} each"
    assert list(check_cores({"OMP_NUM_THREADS": stated}))


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [("a", "a"), ("a,b", "a"), ("gpu[03-05,9],x1", "gpu03"), ("r[1,2]n[7-8]", "r1n7"), ("n-a[10]", "n-a10")],
)
def test_first_slurm_host(nodelist: str, host: str) -> None:
    assert launchers.first_host(nodelist) == host
