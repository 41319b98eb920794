"""The strategy whose towers share one copy of the parameters, in the memory of their host."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from mirrored.central import tables
from mirrored.strategy.base import Strategy
from mirrored.strategy.kinds import MirroredStrategy
from mirrored.strategy.options import TrainingOptions
from towers.options import instead_of
from towers.system import devices
from towers.system.devices import Device


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
        """Works as :meth:`Strategy.scope`. Accelerators' tables stay on the host (:mod:`mirrored.central.tables`)."""
        on_host = tables.kept_on_host(self.device) if self.device.type != "cpu" else contextlib.nullcontext()
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
