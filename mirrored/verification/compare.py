"""Compares a run on N towers with one on one tower: each step, and the results of ``reduce`` and ``gather``.

[Note: gradients of rounding alone] An optimizer that divides by the gradient's size (Adam) makes full steps even for
gradients that are only rounding errors. Examples are the gradients of a bias before a BatchNorm, or of an attention's
bias for its keys. Their directions are arbitrary. So parameters are not compared if their gradients are that small and
differ.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from mirrored.verification.trace import Loss, Printed, Result, RunCall, Sketch, Step, Trace

_TOLERANCES = {"float64": 1e-8, "complex128": 1e-8, "float32": 1e-4, "complex64": 1e-4}
_COARSE = 1e-3  # for half precision and autocast; a further run shows whether larger differences are rounding
_RATES = 1e-9  # learning rates have no rounding errors

_NOISE = 1e-6  # of the largest root mean square among the gradients; below it, a gradient is only rounding
_SMALL = 1e-2  # a difference is relative to at least this fraction of the model's root mean square

# Differences up to this multiple of the rounding differences on one tower count as rounding. With half precision and
# autocast, every step of both runs is visibly rounded, not only a few steps by chance.
_MARGIN, _HALF_MARGIN = 10.0, 5.0

_ORDER = {"steps": 0, "loss": 1, "gradient": 1, "setting": 2, "parameter": 3, "buffer": 4}


@dataclasses.dataclass(frozen=True)
class RunDifference:
    """The first difference between two runs.

    Attributes:
        step: the index of the step.
        kind: "loss", "gradient", "setting" (of the optimizer), "parameter", "buffer" or "steps" (one run has fewer
            steps).
        where: the tensor that differs most, the setting, or "".
        amount: the difference relative to one tower's value.
    """

    step: int
    kind: str
    where: str
    amount: float

    def __str__(self) -> str:
        if self.kind == "setting":
            return setting_named(self.where)
        return f"{self.kind} of {self.where}" if self.where else self.kind

    @property
    def place(self) -> tuple[int, int]:
        """The position in the order of differences. The first difference has the smallest position."""
        return self.step, _ORDER[self.kind]


@dataclasses.dataclass(frozen=True)
class ComparedStep:
    """One step of both runs.

    Attributes:
        step: its index.
        optimizer: its number and class.
        loss: (on one tower, on N together); None if unknown.
        gradients, parameters: the largest relative difference and its tensor; None if a run ended in the step.
        difference: the first difference of this step, or None.
        amounts: the largest difference of each kind.
        rounding: whether a difference exceeds the tolerance, but not the effect of rounding.
    """

    step: int
    optimizer: tuple[int, str]
    loss: tuple[float | None, float | None]
    gradients: tuple[float, str]
    parameters: tuple[float, str] | None
    difference: RunDifference | None
    amounts: Mapping[str, float]
    rounding: bool = False


@dataclasses.dataclass(eq=False)
class RunComparison:
    """A run on one tower and a run on N towers. Use ``dataclasses.replace`` for another comparison of the same kind.

    Attributes:
        one: the trace of the single tower.
        many: the traces of the N towers.
        tolerance: the largest relative difference that counts as equal.
        exact: whether every bit counts.
        perturbed: the trace of a single tower whose numbers were changed by rounding errors. Differences count only if
            they are well above those between this run and the undisturbed one.
        without: names of buffers that do not count.
        double: whether both runs computed in float64 although the script does not ask for it.
        usual: the tolerance for the parameters' dtype.
        margin: the multiple of the effect of rounding that still counts as rounding.
        rows: the steps that both runs have made.
        first: the first difference, or None.
    """

    one: Trace
    many: Sequence[Trace]
    tolerance: float
    exact: bool = False
    perturbed: Trace | None = None
    without: frozenset[str] = frozenset()
    double: bool = False
    usual: float = dataclasses.field(init=False)
    margin: float = dataclasses.field(init=False)
    rows: list[ComparedStep] = dataclasses.field(init=False, default_factory=list)
    first: RunDifference | None = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.usual = _usual_tolerance_of(self.one)
        self.margin = _HALF_MARGIN if self.usual >= _COARSE else _MARGIN
        self._noisy: defaultdict[str, set[int]] = defaultdict(set)
        losses = [abs(total) for step in self.one.steps if (total := total_loss([step.losses])) is not None]
        self._largest_loss = max((loss for loss in losses if not math.isnan(loss)), default=0.0)
        self._rounding: list[ComparedStep] = []
        if self.perturbed is not None:
            self._rounding = RunComparison(self.one, [self.perturbed], self.tolerance, without=self.without).rows
        for at, (one, *many) in enumerate(zip(self.one.steps, *(trace.steps for trace in self.many), strict=False)):
            self.rows.append(self._compare(at, one, many))
        self.first = next((row.difference for row in self.rows if row.difference is not None), None)
        made = {len(trace.steps) for trace in (self.one, *self.many)}
        if self.first is None and len(made) > 1:
            self.first = RunDifference(min(made), "steps", "", math.inf)

    def training_calls(self) -> Iterator[tuple[RunCall, list[RunCall]]]:
        """Yields the calls of ``run`` with a backward, in pairs: (on one tower, on each of N)."""
        for call, *shares in zip(self.one.calls, *(trace.calls for trace in self.many), strict=False):
            if call.trained:
                yield call, shares

    @property
    def only_zeros(self) -> bool:
        """Whether all gradients of all steps are zero or missing, so that equal runs show nothing."""
        gradients = [sketch for step in self.one.steps for sketch in step.gradients.values() if sketch is not None]
        return not any(sketch.norm for sketch in gradients)

    @property
    def cut_short(self) -> bool:
        """Whether the script raised an exception only because its loop was ended after the last step to be compared.

        Such a script did not get the results of a full epoch. It fails at the same line on one tower and on N.
        """
        raised = self.one.raised
        if raised is None or not all(trace.end.cut for trace in (self.one, *self.many)):
            return False
        errors = [trace.raised for trace in self.many if trace.raised is not None]
        if len(errors) < len(self.many) or any(len(trace.steps) != len(self.one.steps) for trace in self.many):
            return False
        places = {(error.kind, error.line) for error in errors if not error.consequence}
        return places == {(raised.kind, raised.line)}

    def _compare(self, at: int, one: Step, many: Sequence[Step]) -> ComparedStep:
        alone, together = total_loss([one.losses]), total_loss([step.losses for step in many])
        if self.one.virtual:  # each tower has the backwards of other virtual towers
            alone = together = None
        loss = 0.0
        if alone is not None and together is not None:
            # A loss that passes through zero is not more exact there.
            sizes = [abs(total) for total in (alone, together) if not math.isnan(total)]
            loss = relative(alone, together, max([*sizes, self._largest_loss]))
        self._note_noise(one, many[0])
        gradients = self._largest(one.gradients, many[0].gradients)
        stepped = bool(one.after and many[0].after)
        parameters = self._largest(one.after, many[0].after, self._noisy) if stepped else None
        buffer = max(self._buffers(one, many[0]), default=(0.0, ""))
        setting, amount, _ = next(differing_settings([one, many[0]], self.tolerance), ("", 0.0, []))
        differences = {
            # With equal gradients, only the reported loss differs, not the training.
            "loss": (loss if self.exact or gradients[0] > self.tolerance else 0.0, ""),
            "gradient": gradients,
            "setting": (amount, setting),
            "parameter": parameters or (0.0, ""),
            "buffer": buffer,
        }
        amounts = {kind: amount for kind, (amount, _) in differences.items()}
        beyond = next((kind for kind, amount in amounts.items() if amount > self._limit(kind, at)), None)
        difference = RunDifference(at, beyond, differences[beyond][1], amounts[beyond]) if beyond is not None else None
        rounding = difference is None and max(amounts.values()) > self.tolerance
        return ComparedStep(at, one.optimizer, (alone, together), gradients, parameters, difference, amounts, rounding)

    def _buffers(self, one: Step, many: Step) -> list[tuple[float, str]]:
        """Returns the difference of each buffer of both runs, relative to itself. Buffers have no common size.

        A module may be called only on some towers, or later than on others.
        """
        names = sorted(one.buffers.keys() & many.buffers.keys() - self.without)
        return [(self._largest({n: one.buffers[n]}, {n: many.buffers[n]})[0], n) for n in names]

    def changed_after_averaging(self, difference: RunDifference) -> bool:
        """Returns whether gradients that differ were those of one tower when backward had averaged them."""
        one, many = self.one.steps[difference.step], self.many[0].steps[difference.step]
        if difference.kind != "gradient" or not one.averaged.keys() >= {n for n, g in one.gradients.items() if g}:
            return False
        return self._largest(one.averaged, many.averaged)[0] <= self._limit("gradient", difference.step)

    def buffers_beyond(self, at: int) -> list[str]:
        """Returns the buffers whose differences after step ``at`` exceed the tolerance and rounding."""
        limit = self._limit("buffer", at)
        return [name for amount, name in self._buffers(self.one.steps[at], self.many[0].steps[at]) if amount > limit]

    def _limit(self, kind: str, at: int) -> float:
        """Returns the largest difference of a kind that does not count at a step."""
        if self.exact:
            return 0.0
        if kind == "setting":
            return 0.0
        rounding = max((row.amounts[kind] for row in self._rounding[: at + 1]), default=0.0)
        return max(self.tolerance, self.margin * rounding)

    def _largest(
        self,
        one: Mapping[str, Sketch | None],
        many: Mapping[str, Sketch | None],
        without: Mapping[str, Collection[int]] | None = None,
    ) -> tuple[float, str]:
        """Returns the largest relative difference among tensors, and its tensor, ``without`` some sampled elements."""
        size = _size_of(one)
        ignored = without if without is not None and not self.exact else {}
        worst = (0.0, "")
        for name in {**one, **many}:
            amount = self._amount(one.get(name), many.get(name), size, ignored.get(name, ()))
            if amount > worst[0]:
                worst = (amount, name)
        return worst

    def _amount(self, one: Sketch | None, many: Sketch | None, size: float, ignored: Collection[int]) -> float:
        """Returns the distance of a tensor from one tower's, relative to its norm or ``size``.

        The fraction ``_SMALL`` of ``size`` per element is used if it is larger than the norm. Two non-finite tensors do
        not differ.
        """
        if one is None or many is None:
            return 0.0 if one is many else math.inf
        if one.digest == many.digest or not (math.isfinite(one.norm) or math.isfinite(many.norm)):
            return 0.0
        if _is_integer(one.dtype) or not (math.isfinite(one.norm) and math.isfinite(many.norm)):
            return math.inf
        distance = one.distance(many, ignored)
        if self.exact and not distance:
            distance = math.ulp(one.norm)
        scale = max(one.norm, _SMALL * size * math.sqrt(one.numel))
        return distance / scale if scale else math.inf if distance else 0.0

    def _note_noise(self, one: Step, many: Step) -> None:
        """Notes the sampled elements that differ and whose gradients are only rounding; see the note above."""
        size = _size_of(one.gradients)
        for name, sketch in one.gradients.items():
            other = many.gradients.get(name)
            if sketch is not None and other is not None:
                limit = max(self.tolerance * sketch.rms, _NOISE * size)
                pairs = enumerate(zip(sketch.sample, other.sample, strict=False))
                self._noisy[name].update(i for i, (a, b) in pairs if a != b and max(abs(a), abs(b)) < limit)


def compare(one: Trace, many: Sequence[Trace], tolerance: float | None = None, exact: bool = False) -> RunComparison:
    """Compares a run on one tower with one on N towers, within ``tolerance`` or by default the usual one."""
    return RunComparison(one, many, _usual_tolerance_of(one) if tolerance is None else tolerance, exact)


def _usual_tolerance_of(one: Trace) -> float:
    dtypes = {sketch.dtype for step in one.steps for sketch in step.after.values()} or {"float32"}
    return _COARSE if one.autocast else max(usual_tolerance(dtype) for dtype in dtypes)


def usual_tolerance(dtype: str) -> float:
    """Returns the largest relative difference of two numbers of a dtype that counts as rounding by default."""
    return _TOLERANCES.get(dtype, _COARSE)


def _size_of(tensors: Mapping[str, Sketch | None]) -> float:
    """Returns the largest root mean square among the finite tensors."""
    return max((s.rms for s in tensors.values() if s is not None and math.isfinite(s.norm)), default=0.0)


def _is_integer(dtype: str) -> bool:
    """Returns whether numbers of a dtype have no rounding errors."""
    return dtype.startswith(("int", "uint", "bool"))


def relative(one: float, many: float, scale: float | None = None) -> float:
    """Returns the difference of two numbers relative to ``scale``, or by default to the larger number.

    The result is 0 for two NaN, and infinite if the difference is not finite or the scale cannot divide it.
    """
    if one == many or (math.isnan(one) and math.isnan(many)):
        return 0.0
    scale = max(abs(one), abs(many)) if scale is None else scale
    amount = abs(one - many) / scale if scale else math.inf
    return amount if math.isfinite(amount) else math.inf


def differing_settings(steps: Sequence[Step], tolerance: float = 0.0) -> Iterator[tuple[str, float, list[float]]]:
    """Yields the settings that differ between steps of an optimizer: the name, the relative difference and the values.

    Each number of a tuple ("betas[1]") is a setting. Some optimizers compute a setting from gradients.
    """
    for groups in zip(*(step.settings for step in steps), strict=False):
        for name in groups[0]:
            values = [group.get(name, math.nan) for group in groups]
            tuples = [value if isinstance(value, tuple) else (value,) for value in values]
            for at, numbers in enumerate(zip(*tuples, strict=False)):
                amount = max(relative(numbers[0], number) for number in numbers)
                if amount > (min(_RATES, tolerance) if name == "lr" else tolerance):
                    yield f"{name}[{at}]" if isinstance(values[0], tuple) else name, amount, list(numbers)


def setting_named(name: str) -> str:
    """Returns the name of an optimizer's setting, for messages."""
    return "learning rate" if name == "lr" else name


