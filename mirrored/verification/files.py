"""The files of a script: those that an earlier run of verify has left, and the lines and numbers that a run writes.

Runs that read files of earlier runs, such as backups and caches, start differently, so they cannot be compared.

[Note: which files count] Python's audit events report every file that a run opens. A file belongs to an earlier run if
it was last written between the start of the first run and the start of this run, by any program. Opening a file to
append does not count as reading. Libraries that open files without Python (HDF5) are not reported. If they read
parameters, the difference is visible before step 1. Starting each run with a copy of the files would avoid the problem.
But the files to copy are unknown, and users would not learn that their script reads files that it has written.
"""

from __future__ import annotations

import builtins
import functools
import io
import numbers
import os
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mirrored.verification.causes import Cause, Explanation, first_names
from mirrored.verification.watch import is_called_by_us

Report = Callable[[str, str | None], None]

_open: Callable[..., Any] = io.open

_OF_OTHERS = ("/proc/", "/sys/", "/dev/", os.path.expanduser("~/."))  # the last one: caches and settings of libraries


def watch(notes: str, first: float, begun: float) -> None:
    """Starts to note the files of earlier runs that this process and its forked children read.

    Args:
        notes: the file to which their paths are appended, one per line.
        first: the start of the first run, in seconds since the epoch, by the clock of files.
        begun: the start of this run.
    """
    appended: set[str] = set()

    def note(event: str, args: tuple[Any, ...]) -> None:
        if event not in ("open", "sqlite3.connect"):
            return
        flags = args[2] if event == "open" else os.O_RDWR
        try:
            path = os.path.abspath(os.fsdecode(args[0]))
            status = os.stat(path)
        except (OSError, TypeError, ValueError):  # a new file, a descriptor, or an invalid name
            return
        if not stat.S_ISREG(status.st_mode) or path.startswith(_OF_OTHERS) or path.endswith(".pyc"):
            return
        if not first < status.st_mtime <= begun and path not in appended:
            return
        if flags & os.O_TRUNC:
            appended.discard(path)
        elif flags & os.O_ACCMODE == os.O_WRONLY:
            appended.add(path)
        else:
            with _open(notes, "a", encoding="utf-8", errors="surrogateescape") as file:
                file.write(f"{path}\n")

    sys.addaudithook(note)


def not_comparable(files: Sequence[str]) -> Explanation:
    """Explains that the runs have read these files of earlier runs."""
    return Explanation(
        Cause.NOT_COMPARABLE,
        "this script cannot be compared: a run of verify read files that an earlier one had left, so the runs "
        f"did not start from the same state: {first_names(files)}",
        "the times at which the files were written",
    )


def report_output(report: Report) -> None:
    """Reports the lines that the script prints or writes into text files, and the numbers that ``torch.save`` saves.

    Args:
        report: is called with each line and its file, None for standard output. Each number at the top of a dictionary
            that is saved makes a line, with its key.
    """
    save = torch.save

    @functools.wraps(save)
    def save_(obj: Any, f: Any, *others: Any, **named: Any) -> None:
        if isinstance(obj, Mapping) and not is_called_by_us():
            _report_numbers(obj, report, os.fsdecode(f) if isinstance(f, (str, os.PathLike)) else "a file")
        save(obj, f, *others, **named)

    torch.save = save_
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = sys.__stdout__ = _TextFile(sys.stdout, lambda line: report(line, None))  # type: ignore[misc]

    def open_(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        *others: Any,
        **named: Any,
    ) -> Any:
        stream = _open(file, mode, buffering, encoding, errors, newline, *others, **named)
        text = isinstance(stream, io.TextIOWrapper) and stream.writable() and not isinstance(file, int)
        if not text or is_called_by_us(*sys.stdlib_module_names):
            return stream
        return _TextFile(stream, lambda line: report(line, os.fsdecode(file)), newline)

    builtins.open = io.open = open_  # type: ignore[assignment]


def report_trackers(report: Report, known: set[str]) -> None:
    """Reports every number that the script gives to a tracker or the curves of a figure, once it has imported these.

    Args:
        report: as for :func:`report_output`.
        known: the modules that were found by earlier calls.
    """
    for name, follow in _TRACKERS.items():
        if name not in known and (module := sys.modules.get(name)) is not None:
            known.add(name)
            follow(module, report)


def _follow_tensorboard(module: Any, report: Report) -> None:
    add = module.FileWriter.add_summary

    @functools.wraps(add)
    def add_summary(writer: Any, summary: Any, *others: Any, **named: Any) -> None:
        simple = {value.tag: value.simple_value for value in summary.value if value.HasField("simple_value")}
        _report_numbers(simple, report, "TensorBoard")
        add(writer, summary, *others, **named)

    module.FileWriter.add_summary = add_summary


def _follow_wandb(module: Any, report: Report) -> None:
    log = module.Run.log

    @functools.wraps(log)
    def log_(run: Any, data: Mapping[str, Any], *others: Any, **named: Any) -> None:
        _report_numbers(data, report, "Weights & Biases")
        log(run, data, *others, **named)

    module.Run.log = log_
    if module.run is not None:
        module.log = module.run.log


def _follow_figures(module: Any, report: Report) -> None:
    save = module.Figure.savefig

    @functools.wraps(save)
    def savefig(figure: Any, fname: Any, *others: Any, **named: Any) -> None:
        name = os.fsdecode(fname) if isinstance(fname, (str, os.PathLike)) else "a figure"
        for line in (line for axes in figure.axes for line in axes.lines):
            _report_numbers(
                {f"{line.get_label()}, point {i}:": y for i, y in enumerate(line.get_ydata())}, report, name
            )
        save(figure, fname, *others, **named)

    module.Figure.savefig = savefig


_TRACKERS = {
    "torch.utils.tensorboard.writer": _follow_tensorboard,
    "wandb": _follow_wandb,
    "matplotlib.figure": _follow_figures,
}


def _report_numbers(values: Mapping[Any, Any], report: Report, name: str) -> None:
    """Reports each number of a dictionary as a line with its key."""
    for key, value in values.items():
        number = value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value
        if isinstance(number, numbers.Real):  # also numpy's
            report(f"{key} {number}", name)


class _TextFile(io.TextIOWrapper):
    """A text file, or standard output, that reports every line that is written.

    Args:
        stream: the file, which cannot be used itself any more.
        report: is called with each line.
        newline: the argument of ``open``.
    """

    def __init__(self, stream: io.TextIOWrapper, report: Callable[[str], None], newline: str | None = None) -> None:
        mode, settings = stream.mode, (stream.encoding, stream.errors, newline, stream.line_buffering)
        super().__init__(stream.detach(), *settings)
        self.mode = mode  # type: ignore[misc]
        self._report = report
        self._begun = ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._report(line)
        return super().write(text)

    def close(self) -> None:
        if self._begun:
            self._report(self._begun)
            self._begun = ""
        super().close()
