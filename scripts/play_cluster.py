"""Plays a TF_CONFIG cluster on this machine: starts a script once per worker, each with its own TF_CONFIG.

The first worker has the terminal, the others' lines come behind their name. GPUs are shared out among the
workers; without enough of them, and on the CPU, each worker is one CPU tower.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time

import torch

from towers import console, machine


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on at this moment."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def environment(index: int, addresses: list[str]) -> dict[str, str]:
    """What worker ``index`` finds in its environment."""
    config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
    gpus = torch.cuda.device_count() // len(addresses)
    visible = ",".join(str(index * gpus + i) for i in range(gpus))
    variables = {**os.environ, "TF_CONFIG": json.dumps(config), "CUDA_VISIBLE_DEVICES": visible}
    variables.setdefault("OMP_NUM_THREADS", str(machine.threads_per_tower(len(addresses))))
    return variables


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/two_workers", description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("script")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="ARGUMENT")
    options = parser.parse_args()
    if options.workers < 1:
        parser.error(f"--workers is {options.workers}, but must be at least 1")
    addresses = [f"127.0.0.1:{port}" for port in free_ports(options.workers)]
    command = [sys.executable, options.script, *options.rest]
    with console.Relay() as relay:
        workers = []
        for index in range(options.workers):
            streams = {}
            if index:
                for stream in ("stdout", "stderr"):
                    sink = console.PrefixedLines(f"[worker {index}] ", console.standard(stream))
                    streams[stream] = os.open(relay.pipe(f"{stream}{index}", sink), os.O_WRONLY)
            workers.append(subprocess.Popen(command, env=environment(index, addresses), **streams))
            for number in streams.values():
                os.close(number)
        try:
            while any(worker.poll() is None for worker in workers):
                time.sleep(0.05)
                if any(worker.poll() for worker in workers):
                    break
            return max(abs(worker.wait(timeout=10)) for worker in workers)
        except subprocess.TimeoutExpired:
            return 1
        except KeyboardInterrupt:
            return 130
        finally:
            for worker in workers:
                if worker.poll() is None:
                    worker.terminate()
            for worker in workers:
                worker.wait()


if __name__ == "__main__":
    sys.exit(main())
