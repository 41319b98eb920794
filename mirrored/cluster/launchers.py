"""Reads the variables of launchers: torchrun's, ``srun``'s, and those that list the hosts of a TPU slice."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from mirrored.cluster.resolver import ClusterError, ClusterResolver, Numbers
from towers.topology import JOB_TOKEN, RUN_ID, STARTED_BY, Topology

_FIRST_PORT = 12000
_PORTS = 16000
_ON_NODE = "the number of tasks on this node"

REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class TorchrunClusterResolver(ClusterResolver):
    """Reads RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, LOCAL_RANK and LOCAL_WORLD_SIZE.

    The last two may both be absent (one process per machine, as Kubeflow's PyTorchJob starts them).

    Raises:
        ClusterError: variables are missing (one message names all of them), are not numbers, or contradict each other.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        by_torchrun = RUN_ID in environ
        started_by = environ.get(STARTED_BY) or ("torchrun" if by_torchrun else "RANK and WORLD_SIZE")
        self.origin = "torchrun's variables" if by_torchrun else "the variables RANK, WORLD_SIZE, …"
        if started_by.startswith("mirrored "):
            self.origin = started_by
        missing = [name for name in REQUIRED if not environ.get(name)]
        local = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
        if any(environ.get(name) for name in local):
            missing += [name for name in local if not environ.get(name)]
        if missing:
            raise ClusterError(
                f"{self.origin}: {', '.join(missing)} not set; start with torchrun, which sets all of "
                f"{', '.join(REQUIRED + local)}, or set the missing ones"
            )
        towers = environ.get("PET_NPROC_PER_NODE", "1")
        if towers.isdecimal() and towers != "1" and not environ.get("LOCAL_RANK"):
            raise ClusterError(
                f"{self.origin}: PET_NPROC_PER_NODE is {towers}, so RANK counts machines and WORLD_SIZE towers, as "
                "Kubeflow sets them for torchrun: put torchrun in place of python"
            )
        number = Numbers(environ, self.origin)
        number.read("RANK", "WORLD_SIZE", "MASTER_PORT")
        index, size = number["RANK"], number["WORLD_SIZE"]
        local_index, local_size = number.optional("LOCAL_RANK"), number.optional("LOCAL_WORLD_SIZE", 1)
        number.check_index("RANK", "WORLD_SIZE")
        number.check_index("LOCAL_RANK", "LOCAL_WORLD_SIZE")
        number.check_at_most("LOCAL_WORLD_SIZE", "WORLD_SIZE")
        number.check_at_most("LOCAL_RANK", "RANK")
        number.check_port("MASTER_PORT")
        self.worker, self.workers = index // local_size, -(-size // local_size)
        if environ.get("GROUP_RANK") and environ.get("GROUP_WORLD_SIZE"):
            number.read("GROUP_RANK", "GROUP_WORLD_SIZE")
            number.check_at_most("GROUP_WORLD_SIZE", "WORLD_SIZE")
            number.check_index("GROUP_RANK", "GROUP_WORLD_SIZE")
            self.worker, self.workers = number["GROUP_RANK"], number["GROUP_WORLD_SIZE"]
        self.task_id = self.worker
        # The agents of mirrored's workers have different run ids. All agents of torchrun have the same run id.
        run_id = "" if environ.get(STARTED_BY) else environ.get(RUN_ID, "")
        self.topology = Topology(
            index=index,
            size=size,
            local_index=local_index,
            local_size=local_size,
            worker=self.worker,
            workers=self.workers,
            started_by=started_by,
            address=(environ["MASTER_ADDR"], number["MASTER_PORT"]),
            chief_serves=environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            attempt=number.optional("TORCHELASTIC_RESTART_COUNT"),
            origin=self.origin,
            token=environ.get(JOB_TOKEN) or run_id,
        )


def torchrun_is_present(environ: Mapping[str, str]) -> bool:
    """Returns whether torchrun, or another launcher with its variables, has set RANK or WORLD_SIZE."""
    return bool(environ.get("RANK") or environ.get("WORLD_SIZE"))


class SlurmClusterResolver(ClusterResolver):
    """Reads the variables that ``srun`` sets for each task: SLURM_PROCID, SLURM_LOCALID, SLURM_STEP_NUM_TASKS, …

    The towers connect to the first node of the step. MASTER_ADDR is its address, by default the node's name.
    MASTER_PORT is the port, by default a port from 12000 to 27999 that depends on the job's and the step's number.

    Raises:
        ClusterError: a variable is missing or contradicts another.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        self.origin = "SLURM's variables"
        number = Numbers(environ, self.origin)
        number.read(
            "SLURM_PROCID",
            "SLURM_STEP_NUM_TASKS",
            "SLURM_LOCALID",
            "SLURM_NODEID",
            "SLURM_STEP_NUM_NODES",
            "SLURM_JOB_ID",
        )
        number.check_index("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
        number.check_index("SLURM_NODEID", "SLURM_STEP_NUM_NODES")
        number.check_at_most("SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS")
        number[_ON_NODE] = _tasks_on_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""), number)
        number.check_at_most(_ON_NODE, "SLURM_STEP_NUM_TASKS")
        number.check_index("SLURM_LOCALID", _ON_NODE)
        offset = number["SLURM_JOB_ID"] * 7 + number.optional("SLURM_STEP_ID")
        port = number.optional("MASTER_PORT", _FIRST_PORT + offset % _PORTS)
        number.check_port("MASTER_PORT")
        host = environ.get("MASTER_ADDR") or first_host(environ.get("SLURM_STEP_NODELIST", ""))
        self.worker, self.workers = number["SLURM_NODEID"], number["SLURM_STEP_NUM_NODES"]
        self.task_id = self.worker
        self.topology = Topology(
            index=number["SLURM_PROCID"],
            size=number["SLURM_STEP_NUM_TASKS"],
            local_index=number["SLURM_LOCALID"],
            local_size=number[_ON_NODE],
            worker=self.worker,
            workers=self.workers,
            started_by="srun",
            address=(host, port),
            chief_serves=True,
            attempt=number.optional("SLURM_RESTART_COUNT"),
            origin=self.origin,
            token=environ.get(JOB_TOKEN, ""),
        )


def srun_is_present(environ: Mapping[str, str]) -> bool:
    """Returns whether this process is a task of ``srun``. A batch script or a shell in an allocation is not a task."""
    return bool(environ.get("SLURM_STEP_NUM_TASKS") and environ.get("SLURM_PROCID"))


def first_host(nodelist: str) -> str:
    """Returns the first host of SLURM's compressed list: ``"gpu[03-05,9],x1"`` → ``"gpu03"``.

    Raises:
        ClusterError: the list is empty.
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodelist.strip())
    if first is None:
        raise ClusterError("SLURM's variables: SLURM_STEP_NODELIST names no host; set MASTER_ADDR")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])


