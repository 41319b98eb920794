"""The strategy whose towers share one copy of the parameters, in the memory of their host.

[Note: tables on the host] An ``nn.Embedding`` or ``nn.EmbeddingBag`` with ``sparse=True`` that is created in the scope
has its weight on the CPU. So the weight may be larger than a device's memory. Its forward copies the indices to the
host, and the rows that it has looked up to the device. Backward copies their gradients back. Do not call
``model.to(device)``, which would move the table: the other parameters are already created on the device.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mirrored.strategy.base import Strategy
from mirrored.strategy.engine import TrainingOptions
from mirrored.strategy.kinds import MirroredStrategy
from towers.options import instead_of
from towers.system import devices
from towers.system import tree as trees
from towers.system.devices import Device

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


class CentralStorageStrategy(MirroredStrategy):
    """Trains one model on all devices of this machine, with one copy of parameters and optimizer state in host memory.

    Each tower updates its part of the copy in place. On CPU towers, the model's parameters are that memory.
    Accelerators receive the new values after every step, and hold no optimizer state. The numbers are those of
    :class:`MirroredStrategy`. Optimizers must update each element independently, as with ``shard_optimizer=True``, or
    each row independently (``SparseAdam``, ``Adagrad`` and ``SGD`` without momentum on ``nn.Embedding(sparse=True)``).

    Args:
        compute_devices: one per tower, as ``devices`` of :class:`MirroredStrategy`.
        parameter_device: the device of parameters and state. It must be the CPU, which is the default.
        options: ``communication``, ``virtual_towers``, ``mirror_check_interval``, ``nonfinite_gradients`` and ``seed``,
            see :class:`MirroredStrategy`.

    Raises:
        ValueError: ``parameter_device`` does not exist or is not the CPU; otherwise see :class:`MirroredStrategy`.
        StartupError: the towers run on several hosts, or cannot share memory.
    """

    _options = staticmethod(functools.partial(TrainingOptions, central=True))

    @instead_of(devices="compute_devices=", shard_optimizer="leave it out: each tower updates its part already")
    def __init__(
        self,
        compute_devices: Sequence[Device] | None = None,
        parameter_device: Device | None = None,
        **options: Any,
    ) -> None:
        _check_parameter_device(parameter_device)
        super().__init__(compute_devices, shard_optimizer=True, **options)

    @contextlib.contextmanager
    def scope(self, *, sync_batch_norm: bool = False) -> Iterator[Strategy]:
        """Works as :meth:`Strategy.scope`. Accelerators' tables stay on the host."""
        on_host = kept_on_host(self.device) if self.device.type != "cpu" else contextlib.nullcontext()
        with super().scope(sync_batch_norm=sync_batch_norm), on_host:
            yield self


def _check_parameter_device(device: Device | None) -> None:
    if device is None:
        return
    parsed = devices.parse(device)
    devices.check_exist([parsed])
    if parsed.type != "cpu":
        raise ValueError(
            f"parameter_device is {parsed}, but central storage keeps parameters in the host's memory: omit it, "
            "or pass 'cpu:0'. To keep parameters and optimizer state on every device, use MirroredStrategy"
        )
