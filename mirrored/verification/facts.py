"""The causes that traces alone show: failures, towers that differ from each other, other examples, buffers."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from mirrored.verification.causes import Cause, Explanation, at_line, first_names, plural
from mirrored.verification.compare import RunComparison, RunDifference, differing_settings, setting_named
from mirrored.verification.trace import (
    NUMBER_OF_TOWERS,
    ONE_TOWER,
    SCOPE,
    Draw,
    Happened,
    RunCall,
    Sketch,
    Trace,
    comparable,
)
from towers import errors

# -- scripts that fail, or make no step ------------------------------------------------------------------


def failure(comparison: RunComparison) -> Explanation | None:
    """Explains that the script raised an exception in one run or in both."""
    one, many = comparison.one, comparison.many
    if comparison.cut_short:
        return None
    raised = [(tower, trace.raised) for tower, trace in enumerate(many) if trace.raised is not None]
    if one.raised is not None:
        line, text = at_line(one.raised.line), one.raised.traceback
        if raised:
            what = f"the script fails on one tower, too{line}: {one.raised}"
            return Explanation(Cause.FAILS_EVERYWHERE, what, text)
        what = f"the script fails on one tower{line}, but not on {len(many)}: {one.raised}"
        return Explanation(Cause.FAILS_ON_ONE, what, text)
    if not raised or (all(error.consequence for _, error in raised) and any(trace.end.by_verify for trace in many)):
        return None
    for trace in many:
        if trace.raised is not None and trace.raised.batch_norm is not None:
            return Explanation(
                Cause.BATCH_NORM,
                f"batch norm ({trace.raised.batch_norm}) takes the statistics of each tower's own examples, which "
                "fails where a share is a single example; one tower takes those of the whole batch",
                str(trace.raised),
                where=mentions_of(one, SCOPE),
            )
    tower, first = min(raised, key=lambda failed: failed[1].consequence)
    error = f"on {len(many)} towers the script ends{at_line(first.line)} in {first}"
    for trace in many:
        if not trace.steps or trace.steps[-1].after:
            continue
        last = trace.steps[-1]
        step = f"{last.optimizer[1]}.step() at step {len(trace.steps)}{at_line(last.line)}"
        if last.foreign:
            return Explanation(
                Cause.OUTSIDE_SCOPE,
                f"{_created_outside(trace, last.foreign)}, so the gradient is each tower's own, and {step} would let "
                "the towers drift apart; the script runs on one tower",
                error,
            )
        if last.unsynced:
            return Explanation(
                Cause.STEP_BEFORE_AVERAGING,
                f"{step} runs before the gradients are averaged: that of {last.unsynced[0]} was accumulated "
                "under strategy.no_sync(), which has no effect on one tower",
                error,
            )
    drifting = drift(many) or _write_on_some_towers(many, len(many[0].steps))
    if drifting is not None:
        return dataclasses.replace(drifting, shown_by="; ".join(filter(None, (drifting.shown_by, error))))
    done = [tower for tower, trace in enumerate(many) if trace.raised is None]
    if first.consequence and done:
        ended = many[done[0]]
        return Explanation(
            Cause.STEPS,
            f"tower {done[0]} ends the script after {plural(len(ended.steps), 'step')}{at_line(ended.end.line)}, but "
            f"tower {tower} continues",
            error,
            "decide with values that are equal on all towers when training ends: strategy.reduce('sum', loss) instead "
            "of a tower's own loss, or mirrored.EarlyStopping",
        )
    if (twice := _split_twice(comparison, "", error)) is not None:
        return twice
    if first.kind == errors.MirrorError.__name__:
        what = f"the towers are no longer mirror images{at_line(first.line)}: {first}"
        return Explanation(Cause.CHANGED_ON_ONE_TOWER, what, first.traceback, where=mentions_of(one, ONE_TOWER))
    return Explanation(
        Cause.FAILS_ON_TOWERS,
        f"the script runs on one tower, but on {len(many)} towers tower {tower} fails{at_line(first.line)}: {first}",
        first.traceback,
        where=mentions_of(one, (*NUMBER_OF_TOWERS, *ONE_TOWER)),
    )


def failure_when_watched(failed: Explanation, towers: int) -> Explanation:
    """Explains that the script fails on this number of towers only while it is recorded, so it is not at fault."""
    return Explanation(
        Cause.FAILS_WHEN_WATCHED,
        f"this script cannot be compared. It runs on {plural(towers, 'tower')}, but not while verify watches its "
        f"calls of torch: {failed.what}",
        failed.shown_by,
    )


def nothing_to_compare(comparison: RunComparison) -> Explanation | None:
    """Explains that the script does not train, does not use the towers, or trains by parameter servers."""
    one, many = comparison.one, comparison.many
    for servers in one.happened(Happened.SERVERS):
        return Explanation(
            Cause.ASYNCHRONOUS,
            f"this script cannot be compared: it trains with {servers.what}{at_line(servers.line)}, whose numbers are "
            "not those of one device: they depend on which worker is first",
        )
    if not one.steps and not one.results and not any(trace.steps for trace in many):
        return nothing_compared(one)
    if all(trace.towers != len(many) for trace in many):
        return Explanation(
            Cause.NO_TOWERS,
            f"the script calls strategy.run of no strategy with {len(many)} towers, so each tower trains for itself",
        )
    return None


def nothing_compared(one: Trace) -> Explanation:
    """Explains that no difference was found, but that there was no step to compare, or none that shows anything."""
    advice = ""
    if one.steps:
        what = "all gradients are zero or missing in all steps, so that equal runs show nothing"
        advice = "see why the loss does not depend on the parameters"
    elif any(call.trained for call in one.calls):
        what = "no step was compared: the script calls backward, but no optimizer of torch.optim makes a step"
    else:
        what = "no step was compared: the script makes no step of an optimizer"
    if one.results:
        what += f". Of {len(one.results)} results that are reduced or gathered none differs"
    elif not one.steps:
        what += ", and calls neither strategy.reduce nor strategy.gather"
    return Explanation(Cause.NOTHING_TRAINED, what, advice=advice)


def unseeded(comparison: RunComparison, seeded: Trace) -> Explanation:
    """Explains that towers draw different random numbers before the strategy is created, unless one seed is given."""
    first = comparison.first
    lines = [draw.line for draw in seeded.happened(Happened.DRAW_ABOVE) if draw.line is not None]
    if (failed := failure(comparison)) is not None:
        shown = failed.what
    elif first is not None:
        shown = f"the {first.kind} of step {first.step + 1} is not that of one tower"
    else:
        shown = "the towers' data or results are not those of one tower"
    return Explanation(
        Cause.UNSEEDED,
        f"each tower draws its own random numbers above the strategy{in_lines(lines)}, where nothing seeds them: "
        f"{shown}",
        "a further run in which all towers started with one seed",
    )


# -- towers that differ from each other ------------------------------------------------------------------


def drift(many: Sequence[Trace]) -> Explanation | None:
    """Explains that the towers' parameters differ from each other, which is always an error."""
    for at, steps in enumerate(zip(*(trace.steps for trace in many), strict=False)):
        entering = [next((call.parameters for call in trace.calls if call.steps == at), {}) for trace in many]
        before = [step.before for step in steps]
        after = [{name: sketch.digest for name, sketch in step.after.items()} for step in steps]
        for moment, digests in (("run", entering), ("step", before), ("end", after)):
            names = [name for name in digests[0] if len({digest.get(name) for digest in digests}) > 1]
            if not all(digests) or not names:
                continue
            foreign = [name for name in names if any(name in step.foreign for step in steps)]
            if foreign:
                return Explanation(
                    Cause.OUTSIDE_SCOPE,
                    f"{_created_outside(many[0], foreign)}, and differs between the towers from step {at + 1} on",
                    f"compared bit by bit at step {at + 1}",
                )
            return _changed(many, at, moment, names)
    return None


