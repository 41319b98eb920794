"""What only TPUs have, which torch drives by torch_tpu: one device in each process.

[Note: a TPU goes by two numbers] A process of torch_tpu has one device, the one of its LOCAL_RANK, as ``tpu:0``. So a
tower's device is ``tpu:i`` in options and messages, and ``tpu:0`` in its own process. The devices of all towers become
one network when each process uses its own for the first time, by variables that have to be equal everywhere; so the
agent of each host has torch_tpu set them before it starts towers.

[Note: a TPU has one order] Work has one order there, whatever streams it was given to: events make no stream wait, and
memory is kept until it was used. So torch_tpu has no ``Tensor.record_stream``, and whoever calls it leaves out TPUs.
(Both notes were read in torch_tpu 0.2.0; no TPU has run this.)
"""

from __future__ import annotations

import importlib.metadata
import os

import torch

from towers.system.devices import accelerator_kind

ADDRESSES = "TORCH_TPU_SLICEBUILDER_ADDRESSES"


def missing() -> str | None:
    """Why torch sees no TPU, and what to do; None where it sees one."""
    if accelerator_kind() == "tpu":
        return None
    try:
        version = importlib.metadata.version("torch_tpu")
    except importlib.metadata.PackageNotFoundError:
        return "torch_tpu is not installed: pip install 'torch_tpu>=0.2,<0.3' (Python from 3.11, torch from 2.11 on)"
    return f"torch_tpu {version} finds none: it needs a TPU host's /dev/vfio; elsewhere set TPU_SKIP_MDS_QUERY=1"


def set_environment(towers: int, worker: int, workers: int) -> None:
    """Set the variables by which the towers of a host, which are to be started, find the TPUs of all.

    Why is said in [Note: a TPU goes by two numbers].

    Raises:
        ValueError: torch_tpu cannot make them, or they are there already, for other towers.
    """
    if workers > 1 and "TORCH_TPU_TOPOLOGY" not in os.environ:
        raise ValueError("TORCH_TPU_TOPOLOGY is not set: for TPUs of several hosts it is the whole slice's, as 4,4,1")
    os.environ.setdefault("NODE_RANK", str(worker))  # else torch_tpu asks a TPU for its place, in a new process
    try:
        torch.tpu.distributed.set_tpu_launch_env(nnodes=workers, nproc_per_node=towers)  # type: ignore[attr-defined]
    except RuntimeError as error:
        raise ValueError(f"torch_tpu cannot start {towers} towers on this host: {error}") from error
    if (count := os.environ[ADDRESSES].count(",") + 1) != towers * workers:
        raise ValueError(f"{ADDRESSES} is for {count} towers, but {towers * workers} are to start: unset it")


def of_this_process(device: torch.device) -> torch.device:
    """A tower's device as its own process numbers it, see [Note: a TPU goes by two numbers].

    Raises:
        ValueError: it is another tower's, or whoever has started this tower has not called :func:`set_environment`.
    """
    own = int(os.environ.get("LOCAL_RANK", 0))
    if device.index not in (0, own):
        raise ValueError(f"tower {own} has tpu:{own}, not {device}: leave devices out, or name all in order")
    if "WORLD_SIZE" in os.environ and ADDRESSES not in os.environ:
        raise ValueError(f"{ADDRESSES} is not set: start by 'python' or 'mirrored run', or set_tpu_launch_env first")
    return torch.device("tpu", 0)
