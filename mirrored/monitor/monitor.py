"""The monitor that a script holds: one call a step, and every so often a report of all towers.

[Note: a report is a collective] Between reports a monitor only stamps and adds up on its own tower: no tower waits for
another, nor for its GPU. At a report all towers, which are in step there, send each other their sums in one announced
call; the chief has the report. The report itself belongs to no step.
"""

from __future__ import annotations

import contextlib
import math
import numbers
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mirrored.context import ActiveStrategy, current_replica
from mirrored.monitor import measuring
from mirrored.monitor.outputs import Output, Screen, json_lines, scalars, tracked
from mirrored.monitor.report import Report, add_times, sums
from mirrored.monitor.timeline import Timeline
from towers.collectives.agreement import agree, announce_with_body
from towers.collectives.communicator import Communicator


class Monitor:
    """Shows on the chief how fast a training goes, what its steps are spent on, and which tower is slowest.

    All towers make it, and call :meth:`step` after each training step. With ``with``, it is closed at the end. In the
    objects of a ``CheckpointManager``, it goes on counting where the checkpoint was taken.

    Args:
        strategy: the training's. It has one monitor at a time.
        every: steps from one report to the next.
        total: steps of the whole training, for the progress bar.
        loss: how towers' losses make the global one: "sum" for those of ``compute_average_loss``, "mean" for those of
            ``strategy.backward`` and others that are equal on all towers, or each tower's mean of equal shares.
        show: a progress bar where standard error is a terminal and tqdm is installed, else plain lines; False: nothing.
        jsonl: a file to which each report is appended, as a JSON object in a line.
        writer: torch's ``SummaryWriter``, or what :meth:`mirrored.Strategy.summary_writer` gives.
        trackers: called as ``tracker(numbers, step=step)`` with numbers by name: ``wandb_run.log``,
            ``mlflow.log_metrics``.
        gradient_norm: measure that of a report's last step, before its optimizers step.
        flops: count the floating-point operations of the second step, which takes longer then; or how many a step of
            all towers has.
        peak_flops: operations a second of one device, for the MFU. Default: what is known of the device
            (:data:`mirrored.monitor.measuring.PEAKS`).

    Attributes:
        steps: how many there were.
        report: the last one, on all towers; None before it.

    Raises:
        TypeError: ``strategy`` is no strategy whose towers are in step.
        ValueError: a number is not positive.
        RuntimeError: the strategy has a monitor that is not closed, or a trace goes on.
        DisagreementError: on all towers, when their settings differ.
    """

    def __init__(
        self,
        strategy: ActiveStrategy,
        *,
        every: int = 50,
        total: int | None = None,
        loss: Literal["sum", "mean"] = "sum",
        show: bool = True,
        jsonl: str | os.PathLike[str] | None = None,
        writer: Any = None,
        trackers: Sequence[Callable[..., object]] = (),
        gradient_norm: bool = False,
        flops: bool | float = False,
        peak_flops: float | None = None,
    ) -> None:
        _check(strategy, loss, every=every, total=total or 1, flops=flops or 1, peak_flops=peak_flops or 1)
        settings = {"every": every, "loss": loss, "gradient_norm": gradient_norm, "flops": flops}
        comm = strategy.communicator
        agree(comm, "mirrored.Monitor", settings)
        self._strategy = strategy
        self._every = every
        self._averages = loss == "mean"
        self.steps = self._reported = self._examples = 0
        self.report: Report | None = None
        self._peak = peak_flops or measuring.peak_of(strategy.device)
        self._flops = 0.0 if isinstance(flops, bool) else float(flops) / comm.size  # of a step of this tower
        self._counter = FlopCounterMode(display=False) if flops is True else None
        self._warm_up = 2 if flops is True else 1
        dtype = torch.float32 if strategy.device.type in ("mps", "tpu") else torch.float64
        self._loss, self._losses = torch.zeros((), dtype=dtype, device=strategy.device), 0  # the sum, and of how many
        self._timeline = timeline = Timeline(comm.health, strategy.events, strategy.device)
        self._detach = weakref.finalize(self, timeline.stop)
        due = (lambda: self.is_due) if gradient_norm else None
        self._optimizers = measuring.Optimizers(
            comm.health, lambda optimizer: _is_trained(strategy, optimizer), comm.size == 1, timeline.enter, due
        )
        self._screen = Screen(total) if show and strategy.is_chief else None
        self._outputs: list[Output] = [self._screen] if self._screen is not None else []
        if strategy.is_chief:
            self._outputs += [json_lines(jsonl)] if jsonl is not None else []
            self._outputs += [scalars(writer)] if writer is not None else []
            self._outputs += map(tracked, trackers)

    # -- steps -------------------------------------------------------------------------------------------

    def step(self, loss: Tensor | float | None = None, *, examples: int | None = None) -> Report | None:
        """A training step is over; all towers call it, outside of ``run``. At a report it is a collective.

        Args:
            loss: this tower's, a scalar (see ``loss`` above); None: there is none to report.
            examples: of all towers in this step, where the batch came by other ways than ``distribute_dataset``.

        Returns:
            The report, when there is one.

        Raises:
            TypeError, ValueError: ``loss`` is not one number.
            RuntimeError: inside ``run``, or after :meth:`close`.
            DisagreementError: on all towers, when some call something else.
        """
        if current_replica() is not None:
            raise RuntimeError("monitor.step() was called inside strategy.run(...): call it after it")
        if not self._detach.alive:
            raise RuntimeError("monitor.step() was called after monitor.close()")
        if loss is not None:
            self._add(loss)
        self.steps += 1
        timeline = self._timeline
        self._examples += timeline.examples if examples is None else examples
        timeline.examples = 0
        timeline.end_step()
        if self._screen is not None:
            self._screen.advance()
        if self._warm_up:
            self._end_warm_up()
        return self._make_report() if self.steps % self._every == 0 else None

    def _add(self, loss: Tensor | float) -> None:
        if isinstance(loss, Tensor):
            if loss.numel() != 1 or loss.is_complex():
                raise ValueError(f"monitor.step() takes a loss of one number, not one of shape {tuple(loss.shape)}")
            loss = loss.detach().reshape(())
        elif isinstance(loss, bool) or not isinstance(loss, numbers.Real):
            raise TypeError(f"monitor.step() takes a loss that is a number or a tensor, not a {type(loss).__name__}")
        self._loss.add_(loss)
        self._losses += 1

    def _end_warm_up(self) -> None:
        """The first step mirrors models and compiles, so it is not timed; nor is the next one, if that is counted."""
        self._warm_up -= 1
        if self._counter is not None:
            if self._warm_up:
                self._counter.__enter__()
            else:
                self._counter.__exit__(None, None, None)
                self._flops = float(self._counter.get_total_flops())
                self._counter = None
        self._timeline.restart()
        self._examples = 0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, time and batches belong to no step: an evaluation, pictures.

        At several towers runs that evaluate are left out by themselves.
        """
        with self._timeline.away():
            yield

    @property
    def is_due(self) -> bool:
        """Whether the step that goes on ends with a report."""
        return (self.steps + 1) % self._every == 0

    # -- reports -----------------------------------------------------------------------------------------

    def _make_report(self) -> Report:
        """All towers make a report of the steps since the last one; the chief gives it to its outputs."""
        with self._timeline.away():
            rows = self._timeline.take()
            norm = self._optimizers.take_norm()
            own = [float(self._loss), self._losses, *measuring.memory(self._strategy.device), self._flops]
            own += [self._examples, math.nan if norm is None else norm]
            self._loss.zero_()
            self._losses, self._examples, self._reported = 0, 0, self.steps
            body = np.concatenate([own, sums(rows)]).tobytes()
            call = f"the monitor's report of step {self.steps}"
            replies = announce_with_body(self._strategy.communicator, call, body=body)
            towers = np.stack([np.frombuffer(reply.body, dtype=np.float64) for reply in replies])
            self.report = report = self._summary(towers, len(rows))
            for output in self._outputs:
                output(report)
        return report

    def _summary(self, towers: Any, steps: int) -> Report:
        """The report of what towers have sent, a row each."""
        losses, counts, memory, peak, flops, examples, norm = towers[:, :7].T
        report = Report(self.steps, steps, learning_rate=self._optimizers.learning_rate())
        if counts.sum():
            report.loss = float(losses.sum() / (counts.sum() if self._averages else counts.max()))
        if memory.any():
            report.memory_bytes, report.memory_peak_bytes = int(memory.max()), int(peak.max())
        if not np.isnan(norm).any():
            report.gradient_norm = float(norm.mean())
        if steps:
            add_times(report, towers[:, 7:])
        if not report.step_ms:
            return report
        if examples.any():
            report.examples_per_second = float(examples.max() / steps / report.step_ms * 1e3)
        if flops.any():
            report.flops_per_second = float(flops.sum() / report.step_ms * 1e3)
            report.mfu = report.flops_per_second / (self._peak * len(towers)) if self._peak else None
        return report

    def close(self) -> None:
        """Report the steps since the last report, and follow the strategy no longer; all towers call it."""
        if not self._detach.alive:
            return
        if self.steps > self._reported:
            self._make_report()
        self.stop()

    def stop(self) -> None:
        """Follow the strategy no longer, without a report; a tower may call it alone."""
        self._detach()
        self._optimizers.stop()
        if self._counter is not None and self._warm_up == 1:
            self._counter.__exit__(None, None, None)
            self._counter = None
        if self._screen is not None:
            self._screen.close()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:  # towers may be out of step
            self.stop()

    def state_dict(self) -> dict[str, int]:
        """How many steps there were."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on counting where :meth:`state_dict` was taken."""
        if self._screen is not None:
            self._screen.advance(state["steps"] - self.steps)
        self.steps = self._reported = state["steps"]


def _check(strategy: Any, loss: str, **positive: Any) -> None:
    """Check a monitor's arguments; it raises what :class:`Monitor` raises."""
    if not isinstance(getattr(strategy, "communicator", None), Communicator):
        raise TypeError(f"mirrored.Monitor takes a strategy that trains in step, not a {type(strategy).__name__}")
    if any(isinstance(getattr(each, "__self__", None), Timeline) for each in strategy.communicator.health.followers):
        raise RuntimeError("this strategy has a monitor or a trace already: close it first")
    if loss not in ("sum", "mean"):
        raise ValueError(f"loss is {loss!r}, but must be 'sum' or 'mean'")
    for name, number in positive.items():
        whole = name in ("every", "total")
        if not isinstance(number, int if whole else (int, float)) or number <= 0:
            raise ValueError(f"{name} is {number!r}, but must be a positive {'whole ' * whole}number")


def _is_trained(strategy: ActiveStrategy, optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is one of a strategy's training, and does no other optimizer's work."""
    first = next((p for group in optimizer.param_groups for p in group["params"]), None)
    return first is not None and strategy.is_mirrored(first) and not strategy.engine.is_inner_optimizer(optimizer)
