"""The values of a report that are not times: memory, learning rate, norm of gradients, floating-point operations."""

from __future__ import annotations

import pathlib
import resource
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim.optimizer import Optimizer

from towers.health.status import AFTER_OPTIMIZER, IN_STEP, OPTIMIZER, Health
from towers.system import accelerator
from towers.system.autograd_hooks import at_steps
from towers.system.torch_private import disable_dynamo

PEAKS = (
    *(("H100 NVL", 835e12), ("H100 PCIe", 756e12), ("H100", 989e12), ("H200", 989e12), ("B200", 2250e12)),
    *(("A100", 312e12), ("A40", 150e12), ("A30", 165e12), ("A10", 125e12), ("L40S", 362e12), ("L4", 121e12)),
    *(("V100", 125e12), ("T4", 65e12), ("4090", 165e12), ("3090", 71e12), ("MI300X", 1307e12), ("MI250X", 191.5e12)),
)
"""Dense 16-bit multiplications and additions per second, by a part of the device's name (data sheets)."""


def peak_of(device: torch.device) -> float | None:
    """Returns the floating-point operations per second of a device, from :data:`PEAKS`, or None if they are unknown."""
    name = accelerator.name(device) if device.type != "cpu" else ""
    return next((peak for part, peak in PEAKS if part in name), None)


def memory(device: torch.device) -> tuple[int, int]:
    """Returns the bytes that torch has allocated on a device, now and at most. For a CPU tower: those of its process.

    Zeros if the kind of device does not report them.
    """
    if device.type == "cpu":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        statm = pathlib.Path("/proc/self/statm")
        now = int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else peak
        return now, max(now, peak)
    if device.type not in ("cuda", "xpu"):
        return 0, 0
    return torch.accelerator.memory_allocated(), torch.accelerator.max_memory_allocated()


class Optimizers:
    """Follows the steps of optimizers: the learning rate, and on request the norm of their gradients.

    Args:
        counts: returns whether an optimizer belongs to the training and is not an inner optimizer.
        alone: whether there is one tower. Its phases do not include the optimizer, so ``enter`` is called for it.
        enter: called with a phase.
        measures: returns whether the gradients of the starting step are measured; None: never.
    """

    def __init__(
        self,
        health: Health,
        counts: Callable[[Optimizer], bool],
        alone: bool,
        enter: Callable[[str], object],
        measures: Callable[[], bool] | None,
    ) -> None:
        self._squares: list[Tensor] = []
        self._health = health
        self._counts: Callable[[Optimizer], bool] | None = counts
        self._alone = alone
        self._enter = enter
        self._measures = measures
        self._newest: weakref.ref[Optimizer] | None = None
        at_steps(self, Optimizers.before, Optimizers.after)

    @disable_dynamo
    def before(self, optimizer: Optimizer, *_: Any) -> None:
        """Handles an optimizer that is about to step, or whose step was refused."""
        if not self._steps_here(optimizer):
            return
        self._newest = weakref.ref(optimizer)
        if self._measures is not None and self._measures():
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
            self._squares.append(get_total_norm([g.detach() for g in dense]).square())
        if self._alone:
            self._enter(OPTIMIZER)

    @disable_dynamo
    def after(self, optimizer: Optimizer, *_: Any) -> None:
        """Handles an optimizer that has stepped."""
        if self._alone and self._steps_here(optimizer):
            self._enter(AFTER_OPTIMIZER)

    def _steps_here(self, optimizer: Optimizer) -> bool:
        in_step = not self._alone or self._health.phase in (IN_STEP, OPTIMIZER)
        return in_step and self._counts is not None and self._counts(optimizer)

    def stop(self) -> None:
        """Stops following optimizers. The hooks stay, like those of the optimizers' guard."""
        self._counts = None

    def learning_rate(self) -> float | None:
        """Returns the learning rate of the first parameters of the optimizer that stepped last."""
        optimizer = self._newest() if self._newest is not None else None
        rate = optimizer.param_groups[0].get("lr") if optimizer is not None else None
        return None if rate is None else float(rate)

    def take_norm(self) -> float | None:
        """Returns the norm of the gradients of all steps that were measured since the last call."""
        squares, self._squares = self._squares, []
        return float(torch.stack(squares).sum().sqrt()) if squares else None
