"""Clusters that tests simulate on this machine: free ports, and the variables that launchers set."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence

from tests.support.programs import Program, start_program
from towers.launching.job import Job
from towers.launching.starting.simulate_cluster import reserve_ports

_reserved: list[socket.socket] = []
"""The sockets that keep the ports of this process's tests from everybody else, to its end."""


def free_ports(count: int) -> list[int]:
    """Ports on which only those listen whom a test gives them to."""
    sockets = reserve_ports(count)
    _reserved.extend(sockets)
    return [one.getsockname()[1] for one in sockets]


def free_port() -> int:
    """As :func:`free_ports`."""
    return free_ports(1)[0]


def tf_configs(addresses: Sequence[str]) -> list[str]:
    """``TF_CONFIG`` of each worker."""
    return [
        json.dumps({"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": index}})
        for index in range(len(addresses))
    ]


def start_workers(*words: str, count: int = 2) -> list[Program]:
    """Start the agents that one program becomes as the workers of a TF_CONFIG cluster, each with one tower."""
    addresses = tuple(f"127.0.0.1:{port}" for port in free_ports(count))
    return [
        start_agent(Job(1, index, count, addresses, "TF_CONFIG"), *words, TF_CONFIG=config)
        for index, config in enumerate(tf_configs(addresses))
    ]


def start_agent(job: Job, *words: str, **variables: str) -> Program:
    """Start the agent of a worker, whose towers run Python with ``words``."""
    return start_program(["-m", "tests.support.started", "agent", job.to_json(), *words], env=variables, fork=True)


def srun_variables(task: int) -> dict[str, str]:
    """The variables that srun gives to one of two tasks on this machine."""
    return {
        "SLURM_PROCID": str(task),
        "SLURM_LOCALID": str(task),
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
    }


def torchrun_variables(**changes: str) -> dict[str, str]:
    """The variables that torchrun gives to the first of two towers, and changes of them."""
    return {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", **changes}
