"""Where a chief's reports go: a progress bar or plain lines, a file of JSON lines, TensorBoard, other trackers."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from mirrored.monitor.report import Report
from towers.launching.console import print_while_terminal_lasts
from towers.system.timeouts import clock

Output = Callable[[Report], object]


class Screen:
    """A progress bar where standard error is a terminal and tqdm is installed; a line for each report in any case."""

    def __init__(self, total: int | None) -> None:
        self._of = f"/{total}" if total is not None else ""
        self._bar: Any = None
        if sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None:
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit="step", dynamic_ncols=True)

    def advance(self, steps: int = 1) -> None:
        """So many steps are over."""
        if self._bar is not None:
            self._bar.update(steps)

    def __call__(self, report: Report) -> None:
        line = f"step {report.step}{self._of}  {report.line()}"
        if self._bar is not None:
            self._bar.write(line)
        else:
            print_while_terminal_lasts(line, flush=True)

    def close(self) -> None:
        """There are no more steps."""
        if self._bar is not None:
            self._bar.close()


def json_lines(path: str | os.PathLike[str]) -> Output:
    """Appends each report to a file, as a JSON object in a line of its own, with the seconds since 1970 as ``time``.

    Its folder is made when it is missing.
    """
    file = pathlib.Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)

    def write(report: Report) -> None:
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"time": clock.wall_time(), **report.record()}) + "\n")

    return write


def scalars(writer: Any) -> Output:
    """Gives each report's numbers to torch's ``SummaryWriter``."""

    def write(report: Report) -> None:
        for name, value in report.numbers().items():
            writer.add_scalar(name if "/" in name else f"monitor/{name}", value, report.step)

    return write


def tracked(tracker: Callable[..., object]) -> Output:
    """Gives each report's numbers to a tracker, as a dict, with ``step=``."""
    return lambda report: tracker(report.numbers(), step=report.step)
