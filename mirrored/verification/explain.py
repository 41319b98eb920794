"""Finds the causes of a difference. A cause that traces do not show is proven with a run in which one thing is changed.

[Note: a cause is an intervention that helps] Ratios of values are misleading, so each suspected cause is tested. In a
further run, the losses are multiplied, BatchNorm layers use all towers' statistics, or the optimizer's settings are
one tower's. If the first difference disappears or moves to a later step, the cause is proven, and the search continues
from there. So several mistakes in one script are all found. A mean over tokens is multiplied by its own divisor, read
from its autograd graph, over the sum of all towers' divisors. Shares are padded like one tower's batch, with the number
in which most of its examples end. Changes of gradients that are not averaged yet (clipping in ``no_sync``, hooks) are
left out of a run on one tower and of one on N. Facts (a parameter that no scope mirrored, examples that no tower
received, generators in the same state) need no further run.

[Note: what is compared] Buffers are compared if both runs have them in a ``state_dict``, each relative to its own size.
A buffer that differs is reported, and the comparison continues without it. Models that all towers evaluate are compared
between the towers. A script that fails is run once more without recording, so that errors caused by recording are not
attributed to the script.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Sequence

from mirrored.verification import facts, proofs
from mirrored.verification.causes import Cause, Explanation, at_line
from mirrored.verification.compare import (
    RunComparison,
    RunDifference,
    compare,
    differing_print,
    differing_result,
    usual_tolerance,
)
from mirrored.verification.interventions import Interventions, LossFactor
from mirrored.verification.trace import HASHES, Happened, Trace

_MOST_MISTAKES = 4

_ROUNDED = ("loss", "gradient", "parameter", "buffer")

_BEYOND_ROUNDING = 100.0  # times the tolerance: a larger difference of two runs on one tower is not rounding

Rerun = Callable[[int, Interventions], Sequence[Trace] | None]
"""Runs the script again on a number of towers, with interventions. Returns the traces, or None if the script fails."""

_NONE = Interventions()

_HASH_SEEDS = 1, 2, 3


def explain(strict: RunComparison, rerun: Rerun) -> tuple[RunComparison, list[Explanation]]:
    """Returns all causes that are found, in the order in which they take effect, and the comparison that shows them.

    Args:
        strict: the comparison of one tower with N that the user requested.
        rerun: runs the script again.
    """
    comparison, explanations = _explain_seeds(strict, rerun)
    if not explanations and HASHES[0] in strict.one.mentions and "PYTHONHASHSEED" not in os.environ:
        explanations = _known(_by_hashes(strict.one, rerun))
    return comparison, explanations


def _by_hashes(one: Trace, rerun: Rerun) -> Explanation | None:
    """Explains that runs differ if strings have other hashes (see [Note: the order of sets])."""
    first, *others = (_alone(rerun, Interventions(hash_seed=seed)) for seed in _HASH_SEEDS)
    for other in others:
        if first is None or other is None:
            continue
        if (what := _difference_of_runs(first, other)) is not None:
            return Explanation(
                Cause.HASH_ORDER,
                f"{what} not the same if strings have other hashes, as on two hosts or after a restart",
                "further runs on one tower",
                where=facts.mentions_of(one, HASHES),
            )
    return None


def _explain_seeds(strict: RunComparison, rerun: Rerun) -> tuple[RunComparison, list[Explanation]]:
    """Returns the same as :func:`explain`, for hashes of one process."""
    if "seeds" in strict.one.left_out and _differs(strict):  # see [Note: random numbers above the strategy]

        def seeded(count: int, interventions: Interventions) -> Sequence[Trace] | None:
            return rerun(count, dataclasses.replace(interventions, one_seed=True))

        many = seeded(len(strict.many), _NONE)
        if many is not None and _is_better(better := dataclasses.replace(strict, many=many), strict):
            comparison, explanations = _explain(better, seeded)
            return comparison, [facts.unseeded(strict, many[0]), *explanations]
    return _explain(strict, rerun)


def _differs(comparison: RunComparison) -> bool:
    """Returns whether anything differs, before it is known whether it is rounding."""
    return (
        comparison.first is not None
        or facts.failure(comparison) is not None
        or facts.drift(comparison.many) is not None
        or facts.other_data(comparison) is not None
        or differing_result(comparison) is not None
        or differing_print(comparison) is not None
    )


def _is_better(after: RunComparison, before: RunComparison) -> bool:
    """Returns whether a comparison differs less or later than another one."""
    if not _differs(after) or (facts.failure(before) and not facts.failure(after)):
        return True
    return before.first is not None and (after.first is None or after.first.place > before.first.place)


def _explain(strict: RunComparison, rerun: Rerun) -> tuple[RunComparison, list[Explanation]]:
    """Returns the same as :func:`_explain_seeds`, for towers that draw the same random numbers above the strategy."""
    if not strict.one.steps and any(call.trained for call in strict.one.calls):
        strict, rerun = _again(strict, rerun, _by_hand) or (strict, rerun)
    one, many = strict.one, strict.many
    if (failed := facts.failure(strict)) is not None:
        towers = 1 if one.raised is not None else len(many)
        unexplained = failed.cause in (Cause.FAILS_EVERYWHERE, Cause.FAILS_ON_ONE, Cause.FAILS_ON_TOWERS)
        if unexplained and rerun(towers, Interventions(recorded=False)) is not None:
            failed = facts.failure_when_watched(failed, towers)
        return strict, [failed]
    if (nothing := facts.nothing_to_compare(strict)) is not None:
        return strict, [nothing]
    explanations = _known(facts.shared_stream(many))
    if (drifting := facts.drift(many)) is not None:
        return strict, [*explanations, drifting]
    if (other_data := facts.other_data(strict)) is not None:
        return strict, [*explanations, _not_reproducible(one, rerun) or other_data]
    loose = dataclasses.replace(strict, exact=False)
    comparison = _beside_rounding(loose, rerun, _NONE)
    shown = strict if strict.exact else comparison
    if comparison.first != loose.first:
        unsteady = _not_reproducible(one, rerun, _BEYOND_ROUNDING * comparison.tolerance)
        if unsteady is not None:
            return shown, [*explanations, unsteady]
        # see [Note: what rounding hides is repeated in float64]
        if not strict.exact and not strict.double and strict.usual >= usual_tolerance("float32"):
            again = _again(strict, rerun, _in_double)
            if again is not None:
                double, rerun = again
                shown = comparison = _beside_rounding(dataclasses.replace(double, double=True), rerun, _NONE)
                one, many = comparison.one, comparison.many
    comparison, proven, tried = _intervene(comparison, rerun)
    explanations += proven
    buffers = any(explanation.cause is Cause.BUFFER for explanation in explanations)
    if (comparison.first is not None or buffers) and (unsteady := _not_reproducible(one, rerun)) is not None:
        return shown, [unsteady] if buffers else [*explanations, unsteady]
    if comparison.first is not None:  # it may be an effect of what was proven
        return shown, explanations if proven else [*explanations, _unexplained(comparison, tried)]
    explanations += _known(facts.evaluated_drift(many) or _reported(comparison, explanations, rerun))
    if explanations:
        return shown, explanations
    if not comparison.rows or comparison.only_zeros:
        return shown, [facts.nothing_compared(one)]
    if strict.exact and strict.first is not None:
        return shown, [_rounding(f"the {strict.first.kind} of step {strict.first.step + 1}")]
    if strict.exact and differing_result(strict, _alone(rerun, _NONE)) is not None:
        return shown, [_rounding("the results of reduce and gather")]
    return shown, []


def _known(explanation: Explanation | None) -> list[Explanation]:
    return [] if explanation is None else [explanation]


def _alone(rerun: Rerun, interventions: Interventions) -> Trace | None:
    """Returns the trace of a further run on one tower, or None if it fails."""
    traces = rerun(1, interventions)
    return traces[0] if traces else None


def _beside_rounding(comparison: RunComparison, rerun: Rerun, interventions: Interventions) -> RunComparison:
    """Returns the comparison, with a run that was changed by rounding errors if these might explain the difference."""
    if comparison.first is None or comparison.first.kind not in _ROUNDED or comparison.perturbed is not None:
        return comparison
    perturbed = _alone(rerun, dataclasses.replace(interventions, rounding=True))
    if perturbed is None or facts.other_start(comparison.one, perturbed):
        return comparison  # the run does not measure rounding
    return dataclasses.replace(comparison, perturbed=perturbed)


def _again(
    strict: RunComparison, rerun: Rerun, change: Callable[[Interventions], Interventions]
) -> tuple[RunComparison, Rerun] | None:
    """Returns the comparison of two more, changed runs, and how to make such runs; None if the script fails."""

    def changed(count: int, interventions: Interventions) -> Sequence[Trace] | None:
        return rerun(count, change(interventions))

    one, many = _alone(changed, _NONE), changed(len(strict.many), _NONE)
    if one is None or many is None:
        return None
    tolerance = None if strict.tolerance == strict.usual else strict.tolerance
    return compare(one, many, tolerance, strict.exact), changed


def _in_double(interventions: Interventions) -> Interventions:
    return dataclasses.replace(interventions, double=True)


def _by_hand(interventions: Interventions) -> Interventions:
    return dataclasses.replace(interventions, by_hand=True)


def _reported(comparison: RunComparison, proven: Sequence[Explanation], rerun: Rerun) -> Explanation | None:
    """Explains a difference in the results of reduce and gather, or in the chief's output, if training is equal."""
    if differing_result(comparison) is None and differing_print(comparison) is None:
        return None
    if comparison.perturbed is None:
        comparison = dataclasses.replace(comparison, perturbed=_alone(rerun, Interventions(rounding=True)))
    again = _alone(rerun, _NONE)
    if (pair := differing_result(comparison, again)) is not None:
        what = f"the result of {pair[1].call}{at_line(pair[1].line)} after step {pair[1].steps} differs"
        return _random(comparison, what, pair[1].steps) or proofs.reported_value(comparison, pair, proven)
    if (printed := differing_print(comparison, again)) is not None:
        what = f"the chief's output{at_line(printed[0].line)} after step {printed[0].steps} differs"
        return _random(comparison, what, printed[0].steps) or proofs.printed_value(comparison, printed, proven)
    return None


