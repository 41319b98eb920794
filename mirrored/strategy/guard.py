"""Guards against silent drift: checks of optimizers' steps before they change anything, and of early backward passes.

[Note: an average, not a call] A parameter that an optimizer steps needs a gradient that was averaged in a backward
since that optimizer's last step, however it was assigned to ``p.grad``. Gradients of ``torch.autograd.grad``, of
``no_sync`` or of a compiler's graph are refused. A call of ``backward()`` is not sufficient evidence. Gradients that
are all zeros are equal on all towers, and pass.

[Note: layers of Keras] A Keras 3 layer on torch creates its parameters when it is built, which may be after the scope.
Its optimizer is not one of torch's. Neither a scope nor the guard of optimizers therefore detects it, and the gradients
of its parameters are watched directly.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import Optimizer

from mirrored.context import current_frame
from mirrored.events import Events
from mirrored.strategy.scope import Recorder
from towers.collectives.communicator import Communicator
from towers.errors import MirrorError
from towers.gradients.reducer import GradientReducer
from towers.health.status import AFTER_OPTIMIZER, OPTIMIZER
from towers.system.autograd_hooks import GradientHook, at_steps
from towers.system.messages import get_logger
from towers.system.torch_private import TRACED_AUTOGRAD, DisableTorchFunctionSubclass, disable_dynamo

log = get_logger("mirrored")

_KERAS_PARAMETERS = "_torch_params"  # the name of the ParameterDict that a Keras layer creates when it is built


class EarlyBackwardGuard:
    """Refuses gradients of parameters that were recorded and are not mirrored yet, since they would not be averaged.

    Args:
        tower: this tower's index, for messages.
        recorder: has the parameters.
    """

    def __init__(self, tower: int, recorder: Recorder) -> None:
        self._tower = tower
        self._recorder = recorder
        self._hooks: list[GradientHook] = []

    def watch(self) -> None:
        """Refuses gradients of exactly those parameters that are now recorded and not mirrored."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = [
            GradientHook(parameter, self._refuse)
            for parameter in self._recorder.untaken()
            if parameter.is_floating_point() or parameter.is_complex()
        ]

    def _refuse(self, parameter: torch.Tensor) -> None:
        if not parameter.requires_grad:
            return
        raise MirrorError(
            f"backward() on tower {self._tower} reached {self._recorder.name_of(parameter)}, which is to be mirrored, "
            "before the first strategy.run(...): towers do not hold the same yet, and the gradient would not be "
            "averaged. Put the training step into a function and call strategy.run(train_step, args=...)" + how_to_fit()
        )


def _parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _has_closure(args: Any, kwargs: Any) -> bool:
    """Returns whether a step, whose first argument is the optimizer, received a closure."""
    return callable(args[1] if len(args) > 1 else kwargs.get("closure"))


@torch.no_grad()
def _is_nonzero(gradient: torch.Tensor | None) -> bool:
    """Returns whether a gradient is not all zeros. Zeros are equal on all towers in any case."""
    if gradient is None:
        return False
    with DisableTorchFunctionSubclass():
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        return bool(values.count_nonzero())


_OF_WHOLE_PARAMETERS = tuple(
    getattr(torch.optim, name) for name in ("Adafactor", "LBFGS", "Muon", "Rprop") if hasattr(torch.optim, name)
)
"""The optimizers of torch that do not support parameters of which a tower has a part."""


