"""What makes N towers differ from one: the causes, and those that what was seen proves by itself."""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from collections.abc import Sequence

from mirrored.verification.seen import Draw, Run, Seen


class Cause(enum.Enum):
    """Why N towers compute something else than one; the value is the short name in the report."""

    FAILS_EVERYWHERE = "fails-everywhere"
    FAILS_ON_ONE = "fails-on-one-tower"
    FAILS_ON_TOWERS = "fails-on-towers"
    NO_TOWERS = "no-towers"
    NOT_REPRODUCIBLE = "not-reproducible"
    NOTHING_TRAINED = "nothing-trained"
    LOCAL_MEAN = "local-mean"
    SUM_LOSS = "sum-loss"
    SUM_OVER_GLOBAL_BATCH = "sum-over-global-batch"
    DIVIDED_TWICE = "divided-twice"
    LOSS_SCALE = "loss-scale"
    BATCH_NORM = "batch-norm"
    SHARED_RANDOM_STREAM = "shared-random-stream"
    RANDOM_IN_RUN = "random-in-run"
    OUTSIDE_SCOPE = "outside-scope"
    CHANGED_ON_ONE_TOWER = "changed-on-one-tower"
    STEP_BEFORE_AVERAGING = "step-before-averaging"
    SHARDED_TWICE = "sharded-twice"
    OTHER_DATA = "other-data"
    LEARNING_RATE = "learning-rate"
    SCHEDULE = "schedule"
    EVALUATION_PADDING = "evaluation-padding"
    EVALUATION_DROPS = "evaluation-drops"
    REPORTED_VALUE = "reported-value"
    STEPS = "number-of-steps"
    ROUNDING = "rounding"
    UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One cause.

    Attributes:
        what: what happens, and where.
        fix: what to change.
        shown_by: why it is known; "" where it is a guess.
    """

    cause: Cause
    what: str
    fix: str
    shown_by: str = ""


BATCH_NORM_FIX = (
    "create the model in strategy.scope(sync_batch_norm=True), or use a norm that looks at one example "
    "(GroupNorm, LayerNorm)"
)


def at_line(line: int | None) -> str:
    """``" (line 12)"``, or nothing where the line is not known."""
    return f" (line {line})" if line is not None else ""


def some(names: Sequence[str]) -> str:
    """The first names of a list, and how many more there are."""
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more


def failure(one: Seen, many: Sequence[Seen]) -> Finding | None:
    """The script ended in an exception in one run or in both."""
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
            BATCH_NORM_FIX,
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
    return Finding(
        Cause.FAILS_ON_TOWERS,
        f"the script runs on one tower, but on {len(many)} tower {tower} fails{at_line(first.line)}: "
        f"{first.kind}: {first.text}",
        "see the error's own advice",
        first.traceback,
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


def shared_stream(many: Sequence[Seen]) -> Finding | None:
    """All towers draw the same random numbers for different examples."""
    for runs in zip(*(seen.runs for seen in many), strict=False):
        for draws in zip(*(run.draws for run in runs), strict=False):
            first: Draw = draws[0]
            per_example = first.dropout or all(d.examples == _size(r) for d, r in zip(draws, runs, strict=True))
            if per_example and all(d.examples and d.state == first.state and d.by == first.by for d in draws):
                return Finding(
                    Cause.SHARED_RANDOM_STREAM,
                    f"at step {runs[0].steps + 1} {first.by}{at_line(first.line)} draws the same random numbers on all "
                    f"{len(many)} towers: each of them drops or adds the same for its own, different examples",
                    "do not seed the generators inside or between the calls of run (torch.manual_seed and the like): "
                    "the strategy gives each tower a stream of its own; MirroredStrategy(seed=…) makes it repeatable",
                    "the generators of all towers stood at the same place at that moment",
                )
    return None


def _size(run: Run) -> int:
    return run.shares[0][0] if run.shares else len(run.given)


def drift(many: Sequence[Seen]) -> Finding | None:
    """The towers' parameters differ from each other; with several towers that is always a mistake."""
    for at, steps in enumerate(zip(*(seen.steps for seen in many), strict=False)):
        entered = [next((run.entered for run in seen.runs if run.steps == at), {}) for seen in many]
        before = [step.before for step in steps]
        after = [{name: held.digest for name, held in step.after.items()} for step in steps]
        for moment, digests in (("before", entered), ("during", before), ("after", after)):
            if all(digests) and (names := [n for n in digests[0] if len({d.get(n) for d in digests}) > 1]):
                foreign = [name for name in names if any(name in step.foreign for step in steps)]
                if foreign:
                    return Finding(
                        Cause.OUTSIDE_SCOPE,
                        f"{some(foreign)} was made outside of strategy.scope(), and differs between the towers from "
                        f"step {at + 1} on",
                        "create it inside `with strategy.scope():`, or give its module to strategy.mirror(module)",
                        f"compared bit by bit at step {at + 1}",
                    )
                return _changed(many, at, moment, names)
    return None


