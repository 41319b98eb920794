"""No silent drift: steps of optimizers are checked before they change anything, and backwards that come too early."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mirrored.context import current_frame
from towers.errors import MirrorError
from towers.gradients.buckets import DenseSlot
from towers.health.status import AFTER_OPTIMIZER, OPTIMIZER
from towers.system.autograd_hooks import GradientHook
from towers.system.log import get_logger

if TYPE_CHECKING:
    from mirrored.strategy.base import Strategy

log = get_logger("mirrored")


class EarlyBackwardGuard:
    """Refuses gradients of parameters that were recorded and are not mirrored yet, for nobody averages them.

    Args:
        tower: this one, for messages.
        describe: how messages call a parameter.
    """

    def __init__(self, tower: int, describe: Callable[[torch.Tensor], str]) -> None:
        self._tower = tower
        self._describe = describe
        self._hooks: list[GradientHook] = []

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Refuse gradients of these, and of no others."""
        self.stop()
        for parameter in parameters:
            if parameter.is_floating_point() or parameter.is_complex():
                self._hooks.append(GradientHook(parameter, self._refuse))

    def stop(self) -> None:
        """Refuse nothing any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _refuse(self, parameter: torch.Tensor) -> None:
        if not parameter.requires_grad:
            return
        raise MirrorError(
            f"backward() on tower {self._tower} reached {self._describe(parameter)}, which is to be mirrored, before "
            "the first strategy.run(...): towers do not hold the same yet, and the gradient would not be averaged. "
            "Put the training step into a function and call strategy.run(train_step, args=...)"
        )


def _has_closure(args: Any, kwargs: Any) -> bool:
    """Whether a step, whose first argument is the optimizer, was given a closure."""
    return callable(args[1] if len(args) > 1 else kwargs.get("closure"))


@torch.no_grad()
def _has_nonzero_gradient(parameter: torch.Tensor) -> bool:
    """Whether a parameter has a gradient that is not all zeros. Zeros are equal on all towers anyway."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient = parameter.grad
        if gradient is None:
            return False
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        return bool(values.count_nonzero())


