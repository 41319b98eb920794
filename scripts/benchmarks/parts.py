"""The parts of the time that a step of ours takes longer than one without communication.

CPU towers; for each part the mean over the steps and towers, in milliseconds:

- "copy": large gradients are copied into buckets as soon as they are there
- "pack": the small ones, all of a bucket at once
- "wait": for the other towers, since no two steps take the same time
- "average": this tower's chunk of the buckets, read from all towers and written to all
- "rest": what is left above the step without communication: hooks in Python, and caches that hold something else

Reading the clock is in the numbers, a few microseconds a part.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import command
import models
import steps
import torch

import mirrored
from towers.collectives.shared_memory.barrier import Barrier
from towers.collectives.shared_memory.regions import Regions
from towers.gradients.buckets import Bucket

PARTS = {
    "copy": (Bucket, "copy_in"),
    "pack": (Bucket, "pack"),
    "wait": (Barrier, "wait"),
    "average": (Regions, "average"),
}
"""The name of a part, and the method that does it."""


class Clock:
    """Seconds spent in methods, without those of one that another calls."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._inside: list[float] = []  # seconds of calls that a running one has made

    def watch(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """``method``, timed under ``name``."""

        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inside.append(0.0)
            started = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                took = time.perf_counter() - started
                self.seconds[name] += took - self._inside.pop()
                if self._inside:
                    self._inside[-1] += took

        return timed


def _measure(case: str, turns: int, seconds: float) -> tuple[float, float, dict[str, float]]:
    """Seconds of a step of ours, of one without communication, and of each part in one of ours."""
    work = steps.Work(case, mirrored.MirroredStrategy())
    clock, count = Clock(), 0
    ours = work.ours()
    for name, (owner, method) in PARTS.items():
        setattr(owner, method, clock.watch(name, getattr(owner, method)))

    def step() -> None:
        nonlocal count
        count += 1
        ours()

    times = steps.alternate({"ours": step, "bound": work.bare()}, turns, seconds)
    medians = (statistics.median(times[name]) for name in ("ours", "bound"))
    return *medians, {name: spent / count for name, spent in clock.seconds.items()}


def main(arguments: Sequence[str]) -> None:
    options = command.parser("parts", __doc__, turns=9, seconds=0.5, cases=models.CASES).parse_args(arguments)
    print(f"torch {torch.version.__version__}; {options.towers} towers; SGD with momentum; milliseconds a step")
    print(f"{'':<16}{'ours':>9}{'bound':>9}" + "".join(f"{name:>9}" for name in (*PARTS, "rest")))
    for case in options.cases:
        timing = (case, options.turns, options.seconds)
        towers = mirrored.launch(_measure, timing, devices=command.cpus(options.towers))
        ours, bound = (statistics.mean(tower[which] for tower in towers) for which in (0, 1))
        parts = {name: statistics.mean(tower[2][name] for tower in towers) for name in PARTS}
        row = [ours, bound, *parts.values(), ours - bound - sum(parts.values())]
        print(f"{case:<16}" + "".join(f"{seconds * 1e3:>9.2f}" for seconds in row), flush=True)
