"""Hooks of autograd and of optimizers: when a gradient is ready, a backward has finished, or an optimizer steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from towers.system.torch_private import current_autograd_node, gradient_hooks, queue_callback

_Owner = TypeVar("_Owner")


class GradientHook:
    """Calls back when autograd has added to a parameter's gradient.

    The hooks of a parameter run in the order in which they were registered. A hook that the script registers later runs
    after this one, and may still change the gradient.

    Args:
        parameter: a leaf, trainable or not, because it may be unfrozen at any time. It is not kept alive.
        call: called with the parameter.

    Attributes:
        handle: torch's present handle.
        order: the parameter's hooks, by the ids of their handles, in the order of calls.
    """

    def __init__(self, parameter: Tensor, call: Callable[[Tensor], None]) -> None:
        self._parameter = weakref.ref(parameter)
        self._call = call
        self.handle = self._register(parameter)

    def _register(self, parameter: Tensor) -> Any:
        trainable = parameter.requires_grad
        parameter.requires_grad_(True)  # torch hooks only such tensors
        handle = parameter.register_post_accumulate_grad_hook(self._call)
        parameter.requires_grad_(trainable)
        self.order = gradient_hooks(parameter)
        return handle

    def runs_last(self) -> bool:
        """Returns whether this hook runs after all others of the parameter."""
        return bool(next(reversed(self.order)) == self.handle.id)

    def come_last(self) -> None:
        """Moves this hook behind all other present hooks of the parameter. It must not be called during a backward."""
        if (parameter := self._parameter()) is not None:
            self.handle.remove()
            self.handle = self._register(parameter)

    def remove(self) -> None:
        """Stops calling back."""
        self.handle.remove()


def when_backward_is_done(call: Callable[[], None]) -> None:
    """Schedules ``call``, from within a backward, for the end of the whole backward.

    Reentrant checkpoints run their own backward within a node of another one. The outermost one counts.
    """

    def at_end() -> None:
        outer = current_autograd_node()
        if outer is None:
            call()
        else:
            _soon_after(outer, lambda: when_backward_is_done(call))

    queue_callback(at_end)


def _soon_after(node: Any, call: Callable[[], None]) -> None:
    """Schedules ``call`` in the backward that runs ``node`` now, for when it reaches a node after that one."""
    handles: list[Any] = []

    def before_next(_: Any) -> None:
        if handles:
            for handle in handles:
                handle.remove()
            handles.clear()
            call()

    handles += [after.register_prehook(before_next) for after, _ in node.next_functions if after is not None]


def at_steps(
    owner: _Owner,
    before: Callable[[_Owner, Optimizer, Any, Any], object],
    after: Callable[[_Owner, Optimizer, Any, Any], object] | None = None,
) -> None:
    """Calls functions at the steps of all optimizers, for as long as ``owner`` exists.

    The hooks stay after it was freed: torch iterates over them, and none may be removed meanwhile.

    Args:
        before, after: called with the owner, the optimizer, and the step's ``args``, which contain it, and ``kwargs``.
            A function that may call the script's own functions is decorated with ``disable_dynamo``.
    """
    reference = weakref.ref(owner)

    def hook(call: Callable[[_Owner, Optimizer, Any, Any], object]) -> Callable[[Optimizer, Any, Any], None]:
        def at_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if (living := reference()) is not None:
                call(living, optimizer, args, kwargs)

        return at_step

    register_optimizer_step_pre_hook(hook(before))
    if after is not None:
        register_optimizer_step_post_hook(hook(after))
