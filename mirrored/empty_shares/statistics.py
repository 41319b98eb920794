"""Running statistics that a stand-in must not change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from towers.system.torch_private import NormBase


def takes_statistics_of_all_towers(module: nn.Module) -> bool:
    """Returns whether a layer's running statistics are those of the global batch."""
    return isinstance(module, nn.SyncBatchNorm) or getattr(module, "takes_statistics_of_all_towers", False)


@contextlib.contextmanager
def statistics_kept(
    roots: Callable[[], Iterator[tuple[str, nn.Module]]], before_step: list[Callable[[Optimizer], object]]
) -> Iterator[None]:
    """Restores the running statistics of normalisation layers after a stand-in passes through them.

    Layers whose statistics all towers compute together are left alone. So are other buffers, because nothing shows
    whether they depend on the examples (statistics) or on the steps (vectors of spectral norm, averages of parameters).

    Args:
        roots: returns the names and modules that contain the layers.
        before_step: listeners that are called when an optimizer is about to step, since the script may copy the model
            then.
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
            tensor.data.copy_(value)  # without a new version, because backward may still follow

    before_step.append(put_back)
    try:
        yield
    finally:
        before_step.remove(put_back)
        put_back()
