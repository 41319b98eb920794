"""What a run changes in a script: to make runs comparable, to measure rounding, or to prove that a cause is the cause.

[Note: rounding is measured] A ReLU that is active in one run only, or Adam, amplifies the last bit of a number, in some
models within two steps, so no fixed tolerance fits. Where a difference is beyond the tolerance, a further run on one
tower moves the results of all modules by rounding errors; only differences well above the effect of that count.
Learning rates and integers have no rounding errors.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mirrored.context import ReplicaContext
from mirrored.verification.loss_graph import MOST_TERMS
from mirrored.verification.padding import Form


class LossFactor(enum.Enum):
    """The factor by which a tower multiplies its losses, in the order of trials; the value is its name in reports."""

    NONE = "one"
    SHARE = "towers · its examples / all examples"
    DIVISOR = "towers · its divisor / the sum of the divisors over the towers"
    TOWERS = "the number of towers"
    BOTH = "towers · towers · its examples / all examples"
    INVERSE = "all examples / its examples"  # of a sum in Keras' fit, which weighs by examples

    def of(self, towers: int, local: int, total: int) -> float:
        """The factor on one tower in one step; ``DIVISOR`` has a factor for each summand (:func:`divisor_factors`)."""
        if self is LossFactor.INVERSE:
            return total / local if local else 1.0
        share = towers * local / total if total and self in (LossFactor.SHARE, LossFactor.BOTH) else 1.0
        return share * (towers if self in (LossFactor.TOWERS, LossFactor.BOTH) else 1)


@dataclasses.dataclass(frozen=True)
class Interventions:
    """What is changed in a run.

    Attributes:
        loss: every loss is multiplied by this before its backward.
        terms: the summands of the loss to which that applies; empty: the whole loss.
        global_statistics: batch norm layers in training mode take the statistics of all towers' examples.
        rates: learning rates of each step's parameter groups, which replace the script's.
        padding: what one tower's batches look like, by the numbers of the call of ``run`` and of the tensor among its
            arguments; shares are padded alike.
        skip_local_changes: changes of gradients that are not averaged yet are left out.
        shapes: what random numbers one tower has drawn: their shapes, by the numbers of the call of ``run`` and of the
            draw in it; None on one tower.
        rounding: the results of modules are moved by rounding errors.
        recorded: whether anything is recorded; otherwise the script only ends when it has made the steps.
    """

    loss: LossFactor = LossFactor.NONE
    terms: frozenset[int] = frozenset()
    global_statistics: bool = False
    rates: tuple[tuple[float, ...], ...] = ()
    padding: Mapping[tuple[int, int], Form] = dataclasses.field(default_factory=dict)
    skip_local_changes: bool = False
    shapes: Mapping[tuple[int, int], tuple[int, ...]] | None = None
    rounding: bool = False
    recorded: bool = True


def divisor_factors(replica: ReplicaContext, divisors: Sequence[float]) -> dict[int, float]:
    """The factor for each summand of a loss that makes the mean of the towers' means the mean over all values.

    All towers call it.

    Args:
        divisors: by what this tower's summands are divided; the same number of them on all towers.
    """
    padded = torch.zeros(MOST_TERMS, dtype=torch.float64)
    padded[: len(divisors)] = torch.tensor(divisors, dtype=torch.float64)
    totals: Any = replica.all_reduce("sum", padded)
    towers = replica.num_replicas_in_sync
    return {i: towers * local / total if (total := float(totals[i])) else 1.0 for i, local in enumerate(divisors)}


# A sum of many numbers is off by several units of the last place; one of half precision is computed in more digits, so
# that few results are rounded to the neighbouring number.
_FULL = 0.5, 32.0  # the fraction of the numbers that is moved, and by how many units of the last place
_HALF = 0.06, 1.0


class RoundingPerturbation:
    """Moves numbers by about as much as adding up in another order does; see [Note: rounding is measured].

    It has generators of its own, so that the script's draw the same numbers as in a run without it.
    """

    def __init__(self) -> None:
        self._generators: dict[torch.device, torch.Generator] = {}

    def perturb(self, output: Any) -> Any:
        """A module's output with some of its numbers a few units of the last place nearer to zero.

        Never farther away: a probability stays below 1. Anything but tensors, and tuples of them, stays as it is.
        """
        if type(output) is tuple:
            return tuple(self.perturb(element) for element in output)
        if type(output) is not Tensor or not output.is_floating_point() or output.layout != torch.strided:
            return output
        device = output.device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(1)
        fraction, units = _HALF if output.dtype.itemsize <= 2 else _FULL
        chosen = torch.rand(output.shape, generator=self._generators[device], device=device) < fraction
        return output * (1 - units * torch.finfo(output.dtype).eps * chosen.to(output.dtype))
