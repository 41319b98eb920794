"""BatchNorm layers that normalise over the global batch: ``strategy.scope(sync_batch_norm=True)``.

[Note: layers change their class] A synchronised layer is still the object that the script created, with its parameters,
buffers, hooks and ``state_dict``. Its class becomes a subclass of its former class, with another ``forward``, as torch
does with lazy modules. ``isinstance(layer, nn.BatchNorm2d)`` remains true, copies and pickles work, and the printed
model shows the class. Hooks are not sufficient, because they run before or after a forward, not instead of it. Replaced
layers would break references in the script. A function assigned to the object would belong to the original object in
shallow copies. The class's forward, torch's or a custom one, is called unchanged, and only its call of ``F.batch_norm``
is replaced.

[Note: custom forwards] The forward of a BatchNorm subclass may do more than normalise: drop, activate, scale by a
condition. It normalises with ``super().forward(x)``, a method of torch's class, or ``F.batch_norm`` with the layer's
parameters. All of these, and torch's forward itself, look that function up by name in ``torch.nn.functional``. So while
a forward runs, the name refers to another function. It handles the layer's own calls and passes the others on. A
forward without such a call computes statistics in a way that cannot be made global, which is an error.

[Note: messages of batch norms] The layers have their own process group. A message contains the layer and the direction,
and has the length of the widest layer's. Both directions are all-gathers: a sum would make the name unreadable, and
rows that every tower adds in tower order give the same bits everywhere. Between GPUs, the host does not wait: a message
of another layer turns the statistics into NaN, and raises an error at one of the next layers.

In training mode, ``forward`` and ``backward`` are collectives. All towers must run the same ones in the same order,
even with an empty share, inside and outside ``run``, and in ``no_sync``. In eval mode, and on one tower, a layer works
as the plain layer. Copies and unpickled layers stay synchronised. To script or convert a model, load its ``state_dict``
into plain layers. ``nn.SyncBatchNorm`` layers, which already synchronise through c10d, are not changed.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import threading
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from mirrored.context import current_replica, current_strategy
from mirrored.empty_shares import is_stand_in
from towers import batch_norm
from towers.collectives.agreement import announce
from towers.collectives.communicator import Communicator
from towers.collectives.labelled import LabelledGather
from towers.errors import ForkedError
from towers.system.profiling import range_
from towers.system.torch_private import BatchNormBase, disable_dynamo

_QUANTISED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")


class BatchNorms:
    """The common state of all BatchNorm layers of one strategy.

    Args:
        communicator: collectives over all towers.
        name_of: returns a layer's name for messages, or None if it is in no mirrored model.
    """

    def __init__(self, communicator: Communicator, name_of: Callable[[nn.Module], str | None]) -> None:
        self._communicator = communicator
        self._name_of = name_of
        self._gather: LabelledGather | None = None
        self._widest = 0
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._nameless = 0
        self._pid = os.getpid()

    def adopt(self, module: nn.Module) -> None:
        """Makes ``module`` normalise over the global batch if it is a BatchNorm layer. Repeated calls are allowed.

        Raises:
            TypeError: its forward was assigned to the object, instead of the class.
        """
        if not isinstance(module, BatchNormBase) or isinstance(module, (_OverAllTowers, nn.SyncBatchNorm)):
            return
        kind: Any = type(module)
        if any(base.__module__.startswith(_QUANTISED) for base in kind.__mro__):
            return  # these always use running statistics
        if "forward" in vars(module):
            raise TypeError(
                f"sync_batch_norm=True cannot change a {kind.__qualname__} of {module.num_features} features, "
                "because a forward method was assigned to the object: it would still normalise over each "
                "tower's own share. Assign it after the layer was created in scope(sync_batch_norm=True), or "
                "define it in a subclass"
            )
        self._widest = max(self._widest, module.num_features)
        module.__class__ = _over_all_towers(kind)  # see [Note: layers change their class]

    def train(self, layer: _OverAllTowers, forward: Callable[[], Any], counts: bool) -> Any:
        """Returns the output of ``layer`` in training for this tower's share. All towers must call it.

        Args:
            forward: calls the plain class's forward on this tower's share.
            counts: whether its input belongs to the global batch; False for a stand-in.

        Raises:
            RuntimeError: the forward does not normalise with ``F.batch_norm``.
            ValueError, DisagreementError: see :func:`towers.batch_norm.normalise`.
            ForkedError: in a process that was forked from a tower.
        """
        where: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if current_replica() is None:  # such as an evaluation of the chief that forgets eval()
            where = self._communicator.health.during(f"in {self._name(layer)} (BatchNorm in training mode)")
        with where, _OwnCalls(layer, functools.partial(self._normalise, counts=counts)) as calls:
            result = forward()
        if not calls.answered:
            raise RuntimeError(
                f"{self._name(layer)}: the forward of {layer.plain.__qualname__} computes the batch statistics "
                "without F.batch_norm or torch's forward with the layer's own parameters, so "
                "sync_batch_norm=True cannot compute them over the global batch. To use the statistics of each "
                "tower's own share, create the layer outside scope(sync_batch_norm=True)"
            )
        return result

    def _normalise(
        self,
        layer: BatchNormBase,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running: tuple[Tensor, Tensor] | None,
        momentum: float,
        eps: float,
        *,
        counts: bool,
    ) -> Tensor:
        for tensor in (weight, bias, *(running or ())):
            if tensor is not None and tensor.numel() != x.shape[1]:
                raise RuntimeError(f"a BatchNorm of {tensor.numel()} features was given {x.shape[1]} channels")
        gather, name = self._connect(), self._name(layer)
        with range_("mirrored::batch-norm"):
            return batch_norm.normalise(gather, name, x, weight, bias, running, momentum, eps, counts)

    def _connect(self) -> LabelledGather:
        """Returns the layers' own channel, which separates their collectives from those of gradients and the script."""
        if os.getpid() != self._pid:
            raise ForkedError(
                "a BatchNorm of sync_batch_norm was used in training mode in a process that was forked from a tower; "
                "call eval() on the model there"
            )
        if self._gather is None:
            announce(self._communicator, "the first BatchNorm over the global batch")
            self._gather = LabelledGather(self._communicator.channel())  # see [Note: messages of batch norms]
        self._gather.foresee(2 * self._widest)
        return self._gather

    def _name(self, layer: BatchNormBase) -> str:
        name = self._names.get(layer)
        if name is None:
            name = self._name_of(layer)
            if name is None:
                self._nameless += 1
                name = f"BatchNorm {self._nameless} in no mirrored model ({layer.num_features} features)"
            self._names[layer] = name
        return name


