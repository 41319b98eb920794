"""Lets towers fail in every phase of a step, lets the run go on, and compares it with an undisturbed one."""

from __future__ import annotations

import argparse
import itertools
import sys
import time

from tests.faults.deaths import play_deaths
from tests.faults.faults import ACTIONS, PHASES, Fault
from tests.faults.injection import DEADLINE, inject, undisturbed
from tests.faults.kills import random_kills

STEP = 7  # of 15, the last before the second checkpoint


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/faults", description=__doc__)
    parser.add_argument("--only", help="part of the faults' names, such as SIGKILL or :forward:")
    parser.add_argument("--kills", type=int, default=0, help="instead: so many kills at random times in one long run")
    parser.add_argument("--seed", type=int, default=0, help="of the random kills")
    parser.add_argument("--deaths", action="store_true", help="instead: other kinds of death, by each way to start")
    arguments = parser.parse_args()
    if arguments.deaths:
        return play_deaths(STEP)
    if arguments.kills:
        return random_kills(arguments.kills, arguments.seed)
    cases = [Fault(*case, STEP) for case in itertools.product(ACTIONS, PHASES, (0, 1))]
    cases = [fault for fault in cases if not arguments.only or arguments.only in str(fault)]
    print(f"{len(cases)} faults on three CPU towers, each followed by a run that goes on; first one without")
    expected = undisturbed()
    failed = 0
    started = time.monotonic()
    for number, fault in enumerate(cases, start=1):
        ended, problems = inject(fault, expected, DEADLINE + 5 if fault.action == "SIGSTOP" else 10.0)
        failed += bool(problems)
        print(
            f"{number:3} {fault!s:<36} exit code {ended.code:3} after {ended.seconds:4.1f} s  {ended.last_line[:110]}"
        )
        for problem in problems:
            print(f"      WRONG: {problem}")
        sys.stdout.flush()
    print(f"{len(cases) - failed} of {len(cases)} right, {time.monotonic() - started:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
