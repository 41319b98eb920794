"""What a monitor costs, and whether what it says is so.

CPU towers take steps in turns, with a monitor that reports every 50th step and without one; the ratio is the median
over the turns, each of which compares neighbours in time. Then the same steps with a monitor alone, beside a clock
around the loop: as they are; with tower 1 sleeping in each step; and with a batch that each tower's loader sleeps for.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import command
import models
import steps
import torch
from torch.utils.data import IterableDataset

import mirrored
from mirrored.monitor import Report

SLEEP = 0.030  # seconds
STEPS = 100


class _SlowBatches(IterableDataset[torch.Tensor]):
    """Batches, each of which takes a while."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(STEPS + 1):
            time.sleep(SLEEP)
            yield torch.zeros(1)


def _watched(strategy: mirrored.Strategy, step: Callable[[], Any], batches: Any) -> tuple[float, Report]:
    """Seconds of a step by the clock, and the report of all steps but the first."""
    with mirrored.Monitor(strategy, every=10 * STEPS, show=False) as monitor:
        started = time.perf_counter()
        for number, _ in enumerate(batches):
            monitor.step(step())
            if number == 0:
                started = time.perf_counter()
            elif number == STEPS:
                break
        seconds = (time.perf_counter() - started) / STEPS
    assert monitor.report is not None
    return seconds, monitor.report


def _measure(case: str, turns: int, seconds: float, implementation: str) -> tuple[steps.Times, Any]:
    """Seconds per step with a monitor and without; then what the clock and the monitor say of each kind of step."""
    plain = steps.Work(case, steps.strategy(implementation))
    work = steps.Work(case, steps.strategy(implementation))
    strategy, step = work.strategy, work.ours()
    with mirrored.Monitor(strategy, every=50, show=False) as monitor:
        times = steps.alternate({"without": plain.ours(), "with": lambda: monitor.step(step())}, turns, seconds)

    def slow_step() -> Any:
        if strategy.topology.index == 1:
            time.sleep(SLEEP)
        return step()

    loader = strategy.distribute_datasets_from_function(lambda context: _SlowBatches())
    said = {
        "as they are": _watched(strategy, step, range(STEPS + 1)),
        "tower 1 sleeps": _watched(strategy, slow_step, range(STEPS + 1)),
        "loaders sleep": _watched(strategy, step, loader),
    }
    return times, said


def main(arguments: Sequence[str]) -> None:
    parser = command.parser("monitor", __doc__, turns=31, seconds=0.5, cases=models.CASES, implementation=True)
    options = parser.parse_args(arguments)
    for case in options.cases:
        how = (case, options.turns, options.seconds, options.implementation)
        times, said = mirrored.launch(_measure, how, devices=command.cpus(options.towers))[0]
        ratio = steps.ratio_of(times["with"], times["without"])
        print(
            f"{case}: a step of {statistics.median(times['without']) * 1e3:.2f} ms; with a monitor ÷ without "
            f"{ratio.value:.4f} (quartiles {ratio.low:.4f}, {ratio.high:.4f})"
        )
        for name, (seconds, report) in said.items():
            parts = sum(report.parts_ms.values()) / seconds / 1e3
            print(
                f"  {name}: {seconds * 1e3:.2f} ms by the clock, parts ÷ clock {parts:.4f}; {report.line()}", flush=True
            )
