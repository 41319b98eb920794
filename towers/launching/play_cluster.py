"""Plays a TF_CONFIG cluster on this machine: starts a script once per worker, each with its own TF_CONFIG.

The first worker has the terminal, the others' lines come behind their name. GPUs are shared out among the
workers; without enough of them, and on the CPU, each worker is one CPU tower.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Sequence

from towers.launching import console
from towers.system import devices, machine
from towers.system.timeouts import clock


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
    """Run ``program``, a whole command, as that many workers to their end; returns the largest exit code."""
    ports = reserve_ports(workers)  # as long as this function runs
    addresses = [f"127.0.0.1:{port.getsockname()[1]}" for port in ports]
    with console.Relay() as relay:
        jobs: list[subprocess.Popen[bytes]] = []
        for index in range(workers):
            streams: list[int] = []
            if index:
                pipes = [relay.prefixed(stream, f"worker {index}") for stream in ("stdout", "stderr")]
                streams = [os.open(pipe, os.O_WRONLY) for pipe in pipes]
            stdout, stderr = streams or (None, None)
            jobs.append(subprocess.Popen(program, env=_environment(index, addresses), stdout=stdout, stderr=stderr))
            for number in streams:
                os.close(number)
        try:
            while any(job.poll() is None for job in jobs):
                clock.sleep(0.05)
                if any(job.poll() for job in jobs):
                    break
            return max(abs(job.wait(timeout=10)) for job in jobs)
        except subprocess.TimeoutExpired:
            return 1
        except KeyboardInterrupt:
            return 130
        finally:
            for job in jobs:
                job.terminate()  # does nothing to one that has ended
            for job in jobs:
                job.wait()
