"""Names the causes that further runs have proved, and those that show in the results of ``reduce`` and ``gather``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mirrored.verification import causes
from mirrored.verification.causes import Cause, Finding, at_line, some
from mirrored.verification.compare import Comparison, Difference, relative
from mirrored.verification.interventions import LossFactor, Repairs
from mirrored.verification.padding import padded_lengths
from mirrored.verification.trace import Loss, Result, Seen, Term, comparable

_LOSS_CAUSES = (
    Cause.LOCAL_MEAN,
    Cause.SUM_LOSS,
    Cause.SUM_OVER_GLOBAL_BATCH,
    Cause.DIVIDED_TWICE,
    Cause.LOSS_SCALE,
)


def name_proved(
    comparison: Comparison, difference: Difference, before: Repairs, now: Repairs, after: Comparison
) -> list[Finding]:
    """The causes that a repair which helped has proved."""
    steps = len(comparison.one.steps)
    reach = f"all {steps} steps are equal" if after.first is None else f"step {difference.step + 1} is equal"
    found = []
    if now.global_statistics and not before.global_statistics:
        layers = comparison.many[0].steps[difference.step].batch_norms
        found.append(
            Finding(
                Cause.BATCH_NORM,
                f"batch norm ({some(layers)}) takes the statistics of each tower's own examples, not those of the "
                f"global batch, from step {difference.step + 1} on",
                causes.BATCH_NORM_FIX,
                f"a further run whose batch norms took the statistics of all towers' examples: {reach}",
            )
        )
    if now.padding and not before.padding:
        found.append(_name_padding(comparison, difference, reach))
    if now.local_changes and not before.local_changes:
        found.append(_name_local_change(comparison, difference, reach))
    if now.loss is not before.loss:
        found.append(_name_loss(comparison, difference, now.loss, reach))
    if now.rates and not before.rates:
        found.append(_name_rate(comparison, difference, reach))
    return found


def _name_padding(comparison: Comparison, difference: Difference, reach: str) -> Finding:
    lengths = padded_lengths(comparison.one, comparison.many, difference.step)
    assert lengths is not None
    *others, last = map(str, lengths[1])
    return Finding(
        Cause.PADDING,
        f"padding counts: in step {difference.step + 1} one tower pads the batch to {lengths[0]} entries, and "
        f"{len(comparison.many)} towers pad their shares to {', '.join(others)} and {last}, on which depends what is "
        "computed: the model sees the padding, or a mean divides by it",
        "keep padding out of the model (a mask, packed sequences) and of means: "
        "(losses * mask).sum(1) / mask.sum(1), not losses.mean(1)",
        f"a further run in which every share was padded as one tower's batch is: {reach}",
    )


def _name_local_change(comparison: Comparison, difference: Difference, reach: str) -> Finding:
    change = [c for c in comparison.many[0].local_changes if c.steps <= difference.step][-1]
    if change.by == "register_hook":
        what = f"a hook that register_hook{at_line(change.line)} puts on a parameter changes gradients that are"
    else:
        what = f"in step {change.steps + 1} {change.by}{at_line(change.line)} changes gradients of no_sync that are"
    return Finding(
        Cause.CHANGED_BEFORE_AVERAGING,
        f"{what} each tower's own, not averaged yet: those of one tower are others, so they are changed by other "
        "amounts (clipped, for example)",
        "change gradients where they are averaged: after the last backward(), which is outside of no_sync",
        f"further runs on one tower and on {len(comparison.many)} without it: {reach}",
    )


def _name_loss(comparison: Comparison, difference: Difference, factor: LossFactor, reach: str) -> Finding:
    one, many = comparison.one, comparison.many
    towers, at = len(many), difference.step
    loss = last_loss(many[0], at)
    terms = _data_terms(last_loss(one, at), loss)
    made = f"on tower 0 the loss{at_line(loss.line if loss else None)} is {terms[1]}"
    shown = f"a further run in which each tower's loss was multiplied by {factor.value}: {reach}"
    fix = "give one loss per example (reduction='none') to mirrored.compute_average_loss"
    if factor is LossFactor.SHARE:
        sizes = backward_shares(many, at)
        *others, last = [str(local) for local, _ in sizes]
        shares = f"{', '.join(others)} and {last}"
        even = "; with the even shares of the steps before it, it is" if at else ""
        return Finding(
            Cause.LOCAL_MEAN,
            f"{made}: the mean over this tower's own examples. In step {at + 1} the batch of {sizes[0][1]} "
            f"is cut into shares of {shares}, and a mean of their means is not the mean of the batch{even}",
            fix,
            shown,
        )
    if factor is LossFactor.DIVISOR:
        return _name_divisors(comparison, at, made, shown)
    told = f"{made}, and averaging the gradients divides by the {towers} towers"
    if _divides_by_towers(terms, towers):
        return Finding(
            Cause.DIVIDED_TWICE,
            f"{told} once more: the gradients are 1/{towers} of one tower's",
            f"do not divide by the number of towers{counted(one)}; or {fix}",
            shown,
        )
    if terms[1].chain[-1][0] == "sum of" and not terms[1].share:
        if terms[0].chain[:-1] == terms[1].chain[:-1] and terms[1].chain[:-1]:
            return Finding(
                Cause.SUM_OVER_GLOBAL_BATCH,
                f"{told}: the sum over the global batch is right where gradients are added up, here they are averaged, "
                f"so they are 1/{towers} of one tower's",
                fix,
                shown,
            )
        if not terms[1].chain[:-1]:
            return Finding(
                Cause.SUM_LOSS,
                f"{told}: the sum over all examples becomes 1/{towers} of what it is on one tower",
                fix + " (and raise the learning rate, if it was chosen for a sum)",
                shown,
            )
    return Finding(Cause.LOSS_SCALE, f"{told}: the gradients are 1/{towers} of one tower's", fix, shown)


def _name_divisors(comparison: Comparison, at: int, made: str, shown: str) -> Finding:
    terms = [[loss.terms for loss in same] for same in _losses(comparison.many, at)]
    summands = [[term.divisor for term in column] for same in terms for column in zip(*same, strict=False)]
    divisors = next(found for found in summands if len(set(found)) > 1)
    *others, last = [f"{divisor:g}" for divisor in divisors]
    return Finding(
        Cause.LOCAL_MEAN,
        f"{made}. In step {at + 1} the towers divide theirs by {', '.join(others)} and {last}, each by the number or "
        f"weight of its own values (tokens, for example), and a mean of their means is not the mean over all "
        f"{sum(divisors):g}",
        "give the losses (reduction='none') to mirrored.compute_average_loss(losses, sample_weight=mask, "
        "denominator='weights'), which divides by the weight of all towers' values",
        shown,
    )


def divided_differently(many: Sequence[Seen], at: int) -> bool:
    """Whether the towers divide losses of a step by different numbers."""
    return any(len({tuple(term.divisor for term in loss.terms) for loss in same}) > 1 for same in _losses(many, at))


def _losses(many: Sequence[Seen], at: int) -> Sequence[tuple[Loss, ...]]:
    """All towers' losses of a step; where several optimizers step after one backward, of the step before."""
    held = [next((step.losses for step in reversed(seen.steps[: at + 1]) if step.losses), []) for seen in many]
    return list(zip(*held, strict=False))


