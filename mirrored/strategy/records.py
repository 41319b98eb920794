"""The records of a strategy: TensorBoard summaries, which one tower writes for all, and traces."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from mirrored.events import Events
from mirrored.strategy.gradients import Gradients

if TYPE_CHECKING:
    from mirrored.monitor.tracing import Trace

TRACED_STEPS = "MIRRORED_TRACE"
"""Environment variable with the steps that ``mirrored trace`` records, and the file: ``10:13:/home/me/trace.json``."""


class NoWriter:
    """Replaces a ``SummaryWriter`` on towers that do not write. Every method does nothing and returns None."""

    def __enter__(self) -> NoWriter:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def summary_writer(is_chief: bool, folder: str | os.PathLike[str], **options: Any) -> Any:
    """Returns a ``SummaryWriter`` on the chief and a :class:`NoWriter` on other towers. All towers must call it.

    Raises:
        ModuleNotFoundError: on all towers: tensorboard is not installed.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise ModuleNotFoundError("strategy.summary_writer needs tensorboard: pip install tensorboard")
    if not is_chief:
        return NoWriter()
    from torch.utils.tensorboard import SummaryWriter  # a slow import

    return SummaryWriter(os.fspath(folder), **options)


class Records(Gradients):
    """Methods of :class:`mirrored.Strategy` that record a training."""

    events: Events
    is_chief: bool

    def summary_writer(self, folder: str | os.PathLike[str], **options: Any) -> Any:
        """Returns TensorBoard's ``SummaryWriter`` on the chief, elsewhere an object whose methods do nothing."""
        return summary_writer(self.is_chief, folder, **options)

    def trace(
        self, path: str | os.PathLike[str], *, show: bool = True, **profiler: Any
    ) -> AbstractContextManager[Trace]:
        """Profiles all towers in ``with strategy.trace("trace.json"):``. The chief writes one file for Perfetto.

        All towers must enter and leave the block, outside ``run``. The trace shows each tower as a process, with its
        index, device and host, on one clock. It contains the events of ``torch.profiler``, the steps, and the named
        ranges of their phases. If an exception leaves the block, no file is written.

        Args:
            path: the file, compressed if it ends in ``.gz``. Its folder is created.
            show: whether the chief prints the parts of the towers' steps.
            profiler: arguments of ``torch.profiler.profile``, such as ``with_stack=True``.

        Returns:
            A context manager of a :class:`mirrored.monitor.Trace`, which is filled at the end of the block.

        Raises:
            RuntimeError: inside ``run``, or while another trace or profiler runs.
            ValueError: on all towers, if the chief cannot write the file.
            DisagreementError: on all towers, if some make another call.
        """
        from mirrored.monitor.tracing import trace

        self._check_here("trace()")
        return trace(self.communicator, self.events, path, show=show, **profiler)

    def _trace_on_request(self) -> None:
        """Traces the steps that ``mirrored trace`` requests."""
        if wanted := os.environ.get(TRACED_STEPS):
            from mirrored.monitor.tracing import TracedSteps

            TracedSteps(self.communicator, self.events, wanted)
