"""Checks that the result of ``compute_average_loss`` is only added and multiplied by constants (rule R3).

In a product with a learnable weight, that weight would get 1/N of its gradient on N towers. The square root of a share
is not a share of the mean's square root. Neither fails by itself, and the parameters stay equal on all towers.

The check reads the autograd graph between the result and the tensor whose backward runs. It does so in the runs whose
numbers are powers of two: in the first steps, and in a few later ones. A minimum, a maximum and an absolute value are
not reported, because they are linear where they change nothing. Compiled functions are not followed.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from typing import Any

import torch

_ROOTS = {torch.autograd.backward.__code__: "tensors", torch.autograd.grad.__code__: "outputs"}
"""The functions of torch that run a backward, with their parameters for the tensors at which it starts."""

_SUMS = frozenset(("Add", "Sub", "Neg", "Sum", "Mean", "Stack", "Cat"))
_SAME_VALUES = frozenset(("Clone", "ToCopy", "View", "Reshape", "Squeeze", "Unsqueeze", "Expand", "Select", "Unbind"))
_PRODUCTS = frozenset(("Mul", "Div", "Dot"))
_POWERS = frozenset(("Pow", "Sqrt", "Rsqrt", "Reciprocal", "Exp", "Expm1", "Sigmoid", "Tanh", "Softplus"))
_LOGARITHMS = frozenset(("Log", "Log2", "Log10", "Log1P", "LogSigmoid", "Logaddexp", "Logsumexp"))
_FUNCTIONS = _POWERS | _LOGARITHMS
_FOLLOWED = _SUMS | _SAME_VALUES | _PRODUCTS | _FUNCTIONS


def name_of(node: Any) -> str:
    """Returns the name of an autograd node. A custom function is also a node, and may have an attribute ``name``."""
    name: str = type(node).name(node)
    return name.rsplit("::", 1)[-1].rstrip("0123456789").removesuffix("Backward")


def inputs_of(node: Any) -> list[Any]:
    """Returns the nodes of the inputs of an autograd node that have a gradient."""
    return [following for following, _ in node.next_functions if following is not None]


def check_use(share: Any, thread: int) -> None:
    """Checks the use of a loss in the running backward.

    Args:
        share: the autograd node of the result of ``compute_average_loss``.
        thread: the number of the thread that has started the backward. On GPUs, torch runs it in another one.

    Raises:
        RuntimeError: a factor of the result has a gradient, or a function that is not linear is applied to it.
    """
    consumers: dict[Any, list[Any]] = {}
    reached = list(_roots(thread))
    for node in reached:
        if type(node) is not type(share) and name_of(node) in _FOLLOWED:
            for inner in inputs_of(node):
                if inner not in consumers:
                    reached.append(inner)
                consumers.setdefault(inner, []).append(node)
    outwards = dict.fromkeys(node for node in reached if type(node) is type(share))
    while outwards:
        node, _ = outwards.popitem()
        for consumer in consumers.pop(node, ()):
            _check(consumer)
            outwards[consumer] = None


def _roots(thread: int) -> Iterator[Any]:
    """Yields the nodes at which the running backward starts, which only the call that started it knows."""
    for start in (sys._getframe(), sys._current_frames().get(thread)):
        for frame, _ in traceback.walk_stack(start):
            if (parameter := _ROOTS.get(frame.f_code)) is not None:
                roots = frame.f_locals[parameter]
                for root in (roots,) if isinstance(roots, torch.Tensor) else roots:
                    node = getattr(root, "grad_fn", getattr(root, "node", None))
                    if node is not None:
                        yield node
                return


def _check(node: Any) -> None:
    """Checks that an autograd node that has a share among its inputs is linear in it."""
    name, inputs = name_of(node), inputs_of(node)
    if name in _FUNCTIONS or (name == "Div" and node.next_functions[0][0] is None):
        raise RuntimeError(
            f"a function ({name.lower()}) is applied to the result of mirrored.compute_average_loss (or "
            "scale_regularization_loss), which is this tower's share of the mean: the results of the shares do not add "
            "up to that of the mean. Apply it to each loss before, or to the mean of the global batch: "
            'mirrored.get_replica_context().all_reduce("sum", losses.sum()) / examples'
        )
    if name in _PRODUCTS and len(inputs) > 1:
        raise RuntimeError(
            "the result of mirrored.compute_average_loss (or scale_regularization_loss) is multiplied or divided by a "
            "value that has a gradient, too: on several towers, that gradient would be too small. Multiply the "
            "losses by it before: mirrored.compute_average_loss(weight * losses)"
        )
