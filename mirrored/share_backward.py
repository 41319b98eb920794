"""``strategy.backward`` without virtual towers: forward and backward of this tower's share as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from mirrored.losses import compute_average_loss
from mirrored.observer import observer
from towers.collectives.values import sum_of_some

if TYPE_CHECKING:
    from mirrored.strategy import Strategy


def backward(
    strategy: Strategy,
    loss_fn: Callable[..., Tensor],
    batch: Sequence[Any],
    sample_weight: Tensor | float | None,
    denominator: Literal["examples", "weights"],
) -> Tensor:
    """Leave the gradient of the global mean in the parameters, and return that mean (see ``Strategy.backward``)."""
    loss: Tensor | None = None
    if strategy.known_shares.is_empty(batch) and not strategy.engine.exchanges_in_forward:
        # The others count the examples, or add up their weights, together with this tower.
        nothing = torch.zeros(0, *getattr(sample_weight, "shape", ())[1:], device=strategy.device)
        compute_average_loss(nothing, sample_weight, denominator=denominator)
        strategy.engine.contribute_nothing()
    else:
        loss = compute_average_loss(loss_fn(*batch), sample_weight, denominator=denominator)
        loss.backward()
    mean = sum_of_some(strategy.communicator, "strategy.backward()", loss)
    if (watching := observer()) is not None:
        watching.returned("reduce('sum')", mean)
    return mean
