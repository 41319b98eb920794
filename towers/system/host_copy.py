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


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns ``tensor`` on ``device``. The host does not wait for the device that it sends the tensor to."""
    if device.type != "cpu" and tensor.device.type == "cpu":
        return pinned(tensor).to(device, non_blocking=True)
    return tensor.to(device)


def pinned(tensor: Tensor) -> Tensor:
    """Returns a strided CPU tensor in memory from which a device copies by itself, even if its elements overlap."""
    return tensor if tensor.is_pinned() else torch.empty_like(tensor, pin_memory=True).copy_(tensor)