def _changed(many: Sequence[Trace], at: int, moment: str, names: Sequence[str]) -> Explanation:
    """Explains that parameters differ since the ``moment`` of step ``at``.

    The moment is the start of the ``run``, before the optimizer's ``step``, or after it (``end``).
    """
    steps = [trace.steps[at] for trace in many]
    closure = moment == "end" and steps[0].closure
    if moment == "end" and (setting := next(differing_settings(steps), None)) is not None:
        return _other_settings(at, steps[0].line, setting[0], setting[2])
    if moment == "end":
        gradients = [{name: step.gradients.get(name) for name in names} for step in steps]
        what = "its gradient" if any(g != gradients[0] for g in gradients) else "the optimizer or its learning rate"
        what = "the loss that the closure returns" if closure else what
        when = f"in step {at + 1}{at_line(steps[0].line)}, where {what} is not the same on all towers"
    elif moment == "step":
        when = f"in the run of step {at + 1}, before the optimizer's step"
    else:
        when = f"after step {at}, outside of the optimizer" if at else "before step 1"
    shown = f"the towers' bits were equal before, and differ {'after' if moment == 'end' else 'at'} step {at + 1}"
    written = _write_on_some_towers(many, at, names)
    if written is not None:
        return dataclasses.replace(written, shown_by=shown)
    what = f"the towers are no longer mirror images: {first_names(names)} is changed {when}"
    if closure:
        advice = "return a loss from the closure that is equal on all towers: strategy.reduce('sum', loss)"
        return Explanation(Cause.CHANGED_ON_ONE_TOWER, what, shown, advice)
    return Explanation(Cause.CHANGED_ON_ONE_TOWER, what, shown, where=mentions_of(many[0], ONE_TOWER))


