"""What the agent of a TPU host does before it starts towers."""

from __future__ import annotations

import os

import torch

from towers.errors import CannotStartError
from towers.system.tpu import ADDRESSES


def set_environment(towers: int, worker: int, workers: int) -> None:
    """Set the variables by which the towers of a host, which are to be started, find the TPUs of all.

    Why is said in [Note: a TPU goes by two numbers] in :mod:`towers.system.tpu`.

    Raises:
        CannotStartError: torch_tpu cannot make them, or they are there already, for other towers.
    """
    if workers > 1 and "TORCH_TPU_TOPOLOGY" not in os.environ:
        raise CannotStartError("TORCH_TPU_TOPOLOGY is not set: on several hosts it is the whole slice's, as 4,4,1")
    os.environ.setdefault("NODE_RANK", str(worker))  # else torch_tpu asks a TPU for its place, in a new process
    try:
        torch.tpu.distributed.set_tpu_launch_env(nnodes=workers, nproc_per_node=towers)  # type: ignore[attr-defined]
    except (RuntimeError, ValueError) as error:
        raise CannotStartError(f"torch_tpu cannot start {towers} towers on this host: {error}") from error
    if (count := os.environ[ADDRESSES].count(",") + 1) != towers * workers:
        raise CannotStartError(f"{ADDRESSES} is for {count} towers, but {towers * workers} are to start: unset it")
