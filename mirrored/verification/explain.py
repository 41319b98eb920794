"""Finds the causes of a difference; what cannot be seen directly is proved by a run with one thing changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from mirrored.verification import causes
from mirrored.verification.buffers import differing_buffers
from mirrored.verification.causes import Cause, Finding, at_line
from mirrored.verification.compare import Comparison, Difference
from mirrored.verification.drift import drift, evaluated_drift
from mirrored.verification.failures import failure, nothing_compared, nothing_to_compare, when_watched
from mirrored.verification.interventions import LossFactor, Repairs
from mirrored.verification.padding import forms_of, padded_lengths
from mirrored.verification.proven_causes import (
    backward_shares,
    batch_terms,
    counted,
    divided_differently,
    last_loss,
    name_proved,
    results,
)
from mirrored.verification.reduced_values import differing
from mirrored.verification.trace import Seen

_MOST_REPAIRS = 4

_ROUNDED = ("loss", "gradient", "parameter", "buffer")

_PLAIN = 100.0  # times the tolerance: two runs on one tower that part by more do not part by rounding

Replay = Callable[[Repairs], Sequence[Seen] | None]
"""Runs the script on N towers once more, repaired; None where it fails then."""

Alone = Callable[[bool, Repairs], Seen | None]
"""Runs the script on one tower once more, moved by rounding or not, and repaired; None where it fails then."""

FailsUnwatched = Callable[[int], bool]
"""Whether the script fails on so many towers where nothing is recorded."""

_AS_IT_IS = Repairs()


def explain(
    strict: Comparison, replay: Replay, alone: Alone, fails_unwatched: FailsUnwatched
) -> tuple[Comparison, list[Finding]]:
    """All causes that are found, in the order in which they take effect, and the comparison that shows them.

    Args:
        strict: one tower and N, as asked for.
        replay: runs the script on N towers again.
        alone: runs the script on one tower again.
        fails_unwatched: runs a script that has failed again, and records nothing.
    """
    one, many = strict.one, strict.many
    failed = failure(one, many)
    if failed is not None:
        towers = 1 if one.raised is not None else len(many)
        unexplained = failed.cause in (Cause.FAILS_EVERYWHERE, Cause.FAILS_ON_ONE, Cause.FAILS_ON_TOWERS)
        return strict, [failed if not unexplained or fails_unwatched(towers) else when_watched(failed, towers)]
    nothing = nothing_to_compare(one, many)
    if nothing is not None:
        return strict, [nothing]
    found = [finding for finding in (causes.shared_stream(many),) if finding is not None]
    drifting = drift(many)
    if drifting is not None:
        return strict, [*found, drifting]
    other_data = causes.data(one, many)
    if other_data is not None:
        return strict, [*found, _not_reproducible(one, alone(False, _AS_IT_IS)) or other_data]
    loose = strict.loosely()
    comparison = _beside_rounding(loose, alone, _AS_IT_IS)
    shown = strict if strict.exact else comparison
    if comparison.first != loose.first:
        random = _not_reproducible(one, alone(False, _AS_IT_IS), _PLAIN * comparison.tolerance)
        if random is not None:
            return shown, [*found, random]
    comparison, repaired, tried = _repair(comparison, replay, alone)
    found += repaired
    buffers = any(finding.cause is Cause.BUFFER for finding in found)
    if comparison.first is not None or buffers:
        random = _not_reproducible(one, alone(False, _AS_IT_IS))
        if random is not None:
            return shown, [random] if buffers else [*found, random]
    if comparison.first is not None:  # where buffers differ it may well be their effect
        return shown, found if buffers else [*found, _unexplained(comparison, found, tried)]
    other_models = evaluated_drift(many)
    found += [other_models] if other_models is not None else _reported(comparison, found, alone)
    if not found and not comparison.rows:
        found.append(nothing_compared(one))
    elif not found and strict.exact and strict.first is not None:
        found.append(_rounding(f"the {strict.first.kind} of step {strict.first.step + 1}"))
    elif not found and strict.exact and differing(strict, alone(False, _AS_IT_IS)) is not None:
        found.append(_rounding("what reduce and gather return"))
    return shown, found


def _beside_rounding(comparison: Comparison, alone: Alone, repairs: Repairs) -> Comparison:
    """The comparison, beside a run that was moved by rounding where that might explain the difference."""
    if comparison.first is None or comparison.first.kind not in _ROUNDED or comparison.unrest is not None:
        return comparison
    unrest = alone(True, repairs)
    return comparison.beside(unrest) if unrest is not None else comparison


def _reported(comparison: Comparison, found: Sequence[Finding], alone: Alone) -> list[Finding]:
    """What is wrong with the results of reduce and gather, where training is equal."""
    if differing(comparison) is None:
        return []
    unrest = comparison.unrest or alone(True, _AS_IT_IS)
    comparison = comparison.beside(unrest) if unrest is not None else comparison
    pair = differing(comparison, alone(False, _AS_IT_IS))
    if pair is None:
        return []
    told = f"what strategy.{pair[1].call}{at_line(pair[1].line)} returns after step {pair[1].steps} differs"
    finding = _random(comparison, told, pair[1].steps) or results(comparison, pair, found)
    return [finding] if finding is not None else []


def _not_reproducible(one: Seen, again: Seen | None, tolerance: float | None = None) -> Finding | None:
    """Two runs on one tower are not the same either, so nothing can be said of N."""
    if again is None:
        return None
    between = Comparison(one, [again], tolerance, False).first
    data = causes.data(one, [again])
    if between is None and data is None:
        return None
    what = f"the {between.kind} of step {between.step + 1}" if between is not None else "the batches"
    return Finding(
        Cause.NOT_REPRODUCIBLE,
        f"two runs on one tower differ, too: {what} is not the same although both runs start from one seed",
        "look for seeds taken from the clock, orders that change from run to run, and files that the script itself "
        "writes and reads",
        "a further run on one tower",
    )


def _rounding(what: str) -> Finding:
    return Finding(
        Cause.ROUNDING,
        f"{what} differs in its last bits only: several towers add up in another order than one",
        "for the same bits on any number of towers use virtual towers, else compare without --exact",
        "within the tolerance all is equal",
    )


def _repair(comparison: Comparison, replay: Replay, alone: Alone) -> tuple[Comparison, list[Finding], list[Repairs]]:
    """Change one thing after the other until nothing differs, or nothing that is tried helps.

    Returns:
        The comparison with all that helped; the causes which that proves; what did not help with what is left.
    """
    repairs, found, tried = Repairs(), list[Finding](), list[Repairs]()
    while (difference := comparison.first) is not None and len(found) < _MOST_REPAIRS:
        tried = []
        if difference.kind == "buffer":
            finding = differing_buffers(comparison, difference.step)
            found += [finding] if finding is not None else []
            comparison = comparison.leaving_out(comparison.buffers_beyond(difference.step))
            continue
        for more in _candidates(comparison, difference, repairs):
            one = alone(False, more) if more.local_changes else comparison.one
            seen = replay(more)
            if one is None or seen is None:
                continue
            after = comparison.of(seen) if one is comparison.one else comparison.between(one, seen)
            if after.first is None or after.first.place > difference.place:
                found += name_proved(comparison, difference, repairs, more, after)
                comparison, repairs = _beside_rounding(after, alone, more), more
                break
            tried.append(more)
        else:
            break
    return comparison, found, tried


def _candidates(comparison: Comparison, difference: Difference, present: Repairs) -> Iterator[Repairs]:
    """What might make a difference go away: each thing alone first, then together with what else may be at work."""
    one, many = comparison.one, comparison.many
    if difference.kind == "learning rate":
        yield dataclasses.replace(present, rates=tuple(tuple(step.rates) for step in one.steps))
        return
    if difference.kind not in ("loss", "gradient"):
        return
    step = many[0].steps[difference.step]
    bases = [present]
    if step.batch_norms and not present.global_statistics:
        bases.append(dataclasses.replace(present, global_statistics=True))
        yield bases[-1]
    if not present.padding and padded_lengths(one, many, difference.step):
        bases += [dataclasses.replace(base, padding=forms_of(one)) for base in bases]
        yield from bases[len(bases) // 2 :]
    if not present.local_changes and any(change.steps <= difference.step for change in many[0].local_changes):
        yield dataclasses.replace(present, local_changes=True)
    if present.loss is not LossFactor.NONE:
        return
    uneven = len({local for local, _ in backward_shares(many, difference.step)}) > 1
    divisors = divided_differently(many, difference.step)
    terms = batch_terms(last_loss(one, difference.step), last_loss(many[0], difference.step))
    for base in bases:
        for factor in (LossFactor.SHARE, LossFactor.DIVISOR, LossFactor.TOWERS, LossFactor.BOTH):
            if factor is LossFactor.TOWERS or (divisors if factor is LossFactor.DIVISOR else uneven):
                yield dataclasses.replace(base, loss=factor, terms=terms)


def _unexplained(comparison: Comparison, found: Sequence[Finding], tried: Sequence[Repairs]) -> Finding:
    difference = comparison.first
    assert difference is not None
    towers, at = len(comparison.many), difference.step
    further = " also" if found else ""
    if difference.kind == "steps":
        counts = f"{len(comparison.one.steps)} steps on one tower, {len(comparison.many[0].steps)} on {towers}"
        return Finding(
            Cause.STEPS,
            f"the script makes {counts}",
            f"let the number of steps and of epochs not depend on the number of towers{counted(comparison.one)}",
        )
    where = f" of {difference.where}" if difference.where else ""
    told = f"the {difference.kind}{where} at step {at + 1}{further} differs by {difference.amount:.1e}"
    random = _random(comparison, told, at)
    if random is not None:
        return random
    loss = last_loss(comparison.many[0], at)
    made = f" The loss{at_line(loss.line)} is {loss.terms[0]}." if loss is not None and loss.terms else ""
    return Finding(
        Cause.UNKNOWN,
        f"{told}.{made} Ruled out: {'; '.join(_ruled_out(comparison, difference, tried))}",
        "look for what depends on the number of towers or on the size of the share: num_replicas_in_sync, len(x), "
        "statistics over the batch, a state that each tower keeps for itself",
    )


def _random(comparison: Comparison, told: str, at: int) -> Finding | None:
    """Random numbers that each tower draws for itself before step number ``at`` is over."""
    draws = [
        d for run in comparison.many[0].runs if run.steps <= at for d in run.draws if not (d.dropout or d.followed)
    ]
    if not draws:
        return None
    return Finding(
        Cause.RANDOM_IN_RUN,
        f"{told}, and {draws[0].by}{at_line(draws[0].line)} draws random numbers inside run: {len(comparison.many)} "
        "towers draw others than one, as they should, so this script cannot be compared",
        "draw them in the dataset, where they are seeded per example, or leave them out for the comparison",
    )


def _ruled_out(comparison: Comparison, difference: Difference, tried: Sequence[Repairs]) -> list[str]:
    """What was looked at and is not the cause."""
    one, many, at = comparison.one, comparison.many, difference.step
    found = ["the examples are the same"] if causes.data_compared(one, many, at) else []
    found.append("the towers' parameters are equal to each other")
    if one.steps[at].rates == many[0].steps[at].rates:
        found.append("the learning rates are equal")
    for factor in dict.fromkeys(repairs.loss for repairs in tried if repairs.loss is not LossFactor.NONE):
        found.append(f"multiplying each tower's loss by {factor.value} does not help")
    if any(repairs.padding for repairs in tried):
        found.append("padding the shares as the batch is does not help")
    if any(repairs.local_changes for repairs in tried):
        found.append("leaving out what changes gradients before they are averaged does not help")
    if any(repairs.global_statistics for repairs in tried):
        found.append("global batch norm statistics do not help")
    elif not many[0].steps[at].batch_norms:
        found.append("no batch norm takes local statistics")
    if comparison.unrest is not None:
        found.append("rounding makes less of a further run on one tower")
    return found
