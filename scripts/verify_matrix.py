"""Does ``mirrored verify`` call right scripts the same, and name planted mistakes, or say that it cannot?

Right scripts are the examples, the programs of the tests that train, and ports of what TensorFlow users ran; mistakes
are planted in small scripts, mostly one in each. Exit code 1: a line is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
import tempfile
import time

import mirrored
from mirrored.verification import Cause

ROOT = pathlib.Path(__file__).resolve().parents[1]
PROGRAMS, EXAMPLES = ROOT / "tests" / "programs", ROOT / "examples"
SCRIPTS = PROGRAMS / "verification"


@dataclasses.dataclass(frozen=True)
class Case:
    """A script, and what is to be said of it: nothing but "the same", or one of some causes, or some words."""

    script: pathlib.Path
    arguments: tuple[str, ...] = ()
    causes: tuple[Cause, ...] = ()
    words: str = ""
    steps: int = 5
    exact: bool = False

    @property
    def name(self) -> str:
        return " ".join([str(self.script.relative_to(ROOT)), *(a for a in self.arguments if not a.startswith("/"))])


def right(name: str, *arguments: str, exact: bool = False, words: str = "") -> Case:
    return Case(SCRIPTS / f"{name}.py", arguments, exact=exact, words=words)


def wrong(
    name: str, cause: Cause, *arguments: str, more: tuple[Cause, ...] = (), words: str = "", steps: int = 5
) -> Case:
    return Case(SCRIPTS / f"{name}.py", arguments, (cause, *more), words, steps)


def right_scripts(folder: str) -> list[Case]:
    """The scripts that are right; those that write do so in a folder."""
    return [
        Case(EXAMPLES / "digits.py", ("--epochs", "2", "--output", folder)),
        Case(EXAMPLES / "digits.py", ("--epochs", "2", "--output", folder, "--checkpoints", f"{folder}/checkpoints")),
        Case(EXAMPLES / "dcgan.py", ("--epochs", "2", "--output", folder)),
        Case(PROGRAMS / "train.py"),
        Case(PROGRAMS / "drifts.py", ("same",)),
        Case(PROGRAMS / "unwell.py", ("none", "0", "0", "optimizer")),
        right("right_cifar"),
        right("right_finetune"),
        right("right_language_model"),
        right("right_autoencoder"),
        right("right_unet"),
        right("right_ragged"),
        right("right_everything"),
        right("right_two_models"),
        right("right_padded"),
        right("right_noise"),
        right("right_virtual", exact=True),
        right("right_own_loop"),
        right("right_double"),
        right("right_exported"),
        right("right_but", "half"),
        right("right_but", "stack and time first"),
        right("right_but", "mean and next"),
        right("right_but", "times"),
        right("sequences", "weights"),
        right("sequences", "masked means"),
        right("accumulation", "clip after"),
        right("averaged", "all"),
        right("averaged", "chief"),
        right("averaged", "all", "many epochs", words="Not reached:"),
        right("buffers", "all"),
        right("sync_batch_norm", "24"),
    ]


MISTAKES = [
    wrong("local_mean", Cause.LOCAL_MEAN),
    wrong("local_mean", Cause.LOCAL_MEAN, "81", words="shares of 1 and 0"),
    wrong("sync_batch_norm", Cause.LOCAL_MEAN, "27"),
    wrong("sequences", Cause.LOCAL_MEAN, "token means"),
    wrong("sequences", Cause.PADDING, "padded means"),
    wrong("sequences", Cause.PADDING, "padding seen"),
    wrong("sum_loss", Cause.SUM_LOSS),
    wrong("sum_and_penalty", Cause.SUM_LOSS),
    wrong("sum_over_global", Cause.SUM_OVER_GLOBAL_BATCH),
    wrong("divided_twice", Cause.DIVIDED_TWICE),
    wrong("batch_norm", Cause.BATCH_NORM, "28"),
    wrong("batch_norm", Cause.BATCH_NORM, "26"),
    wrong("shared_stream", Cause.SHARED_RANDOM_STREAM),
    wrong("outside_scope", Cause.OUTSIDE_SCOPE),
    wrong("changed_on_one_tower", Cause.CHANGED_ON_ONE_TOWER),
    wrong("averaged", Cause.CHANGED_ON_ONE_TOWER, "chief updates"),
    Case(SCRIPTS / "averaged.py", ("chief updates", "many epochs"), words="Not reached:"),  # truly said not to be found
    wrong("buffers", Cause.BUFFER, "own"),
    wrong("accumulation", Cause.CHANGED_BEFORE_AVERAGING, "clip inside"),
    wrong("accumulation", Cause.CHANGED_BEFORE_AVERAGING, "hook"),
    wrong("step_before_averaging", Cause.STEP_BEFORE_AVERAGING),
    wrong("sharded_twice", Cause.SHARDED_TWICE),
    wrong("sharded_in_step", Cause.SHARDED_TWICE),
    wrong("other", Cause.OTHER_DATA, "full batches"),
    wrong("evaluation_padding", Cause.EVALUATION_PADDING),
    wrong("evaluation_padding", Cause.EVALUATION_DROPS, "drop", steps=1),
    wrong("learning_rate", Cause.LEARNING_RATE),
    wrong("schedule", Cause.SCHEDULE),
    wrong("two_mistakes", Cause.SUM_LOSS, more=(Cause.LEARNING_RATE,)),
    wrong("other", Cause.REPORTED_VALUE, "mean of shares"),
    wrong("other", Cause.STEPS, "epochs", steps=20),
    wrong("no_steps", Cause.NOTHING_TRAINED),
]


def judge(case: Case, towers: int) -> tuple[bool, str]:
    """Whether verify says of a case what it is to say, and what it says in short."""
    report = mirrored.verify(case.script, case.arguments, towers=towers, steps=case.steps, exact=case.exact)
    said = ", ".join(cause.value for cause in report.causes) or "the same"
    text = " ".join(str(report).split())
    good = report.causes == case.causes and case.words in text and (bool(report.rows) or bool(case.causes))
    if "Not reached:" in text:
        said += ", evaluation not reached"
    if not good:
        said += "\n" + str(report)
    return good, said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--towers", type=int, default=2)
    parser.add_argument("--only", default="", help="scripts whose names contain this")
    arguments = parser.parse_args()
    wrong_lines = 0
    with tempfile.TemporaryDirectory() as folder:
        for title, cases in (("right scripts", right_scripts(folder)), ("planted mistakes", MISTAKES)):
            chosen = [case for case in cases if arguments.only in case.name]
            print(f"{title} ({len(chosen)})")
            for case in chosen:
                started = time.monotonic()
                good, said = judge(case, arguments.towers)
                wrong_lines += not good
                print(
                    f"{'ok' if good else 'WRONG':6} {time.monotonic() - started:5.1f} s  {case.name:60} {said}",
                    flush=True,
                )
    print(f"{wrong_lines} wrong lines")
    return 1 if wrong_lines else 0


if __name__ == "__main__":
    sys.exit(main())
