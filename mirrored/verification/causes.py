"""What makes N towers differ from one: the causes, and those that what was seen proves by itself."""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from collections.abc import Sequence

from mirrored.verification.trace import Draw, Run, Seen, comparable


class Cause(enum.Enum):
    """Why N towers compute something else than one; the value is the short name in the report."""

    FAILS_EVERYWHERE = "fails-everywhere"
    FAILS_ON_ONE = "fails-on-one-tower"
    FAILS_ON_TOWERS = "fails-on-towers"
    FAILS_WHEN_WATCHED = "fails-when-watched"
    NO_TOWERS = "no-towers"
    NOT_REPRODUCIBLE = "not-reproducible"
    NOTHING_TRAINED = "nothing-trained"
    LOCAL_MEAN = "local-mean"
    SUM_LOSS = "sum-loss"
    SUM_OVER_GLOBAL_BATCH = "sum-over-global-batch"
    DIVIDED_TWICE = "divided-twice"
    PADDING = "padding"
    LOSS_SCALE = "loss-scale"
    BATCH_NORM = "batch-norm"
    SHARED_RANDOM_STREAM = "shared-random-stream"
    RANDOM_IN_RUN = "random-in-run"
    OUTSIDE_SCOPE = "outside-scope"
    CHANGED_ON_ONE_TOWER = "changed-on-one-tower"
    BUFFER = "buffer"
    CHANGED_BEFORE_AVERAGING = "changed-before-averaging"
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


def shared_stream(many: Sequence[Seen]) -> Finding | None:
    """All towers draw the same random numbers for different examples."""
    for runs in zip(*(seen.runs for seen in many), strict=False):
        if not all(run.trained for run in runs):
            continue  # an evaluation that starts from one seed is meant to
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


def data(one: Seen, many: Sequence[Seen]) -> Finding | None:
    """The towers' shares together are not one tower's batch."""
    towers = len(many)
    for run, *shares in zip(one.runs, *(seen.runs for seen in many), strict=False):
        if not run.trained or not all(share.trained for share in shares):
            continue
        if any(known.shares and known.shares[0][0] != len(known.given) for known in (run, *shares)):
            continue  # the examples are not the arguments' first dimension
        given = [Counter(share.given) for share in shares]
        together = sum(given, Counter())
        batch = Counter(run.given)
        where = f"step {run.steps + 1}"
        if comparable(batch, together) and together != batch and any(held != batch for held in given):
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


def data_compared(one: Seen, many: Sequence[Seen], at: int) -> bool:
    """Whether the examples given to ``run`` for step number ``at`` could be compared."""
    for run, *shares in zip(one.runs, *(seen.runs for seen in many), strict=False):
        if run.trained and run.steps == at:
            known = (run, *shares)
            return all(k.given and (not k.shares or k.shares[0][0] == len(k.given)) for k in known) and comparable(
                *(k.given for k in known)
            )
    return False


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
