"""Which devices a worker's towers run on."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from types import ModuleType

import torch

Device = str | torch.device


@functools.cache
def module_of(kind: str) -> ModuleType | None:
    """torch's module for a kind of device (such as ``torch.xpu``); None where torch knows no such kind."""
    try:
        module: ModuleType = torch.get_device_module(kind)
    except RuntimeError:
        return None
    return module


def accelerator_kind() -> str:
    """The kind of accelerator that this process sees ("cuda", "xpu" …); "cpu" where it sees none."""
    device = torch.accelerator.current_accelerator()
    return device.type if device is not None and count_of(device.type) else "cpu"


def count_of(kind: str) -> int:
    """How many devices of a kind this process sees (``CUDA_VISIBLE_DEVICES`` and its like apply)."""
    here = torch.accelerator.current_accelerator()  # torch_tpu lets nobody but torch call its device_count
    return torch.accelerator.device_count() if here is not None and here.type == kind and module_of(kind) else 0


def parse(device: Device) -> torch.device:
    """One device from its name.

    Takes torch's names (``"cuda:1"``, ``"xpu:0"``, ``"cpu:0"``) and TensorFlow's (``"/gpu:1"``, ``"GPU:1"``,
    ``"/device:CPU:0"``), whose GPUs are the accelerators that there are. Without a number it is number 0.

    Raises:
        ValueError: it names no CPU and no accelerator.
    """
    if isinstance(device, str):
        match = re.fullmatch(r"/?(?:device:)?([a-z_][a-z0-9_]*?)(?::([0-9]{1,9}))?", device.strip().lower())
        if match is None:
            raise ValueError(f"device {device!r} is not understood; write 'cuda:0', 'cpu:0' or '/gpu:0'")
        kind, index = match[1], int(match[2] or 0)
        if kind == "gpu":
            kind = "cuda" if (here := accelerator_kind()) == "cpu" else here
    elif isinstance(device, torch.device):
        kind, index = device.type, device.index or 0
    else:
        raise ValueError(f"device {device!r} is not a device")
    if module_of(kind) is None:
        raise ValueError(f"device {str(device)!r} is not understood; write 'cuda:0', 'cpu:0' or '/gpu:0'")
    return torch.device(kind, index)


def parse_all(devices: Iterable[Device]) -> list[torch.device]:
    """The devices of one worker, one per tower, in order.

    Raises:
        TypeError: a single name instead of a list of names.
        ValueError: none at all, a CPU named twice, or several kinds.
    """
    if isinstance(devices, (str, torch.device)):
        raise TypeError(f"devices must be a list of devices, such as [{str(devices)!r}], not one device")
    if not isinstance(devices, Iterable):
        raise TypeError(f"devices must be a list of devices, such as ['cuda:0', 'cuda:1'], not {devices!r}")
    parsed = [parse(device) for device in devices]
    if not parsed:
        raise ValueError("devices is empty; leave it out to use every GPU, or name at least one device")
    if len({device.type for device in parsed}) > 1:
        raise ValueError(f"devices mixes several kinds: {', '.join(map(str, parsed))}; use one kind")
    if parsed[0].type in ("cpu", "tpu") and are_shared(parsed):
        twice = sorted({str(device) for device in parsed if parsed.count(device) > 1})
        raise ValueError(
            f"devices names {', '.join(twice)} more than once; two CPU towers are ['cpu:0', 'cpu:1'] (a GPU may be "
            "named more than once: its towers share it)"
        )
    return parsed


def are_shared(devices: Sequence[torch.device]) -> bool:
    """Whether several towers are to use one device."""
    return len(set(devices)) < len(devices)


def for_worker(requested: Iterable[Device] | None) -> list[torch.device]:
    """The devices of the towers that a worker is to start: ``requested``, else every accelerator, else one CPU.

    Raises:
        TypeError, ValueError: see :func:`parse_all` and :func:`check_exist`.
    """
    if requested is None:
        kind = accelerator_kind()
        return [torch.device(kind, i) for i in range(count_of(kind) if kind != "cpu" else 1)]
    parsed = parse_all(requested)
    check_exist(parsed)
    return parsed


def check_exist(devices: Sequence[torch.device]) -> None:
    """Check that this process sees every accelerator that is named.

    Raises:
        ValueError: names the missing ones and how many there are.
    """
    counts = {kind: count_of(kind) for kind in {device.type for device in devices} - {"cpu"}}
    missing = [device for device in devices if device.index >= counts.get(device.type, device.index + 1)]
    if missing:
        kind = missing[0].type
        hint = "check CUDA_VISIBLE_DEVICES and nvidia-smi, or ask" if kind == "cuda" else "ask"
        raise ValueError(
            f"{', '.join(map(str, missing))} asked for, but this process sees {seen(kind, counts[kind])}; {hint} for "
            "CPU towers with devices=['cpu:0', 'cpu:1']"
        )


def seen(kind: str, count: int) -> str:
    """How many devices of a kind there are, in words."""
    word = "GPU" if kind in ("cuda", "cpu") else f"{kind} device"
    return f"only {count} {word}{'s' if count > 1 else ''}" if count else f"no {word}"


def for_tower(
    local_index: int,
    local_size: int,
    requested: Iterable[Device] | None,
    origin: str,
    *,
    sees_all: bool = False,
) -> torch.device:
    """The device of tower ``local_index`` among the ``local_size`` towers that a launcher started here.

    Args:
        requested: the devices that the script or ``TOWERS_DEVICES`` names, or None.
        origin: where the number of towers was read, for messages.
        sees_all: the launcher shows every process all GPUs, not its own one alone.

    Raises:
        TypeError: see :func:`parse_all`.
        ValueError: ``requested`` names another number of devices than the launcher started towers, a
            device that does not exist, or there are more towers than GPUs.
    """
    kind = accelerator_kind()
    count = count_of(kind)
    chosen = parse_all(requested) if requested is not None else None
    shown_one = kind != "cpu" and count == 1 and local_size > 1 and not sees_all
    if shown_one and (chosen is None or chosen == [torch.device(kind, 0)]):
        # The launcher shows each process its own device; if it is the same one after all, the towers find out when
        # they join.
        return torch.device(kind, 0)
    if chosen is None:
        if kind != "cpu" and local_size > count:
            raise ValueError(
                f"{local_size} towers on this machine (from {origin}), but {seen(kind, count)}: start at most {count}, "
                f"or ask for CPU towers with devices={[f'cpu:{i}' for i in range(local_size)]!r}"
            )
        return torch.device(kind, local_index)
    if len(chosen) != local_size:
        raise ValueError(
            f"devices names {len(chosen)} ({', '.join(map(str, chosen))}), but {local_size} towers were "
            f"started on this machine (from {origin}); leave devices out, or start as many towers as it names"
        )
    check_exist(chosen)
    return chosen[local_index]