def _other_settings(at: int, line: int | None, name: str, values: Sequence[float]) -> Explanation:
    """Explains that the towers' optimizers have different settings in step ``at``."""
    what, each = setting_named(name), ", ".join(f"{value:g} on tower {tower}" for tower, value in enumerate(values))
    return Explanation(
        Cause.CHANGED_ON_ONE_TOWER,
        f"the towers are no longer mirror images: in step {at + 1}{at_line(line)} the {what} is {each}",
        "the settings of the towers' optimizers",
        f"compute the {what} from values that are equal on all towers: give a ReduceLROnPlateau, for example, "
        "strategy.reduce('sum', loss) instead of a tower's own loss",
    )


def _write_on_some_towers(many: Sequence[Trace], at: int, names: Sequence[str] | None = None) -> Explanation | None:
    """Explains that only some towers have written to a parameter (or to one of ``names``) after step ``at``."""
    writers: dict[tuple[str, int | None], list[int]] = {}
    for tower, trace in enumerate(many):
        for parameter, line in {
            (write.what, write.line) for write in trace.happened(Happened.WRITE) if write.steps == at
        }:
            if names is None or parameter in names:
                writers.setdefault((parameter, line), []).append(tower)
    for (parameter, line), towers in writers.items():
        if len(towers) < len(many):
            by = f", by line {line}" if line is not None else ""
            return Explanation(
                Cause.CHANGED_ON_ONE_TOWER,
                f"tower {', '.join(map(str, towers))} alone changes {parameter} after step {at}, outside the "
                f"optimizer{by}; from then on the towers are no longer mirror images",
            )
    return None


def evaluated_drift(many: Sequence[Trace]) -> Explanation | None:
    """Explains that a model that all towers evaluate differs between them. Models of only some towers may differ."""
    for steps, evaluated in sorted(many[0].evaluated.items()):
        models = [trace.evaluated[steps].models if steps in trace.evaluated else {} for trace in many]
        if any(model.keys() != models[0].keys() for model in models):
            continue
        for name, digests in models[0].items():
            differing = [path for path in digests if len({model[name].get(path) for model in models}) > 1]
            if differing:
                return Explanation(
                    Cause.CHANGED_ON_ONE_TOWER,
                    f"the towers evaluate {name} after step {steps}{at_line(evaluated.line)}, but "
                    f"it differs between them: they differ in {first_names(differing)}, although training is the "
                    "same. An average of the weights that only the chief updates, for example, keeps its initial "
                    "values on the other towers",
                    "compared bit by bit where it was called",
                    "update it identically on all towers, or use it on the chief alone",
                    mentions_of(many[0], ONE_TOWER),
                )
    return None


def pairs_of_examples(one: Trace, many: Trace, what: str) -> Explanation | None:
    """Explains that the loss compares the examples of a batch in pairs, but on several towers only within a share."""
    for (line, function), examples in many.over_examples.items():
        alone = one.over_examples.get((line, function), examples)
        if function is None and alone != examples:
            return Explanation(
                Cause.PAIRS_OF_EXAMPLES,
                f"{what}. The script compares examples of a batch with each other{at_line(line)}: "
                f"{alone} on one tower, {examples} of a share. Such a loss is not a mean over examples",
                "the shape of that line's result; no factor makes the losses equal",
            )
    return None


