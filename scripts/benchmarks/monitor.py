"""What a monitor costs, and whether what it says is so.

CPU towers take steps in turns, with a monitor that reports every 50th step and without one; the ratio is the median
over the turns, each of which compares neighbours in time. "Own work" is what the chief's thread computes for the
monitor, reports included, without waiting; other programs do not disturb it much. Then the same steps with a monitor
alone, beside a clock around the loop: as they are; with tower 1 sleeping in each step; and with a batch that each
tower's loader sleeps for.
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
from mirrored.events import Events
from mirrored.monitor import Report
from mirrored.monitor.timeline import Timeline
from towers.health import status

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


def _seconds_of_a_stamp() -> float:
    """Of this thread."""
    health = status.Health()
    timeline = Timeline(health, Events(health), torch.device("cpu"))
    started = time.thread_time()
    for _ in range(10_000):
        timeline.enter(status.IN_STEP)
        timeline.enter(status.BACKWARD)
    timeline.take()
    return (time.thread_time() - started) / 20_000


def _measure(case: str, turns: int, seconds: float, implementation: str) -> tuple[steps.Times, float, Any]:
    """Seconds per step with a monitor and without, and of its own work; then what the clock and the monitor say."""
    plain = steps.Work(case, steps.strategy(implementation))
    work = steps.Work(case, steps.strategy(implementation))
    strategy, step = work.strategy, work.ours()
    phases: list[str] = []
    spent: list[float] = []
    with mirrored.Monitor(strategy, every=50, show=False) as monitor:
        strategy.health.followers.append(phases.append)

        def watched_step() -> None:
            loss = step()
            started = time.thread_time()
            monitor.step(loss)
            spent.append(time.thread_time() - started)

        times = steps.alternate({"without": plain.ours(), "with": watched_step}, turns, seconds)
        strategy.health.followers.remove(phases.append)
    own = (sum(spent) + len(phases) * _seconds_of_a_stamp()) / len(spent)

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
    return times, own, said


def main(arguments: Sequence[str]) -> None:
    parser = command.parser("monitor", __doc__, turns=31, seconds=0.5, cases=models.CASES, implementation=True)
    options = parser.parse_args(arguments)
    for case in options.cases:
        how = (case, options.turns, options.seconds, options.implementation)
        times, own, said = mirrored.launch(_measure, how, devices=command.cpus(options.towers))[0]
        ratio, step = steps.ratio_of(times["with"], times["without"]), statistics.median(times["without"])
        print(
            f"{case}: a step of {step * 1e3:.2f} ms; with a monitor ÷ without {ratio.value:.4f} (quartiles "
            f"{ratio.low:.4f}, {ratio.high:.4f}); own work {own * 1e6:.0f} µs a step, {own / step:.2%}"
        )
        for name, (seconds, report) in said.items():
            parts = sum(report.parts_ms.values()) / seconds / 1e3
            print(
                f"  {name}: {seconds * 1e3:.2f} ms by the clock, parts ÷ clock {parts:.4f}; {report.line()}", flush=True
            )
