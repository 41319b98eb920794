"""NCCL's special cases: its ring, the GPU of a script's own group, and errors that no host waits for.

[Note: NCCL must not abort] When NCCL's watchdog has found an error, it ends the process: after a minute in torch up to
2.14, and at once in torch 2.15. Then :func:`watch` cannot report in time which tower waited for which. When a group is
made, its engine reads TORCH_NCCL_ASYNC_ERROR_HANDLING. With 0, it leaves the error where
``get_error`` finds it, and leaves the process to ``mirrored``. So ``mirrored``'s groups are made with 0. A script's own
groups are not, and if the variable is set, it stays. (Torch 2.11 left a tower on an H200 the time to report; for torch
2.15, this was read in its sources.)
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator

import torch

from towers.health import failure
from towers.health.heartbeat import INTERVAL, main_stack
from towers.system.timeouts import clock
from towers.system.torch_private import nccl_aborts_at_once

_pinned_ring = False


def choose_algorithm(algorithm: str | None, *, on_one_host: bool) -> None:
    """Selects NCCL's ring for future groups, or leaves the choice to NCCL. ``NCCL_ALGO`` takes precedence.

    Args:
        algorithm: "ring", "auto", or None for the ring on one host only.
        on_one_host: whether all towers are on this host.
    """
    global _pinned_ring
    ring = algorithm == "ring" or (algorithm is None and on_one_host)
    if ring and "NCCL_ALGO" not in os.environ:
        os.environ["NCCL_ALGO"] = "Ring"
        _pinned_ring = True
    elif not ring and _pinned_ring:
        os.environ.pop("NCCL_ALGO", None)
        _pinned_ring = False


def check_bound(bound: torch.device | None, device: torch.device) -> None:
    """Checks that the script's own default group uses this tower's GPU. ``mirrored``'s groups are split from it.

    Args:
        bound: the device of the default group, if it is bound to one.

    Raises:
        ValueError: it is another device.
    """
    if bound is not None and bound.type == device.type and bound != device:
        raise ValueError(
            f"torch.distributed is initialised with NCCL on {bound}, but this tower's device is {device}: give "
            f"init_process_group device_id=torch.device('{device}') (without it torch 2.15 takes LOCAL_RANK modulo the "
            "number of GPUs), or leave the initialisation to the strategy"
        )


@contextlib.contextmanager
def without_abort() -> Iterator[None]:
    """Makes NCCL's groups, inside, such that their errors do not end the process; see [Note: NCCL must not abort]."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    if name in os.environ or not nccl_aborts_at_once():
        yield
        return
    os.environ[name] = "0"
    try:
        yield
    finally:
        del os.environ[name]


@functools.cache
def watch(failures: Callable[[], Iterable[Exception | None]]) -> None:
    """Starts a thread that checks ``failures`` every second, and ends this process with a report of the first."""
    threading.Thread(target=_run, args=(failures,), name="towers-nccl", daemon=True).start()


def _run(failures: Callable[[], Iterable[Exception | None]]) -> None:
    error = None
    while error is None:
        clock.sleep(INTERVAL)
        error = next(filter(None, failures()), None)
    failure.leave_report(error, f"Stack (most recent call last):\n{main_stack()}\n")
    failure.leave(1)
