"""Tables that stay in the host's memory while towers compute on accelerators.

[Note: tables on the host] An ``nn.Embedding`` or ``nn.EmbeddingBag`` with ``sparse=True`` that is created in the scope
has its weight on the CPU. So the weight may be larger than a device's memory. Its forward copies the indices to the
host, and the rows that it has looked up to the device. Backward copies their gradients back. Do not call
``model.to(device)``, which would move the table: the other parameters are already created on the device.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from towers.system import tree as trees

_KINDS: tuple[type[nn.Module], ...] = (nn.Embedding, nn.EmbeddingBag)


@contextlib.contextmanager
def kept_on_host(device: torch.device) -> Iterator[None]:
    """Creates tables with sparse gradients on the host, inside the context. Their results are on ``device``."""
    before = [kind.__init__ for kind in _KINDS]
    for kind, init in zip(_KINDS, before, strict=True):
        kind.__init__ = _on_host(init, device)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for kind, init in zip(_KINDS, before, strict=True):
            kind.__init__ = init  # type: ignore[method-assign]


def _on_host(init: Callable[..., None], device: torch.device) -> Callable[..., None]:
    @functools.wraps(init)
    def create(table: Any, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("sparse") or kwargs.get("device") is not None:
            init(table, *args, **kwargs)
            return
        init(table, *args, **{**kwargs, "device": "cpu"})
        table.register_forward_pre_hook(_take_to_host, with_kwargs=True)
        table.register_forward_hook(functools.partial(_take_to_device, device))

    return create


def _take_to_device(device: torch.device, table: nn.Module, args: Any, rows: Tensor) -> Tensor:
    return rows.to(device)


def _take_to_host(table: nn.Module, args: Any, kwargs: Any) -> Any:
    return trees.map_leaves(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, (args, kwargs))
