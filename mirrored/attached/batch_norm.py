"""BatchNorm layers that normalise over the global batch: ``strategy.scope(sync_batch_norm=True)``.

[Note: layers change their class] Such a layer stays the object that the script made, with its parameters, buffers,
hooks and ``state_dict``; its class becomes a subclass of the class that it had, with another ``forward``, as torch does
to its lazy modules. ``isinstance(layer, nn.BatchNorm2d)`` stays true, copies and pickles work, and the printed model
shows it. Hooks cannot do it (they come before or after a forward, not instead), replaced layers would break references
that the script holds, and a function put on the object would belong to the original in shallow copies. The class'
forward, torch's or one of its own, is called as it is; only its call of ``F.batch_norm`` is answered here.

[Note: forwards of their own] A subclass of BatchNorm may do more in its forward than normalise: drop, activate, scale
by a condition. It normalises by ``super().forward(x)``, by a method of torch's class, or by ``F.batch_norm`` with its
own parameters. All of these, and torch's forward itself, look that function up by its name in ``torch.nn.functional``.
So while a forward runs, another function has the name. It answers the layer's own calls and hands the others on. A
forward without such a call takes statistics in a way that cannot be made global; that is an error.

[Note: messages of batch norms] The layers have a process group of their own. A message names its layer and its
direction, and is as long as that of the widest layer. Both directions are all-gathers: a sum would not leave the name
readable, and rows that every tower adds in tower order give the same bits on all. Between GPUs the host does not wait:
a message of another layer turns the statistics into NaN, and is an error at one of the next layers.

In training mode ``forward`` and ``backward`` are collectives: all towers make the same ones in the same order, also
with an empty share, inside ``run`` and outside, and in ``no_sync``. In eval mode, and where there is one tower, a layer
is the plain one. Copies and pickled layers stay synchronised; a model that is to be scripted or converted gets its
``state_dict`` into plain layers. What ``nn.SyncBatchNorm`` does already, through c10d, is left to it.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from mirrored.context import current_strategy
from mirrored.empty_shares.stand_in import is_stand_in
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
        communicator: over all towers.
        name_of: the name that messages give a layer; None when it is in no mirrored model.
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
        """Make ``module`` normalise over the global batch if it is a BatchNorm layer; may be called again.

        Raises:
            TypeError: its forward belongs to the object and not to its class.
        """
        if not isinstance(module, BatchNormBase) or isinstance(module, (_OverAllTowers, nn.SyncBatchNorm)):
            return
        kind: Any = type(module)
        if any(base.__module__.startswith(_QUANTISED) for base in kind.__mro__):
            return  # these take running statistics always
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
        """The output of ``layer`` in training for this tower's share; all towers call it.

        Args:
            forward: that of its plain class, on this tower's share.
            counts: whether its input belongs to the global batch; a stand-in for examples does not.

        Raises:
            RuntimeError: the forward does not normalise by ``F.batch_norm``.
            ValueError, DisagreementError: see :func:`towers.batch_norm.normalise`.
            ForkedError: in a process that was forked from a tower.
        """
        with _OwnCalls(layer, functools.partial(self._normalise, counts=counts)) as calls:
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
        """The layers' own channel, so that their collectives never meet those of buckets or of the script."""
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
    """The forward over all towers; the first base of the classes that :func:`_over_all_towers` makes."""

    plain: ClassVar[type[BatchNormBase]]
    takes_statistics_of_all_towers: ClassVar[bool] = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.training:
            return super().forward(*args, **kwargs)
        return _train(self, super().forward, args, kwargs)

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


@disable_dynamo
def _train(layer: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The forward of ``layer`` in training mode; ``forward`` is that of its plain class."""
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
"""From a layer, its input, weight, bias, running mean and variance, momentum and eps, the output in training mode."""


class _OwnCalls:
    """The context of one forward of a layer.

    Attributes:
        layer: whose calls of ``F.batch_norm`` are answered.
        normalise: answers them in training mode.
        answered: whether there was a call of the layer's own.
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
        """Whether a call with these statistics, weight and bias is the layer's own."""
        layer = self.layer
        if layer.plain.forward is BatchNormBase.forward:  # torch's, which makes no other call
            return True
        of_layer = layer.running_mean, layer.running_var, layer.weight, layer.bias
        return all(tensor is None for tensor in of_layer) or any(
            tensor is not None and tensor is layers_own for tensor, layers_own in zip(tensors, of_layer, strict=True)
        )


_inside: ContextVar[_OwnCalls | None] = ContextVar("the innermost forward that this thread is in", default=None)
_lock = threading.Lock()
_forwards = 0  # in which all threads are
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
    """The function that stands in place of ``F.batch_norm`` while a layer's forward runs."""
    forward = _inside.get()
    if forward is not None and forward.is_own(running_mean, running_var, weight, bias):
        forward.answered = True
        if training:
            running = None if running_mean is None or running_var is None else (running_mean, running_var)
            return forward.normalise(forward.layer, input, weight, bias, running, momentum, eps)
    result: Tensor = _original(input, running_mean, running_var, weight, bias, training, momentum, eps)
    return result