class _OverAllTowers(BatchNormBase):
    """The forward over all towers. The classes of :func:`_over_all_towers` have it as their first base."""

    plain: ClassVar[type[BatchNormBase]]
    takes_statistics_of_all_towers: ClassVar[bool] = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.training:
            return super().forward(*args, **kwargs)
        return _train(self, super().forward, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # Pickles contain the plain class, which can be loaded where this package is not installed.
        return (object.__new__, (self.plain,), *super().__reduce_ex__(protocol)[2:])  # type: ignore[misc]

    def __copy__(self) -> _OverAllTowers:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> _OverAllTowers:
        memo[id(self)] = other = object.__new__(type(self))
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return other


@functools.cache
def _over_all_towers(plain: Any) -> Any:
    """Returns the subclass of ``plain`` that normalises over the global batch."""
    attributes: dict[str, Any] = {"plain": plain, "__module__": __name__, "__doc__": plain.__doc__}
    if (later := getattr(plain, "cls_to_become", None)) is not None:  # a lazy layer
        attributes["cls_to_become"] = _over_all_towers(later)
    return type(f"Sync{plain.__name__}", (_OverAllTowers, plain), attributes)


@disable_dynamo
def _train(layer: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs the forward of ``layer`` in training mode. ``forward`` is that of its plain class."""
    strategy = current_strategy()
    layers = strategy.engine.attached(BatchNorms) if strategy is not None else None
    x = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
    if strategy is None or layers is None or x is None:
        return forward(*args, **kwargs)
    counts = not is_stand_in(strategy, (x,), x.shape[0] if x.dim() else None, "the input of a BatchNorm")
    return layers.train(layer, lambda: forward(*args, **kwargs), counts)


_Normalise = Callable[
    [BatchNormBase, Tensor, Tensor | None, Tensor | None, tuple[Tensor, Tensor] | None, float, float], Tensor
]
"""Computes the output in training mode.

The arguments are the layer, its input, weight, bias, running mean and variance, momentum and eps.
"""


class _OwnCalls:
    """The context of one forward of a layer.

    Attributes:
        layer: the layer whose calls of ``F.batch_norm`` are replaced.
        normalise: replaces these calls in training mode.
        answered: whether the layer has called ``F.batch_norm``.
    """

    def __init__(self, layer: _OverAllTowers, normalise: _Normalise) -> None:
        self.layer = layer
        self.normalise = normalise
        self.answered = False

    def __enter__(self) -> _OwnCalls:
        global _forwards, _original
        with _lock:
            if _forwards == 0:
                _original, F.batch_norm = F.batch_norm, _batch_norm
            _forwards += 1
        self._outer = _inside.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        global _forwards
        _inside.reset(self._outer)
        with _lock:
            _forwards -= 1
            if _forwards == 0:
                F.batch_norm = _original

    def is_own(self, *tensors: Tensor | None) -> bool:
        """Returns whether a call with these statistics, weight and bias belongs to the layer."""
        layer = self.layer
        if layer.plain.forward is BatchNormBase.forward:  # torch's forward, which makes no other call
            return True
        of_layer = layer.running_mean, layer.running_var, layer.weight, layer.bias
        return all(tensor is None for tensor in of_layer) or any(
            tensor is not None and tensor is layers_own for tensor, layers_own in zip(tensors, of_layer, strict=True)
        )


_inside: ContextVar[_OwnCalls | None] = ContextVar("the innermost forward that this thread is in", default=None)
_lock = threading.Lock()
_forwards = 0  # the number of running forwards, of all threads
_original: Any = None


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Replaces ``F.batch_norm`` while a layer's forward runs."""
    forward = _inside.get()
    if forward is not None and forward.is_own(running_mean, running_var, weight, bias):
        forward.answered = True
        if training:
            running = None if running_mean is None or running_var is None else (running_mean, running_var)
            return forward.normalise(forward.layer, input, weight, bias, running, momentum, eps)
    result: Tensor = _original(input, running_mean, running_var, weight, bias, training, momentum, eps)
    return result