def _not_reproducible(one: Trace, rerun: Rerun, tolerance: float | None = None) -> Explanation | None:
    """Explains that two runs on one tower differ, so that a comparison with N towers is impossible."""
    again = _alone(rerun, _NONE)
    if again is None:
        return None
    if (what := _difference_of_runs(one, again, tolerance)) is None:
        return None
    return Explanation(
        Cause.NOT_REPRODUCIBLE,
        f"two runs on one tower differ, too: {what} not the same although both runs start from one seed",
        "a further run on one tower",
    )


def _difference_of_runs(one: Trace, again: Trace, tolerance: float | None = None) -> str | None:
    """Returns the first difference of two runs on one tower, with its verb, or None if they are equal."""
    comparison = compare(one, [again], tolerance)
    if (first := comparison.first) is not None:
        return f"the {first.kind} of step {first.step + 1} is"
    return "the batches are" if facts.other_data(comparison) is not None else None


def _rounding(what: str) -> Explanation:
    return Explanation(
        Cause.ROUNDING,
        f"{what} differs in its last bits only: several towers add up in another order than one",
        "within the tolerance all is equal",
    )


def _intervene(comparison: RunComparison, rerun: Rerun) -> tuple[RunComparison, list[Explanation], list[Interventions]]:
    """Changes one thing after another until there is no difference, or until no further change helps.

    Returns:
        The comparison with all interventions that helped; the causes that this proves; and the interventions that did
        not remove the remaining difference.
    """
    present, proven, tried = Interventions(), list[Explanation](), list[Interventions]()
    while (difference := comparison.first) is not None and len(proven) < _MOST_MISTAKES:
        tried = []
        if difference.kind == "buffer":
            proven += _known(facts.other_buffers(comparison, difference.step))
            without = comparison.without.union(comparison.buffers_beyond(difference.step))
            comparison = dataclasses.replace(comparison, without=without)
            continue
        for more in _candidates(comparison, difference, present):
            one = _alone(rerun, more) if more.skip_local_changes else comparison.one
            many = rerun(len(comparison.many), more)
            if one is None or many is None:
                continue
            perturbed = comparison.perturbed if one is comparison.one else None
            after = dataclasses.replace(comparison, one=one, many=many, perturbed=perturbed)
            if after.first is None or after.first.place > difference.place:
                proven += proofs.proven(comparison, difference, present, more, after)
                comparison, present = _beside_rounding(after, rerun, more), more
                break
            tried.append(more)
        else:
            break
    return comparison, proven, tried