def total_loss(towers: Sequence[Sequence[Loss]]) -> float | None:
    """Returns the loss whose gradient the averaged gradients are, for all backwards of a step together.

    Shares of the global mean (``compute_average_loss``) are added up. Other losses are averaged, as gradients are. The
    result is None if a loss mixes both, or if the towers' numbers of backwards differ.
    """
    if len({len(losses) for losses in towers}) != 1 or not towers[0]:
        return None
    total = 0.0
    for same in zip(*towers, strict=True):
        kinds = {term.share for loss in same for term in loss.terms}
        values = [loss.value for loss in same if loss.value is not None]
        if len(kinds) > 1 or len(values) < len(same):
            return None
        total += sum(values) / (1 if True in kinds else len(values))
    return total


# -- what reduce and gather return -----------------------------------------------------------------------

_Line = tuple[str, int | None]


def differing_result(comparison: RunComparison, again: Trace | None = None) -> tuple[Result, Result] | None:
    """Returns the first result that differs, as (on one tower, on N), or None.

    Differences are relative to the largest value of this line of the script at this index. Integers must be equal. A
    value with fewer digits than the parameters is compared to its precision. A gather that returns N times as many
    entries as on one tower is correct if it gathers one from each tower.

    Args:
        again: the trace of a further run on one tower. Lines whose results differ there (times, for example) do not
            count.
    """
    one, many = comparison.one.results, comparison.many[0].results
    sizes: defaultdict[tuple[_Line, int], float] = defaultdict(float)
    for result in one:
        for i, value in enumerate(result.values):
            sizes[_line(result), i] = max(sizes[_line(result), i], abs(value))

    def amounts(a: Result, b: Result) -> list[float]:
        pairs = enumerate(zip(a.values, b.values, strict=False))
        return [min(relative(x, y), relative(x, y, sizes[_line(a), i])) for i, (x, y) in pairs]

    unsteady: set[_Line] = set()
    for first, second in zip(one, again.results if again is not None else [], strict=False):
        if first.count != second.count or any(amount > comparison.tolerance for amount in amounts(first, second)):
            unsteady.add(_line(first))
    rounding: defaultdict[_Line, dict[int, float]] = defaultdict(dict)  # the largest, by steps before
    for alone, perturbed in zip(one, (comparison.perturbed or comparison.one).results, strict=False):
        by_steps = rounding[_line(alone)]
        by_steps[alone.steps] = max(by_steps.get(alone.steps, 0.0), *amounts(alone, perturbed), 0.0)
    for alone, together in zip(one, many, strict=False):
        line = _line(alone)
        if line[0].split("(")[0] != together.call.split("(")[0] or alone.steps != together.steps:
            return None
        if line in unsteady:
            continue
        if alone.count != together.count:
            if line[0].startswith("strategy.gather") and together.count == len(comparison.many) * alone.count:
                continue
            return alone, together
        rounded = max((amount for steps, amount in rounding[line].items() if steps <= alone.steps), default=0.0)
        for dtype, amount in zip(alone.dtypes, amounts(alone, together), strict=False):
            least = _least(comparison, dtype)
            if amount > (least if comparison.exact else max(least, comparison.margin * rounded)):
                return alone, together
    return None


