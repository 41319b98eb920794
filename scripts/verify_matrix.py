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
from tests.verification.ports.mistakes import MISTAKES, PORTS, Mistake, is_named, text_of
from tests.verification.scripts import PROGRAMS, SCRIPTS, script_in

EXAMPLES = PROGRAMS.parents[2] / "examples"


@dataclasses.dataclass(frozen=True)
class Case:
    """A script, and what is to be said of it: nothing but "the same", or some causes, and some words."""

    name: str
    script: pathlib.Path
    arguments: tuple[str, ...] = ()
    causes: tuple[Cause, ...] = ()
    words: str = ""
    steps: int = 5
    exact: bool = False
    mistake: Mistake | None = None


def cases(folder: pathlib.Path) -> list[Case]:
    """All scripts, in ``folder`` those that are made, and what those that write do so for."""
    output = ("--epochs", "2", "--output", str(folder))
    programs: list[tuple[pathlib.Path, tuple[str, ...], tuple[Cause, ...]]] = [
        (EXAMPLES / "digits.py", output, ()),
        (EXAMPLES / "digits.py", (*output, "--checkpoints", f"{folder}/checkpoints"), ()),
        (EXAMPLES / "dcgan.py", output, ()),
        (EXAMPLES / "autoencoder.py", output, ()),
        (EXAMPLES / "unet.py", output, ()),
        (EXAMPLES / "lstm.py", (*output, "--files", "12"), ()),
        (EXAMPLES / "gpt.py", (*output, "--files", "12"), ()),
        (EXAMPLES / "word2vec.py", (*output, "--files", "12"), ()),
        (EXAMPLES / "photographs.py", (*output, "--virtual-towers", "2"), ()),
        (EXAMPLES / "fine_tuning.py", output, ()),
        (PROGRAMS.parent / "train.py", (), ()),  # its steps are written out
        (PROGRAMS.parent / "drifts.py", ("same",), ()),
        (PROGRAMS.parent / "unwell.py", ("none", "0", "0", "optimizer"), ()),
        *((path, (), ()) for path in sorted(PROGRAMS.glob("right_*.py")) if path.stem != "right_but"),
        *((PROGRAMS / "right_but.py", (kind,), ()) for kind in ("half", "stack and time first", "mean and next")),
        (PROGRAMS / "right_but.py", ("times",), ()),
        (PROGRAMS / "sequences.py", ("weights",), ()),
        (PROGRAMS / "sequences.py", ("masked means",), ()),
        (PROGRAMS / "sequences.py", ("token means",), (Cause.LOCAL_MEAN,)),
        (PROGRAMS / "sequences.py", ("padded means",), (Cause.PADDING,)),
        (PROGRAMS / "sequences.py", ("padding seen",), (Cause.PADDING,)),
    ]
    chosen = []
    for path, arguments, causes in programs:
        words = [path.stem, *(word for word in arguments if not word.startswith("/"))]
        chosen.append(Case(" ".join(words), path, arguments, causes))
    for name, script in SCRIPTS.items():
        path = script_in(folder, name)
        chosen.append(Case(name, path, (), script.causes, script.words, script.steps, script.exact))
    ports = [path for path in sorted(PORTS.glob("*.py")) if path.stem not in ("__init__", "mistakes")]
    chosen += [Case(f"port {path.stem}", path) for path in ports]
    for number, mistake in enumerate(MISTAKES):
        path = folder / f"{mistake.port}{number}.py"
        path.write_text(text_of(mistake))
        chosen.append(Case(f"port {path.stem}", path, causes=mistake.causes, mistake=mistake))
    return chosen


def judge(case: Case, towers: int) -> tuple[bool, str]:
    """Whether verify says of a case what it is to say, and what it says in short."""
    report = mirrored.verify(case.script, case.arguments, towers=towers, steps=case.steps, exact=case.exact)
    verdict = ", ".join(cause.value for cause in report.causes) or "the same"
    text = " ".join(str(report).split())
    if case.mistake is not None:
        good = is_named(case.mistake, report.causes, text)
        return good, verdict if good else f"{verdict}\n{report}"
    good = report.causes == case.causes and case.words in text and report.equal == (not case.causes)
    if "Not reached:" in text:
        verdict += ", evaluation not reached"
    return good, verdict if good else f"{verdict}\n{report}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--towers", type=int, default=2)
    parser.add_argument("--only", default="", help="scripts whose names contain this")
    arguments = parser.parse_args()
    wrong_lines = 0
    with tempfile.TemporaryDirectory() as folder:
        chosen = [case for case in cases(pathlib.Path(folder)) if arguments.only in case.name]
        for case in sorted(chosen, key=lambda case: bool(case.causes)):
            started = time.monotonic()
            good, verdict = judge(case, arguments.towers)
            wrong_lines += not good
            took = time.monotonic() - started
            print(f"{'ok' if good else 'WRONG':6} {took:5.1f} s  {case.name:60} {verdict}", flush=True)
    print(f"{wrong_lines} wrong lines")
    return 1 if wrong_lines else 0


if __name__ == "__main__":
    sys.exit(main())
