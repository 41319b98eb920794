"""Running statistics that a stand-in (:mod:`mirrored.stand_in`) must not move."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from towers.system.torch_private import NormBase


def takes_statistics_of_all_towers(module: nn.Module) -> bool:
    """Whether a layer's running statistics are those of the global batch."""
    return isinstance(module, nn.SyncBatchNorm) or getattr(module, "takes_statistics_of_all_towers", False)


class KeptStatistics:
    """Running statistics of normalisation layers, put back after a stand-in went through them.

    Those that all towers compute together are left alone, and so are other buffers: whether they follow the examples
    (statistics) or the steps (the vectors of spectral norm, averages of parameters) cannot be told.

    Args:
        roots: returns the names and modules in which the layers are.
    """

    def __init__(self, roots: Callable[[], Iterator[tuple[str, nn.Module]]]) -> None:
        self._roots = roots
        self._kept: list[tuple[Tensor, Tensor]] = []

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Inside, a stand-in may go through the layers; their statistics are the same after it."""
        outer = self._kept
        self._kept = [
            (tensor, tensor.clone())
            for _, root in self._roots()
            for module in root.modules()
            if isinstance(module, NormBase) and not takes_statistics_of_all_towers(module)
            for tensor in (module.running_mean, module.running_var)
            if tensor is not None and not is_lazy(tensor)
        ]
        try:
            yield
        finally:
            self.put_back()
            self._kept = outer

    @torch.no_grad()
    def put_back(self, optimizer: object = None) -> None:
        """Give them their values, without a new version: backward may be yet to come.

        It is done before an optimizer steps, too: the script may copy the model then.
        """
        for tensor, value in self._kept:
            tensor.data.copy_(value)
