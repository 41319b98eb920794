"""Gradients whose average is completed when somebody uses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from towers.system import tree as trees
from towers.system.torch_private import DisableTorchFunctionSubclass

_DESCRIBING = frozenset(
    getattr(Tensor, name).__get__ for name in ("device", "grad_fn", "is_leaf", "is_sparse", "layout", "requires_grad")
)
"""What can be asked of a gradient without completing it. Not its shape: what asks for that is about to read past us."""


class PendingGradient(Tensor):
    """A gradient of which this tower holds the average of its own part only.

    It is an ordinary tensor in all else; whatever is done with it completes it first, by a collective. Then it becomes
    a plain tensor itself, wherever it is held. Only what does not ask Python cannot be noticed: constructors
    (``torch.tensor``, ``torch.Tensor``, ``new_tensor``, ``torch.autograd.Variable``, ``torch.sparse_coo_tensor``,
    ``torch.nested.nested_tensor``), ``set_``, ``torch.utils.swap_tensors``, ``torch.utils.dlpack.to_dlpack``,
    transforms of ``torch.func``, scripted functions, one's own C++.
    """

    _complete: Callable[[], None]

    def as_subclass(self, cls: Any) -> Any:
        self._complete()  # torch does not ask here
        return Tensor.as_subclass(self, cls)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _DESCRIBING:
            for value in trees.leaves((args, kwargs)):
                if isinstance(value, PendingGradient):
                    value._complete()
        with DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def make_pending(gradient: Tensor, complete: Callable[[], None]) -> None:
    """Make a gradient, in place, one that calls ``complete`` before its values are used."""
    gradient.__class__ = PendingGradient
    gradient._complete = complete  # type: ignore[attr-defined]


def make_plain(gradient: Tensor) -> None:
    """Make a pending gradient, in place, the plain tensor that it is from now on."""
    if isinstance(gradient, PendingGradient):
        del gradient._complete
        gradient.__class__ = Tensor  # type: ignore[assignment]
