"""Started by the tests: a script, with its arguments, in two towers of ``mirrored.launch``."""

import runpy
import sys

import mirrored


def run(program: str) -> None:
    runpy.run_path(program)


if __name__ == "__main__":
    mirrored.launch(run, (sys.argv.pop(1),))
