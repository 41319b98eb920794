"""The causes that further runs have proven, and those that the results of ``reduce`` and ``gather`` show.

The losses' autograd graphs distinguish causes that the same intervention proves: a sum and a loss that is divided twice
both give gradients of 1/N.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mirrored.verification.causes import Cause, Explanation, at_line, first_names, listed, plural
from mirrored.verification.compare import (
    PrintedNumber,
    RunComparison,
    RunDifference,
    differing_settings,
    relative,
    setting_named,
)
from mirrored.verification.facts import mentions_of
from mirrored.verification.interventions import Interventions, LossFactor, padded_dims
from mirrored.verification.trace import SCOPE, Happened, Loss, Printed, Result, Term, Trace, comparable

_LOSS_CAUSES = (
    Cause.LOCAL_MEAN,
    Cause.SUM_LOSS,
    Cause.SUM_OVER_GLOBAL_BATCH,
    Cause.DIVIDED_TWICE,
    Cause.LOSS_SCALE,
)


def proven(
    comparison: RunComparison,
    difference: RunDifference,
    before: Interventions,
    now: Interventions,
    after: RunComparison,
) -> list[Explanation]:
    """Returns the causes that are proven because interventions ``now`` help, and those of ``before`` do not.

    Args:
        comparison: the comparison with the interventions ``before``.
        difference: its first difference.
        after: the comparison with the interventions ``now``.
    """
    at, steps = difference.step, len(comparison.one.steps)
    outcome = f"all {steps} steps are equal" if after.first is None else f"step {at + 1} is equal"
    return [
        suspect.explain(comparison, at, now, outcome)
        for field, suspect in SUSPECTS.items()
        if getattr(now, field) != getattr(before, field)
    ]


def _batch_norm(comparison: RunComparison, at: int, now: Interventions, outcome: str) -> Explanation:
    layers = first_names(comparison.many[0].steps[at].batch_norms)
    return Explanation(
        Cause.BATCH_NORM,
        f"batch norm ({layers}) takes the statistics of each tower's own examples, not those of the global batch, from "
        f"step {at + 1} on",
        f"a further run, with batch norms that took the statistics of all towers' examples: {outcome}",
        where=mentions_of(comparison.one, SCOPE),
    )


def _padding(comparison: RunComparison, at: int, now: Interventions, outcome: str) -> Explanation:
    many, lengths = comparison.many, padded_lengths(comparison, at)
    assert lengths is not None  # otherwise, such a run is not made
    return Explanation(
        Cause.PADDING,
        f"padding counts: in step {at + 1}{_backward_of(many[0], at)} one tower pads the batch to {lengths[0]} "
        f"entries, and {len(many)} towers pad their shares to {listed(lengths[1])}, and the result depends on the "
        "padding: the model reads it, or a mean divides by it",
        f"a further run in which every share was padded as one tower's batch is: {outcome}",
    )


def _over_examples(comparison: RunComparison, at: int, now: Interventions, outcome: str) -> Explanation:
    places = [(function, line) for line, function in comparison.many[0].over_examples if function is not None]
    places.sort(key=lambda place: place[0] in ("sum", "mean"))  # a loss ends with these
    names = first_names([f"{function}{at_line(line)}" for function, line in places])
    one_of = "one of " if len(places) > 1 else ""
    return Explanation(
        Cause.OVER_EXAMPLES,
        f"the result of {one_of}{names} depends on which examples are in a share: each tower takes its own, not those "
        "of the global batch",
        f"a further run in which all towers' examples were taken there: {outcome}",
    )


def padded_lengths(comparison: RunComparison, at: int) -> tuple[int, list[int]] | None:
    """Returns the lengths to which one tower pads a batch of step ``at``, and each of N its share; None if equal."""
    for call, calls in comparison.training_calls():
        if call.steps != at:
            continue
        for form, *forms in zip(call.forms, *(share.forms for share in calls), strict=False):
            pairs = zip(calls, forms, strict=True)
            dims = {d for share, cut in pairs for d in padded_dims(cut.shape, form, share.shares)}
            if dims:
                return form.shape[min(dims)], [cut.shape[min(dims)] for cut in forms]
    return None


def _local_change(comparison: RunComparison, at: int, now: Interventions, outcome: str) -> Explanation:
    many = comparison.many
    changes = many[0].happened(Happened.CHANGE)
    change = [change for change in changes if change.steps <= at and not change.averaged][-1]
    if change.what == "register_hook":
        what = f"a hook that register_hook{at_line(change.line)} puts on a parameter changes gradients"
    else:
        what = f"in step {change.steps + 1} {change.what}{at_line(change.line)} changes gradients of no_sync"
    return Explanation(
        Cause.CHANGED_BEFORE_AVERAGING,
        f"{what} that are each tower's own, not averaged yet: one tower's gradients are different, so they are changed "
        "(clipped, for example) by different amounts",
        f"further runs on one tower and on {len(many)} without it: {outcome}",
    )


# -- losses ----------------------------------------------------------------------------------------------


def _losses_of(trace: Trace, at: int) -> list[Loss]:
    """Returns the losses of a step, or of the step before if several optimizers step after one backward."""
    return next((step.losses for step in reversed(trace.steps[: at + 1]) if step.losses), [])


def first_loss(trace: Trace, at: int) -> Loss | None:
    """Returns the first loss of a step, or of the step before if several optimizers step after one backward."""
    return next(iter(_losses_of(trace, at)), None)


def _backward_of(trace: Trace, at: int) -> str:
    """Returns the line of a step's first backward, in words."""
    loss = first_loss(trace, at)
    return at_line(loss.line if loss else None, "backward()")


