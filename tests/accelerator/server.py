"""A process that has an accelerator, and runs functions of tests on towers there: one line of JSON for each.

The accelerator is the simulated one where MIRRORED_TEST_DEVICE is "sim"; where it is "tpu", torch loads it by itself.
The process that runs the tests must not have it: all strategies there would use it. This one keeps it loaded in the
server that towers are forked from.
"""

from __future__ import annotations

import base64
import json
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from typing import Any

if os.environ.get("MIRRORED_TEST_DEVICE") == "sim":
    from tests import simulated_device

    simulated_device.load()

import torch

import mirrored
from tests.support.waiting import HANG
from towers.system.devices import accelerator_kind

INSTALLED = pathlib.Path(__file__).parents[1] / "simulated_device" / "installed"
"""Where the simulated torch_tpu is found."""


def variables_of(kind: str) -> dict[str, str]:
    """Variables of a process with this kind of accelerator; none where there is a real TPU."""
    if accelerator_kind() == "tpu":
        return {}
    paths = [str(INSTALLED), os.environ.get("PYTHONPATH", "")]
    return {"MIRRORED_TEST_DEVICE": kind, **({"PYTHONPATH": os.pathsep.join(paths)} if kind == "tpu" else {})}


class Server:
    """The process, seen from the tests; a function that takes it down costs a new start.

    Args:
        kind: "sim", "tpu" or "cuda".
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.collectives = "tpu_dist" if kind == "tpu" else "simccl"
        self._process: subprocess.Popen[str] | None = None

    def _start(self) -> subprocess.Popen[str]:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (as long as the process)
        return subprocess.Popen(
            [sys.executable, "-m", "tests.accelerator.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **variables_of(self.kind), "OMP_NUM_THREADS": "1"},
        )

    def towers(
        self, fn: Callable[..., Any], *args: Any, devices: list[str], way: str = "host", **kwargs: Any
    ) -> list[Any]:
        """``fn(*args, **kwargs)`` in a tower on each of ``devices``: the results in tower order.

        Args:
            way: "collectives" lets simulated devices have a backend of torch.distributed.

        Raises:
            AssertionError: with what the towers said.
        """
        if self._process is None or self._process.poll() is not None:
            self._process = self._start()
        if way == "collectives" and self.kind == "sim":
            fn, args = _with_collectives, (fn, *args)
        call = base64.b64encode(pickle.dumps((fn, args, kwargs, devices))).decode()
        self._process.stdin.write(f"{call}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("answer "):
                done, result = json.loads(line.removeprefix("answer "))
                if not done:
                    raise AssertionError(result)
                answer: list[Any] = result
                return answer
        self._errors.seek(0)
        raise AssertionError(f"the server has ended: {self._errors.read()}")

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.communicate("")


def _with_collectives(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from tests.simulated_device import collectives

    collectives.register()
    return fn(*args, **kwargs)


def _serve() -> None:
    forkserver.set_forkserver_preload(["tests.accelerator.server", "towers.launching.launch", "torch._dynamo"])
    for line in sys.stdin:
        fn, args, kwargs, devices = pickle.loads(base64.b64decode(line))
        try:
            answer = [True, mirrored.launch(fn, args, kwargs, devices=devices, timeout=HANG)]
        except Exception:
            answer = [False, traceback.format_exc()]
        print(f"answer {json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    if os.environ.get("MIRRORED_TEST_DEVICE") == "tpu":
        torch.tpu.distributed.set_tpu_launch_env(nproc_per_node=2)
    _serve()
