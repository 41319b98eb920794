"""Copies between host and device without waiting: values sent to a device, and a device's values read later."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """A copy of ``tensor`` on the host, which may still be in progress; or ``tensor`` itself if it is on the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._arrived: torch.Event | None = None
        self._copy = tensor
        if tensor.device.type != "cpu":
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._arrived = torch.Event(tensor.device)
            self._arrived.record(
                torch.accelerator.current_stream(tensor.device)
            )  # may be on another device than the current one

    def has_come(self) -> bool:
        """Returns whether :meth:`get` would return without waiting."""
        if self._arrived is not None and self._arrived.query():
            self._arrived = None
        return self._arrived is None

    def get(self) -> Tensor:
        """Returns the copy, and waits for it if it has not arrived yet."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
        return self._copy


class CopyFromDevices:
    """Copies bytes of devices into ordinary memory, through two pinned buffers.

    While the host empties one buffer, the devices fill the other one. So the host waits once for each buffer, and not
    for each tensor, and little memory is pinned.

    Args:
        nbytes: the size of a buffer; 32 MiB if it is more.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = min(max(nbytes, 1), 2**25)
        self._filling: list[tuple[Tensor, Tensor]] = []  # parts of a buffer, and their places in memory
        self._full: tuple[torch.Event, list[tuple[Tensor, Tensor]]] | None = None
        self._buffers: list[Tensor] = []
        self._used, self._device = 0, torch.device("cpu")

    def add(self, data: Tensor, target: Tensor) -> None:
        """Starts to copy ``data``, bytes of a device, to ``target``. :meth:`finish` completes all copies."""
        if not self._buffers:
            self._buffers = [torch.empty(self._nbytes, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in "ab"]
        for source, place in zip(data.split(self._nbytes), target.split(self._nbytes), strict=True):
            if self._filling and (self._used + len(source) > self._nbytes or source.device != self._device):
                self._swap()
            self._device = source.device
            part = self._buffers[0][self._used : self._used + len(source)]
            self._used += len(source)
            part.copy_(source, non_blocking=True)
            self._filling.append((part, place))

    def _swap(self) -> None:
        filled = torch.Event(self._device)
        filled.record(torch.accelerator.current_stream(self._device))
        before, self._full = self._full, (filled, self._filling)
        self._filling, self._used = [], 0
        self._buffers.reverse()
        self._empty(before)

    @staticmethod
    def _empty(full: tuple[torch.Event, list[tuple[Tensor, Tensor]]] | None) -> None:
        if full is not None:
            filled, parts = full
            filled.synchronize()
            for part, place in parts:
                place.copy_(part)

    def finish(self) -> None:
        """Returns when everything is copied."""
        if self._filling:
            self._swap()
        self._empty(self._full)
        self._full = None


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns ``tensor`` on ``device``. The host does not wait for the device that it sends the tensor to."""
    if device.type != "cpu" and tensor.device.type == "cpu":
        return pinned(tensor).to(device, non_blocking=True)
    return tensor.to(device)


def pinned(tensor: Tensor) -> Tensor:
    """Returns a strided CPU tensor in memory from which a device copies by itself, even if its elements overlap."""
    return tensor if tensor.is_pinned() else torch.empty_like(tensor, pin_memory=True).copy_(tensor)