class OptimizerGuard:
    """Checks each step of a strategy's optimizers before it changes anything.

    An optimizer is checked if it steps inside ``run`` or holds a mirrored parameter; all others in the process are not.
    The guard refuses steps inside backward, and parameters with a gradient that no scope mirrored. It also refuses
    gradients that were accumulated in ``no_sync`` and never averaged, and gradients that no backward has averaged since
    the optimizer's last step.

    Args:
        comm: the strategy's towers.
        recorder: has the mirrored parameters.
        averager: averages the gradients.
        is_inner_optimizer: returns whether an optimizer's step is part of another optimizer's step, which was checked.
        events: receive each step of mirrored parameters that was not refused, before and after it. After it, they also
            receive a step inside ``run`` of parameters that no scope mirrored.
    """

    def __init__(
        self,
        comm: Communicator,
        recorder: Recorder,
        averager: GradientReducer,
        is_inner_optimizer: Callable[[Optimizer], bool],
        events: Events,
    ) -> None:
        self._comm = comm
        self._health = comm.health
        self._recorder = recorder
        self._averager = averager
        self._is_inner_optimizer = is_inner_optimizer
        self._events = events
        self._warned: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._stepped: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        at_steps(self, OptimizerGuard.before_step, OptimizerGuard.after_step)

    @disable_dynamo
    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Checks an optimizer that is about to step.

        Raises:
            MirrorError: the step would make the towers drift apart.
        """
        parameters = _parameters_of(optimizer)
        if not parameters or self._is_inner_optimizer(optimizer):
            return
        unmirrored = self._recorder.others(parameters)  # usually empty; only these need the other checks
        if any(map(self._recorder.was_replaced, unmirrored)):
            raise MirrorError(
                f"{type(optimizer).__name__} was created before strategy.shard(model), which replaces the parameters: "
                "create the optimizer after it, with model.parameters()"
            )
        sharded = [p for p in unmirrored if self._recorder.is_sharded(p)]
        if sharded and isinstance(optimizer, _OF_WHOLE_PARAMETERS):
            kind = type(optimizer).__name__
            raise MirrorError(
                f"{kind} cannot step sharded parameters (strategy.shard): use another optimizer, as AdamW"
            )
        foreign = [p for p in unmirrored if not self._recorder.is_sharded(p)]
        recorded = any(p in self._recorder for p in foreign)
        if len(foreign) == len(parameters) and not recorded and not self._in_run():
            return
        if recorded:
            raise MirrorError(
                "optimizer.step() on parameters that were created in the scope but never used in "
                "strategy.run(...): the towers' gradients are not averaged. Put the training step into a function "
                "and call strategy.run(train_step, args=...)"
            )
        if drifting := [p for p in foreign if p.grad is not None]:
            names = ", ".join(self._recorder.name_of(p) for p in drifting[:3])
            more = f" and {len(drifting) - 3} more" if len(drifting) > 3 else ""
            raise MirrorError(
                f"optimizer.step() on tower {self._comm.index} would change {names}{more}, which no scope "
                "mirrored, so the towers would drift apart: create it inside strategy.scope(), or call "
                "strategy.mirror(module) before training"
            )
        if self._averager.in_backward:
            raise MirrorError(
                "optimizer.step() before the gradients are averaged: inside backward(), or after a backward() that "
                "ended in an exception. Step after backward() has returned, and let its exceptions end the step"
            )
        if not _has_closure(args, kwargs):  # a closure computes the gradients later
            self._check_averaged(optimizer, parameters, sharded, kwargs.get("gradients"))
        self._health.train()
        self._health.enter(OPTIMIZER)
        self._say_if_nothing_to_train(optimizer, parameters)
        if isinstance(optimizer, torch.optim.SparseAdam):
            self._check_sparse(parameters)
        if len(foreign) < len(parameters):
            self._events.before_step(optimizer)

    @disable_dynamo
    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Checks an optimizer that has stepped.

        Raises:
            MirrorError: its closure has not averaged the gradients.
        """
        if self._health.phase != OPTIMIZER or self._is_inner_optimizer(optimizer):
            return
        self._events.after_step(optimizer)
        if _has_closure(args, kwargs):
            parameters = _parameters_of(optimizer)
            self._check_averaged(optimizer, parameters, [p for p in parameters if self._recorder.is_sharded(p)])
        self._health.enter(AFTER_OPTIMIZER)

    def _in_run(self) -> bool:
        """Returns whether this code is inside the strategy's ``run``."""
        frame = current_frame()
        return frame is not None and frame.replica is not None and frame.strategy.communicator is self._comm

    def _check_averaged(
        self,
        optimizer: Optimizer,
        parameters: list[torch.Tensor],
        sharded: list[torch.Tensor],
        gradients: Sequence[torch.Tensor | None] | None = None,
    ) -> None:
        """Checks that the gradients of a step are averaged.

        Args:
            parameters, sharded: the optimizer's, and those of them that are sharded.
            gradients: those of the parameters, in order. None: they are the parameters' ``.grad``.
        """
        averager = self._averager
        self._check_reduced(sharded)
        if len(sharded) == len(parameters):
            return
        unsynced = averager.unsynced()
        if unsynced and (stale := [unsynced[id(p)] for p in parameters if id(p) in unsynced]):
            raise MirrorError(
                f"optimizer.step() on gradients that are this tower's own ({stale[0]}, …): they were accumulated "
                "under no_sync, and no backward() outside it has averaged them"
            )
        if self._comm.size == 1:
            return
        stepped, self._stepped[optimizer] = self._stepped.get(optimizer, 0), averager.averaged
        if averager.averaged_since(stepped, parameters):  # see [Note: an average, not a call]
            return
        gradients = [p.grad for p in parameters] if gradients is None else gradients
        pairs = zip(parameters, gradients, strict=False)  # Keras refuses another number itself
        if unaveraged := [p for p, gradient in pairs if self._recorder.is_mirrored(p) and _is_nonzero(gradient)]:
            kind, tower = type(optimizer).__name__, self._comm.index
            name = self._recorder.name_of(unaveraged[0])
            more = f" and {len(unaveraged) - 1} more" if len(unaveraged) > 1 else ""
            raise MirrorError(
                f"{kind}.step() on tower {tower} uses gradients that no backward() has averaged over the towers "
                f"since its last step ({name}{more}). loss.backward() inside strategy.run averages them. "
                "torch.autograd.grad does not: call strategy.grad(loss, parameters) instead, or "
                "strategy.average_gradients(parameters) after gradients were assigned to .grad. (A backward() "
                f"that is compiled with {TRACED_AUTOGRAD} calls no hooks, and so does not average)"
            )

    def _check_reduced(self, parameters: list[torch.Tensor]) -> None:
        """Checks that torch has reduced gradients of sharded parameters, which exist only after that."""
        accumulated = self._recorder.accumulated
        stale = [p for p in parameters if id(p) in accumulated]
        if stale and all(p.grad is None for p in stale):
            raise MirrorError(
                "optimizer.step() on sharded parameters, whose gradients were accumulated under no_sync, and no "
                "backward() outside it has averaged them"
            )
        accumulated.difference_update(map(id, stale))

    def _check_sparse(self, parameters: list[torch.Tensor]) -> None:
        for p in parameters:
            if p.grad is not None and self._averager.reduces_densely(p):
                name = self._recorder.name_of(p)
                raise MirrorError(
                    f"SparseAdam wants sparse gradients, but those of {name} are averaged as dense ones: sparse "
                    "gradients are known of nn.Embedding and nn.EmbeddingBag with sparse=True, not of "
                    "F.embedding(…, sparse=True). Hold the parameter in such a module, or take another optimizer"
                )

    def _say_if_nothing_to_train(self, optimizer: Optimizer, parameters: list[torch.Tensor]) -> None:
        if any(p.requires_grad for p in parameters) or optimizer in self._warned:
            return
        self._warned.add(optimizer)
        log.warning(
            "%s.step() trains nothing: all of its %d parameters are frozen (requires_grad is False)",
            type(optimizer).__name__,
            len(parameters),
        )


