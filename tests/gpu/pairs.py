"""Two NCCL ranks on one GPU, for what they compute and never for how fast."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from tests.support.clusters import free_port
from tests.support.jobs import ROOT


def run_pair(words: list[str], limit: float = 120.0) -> list[Any]:
    """What a program prints last, as JSON, on two ranks on one GPU, which NCCL takes for two hosts: never for speed.

    A rank that has lost the other would spin in NCCL: five seconds after a rank has failed, the other is ended.
    """
    common = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_NET": "Socket",
        "NCCL_IB_DISABLE": "1",
        "PYTHONPATH": str(ROOT),
    }
    processes: list[subprocess.Popen[str]] = []
    with contextlib.ExitStack() as opened:
        files = [[opened.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)] for _ in range(2)]
        try:
            for rank, (out, err) in enumerate(files):
                variables = {**os.environ, **common, "RANK": str(rank), "NCCL_HOSTID": f"host{rank}"}
                if rank == 0:
                    variables["ALONE"] = "1"
                command = [sys.executable, *words]
                processes.append(subprocess.Popen(command, env=variables, stdout=out, stderr=err))
            deadline = time.monotonic() + limit
            while None in (codes := [process.poll() for process in processes]) and time.monotonic() < deadline:
                if any(codes):
                    deadline = min(deadline, time.monotonic() + 5)
                time.sleep(0.05)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        for file in (file for pair in files for file in pair):
            file.seek(0)
        outputs, errors = ([file.read() for file in column] for column in zip(*files, strict=True))
    said = "\n".join(f"rank {r}, {'killed' if code is None else code}:\n{errors[r]}" for r, code in enumerate(codes))
    assert codes == [0, 0], said
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def on_one_gpu(fn: Callable[..., Any], *args: str) -> list[Any]:
    """What a function of a test module gives on two ranks."""
    program = f"from {fn.__module__} import {fn.__name__} as run; print(json.dumps(run(*sys.argv[1:])), flush=True)"
    return run_pair(["-c", f"import json, sys; {program}", *args])
