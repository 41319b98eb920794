"""What a strategy writes down of a training: summaries and traces. Annexes write them."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from mirrored.events import Events
from mirrored.strategy.gradients import Gradients

if TYPE_CHECKING:
    from mirrored.monitor.tracing import Trace

TRACED_STEPS = "MIRRORED_TRACE"
"""Environment variable with the steps that ``mirrored trace`` wants, and the file: ``10:13:/home/me/trace.json``."""


class Records(Gradients):
    """The methods of a strategy that write a training down; see :class:`mirrored.Strategy`."""

    events: Events
    is_chief: bool

    def summary_writer(self, folder: str | os.PathLike[str], **options: Any) -> Any:
        """torch's ``SummaryWriter``, of tensorboard, on the chief; elsewhere an object whose methods do nothing."""
        from mirrored.summaries import summary_writer

        return summary_writer(self.is_chief, folder, **options)

    def trace(
        self, path: str | os.PathLike[str], *, show: bool = True, **profiler: Any
    ) -> AbstractContextManager[Trace]:
        """``with strategy.trace("trace.json"):`` profiles all towers; the chief writes one file for Perfetto.

        All towers enter and leave it, outside of ``run``. It has each tower as a process of its own, by number, device
        and host, on one clock; in it, what ``torch.profiler`` records, the steps, and the named ranges of their phases.
        When it is left by an exception, nothing is written.

        Args:
            path: the file; compressed where it ends in ``.gz``. Its folder is made.
            show: let the chief print what the towers' steps were spent on.
            profiler: arguments of ``torch.profiler.profile``, such as ``with_stack=True``.

        Returns:
            A context manager of a :class:`mirrored.monitor.Trace`, which is filled when the block has ended.

        Raises:
            RuntimeError: inside ``run``, or while another trace or profiler runs.
            ValueError: on all towers: the chief cannot write the file.
            DisagreementError: on all towers, when some call something else.
        """
        from mirrored.monitor.tracing import trace

        self._check_here("trace()")
        return trace(self.communicator, self.events, path, show=show, **profiler)

    def _trace_on_request(self) -> None:
        """Let the steps be traced that ``mirrored trace`` wants."""
        if wanted := os.environ.get(TRACED_STEPS):
            from mirrored.monitor.tracing import TracedSteps

            TracedSteps(self.communicator, self.events, wanted)
