"""One report of the work of all towers since the last one, and the outputs on which the chief shows it.

[Note: waiting is a comparison] A tower cannot distinguish waiting for the others from moving bytes: both are one call
that returns later. Towers therefore send each other the time that they spent in collectives, step by step. The tower
with the least time arrived last and waited for no other, so its time is the time of moving bytes. The additional time
of the others is waiting. This needs no common clock, and applies to shared memory, Gloo and NCCL.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mirrored.monitor.timeline import COLLECTIVE
from towers.collectives.agreement import announce
from towers.collectives.communicator import Communicator
from towers.launching.console import print_while_terminal_lasts
from towers.system.timeouts import clock

Array = npt.NDArray[np.float64]

PARTS = ("data", "compute", "wait", "move", "optimizer", "other")
_COMPARED = 256
"""The number of steps of a report that are compared individually. The time of all others is divided in proportion."""


@dataclasses.dataclass
class Report:
    """A monitor's report of the steps since its last report. Values that are unknown or not requested are None.

    Attributes:
        step: the number of the last of these steps, from 1.
        steps: the number of timed steps. The first step of a run is not timed, nor is a step whose operations are
            counted.
        loss: the mean of their losses over the global batch.
        examples_per_second: examples per second of all towers.
        step_ms: the duration of a step in milliseconds, without evaluations and reports.
        parts_ms: the parts of this duration in milliseconds, by the names of :data:`PARTS`, as the mean over the
            towers. They add up to ``step_ms``.
        slowest_tower: the tower for which the others waited.
        slowest_by_ms: how much later than the mean of the others it reached a step's collectives, in milliseconds.
        slowest_part: the part on which it spent more time than the others.
        learning_rate: that of the first parameters of the optimizer that stepped last.
        memory_bytes, memory_peak_bytes: the memory that torch has allocated on the fullest device; for CPU towers, the
            memory of the largest process.
        gradient_norm: the norm of all gradients with which optimizers stepped in the last step.
        flops_per_second: floating-point operations per second of all towers.
        mfu: ``flops_per_second`` as a fraction of the devices' peak.
    """

    step: int
    steps: int = 0
    loss: float | None = None
    examples_per_second: float | None = None
    step_ms: float | None = None
    parts_ms: dict[str, float] = dataclasses.field(default_factory=dict)
    slowest_tower: int | None = None
    slowest_by_ms: float | None = None
    slowest_part: str | None = None
    learning_rate: float | None = None
    memory_bytes: int | None = None
    memory_peak_bytes: int | None = None
    gradient_norm: float | None = None
    flops_per_second: float | None = None
    mfu: float | None = None

    def numbers(self) -> dict[str, float]:
        """Returns all known numbers by name, without the step. A part of the step is ``parts/data_ms`` and so on."""
        flat = {name: value for name, value in vars(self).items() if name not in ("step", "steps", "parts_ms")}
        flat |= {f"parts/{name}_ms": value for name, value in self.parts_ms.items()}
        return {name: value for name, value in flat.items() if isinstance(value, (int, float))}

    def record(self) -> dict[str, Any]:
        """Returns all known values as JSON values. A number that is not finite is None."""
        known = {name: value for name, value in vars(self).items() if value is not None and value != {}}
        return {
            name: None if value in (math.inf, -math.inf) or value != value else value for name, value in known.items()
        }

    def line(self) -> str:
        """Returns all known values in readable form."""
        said = []
        if self.loss is not None:
            said.append(f"loss {self.loss:.4g}")
        if self.examples_per_second is not None:
            said.append(f"{self.examples_per_second:,.0f} examples per second")
        if self.step_ms is not None:
            each = " + ".join(f"{name} {value:.1f}" for name, value in self.parts_ms.items())
            said.append(f"step {self.step_ms:.1f} ms = {each}")
        if self.slowest_tower is not None:
            said.append(self.slowest_line())
        if self.learning_rate is not None:
            said.append(f"lr {self.learning_rate:.3g}")
        if self.gradient_norm is not None:
            said.append(f"gradient norm {self.gradient_norm:.3g}")
        if self.memory_bytes is not None and self.memory_peak_bytes is not None:
            said.append(f"memory {self.memory_bytes / 2**30:.2f} GiB (peak {self.memory_peak_bytes / 2**30:.2f})")
        if self.flops_per_second is not None:
            mfu = f" (MFU {self.mfu:.1%})" if self.mfu is not None else ""
            scale, unit = (1e12, "T") if self.flops_per_second >= 1e12 else (1e9, "G")
            said.append(f"{self.flops_per_second / scale:,.1f} {unit}FLOP/s{mfu}")
        return "  ".join(said)

    def slowest_line(self) -> str:
        """Returns the slowest tower in readable form."""
        return f"slowest: tower {self.slowest_tower}, by {self.slowest_by_ms:.1f} ms ({self.slowest_part})"


def sums(rows: Sequence[Sequence[float]]) -> Array:
    """Returns a tower's sums of its steps: the seconds of each part, then the seconds in collectives of the last steps.

    Args:
        rows: seconds by part (:mod:`mirrored.monitor.timeline`) of each step.
    """
    table = np.array(rows, dtype=np.float64).reshape(-1, 5)
    return np.concatenate([table.sum(axis=0), table[-_COMPARED:, COLLECTIVE]])


def add_times(report: Report, towers: Array) -> None:
    """Sets the times of a report of ``report.steps`` steps.

    Args:
        towers: one row of :func:`sums` for each tower.
    """
    each, calls = towers[:, :5] / report.steps * 1e3, towers[:, 5:] * 1e3
    parts = parts_of_towers(towers, report.steps).mean(axis=0)
    report.step_ms = float(each.sum(axis=1).mean())
    report.parts_ms = dict(zip(PARTS, map(float, parts), strict=True))
    if len(towers) > 1:
        slowest = int(calls.sum(axis=1).argmin())
        others = np.delete(calls, slowest, axis=0).mean()
        more = each[slowest] - np.delete(each, slowest, axis=0).mean(axis=0)
        more[COLLECTIVE] = -np.inf
        report.slowest_tower, report.slowest_by_ms = slowest, float(others - calls[slowest].mean())
        report.slowest_part = ("data", "compute", "", "optimizer", "other")[int(more.argmax())]


def parts_of_towers(towers: Array, steps: int) -> Array:
    """Returns the milliseconds of a step by the parts of :data:`PARTS`, one row per tower.

    Args:
        towers, steps: see :func:`add_times`.
    """
    calls = towers[:, 5:]
    waited = 1 - calls.min(axis=0).sum() / np.maximum(calls.sum(axis=1), 1e-9)  # see [Note: waiting is a comparison]
    data, compute, collective, optimizer, other = towers[:, :5].T / steps * 1e3
    return np.stack([data, compute, collective * waited, collective * (1 - waited), optimizer, other], axis=1)


Output = Callable[[Report], object]


class Screen:
    """A line for each report, and a progress bar if standard error is a terminal and tqdm is installed."""

    def __init__(self, total: int | None) -> None:
        self._of = f"/{total}" if total is not None else ""
        self._bar: Any = None
        if sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None:
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit="step", dynamic_ncols=True)

    def advance(self, steps: int = 1) -> None:
        """Advances the progress bar by a number of steps."""
        if self._bar is not None:
            self._bar.update(steps)

    def __call__(self, report: Report) -> None:
        line = f"step {report.step}{self._of}  {report.line()}"
        if self._bar is not None:
            self._bar.write(line)
        else:
            print_while_terminal_lasts(line, flush=True)

    def close(self) -> None:
        """Closes the progress bar."""
        if self._bar is not None:
            self._bar.close()


def on_chief(comm: Communicator, call: str, work: Callable[[], Any]) -> Any:
    """Calls ``work`` on the chief, and returns its result there, and None on the other towers.

    Args:
        call: a description of the operation in progress, the same on all towers.

    Raises:
        ValueError, TypeError: on all towers: an OSError or a TypeError of the chief.
    """
    result = error = None
    try:
        if comm.index == 0:
            result = work()
    except (OSError, TypeError) as raised:
        error = raised
    announce(comm, call, error=error)
    return result


def json_lines(path: str | os.PathLike[str]) -> Output:
    """Returns an output that appends each report to a file, as a JSON object in one line.

    ``time`` is the number of seconds since 1970. The file's folder is created if it does not exist.
    """
    file = pathlib.Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.open("a").close()

    def write(report: Report) -> None:
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"time": clock.wall_time(), **report.record()}) + "\n")

    return write


def scalars(writer: Any) -> Output:
    """Returns an output that passes each report's numbers to torch's ``SummaryWriter``."""

    def write(report: Report) -> None:
        for name, value in report.numbers().items():
            writer.add_scalar(name if "/" in name else f"monitor/{name}", value, report.step)

    return write


def tracked(tracker: Callable[..., object]) -> Output:
    """Returns an output that passes each report's numbers to a tracker, as a dict, with ``step=``."""
    return lambda report: tracker(report.numbers(), step=report.step)
