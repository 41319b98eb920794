"""Lazily gathered gradients: their average is completed when they are first used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from towers.system import tree as trees
from towers.system.torch_private import DisableTorchFunctionSubclass

_DESCRIBING = frozenset(
    getattr(Tensor, name).__get__ for name in ("device", "grad_fn", "is_leaf", "is_sparse", "layout", "requires_grad")
)
"""Attributes of a gradient that can be read without gathering it.

The shape is not among them: code that reads it is about to read the memory without a call that could be intercepted.
"""


class LazyGradient(Tensor):
    """A gradient of which this tower holds only the average of this tower's chunk.

    It is otherwise an ordinary tensor. Any operation on it first gathers the rest, with a collective. Then it becomes
    an ordinary tensor itself, for all holders. Only code that does not call Python's overrides cannot be detected:
    constructors (``torch.tensor``, ``torch.Tensor``, ``new_tensor``, ``torch.autograd.Variable``,
    ``torch.sparse_coo_tensor``, ``torch.nested.nested_tensor``), ``set_``, ``torch.utils.swap_tensors``,
    ``torch.utils.dlpack.to_dlpack``, transforms of ``torch.func``, scripted functions, and custom C++.
    """

    _gather: Callable[[], None]

    def as_subclass(self, cls: Any) -> Any:
        self._gather()  # torch does not call __torch_function__ here
        return Tensor.as_subclass(self, cls)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _DESCRIBING:
            for value in trees.leaves((args, kwargs)):
                if isinstance(value, LazyGradient):
                    value._gather()
        with DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def make_lazy(gradient: Tensor, gather: Callable[[], None]) -> None:
    """Makes a gradient, in place, one that calls ``gather`` before its values are used."""
    gradient.__class__ = LazyGradient
    gradient._gather = gather  # type: ignore[attr-defined]


def make_ordinary(gradient: Tensor) -> None:
    """Makes a lazily gathered gradient, in place, an ordinary tensor from now on."""
    if isinstance(gradient, LazyGradient):
        del gradient._gather
        gradient.__class__ = Tensor  # type: ignore[assignment]
