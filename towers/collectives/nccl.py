"""What is NCCL's alone when groups are made: its ring, the GPU of a script's own group, and that it must not abort.

[Note: NCCL must not abort] NCCL's watchdog of torch up to 2.14 ends the process a minute after it has found an error,
that of 2.15 at once, before :mod:`towers.collectives.nccl_watch` could say who waited for whom. An engine reads
TORCH_NCCL_ASYNC_ERROR_HANDLING when a group is made; 0 leaves the error where ``get_error`` finds it, and
the process to us. So our groups are made with that; a script's own groups are not, and where the variable is set, it
stays. (Read in torch's sources; no GPU has seen it.)
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from towers.system.torch_private import nccl_aborts_at_once

_pinned_ring = False


def choose_algorithm(algorithm: str) -> None:
    """Pin NCCL's ring for the groups that come, or leave the choice to NCCL; NCCL_ALGO in the environment wins."""
    global _pinned_ring
    if algorithm == "ring" and "NCCL_ALGO" not in os.environ:
        os.environ["NCCL_ALGO"] = "Ring"
        _pinned_ring = True
    elif algorithm != "ring" and _pinned_ring:
        os.environ.pop("NCCL_ALGO", None)
        _pinned_ring = False


def check_bound(bound: torch.device | None, device: torch.device) -> None:
    """See that the script's own default group uses this tower's GPU, on which groups of ours are split from it.

    Args:
        bound: the device of the default group, if it is bound to one.

    Raises:
        ValueError: it is another one.
    """
    if bound is not None and bound.type == device.type and bound != device:
        raise ValueError(
            f"torch.distributed is initialised with NCCL on {bound}, but this tower's device is {device}: give "
            f"init_process_group device_id=torch.device('{device}') (without it torch 2.15 takes LOCAL_RANK modulo the "
            "number of GPUs), or leave the initialisation to the strategy"
        )


@contextlib.contextmanager
def without_abort() -> Iterator[None]:
    """Inside, groups of NCCL are made whose errors do not end the process; see [Note: NCCL must not abort]."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    if name in os.environ or not nccl_aborts_at_once():
        yield
        return
    os.environ[name] = "0"
    try:
        yield
    finally:
        del os.environ[name]
