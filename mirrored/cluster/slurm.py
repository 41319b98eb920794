"""Towers that ``srun`` starts, one per task."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from mirrored.cluster.resolver import ClusterError, ClusterResolver, Numbers
from towers.topology import JOB_TOKEN, Topology

_FIRST_PORT = 12000
_PORTS = 16000
_ON_NODE = "the number of tasks on this node"


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


def present(environ: Mapping[str, str]) -> bool:
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
