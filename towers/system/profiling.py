"""Named ranges in traces of ``torch.profiler``: ``mirrored::run``, ``mirrored::data`` and so on.

[Note: ranges cost nothing unprofiled] ``torch.profiler.record_function`` takes 6 µs whether or not a profiler runs, so
a range is only made where a profiler records this thread. Without one, :func:`range_` costs 0.2 µs and a pair of
:func:`begin_range` and :func:`end_range` 0.1 µs.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch.profiler import record_function

from towers.system.torch_private import profiler_runs

_NO_RANGE = contextlib.nullcontext()


def range_(name: str) -> contextlib.AbstractContextManager[Any]:
    """A context manager: what runs inside shows as ``name`` in the trace of a running profiler.

    Args:
        name: ``"mirrored::"`` and the phase of the step, such as ``"mirrored::run"``.
    """
    # see [Note: ranges cost nothing unprofiled]
    return record_function(name) if profiler_runs() else _NO_RANGE


def begin_range(name: str) -> record_function | None:
    """Begin a range that does not end in the same block; None when no profiler runs.

    Returns:
        What :func:`end_range` ends, in the same thread; ranges of one thread end in the reverse order of their begin.
    """
    if not profiler_runs():
        return None
    record = record_function(name)
    record.__enter__()
    return record


def end_range(record: record_function | None) -> None:
    """End what :func:`begin_range` has begun; nothing for None."""
    if record is not None:
        record.__exit__(None, None, None)