def _tasks_on_node(text: str, number: Numbers) -> int:
    """Returns the number of tasks on this node.

    ``"2(x3),1"`` is two tasks on each of the first three nodes, and one on the fourth. If the list is not set, tasks
    are split evenly.

    Raises:
        ClusterError: ``text`` is not such a list, or does not include this node.
    """
    node, before = number["SLURM_NODEID"], 0
    if not text.strip():
        return -(-number["SLURM_STEP_NUM_TASKS"] // number["SLURM_STEP_NUM_NODES"])
    stated = f"SLURM_STEP_TASKS_PER_NODE={text[:60]!r} is"
    for group in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", group.strip())
        if match is None:
            raise number.error(f"{stated} not a list of numbers of tasks, such as '2(x3),1'")
        before += int(match[2] or 1)
        if node < before:
            return int(match[1])
    raise number.error(f"{stated} of {before} nodes, but this is node {node}")


class TPUClusterResolver(ClusterResolver):
    """Reads TPU_WORKER_HOSTNAMES, and this host's index in it: NODE_RANK, TPU_WORKER_ID or JOB_COMPLETION_INDEX.

    The towers of all hosts connect to the first host, on port MASTER_PORT or 29500. With fewer than two names, the
    cluster is this host only.

    Raises:
        ClusterError: the index is missing or not below the number of hosts, or the port is invalid.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self.origin = "TPU_WORKER_HOSTNAMES"
        hosts = list(filter(None, environ.get(self.origin, "").split(",")))
        if len(hosts) > 1:
            number = Numbers(environ, self.origin)
            index = next(filter(environ.get, ("NODE_RANK", "TPU_WORKER_ID", "JOB_COMPLETION_INDEX")), "TPU_WORKER_ID")
            number.read(index)
            number["its number of hosts"] = self.workers = len(hosts)
            number.check_index(index, "its number of hosts")
            self.worker = self.task_id = number[index]
            number.optional("MASTER_PORT", 29500)
            number.check_port("MASTER_PORT")
            self.addresses = tuple(f"{host}:{number['MASTER_PORT']}" for host in hosts)