# -- what the chief prints --------------------------------------------------------------------------------

_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+(?:\.\d*)?(?:e[-+]?\d+)?|nan|inf)(?![\w.]*\w)", re.IGNORECASE)
_OF_TIME = re.compile(
    r"^\s?(?:[numµ]?s|secs?|seconds?|min|minutes?|h|hours?|[kmg]i?b|\S*/s|\S*/sec|it/s)\b", re.IGNORECASE
)
_TIMED = re.compile(r"\b(?:time|took|elapsed|eta|speed|throughput|memory|pid|port)\b", re.IGNORECASE)


class PrintedNumber(NamedTuple):
    """A number that the chief prints: as text, and the unit of its last digit (0 for an integer)."""

    text: str
    unit: float

    @property
    def value(self) -> float:
        """The number."""
        return float(self.text)


def _numbers_in(line: Printed) -> list[PrintedNumber]:
    """Returns the numbers of a line, without times, speeds and amounts of memory."""
    numbers = []
    for match in _NUMBER.finditer(line.text):
        if _OF_TIME.match(line.text[match.end() :]) or _TIMED.search(line.text[: match.start()]):
            continue
        mantissa, _, exponent = match[0].lower().partition("e")
        decimals = len(mantissa.partition(".")[2])
        whole = "." not in mantissa and not exponent
        numbers.append(PrintedNumber(match[0], 0.0 if whole else 10.0 ** (int(exponent or 0) - decimals)))
    return numbers


