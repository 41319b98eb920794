"""Where N towers part from one: step by step, in the order in which things happen in a step."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from mirrored.verification.rounding import HALF_MARGIN, MARGIN
from mirrored.verification.trace import Loss, Seen, Sketch, Step

_TOLERANCES = {"float64": 1e-8, "complex128": 1e-8, "float32": 1e-4, "complex64": 1e-4}
_COARSE = 1e-3  # half precision, and autocast: more is usual, and then shown to be rounding by a further run
_RATES = 1e-9  # learning rates know no rounding

_NOISE = 1e-6  # of the largest root mean square among the gradients: below, one is rounding alone
_SMALL = 1e-2  # a difference is relative to no less than this part of the model's root mean square


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first place where two runs differ.

    Attributes:
        step: number of the step, from 0.
        kind: "loss", "gradient", "learning rate", "parameter", "buffer" or "steps" (one run has made no more).
        where: the tensor that differs most, else "".
        amount: relative to one tower's value.
    """

    step: int
    kind: str
    where: str
    amount: float

    @property
    def place(self) -> tuple[int, int]:
        """For comparing: which of two differences comes first."""
        return self.step, _PLACES[self.kind]


_PLACES = {"steps": 0, "loss": 1, "gradient": 1, "learning rate": 2, "parameter": 3, "buffer": 4}


@dataclasses.dataclass(frozen=True)
class Row:
    """One step of both runs.

    Attributes:
        loss: (on one tower, on N together); None where it cannot be told.
        optimizer: its number and class.
        gradients, parameters: the largest relative difference, and of which tensor; None where a run ended in the step.
        difference: the first one of this step, if there is one.
        amounts: the differences of each kind.
        rounding: whether a difference is beyond the tolerance, but no larger than rounding makes it.
    """

    step: int
    optimizer: tuple[int, str]
    loss: tuple[float | None, float | None]
    gradients: tuple[float, str]
    parameters: tuple[float, str] | None
    difference: Difference | None
    amounts: Mapping[str, float]
    rounding: bool = False


