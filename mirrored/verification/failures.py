"""Scripts that end in an exception, or do nothing that could be compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mirrored.verification import causes
from mirrored.verification.causes import Cause, Finding, at_line, some
from mirrored.verification.drift import drift, lonely_write
from mirrored.verification.trace import Seen


def failure(one: Seen, many: Sequence[Seen]) -> Finding | None:
    """The script ended in an exception in one run or in both."""
    if cut_short(one, many):
        return None
    raised = [(tower, seen.raised) for tower, seen in enumerate(many) if seen.raised is not None]
    if one.raised is not None:
        error = f"{one.raised.kind}: {one.raised.text}"
        if raised:
            return Finding(
                Cause.FAILS_EVERYWHERE,
                f"the script fails on one tower, too{at_line(one.raised.line)}: {error}",
                "make it run on one tower first",
                one.raised.traceback,
            )
        return Finding(
            Cause.FAILS_ON_ONE,
            f"the script fails on one tower{at_line(one.raised.line)}, but not on {len(many)}: {error}",
            "look for what takes for granted that there are several towers",
            one.raised.traceback,
        )
    if not raised:
        return None
    layer = next((seen.refused_by for seen in many if seen.refused_by is not None), None)
    if layer is not None:
        return Finding(
            Cause.BATCH_NORM,
            f"batch norm ({layer}) takes the statistics of each tower's own examples, and cannot where a share is a "
            "single example; one tower takes those of the whole batch",
            causes.BATCH_NORM_FIX,
            next(f"{seen.raised.kind}: {seen.raised.text}" for seen in many if seen.refused_by and seen.raised),
        )
    tower, first = min(raised, key=lambda found: found[1].consequence)
    error = f"on {len(many)} towers the script ends{at_line(first.line)} in {first.kind}: {first.text}"
    for seen in many:
        last = seen.steps[-1] if seen.steps and not seen.steps[-1].after else None
        where = f"at step {len(seen.steps)}{at_line(last.line)}" if last is not None else ""
        if last is not None and last.foreign:
            return Finding(
                Cause.OUTSIDE_SCOPE,
                f"{some(last.foreign)} was made outside of strategy.scope(), so its gradient is each tower's own, and "
                f"{last.optimizer[1]}.step() {where} would let the towers drift apart; one tower runs",
                "create it inside `with strategy.scope():`, or give its module to strategy.mirror(module) before the "
                "first run",
                error,
            )
        if last is not None and last.unsynced:
            return Finding(
                Cause.STEP_BEFORE_AVERAGING,
                f"{last.optimizer[1]}.step() {where} comes before the gradients are averaged: that of "
                f"{last.unsynced[0]} was accumulated under strategy.no_sync(), which one tower does not notice",
                "let the last backward before the step run outside of no_sync(); the step may stay where it is",
                error,
            )
    drifting = drift(many) or lonely_write(many, len(many[0].steps))
    if drifting is not None:
        return dataclasses.replace(drifting, shown_by="; ".join(filter(None, (drifting.shown_by, error))))
    return Finding(
        Cause.FAILS_ON_TOWERS,
        f"the script runs on one tower, but on {len(many)} tower {tower} fails{at_line(first.line)}: "
        f"{first.kind}: {first.text}",
        "see the error's own advice",
        first.traceback,
    )


def cut_short(one: Seen, many: Sequence[Seen]) -> bool:
    """Whether the script ended in an exception only because its loop was ended after the last step to be compared.

    It did not find what it expected after a whole epoch, in the same place on one tower and on N.
    """
    if one.raised is None or not all(seen.cut for seen in (one, *many)):
        return False
    ends = [(seen.raised.kind, seen.raised.line) for seen in many if seen.raised and not seen.raised.consequence]
    return (
        bool(ends)
        and all(end == (one.raised.kind, one.raised.line) for end in ends)
        and all(seen.raised is not None and len(seen.steps) == len(one.steps) for seen in many)
    )


def nothing_to_compare(one: Seen, many: Sequence[Seen]) -> Finding | None:
    """The script does not train, or does not use the towers."""
    if not one.steps and not one.results and not any(seen.steps for seen in many):
        return Finding(
            Cause.NOTHING_TRAINED,
            "the script makes no step of an optimizer, and calls neither strategy.reduce nor strategy.gather",
            "give verify a script that trains",
        )
    if all(seen.towers != len(many) for seen in many):
        return Finding(
            Cause.NO_TOWERS,
            f"the script calls strategy.run of no strategy with {len(many)} towers, so each tower trains for itself",
            "make a mirrored.MirroredStrategy() and call strategy.run(train_step, args=batch)",
        )
    return None


def nothing_compared(one: Seen) -> Finding:
    """No difference was found, but there was no step to compare."""
    backwards = any(run.trained for run in one.runs)
    what = "no step was compared: the script " + (
        "calls backward, but no optimizer of torch.optim makes a step" if backwards else "makes no step of an optimizer"
    )
    if one.results:
        what += f". Of {len(one.results)} results of reduce and gather none differs"
    return Finding(Cause.NOTHING_TRAINED, what, "give verify a script that trains by an optimizer of torch.optim")


def when_watched(failed: Finding, towers: int) -> Finding:
    """The script fails on so many towers only where it is recorded: that is no fault of the script."""
    return Finding(
        Cause.FAILS_WHEN_WATCHED,
        f"nothing can be said of this script. It runs on {towers} tower{'s' if towers > 1 else ''}, but not while "
        f"verify watches its calls of torch: {failed.what}",
        "leave out of the comparison what fails, by an argument of the script for example; it may well be right",
        failed.shown_by,
    )