def without_gradient(comparison: RunComparison, difference: RunDifference, what: str) -> Explanation | None:
    """Explains that gradients differ and losses do not, because all examples are gathered without their gradients.

    A script that also gathers values with a gradient is not explained: it may gather constants (targets) on purpose.
    """
    many, row = comparison.many[0], comparison.rows[difference.step]
    constants = [call for call in many.happened(Happened.GATHER_OF_CONSTANTS) if call.steps <= difference.step]
    if difference.kind != "gradient" or None in row.loss or not constants or many.happened(Happened.GATHER):
        return None
    return Explanation(
        Cause.GATHERED_WITHOUT_GRADIENT,
        f"{what}, but the losses are equal. {constants[0].what}{at_line(constants[0].line)} is given values without a "
        "gradient, so the gradient that other towers' losses have for this tower's examples is missing",
        "a comparison of the losses and the gradients",
    )


def shared_stream(many: Sequence[Trace]) -> Explanation | None:
    """Explains that all towers draw the same random numbers for different examples."""
    for calls in zip(*(trace.calls for trace in many), strict=False):
        if not all(call.trained for call in calls):
            continue  # evaluations may start from one seed on purpose
        for draws in zip(*(call.draws for call in calls), strict=False):
            first: Draw = draws[0]
            sizes = [draw.shape[0] if draw.shape else 0 for draw in draws]
            per_example = first.dropout or sizes == [_size(call) for call in calls]
            same = all(draw.state == first.state and draw.by == first.by for draw in draws)
            if per_example and same and all(sizes):
                return Explanation(
                    Cause.SHARED_RANDOM_STREAM,
                    f"at step {calls[0].steps + 1} {first.by}{at_line(first.line)} draws the same random numbers on "
                    f"all {len(many)} towers: each of them drops or adds the same for its own, different examples",
                    "the generators of all towers were in the same state at that moment",
                )
    return None


def _size(call: RunCall) -> int:
    return call.shares[0][0] if call.shares else len(call.examples)


def changed_after_averaging(comparison: RunComparison, at: int, differs: str) -> Explanation:
    """Explains that the script changes the averaged gradients of step ``at`` otherwise than on one tower."""
    changes = dict.fromkeys(
        f"{change.what}{at_line(change.line)}"
        for change in comparison.many[0].happened(Happened.CHANGE)
        if change.steps == at and change.averaged
    )
    by = f", by {first_names(list(changes))}" if changes else ""
    return Explanation(
        Cause.CHANGED_AFTER_AVERAGING,
        f"{differs}: backward() has averaged it to one tower's, and the script then changes it otherwise than on one "
        f"tower{by}",
        "a comparison of the gradients after backward() and before the optimizer's step",
        where=mentions_of(comparison.one),
    )


# -- other parameters, examples and buffers -----------------------------------------------------------------------


def other_start(one: Trace, again: Trace) -> bool:
    """Returns whether two runs on one tower start their first step with different parameters."""
    return any(step.before != other.before for step, other in zip(one.steps[:1], again.steps, strict=False))


def other_data(comparison: RunComparison) -> Explanation | None:
    """Explains that the towers' shares together are not one tower's batch."""
    towers = len(comparison.many)
    for call, shares in comparison.training_calls():
        if not all(each.trained and each.examples_come_first for each in (call, *shares)):
            continue
        batch, received = Counter(call.examples), [Counter(share.examples) for share in shares]
        together, step = sum(received, Counter()), f"step {call.steps + 1}"
        if comparable(batch, together) and together != batch and any(share != batch for share in received):
            return _other_batch(comparison, step, batch, together)
        alone = Counter(call.seen_by_model)
        seen = sum((Counter(share.seen_by_model) for share in shares), Counter())
        if batch not in received and seen != alone and not seen - alone:
            return Explanation(
                Cause.SHARDED_TWICE,
                f"at {step} the model receives {seen.total()} examples on {towers} towers, but {alone.total()} "
                "on one: the batch given to run is this tower's share already, and the function that run calls "
                "splits it again",
                "the examples given to run are the same; those given to the model are a part of them",
                "use the whole batch that run was given",
                mentions_of(comparison.one, (*NUMBER_OF_TOWERS, *ONE_TOWER)),
            )
    return None


def _split_twice(comparison: RunComparison, first: str, shown: str) -> Explanation | None:
    """Explains that a dataset was split by tower before it was distributed, if its sizes show that."""
    towers = len(comparison.many)
    for alone, each in zip(comparison.one.datasets, comparison.many[0].datasets, strict=False):
        if alone != each and abs(each * towers - alone) < towers:
            return Explanation(
                Cause.SHARDED_TWICE,
                f"the data is split twice: the dataset given to distribute_dataset has {each} examples on each "
                f"of {towers} towers, but {alone} on one, and each tower's part is split again, so that most "
                f"examples are never used{first}",
                shown,
                where=mentions_of(comparison.one),
            )
    return None