def differing_print(
    comparison: RunComparison, again: Trace | None = None
) -> tuple[Printed, PrintedNumber, PrintedNumber] | None:
    """Returns the chief's first line with a number that differs, and the number on one tower and on N.

    Numbers are compared to their last digit, and relative to the largest number at this place. Numbers that may be the
    number of towers, or depend on it before the first step, such as a tower's batch size, do not count.

    Args:
        again: the trace of a further run on one tower. Lines that differ there do not count.
    """
    one, many = comparison.one.printed, comparison.many[0].printed
    unsteady = _places_that_differ(one, again.printed) if again is not None else {}
    rounded = _places_that_differ(one, comparison.perturbed.printed) if comparison.perturbed is not None else {}
    sizes: defaultdict[tuple[int | None, int], float] = defaultdict(float)
    for line in one:
        for i, number in enumerate(_numbers_in(line)):
            sizes[line.line, i] = max(sizes[line.line, i], abs(number.value))
    for alone, together in _pairs(one, many):
        if _NUMBER.sub("", alone.text) != _NUMBER.sub("", together.text):
            continue
        for i, (a, b) in enumerate(zip(_numbers_in(alone), _numbers_in(together), strict=False)):
            place = alone.line, i
            if a.text == b.text or place in unsteady or _counts_towers(alone, a, b, len(comparison.many)):
                continue
            allowed = max(a.unit, comparison.margin * rounded.get(place, 0.0))
            if a.unit:
                allowed = max(allowed, comparison.tolerance * max(sizes[place], abs(a.value)))
            if not abs(a.value - b.value) <= 1.01 * allowed:
                return together, a, b
    return None


