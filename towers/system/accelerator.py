"""Accelerators: the current device, names, identities and random states, and what CUDA and TPUs alone have.

[Note: neutral words] torch has one accelerator in a process (``torch.accelerator``): CUDA's or ROCm's GPUs, Intel's
("xpu"), or one that a package registers. Streams, events, pinned memory and the current device have one interface for
all. Random states and names are read from the kind's own module (``torch.get_device_module``), which has the same
functions for all kinds.

[Note: a TPU has two numbers] A process of torch_tpu has one device, the one of its LOCAL_RANK, as ``tpu:0``. So a
tower's device is ``tpu:i`` in options and messages, and ``tpu:0`` in its own process. The devices of all towers become
one network when each process uses its own for the first time. This needs variables that are equal everywhere, so the
agent of each host lets torch_tpu set them before it starts towers.

[Note: a TPU has one order] Work on a TPU has one order, on whichever streams it was submitted. Events make no stream
wait, and memory is kept until it was used. So torch_tpu has no ``Tensor.record_stream``, and its callers leave out
TPUs. (The notes on TPUs were read in torch_tpu 0.2.0, and are untested on TPUs.)
"""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any

import torch
from torch import Tensor

from towers.system.devices import accelerator_kind, module_of

ADDRESSES = "TORCH_TPU_SLICEBUILDER_ADDRESSES"
"""Environment variable of torch_tpu: the addresses of all towers."""


def is_capturing(device: torch.device) -> bool:
    """Returns whether the current stream's work is captured as a CUDA graph, instead of executed."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def missing_tpu() -> str | None:
    """Returns why torch sees no TPU, and the remedy; None if it sees one."""
    if accelerator_kind() == "tpu":
        return None
    try:
        version = importlib.metadata.version("torch_tpu")
    except importlib.metadata.PackageNotFoundError:
        return "torch_tpu is not installed: pip install 'torch_tpu>=0.2,<0.3' (Python from 3.11, torch from 2.11 on)"
    return f"torch_tpu {version} finds none: it needs a TPU host's /dev/vfio; elsewhere set TPU_SKIP_MDS_QUERY=1"


def _of_this_process(device: torch.device) -> torch.device:
    """Returns a tower's device with its number in its own process, see [Note: a TPU has two numbers].

    Raises:
        ValueError: it is another tower's, or its agent did not prepare it.
    """
    own = int(os.environ.get("LOCAL_RANK", 0))
    if device.index not in (0, own):
        raise ValueError(f"tower {own} has tpu:{own}, not {device}: leave devices out, or name all in order")
    if "WORLD_SIZE" in os.environ and ADDRESSES not in os.environ:
        raise ValueError(f"{ADDRESSES} is not set: start by 'python' or 'mirrored run', or set_tpu_launch_env first")
    return torch.device("tpu", 0)


def use(device: torch.device) -> torch.device:
    """Makes an accelerator's device the current one, and returns it with the number that it has in this process."""
    if device.type == "tpu":
        device = _of_this_process(device)
    torch.accelerator.set_device_index(device.index)
    return device


def name(device: torch.device) -> str:
    """Returns the maker's name of the device, or the name of its kind."""
    names = getattr(module_of(device.type), "get_device_name", None)
    return str(names(device)) if names is not None else device.type


def uuid(device: torch.device) -> str | None:
    """Returns the device's unique identifier, or None if it has none."""
    properties = getattr(module_of(device.type), "get_device_properties", None)
    number = getattr(properties(device), "uuid", None) if properties is not None else None
    return None if number is None else str(number)


def get_rng_state(device: torch.device) -> Tensor:
    """Returns the state of an accelerator's generator."""
    if device.type == "tpu":  # torch_tpu reserves get_rng_state for torch.accelerator.random, which torch 2.13 lacks
        return torch.Generator.get_state(_of(device).default_generators[device.index])
    return torch.as_tensor(_of(device).get_rng_state(device))


def set_rng_state(state: Tensor, device: torch.device) -> None:
    """Lets an accelerator's generator continue from ``state``."""
    _of(device).set_rng_state(state, device)


def manual_seed(seed: int, device: torch.device) -> None:
    """Seeds an accelerator's generator."""
    with torch.accelerator.device_index(device.index):
        _of(device).manual_seed(seed)


def _of(device: torch.device) -> Any:
    return module_of(device.type)
