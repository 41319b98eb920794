"""What ``mirrored verify`` prints."""

from __future__ import annotations

import dataclasses
import math
import textwrap

from mirrored.verification import causes
from mirrored.verification.causes import Cause, Finding
from mirrored.verification.compare import Comparison, Row
from mirrored.verification.failures import cut_short
from mirrored.verification.trace import Raised

_WIDTH = 100

_ROUNDING = (
    "The towers differ by no more than a few times what a further run on one tower did, in which the results of all "
    "modules were moved in their last bits."
)


@dataclasses.dataclass(frozen=True)
class Report:
    """Whether N towers compute the same as one, and why not.

    Attributes:
        script: what was run.
        towers: N.
        findings: the causes, in the order in which they take effect; empty when all is equal.
        rows: the steps that were compared, up to the first that differs.
        tolerance: the largest relative difference that counts as equal.
        exact: whether every bit counts.
        dropouts: whether dropout was left out of the comparison.
        followed: whether other random numbers were drawn in ``run``, and made independent of the towers.
        whole_batches: whether every tower was given the whole batch, instead of its share.
        results: how many values of ``reduce`` and ``gather`` were compared.
        buffers: how many buffers were compared.
        unreached: whether the script was ended before any evaluation came.
        rounding: the number, from 0, of the step from which rounding alone makes more than the tolerance.
        ended: the exception in which the script ended because its loop was cut short, on one tower as on N.
    """

    script: str
    towers: int
    findings: tuple[Finding, ...]
    rows: tuple[Row, ...]
    tolerance: float
    exact: bool
    dropouts: bool
    followed: bool
    whole_batches: bool
    results: int
    buffers: int
    unreached: bool
    rounding: int | None
    ended: Raised | None

    @property
    def equal(self) -> bool:
        """Whether nothing differs and no mistake was found."""
        return not self.findings

    @property
    def causes(self) -> tuple[Cause, ...]:
        """The findings' causes."""
        return tuple(finding.cause for finding in self.findings)

    @property
    def exit_code(self) -> int:
        """0 when equal, else 1: also where nothing can be said, as with no step to compare."""
        return 0 if self.equal else 1

    def __str__(self) -> str:
        limit = "to the bit" if self.exact else f"within {self.tolerance:g}"
        steps = f"{len(self.rows)} step{'s' if len(self.rows) != 1 else ''}"
        lines = [f"{self.script} on 1 tower and on {self.towers}: {steps} compared {limit}"]
        if self.rows:
            lines += ["", *self._table()]
        if self.dropouts:
            lines += [
                "",
                "Dropout is left out of both runs: several towers draw other numbers than one, as they should.",
            ]
        if self.followed:
            lines += ["", "Random numbers that run draws come from one stream in both runs, cut like the batch."]
        if self.whole_batches:
            lines += [
                "",
                "Every tower was given the whole batch: right, but no faster than one tower; see distribute_dataset.",
            ]
        if self.ended is not None:
            told = f"{self.ended.kind}{causes.at_line(self.ended.line)}, on one tower as on {self.towers}: "
            told += "verify ends the loop after the last step; --steps compares more."
            lines += ["", *_wrapped("The script ends in ", told)]
        if self.equal:
            others = [f"the {self.results} results of reduce and gather"] if self.results else []
            others += [f"{self.buffers} buffer{'s' if self.buffers > 1 else ''}"] if self.buffers else []
            also = f", and so are {' and '.join(others)}" if others else ""
            losses = "losses, " if any(row.loss != (None, None) for row in self.rows) else ""
            if self.rounding is None:
                lines += ["", f"The same: {losses}gradients and parameters are equal {limit}{also}."]
            else:
                told = (
                    f"from step {self.rounding + 1} on rounding alone makes more than {self.tolerance:g}. {_ROUNDING}"
                )
                lines += ["", *_wrapped("The same, as far as rounding lets one see: ", told)]
        if self.unreached and self.equal:
            told = f"verify ends the script when it wants to go on after {steps}, and no evaluation came before that. "
            told += "What comes later was not compared: more --steps, or fewer in the script, reach it."
            lines += ["", *_wrapped("Not reached: ", told)]
        for finding in self.findings:
            lines += ["", *_wrapped(f"Cause [{finding.cause.value}]: ", finding.what + ".")]
            lines += _wrapped("Fix: ", finding.fix + ".")
            if finding.shown_by:
                lines += _wrapped("Shown by: ", finding.shown_by)
        return "\n".join(lines)

    def _table(self) -> list[str]:
        several = len({row.optimizer for row in self.rows}) > 1
        found = [f"{'step':>5} {'loss on 1':>12} {f'on {self.towers}':>12} {'gradients':>10} {'parameters':>10}"]
        for row in self.rows:
            losses = " ".join(f"{'-' if loss is None else format(loss, '.6g'):>12}" for loss in row.loss)
            parameters = "-" if row.parameters is None else _amount(row.parameters[0])
            line = f"{row.step + 1:>5} {losses} {_amount(row.gradients[0]):>10} {parameters:>10}"
            if several:
                line += f"  {row.optimizer[1]} {row.optimizer[0]}"
            if row.difference is not None:
                where = f" of {row.difference.where}" if row.difference.where else ""
                line += f"  <- {row.difference.kind}{where}"
            found.append(line)
        return found


def make_report(script: str, comparison: Comparison, findings: list[Finding]) -> Report:
    """The report of a comparison and its causes."""
    return Report(
        script=script,
        towers=len(comparison.many),
        findings=tuple(findings),
        rows=tuple(comparison.rows),
        tolerance=comparison.tolerance,
        exact=comparison.exact,
        dropouts=any(seen.dropouts for seen in (comparison.one, *comparison.many)),
        followed=any(draw.followed for seen in comparison.many for run in seen.runs for draw in run.draws),
        whole_batches=causes.whole_batches(comparison.one, comparison.many),
        results=len(comparison.one.results),
        buffers=max((len(step.buffers) for step in comparison.many[0].steps), default=0),
        unreached=comparison.one.stopped,
        rounding=comparison.rounding_from if not comparison.exact else None,
        ended=comparison.one.raised if cut_short(comparison.one, comparison.many) else None,
    )


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
            lines += textwrap.wrap(paragraph, _WIDTH, initial_indent=first, subsequent_indent="  ")
    return lines