class OptimizerGuard:
    """Looks at each optimizer step of a strategy with several towers.

    An optimizer is the strategy's business when it steps inside ``run`` or holds a mirrored parameter; others
    in the same process are left alone. Refused are parameters with a gradient that no scope mirrored, steps
    inside backward, gradients that hold parts of ``no_sync`` that were never averaged, and gradients that no backward
    has averaged since the optimizer's last step.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = weakref.ref(strategy)
        self._said_nothing_to_train: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._stepped: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        # It stays when the strategy is gone: torch iterates over these hooks, and none may be removed meanwhile.
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    @torch._disable_dynamo
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        strategy = self._strategy()
        if strategy is None:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not parameters or strategy.engine.is_inner_optimizer(optimizer):
            return  # it is a part of a step that has been checked
        foreign = [p for p in parameters if not strategy.is_mirrored(p)]
        frame = current_frame()
        in_run = frame is not None and frame.strategy is strategy and frame.replica is not None
        recorded = any(p in strategy.engine.recorder for p in foreign)
        if not in_run and len(foreign) == len(parameters) and not recorded:
            return
        if recorded:
            raise MirrorError(
                "optimizer.step() on parameters that were created in the scope but never used in "
                "strategy.run(...): the towers' gradients are not averaged. Put the training step into a function "
                "and call strategy.run(train_step, args=...)"
            )
        drifting = [p for p in foreign if p.grad is not None]
        if drifting:
            names = ", ".join(strategy.engine.recorder.name_of(p) for p in drifting[:3])
            more = f" and {len(drifting) - 3} more" if len(drifting) > 3 else ""
            raise MirrorError(
                f"optimizer.step() on tower {strategy.topology.index} would change {names}{more}, which no scope "
                "mirrored, so the towers would drift apart: create it inside strategy.scope(), or call "
                "strategy.mirror(module) before training"
            )
        if strategy.engine.in_backward:
            raise MirrorError(
                "optimizer.step() before the gradients are averaged: inside backward(), or after a backward() that "
                "ended in an exception. Step after backward() has returned, and let its exceptions end the step"
            )
        unsynced = strategy.engine.unsynced_gradients()
        stale = [unsynced[id(p)] for p in parameters if id(p) in unsynced]
        if stale:
            raise MirrorError(
                f"optimizer.step() on gradients that are this tower's own ({stale[0]}, …): they were accumulated "
                "under no_sync, and no backward() outside it has averaged them"
            )
        if not _has_closure(args, kwargs):  # which is to compute the gradients
            self._check_averaged(strategy, optimizer)
        strategy.health.enter(OPTIMIZER)
        self._say_if_nothing_to_train(optimizer, parameters)
        if isinstance(optimizer, torch.optim.SparseAdam):
            self._check_sparse(strategy, parameters)
        if len(foreign) < len(parameters):
            self._say_if_not_virtual(strategy)
            strategy.engine.prepare_step(optimizer)

    @torch._disable_dynamo
    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        strategy = self._strategy()
        if strategy is None or strategy.health.phase != OPTIMIZER or strategy.engine.is_inner_optimizer(optimizer):
            return
        if _has_closure(args, kwargs):
            self._check_averaged(strategy, optimizer)
        strategy.health.enter(AFTER_OPTIMIZER)

    def _check_averaged(self, strategy: Strategy, optimizer: torch.optim.Optimizer) -> None:
        averager = strategy.engine.averager
        if averager is None:
            return
        stepped, self._stepped[optimizer] = self._stepped.get(optimizer, 0), averager.averaged
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if averager.averaged_since(stepped, parameters):
            return
        own = [p for p in parameters if strategy.is_mirrored(p) and _has_nonzero_gradient(p)]
        if own:
            kind, tower = type(optimizer).__name__, strategy.topology.index
            slot = averager.slot_of(own[0])
            name = slot.name if slot is not None else strategy.engine.recorder.name_of(own[0])
            more = f" and {len(own) - 1} more" if len(own) > 1 else ""
            raise MirrorError(
                f"{kind}.step() on tower {tower} on gradients that no backward() has averaged over the towers since "
                f"its last step ({name}{more}). loss.backward() averages them, inside strategy.run. "
                "torch.autograd.grad does not: call strategy.grad(loss, parameters) instead, or "
                "strategy.average_gradients(parameters) when gradients were put into .grad. (A backward() that is "
                "compiled with torch._dynamo.config.trace_autograd_ops calls no hooks, ours neither)"
            )

    def _check_sparse(self, strategy: Strategy, parameters: list[torch.Tensor]) -> None:
        averager = strategy.engine.averager
        slots = (averager.slot_of(p) for p in parameters if p.grad is not None) if averager is not None else ()
        for slot in slots:
            if isinstance(slot, DenseSlot):
                raise MirrorError(
                    f"SparseAdam wants sparse gradients, but those of {slot.name} are averaged as dense ones: sparse "
                    "gradients are known of nn.Embedding and nn.EmbeddingBag with sparse=True, not of "
                    "F.embedding(…, sparse=True). Hold the parameter in such a module, or take another optimizer"
                )

    def _say_if_not_virtual(self, strategy: Strategy) -> None:
        virtual = strategy.engine.virtual
        if virtual is not None and virtual.step == 0:
            strategy.say_once(
                "virtual_towers is set, but these gradients were computed by loss.backward(): the same bits on any "
                "number of towers come from loss = strategy.backward(loss_fn, *batch) in its place"
            )

    def _say_if_nothing_to_train(self, optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> None:
        if optimizer in self._said_nothing_to_train or any(p.requires_grad for p in parameters):
            return
        self._said_nothing_to_train.add(optimizer)
        log.warning(
            "%s.step() trains nothing: all of its %d parameters are frozen (requires_grad is False)",
            type(optimizer).__name__,
            len(parameters),
        )