_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()
"""The recorders of all strategies in this process."""


def guard_keras_layers(tower: int, recorder: Recorder) -> None:
    """Refuses gradients of Keras layers that no scope has recorded, for as long as a strategy's recorder exists.

    See [Note: layers of Keras].

    Args:
        tower: this tower's index, for messages.
        recorder: has the parameters of the strategy's scopes.
    """
    _recorders.add(recorder)

    def on_child(layer: nn.Module, name: str, child: nn.Module | None) -> None:
        parameters = child.named_parameters() if child is not None and name == _KERAS_PARAMETERS else ()
        for key, parameter in parameters:
            if parameter.is_floating_point() and not _is_recorded(parameter):
                _refuse_gradient(tower, parameter, f"{key} of a Keras {type(layer).__name__}")

    handle: Any = register_module_module_registration_hook(on_child)  # type: ignore[no-untyped-call]
    weakref.finalize(recorder, handle.remove)


def _is_recorded(parameter: torch.Tensor) -> bool:
    return any(recorder.knows(parameter) for recorder in _recorders)


def _refuse_gradient(tower: int, parameter: torch.Tensor, name: str) -> None:
    def refuse(parameter: torch.Tensor) -> None:
        if parameter.requires_grad and not _is_recorded(parameter):
            raise MirrorError(
                f"backward() on tower {tower} reached {name}, which no scope mirrored, so the towers would "
                "drift apart. A Keras layer makes its parameters when it is built: build the model inside "
                "strategy.scope() (model.build(input_shape), or a call with an example), or call "
                "strategy.mirror(model) when it is built, and train it inside strategy.run" + how_to_fit()
            )

    GradientHook(parameter, refuse)


def how_to_fit() -> str:
    """Returns advice for callers that may have called Keras' ``fit`` without :mod:`mirrored.keras`."""
    if "keras" not in sys.modules or "mirrored.keras" in sys.modules:
        return ""
    return ". If it was Keras' model.fit: put the line 'import mirrored.keras' before 'import keras'"
