"""The changes of a run, which make runs comparable, measure rounding, or prove a cause.

[Note: rounding is measured] A ReLU that is active in only one run, or Adam, amplifies the last bit of a number, in some
models within two steps. So no fixed tolerance is suitable. If a difference exceeds the tolerance, a further run on one
tower changes the results of all modules by rounding errors. Only differences well above their effect count. Learning
rates and integers have no rounding errors.

[Note: random numbers above the strategy] Until a script creates its strategy, each process draws its own random
numbers, unless the script seeds them. In the first run on N towers, each tower has another seed until then. If that run
differs from one tower's, and a further run with one seed does not, the numbers should have been seeded.

[Note: the order of sets] Strings have other hashes in each process, so the elements of a set have another order on each
host, and after a restart. Towers that verify starts have the hashes of one process. So if a script uses a set or
``hash()``, it is run on one tower in new processes with three seeds of the hashes. The seeds are fixed, so that the
answer does not depend on chance.

[Note: what rounding hides is repeated in float64] A mistake may be as small as the effect of rounding: a mean of means
over shares of 7 and 6, for example, in a model with BatchNorm. If rounding may explain a difference, both runs are
repeated in float64, in which it is a billion times smaller. The script does not know: its factories, casts and batches
give float64 where they would give a smaller floating-point dtype. Initial values are others than in float32, and equal
in both runs.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mirrored.context import ReplicaContext
from mirrored.verification.loss_graph import MOST_TERMS
from mirrored.verification.trace import Form, Settings, tensors_of
from towers.system import tree as trees


class LossFactor(enum.Enum):
    """The factor by which a tower multiplies its losses, in the order of trials. The value is its name in reports."""

    NONE = "one"
    SHARE = "towers · its examples / all examples"
    DIVISOR = "towers · its divisor / the sum of the divisors over the towers"
    TOWERS = "the number of towers"
    BOTH = "towers · towers · its examples / all examples"
    INVERSE = "all examples / its examples"  # of a sum in Keras' fit, which weights by examples

    def of(self, towers: int, local: int, total: int) -> float:
        """Returns the factor on one tower in one step. ``DIVISOR`` has one per summand (:func:`divisor_factors`)."""
        if self is LossFactor.INVERSE:
            return total / local if local else 1.0
        share = towers * local / total if total and self in (LossFactor.SHARE, LossFactor.BOTH) else 1.0
        return share * (towers if self in (LossFactor.TOWERS, LossFactor.BOTH) else 1)


@dataclasses.dataclass(frozen=True)
class Interventions:
    """The changes of a run.

    Attributes:
        loss: the factor of every loss before its backward.
        terms: the summands of the loss with this factor; empty for the whole loss.
        global_statistics: whether BatchNorm layers in training mode use the statistics of all towers' examples.
        whole_batch: the lines and functions that compute a value from the examples of all towers, not of a share.
        settings: the settings of each step's parameter groups, which replace the script's.
        padding: the forms of one tower's batches, by the numbers of the call of ``run`` and of the tensor in its
            arguments. Shares are padded to these forms.
        skip_local_changes: whether changes of gradients that are not averaged yet are left out.
        shapes: the shapes of one tower's random numbers, by the numbers of the call of ``run`` and of the draw in it;
            None on one tower.
        rounding: whether the results of modules are changed by rounding errors.
        double: whether everything is computed in float64.
        by_hand: whether every backward counts as a step, because the script updates its parameters without an optimizer
            of torch.
        one_seed: whether all towers start with one seed. Otherwise, each tower starts with another one, as without
            verify.
        hash_seed: the seed of the hashes of strings; None: that of this process.
        recorded: whether the run is recorded. Otherwise, the script is only ended after the steps.
    """

    loss: LossFactor = LossFactor.NONE
    terms: frozenset[int] = frozenset()
    global_statistics: bool = False
    whole_batch: frozenset[tuple[int | None, str | None]] = frozenset()
    settings: tuple[tuple[Settings, ...], ...] = ()
    padding: Mapping[tuple[int, int], Form] = dataclasses.field(default_factory=dict)
    skip_local_changes: bool = False
    shapes: Mapping[tuple[int, int], tuple[int, ...]] | None = None
    rounding: bool = False
    double: bool = False
    by_hand: bool = False
    one_seed: bool = False
    hash_seed: int | None = None
    recorded: bool = True


def divisor_factors(replica: ReplicaContext, divisors: Sequence[float]) -> dict[int, float]:
    """Returns the factors of a loss's summands that turn the mean of the towers' means into the mean over all values.

    All towers must call it.

    Args:
        divisors: the divisors of this tower's summands. All towers have the same number of them.
    """
    padded = torch.zeros(MOST_TERMS, dtype=torch.float64)
    padded[: len(divisors)] = torch.tensor(divisors, dtype=torch.float64)
    totals: Any = replica.all_reduce("sum", padded)
    towers = replica.num_replicas_in_sync
    return {i: towers * local / total if (total := float(totals[i])) else 1.0 for i, local in enumerate(divisors)}


def in_double(value: Any) -> Any:
    """Returns a tensor in float64 if it is real and of another floating-point dtype; anything else is unchanged."""
    if isinstance(value, Tensor) and value.dtype.is_floating_point and value.dtype != torch.float64:
        return value.double()
    return value


# A sum of many numbers has an error of several units in the last place. A sum in half precision is computed with more
# digits, so that few results are rounded to the neighbouring number.
_FULL = 0.5, 32.0  # the fraction of changed numbers, and the change in units in the last place
_HALF = 0.06, 1.0


class RoundingPerturbation:
    """Changes numbers by about as much as another order of summation; see [Note: rounding is measured].

    It has its own generators, so that the script draws the same numbers as in a run without it.
    """

    def __init__(self) -> None:
        self._generators: dict[torch.device, torch.Generator] = {}

    def perturb(self, output: Any) -> Any:
        """Returns a module's output with some of its numbers moved a few units in the last place towards zero.

        Numbers never grow, so that a probability stays below 1. Values other than tensors, and tuples of them, are
        unchanged.
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