def last_loss(seen: Seen, at: int) -> Loss | None:
    """The first loss of a step; where several optimizers step after one backward, of the step before."""
    return next((step.losses[0] for step in reversed(seen.steps[: at + 1]) if step.losses), None)


def backward_shares(many: Sequence[Seen], at: int) -> Sequence[tuple[int, int]]:
    """Every tower's share of the examples in a backward of a step: the first with uneven shares, if there is one."""
    backwards = list(zip(*([loss.share for loss in seen.steps[at].losses] for seen in many), strict=False))
    return next((shares for shares in backwards if len({local for local, _ in shares}) > 1), (backwards or [()])[0])


def batch_terms(one: Loss | None, many: Loss | None) -> frozenset[int]:
    """Which summands of a loss depend on the batch, where others (a penalty) do not; else empty."""
    if one is None or many is None or len(one.terms) != len(many.terms):
        return frozenset()
    differing = frozenset(i for i, (a, b) in enumerate(zip(one.terms, many.terms, strict=True)) if a != b)
    return differing if len(differing) < len(many.terms) else frozenset()


def _data_terms(one: Loss | None, many: Loss | None) -> tuple[Term, Term]:
    """The terms of one tower's loss and of N's that depend on the batch, as those of a penalty do not."""
    pairs = list(zip(one.terms, many.terms, strict=False)) if one is not None and many is not None else []
    unknown = Term((("unknown", 0),), False)
    return next((pair for pair in pairs if pair[0] != pair[1]), pairs[0] if pairs else (unknown, unknown))


def _divides_by_towers(terms: Sequence[Term], towers: int) -> bool:
    """Whether the loss on N towers is divided by N where that on one tower is divided by 1, or not at all."""
    one, many = (list(term.chain[:-1]) for term in terms)
    for how, factor in many:
        number = factor if how == "divided by" else 1 / factor if factor else 0.0
        if relative(number, towers) < 1e-6:
            place = many.index((how, factor))
            if len(one) < len(many) or relative(one[place][1], 1.0) < 1e-6:
                return True
    return False


def counted(seen: Seen) -> str:
    """Where the script asks for the number of towers."""
    if not seen.counted:
        return ""
    numbers = ", ".join(map(str, seen.counted))
    return f" (num_replicas_in_sync is in line{'s' if len(seen.counted) > 1 else ''} {numbers})"


