"""``strategy.backward`` without virtual towers: forward and backward of this tower's share as a whole.

[Note: nothing is computed on an empty share] A tower without examples opens a backward of its own in the averager that
touches no parameter, and takes part in the sum of the losses, whose dtype the other towers say. Its ``loss_fn`` is
called nevertheless where a forward is a matter of all towers: BatchNorm over the global batch, and lazy modules before
their first batch. Collectives that a ``loss_fn`` makes itself cannot be seen beforehand; they end in a DeadlockError
that names them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from mirrored.losses import compute_average_loss
from mirrored.observer import observer
from mirrored.strategy.engine import Engine
from towers.collectives.communicator import Communicator
from towers.collectives.values import sum_of_some


def backward(
    engine: Engine,
    comm: Communicator,
    loss_fn: Callable[..., Tensor],
    batch: Sequence[Any],
    sample_weight: Tensor | float | None,
    denominator: Literal["examples", "weights"],
    *,
    empty: bool,
) -> Tensor:
    """Leave the gradient of the global mean in the parameters, and return that mean (see ``Strategy.backward``).

    Args:
        empty: whether this tower's share has no examples.
    """
    loss: Tensor | None = None
    if empty and not engine.exchanges_in_forward:  # see [Note: nothing is computed on an empty share]
        # The others count the examples, or add up their weights, together with this tower.
        nothing = torch.zeros(0, *getattr(sample_weight, "shape", ())[1:], device=comm.device)
        compute_average_loss(nothing, sample_weight, denominator=denominator)
        engine.contribute_nothing()
    else:
        loss = compute_average_loss(loss_fn(*batch), sample_weight, denominator=denominator)
        loss.backward()
    mean = sum_of_some(comm, "strategy.backward()", loss)
    if (watching := observer()) is not None:
        watching.returned("reduce('sum')", mean)
    return mean