def _candidates(
    comparison: RunComparison, difference: RunDifference, present: Interventions
) -> Iterator[Interventions]:
    """Yields interventions that might remove a difference: each alone first, then combined with other causes."""
    one, many, at = comparison.one, comparison.many, difference.step
    if difference.kind == "setting":
        yield dataclasses.replace(present, settings=tuple(tuple(step.settings) for step in one.steps))
    if difference.kind not in ("loss", "gradient") or comparison.changed_after_averaging(difference):
        return
    bases = [present]
    if many[0].steps[at].batch_norms and not present.global_statistics:
        bases.append(dataclasses.replace(present, global_statistics=True))
        yield bases[-1]
    if not present.padding and proofs.padded_lengths(comparison, at):
        forms = {(i, j): form for i, call in enumerate(one.calls) for j, form in enumerate(call.forms)}
        padded = [dataclasses.replace(base, padding=forms) for base in bases]
        bases += padded
        yield from padded
    if not present.skip_local_changes and any(
        change.steps <= at and not change.averaged for change in many[0].happened(Happened.CHANGE)
    ):
        yield dataclasses.replace(present, skip_local_changes=True)
    if present.loss is LossFactor.NONE:
        yield from _loss_factors(comparison, at, bases)
    places = frozenset(place for place in many[0].over_examples if place[1] is not None)
    if places and not present.whole_batch:
        yield dataclasses.replace(present, whole_batch=places)