def uneven_divisors(many: Sequence[Trace], at: int) -> list[float]:
    """Returns the divisors of a summand of a loss on each tower in a step, or [] if they are equal for all summands."""
    for losses in zip(*(_losses_of(trace, at) for trace in many), strict=False):
        for terms in zip(*(loss.terms for loss in losses), strict=False):
            if len({term.divisor for term in terms}) > 1:
                return [term.divisor for term in terms]
    return []


def shares_of_backward(many: Sequence[Trace], at: int) -> Sequence[tuple[int, int]]:
    """Returns every tower's share of the examples in a backward of a step, in the first with uneven shares if any."""
    backwards = list(zip(*([loss.share for loss in trace.steps[at].losses] for trace in many), strict=False))
    return next((shares for shares in backwards if len({local for local, _ in shares}) > 1), (backwards or [()])[0])


def batch_terms(one: Loss | None, many: Loss | None) -> list[frozenset[int]]:
    """Returns the sets of summands of a loss to which a factor may apply; an empty set is the whole loss.

    A factor may apply to the summands that depend on the batch, or to the sums among them.
    """
    if one is None or many is None or len(one.terms) != len(many.terms):
        return [frozenset()]
    differing = frozenset(i for i, (a, b) in enumerate(zip(one.terms, many.terms, strict=True)) if a != b)
    sums = frozenset(i for i in differing if _is_sum(many.terms[i]))
    depending = differing if len(differing) < len(many.terms) else frozenset()
    return [depending, sums] if 0 < len(sums) < len(differing) else [depending]


def _is_sum(term: Term) -> bool:
    return term.chain[-1][0] == "sum of" and not term.share


def _batch_term(one: Loss | None, many: Loss | None, terms: frozenset[int]) -> tuple[Term, Term]:
    """Returns the first summands of one tower's loss and of N's that depend on the batch.

    If there are ``terms``, only these are considered.
    """
    pairs = list(zip(one.terms, many.terms, strict=False)) if one is not None and many is not None else []
    pairs = [pair for i, pair in enumerate(pairs) if not terms or i in terms]
    unknown = Term((("unknown", 0),), False)
    return next((pair for pair in pairs if pair[0] != pair[1]), pairs[0] if pairs else (unknown, unknown))


