"""Which devices a worker's towers run on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import torch

Device = str | torch.device


def count_gpus() -> int:
    """How many GPUs this process sees (``CUDA_VISIBLE_DEVICES`` applies)."""
    return torch.cuda.device_count()


def parse(device: Device) -> torch.device:
    """One device from its name.

    Takes torch's names (``"cuda:1"``, ``"cpu:0"``) and TensorFlow's (``"/gpu:1"``, ``"GPU:1"``,
    ``"/device:CPU:0"``). A bare ``"cuda"`` or ``"cpu"`` is number 0.

    Raises:
        ValueError: it names no CPU and no GPU.
    """
    if isinstance(device, str):
        match = re.fullmatch(r"/?(?:device:)?(cpu|gpu|cuda)(?::([0-9]{1,9}))?", device.strip().lower())
        if match is None:
            raise ValueError(f"device {device!r} is not understood; write 'cuda:0', 'cpu:0' or '/gpu:0'")
        kind = "cpu" if match[1] == "cpu" else "cuda"
        return torch.device(kind, int(match[2] or 0))
    if not isinstance(device, torch.device) or device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r} is not a CPU or a CUDA device")
    return torch.device(device.type, device.index or 0)


def parse_all(devices: Iterable[Device]) -> list[torch.device]:
    """The devices of one worker, one per tower, in order.

    Raises:
        TypeError: a single name instead of a list of names.
        ValueError: none at all, one named twice, or CPUs mixed with GPUs.
    """
    if isinstance(devices, (str, torch.device)):
        raise TypeError(f"devices must be a list of devices, such as [{str(devices)!r}], not one device")
    if not isinstance(devices, Iterable):
        raise TypeError(f"devices must be a list of devices, such as ['cuda:0', 'cuda:1'], not {devices!r}")
    parsed = [parse(device) for device in devices]
    if not parsed:
        raise ValueError("devices is empty; leave it out to use every GPU, or name at least one device")
    twice = sorted({str(device) for device in parsed if parsed.count(device) > 1})
    if twice:
        raise ValueError(
            f"devices names {', '.join(twice)} more than once; each tower needs a device of its own "
            "(two CPU towers are ['cpu:0', 'cpu:1'])"
        )
    if len({device.type for device in parsed}) > 1:
        raise ValueError(f"devices mixes CPUs and GPUs: {', '.join(map(str, parsed))}; use one kind")
    return parsed


def for_worker(requested: Iterable[Device] | None) -> list[torch.device]:
    """The devices of the towers that a worker is to start: ``requested``, else every visible GPU, else one CPU.

    Raises:
        TypeError, ValueError: as of :func:`parse_all` and :func:`check_exist`.
    """
    gpus = count_gpus()
    if requested is None:
        return [torch.device("cuda", i) for i in range(gpus)] or [torch.device("cpu", 0)]
    parsed = parse_all(requested)
    check_exist(parsed, gpus)
    return parsed


def check_exist(devices: Sequence[torch.device], gpus: int) -> None:
    """See that every GPU named is one of the ``gpus`` that this process sees.

    Raises:
        ValueError: names the missing GPUs and how many there are.
    """
    missing = [str(device) for device in devices if device.type == "cuda" and device.index >= gpus]
    if missing:
        seen = f"only {gpus} GPU{'s' if gpus > 1 else ''}" if gpus else "no GPU"
        raise ValueError(
            f"{', '.join(missing)} asked for, but this process sees {seen}; check CUDA_VISIBLE_DEVICES and "
            "nvidia-smi, or ask for CPU towers with devices=['cpu:0', 'cpu:1']"
        )


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
        TypeError: as of :func:`parse_all`.
        ValueError: ``requested`` names another number of devices than the launcher started towers, a
            device that does not exist, or there are more towers than GPUs.
    """
    gpus = count_gpus()
    chosen = parse_all(requested) if requested is not None else None
    shown_one = gpus == 1 and local_size > 1 and not sees_all
    if shown_one and (chosen is None or chosen == [torch.device("cuda", 0)]):
        # The launcher shows each process its own GPU; if it is the same one after all, the towers find out when
        # they join.
        return torch.device("cuda", 0)
    if chosen is None:
        if gpus == 0:
            return torch.device("cpu", local_index)
        if local_size > gpus:
            raise ValueError(
                f"{local_size} towers on this machine (from {origin}), but only {gpus} "
                f"GPU{'s' if gpus > 1 else ''}: start at most {gpus}, or ask for CPU towers with "
                f"devices={[f'cpu:{i}' for i in range(local_size)]!r}"
            )
        return torch.device("cuda", local_index)
    if len(chosen) != local_size:
        raise ValueError(
            f"devices names {len(chosen)} ({', '.join(map(str, chosen))}), but {local_size} towers were "
            f"started on this machine (from {origin}); leave devices out, or start as many towers as it names"
        )
    check_exist(chosen, gpus)
    return chosen[local_index]