class Comparison:
    """One tower's run beside that of N.

    Args:
        one: what the single tower has seen.
        many: what each of N has seen.
        tolerance: largest relative difference that counts as equal; None: by the parameters' dtype.
        exact: every bit counts.
        unrest: what a single tower has seen whose numbers were moved by rounding: differences that are not well
            above those between its run and the undisturbed one do not count.
        through: do not end at the first difference.
        without: names of buffers that do not count.
    """

    def __init__(
        self,
        one: Seen,
        many: Sequence[Seen],
        tolerance: float | None,
        exact: bool,
        unrest: Seen | None = None,
        *,
        through: bool = False,
        without: Collection[str] = (),
    ) -> None:
        self.one = one
        self.many = many
        dtypes = {held.dtype for step in one.steps for held in step.after.values()} or {"float32"}
        usual = _COARSE if one.autocast else max(usual_tolerance(d) for d in dtypes)
        self.parameters_tolerance = usual
        self.without = frozenset(without)
        self.tolerance = tolerance if tolerance is not None else usual
        self._noisy: defaultdict[str, set[int]] = defaultdict(set)
        self.margin = HALF_MARGIN if usual >= _COARSE else MARGIN
        self.exact = exact
        self.unrest = unrest
        self._rounding = None
        if unrest is not None:
            self._rounding = Comparison(one, [unrest], tolerance, False, through=True, without=without)
        self.rows: list[Row] = []
        for at, (first, *others) in enumerate(zip(one.steps, *(seen.steps for seen in many), strict=False)):
            self.rows.append(self._row(at, first, others))
            if self.rows[-1].difference is not None and not through:
                break
        self.first = next((row.difference for row in self.rows if row.difference is not None), None)
        made = {len(seen.steps) for seen in (one, *many)}
        if self.first is None and len(made) > 1:
            self.first = Difference(min(made), "steps", "", math.inf)

    def loosely(self) -> Comparison:
        """The same within the tolerance."""
        return Comparison(self.one, self.many, self.tolerance, False, self.unrest, without=self.without)

    def of(self, many: Sequence[Seen]) -> Comparison:
        """Another run on N towers, compared as this one was."""
        return Comparison(self.one, many, self.tolerance, self.exact, self.unrest, without=self.without)

    def between(self, one: Seen, many: Sequence[Seen]) -> Comparison:
        """Another run on one tower and on N, compared as these were, but for rounding."""
        return Comparison(one, many, self.tolerance, self.exact, without=self.without)

    def beside(self, unrest: Seen) -> Comparison:
        """The same, beside a run on one tower that was moved by rounding."""
        return Comparison(self.one, self.many, self.tolerance, self.exact, unrest, without=self.without)

    def leaving_out(self, buffers: Collection[str]) -> Comparison:
        """The same without some buffers."""
        without = self.without | frozenset(buffers)
        return Comparison(self.one, self.many, self.tolerance, self.exact, self.unrest, without=without)

    @property
    def rounding_from(self) -> int | None:
        """The first step in which rounding alone makes more than the tolerance."""
        return next((row.step for row in self.rows if row.rounding), None)

    def _row(self, at: int, one: Step, many: Sequence[Step]) -> Row:
        losses = total_loss([one.losses]), total_loss([step.losses for step in many])
        if self.one.virtual:  # their backwards are those of the virtual towers, of which every tower has others
            losses = None, None
        loss = 0.0
        if None not in losses:
            loss = self._of_losses(losses[0], losses[1])  # type: ignore[arg-type]
        self._note_noise(one, many[0])
        gradients = self._largest(one.gradients, many[0].gradients)
        stepped = one.after and many[0].after
        parameters = self._largest(one.after, many[0].after, self._noisy) if stepped else None
        difference = None
        buffers = max(self._buffers(one, many[0]), default=(0.0, "")) if stepped else (0.0, "")
        rates = max((relative(a, b) for a, b in zip(one.rates, many[0].rates, strict=False)), default=0.0)
        where = {"gradient": gradients[1], "buffer": buffers[1]}
        where["parameter"] = parameters[1] if parameters is not None else ""
        amounts = {
            # With equal gradients it is the reading of the loss that differs, not the training.
            "loss": loss if self.exact or gradients[0] > self.tolerance else 0.0,
            "gradient": gradients[0],
            "learning rate": rates,
            "parameter": parameters[0] if parameters is not None else 0.0,
            "buffer": buffers[0],
        }
        for kind, amount in amounts.items():
            if amount > self._limit(kind, at):
                difference = Difference(at, kind, where.get(kind, ""), amount)
                break
        beyond = any(amounts[kind] > self.tolerance for kind in ("loss", "gradient", "parameter", "buffer"))
        return Row(at, one.optimizer, losses, gradients, parameters, difference, amounts, beyond and difference is None)

    def _buffers(self, one: Step, many: Step) -> list[tuple[float, str]]:
        """How much each buffer differs that both have; each by itself, for their sizes have nothing in common.

        A module may be called on some towers alone, or later than on others.
        """
        names = sorted(one.buffers.keys() & many.buffers.keys() - self.without)
        return [(self._largest({n: one.buffers[n]}, {n: many.buffers[n]})[0], n) for n in names]

    def buffers_beyond(self, at: int) -> list[str]:
        """The buffers that differ after step number ``at`` by more than the tolerance and rounding."""
        limit = self._limit("buffer", at)
        return [name for amount, name in self._buffers(self.one.steps[at], self.many[0].steps[at]) if amount > limit]

    def _of_losses(self, one: float, many: float) -> float:
        """Relative to the largest loss: one that passes through zero is not more exact there."""
        if one == many or (math.isnan(one) and math.isnan(many)):
            return 0.0
        totals = (total_loss([step.losses]) for step in self.one.steps)
        scale = max(abs(total) for total in (one, many, *totals) if total is not None and not math.isnan(total))
        return abs(one - many) / scale if math.isfinite(one - many) else math.inf

    def _limit(self, kind: str, at: int) -> float:
        """The largest difference of a kind that does not count at a step."""
        if self.exact:
            return 0.0
        if kind == "learning rate":
            return min(_RATES, self.tolerance)
        if self._rounding is None:
            return self.tolerance
        return max(
            self.tolerance, self.margin * max((row.amounts[kind] for row in self._rounding.rows[: at + 1]), default=0.0)
        )

    def _largest(
        self,
        one: Mapping[str, Sketch | None],
        many: Mapping[str, Sketch | None],
        without: Mapping[str, Collection[int]] | None = None,
    ) -> tuple[float, str]:
        """The largest relative difference among tensors, and which one has it; ``without`` some sampled places."""
        size = max((_rms(held) for held in one.values() if held is not None), default=0.0)
        worst = (0.0, "")
        for name in {**one, **many}:
            a, b = one.get(name), many.get(name)
            if a is None and b is None:
                continue
            amount = math.inf
            if a is not None and b is not None:
                distance = a.distance(b, without.get(name, ()) if without and not self.exact else ())
                scale = max(a.norm, _SMALL * size * math.sqrt(a.numel))
                if a.digest != b.digest and a.dtype.startswith(("int", "uint", "bool")):
                    distance = math.inf  # integers know no rounding
                if self.exact and distance == 0.0 and a.digest != b.digest:
                    distance = math.ulp(a.norm)
                amount = distance / scale if distance and scale else 0.0 if not distance else math.inf
            if amount > worst[0]:
                worst = (amount, name)
        return worst

    def _note_noise(self, one: Step, many: Step) -> None:
        """Note the sampled places whose gradients are rounding alone, and differ.

        An optimizer that divides by the gradient's size (Adam) makes whole steps of them, in directions that mean
        nothing: of a bias before a batch norm, of an attention's bias for its keys.
        """
        largest = max((_rms(held) for held in one.gradients.values() if held is not None), default=0.0)
        for name, held in one.gradients.items():
            other = many.gradients.get(name)
            if held is not None and other is not None:
                limit = max(self.tolerance * _rms(held), _NOISE * largest)
                pairs = enumerate(zip(held.sample, other.sample, strict=False))
                self._noisy[name].update(i for i, (a, b) in pairs if a != b and max(abs(a), abs(b)) < limit)


