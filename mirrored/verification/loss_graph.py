"""What a loss is made of, read from its autograd graph."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from mirrored.verification.trace import Term
from towers.system.torch_private import SAVED_FACTORS, SAVED_REDUCTION, SAVED_SIZES, SAVED_TARGET, SAVED_TOTAL_WEIGHT

_REDUCTIONS = {1: "mean of", 2: "sum of"}  # torch's numbers for reduction="mean" and "sum"

_UNCHANGED = ("Neg", "ToCopy", "Clone", "View", "Reshape", "Squeeze", "Unsqueeze", "Alias")

MOST_TERMS = 64
"""The summands of a loss that are looked at."""

_MOST_ANCESTORS = 256


def terms_of(loss: torch.Tensor) -> tuple[Term, ...]:
    """The summands of a loss, each followed inwards to the reduction that made it a scalar.

    Uses what autograd saves (``_saved_other``, ``_saved_reduction``, …); what cannot be read is left out.
    """
    return tuple(term for term, _ in _branches(loss))


def scale_terms(loss: torch.Tensor, factors: Mapping[int, float]) -> list[RemovableHandle]:
    """Let backward multiply the gradients of some of :func:`terms_of` by factors, until the handles are removed."""

    def scaled_by(factor: float) -> Any:
        return lambda gradients: tuple(None if gradient is None else gradient * factor for gradient in gradients)

    branches = enumerate(_branches(loss))
    return [node.register_prehook(scaled_by(factors[i])) for i, (_, node) in branches if i in factors]


def _branches(loss: torch.Tensor) -> list[tuple[Term, Any]]:
    found: list[tuple[Term, Any]] = []
    _follow(loss.grad_fn, loss.grad_fn, (), False, found)
    return found


def _follow(
    node: Any, branch: Any, chain: tuple[tuple[str, float], ...], share: bool, found: list[tuple[Term, Any]]
) -> None:
    if node is None or len(found) >= MOST_TERMS:
        return
    name = _name(node).rstrip("0123456789").removesuffix("Backward")
    inner = [following for following, _ in node.next_functions if following is not None]
    if name in ("Add", "Sub"):
        for following in inner:
            _follow(following, following, chain, share, found)
    elif name == "_ScaleGradient":
        _follow(inner[0], branch, chain, True, found)
    elif name in ("Div", "Mul") and (factor := _constant(node)) is not None and len(inner) == 1:
        how = "divided by" if name == "Div" else "multiplied by"
        _follow(inner[0], branch, (*chain, (how, factor)), share, found)
    elif name.startswith(_UNCHANGED) and len(inner) == 1:
        _follow(inner[0], branch, chain, share, found)
    elif name in ("Mean", "Sum"):
        share, count = share or _made_by_mirrored(node), 1
        for size in getattr(node, SAVED_SIZES):
            count *= int(size)
        reduced = ("mean of" if name == "Mean" else "sum of", count)
        found.append((Term((*chain, reduced), share, _divisor(chain, count if name == "Mean" else 1)), branch))
    elif (reduction := _REDUCTIONS.get(getattr(node, SAVED_REDUCTION, 0))) is not None:
        target = getattr(node, SAVED_TARGET, None)
        count = target.numel() if target is not None else 0
        # That of cross entropy is the weight of the targets that are not ignored.
        divisor = float(getattr(node, SAVED_TOTAL_WEIGHT, count)) if reduction == "mean of" else 1
        found.append((Term((*chain, (reduction, count)), share, _divisor(chain, divisor)), branch))
    else:
        found.append((Term((*chain, (name, 0)), share or _made_by_mirrored(node), _divisor(chain, 1)), branch))


def _name(node: Any) -> str:
    """A node's name. A function of the script's own is its node, too, and may keep something else as ``name``."""
    name: str = type(node).name(node)
    return name.rsplit("::", 1)[-1]


def _divisor(chain: tuple[tuple[str, float], ...], count: float) -> float:
    """By what a summand is divided that is a mean of ``count`` values, with ``chain`` done to it; 0 if by nothing."""
    for how, factor in chain:
        if how == "divided by":
            count *= abs(factor)
        elif factor:
            count /= abs(factor)
    return count if math.isfinite(count) else 0.0


def _made_by_mirrored(node: Any) -> bool:
    """Whether ``compute_average_loss`` or ``scale_regularization_loss`` is not far within."""
    seen, level = {node}, [node]
    while level and len(seen) < _MOST_ANCESTORS:
        if any(_name(at).startswith("_ScaleGradient") for at in level):
            return True
        level = [inner for at in level for inner, _ in at.next_functions if inner is not None and inner not in seen]
        seen.update(level)
    return False


def _constant(node: Any) -> float | None:
    """The number that a product or quotient was made with, if it is one."""
    for attribute in SAVED_FACTORS:
        value = getattr(node, attribute, None)
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            return float(value)
        if isinstance(value, (int, float)):
            return float(value)
    return None
