"""The outputs of a chief's reports: a progress bar or lines, a file of JSON lines, TensorBoard, other trackers."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from mirrored.monitor.report import Report
from towers.collectives.agreement import announce
from towers.collectives.communicator import Communicator
from towers.launching.console import print_while_terminal_lasts
from towers.system.timeouts import clock

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