def _changed(many: Sequence[Seen], at: int, moment: str, names: Sequence[str]) -> Finding:
    steps = [seen.steps[at] for seen in many]
    fix = "change it on all towers alike: not under `if strategy.is_chief:`, and not by values that differ"
    if moment == "after":
        gradients = [{name: step.gradients.get(name) for name in names} for step in steps]
        what = "its gradient" if any(g != gradients[0] for g in gradients) else "the optimizer or its learning rate"
        when = f"in step {at + 1}{at_line(steps[0].line)}, where {what} is not the same on all towers"
    elif moment == "before":
        when = f"after step {at}, outside of the optimizer" if at else "before step 1"
    else:
        when = f"in the run of step {at + 1}, before the optimizer's step"
    lines: dict[int | None, list[int]] = {}
    for tower, seen in enumerate(many):
        for line in {write.line for write in seen.writes if write.steps == at and write.parameter in names}:
            lines.setdefault(line, []).append(tower)
    shown = f"the towers' bits were equal before, and differ {'at' if moment != 'after' else 'after'} step {at + 1}"
    for line, towers in lines.items():
        if len(towers) < len(many):
            when += f", by line {line}" if line is not None else ""
            only = ", ".join(map(str, towers))
            return Finding(
                Cause.CHANGED_ON_ONE_TOWER,
                f"tower {only} alone changes {some(names)} {when}; from then on the towers are no mirror images",
                fix,
                shown,
            )
    return Finding(
        Cause.CHANGED_ON_ONE_TOWER,
        f"the towers are no mirror images: {some(names)} is changed {when}",
        fix,
        shown,
    )


def data(one: Seen, many: Sequence[Seen]) -> Finding | None:
    """The towers' shares together are not one tower's batch."""
    towers = len(many)
    for run, *shares in zip(one.runs, *(seen.runs for seen in many), strict=False):
        if not run.trained or not all(share.trained for share in shares):
            continue
        given = [Counter(share.given) for share in shares]
        together = sum(given, Counter())
        batch = Counter(run.given)
        where = f"step {run.steps + 1}"
        if together != batch and any(held != batch for held in given):
            return _other_batch(one, many, where, batch, together)
        fed = sum((Counter(share.fed) for share in shares), Counter())
        if all(held != batch for held in given) and fed != (whole := Counter(run.fed)) and not fed - whole:
            return Finding(
                Cause.SHARDED_TWICE,
                f"at {where} the model sees {fed.total()} examples on {towers} towers, but {whole.total()} on one: the "
                "batch given to run is this tower's share already, and the function that run calls cuts it again",
                "use the whole batch that run was given",
                "the examples given to run are the same ones; those given to the model are a part of them",
            )
    return None


def whole_batches(one: Seen, many: Sequence[Seen]) -> bool:
    """Whether every tower was given all of one tower's batch: right, but a waste."""
    return any(
        run.trained and run.given and all(share.given == run.given for share in shares)
        for run, *shares in zip(one.runs, *(seen.runs for seen in many), strict=False)
    )


def _other_batch(one: Seen, many: Sequence[Seen], where: str, batch: Counter[str], together: Counter[str]) -> Finding:
    towers = len(many)
    for alone, each in zip(one.datasets, many[0].datasets, strict=False):
        if alone != each and abs(each * towers - alone) < towers:
            return Finding(
                Cause.SHARDED_TWICE,
                f"the data is cut twice: the dataset given to distribute_dataset has {each} examples on each of "
                f"{towers} towers, but {alone} on one, and what each tower holds is shared out again, so that "
                f"most examples are never seen (first at {where})",
                "give distribute_dataset the whole dataset on every tower; it takes each tower's share itself",
                f"the examples of {where} are other ones: {(batch - together).total()} of one tower's "
                f"{batch.total()} reach no tower",
            )
    sizes = f"{together.total()} examples on {towers} towers, {batch.total()} on one"
    if together.total() == towers * batch.total():
        sizes += ": each tower takes a batch of the full size"
    return Finding(
        Cause.OTHER_DATA,
        f"{where} is computed on other examples: {sizes}; {(batch - together).total()} of one tower's reach no "
        f"tower, {(together - batch).total()} are not in one tower's batch",
        "share the data out with strategy.distribute_dataset(dataset, global_batch_size), whose batches do not "
        "depend on the number of towers",
        "a comparison of the examples given to run, bit by bit",
    )
