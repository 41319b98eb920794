"""Finds the causes of a difference; what cannot be seen directly is proved by a run with one thing changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from mirrored.verification import causes
from mirrored.verification.causes import Cause, Finding, at_line
from mirrored.verification.compare import Comparison, Difference
from mirrored.verification.drift import drift
from mirrored.verification.failures import failure, nothing_to_compare
from mirrored.verification.proved import batch_terms, counted, last_loss, name_proved, results
from mirrored.verification.repairs import LossFactor, Repairs
from mirrored.verification.seen import Seen

_MOST_REPAIRS = 4

Compare = Callable[[Sequence[Seen]], Comparison]

Replay = Callable[[Repairs], Sequence[Seen] | None]
"""Runs the script on N towers once more, repaired; None where it fails then."""


def explain(
    one: Seen, many: Sequence[Seen], compare: Compare, replay: Replay, again: Callable[[], Seen | None]
) -> list[Finding]:
    """All causes that are found, in the order in which they take effect.

    Args:
        one, many: what the runs on one tower and on N have seen.
        compare: compares another run on N towers with that on one.
        replay: runs the script on N towers again.
        again: runs the script on one tower again.
    """
    for finding in (failure(one, many), nothing_to_compare(one, many)):
        if finding is not None:
            return [finding]
    found = [finding for finding in (causes.shared_stream(many),) if finding is not None]
    strict = compare(many)
    drifting = drift(many)
    if drifting is not None:
        return [*found, drifting]
    other_data = causes.data(one, many)
    if other_data is not None:
        return [*found, _not_reproducible(one, again()) or other_data]
    comparison, repaired = _repair(strict.loosely(), compare, replay)
    found += repaired
    if comparison.first is not None:
        return [*found, _not_reproducible(one, again()) or _unexplained(comparison, found)]
    reported = results(comparison, found)
    if reported is not None:
        found.append(reported)
    if not found and strict.first is not None:
        found.append(_rounding(f"the {strict.first.kind} of step {strict.first.step + 1}"))
    elif not found and strict.results() is not None:
        found.append(_rounding("what reduce and gather return"))
    return found


def _not_reproducible(one: Seen, again: Seen | None) -> Finding | None:
    """Two runs on one tower are not the same either, so nothing can be said of N."""
    if again is None:
        return None
    between = Comparison(one, [again], None, False).first
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


def _repair(comparison: Comparison, compare: Compare, replay: Replay) -> tuple[Comparison, list[Finding]]:
    """Change one thing after the other until nothing differs, or nothing that is tried helps."""
    repairs, found = Repairs(), list[Finding]()
    while (difference := comparison.first) is not None and len(found) < _MOST_REPAIRS:
        for more in _candidates(comparison, difference, repairs):
            seen = replay(more)
            if seen is None:
                continue
            after = compare(seen).loosely()
            if after.first is None or after.first.place > difference.place:
                found += name_proved(comparison, difference, repairs, more, after)
                comparison, repairs = after, more
                break
        else:
            break
    return comparison, found


def _candidates(comparison: Comparison, difference: Difference, present: Repairs) -> Iterator[Repairs]:
    """What might make a difference go away: each thing alone first, then together with global statistics."""
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
        yield bases[1]
    if present.loss is not LossFactor.NONE:
        return
    shares = [seen.steps[difference.step].shares for seen in many]
    uneven = all(shares) and len({known[0] for known in shares}) > 1
    terms = batch_terms(last_loss(one, difference.step), last_loss(many[0], difference.step))
    for base in bases:
        for factor in (LossFactor.SHARE, LossFactor.TOWERS, LossFactor.BOTH):
            if uneven or factor is LossFactor.TOWERS:
                yield dataclasses.replace(base, loss=factor, terms=terms)


def _unexplained(comparison: Comparison, found: Sequence[Finding]) -> Finding:
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
    draws = [
        d for run in comparison.many[0].runs if run.steps <= at for d in run.draws if not d.dropout and not d.followed
    ]
    if draws:
        return Finding(
            Cause.RANDOM_IN_RUN,
            f"{told}, and {draws[0].by}{at_line(draws[0].line)} draws random numbers inside run: {towers} towers draw "
            "others than one, as they should, so this script cannot be compared",
            "draw them in the dataset, where they are seeded per example, or leave them out for the comparison",
        )
    step = comparison.many[0].steps[at]
    tried = ["the examples are the same", "the towers' parameters are equal to each other"]
    if difference.kind != "learning rate":
        tried.append("the learning rates are equal")
    if difference.kind in ("loss", "gradient"):
        tried.append("no factor on the loss (the number of towers, the share's size, both) helps")
        tried.append(
            "global batch norm statistics do not either" if step.batch_norms else "no batch norm takes local statistics"
        )
    loss = last_loss(comparison.many[0], at)
    made = f" The loss{at_line(loss.line)} is {loss.terms[0]}." if loss is not None and loss.terms else ""
    return Finding(
        Cause.UNKNOWN,
        f"{told}.{made} Ruled out: {'; '.join(tried)}",
        "look for what depends on the number of towers or on the size of the share: num_replicas_in_sync, len(x), "
        "statistics over the batch, a state that each tower keeps for itself",
    )
