"""Simulates a TF_CONFIG cluster on this machine: starts a script once per task, each with its own TF_CONFIG.

The first task keeps the terminal; the lines of other tasks are printed with the task's name as prefix. If the output is
a file or a pipe, the first task's lines are whole, too (:meth:`towers.launching.console.Relay.outputs`). GPUs are split
among the workers. Without enough GPUs, and on the CPU, each worker is one CPU tower. With parameter servers, the first
task is the chief, and the tasks share their own secret.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Sequence

from towers.launching import console
from towers.launching.supervising.attempt import Attempt, see_children_end, unhandled
from towers.system import devices, machine
from towers.topology import JOB_TOKEN

_GRACE = 10.0  # seconds for the other workers to end, after one has failed


def reserve_ports(count: int) -> list[socket.socket]:
    """Returns sockets with ports that the system assigns to no other process while they are open.

    They are bound to all addresses, because a connection that uses a port at one address would prevent a server, such
    as Ray's, from listening on this port at all of them. Linux lets another socket listen on such a port if both have
    SO_REUSEADDR and this one does not listen.
    """
    dual = socket.has_dualstack_ipv6()
    sockets = [socket.socket(socket.AF_INET6 if dual else socket.AF_INET) for _ in range(count)]
    for one in sockets:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if dual:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        one.bind(("", 0))
    return sockets


def _environment(cluster: dict[str, list[str]], job: str, index: int) -> dict[str, str]:
    """Returns a task's environment variables."""
    config = {"cluster": cluster, "task": {"type": job, "index": index}}
    count, workers = devices.count_of("cuda"), len(cluster["worker"])
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    gpus = count // workers if job == "worker" else 0
    visible = ",".join(names[index * gpus : (index + 1) * gpus])
    variables = {**os.environ, "TF_CONFIG": json.dumps(config), "CUDA_VISIBLE_DEVICES": visible}
    machine.set_default_threads(variables, workers)
    return variables


def simulate(program: Sequence[str], workers: int, servers: int = 0) -> int:
    """Runs ``program``, a full command line, once per worker to the end, and returns the largest exit code.

    Args:
        workers: the number of workers.
        servers: the number of parameter servers. If there are any, there is a chief, too.
    """
    see_children_end()
    jobs = {"chief": 1, "worker": workers, "ps": servers} if servers else {"worker": workers}
    tasks = [(job, index) for job, count in jobs.items() for index in range(count)]
    ports = reserve_ports(len(tasks))  # reserved as long as this function runs
    addresses = iter([f"127.0.0.1:{port.getsockname()[1]}" for port in ports])
    cluster = {job: [next(addresses) for _ in range(count)] for job, count in jobs.items()}
    if servers:
        os.environ.setdefault(JOB_TOKEN, secrets.token_hex())
    with console.Relay() as relay:
        attempt = Attempt(relay.directory, grace=_GRACE)
        restore = attempt.forward(unhandled(signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for job, index in tasks:
                with contextlib.ExitStack() as opened:
                    name = f"{job} {index}"
                    paths = (
                        [relay.prefixed(s, name) for s in ("stdout", "stderr")] if processes else relay.outputs(name)
                    )
                    stdout, stderr = (opened.enter_context(open(path, "wb")) if path else None for path in paths)
                    env = _environment(cluster, job, index)
                    # In its own session: otherwise it would receive a terminal's signal twice, directly and forwarded.
                    process = subprocess.Popen(
                        program,
                        env=env,
                        stdout=stdout,
                        stderr=stderr,
                        start_new_session=True,
                        preexec_fn=machine.end_with_parent,
                    )
                    processes.append(process)
                attempt.processes[len(processes) - 1] = processes[-1].pid
            attempt.wait()
        except KeyboardInterrupt:
            return 130
        finally:
            attempt.end()
            restore()
            for process in processes:
                process.wait()
    if (signal_number := attempt.died_of_forwarded) is not None:
        signal.signal(signal_number, signal.SIG_DFL)
        os.kill(os.getpid(), signal_number)
    codes = attempt.endings.values()
    return max(map(abs, codes)) if len(codes) == len(tasks) else 1
