"""Accelerators: the current device, names, identities and random states.

[Note: neutral words] torch has one accelerator in a process (``torch.accelerator``): CUDA's or ROCm's GPUs, Intel's
("xpu"), or one that a package registers. Streams, events, pinned memory and the current device have one interface for
all. Random states and names are read from the kind's own module (``torch.get_device_module``), which has the same
functions for all kinds. CUDA's special features are in :mod:`towers.system.cuda`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from towers.system.devices import module_of


def use(device: torch.device) -> torch.device:
    """Makes an accelerator's device the current one, and returns it with the number that it has in this process."""
    if device.type == "tpu":
        from towers.system import tpu

        device = tpu.of_this_process(device)
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
