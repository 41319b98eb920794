"""The causes that ``mirrored verify`` names: one table, with the answer that each gives and its fix.

What happens, and the evidence, depend on the script. They are written where a cause is found: ``facts`` (the traces
show it), ``proofs`` (a further run has shown it) and ``explain``.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence


class Verdict(enum.IntEnum):
    """The answer of a verification. The value is the exit code of ``mirrored verify``."""

    SAME = 0
    DIFFERENT = 1
    CANNOT_TELL = 2
    FAILS_ON_ONE_TOWER = 3


_DIFFERENT, _CANNOT_TELL, _FAILS_ON_ONE = Verdict.DIFFERENT, Verdict.CANNOT_TELL, Verdict.FAILS_ON_ONE_TOWER

_LOSSES = "give one loss per example (reduction='none') to mirrored.compute_average_loss"
_GATHER = "the replica context's all_gather brings together (differentiable; docs/how-to/recipes.md#contrastive-losses)"


class Cause(enum.Enum):
    """Why N towers compute something other than one tower.

    Attributes:
        value: the short name in the report.
        fix: what to change, unless an explanation has other advice.
        verdict: the answer of a report with this cause alone.
    """

    fix: str
    verdict: Verdict

    def __new__(cls, name: str, fix: str, verdict: Verdict = _DIFFERENT) -> Cause:
        cause = object.__new__(cls)
        cause._value_, cause.fix, cause.verdict = name, fix, verdict
        return cause

    # The script ends early, or cannot be compared.
    FAILS_EVERYWHERE = "fails-everywhere", "make it run on one tower first", _FAILS_ON_ONE
    FAILS_ON_ONE = "fails-on-one-tower", "look for code that takes several towers for granted", _FAILS_ON_ONE
    FAILS_ON_TOWERS = "fails-on-towers", "see the error's own advice"
    FAILS_WHEN_WATCHED = (
        "fails-when-watched",
        "exclude the failing part from the comparison, for example with an argument of the script; it may be right",
        _CANNOT_TELL,
    )
    NO_TOWERS = "no-towers", "make a mirrored.MirroredStrategy() and call strategy.run(train_step, args=batch)"
    NOT_REPRODUCIBLE = (
        "not-reproducible",
        "look for seeds taken from the clock, orders that change from run to run, and files that the script itself "
        "writes and reads",
        _CANNOT_TELL,
    )
    NOT_COMPARABLE = (
        "not-comparable",
        "exclude the code that writes or reads them (a backup, a checkpoint, a cache), for example with an argument of "
        "the script, or let the script start with new files",
        _CANNOT_TELL,
    )
    ASYNCHRONOUS = (
        "asynchronous",
        "call the scheduled function by strategy.run of a mirrored.MirroredStrategy instead: verify then compares "
        "the model, the loss and the data",
        _CANNOT_TELL,
    )
    NOTHING_TRAINED = "nothing-trained", "give verify a script that trains by an optimizer of torch.optim", _CANNOT_TELL

    # The loss.
    LOCAL_MEAN = "local-mean", _LOSSES
    SUM_LOSS = "sum-loss", f"{_LOSSES}, and raise the learning rate, if it was chosen for a sum"
    SUM_OVER_GLOBAL_BATCH = "sum-over-global-batch", f"{_LOSSES} (in Keras' fit and add_loss, a mean over examples)"
    DIVIDED_TWICE = "divided-twice", f"do not divide by the number of towers; or {_LOSSES}"
    LOSS_SCALE = "loss-scale", _LOSSES
    PAIRS_OF_EXAMPLES = "pairs-of-examples", f"compare each with the examples of all towers, which {_GATHER}"
    GATHERED_WITHOUT_GRADIENT = (
        "gathered-without-gradient",
        "give the replica context's all_gather the tensor itself, not a detached one: it is differentiable",
    )
    OVER_EXAMPLES = "over-examples", f"compute it from all towers' examples, which {_GATHER}"

    # The model.
    BATCH_NORM = (
        "batch-norm",
        "create the model in strategy.scope(sync_batch_norm=True), or use a norm that looks at one example (GroupNorm, "
        "LayerNorm)",
    )
    PADDING = (
        "padding",
        "keep padding out of the model (a mask, packed sequences) and of means: (losses * mask).sum(1) / mask.sum(1), "
        "not losses.mean(1)",
    )
    BUFFER = (
        "buffer",
        "compute it from all towers' examples (mirrored.get_replica_context().all_reduce inside run, "
        "sync_batch_norm=True), or, where each tower is to keep its own, outside of the state_dict "
        "(register_buffer(…, persistent=False))",
    )
    OUTSIDE_SCOPE = (
        "outside-scope",
        "create it inside `with strategy.scope():`, or give its module to strategy.mirror(module) before the first run",
    )
    CHANGED_ON_ONE_TOWER = (
        "changed-on-one-tower",
        "change it identically on all towers: not under `if strategy.is_chief:`, and not with values that differ",
    )

    # Random numbers.
    UNSEEDED = (
        "unseeded",
        "seed them first (torch.manual_seed, random.seed, numpy.random.seed), or create the strategy before: below it, "
        "all towers draw the same",
    )
    HASH_ORDER = (
        "hash-order",
        "sort what has no order, as in sorted(set(…)), and use zlib.crc32 or hashlib in place of hash()",
    )
    SHARED_RANDOM_STREAM = (
        "shared-random-stream",
        "do not seed the generators inside or between the calls of run (torch.manual_seed and the like): the strategy "
        "gives each tower its own stream; MirroredStrategy(seed=…) makes it repeatable",
    )
    RANDOM_IN_RUN = (
        "random-in-run",
        "draw them in the dataset, where they are seeded per example (for episodes of an environment, distribute their "
        "seeds: docs/how-to/recipes.md#reinforcement-learning), or exclude them from the comparison; an operation that "
        "mixes the examples of a batch is the same on any number of virtual towers (docs/how-to/recipes.md#mixup)",
        _CANNOT_TELL,
    )

    # The data.
    SHARDED_TWICE = (
        "sharded-twice",
        "give distribute_dataset the whole dataset on every tower; it takes each tower's share itself",
    )
    OTHER_DATA = (
        "other-data",
        "distribute the data with strategy.distribute_dataset(dataset, global_batch_size), whose batches do not depend "
        "on the number of towers",
    )
    EVALUATION_PADDING = (
        "evaluation-padding",
        "share the evaluation's data out with strategy.distribute_dataset, which repeats nothing (shares may be uneven "
        "or empty), and add up sums and counts with strategy.reduce('sum', …)",
    )
    EVALUATION_DROPS = (
        "evaluation-drops",
        "share the evaluation's data out with strategy.distribute_dataset without drop_last",
    )

    # The optimizer, and the gradients that it is given.
    CHANGED_BEFORE_AVERAGING = (
        "changed-before-averaging",
        "change gradients where they are averaged: after the last backward(), which is outside of no_sync",
    )
    CHANGED_AFTER_AVERAGING = (
        "changed-after-averaging",
        "change gradients by the same amounts on any number of towers: neither divide them by the number of towers nor "
        "reduce them again",
    )
    STEP_BEFORE_AVERAGING = (
        "step-before-averaging",
        "let the last backward before the step run outside of no_sync(); the step may stay where it is",
    )
    LEARNING_RATE = (
        "learning-rate",
        "use the same learning rate on any number of towers, and scale it only together with the global batch size",
    )
    OPTIMIZER_SETTING = "optimizer-setting", "use the same setting on any number of towers"
    SCHEDULE = (
        "schedule",
        "step the schedule once after each optimizer step, whatever the number of towers, and count its total in "
        "global batches: len(distributed dataset)",
    )
    STEPS = "number-of-steps", "let the number of steps and of epochs not depend on the number of towers"

    # What the script reports.
    REPORTED_VALUE = (
        "reported-value",
        "reduce sums and counts with 'sum' and divide afterwards; a mean of the towers' means is not the mean",
    )
    PRINTED_VALUE = (
        "printed-value",
        "combine the towers' values before printing, with strategy.reduce, strategy.gather or a metric",
    )

    ROUNDING = (
        "rounding",
        "for the same bits on any number of towers use virtual towers, otherwise compare without --exact",
    )
    UNKNOWN = (
        "unknown",
        "look for code that depends on the number of towers or on the size of the share: num_replicas_in_sync, len(x), "
        "statistics over the batch, a state that each tower keeps for itself",
    )


@dataclasses.dataclass(frozen=True)
class Explanation:
    """One cause of a difference.

    Attributes:
        cause: the cause.
        what: what happens, and where.
        shown_by: the evidence; "" for a guess.
        advice: what to change in this case, if it is not the cause's fix.
        where: more words for the fix, such as a line.
    """

    cause: Cause
    what: str
    shown_by: str = ""
    advice: str = ""
    where: str = ""

    @property
    def fix(self) -> str:
        """What to change."""
        return f"{self.advice or self.cause.fix}{self.where}"


def at_line(line: int | None, call: str = "") -> str:
    """Returns ``" (line 12)"``, with the call in that line if given, or an empty string if the line is unknown."""
    return f" ({call and f'{call} in '}line {line})" if line is not None else ""


def first_names(names: Sequence[str]) -> str:
    """Returns the first names of a list, and the number of the remaining ones."""
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more


def listed(numbers: Sequence[float]) -> str:
    """Joins numbers as in ``"3, 3 and 2"``."""
    *others, last = [f"{number:g}" for number in numbers]
    return f"{', '.join(others)} and {last}"


def plural(count: int, noun: str) -> str:
    """Returns ``"1 tower"``, ``"2 towers"``."""
    return f"{count} {noun}{'s' if count != 1 else ''}"