def usual_tolerance(dtype: str) -> float:
    """The largest relative difference of two numbers of a dtype that counts as rounding, unless more is shown."""
    return _TOLERANCES.get(dtype, _COARSE)


def relative(one: float, many: float) -> float:
    """The difference of two numbers relative to the larger one; two that are not numbers are equal."""
    if one == many or (math.isnan(one) and math.isnan(many)):
        return 0.0
    amount = abs(one - many) / max(abs(one), abs(many))
    return amount if math.isfinite(amount) else math.inf


def total_loss(towers: Sequence[Sequence[Loss]]) -> float | None:
    """The loss whose gradient the towers' averaged gradients are, all backwards of a step together.

    Shares of the global mean (``compute_average_loss``) add up, others are averaged as gradients are. None where
    one loss mixes both, or the towers have made different numbers of backwards.
    """
    if len({len(losses) for losses in towers}) != 1 or not towers[0]:
        return None
    total = 0.0
    for same in zip(*towers, strict=True):
        kinds = {term.share for loss in same for term in loss.terms}
        if len(kinds) > 1 or any(loss.value is None for loss in same):
            return None
        values = [loss.value for loss in same if loss.value is not None]
        total += sum(values) / (1 if True in kinds else len(values))
    return total


def _rms(held: Sketch) -> float:
    return held.norm / math.sqrt(held.numel) if held.numel else 0.0
