"""Running statistics that a stand-in (:mod:`mirrored.stand_in`) must not move."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from mirrored.attached.batch_norm import takes_statistics_of_all_towers
from towers.system.torch_private import NormBase


class KeptStatistics:
    """Running statistics of normalisation layers, put back after a stand-in went through them.

    Those that all towers compute together are left alone, and so are other buffers: whether they follow the examples
    (statistics) or the steps (the vectors of spectral norm, averages of parameters) cannot be told.
    """

    def __init__(self, modules: Iterator[nn.Module]) -> None:
        self._kept = [
            (tensor, tensor.clone())
            for module in modules
            if isinstance(module, NormBase) and not takes_statistics_of_all_towers(module)
            for tensor in (module.running_mean, module.running_var)
            if tensor is not None and not is_lazy(tensor)
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        """Give them their values, without a new version: backward may be yet to come."""
        for tensor, value in self._kept:
            tensor.data.copy_(value)
