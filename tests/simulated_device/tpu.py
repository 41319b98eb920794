"""The simulated accelerator as a TPU: ``torch.tpu`` with the surface of torch_tpu 0.2.0, as it stands in its wheel.

A process has one device, ``tpu:0``, whatever number it has on its host. Functions for which torch.accelerator has one
of its own may be called by torch only. ``torch.tpu.distributed.set_tpu_launch_env`` sets the variables of the host's
towers, once in a process. There are the backends "tpu_dist" and "tpu", streams for which nothing waits, and no
``record_stream``. As torch_tpu does, it loads itself with torch, where its folder ``installed`` is on the path.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

DEVICES = 2
TOPOLOGIES = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,2,2"}

_resolved: dict[str, str] = {}


def autoload() -> None:
    """What the entry point in the group "torch.backends" names: torch calls it when it is imported."""
    from tests import simulated_device
    from tests.simulated_device import collectives

    simulated_device.load()
    collectives.register("tpu_dist", "tpu")
    torch.distributed.Backend.default_device_backend_map["tpu"] = "tpu_dist"


def _of_torch(function: Callable[..., Any]) -> Callable[..., Any]:
    """An internal function: whoever is not torch gets an error."""

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals["__name__"]
        if caller.partition(".")[0] not in ("torch", "torch_tpu"):
            raise RuntimeError(f"{function.__name__} is internal to TorchTPU and can only be called by the PyTorch")
        return function(*args, **kwargs)

    return checked


def _set_once(name: str, make: Callable[[], str]) -> None:
    if name not in os.environ:
        os.environ[name] = _resolved.setdefault(name, make())


def set_tpu_launch_env(*, nnodes: int | None = None, nproc_per_node: int | None = None) -> None:
    """The variables of one host's or several hosts' towers."""
    hosts = [host for host in os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if host]
    if nnodes is not None and hosts and nnodes != len(hosts):
        raise ValueError(f"expected nnodes to match the number of hosts in TPU_WORKER_HOSTNAMES, got {nnodes}")
    count = nproc_per_node or DEVICES
    if count not in TOPOLOGIES:
        raise RuntimeError(f"No TPU topology found for count: {count}")
    several = (nnodes or 1) > 1 or len(hosts) > 1 or "JOB_COMPLETION_INDEX" in os.environ
    if several and not hosts:
        raise ValueError("expected environment variable TPU_WORKER_HOSTNAMES to be a comma-separated list")
    places = [f"{host}:{8070 + i}" for host in hosts or ["localhost"] for i in range(count)]
    _set_once("TORCH_TPU_SLICEBUILDER_ADDRESSES", lambda: ",".join(places))
    if several:
        for name, value in (("NNODES", len(hosts)), ("MASTER_ADDR", hosts[0]), ("MASTER_PORT", 29500)):
            _set_once(name, lambda value=value: str(value))  # type: ignore[misc]
    _set_once("TORCH_TPU_TOPOLOGY", lambda: TOPOLOGIES[count])


def module(sim: Any) -> types.ModuleType:
    """``torch.tpu``."""

    def own(device: Any) -> None:
        number = device if isinstance(device, int) else torch.device(device).index
        if number not in (None, 0):
            raise ValueError(f"expected local device index 0, got {number}")

    def device_count() -> int:
        return 1 if sim.is_initialized() else DEVICES

    def set_rng_state(state: torch.Tensor, device: Any = "tpu") -> None:
        own(device)
        sim.set_rng_state(0, state)

    @_of_torch
    def get_rng_state(device: Any = "tpu") -> torch.Tensor:
        own(device)
        return sim.get_rng_state(0)

    made = types.ModuleType("torch.tpu")
    made.__dict__.update(
        distributed=types.SimpleNamespace(set_tpu_launch_env=set_tpu_launch_env),
        default_generators=(sim.generator(0),),
        device_count=_of_torch(device_count),
        is_available=_of_torch(lambda: True),
        current_device=_of_torch(sim.current_device),
        set_device=_of_torch(own),
        synchronize=_of_torch(lambda device=None: torch.accelerator.synchronize(0)),
        get_rng_state=get_rng_state,
        set_rng_state=set_rng_state,
        manual_seed=lambda seed: sim.manual_seed(0, seed),
        manual_seed_all=lambda seed: sim.manual_seed(0, seed),
        get_device_name=lambda device=None: "TPU v4",
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16, torch.float32],
        is_initialized=sim.is_initialized,
        _is_in_bad_fork=lambda: False,
    )
    return made
