"""Lazily gathered gradients: their average is completed when somebody uses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from towers.system import tree as trees
from towers.system.torch_private import DisableTorchFunctionSubclass

_DESCRIBING = frozenset(
    getattr(Tensor, name).__get__ for name in ("device", "grad_fn", "is_leaf", "is_sparse", "layout", "requires_grad")
)
"""What can be asked of a gradient without gathering it. Not its shape: code that asks for that is about to read the
memory without asking us."""


class LazyGradient(Tensor):
    """A gradient of which this tower holds the average of its own chunk only.

    It is an ordinary tensor in all else; whatever is done with it gathers the rest first, by a collective. Then it
    becomes an ordinary tensor itself, wherever it is held. Only what does not ask Python cannot be noticed:
    constructors (``torch.tensor``, ``torch.Tensor``, ``new_tensor``, ``torch.autograd.Variable``,
    ``torch.sparse_coo_tensor``, ``torch.nested.nested_tensor``), ``set_``, ``torch.utils.swap_tensors``,
    ``torch.utils.dlpack.to_dlpack``, transforms of ``torch.func``, scripted functions, one's own C++.
    """

    _gather: Callable[[], None]

    def as_subclass(self, cls: Any) -> Any:
        self._gather()  # torch does not ask here
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
    """Make a gradient, in place, one that calls ``gather`` before its values are used."""
    gradient.__class__ = LazyGradient
    gradient._gather = gather  # type: ignore[attr-defined]


def make_ordinary(gradient: Tensor) -> None:
    """Make a lazily gathered gradient, in place, the ordinary tensor that it is from now on."""
    if isinstance(gradient, LazyGradient):
        del gradient._gather
        gradient.__class__ = Tensor  # type: ignore[assignment]