def _loss(comparison: RunComparison, at: int, now: Interventions, outcome: str) -> Explanation:
    many, towers, factor = comparison.many, len(comparison.many), now.loss
    loss = first_loss(many[0], at)
    alone, term = _batch_term(first_loss(comparison.one, at), loss, now.terms)
    place = _backward_of(many[0], at)
    made = f"on tower 0 {'a summand of ' if now.terms else ''}the loss{place} is {term}"
    shown = f"a further run in which each tower's loss was multiplied by {factor.value}: {outcome}"
    if factor is LossFactor.SHARE:
        shares = shares_of_backward(many, at)
        even = "; with the even shares of the steps before it, it is" if at else ""
        what = (
            f"{made}: the mean over this tower's own examples. In step {at + 1} the batch of {shares[0][1]} is "
            f"split into shares of {listed([local for local, _ in shares])}, and a mean of their means is not the "
            f"mean of the batch{even}"
        )
        advice = "give the mean loss that the model returns to mirrored.compute_average_loss as loss.expand(len(batch))"
        return Explanation(
            Cause.LOCAL_MEAN,
            what,
            shown,
            advice if any(call.model_computes_loss for call in comparison.one.calls) else "",
        )
    if factor is LossFactor.DIVISOR:
        divisors = uneven_divisors(many, at)
        return Explanation(
            Cause.LOCAL_MEAN,
            f"{made}. In step {at + 1} the towers divide theirs by {listed(divisors)}, each by the number or "
            "weight of its own values (tokens, for example), and a mean of their means is not the mean over all "
            f"{sum(divisors):g}",
            shown,
            "give the losses (reduction='none') to mirrored.compute_average_loss(losses, sample_weight=mask, "
            "denominator='weights'), which divides by the weight of all towers' values",
        )
    averaged = f"{made}, and averaging the gradients divides by the {towers} towers"
    if _divides_by_towers(alone, term, towers):
        what = f"{averaged} once more: the gradients are 1/{towers} of one tower's"
        return Explanation(Cause.DIVIDED_TWICE, what, shown, where=mentions_of(comparison.one))
    cause, what, scaled = Cause.LOSS_SCALE, f"the gradients are 1/{towers} of one tower's", term.chain[:-1]
    if _is_sum(term) and scaled == alone.chain[:-1]:
        cause, what = Cause.SUM_OVER_GLOBAL_BATCH, f"a sum is right where gradients are added up; here {what}"
    if _is_sum(term) and not scaled:
        cause, what = Cause.SUM_LOSS, f"the sum over all examples becomes 1/{towers} of the one on one tower"
    return Explanation(cause, f"{averaged}: {what}", shown)


def _divides_by_towers(alone: Term, term: Term, towers: int) -> bool:
    """Returns whether a summand is divided by N on N towers, but by 1 or not at all on one tower."""
    one, many = alone.chain[:-1], term.chain[:-1]
    for i, (how, factor) in enumerate(many):
        divisor = factor if how == "divided by" else 1 / factor if factor else 0.0
        if relative(divisor, towers) < 1e-6 and (len(one) < len(many) or relative(one[i][1], 1.0) < 1e-6):
            return True
    return False


def _setting(comparison: RunComparison, at: int, now: Interventions, outcome: str) -> Explanation:
    one, many, towers = comparison.one.steps[at], comparison.many[0].steps[at], len(comparison.many)
    lines = mentions_of(comparison.one)
    name, _, (alone, together) = next(differing_settings([one, many], comparison.tolerance))
    setting = setting_named(name)
    shown = f"a further run with one tower's settings of the optimizer: {outcome}"
    what = f"the {setting} of step {at + 1} is {together:g} on {towers} towers, but {alone:g} on one"
    for scheduler, steps in many.schedules.items():
        steps_alone = one.schedules.get(scheduler, steps)
        if steps != steps_alone:
            each = ", once for every tower in each step" if steps == towers * steps_alone else ""
            return Explanation(
                Cause.SCHEDULE,
                f"{what}: {scheduler} has made {steps} steps by then, on one tower {steps_alone}{each}",
                shown,
                where=lines,
            )
    times = ": it is multiplied by the number of towers" if relative(together, towers * alone) < 1e-6 else ""
    return Explanation(
        Cause.LEARNING_RATE if name == "lr" else Cause.OPTIMIZER_SETTING,
        f"{what}{times}, while the global batch is the same",
        shown,
        where=lines,
    )


class Suspect(NamedTuple):
    """A cause that a further run can prove.

    Attributes:
        explain: explains it, once the run has helped. Its arguments are the comparison without the change, the step of
            the first difference, the changes of the run, and its outcome.
        ruled_out: the words of the report if the run has not helped.
    """

    explain: Callable[[RunComparison, int, Interventions, str], Explanation]
    ruled_out: str = ""


SUSPECTS = {
    "global_statistics": Suspect(_batch_norm, "global batch norm statistics do not help"),
    "whole_batch": Suspect(_over_examples),
    "padding": Suspect(_padding, "padding the shares as the batch is does not help"),
    "skip_local_changes": Suspect(
        _local_change, "excluding the changes to gradients before they are averaged does not help"
    ),
    "loss": Suspect(_loss),
    "settings": Suspect(_setting),
}
"""By the attribute of :class:`Interventions` that the run changes."""


# -- what reduce and gather return -----------------------------------------------------------------------


def distinguishable(one: float, many: float) -> tuple[str, str]:
    """Returns two numbers with as few digits as show that they differ."""
    for digits in range(6, 18):
        texts = f"{one:.{digits}g}", f"{many:.{digits}g}"
        if texts[0] != texts[1]:
            break
    return texts


