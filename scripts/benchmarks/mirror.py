"""What it costs to see that towers are still mirror images, and to watch gradients for NaN.

CPU towers take steps in turns: without checks, with a regular one before every step, and with
``nonfinite_gradients="raise"``. A check's time is what this tower's thread computes, without waiting for the others; by
default there is one in every 250th run, so a step pays a 250th of it. Ratios are medians over the turns, each of which
compares neighbours in time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import models
import plain
import ratios
import steps
import torch
from steps import Times

import mirrored
from mirrored.attached.mirror_check import MirrorCheck
from mirrored.strategy.options import MIRROR_CHECK_INTERVAL


def _measure(case: str, turns: int, seconds: float, optimizer: str, implementation: str) -> tuple[Times, list[float]]:
    """Seconds per step of all variants, and seconds of this thread for each check."""
    communication = mirrored.CommunicationOptions(implementation=implementation)
    batch = models.CASES[case]

    def step_of(interval: int | None, action: str) -> tuple[mirrored.Strategy, plain.Step]:
        strategy = mirrored.MirroredStrategy(
            communication=communication, mirror_check_interval=interval, nonfinite_gradients=action
        )
        torch.manual_seed(0)
        x, y = models.batch(case, batch // strategy.num_replicas_in_sync, seed=strategy.topology.index)
        return strategy, steps.ours(strategy, case, x, y, batch, plain.OPTIMIZERS[optimizer])

    strategy, step = step_of(MIRROR_CHECK_INTERVAL, "ignore")
    check = strategy.engine.attached(MirrorCheck)
    assert check is not None
    checks: list[float] = []

    def step_and_check() -> None:
        step()
        started = time.thread_time()
        check.come_to((len(checks) + 1) * MIRROR_CHECK_INTERVAL)
        checks.append(time.thread_time() - started)

    variants = {"never": step_of(None, "ignore")[1], "checked": step_and_check, "watched": step_of(None, "raise")[1]}
    times = steps.alternate(variants, turns, seconds, together=True)
    return times, checks


def _ratio(times: Times, name: str) -> str:
    found = ratios.compare(times[name], times["never"])
    return f"{found.value:>15.3f}{found.low:>8.3f}{found.high:>8.3f}"


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench mirror", description=__doc__)
    parser.add_argument("--cases", default=",".join(models.CASES), help="comma-separated: " + ", ".join(models.CASES))
    parser.add_argument("--towers", type=int, default=2)
    parser.add_argument("--implementation", default="auto", help="auto, gloo, …")
    parser.add_argument("--optimizer", default="sgd", choices=plain.OPTIMIZERS)
    parser.add_argument("--turns", type=int, default=11, help="alternations")
    parser.add_argument("--seconds", type=float, default=0.5, help="length of one variant's turn")
    options = parser.parse_args(arguments)
    print(f"torch {torch.version.__version__}; {options.optimizer}; medians of {options.turns} alternations")
    print(
        f"{'':<16}{'step, ms':>10}{'check, µs':>11}{'µs a step':>11}{'of a step':>11}"
        f"{'checked ÷ not':>15}{'25 %':>8}{'75 %':>8}{'watched ÷ not':>15}{'25 %':>8}{'75 %':>8}"
    )
    names = [f"cpu:{i}" for i in range(options.towers)]
    for case in options.cases.split(","):
        arguments_ = (case, options.turns, options.seconds, options.optimizer, options.implementation)
        times, checks = mirrored.launch(_measure, arguments_, devices=names)[0]
        step, check = statistics.median(times["never"]), statistics.median(checks)
        share = check / MIRROR_CHECK_INTERVAL
        print(
            f"{case:<16}{step * 1e3:>10.2f}{check * 1e6:>11.0f}{share * 1e6:>11.1f}{share / step * 100:>10.2f}%"
            f"{_ratio(times, 'checked')}{_ratio(times, 'watched')}",
            flush=True,
        )