def _pairs(one: Sequence[Printed], many: Sequence[Printed]) -> Iterator[tuple[Printed, Printed]]:
    """Yields the lines of two runs that belong together: of each file, those up to the first other line."""
    for file in dict.fromkeys(line.file for line in one):
        lines = ([line for line in lines if line.file == file] for lines in (one, many))
        for alone, together in zip(*lines, strict=False):
            if (alone.line, alone.steps) != (together.line, together.steps):
                break
            yield alone, together


def _counts_towers(line: Printed, one: PrintedNumber, many: PrintedNumber, towers: int) -> bool:
    """Returns whether a number may differ because the number of towers does."""
    if (one.value, many.value) == (1, towers):
        return True
    return not line.steps and not one.unit and many.value in (one.value * towers, -(-one.value // towers))


def _places_that_differ(one: Sequence[Printed], other: Sequence[Printed]) -> dict[tuple[int | None, int], float]:
    """Returns the largest difference of the numbers of two runs on one tower, by the script's line and the number's."""
    places: dict[tuple[int | None, int], float] = {}
    for first, second in _pairs(one, other):
        for i, (a, b) in enumerate(zip(_numbers_in(first), _numbers_in(second), strict=False)):
            if a.text != b.text:
                place = first.line, i
                places[place] = max(places.get(place, 0.0), abs(a.value - b.value))
    return places


def _least(comparison: RunComparison, dtype: str) -> float:
    if comparison.exact or _is_integer(dtype):
        return 0.0
    finer = comparison.usual < usual_tolerance(dtype)
    return max(comparison.tolerance, usual_tolerance(dtype)) if finer else comparison.tolerance


def _line(result: Result) -> _Line:
    return result.call, result.line
