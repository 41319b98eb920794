"""One trace of all towers for Perfetto, with the time of each tower: ``with strategy.trace("trace.json"):``.

Each tower profiles itself with ``torch.profiler``, converts its events to tower 0's clock and sends them to all towers,
in compressed form. The chief writes one file. The summary uses the same stamps as the monitor (:mod:`.timeline`).

[Note: one clock] Towers of one host share its clock. For a tower of another host, a barrier bounds the difference of
the clocks. Tower 0 starts the barrier before this tower leaves it, and this tower starts it before tower 0 leaves it.
Of many barriers the narrowest bounds count, and their midpoint is off by at most half their distance. The difference is
measured at both ends of a trace, and is interpolated linearly between them.

[Note: a traced step] A traced step lasts from the end of the previous training step to its own end, so that it contains
the loading of its batch. Runs that evaluate belong to the step that follows them.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import gzip
import json
import os
import pathlib
import socket
import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.profiler import profile, record_function

from mirrored.context import refuse_inside_run
from mirrored.events import Events
from mirrored.monitor.report import PARTS, Array, Report, add_times, on_chief, parts_of_towers, sums
from mirrored.monitor.timeline import Timeline
from towers.collectives.agreement import announce_with_body
from towers.collectives.communicator import Communicator
from towers.launching.console import print_while_terminal_lasts
from towers.system.machine import host_identity
from towers.system.timeouts import clock
from towers.system.torch_private import profiler_runs

_BARRIERS = 20


@dataclasses.dataclass
class Trace:
    """The contents of a trace. It is filled when the trace is written, and is the same on all towers.

    Attributes:
        path: its file, which the chief writes.
        towers: the towers' names, with device and host.
        parts_ms: for each tower, the parts of a step in milliseconds, by the names of ``Report.parts_ms``.
        report: the same over all towers, with the slowest one. ``step`` is the last of its ``steps`` traced steps.
        clock_error_ms: the largest remaining difference between the clocks of two hosts; 0 on one host.
    """

    path: str
    towers: list[str] = dataclasses.field(default_factory=list)
    parts_ms: list[dict[str, float]] = dataclasses.field(default_factory=list)
    report: Report = dataclasses.field(default_factory=lambda: Report(0))
    clock_error_ms: float = 0.0

    def __str__(self) -> str:
        last, count = self.report.step, self.report.steps
        lines = [f"trace of {self._steps(last, count)}: {self.path} (open it at https://ui.perfetto.dev)"]
        if count:
            width = max(map(len, self.towers))
            lines.append(f"{'ms of a step':{width}}" + "".join(f"{name:>11}" for name in (*PARTS, "all")))
            for name, parts in zip(self.towers, self.parts_ms, strict=True):
                row = *parts.values(), sum(parts.values())
                lines.append(f"{name:{width}}" + "".join(f"{ms:11.2f}" for ms in row))
        if self.report.slowest_tower is not None:
            lines.append(self.report.slowest_line())
        if self.clock_error_ms:
            lines.append(f"the hosts' clocks are aligned to {self.clock_error_ms:.3f} ms")
        return "\n".join(lines)

    @staticmethod
    def _steps(last: int, count: int) -> str:
        return f"steps {last - count + 1} to {last}" if count > 1 else f"step {last}" if count else "no step"


class Tracing:
    """Traces the towers between :meth:`start` and :meth:`stop`, which all towers must call.

    Args:
        comm, events: the strategy's.
        path: the file, which is compressed if its name ends in ``.gz``.
        profiler: arguments of ``torch.profiler.profile``.
    """

    def __init__(self, comm: Communicator, events: Events, path: str | os.PathLike[str], **profiler: Any) -> None:
        self.trace = Trace(os.fspath(path))
        self._comm = comm
        self._events = events
        self._profiler = profile(**profiler)
        self._call = f"strategy.trace({self.trace.path!r})"
        self._step = contextlib.ExitStack()  # the range of the current step
        self._undo = contextlib.ExitStack()  # ends what was started
        self._last = 0
        self._clocks: list[tuple[float, float]] = []  # a time, and by how much tower 0's clock is ahead: seconds
        self._origin = 0  # the zero of the trace's times, in seconds since 1970

    def start(self) -> None:
        """Starts the trace, and raises the errors of :meth:`mirrored.Strategy.trace`."""
        refuse_inside_run(self._call)
        if profiler_runs():
            raise RuntimeError(f"{self._call} was called while another trace or profiler runs: end that one first")
        on_chief(self._comm, self._call, self._try_file)
        self._compare_clocks()
        self._timeline = Timeline(self._comm.health, self._events, self._comm.device)
        self._undo.callback(self._timeline.stop)
        self._profiler.start()
        self._undo.callback(self._profiler.stop)
        self._undo.callback(self._step.close)
        self._events.end_step.append(self._end_step)
        self._undo.callback(self._events.end_step.remove, self._end_step)
        self._begin_step()

    def _try_file(self) -> None:
        path = pathlib.Path(self.trace.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()

    def _begin_step(self) -> None:
        self._step.enter_context(record_function(_step_name(self._comm.health.step + 1)))

    def _end_step(self) -> None:
        self._step.close()
        self._timeline.end_step()
        self._last = self._comm.health.step
        self._begin_step()

    def abandon(self) -> None:
        """Ends the trace without a file and without the other towers. It does nothing if no trace is running."""
        self._undo.close()

    def stop(self) -> Trace:
        """Ends the trace, and writes the file.

        Raises:
            ValueError: on all towers: the chief cannot write the file.
        """
        self.abandon()
        rows = self._timeline.take()
        self._compare_clocks()
        name = f"tower {self._comm.index} ({self._comm.device}, {socket.gethostname()})"
        body = zlib.compress(json.dumps(self._own_events(name), separators=(",", ":")).encode(), 1)
        details = [name, len(rows), self._last, sums(rows).tolist(), self.trace.clock_error_ms]
        replies = announce_with_body(self._comm, f"the end of {self._call}", details, body)
        trace = self.trace
        trace.towers = [reply.details[0] for reply in replies]
        trace.clock_error_ms = max(reply.details[4] for reply in replies)
        trace.report = Report(self._last, len(rows))
        if rows:
            towers = np.array([reply.details[3] for reply in replies])
            add_times(trace.report, towers)
            each = parts_of_towers(towers, len(rows))
            trace.parts_ms = [dict(zip(PARTS, map(float, parts), strict=True)) for parts in each]
        on_chief(self._comm, f"{self._call}, its file", lambda: _write(trace.path, [r.body for r in replies]))
        return trace

    # -- the clock of tower 0 ----------------------------------------------------------------------------

    def _compare_clocks(self) -> None:
        """Measures by how much tower 0's clock is ahead of this host's now; see [Note: one clock]."""
        with self._comm.health.at(self._call):
            stamps = []
            for _ in range(_BARRIERS):
                begin = clock.wall_time()
                self._comm.barrier()
                stamps.append((begin, clock.wall_time()))
            hosts, rows = zip(*self._comm.all_gather_json([host_identity(), stamps]), strict=True)
        self._origin = self._origin or int(rows[0][0][0])
        ahead, error = 0.0, 0.0
        if hosts[self._comm.index] != hosts[0]:
            same = np.array([host == hosts[self._comm.index] for host in hosts])
            ahead, error = difference_of_clocks(np.array(rows), same)
        self._clocks.append((clock.wall_time() - self._origin, ahead))
        self.trace.clock_error_ms = max(self.trace.clock_error_ms, error * 1e3)

    def _own_events(self, name: str) -> list[dict[str, Any]]:
        """Returns this tower's events, on tower 0's clock, with process numbers that no other tower uses."""
        with tempfile.TemporaryDirectory(prefix="mirrored-trace-") as folder:
            file = pathlib.Path(folder, "trace.json")
            self._profiler.export_chrome_trace(str(file))
            recorded = json.loads(file.read_text(errors="replace"), strict=False)
        base = (recorded.get("baseTimeNanoseconds", 0) - self._origin * 10**9) / 1e3
        unfinished = _step_name(self._last + 1)
        found = [e for e in recorded["traceEvents"] if isinstance(e["pid"], int) and e["name"] != unfinished]
        pids = dict.fromkeys([os.getpid(), *(event["pid"] for event in found if event["ph"] != "M")])
        numbers = {pid: 1000 * (self._comm.index + 1) + count for count, pid in enumerate(pids)}
        events: list[dict[str, Any]] = []
        for pid, number in numbers.items():
            label = name if pid == os.getpid() else f"{name}, device {pid}"
            events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": label}})
            events.append({"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}})
        for event in found:
            if event["pid"] not in numbers or event["name"].startswith("process_"):
                continue
            event["pid"] = numbers[event["pid"]]
            if event["ph"] == "M":
                event.pop("ts", None)
            else:
                begin, end = by_clock_of_tower_0(base + event["ts"], event.get("dur", 0.0), self._clocks)
                event["ts"] = begin
                if "dur" in event:
                    event["dur"] = round(end - begin, 3)
            if isinstance(event.get("id"), int):  # the id of an arrow
                event["id"] += self._comm.index << 32
            events.append(event)
        return events


class TracedSteps(Tracing):
    """Traces the training steps that ``mirrored trace`` requests, and ends the script after them.

    Args:
        comm, events: the strategy's.
        wanted: the first step, the step after the last, and the file, separated by colons. Steps count from 1 at the
            start of the script.
    """

    def __init__(self, comm: Communicator, events: Events, wanted: str) -> None:
        first, end, path = wanted.split(":", 2)
        super().__init__(comm, events, path)
        self._first, self._end = int(first), int(end)
        self._count = 0
        events.end_step.append(self._count_step)
        atexit.register(self._explain)

    def _count_step(self) -> None:
        self._count += 1
        if self._count == self._first - 1:
            self.start()
        elif self._count == self._end - 1:
            atexit.unregister(self._explain)
            trace = self.stop()
            self._events.end_step.remove(self._count_step)
            if self._comm.index == 0:
                print_while_terminal_lasts(trace)
            raise SystemExit(0)

    def start(self) -> None:
        """Starts the trace. The range of a step ends before steps are counted."""
        self._events.end_step.remove(self._count_step)
        super().start()
        self._events.end_step.append(self._count_step)

    def _explain(self) -> None:
        self.abandon()  # a profiler that runs to the end of the process crashes it (torch 2.13)
        if self._comm.index == 0:
            steps = f"steps {self._first} to {self._end - 1}"
            text = f"the script ended after {self._count} training steps, so {steps} have not been traced"
            print(f"mirrored trace: {text}", file=sys.stderr)


def difference_of_clocks(stamps: Array, same: npt.NDArray[np.bool_]) -> tuple[float, float]:
    """Returns by how many seconds tower 0's clock is ahead of a host's, and the error of this number in seconds.

    Args:
        stamps: times before and after barriers, by each tower's clock, in seconds: shape (towers, barriers, 2).
        same: which towers are on that host.
    """
    begins, ends = stamps[..., 0], stamps[..., 1]
    low = float((begins[0] - ends[same]).max())
    high = float((ends[0] - begins[same]).min())
    return (low + high) / 2, (high - low) / 2


def by_clock_of_tower_0(begin: float, duration: float, clocks: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns the start and end of an event in µs. Both ends are converted, so nested events stay nested.

    Args:
        begin, duration: the event by this host's clock, in µs.
        clocks: the times of the comparisons, and by how much tower 0's clock was ahead then: seconds.
    """
    times = np.array([begin, begin + duration])
    ahead = np.interp(times / 1e6, [at for at, _ in clocks], [difference for _, difference in clocks])
    first, last = np.round(times + 1e6 * ahead, 3)
    return float(first), float(last)


def _step_name(step: int) -> str:
    return f"mirrored::step {step}"


def _write(path: str, compressed: Sequence[bytes]) -> None:
    """Writes the events of all towers as one JSON object."""
    lists = [zlib.decompress(each)[1:-1] for each in compressed]
    with gzip.open(path, "wb") if path.endswith(".gz") else open(path, "wb") as file:
        file.write(b'{"displayTimeUnit": "ms", "traceEvents": [\n' + b",\n".join(lists) + b"\n]}\n")


@contextlib.contextmanager
def trace(
    comm: Communicator, events: Events, path: str | os.PathLike[str], *, show: bool = True, **profiler: Any
) -> Iterator[Trace]:
    """Traces the code inside the context; see :meth:`mirrored.Strategy.trace`."""
    tracing = Tracing(comm, events, path, **profiler)
    tracing.start()
    try:
        yield tracing.trace
    except BaseException:
        tracing.abandon()  # towers may be out of step
        raise
    tracing.stop()
    if show and comm.index == 0:
        print_while_terminal_lasts(tracing.trace)
