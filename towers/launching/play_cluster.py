"""Plays a TF_CONFIG cluster on this machine: starts a script once per worker, each with its own TF_CONFIG.

The first worker has the terminal, the others' lines come behind their name. GPUs are shared out among the
workers; without enough of them, and on the CPU, each worker is one CPU tower.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Sequence

from towers.launching import console
from towers.launching.attempt import Attempt, unhandled
from towers.system import devices, machine

_GRACE = 10.0  # seconds in which the other workers end, once one has failed


def reserve_ports(count: int) -> list[socket.socket]:
    """Sockets with loopback ports that the system gives to nobody else while they are open.

    Linux lets another socket listen on such a port when both have SO_REUSEADDR and this one does not listen.
    """
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(("127.0.0.1", 0))
    return sockets


def _environment(index: int, addresses: list[str]) -> dict[str, str]:
    """What worker ``index`` finds in its environment."""
    config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
    count = devices.count_of("cuda")
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    gpus = count // len(addresses)
    visible = ",".join(names[index * gpus : (index + 1) * gpus])
    variables = {**os.environ, "TF_CONFIG": json.dumps(config), "CUDA_VISIBLE_DEVICES": visible}
    variables.setdefault("OMP_NUM_THREADS", str(machine.threads_per_tower(len(addresses))))
    return variables


def play(program: Sequence[str], workers: int) -> int:
    """Run ``program``, a full command line, as that many workers to their end; returns the largest exit code."""
    ports = reserve_ports(workers)  # as long as this function runs
    addresses = [f"127.0.0.1:{port.getsockname()[1]}" for port in ports]
    with console.Relay() as relay:
        attempt = Attempt(relay.directory, grace=_GRACE)
        restore = attempt.forward(unhandled(signal.SIGTERM))
        jobs: list[subprocess.Popen[bytes]] = []
        try:
            for index in range(workers):
                with contextlib.ExitStack() as opened:
                    stdout, stderr = (
                        opened.enter_context(open(relay.prefixed(stream, f"worker {index}"), "wb")) if index else None
                        for stream in ("stdout", "stderr")
                    )
                    variables = _environment(index, addresses)
                    jobs.append(subprocess.Popen(program, env=variables, stdout=stdout, stderr=stderr))
                attempt.processes[index] = jobs[-1].pid
            attempt.wait()
        except KeyboardInterrupt:
            return 130
        finally:
            attempt.end()
            restore()
            for job in jobs:
                job.wait()
    if (signal_number := attempt.died_of_forwarded) is not None:
        os.kill(os.getpid(), signal_number)
    codes = attempt.endings.values()
    return max(map(abs, codes)) if len(codes) == workers else 1
