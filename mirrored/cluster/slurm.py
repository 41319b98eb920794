"""Towers started by ``srun``: one per task."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from mirrored.cluster.resolver import (
    ClusterError,
    ClusterResolver,
    check_at_most,
    check_index,
    check_port,
    read_optional,
    read_whole_numbers,
)
from towers.topology import JOB_TOKEN, Topology

_FIRST_PORT = 12000
_PORTS = 16000


class SlurmClusterResolver(ClusterResolver):
    """Reads what ``srun`` gives each task: SLURM_PROCID, SLURM_LOCALID, SLURM_STEP_NUM_TASKS, …

    The towers meet on the first node of the step, at MASTER_ADDR and MASTER_PORT where those are set, else at
    that node's name and a port made from the job's and the step's number (12000 to 27999).

    Raises:
        ClusterError: a variable is missing or contradicts another.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        self.origin = "SLURM's variables"
        names = [
            "SLURM_PROCID",
            "SLURM_STEP_NUM_TASKS",
            "SLURM_LOCALID",
            "SLURM_NODEID",
            "SLURM_STEP_NUM_NODES",
        ]
        number = read_whole_numbers(environ, [*names, "SLURM_JOB_ID"], self.origin)
        index, size = number["SLURM_PROCID"], number["SLURM_STEP_NUM_TASKS"]
        self.worker, self.workers = number["SLURM_NODEID"], number["SLURM_STEP_NUM_NODES"]
        self.task_id = self.worker
        check_index("SLURM_PROCID", index, "SLURM_STEP_NUM_TASKS", size, self.origin)
        check_index("SLURM_NODEID", self.worker, "SLURM_STEP_NUM_NODES", self.workers, self.origin)
        check_at_most("SLURM_STEP_NUM_NODES", self.workers, "SLURM_STEP_NUM_TASKS", size, self.origin)
        local_size = _tasks_on_node(environ, self.worker, size, self.workers, self.origin)
        check_at_most("tasks on this node", local_size, "SLURM_STEP_NUM_TASKS", size, self.origin)
        check_index("SLURM_LOCALID", number["SLURM_LOCALID"], "tasks on this node", local_size, self.origin)
        offset = number["SLURM_JOB_ID"] * 7 + read_optional(environ, "SLURM_STEP_ID", self.origin)
        port = read_optional(environ, "MASTER_PORT", self.origin, _FIRST_PORT + offset % _PORTS)
        check_port("MASTER_PORT", port, self.origin)
        host = environ.get("MASTER_ADDR") or first_host(environ.get("SLURM_STEP_NODELIST", ""))
        self.topology = Topology(
            index=index,
            size=size,
            local_index=number["SLURM_LOCALID"],
            local_size=local_size,
            worker=self.worker,
            workers=self.workers,
            started_by="srun",
            address=(host, port),
            serves_store=True,
            attempt=read_optional(environ, "SLURM_RESTART_COUNT", self.origin),
            origin=self.origin,
            token=environ.get(JOB_TOKEN, ""),
        )


def present(environ: Mapping[str, str]) -> bool:
    """Whether this process is a task of ``srun`` (a batch script or a shell in an allocation is none)."""
    return bool(environ.get("SLURM_STEP_NUM_TASKS") and environ.get("SLURM_PROCID"))


def first_host(nodelist: str) -> str:
    """The first host of SLURM's compressed list: ``"gpu[03-05,9],x1"`` → ``"gpu03"``.

    Raises:
        ClusterError: the list is empty.
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodelist.strip())
    if first is None:
        raise ClusterError("SLURM's variables: SLURM_STEP_NODELIST names no host; set MASTER_ADDR")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])


def _tasks_on_node(environ: Mapping[str, str], node: int, size: int, nodes: int, origin: str) -> int:
    """From ``"2(x3),1"``: two tasks on the first three nodes, one on the fourth; shared out evenly where it is not set.

    Raises:
        ClusterError: it is no such list, or does not reach to this node.
    """
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    if not text.strip():
        return -(-size // nodes)
    before = 0
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part.strip())
        if match is None:
            raise ClusterError(
                f"{origin}: SLURM_STEP_TASKS_PER_NODE={text[:60]!r} is no list of numbers of tasks, such as '2(x3),1'"
            )
        before += int(match[2] or 1)
        if node < before:
            return int(match[1])
    raise ClusterError(
        f"{origin}: SLURM_STEP_TASKS_PER_NODE={text[:60]!r} is of {before} nodes, but this is node {node}"
    )
