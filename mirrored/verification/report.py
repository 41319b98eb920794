"""The report of ``mirrored verify``."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Sequence

from mirrored.verification.causes import Cause, Explanation, Verdict, at_line, plural
from mirrored.verification.compare import ComparedStep, RunComparison, usual_tolerance
from mirrored.verification.trace import Raised

_WIDTH = 100

_ROUNDING = (
    "The difference between the towers is at most a few times that of a further run on one tower, in which the "
    "last bits of all modules' results were changed. A mistake may be as small. Runs in float64 did not decide; fewer "
    "--steps may."
)

_ENDED = (
    "The rest was not compared. The script may need the whole loop, which verify ends after the last step: --steps "
    "compares more. Otherwise the script fails without verify, too."
)

_NOTES = (
    "Dropout is left out of both runs: several towers draw other numbers than one, as they should.",
    "Random numbers that run draws are one stream in both runs, split like the batch.",
    "Every tower was given the whole batch: right, but no faster than one tower; see distribute_dataset.",
    "All gradients are averaged in every step of both runs, and exactly: synchronize= or compression= is "
    "ignored, and its effect is not compared.",
    "All runs computed in float64, in which rounding hides less than in the script's own dtype.",
)


_ONCE = (
    "In both runs all towers drew the same numbers where run draws for a whole batch, not for each example. Without "
    "verify, each tower draws its own, so that a batch has as many of them as there are towers"
)


@dataclasses.dataclass(frozen=True)
class VerificationReport:
    """Whether N towers compute the same as one, and the causes if they do not.

    Attributes:
        script: the script's path, or the module's name.
        towers: N.
        findings: the explanations, in the order in which the causes take effect; empty if all is equal.
        rows: the compared steps, up to the first that differs.
        tolerance: the largest relative difference that counts as equal.
        exact: whether every bit counts.
        dropouts: whether dropout was disabled for the comparison.
        followed: whether other random numbers were drawn in ``run``, and made independent of the towers.
        once: the lines that draw random numbers once for a batch in ``run``, which were made equal on all towers.
        whole_batches: whether every tower received the whole batch instead of its share. This is correct, but a waste.
        averaging: whether the script averages in another way (local steps, compression), which was disabled.
        results: the number of compared values of ``reduce`` and ``gather``.
        buffers: the number of compared buffers.
        unreached: whether the script was ended before any evaluation ran.
        float64: whether all runs computed in float64 although the script does not ask for it.
        rounding: the index of the first step at which rounding alone exceeds the tolerance, so that it may hide a
            difference.
        ended: the exception with which the script ended because its loop ended early, on one tower as on N.
    """

    script: str
    towers: int
    findings: tuple[Explanation, ...]
    rows: tuple[ComparedStep, ...]
    tolerance: float
    exact: bool
    dropouts: bool
    followed: bool
    once: tuple[int, ...]
    whole_batches: bool
    averaging: bool
    results: int
    buffers: int
    unreached: bool
    float64: bool
    rounding: int | None
    ended: Raised | None

    @property
    def verdict(self) -> Verdict:
        """The answer. Of several findings, a difference counts most."""
        if self.findings:
            return min(cause.verdict for cause in self.causes)
        undecided = self.ended is not None or self.rounding is not None
        return Verdict.CANNOT_TELL if undecided else Verdict.SAME

    @property
    def equal(self) -> bool:
        """Whether towers were shown to compute the same as one."""
        return self.verdict is Verdict.SAME

    @property
    def causes(self) -> tuple[Cause, ...]:
        """The causes of the findings."""
        return tuple(explanation.cause for explanation in self.findings)

    @property
    def exit_code(self) -> int:
        """0: the same; 1: different; 2: verify cannot tell; 3: the script fails on one tower."""
        return int(self.verdict)

    def __str__(self) -> str:
        limit = "to the bit" if self.exact else f"within {self.tolerance:g}"
        steps = plural(len(self.rows), "step")
        lines = [f"{self.script} on 1 tower and on {self.towers}: {steps} compared {limit}"]
        if self.rows:
            lines += ["", *self._table()]
        notes = self.dropouts, self.followed, self.whole_batches, self.averaging, self.float64
        for note, applies in zip(_NOTES, notes, strict=True):
            lines += ["", note] if applies else []
        if self.once:
            lines += ["", *_wrapped("", f"{_ONCE} (line {', '.join(map(str, self.once))}).")]
        if self.ended is not None:
            where = f"{self.ended.kind}{at_line(self.ended.line)}, on one tower as on {self.towers}"
            lines += ["", *_wrapped("Cannot tell: the script ends in ", f"{where}. {_ENDED}")]
        if not self.findings:
            lines += ["", *self._equality(limit)]
        if self.unreached and not self.findings:
            text = (
                f"verify ends the script when it tries to continue after {steps}, and no evaluation ran before "
                "that. The rest was not compared: use more --steps, or fewer in the script."
            )
            lines += ["", *_wrapped("Not reached: ", text)]
        for explanation in self.findings:
            lines += ["", *_wrapped(f"Cause [{explanation.cause.value}]: ", explanation.what + ".")]
            lines += _wrapped("Fix: ", explanation.fix + ".")
            if explanation.shown_by:
                lines += _wrapped("Shown by: ", explanation.shown_by)
        return "\n".join(lines)

    def _equality(self, limit: str) -> list[str]:
        if self.rounding is not None:
            text = f"from step {self.rounding + 1} on rounding alone makes more than {self.tolerance:g}. {_ROUNDING}"
            return _wrapped("Cannot tell: ", text)
        others = [f"the {self.results} results that are reduced or gathered"] if self.results else []
        others += [plural(self.buffers, "buffer")] if self.buffers else []
        also = f", and so are {' and '.join(others)}" if others else ""
        losses = "losses, " if any(row.loss != (None, None) for row in self.rows) else ""
        head = "The same" if self.ended is None else "Until then"
        return [f"{head}: {losses}gradients and parameters are equal {limit}{also}."]

    def _table(self) -> list[str]:
        several = len({row.optimizer for row in self.rows}) > 1
        lines = [f"{'step':>5} {'loss on 1':>12} {f'on {self.towers}':>12} {'gradients':>10} {'parameters':>10}"]
        for row in self.rows:
            losses = " ".join(f"{'-' if loss is None else format(loss, '.6g'):>12}" for loss in row.loss)
            parameters = "-" if row.parameters is None else _amount(row.parameters[0])
            line = f"{row.step + 1:>5} {losses} {_amount(row.gradients[0]):>10} {parameters:>10}"
            if several:
                line += f"  {row.optimizer[1]} {row.optimizer[0]}"
            if row.difference is not None:
                line += f"  <- {row.difference}"
            lines.append(line)
        return lines


def make_report(script: str, comparison: RunComparison, explanations: Sequence[Explanation]) -> VerificationReport:
    """Returns the report of a comparison and of the explanations of its differences."""
    one, many, first = comparison.one, comparison.many, comparison.first
    left_out = one.left_out.union(*(trace.left_out for trace in many))
    rows = tuple(row for row in comparison.rows if first is None or row.step <= first.step)
    # next(batches) raises it where verify ends the loop
    end_of_loop = comparison.cut_short and one.raised is not None and one.raised.kind == "StopIteration"
    much = max(comparison.tolerance, usual_tolerance("float32"))  # no mistake is smaller in float64
    hidden = (row.step for row in rows if row.rounding and max(row.amounts.values()) > much)
    return VerificationReport(
        script=script,
        towers=len(many),
        findings=tuple(explanations),
        rows=rows,
        tolerance=comparison.tolerance,
        exact=comparison.exact,
        dropouts="dropout" in left_out,
        followed=any(draw.followed for trace in many for call in trace.calls for draw in call.draws),
        once=_drawn_once(comparison),
        whole_batches=any(
            call.examples and all(share.examples == call.examples for share in shares)
            for call, shares in comparison.training_calls()
        ),
        averaging="averaging" in left_out,
        results=len(one.results),
        buffers=max((len(step.buffers) for step in many[0].steps), default=0),
        unreached=one.end.unevaluated or end_of_loop,
        float64=comparison.double,
        rounding=None if comparison.exact else next(hidden, None),
        ended=one.raised if comparison.cut_short and not end_of_loop else None,
    )


def _drawn_once(comparison: RunComparison) -> tuple[int, ...]:
    """Returns the lines that draw random numbers in ``run`` whose shape does not depend on the size of the share."""
    lines = set()
    for call, shares in comparison.training_calls():
        share = shares[0]
        if not comparison.one.virtual and any(local != total for local, total in share.shares):
            for draw, own in zip(call.draws, share.draws, strict=False):
                if own.followed and own.line is not None and draw.shape == own.shape:
                    lines.add(own.line)
    return tuple(sorted(lines))


def _amount(difference: float) -> str:
    if difference == 0:
        return "0"
    return f"{difference:.1e}" if math.isfinite(difference) else "all"


def _wrapped(head: str, text: str) -> list[str]:
    lines: list[str] = []
    for i, paragraph in enumerate(text.splitlines()):
        first = head if i == 0 else "  "
        if paragraph.startswith(" "):  # a traceback's line
            lines.append(first + paragraph)
        else:
            wrapper = textwrap.TextWrapper(_WIDTH, first, "  ", break_long_words=False, break_on_hyphens=False)
            lines += wrapper.wrap(paragraph)
    return lines
