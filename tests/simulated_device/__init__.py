"""An accelerator that is simulated on the CPU: ``load()`` gives torch the devices ``sim:0`` and ``sim:1``.

A process that starts, or is forked, when the file of SIMULATED_LOST is there finds one only.
Where MIRRORED_TEST_DEVICE is "tpu" it is a TPU as torch_tpu shows it, which ``tpu.py`` says more of.
``device.cpp`` says how it behaves. It is compiled at first use (half a minute), by a compiler that has to be there.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib
import importlib.util
import os
import pathlib
import shutil
import sys
import types
import warnings
from typing import Any

import torch
from torch import Tensor

HERE = pathlib.Path(__file__).parent
INSTALLED = HERE / "installed"
"""Where the simulated torch_tpu is found."""
SOURCES = "device.cpp", "autocast.cpp"
DEVICES = 2


def why_not() -> str | None:
    """Why the simulated accelerator cannot be had here, or None."""
    if importlib.util.find_spec("torch_tpu") is not None:
        return "torch_tpu is installed, which takes the place that torch has for one other accelerator"
    _find_ninja()
    missing = [tool for tool in (os.environ.get("CXX", "c++"), "ninja") if shutil.which(tool) is None]
    return f"the simulated accelerator needs {' and '.join(missing)}" if missing else None


def _find_ninja() -> None:
    """Programs of an environment are not on the path of its Python."""
    if shutil.which("ninja") is None and importlib.util.find_spec("ninja") is not None:
        folder = importlib.import_module("ninja").BIN_DIR
        os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), folder])


@functools.cache
def load() -> Any:
    """Compile the extension where that is not done yet, and register the devices; returns the extension."""
    build = HERE / "build" / f"{torch.version.__version__}-{sys.implementation.cache_tag}"
    compiled = build / "compiled"
    changed = max((HERE / name).stat().st_mtime for name in (*SOURCES, "world.h"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if compiled.exists() and compiled.stat().st_mtime > changed:
            sim = _import(build / "simulated_device.so")
        else:
            sim = _compile(build)
            compiled.touch()
        if os.environ.get("MIRRORED_TEST_DEVICE") == "tpu":
            from tests.simulated_device import tpu

            name, module = "tpu", tpu.module(sim)
        else:
            name, module = "sim", _module(sim)
        torch.utils.rename_privateuse1_backend(name)
        torch._register_device_module(name, module)
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return sim


def load_as_installed(*paths: str) -> None:
    """Do what torch does when it is imported where ``paths``, or INSTALLED, are on the path, in a fork that has it."""
    sys.path[:0] = paths or [str(INSTALLED)]
    torch._import_device_backends()


def _import(path: pathlib.Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile(build: pathlib.Path) -> Any:
    from torch.utils import cpp_extension  # loads setuptools

    _find_ninja()
    build.mkdir(parents=True, exist_ok=True)
    with (build / "compiling").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (build / "lock").unlink(missing_ok=True)  # a killed process leaves it, and all others would wait for ever
        return cpp_extension.load(
            "simulated_device",
            [str(HERE / name) for name in SOURCES],
            extra_cflags=["-O0", "-g0"],
            build_directory=str(build),
            verbose=False,
        )


def _module(sim: Any) -> types.ModuleType:
    """What torch and scripts ask of ``torch.sim``."""

    def index(device: Any = None) -> int:
        if isinstance(device, int):
            return device
        number = torch.device("sim" if device is None else device).index
        return int(sim.current_device()) if number is None else int(number)

    def set_rng_state(state: Tensor, device: Any = "sim") -> None:
        sim.set_rng_state(index(device), state)

    def manual_seed_all(seed: int) -> None:
        for device in range(DEVICES):
            sim.manual_seed(device, seed)

    count = DEVICES

    def look() -> None:
        nonlocal count
        count = 1 if os.path.exists(os.environ.get("SIMULATED_LOST", "")) else DEVICES

    look()
    os.register_at_fork(after_in_child=look)
    module = types.ModuleType("torch.sim")
    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: count,
        "current_device": sim.current_device,
        "set_device": lambda device: sim.set_device(index(device)),
        "device": lambda device: torch.accelerator.device_index(index(device)),
        "current_stream": lambda device=None: torch.accelerator.current_stream(index(device)),
        "stream": lambda stream: stream or contextlib.nullcontext(),
        "Stream": functools.partial(torch.Stream, "sim"),
        "Event": functools.partial(torch.Event, "sim"),
        "get_device_name": lambda device=None: "a simulated device",
        "synchronize": lambda device=None: torch.accelerator.synchronize(index(device)),
        "get_rng_state": lambda device="sim": sim.get_rng_state(index(device)),
        "set_rng_state": set_rng_state,
        "manual_seed": lambda seed: sim.manual_seed(sim.current_device(), seed),
        "manual_seed_all": manual_seed_all,
        "_is_in_bad_fork": lambda: False,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module
