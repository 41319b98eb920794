"""The summands of a loss, read from its autograd graph.

The graph shows how a loss was reduced and scaled: the values that autograd saves for backward contain the constants.
This distinguishes mistakes whose gradients are wrong by the same factor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from mirrored.uses_of_losses import inputs_of, name_of
from mirrored.verification.trace import Term
from towers.system.torch_private import SAVED_FACTORS, SAVED_REDUCTION, SAVED_SIZES, SAVED_TARGET, SAVED_TOTAL_WEIGHT

_REDUCTIONS = {1: "mean of", 2: "sum of"}  # torch's numbers for reduction="mean" and "sum"

_UNCHANGED = ("Neg", "ToCopy", "Clone", "View", "Reshape", "Squeeze", "Unsqueeze", "Alias")

MOST_TERMS = 64
"""The maximum number of summands of a loss that are followed."""

_MOST_ANCESTORS = 256


def terms_of(loss: torch.Tensor) -> tuple[Term, ...]:
    """Returns the summands of a loss, each followed inwards to the reduction that made it a scalar."""
    return tuple(term for term, _ in _branches(loss))


def scale_terms(loss: torch.Tensor, factors: Mapping[int, float]) -> list[RemovableHandle]:
    """Makes backward multiply the gradients of some summands of :func:`terms_of`, until the handles are removed.

    Args:
        factors: the factors by the summands' indices.
    """

    def scaled_by(factor: float) -> Any:
        return lambda gradients: tuple(None if gradient is None else gradient * factor for gradient in gradients)

    # Summands that enter the sum at one node (``a + a``) share its gradient in backward, and so one factor.
    nodes = {node: factors[i] for i, (_, node) in enumerate(_branches(loss)) if i in factors}
    return [node.register_prehook(scaled_by(factor)) for node, factor in nodes.items()]


def _branches(loss: torch.Tensor) -> Iterator[tuple[Term, Any]]:
    """Yields the summands, each with the node at which it enters the sum."""
    return itertools.islice(_follow(loss.grad_fn, (), False), MOST_TERMS) if loss.grad_fn is not None else iter(())


def _follow(node: Any, chain: tuple[tuple[str, float], ...], share: bool) -> Iterator[tuple[Term, Any]]:
    branch = node
    while True:
        name, inner = name_of(node), inputs_of(node)
        if name == "_ScaleGradient":
            share = True
        elif name in ("Div", "Mul") and (factor := _constant(node)) is not None and len(inner) == 1:
            chain = (*chain, ("divided by" if name == "Div" else "multiplied by", factor))
        elif not (len(inner) == 1 and (name.startswith(_UNCHANGED) or (name == "Sum" and not _sizes(node)))):
            break
        node = inner[0]
    if name == "Sum" and len(_sizes(node)) == 1 and name_of(inner[0]) == "Stack":  # Keras adds up losses like this
        name, inner = "Add", inputs_of(inner[0])
    if name in ("Add", "Sub"):
        for following in inner:
            yield from _follow(following, chain, share)
        return
    how, count = _REDUCTIONS.get(getattr(node, SAVED_REDUCTION, 0), name), 0
    if name in ("Mean", "Sum"):
        how, count = f"{name.lower()} of", math.prod(_sizes(node))
    elif how != name and (target := getattr(node, SAVED_TARGET, None)) is not None:
        count = target.numel()
    # Cross entropy saves the total weight of the targets that are not ignored.
    divisor = float(getattr(node, SAVED_TOTAL_WEIGHT, count)) if how == "mean of" else 1.0
    yield Term((*chain, (how, count)), share or _made_by_mirrored(node), _divisor(chain, divisor)), branch


def _sizes(node: Any) -> list[int]:
    """Returns the shape of the input of a sum or mean."""
    return [int(size) for size in getattr(node, SAVED_SIZES)]


def _divisor(chain: tuple[tuple[str, float], ...], count: float) -> float:
    """Returns the divisor of the sum of a summand's values: for a mean of ``count`` values, then changed by ``chain``.

    It is 0 if it is not finite.
    """
    for how, factor in chain:
        if how == "divided by":
            count *= abs(factor)
        elif factor:
            count /= abs(factor)
    return count if math.isfinite(count) else 0.0


def _made_by_mirrored(node: Any) -> bool:
    """Returns whether ``compute_average_loss`` or ``scale_regularization_loss`` is among a node's nearest ancestors."""
    seen, level = {node}, [node]
    while level and len(seen) < _MOST_ANCESTORS:
        if any(name_of(at).startswith("_ScaleGradient") for at in level):
            return True
        level = [inner for at in level for inner in inputs_of(at) if inner not in seen]
        seen.update(level)
    return False


def _constant(node: Any) -> float | None:
    """Returns the number in a product with a number, or a quotient by one; None for two tensors."""
    for attribute in SAVED_FACTORS:
        value = getattr(node, attribute, None)
        if isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1):
            return float(value)
    return None
