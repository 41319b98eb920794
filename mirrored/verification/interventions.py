"""What a further run changes, to prove that a suspected cause is the cause."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mirrored.context import ReplicaContext
from mirrored.verification.loss_graph import MOST_TERMS
from mirrored.verification.padding import Forms


class LossFactor(enum.Enum):
    """By what a tower multiplies its losses; the value is how the report calls it."""

    NONE = "one"
    SHARE = "towers · its examples / all examples"
    TOWERS = "the number of towers"
    BOTH = "towers · towers · its examples / all examples"
    DIVISOR = "towers · what it is divided by / the sum of that over the towers"

    def of(self, towers: int, local: int, total: int) -> float:
        """The factor on one tower in one step; that of ``DIVISOR`` is another one for each summand."""
        share = towers * local / total if total and self in (LossFactor.SHARE, LossFactor.BOTH) else 1.0
        return share * (towers if self in (LossFactor.TOWERS, LossFactor.BOTH) else 1)


@dataclasses.dataclass(frozen=True)
class Repairs:
    """What is changed in a run.

    Attributes:
        loss: every loss is multiplied by this before its backward.
        terms: the summands of the loss to which that applies; empty: to the whole.
        global_statistics: batch norm layers in training mode take the statistics of all towers' examples.
        rates: learning rates of each step's parameter groups, which replace the script's.
        padding: what one tower's batches look like, to which shares are padded.
        local_changes: gradients that are a tower's own are left as they are: what changes them is left out.
    """

    loss: LossFactor = LossFactor.NONE
    terms: frozenset[int] = frozenset()
    global_statistics: bool = False
    rates: tuple[tuple[float, ...], ...] = ()
    padding: Forms = dataclasses.field(default_factory=dict)
    local_changes: bool = False


def batch_norm_over_towers(
    replica: ReplicaContext,
    batch: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``torch.nn.functional.batch_norm`` in training, with the statistics of all towers' examples."""
    dims = [d for d in range(batch.dim()) if d != 1]

    def per_channel(value: Tensor) -> Tensor:
        return value.view(1, -1, *[1] * (batch.dim() - 2))

    count: Any = replica.all_reduce("sum", torch.tensor(float(batch.numel() // batch.shape[1]), device=batch.device))
    mean = replica.all_reduce("sum", batch.sum(dims)) / count
    centred = batch - per_channel(mean)
    variance = replica.all_reduce("sum", centred.square().sum(dims)) / count
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.detach().to(running_mean.dtype), momentum)
        if running_var is not None:
            unbiased = variance.detach() * count / (count - 1).clamp(min=1)
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    result = centred * per_channel((variance + eps).rsqrt())
    if weight is not None:
        result = result * per_channel(weight)
    return result + per_channel(bias) if bias is not None else result


def divisor_factors(replica: ReplicaContext, divisors: Sequence[float]) -> dict[int, float]:
    """For each summand of a loss what makes the mean over the towers that over all values; all towers call it.

    Args:
        divisors: by what this tower's summands are divided; the same number of them on all towers.
    """
    wide = torch.zeros(MOST_TERMS, dtype=torch.float64)
    wide[: len(divisors)] = torch.tensor(divisors, dtype=torch.float64)
    totals: Any = replica.all_reduce("sum", wide)
    towers = replica.num_replicas_in_sync
    return {i: towers * own / total if (total := float(totals[i])) else 1.0 for i, own in enumerate(divisors)}