def mentions_of(trace: Trace, words: Sequence[str] = NUMBER_OF_TOWERS) -> str:
    """Returns the lines of the script that contain certain words, by default on the number of towers, in words."""
    places = [f"{word} is in {_lines(trace.mentions[word])}" for word in words if word in trace.mentions]
    return f" ({'; '.join(places)})" if places else ""


def _created_outside(trace: Trace, parameters: Sequence[str]) -> str:
    was = "was" if len(parameters) == 1 else "were"
    lines = {line for name in parameters if (line := trace.lines.get(name)) is not None}
    return f"{first_names(parameters)} {was} created outside strategy.scope(){in_lines(sorted(lines))}"


def in_lines(lines: Sequence[int]) -> str:
    """Returns ``" (lines 1, 2)"``, or an empty string if no line is known."""
    return f" ({_lines(lines)})" if lines else ""


def _lines(lines: Sequence[int]) -> str:
    return f"line{'s' if len(lines) > 1 else ''} {', '.join(map(str, lines))}"


def _other_batch(comparison: RunComparison, step: str, batch: Counter[str], together: Counter[str]) -> Explanation:
    towers, missing = len(comparison.many), (batch - together).total()
    shown = f"the examples of {step} are other ones: {missing} of one tower's {batch.total()} reach no tower"
    if (twice := _split_twice(comparison, f" (first at {step})", shown)) is not None:
        return twice
    sizes = f"{together.total()} examples on {towers} towers, {batch.total()} on one"
    if together.total() == towers * batch.total():
        sizes += ": each tower takes a batch of the full size"
    advice = ""
    if comparison.one.library == "keras":
        advice = (
            "give fit the same batches on every tower and on any number of towers; it takes each tower's share itself"
        )
    elif together.total() == batch.total():
        draws = dict.fromkeys(f"{draw.what}{at_line(draw.line)}" for draw in comparison.many[0].happened(Happened.DRAW))
        sizes += f". {first_names(list(draws))} draws random numbers outside of run" if draws else ""
        advice = (
            "give every tower the same data, and draw random numbers for examples in the dataset's __getitem__, which "
            "are seeded per example, not in a collate_fn"
        )
    return Explanation(
        Cause.OTHER_DATA,
        f"{step} is computed on other examples: {sizes}; {missing} of one tower's examples reach no tower, and "
        f"{(together - batch).total()} of the towers' are not in one tower's batch",
        "a comparison of the examples given to run, bit by bit",
        advice,
        mentions_of(comparison.one),
    )


def data_compared(comparison: RunComparison, at: int) -> bool:
    """Returns whether the examples in the arguments of ``run`` for step ``at`` could be compared."""
    for call, shares in comparison.training_calls():
        if call.steps == at:
            calls = (call, *shares)
            known = all(each.examples and each.examples_come_first for each in calls)
            return known and comparable(*(each.examples for each in calls))
    return False


def other_buffers(comparison: RunComparison, at: int) -> Explanation | None:
    """Explains which buffers differ from one tower's after step ``at``."""
    names = comparison.buffers_beyond(at)
    if not names:
        return None
    one = comparison.one.steps[at].buffers[names[0]]
    sketches = [b for trace in comparison.many if (b := trace.steps[at].buffers.get(names[0])) is not None]
    what = f"{first_names(names)} after step {at + 1} differs from one tower's"
    if len({sketch.digest for sketch in sketches}) > 1:
        towers, relation = len(comparison.many), _together(one, sketches)
        what += (
            f": a buffer that each of the {towers} towers computes from its own examples"
            f"{at_line(comparison.many[0].lines.get(names[0]))}{relation}"
        )
    return Explanation(
        Cause.BUFFER,
        what,
        "compared with one tower's after each step",
    )


def _together(one: Sketch, sketches: Sequence[Sketch]) -> str:
    """Returns how the towers' values combine to one tower's, or ""."""
    sums = [sum(column) for column in zip(*(sketch.sample for sketch in sketches), strict=False)]
    for what, values in (("sum", sums), ("mean", [value / len(sketches) for value in sums])):
        if len(values) == len(one.sample) and all(
            abs(a - b) <= 1e-4 * max(abs(a), abs(b)) for a, b in zip(values, one.sample, strict=True)
        ):
            return f" (their {what} is one tower's)"
    return ""
