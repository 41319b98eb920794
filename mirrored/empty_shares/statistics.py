"""Running statistics that a stand-in must not move."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from towers.system.torch_private import NormBase


def takes_statistics_of_all_towers(module: nn.Module) -> bool:
    """Whether a layer's running statistics are those of the global batch."""
    return isinstance(module, nn.SyncBatchNorm) or getattr(module, "takes_statistics_of_all_towers", False)


@contextlib.contextmanager
def statistics_kept(
    roots: Callable[[], Iterator[tuple[str, nn.Module]]], before_step: list[Callable[[Optimizer], object]]
) -> Iterator[None]:
    """Inside, a stand-in may go through normalisation layers; their running statistics are the same after it.

    Those that all towers compute together are left alone, and so are other buffers: whether they follow the examples
    (statistics) or the steps (the vectors of spectral norm, averages of parameters) cannot be told.

    Args:
        roots: returns the names and modules in which the layers are.
        before_step: called when an optimizer is about to step: the script may copy the model then.
    """
    kept = [
        (tensor, tensor.clone())
        for _, root in roots()
        for module in root.modules()
        if isinstance(module, NormBase) and not takes_statistics_of_all_towers(module)
        for tensor in (module.running_mean, module.running_var)
        if tensor is not None and not is_lazy(tensor)
    ]

    @torch.no_grad()
    def put_back(optimizer: Optimizer | None = None) -> None:
        for tensor, value in kept:
            tensor.data.copy_(value)  # without a new version: backward may be yet to come

    before_step.append(put_back)
    try:
        yield
    finally:
        before_step.remove(put_back)
        put_back()
