"""Deaths that are harder to see than a raised exception, by each way to start a program: how soon all is over."""

from __future__ import annotations

import pathlib
import re
import sys
import tempfile
import time

from tests.faults.faults import DEATHS, Fault
from tests.faults.injection import PROGRAM
from tests.support.clusters import free_ports, tf_configs
from tests.support.programs import start_program

STARTERS = ("mirrored run", "launch", "torchrun", "TF_CONFIG")
LIMIT = 10.0  # seconds; five are promised, and machines are noisy


def play_deaths(step: int) -> int:
    """Print, for every death and every way to start, the seconds to the end and the last lines; the exit code."""
    wrong = 0
    for action in DEATHS:
        for starter in STARTERS:
            seconds, codes, errors = _play(starter, Fault(action, "forward", 1, step))
            lasts = [(error.strip().splitlines() or [""])[-1] for error in errors]
            # torchrun's own summary comes last, and the exception's own text after launch's sentence.
            where = errors if starter in ("torchrun", "launch") else lasts
            named = all(re.search(r"\b(tower 1|rank1|rank +: 1)\b", text) for text in where)
            right = named and 0.0 < seconds <= LIMIT and 0 not in codes
            wrong += not right
            print(f"{action:<13} {starter:<13} {seconds:4.1f} s  exit codes {codes}  {'' if right else 'WRONG'}")
            for last in lasts:
                print(f"      {last[:200]}")
            sys.stdout.flush()
    return 1 if wrong else 0


def _play(starter: str, fault: Fault) -> tuple[float, list[int], list[str]]:
    """The seconds from the fault to the end of all processes; their exit codes; what each has printed as errors."""
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place, "run")
        words = [*PROGRAM, str(folder), "--deadline", "60", "--fault", str(fault)]
        commands = _commands(starter, words)
        jobs = [start_program(words, env=variables) for words, variables in commands]
        errors = [job.communicate()[1] for job in jobs]
        ended = time.time()
        begun = pathlib.Path(f"{folder}.fault")
        seconds = ended - begun.stat().st_mtime if begun.exists() else 0.0
        return seconds, [job.returncode for job in jobs], errors


def _commands(starter: str, words: list[str]) -> list[tuple[list[str], dict[str, str]]]:
    """The commands of all workers, with their variables; three towers on two workers, else on one."""
    told = [*words, "--towers", "0"]
    if starter == "mirrored run":
        return [(["-m", "mirrored", "run", "--towers", "3", *told], {})]
    if starter == "launch":
        return [([*told, "--launch", "3"], {})]
    if starter == "torchrun":
        return [(["-m", "torch.distributed.run", "--nproc-per-node", "3", *told], {})]
    configs = tf_configs([f"127.0.0.1:{port}" for port in free_ports(2)])
    return [([*words, "--towers", str(2 - i)], {"TF_CONFIG": config}) for i, config in enumerate(configs)]