def _name_rate(comparison: Comparison, difference: Difference, reach: str) -> Finding:
    at, towers = difference.step, len(comparison.many)
    one, many = comparison.one.steps[at], comparison.many[0].steps[at]
    rates = next((a, b) for a, b in zip(one.rates, many.rates, strict=False) if a != b)
    shown = f"a further run with one tower's learning rates: {reach}"
    told = f"the learning rate of step {at + 1} is {rates[1]:g} on {towers} towers, but {rates[0]:g} on one"
    for name, made in many.schedules.items():
        alone = one.schedules.get(name, made)
        if made != alone:
            each = ", once for every tower in each step" if made == towers * alone else ""
            return Finding(
                Cause.SCHEDULE,
                f"{told}: {name} has made {made} steps by then, on one tower {alone}{each}",
                "step the schedule once after each optimizer step, whatever the number of towers, and count its total "
                f"in global batches: len(distributed dataset){counted(comparison.one)}",
                shown,
            )
    times = ": it is multiplied by the number of towers" if relative(rates[1], towers * rates[0]) < 1e-6 else ""
    return Finding(
        Cause.LEARNING_RATE,
        f"{told}{times}, while the global batch is the same",
        "use the same learning rate on any number of towers, and scale it only together with the global batch size"
        + counted(comparison.one),
        shown,
    )


def told_apart(one: float, many: float) -> tuple[str, str]:
    """Two numbers in as few digits as show that they differ."""
    for digits in range(6, 18):
        texts = f"{one:.{digits}g}", f"{many:.{digits}g}"
        if texts[0] != texts[1]:
            break
    return texts


def results(comparison: Comparison, pair: tuple[Result, Result], found: Sequence[Finding]) -> Finding | None:
    """Training is equal, once what was found is repaired; why is a value that the script reports not?"""
    alone, together = pair
    towers = len(comparison.many)
    a, b = max(zip(alone.values, together.values, strict=False), key=lambda ab: relative(*ab), default=(0.0, 0.0))
    where = f"strategy.{together.call}{at_line(together.line)} after step {together.steps}"
    alone_text, together_text = told_apart(a, b)
    told = f"{where} gives {together_text} on {towers} towers, but {alone_text} on one"
    if alone.count != together.count:
        told = f"{where} gives {together.count} values on {towers} towers, but {alone.count} on one"
    for steps in sorted(comparison.one.evaluated):
        whole = Counter(comparison.one.evaluated[steps])
        parts = [Counter(seen.evaluated.get(steps, [])) for seen in comparison.many]
        union = sum(parts, Counter())
        if union == whole or all(part == whole for part in parts) or not comparable(union, whole):
            continue
        more, fewer = union - whole, whole - union
        counts = f"{union.total()} examples on {towers} towers, {whole.total()} on one"
        shown = f"a comparison of the examples that the model was given, bit by bit; {told}"
        if more and not fewer:
            kind = "taken twice" if not set(more) - set(whole) else "which one tower does not have (padding)"
            return Finding(
                Cause.EVALUATION_PADDING,
                f"the evaluation after step {steps} takes {counts}: {more.total()} too many, {kind}",
                "share the evaluation's data out with strategy.distribute_dataset, which repeats nothing (shares may "
                "be uneven or empty), and add up sums and counts with strategy.reduce('sum', …)",
                shown,
            )
        if fewer and not more:
            return Finding(
                Cause.EVALUATION_DROPS,
                f"the evaluation after step {steps} takes {counts}: {fewer.total()} left out",
                "share the evaluation's data out with strategy.distribute_dataset without drop_last",
                shown,
            )
    if any(finding.cause in _LOSS_CAUSES for finding in found):
        return None  # it is the loss that is reported, most likely
    fix = "reduce sums and counts with 'sum' and divide afterwards; a mean of the towers' means is not the mean"
    shares = {term.share for step in comparison.many[0].steps for loss in step.losses for term in loss.terms}
    if alone.count != together.count:
        fix = "give gather the same entries on any number of towers, or one from each tower"
    elif "mean" in together.call and relative(b * towers, a) < 1e-3:
        fix = "shares of the global mean (compute_average_loss) add up: strategy.reduce('sum', loss)"
    elif "sum" in together.call and relative(b, a * towers) < 1e-3:
        fix = "values that are means, or equal on all towers, do not add up: strategy.reduce('mean', value)"
    elif "sum" in together.call and len(shares) > 1:
        fix = "give the part of the loss that does not depend on the batch to mirrored.scale_regularization_loss"
    return Finding(Cause.REPORTED_VALUE, f"training is equal, but {told}", fix, "a comparison of what the calls return")
