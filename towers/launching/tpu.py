"""Preparations of a TPU host's agent before it starts towers."""

from __future__ import annotations

import os

import torch

from towers.errors import CannotStartError
from towers.system.tpu import ADDRESSES


def set_environment(towers: int, worker: int, workers: int) -> None:
    """Sets the variables with which this host's towers find the TPUs of all towers, before they are started.

    The reason is in :mod:`towers.system.tpu`, [Note: a TPU has two numbers].

    Raises:
        CannotStartError: torch_tpu cannot determine the variables, or they are already set for a different number of
            towers.
    """
    if workers > 1 and "TORCH_TPU_TOPOLOGY" not in os.environ:
        raise CannotStartError("TORCH_TPU_TOPOLOGY is not set: on several hosts it is the whole slice's, as 4,4,1")
    os.environ.setdefault("NODE_RANK", str(worker))  # otherwise, torch_tpu queries a TPU in a new process
    try:
        torch.tpu.distributed.set_tpu_launch_env(nnodes=workers, nproc_per_node=towers)  # type: ignore[attr-defined]
    except (RuntimeError, ValueError) as error:
        raise CannotStartError(f"torch_tpu cannot start {towers} towers on this host: {error}") from error
    if (count := os.environ[ADDRESSES].count(",") + 1) != towers * workers:
        raise CannotStartError(f"{ADDRESSES} is for {count} towers, but {towers * workers} are to start: unset it")
