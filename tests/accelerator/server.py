"""A process that has an accelerator, and runs functions of tests on towers there.

The process that runs the tests must not have the accelerator: all strategies there would use it.
"""

from __future__ import annotations

import copy
import os
import traceback
from collections.abc import Callable
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch

import mirrored
from tests.simulated_device import INSTALLED
from tests.support.guard import keep_family
from tests.support.waiting import HANG
from towers.system.devices import accelerator_kind


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
        self._process: Any = None
        self._results: dict[str, list[Any]] = {}

    def _start(self) -> None:
        context = get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(self.kind, other))
        with mock.patch.dict(os.environ, {**variables_of(self.kind), "OMP_NUM_THREADS": "1"}):
            self._process.start()
        keep_family(self._process.pid)
        other.close()

    def towers(
        self, fn: Callable[..., Any], *args: Any, devices: list[str], way: str = "host", **kwargs: Any
    ) -> list[Any]:
        """``fn(*args, **kwargs)`` in a tower on each of ``devices``: the results in tower order.

        Args:
            way: "collectives" lets simulated devices have a backend of torch.distributed.

        Raises:
            AssertionError: with what the towers said.
        """
        if self._process is None or not self._process.is_alive():
            self._start()
        if way == "collectives" and self.kind == "sim":
            fn, args = _with_collectives, (fn, *args)
        self._connection.send((fn, args, kwargs, devices))
        try:
            done, result = self._connection.recv()
        except EOFError:
            self._process.join()
            raise AssertionError(f"the server has ended with exit code {self._process.exitcode}") from None
        if not done:
            raise AssertionError(result)
        answer: list[Any] = result
        return answer

    def towers_once(self, fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """As ``towers``, for what tests compare with: only the first of equal calls starts towers."""
        key = f"{fn.__module__}.{fn.__qualname__} {args} {options}"
        if key not in self._results:
            self._results[key] = self.towers(fn, *args, **options)
        return copy.deepcopy(self._results[key])

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._connection.close()
            self._process.join(HANG)


def _with_collectives(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from tests.simulated_device import collectives

    collectives.register()
    return fn(*args, **kwargs)


def _serve(kind: str, connection: Connection) -> None:
    if kind != "cuda" and os.environ.get("MIRRORED_TEST_DEVICE"):
        from tests.accelerator import preloaded  # noqa: F401

        forkserver.set_forkserver_preload(["towers.launching.starting.preloaded", "tests.accelerator.preloaded"])
        forkserver.ensure_running()
    if kind == "tpu":
        torch.tpu.distributed.set_tpu_launch_env(nproc_per_node=2)
    while True:
        try:
            fn, args, kwargs, devices = connection.recv()
        except EOFError:
            return
        try:
            answer = True, mirrored.launch(fn, args, kwargs, devices=devices, timeout=HANG)
        except Exception:
            answer = False, traceback.format_exc()
        connection.send(answer)