def pad(arguments: Any, call: int, forms: Mapping[tuple[int, int], Form], shares: Sequence[tuple[int, int]]) -> Any:
    """Returns the arguments of ``run``, with shares padded like one tower's batch.

    Args:
        call: the number of the call of ``run``.
        forms: see :attr:`Interventions.padding`.
        shares: the numbers of examples (this tower, all towers) in each batch in use.
    """
    numbers = iter(range(sum(1 for _ in tensors_of(arguments))))

    def padded(leaf: Any) -> Any:
        form = forms.get((call, next(numbers))) if isinstance(leaf, Tensor) else None
        return leaf if form is None else _padded(leaf, form, shares)

    return trees.map_leaves(padded, arguments)


def padded_dims(shape: Sequence[int], form: Form, shares: Sequence[tuple[int, int]]) -> list[int]:
    """Returns the dimensions, except that of the examples, in which a share is shorter than one tower's batch."""
    if len(shape) != len(form.shape):
        return []
    shorter = [d for d, (local, full) in enumerate(zip(shape, form.shape, strict=True)) if local < full]
    examples = next((d for d in shorter if (shape[d], form.shape[d]) in shares), None)
    if examples is None:
        return []
    return [d for d in shorter if d != examples and form.paddings[d] is not None]


def _padded(tensor: Tensor, form: Form, shares: Sequence[tuple[int, int]]) -> Tensor:
    for d in padded_dims(tensor.shape, form, shares):
        padding, missing = form.paddings[d], form.shape[d] - tensor.shape[d]
        assert padding is not None
        widths = [0, 0] * (tensor.dim() - 1 - d) + ([missing, 0] if padding.before else [0, missing])
        tensor = F.pad(tensor, widths, value=padding.number)
    return tensor
