"""BatchNorm layers that normalise over the global batch: ``strategy.scope(sync_batch_norm=True)``.

Such a layer stays the object that the script made, with its parameters, buffers, hooks and ``state_dict``; its class
becomes a subclass of the class that it had, with another ``forward``, as torch does to its lazy modules.
``isinstance(layer, nn.BatchNorm2d)`` stays true. A function put on the object instead would belong to the original in
shallow copies, and be out of sight when the model is printed.

In training mode ``forward`` and ``backward`` are collectives: all towers make the same ones in the same order, also
with an empty share, inside ``run`` and outside, and in ``no_sync``. In eval mode, and where there is one tower, a layer
is the plain one. Copies and pickled layers stay synchronised; a model that is to be scripted or converted gets its
``state_dict`` into plain layers. What ``nn.SyncBatchNorm`` does already, through c10d, is left to it.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mirrored.context import current_frame, strategy_with_towers
from mirrored.stand_in import is_stand_in
from towers import ForkedError, batch_norm
from towers.collectives.agreement import announce
from towers.collectives.communicator import Communicator
from towers.collectives.labelled import LabelledGather
from towers.log import get_logger

log = get_logger("mirrored")


class BatchNorms:
    """What the BatchNorm layers of one strategy share.

    Args:
        communicator: over all towers.
        name_of: how messages call a layer; None when it is in no mirrored model.
    """

    def __init__(self, communicator: Communicator, name_of: Callable[[nn.Module], str | None]) -> None:
        self._communicator = communicator
        self._name_of = name_of
        self._gather: LabelledGather | None = None
        self._widest = 0
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._nameless = 0
        self._left_alone: set[type] = set()
        self._pid = os.getpid()

    def adopt(self, module: nn.Module) -> None:
        """Make ``module`` normalise over the global batch if it is a BatchNorm layer; may be called again."""
        if not isinstance(module, _BatchNorm) or isinstance(module, (_OverAllTowers, nn.SyncBatchNorm)):
            return
        kind: Any = type(module)
        if kind.forward is not _BatchNorm.forward or "forward" in vars(module):
            if kind not in self._left_alone and self._communicator.index == 0:
                log.warning(
                    "%s has a forward of its own, which sync_batch_norm leaves alone: it normalises over each "
                    "tower's own share",
                    kind.__qualname__,
                )
            self._left_alone.add(kind)
            return
        self._widest = max(self._widest, module.num_features)
        module.__class__ = _over_all_towers(kind)

    def normalise(self, layer: _BatchNorm, x: Tensor, counts: bool = True) -> Tensor:
        """What ``layer`` makes of this tower's share ``x`` in training mode; all towers call it.

        Args:
            counts: whether ``x`` belongs to the global batch; a stand-in for examples does not.

        Raises:
            ValueError, RuntimeError: ``x`` does not fit the layer.
            ValueError, DisagreementError: as of :func:`towers.batch_norm.normalise`.
            ForkedError: in a process that was forked from a tower.
        """
        layer._check_input_dim(x)
        running = None
        if layer.track_running_stats and layer.running_mean is not None and layer.running_var is not None:
            running = layer.running_mean, layer.running_var
        for tensor in (layer.weight, layer.bias, *(running or ())):
            if tensor is not None and tensor.numel() != x.shape[1]:
                raise RuntimeError(f"a BatchNorm of {tensor.numel()} features was given {x.shape[1]} channels")
        momentum: float | Tensor = layer.momentum or 0.0
        if layer.track_running_stats and layer.num_batches_tracked is not None:
            layer.num_batches_tracked.add_(1)
            if layer.momentum is None:  # the mean of all batches
                momentum = 1.0 / layer.num_batches_tracked.double()
        gather = self._connect()
        return batch_norm.normalise(
            gather, self._name(layer), x, layer.weight, layer.bias, running, momentum, layer.eps, counts
        )

    def _connect(self) -> LabelledGather:
        """The layers' own channel, so that their collectives never meet those of buckets or of the script."""
        if os.getpid() != self._pid:
            raise ForkedError(
                "a BatchNorm of sync_batch_norm was used in training mode in a process that was forked from a tower; "
                "call eval() on the model there"
            )
        if self._gather is None:
            announce(self._communicator, "the first BatchNorm over the global batch")
            self._gather = LabelledGather(self._communicator.channel())
        self._gather.foresee(2 * self._widest)
        return self._gather

    def _name(self, layer: _BatchNorm) -> str:
        name = self._names.get(layer)
        if name is None:
            name = self._name_of(layer)
            if name is None:
                self._nameless += 1
                name = f"BatchNorm {self._nameless} in no mirrored model ({layer.num_features} features)"
            self._names[layer] = name
        return name


def takes_statistics_of_all_towers(module: nn.Module) -> bool:
    """Whether a layer's running statistics are those of the global batch."""
    return isinstance(module, (_OverAllTowers, nn.SyncBatchNorm))


class _OverAllTowers(_BatchNorm):
    """Comes before a class of BatchNorm layers in :func:`_over_all_towers`."""

    plain: ClassVar[type[_BatchNorm]]

    def forward(self, input: Tensor) -> Tensor:
        return _train(self, input) if self.training else super().forward(input)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # Copies and pickles: the class was made here and cannot be imported by name.
        return (_new, (self.plain,), *super().__reduce_ex__(protocol)[2:])  # type: ignore[misc]


@functools.cache
def _over_all_towers(plain: Any) -> Any:
    """The subclass of ``plain`` that normalises over the global batch."""
    attributes: dict[str, Any] = {"plain": plain, "__module__": __name__, "__doc__": plain.__doc__}
    if (later := getattr(plain, "cls_to_become", None)) is not None:  # a lazy one
        attributes["cls_to_become"] = _over_all_towers(later)
    return type(f"Sync{plain.__name__}", (_OverAllTowers, plain), attributes)


def _new(plain: Any) -> Any:
    kind = _over_all_towers(plain)
    return kind.__new__(kind)


@torch._disable_dynamo
def _train(layer: _BatchNorm, x: Tensor) -> Tensor:
    frame = current_frame()
    strategy = frame.strategy if frame is not None else strategy_with_towers()
    if strategy is None or strategy.engine.batch_norms is None:
        return _BatchNorm.forward(layer, x)
    counts = not is_stand_in(strategy, (x,), x.shape[0] if x.dim() else None, "the input of a BatchNorm")
    return strategy.engine.batch_norms.normalise(layer, x, counts)
