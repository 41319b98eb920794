"""Between host and device without waiting: values on their way to a device, and values of one that are read later."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """A copy of ``tensor`` on the host, under way from a device, or the tensor itself where it is there already."""

    def __init__(self, tensor: Tensor) -> None:
        self._arrived: torch.Event | None = None
        self._copy = tensor
        if tensor.device.type != "cpu":
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._arrived = torch.Event(tensor.device)
            self._arrived.record(
                torch.accelerator.current_stream(tensor.device)
            )  # which need not be the current device's

    def has_come(self) -> bool:
        """Whether :meth:`get` would not wait."""
        return self._arrived is None or self._arrived.query()

    def get(self) -> Tensor:
        """The copy; waits for it where it has not come yet."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
        return self._copy


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``; the host does not wait for a device that it is sent to."""
    if device.type != "cpu" and tensor.device.type == "cpu":
        return pinned(tensor).to(device, non_blocking=True)
    return tensor.to(device)


def pinned(tensor: Tensor) -> Tensor:
    """A strided tensor of the CPU in memory from which a device copies by itself, also where its elements overlap."""
    return tensor if tensor.is_pinned() else torch.empty_like(tensor, pin_memory=True).copy_(tensor)
