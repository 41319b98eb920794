"""What it costs to see that towers are still mirror images, and to watch gradients for NaN.

CPU towers take steps in turns: without checks, with a regular one before every step, and with
``nonfinite_gradients="raise"``. A check's time is what this tower's thread computes, without waiting for the others; by
default there is one in every 250th run, so a step pays a 250th of it. Ratios are medians over the turns, each of which
compares neighbours in time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import command
import models
import plain
import steps
import torch
from steps import Times

import mirrored
from mirrored.attached.mirror_check import MirrorCheck
from mirrored.strategy.engine import MIRROR_CHECK_INTERVAL


def _measure(case: str, turns: int, seconds: float, optimizer: str, implementation: str) -> tuple[Times, list[float]]:
    """Seconds per step of all variants, and seconds of this thread for each check."""

    def work_of(interval: int | None, action: str) -> steps.Work:
        strategy = steps.strategy(implementation, mirror_check_interval=interval, nonfinite_gradients=action)
        return steps.Work(case, strategy, optimizer)

    work = work_of(MIRROR_CHECK_INTERVAL, "ignore")
    step, check = work.ours(), work.strategy.engine.attached(MirrorCheck)
    assert check is not None
    checks: list[float] = []

    def step_and_check() -> None:
        step()
        started = time.thread_time()
        check.come_to((len(checks) + 1) * MIRROR_CHECK_INTERVAL)
        checks.append(time.thread_time() - started)

    never, watched = (work_of(None, action).ours() for action in ("ignore", "raise"))
    times = steps.alternate({"never": never, "checked": step_and_check, "watched": watched}, turns, seconds)
    return times, checks


def _ratio(times: Times, name: str) -> str:
    ratio = steps.ratio_of(times[name], times["never"])
    return f"{ratio.value:>15.3f}{ratio.low:>8.3f}{ratio.high:>8.3f}"


def main(arguments: Sequence[str]) -> None:
    parser = command.parser("mirror", __doc__, turns=11, seconds=0.5, cases=models.CASES, implementation=True)
    parser.add_argument("--optimizer", default="sgd", choices=plain.OPTIMIZERS)
    options = parser.parse_args(arguments)
    print(f"torch {torch.version.__version__}; {options.optimizer}; medians of {options.turns} alternations")
    print(
        f"{'':<16}{'step, ms':>10}{'check, µs':>11}{'µs a step':>11}{'of a step':>11}"
        f"{'checked ÷ not':>15}{'25 %':>8}{'75 %':>8}{'watched ÷ not':>15}{'25 %':>8}{'75 %':>8}"
    )
    for case in options.cases:
        how = (case, options.turns, options.seconds, options.optimizer, options.implementation)
        times, checks = mirrored.launch(_measure, how, devices=command.cpus(options.towers))[0]
        step, check = statistics.median(times["never"]), statistics.median(checks)
        share = check / MIRROR_CHECK_INTERVAL
        print(
            f"{case:<16}{step * 1e3:>10.2f}{check * 1e6:>11.0f}{share * 1e6:>11.1f}{share / step * 100:>10.2f}%"
            f"{_ratio(times, 'checked')}{_ratio(times, 'watched')}",
            flush=True,
        )
