"""The devices on which a worker's towers run."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from types import ModuleType

import torch

Device = str | torch.device


@functools.cache
def module_of(kind: str) -> ModuleType | None:
    """Returns torch's module for a kind of device (such as ``torch.xpu``), or None if torch has no such kind."""
    try:
        module: ModuleType = torch.get_device_module(kind)
    except RuntimeError:
        return None
    return module


def accelerator_kind() -> str:
    """Returns the kind of accelerator that this process sees ("cuda", "xpu" …), or "cpu" if it sees none."""
    device = torch.accelerator.current_accelerator()
    return device.type if device is not None and count_of(device.type) else "cpu"


def count_of(kind: str) -> int:
    """Returns how many devices of a kind this process sees (``CUDA_VISIBLE_DEVICES`` and similar variables apply)."""
    here = torch.accelerator.current_accelerator()  # torch_tpu lets only torch call its device_count
    return torch.accelerator.device_count() if here is not None and here.type == kind and module_of(kind) else 0


def parse(device: Device) -> torch.device:
    """Returns one device from its name.

    It accepts torch's names (``"cuda:1"``, ``"xpu:0"``, ``"cpu:0"``) and TensorFlow's (``"/gpu:1"``, ``"GPU:1"``,
    ``"/device:CPU:0"``). TensorFlow's GPUs are the accelerators of this process. Without a number, it is number 0.

    Raises:
        ValueError: the name is not that of a CPU or an accelerator.
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
    """Returns the devices of one worker, one per tower, in order.

    Raises:
        TypeError: a single name instead of a list of names.
        ValueError: an empty list, a CPU named twice, or several kinds.
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
    """Returns whether several towers use one device."""
    return len(set(devices)) < len(devices)


def for_worker(requested: Iterable[Device] | None) -> list[torch.device]:
    """Returns the devices for the towers of a worker: ``requested``, otherwise every accelerator, otherwise one CPU.

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
    """Checks that this process sees every named accelerator.

    Raises:
        ValueError: the message contains the missing devices and the number of existing ones.
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
    """Returns the number of devices of a kind, in words."""
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
    """Returns the device of tower ``local_index`` among the ``local_size`` towers that a launcher started here.

    Args:
        requested: the devices that the script or ``TOWERS_DEVICES`` names, or None. A single kind without an index
            ("cpu") names a device of this kind for each tower.
        origin: the source of the number of towers, for messages.
        sees_all: whether the launcher shows every process all GPUs, and not only its own one.

    Raises:
        TypeError: see :func:`parse_all`.
        ValueError: ``requested`` has another number of devices than there are towers, or a device does not exist, or
            there are more towers than GPUs.
    """
    kind = accelerator_kind()
    count = count_of(kind)
    requested = list(requested) if requested is not None else None
    if requested is not None and len(requested) == 1 and str(requested[0]) in ("cpu", kind):  # a kind, for all towers
        requested = [f"{requested[0]}:{i}" for i in range(local_size)]
    chosen = parse_all(requested) if requested is not None else None
    shown_one = kind != "cpu" and count == 1 and local_size > 1 and not sees_all
    if shown_one and (chosen is None or chosen == [torch.device(kind, 0)]):
        # The launcher shows each process its own device. If all see the same one, the towers detect it when
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