def _loss_factors(comparison: RunComparison, at: int, bases: Sequence[Interventions]) -> Iterator[Interventions]:
    """Yields interventions that change the factors of losses, in addition to each of ``bases``."""
    one, many = comparison.one, comparison.many
    uneven = len({local for local, _ in proofs.shares_of_backward(many, at)}) > 1
    applies = dict.fromkeys(LossFactor, uneven) | {LossFactor.NONE: False, LossFactor.TOWERS: True}
    applies[LossFactor.DIVISOR] = bool(proofs.uneven_divisors(many, at))
    factors = [factor for factor in LossFactor if applies[factor]]
    choices = proofs.batch_terms(proofs.first_loss(one, at), proofs.first_loss(many[0], at))
    for base, terms, factor in itertools.product(bases, choices, factors):
        yield dataclasses.replace(base, loss=factor, terms=terms)


def _unexplained(comparison: RunComparison, tried: Sequence[Interventions]) -> Explanation:
    difference = comparison.first
    assert difference is not None
    one, many, at = comparison.one, comparison.many, difference.step
    if difference.kind == "steps":
        return Explanation(
            Cause.STEPS,
            f"the script makes {len(one.steps)} steps on one tower, {len(many[0].steps)} on {len(many)}",
            where=facts.mentions_of(one),
        )
    what = f"the {difference} at step {at + 1} differs by {difference.amount:.1e}"
    random = _random(comparison, what, at)
    if random is not None:
        return random
    if comparison.changed_after_averaging(difference):
        return facts.changed_after_averaging(comparison, at, what)
    if (constant := facts.without_gradient(comparison, difference, what)) is not None:
        return constant
    if (pairs := facts.pairs_of_examples(one, many[0], what)) is not None:
        return pairs
    loss = proofs.first_loss(many[0], at)
    made = f" The loss{at_line(loss.line)} is {loss.terms[0]}." if loss is not None and loss.terms else ""
    if gathers := [*many[0].happened(Happened.GATHER), *many[0].happened(Happened.GATHER_OF_CONSTANTS)]:
        made += (
            f" {gathers[0].what}{at_line(gathers[0].line)} gathers the examples of all towers: each tower's own begin "
            "after those of the towers before it."
        )
    return Explanation(
        Cause.UNKNOWN,
        f"{what}.{made} Ruled out: {'; '.join(_ruled_out(comparison, at, tried))}",
        where=facts.mentions_of(one),
    )


def _random(comparison: RunComparison, what: str, at: int) -> Explanation | None:
    """Explains that each tower draws its own random numbers before the end of step ``at``."""
    draws = [draw for call in comparison.many[0].calls if call.steps <= at for draw in call.draws]
    local = next((draw for draw in draws if not (draw.dropout or draw.followed)), None)
    if local is None:
        return None
    return Explanation(
        Cause.RANDOM_IN_RUN,
        f"{what}, and {local.by}{at_line(local.line)} draws random numbers inside run: {len(comparison.many)} "
        "towers draw others than one, as they should, so this script cannot be compared",
    )


def _ruled_out(comparison: RunComparison, at: int, tried: Sequence[Interventions]) -> list[str]:
    """Returns the causes that were examined and excluded."""
    one, many = comparison.one.steps[at], comparison.many[0].steps[at]
    factors = dict.fromkeys(each.loss.value for each in tried if each.loss is not LossFactor.NONE)
    checks = {
        "the examples are the same": facts.data_compared(comparison, at),
        "the towers' parameters are equal to each other": True,
        "the optimizer's settings are equal": one.settings == many.settings,
        **{f"multiplying each tower's loss by {factor} does not help": True for factor in factors},
        **{
            suspect.ruled_out: any(getattr(each, field) for each in tried)
            for field, suspect in proofs.SUSPECTS.items()
            if suspect.ruled_out
        },
        "no batch norm takes local statistics": not many.batch_norms,
        "rounding makes less of a further run on one tower": comparison.perturbed is not None,
    }
    return [text for text, holds in checks.items() if holds]
