"""Special features of TPUs, which torch drives through torch_tpu: one device in each process.

[Note: a TPU has two numbers] A process of torch_tpu has one device, the one of its LOCAL_RANK, as ``tpu:0``. So a
tower's device is ``tpu:i`` in options and messages, and ``tpu:0`` in its own process. The devices of all towers become
one network when each process uses its own for the first time. This needs variables that are equal everywhere, so the
agent of each host lets torch_tpu set them before it starts towers.

[Note: a TPU has one order] Work on a TPU has one order, on whichever streams it was submitted. Events make no stream
wait, and memory is kept until it was used. So torch_tpu has no ``Tensor.record_stream``, and its callers leave out
TPUs. (Both notes were read in torch_tpu 0.2.0, and are untested on TPUs.)
"""

from __future__ import annotations

import importlib.metadata
import os

import torch

from towers.system.devices import accelerator_kind

ADDRESSES = "TORCH_TPU_SLICEBUILDER_ADDRESSES"


def missing() -> str | None:
    """Returns why torch sees no TPU, and the remedy; None if it sees one."""
    if accelerator_kind() == "tpu":
        return None
    try:
        version = importlib.metadata.version("torch_tpu")
    except importlib.metadata.PackageNotFoundError:
        return "torch_tpu is not installed: pip install 'torch_tpu>=0.2,<0.3' (Python from 3.11, torch from 2.11 on)"
    return f"torch_tpu {version} finds none: it needs a TPU host's /dev/vfio; elsewhere set TPU_SKIP_MDS_QUERY=1"


def of_this_process(device: torch.device) -> torch.device:
    """Returns a tower's device with its number in its own process, see [Note: a TPU has two numbers].

    Raises:
        ValueError: it is another tower's, or :mod:`towers.launching.tpu` did not prepare it.
    """
    own = int(os.environ.get("LOCAL_RANK", 0))
    if device.index not in (0, own):
        raise ValueError(f"tower {own} has tpu:{own}, not {device}: leave devices out, or name all in order")
    if "WORLD_SIZE" in os.environ and ADDRESSES not in os.environ:
        raise ValueError(f"{ADDRESSES} is not set: start by 'python' or 'mirrored run', or set_tpu_launch_env first")
    return torch.device("tpu", 0)
