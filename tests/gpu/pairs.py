"""Two NCCL ranks on one GPU, for what they compute and never for how fast."""

from __future__ import annotations

import contextlib
import dataclasses
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


@dataclasses.dataclass(frozen=True)
class Rank:
    """How a rank ended.

    Attributes:
        code: its exit code; None: it was killed because it did not end.
        at: when it ended, in seconds of ``time.monotonic``.
    """

    code: int | None
    out: str
    err: str
    at: float


def start_pair(
    words: list[str], limit: float, patience: float, shown: bool = False, one_host: bool = False
) -> list[Rank]:
    """A program on two ranks on one GPU, which NCCL takes for two hosts: never for speed.

    Args:
        patience: seconds from the failure of one rank until the other is ended: it may spin in NCCL.
        shown: whether the output of rank 0 is that of this process, as it comes.
        one_host: whether mirrored takes them for one host, with a device each.
    """
    common = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_NET": "Socket",
        "NCCL_IB_DISABLE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    processes: list[subprocess.Popen[str]] = []
    ends: dict[int, float] = {}
    with contextlib.ExitStack() as opened:
        files = [[opened.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)] for _ in range(2)]
        try:
            for rank, (out, err) in enumerate(files):
                variables = {**os.environ, **common, "RANK": str(rank)}
                if one_host:
                    variables |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
                else:
                    variables["NCCL_HOSTID"] = f"host{rank}"
                if rank == 0:
                    variables["ALONE"] = "1"
                command = [sys.executable, *words]
                stdout = None if shown and rank == 0 else out
                processes.append(subprocess.Popen(command, env=variables, stdout=stdout, stderr=err))
            deadline = time.monotonic() + limit
            while None in (codes := [process.poll() for process in processes]) and time.monotonic() < deadline:
                ends |= {rank: time.monotonic() for rank, code in enumerate(codes) if code is not None} | ends
                if any(codes):
                    deadline = min(deadline, min(ends.values()) + patience)
                time.sleep(0.05)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        for file in (file for pair in files for file in pair):
            file.seek(0)
        read = [[file.read() for file in pair] for pair in files]
    now = time.monotonic()
    return [Rank(code, *read[rank], ends.get(rank, now)) for rank, code in enumerate(codes)]


def run_pair(words: list[str], limit: float = 120.0) -> list[Any]:
    """What a program prints last, as JSON, on two ranks on one GPU."""
    ranks = start_pair(words, limit, patience=5.0)
    ends = ["killed" if rank.code is None else rank.code for rank in ranks]
    said = "\n".join(f"rank {number}, {ends[number]}:\n{rank.err}" for number, rank in enumerate(ranks))
    assert ends == [0, 0], said
    return [json.loads(rank.out.splitlines()[-1]) for rank in ranks]


def program_of(fn: Callable[..., Any], *args: str) -> list[str]:
    """A command line that prints what a function of a test module returns, as JSON."""
    program = f"from {fn.__module__} import {fn.__name__} as run; print(json.dumps(run(*sys.argv[1:])), flush=True)"
    return ["-c", f"import json, sys; {program}", *args]


def on_one_gpu(fn: Callable[..., Any], *args: str) -> list[Any]:
    """What a function of a test module gives on two ranks."""
    return run_pair(program_of(fn, *args))
