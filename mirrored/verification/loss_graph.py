"""What a loss is made of, read from its autograd graph."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from mirrored.verification.seen import Term

_REDUCTIONS = {1: "mean of", 2: "sum of"}  # torch's numbers for reduction="mean" and "sum"

_UNCHANGED = ("Neg", "ToCopy", "Clone", "View", "Reshape", "Squeeze", "Unsqueeze", "Alias")

_MOST_TERMS = 64

_MOST_ANCESTORS = 256


def terms_of(loss: torch.Tensor) -> tuple[Term, ...]:
    """The summands of a loss, each followed inwards to the reduction that made it a scalar.

    Uses what autograd saves (``_saved_other``, ``_saved_reduction``, …); what cannot be read is left out.
    """
    return tuple(term for term, _ in _branches(loss))


def scale_terms(loss: torch.Tensor, which: Collection[int], factor: float) -> list[RemovableHandle]:
    """Let backward multiply the gradients of some of :func:`terms_of` by a factor, until the handles are removed."""

    def scaled(gradients: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(gradient if gradient is None else gradient * factor for gradient in gradients)

    return [node.register_prehook(scaled) for i, (_, node) in enumerate(_branches(loss)) if i in which]


def _branches(loss: torch.Tensor) -> list[tuple[Term, Any]]:
    found: list[tuple[Term, Any]] = []
    _follow(loss.grad_fn, loss.grad_fn, (), False, found)
    return found


def _follow(
    node: Any, branch: Any, chain: tuple[tuple[str, float], ...], share: bool, found: list[tuple[Term, Any]]
) -> None:
    if node is None or len(found) >= _MOST_TERMS:
        return
    name = node.name().rsplit("::", 1)[-1].rstrip("0123456789").removesuffix("Backward")
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
        for size in node._saved_self_sym_sizes:
            count *= int(size)
        found.append((Term((*chain, ("mean of" if name == "Mean" else "sum of", count)), share), branch))
    elif (reduction := _REDUCTIONS.get(getattr(node, "_saved_reduction", 0))) is not None:
        target = getattr(node, "_saved_target", None)
        count = target.numel() if target is not None else 0
        found.append((Term((*chain, (reduction, count)), share), branch))
    else:
        found.append((Term((*chain, (name, 0)), share or _made_by_mirrored(node)), branch))


def _made_by_mirrored(node: Any) -> bool:
    """Whether ``compute_average_loss`` or ``scale_regularization_loss`` is not far within."""
    seen, level = {node}, [node]
    while level and len(seen) < _MOST_ANCESTORS:
        if any(at.name().rsplit("::", 1)[-1].startswith("_ScaleGradient") for at in level):
            return True
        level = [inner for at in level for inner, _ in at.next_functions if inner is not None and inner not in seen]
        seen.update(level)
    return False


def _constant(node: Any) -> float | None:
    """The number that a product or quotient was made with, if it is one."""
    for attribute in ("_saved_other", "_saved_self"):
        value = getattr(node, attribute, None)
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            return float(value)
        if isinstance(value, (int, float)):
            return float(value)
    return None