def reported_value(
    comparison: RunComparison, pair: tuple[Result, Result], proven: Sequence[Explanation]
) -> Explanation | None:
    """Explains why the script reports another value, although training is equal except for the ``proven`` causes."""
    alone, together = pair
    towers = len(comparison.many)
    a, b = max(zip(alone.values, together.values, strict=False), key=lambda ab: relative(*ab), default=(0.0, 0.0))
    one, many = distinguishable(a, b)
    if alone.count != together.count:
        one, many = str(alone.count), f"{together.count} values"
    call = f"{together.call}{at_line(together.line)} after step {together.steps}"
    schedule = together.call.endswith(".step")
    differs = f"{call} {'is given' if schedule else 'gives'} {many} on {towers} towers, but {one} on one"
    evaluation = _evaluation(comparison, differs)
    if evaluation is not None:
        return evaluation
    if any(explanation.cause in _LOSS_CAUSES for explanation in proven):
        return None  # most likely, the loss is reported
    advice = ""
    shares = {term.share for step in comparison.many[0].steps for loss in step.losses for term in loss.terms}
    if alone.count != together.count:
        advice = "give gather the same entries on any number of towers, or one from each tower"
    elif schedule:
        advice = "give it a value that is equal on any number of towers, such as strategy.reduce('sum', loss)"
    elif "mean" in together.call and relative(b * towers, a) < 1e-3:
        advice = "shares of the global mean (compute_average_loss) add up: strategy.reduce('sum', loss)"
    elif "sum" in together.call and relative(b, a * towers) < 1e-3:
        advice = (
            "means, and values that are equal on all towers, do not add up. For a loss: "
            "mirrored.compute_average_loss of losses per example (reduction='none'), which is right for uneven "
            "shares, too. For other values: strategy.reduce('mean', value)"
        )
    elif "sum" in together.call and len(shares) > 1:
        advice = "give the part of the loss that does not depend on the batch to mirrored.scale_regularization_loss"
    what = f"training is equal, but {differs}"
    return Explanation(Cause.REPORTED_VALUE, what, "a comparison of the calls' results", advice)


def printed_value(
    comparison: RunComparison,
    printed: tuple[Printed, PrintedNumber, PrintedNumber],
    proven: Sequence[Explanation],
) -> Explanation | None:
    """Explains why the chief prints another number, although training is equal except for the ``proven`` causes."""
    line, one, many = printed
    towers = len(comparison.many)
    differs = (
        f"the chief {line.output_of(many.text)}{at_line(line.line)} after step {line.steps} on {towers} towers, but "
        f"{one.text} on one"
    )
    if (evaluation := _evaluation(comparison, differs)) is not None:
        return evaluation
    if any(explanation.cause in _LOSS_CAUSES for explanation in proven):
        return None  # most likely, the loss is printed
    advice = ""
    if comparison.one.library == "lightning":
        advice = (
            "if self.log has logged it, give sync_dist=True to self.log, which then logs the mean over the examples "
            "of all towers"
        )
    elif one.value and 0 < many.value / one.value < 1.5 / towers:
        advice = (
            "use strategy.reduce('sum', value), called on all towers: the number seems to be computed from this "
            "tower's share only (a value of compute_average_loss, a sum or a count)"
        )
    return Explanation(
        Cause.PRINTED_VALUE, f"training is equal, but {differs}", "a comparison of the chief's output", advice
    )


def _evaluation(comparison: RunComparison, differs: str) -> Explanation | None:
    """Explains that the evaluation uses other examples than on one tower."""
    for steps, evaluated in sorted(comparison.one.evaluated.items()):
        alone = Counter(evaluated.examples)
        shares = [Counter(t.evaluated[steps].examples if steps in t.evaluated else ()) for t in comparison.many]
        together = sum(shares, Counter())
        if together == alone or all(share == alone for share in shares) or not comparable(together, alone):
            continue
        more, fewer = together - alone, alone - together
        towers = plural(len(comparison.many), "tower")
        what = (
            f"the evaluation after step {steps}{at_line(evaluated.line)} takes "
            f"{together.total()} examples on {towers}, {alone.total()} on one"
        )
        shown = f"a comparison of the examples that the model was given, bit by bit; {differs}"
        if more and not fewer:
            kind = "taken twice" if not set(more) - set(alone) else "which one tower does not have (padding)"
            return Explanation(
                Cause.EVALUATION_PADDING,
                f"{what}: {more.total()} too many, {kind}",
                shown,
            )
        if fewer and not more:
            return Explanation(
                Cause.EVALUATION_DROPS,
                f"{what}: {fewer.total()} left out",
                shown,
            )
    return None
