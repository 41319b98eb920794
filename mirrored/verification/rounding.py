"""How far rounding alone drives a script: a run on one tower in which every module's result is moved by a last bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MARGIN = 10.0
"""Differences up to so many times those that one tower shows when its last bits are moved are rounding."""

HALF_MARGIN = 5.0
"""The same for half precision and autocast, where every step of both runs is rounded visibly, not a few by chance."""

# A sum of many numbers is off by several units of the last place; one of half precision is exact inside, so that few
# results are rounded to the neighbouring number.
_FULL = 0.5, 32.0  # how many of the numbers are moved, and by how many units of the last place
_HALF = 0.06, 1.0


class Unrest:
    """Moves numbers by about as much as adding up in another order does.

    It has generators of its own: the script's draw the same numbers as in a run without it.
    """

    def __init__(self) -> None:
        self._generators: dict[torch.device, torch.Generator] = {}

    def of(self, output: Any) -> Any:
        """A module's output, some of its numbers a few units of the last place nearer to zero.

        Never farther away: a probability stays below 1. Anything but tensors, and tuples of them, stays as it is.
        """
        if isinstance(output, Tensor):
            return self._moved(output)
        if type(output) is tuple:
            return tuple(self.of(part) for part in output)
        return output

    def _moved(self, value: Tensor) -> Tensor:
        if not value.is_floating_point() or value.layout != torch.strided or type(value) is not Tensor:
            return value
        if value.device not in self._generators:
            self._generators[value.device] = torch.Generator(value.device).manual_seed(1)
        generator = self._generators[value.device]
        part, units = _HALF if value.dtype.itemsize <= 2 else _FULL
        chosen = torch.rand(value.shape, generator=generator, device=value.device) < part
        return value * (1 - units * torch.finfo(value.dtype).eps * chosen.to(value.dtype))
