"""The monitor of a script: one call per step, and a report of all towers after a number of steps.

[Note: a report is a collective] Between reports, a monitor only records timestamps and sums on its own tower. No tower
waits for another or for its GPU. At a report, all towers are at the same step and exchange their sums in one announced
call. The chief has the report. The time of the report does not belong to a step.
"""

from __future__ import annotations

import contextlib
import math
import numbers
import os
import pathlib
import resource
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim.optimizer import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from mirrored.context import ActiveStrategy, refuse_inside_run
from mirrored.monitor.report import Output, Report, Screen, add_times, json_lines, on_chief, scalars, sums, tracked
from mirrored.monitor.timeline import Timeline
from towers.collectives.agreement import agree, announce_with_body
from towers.collectives.communicator import Communicator
from towers.health.status import AFTER_OPTIMIZER, IN_STEP, OPTIMIZER, Health
from towers.system import accelerator
from towers.system.autograd_hooks import at_steps
from towers.system.tensors import whole
from towers.system.torch_private import disable_dynamo

PEAKS = (
    *(("H100 NVL", 835e12), ("H100 PCIe", 756e12), ("H100", 989e12), ("H200", 989e12), ("B200", 2250e12)),
    *(("A100", 312e12), ("A40", 150e12), ("A30", 165e12), ("A10", 125e12), ("L40S", 362e12), ("L4", 121e12)),
    *(("V100", 125e12), ("T4", 65e12), ("4090", 165e12), ("3090", 71e12), ("MI300X", 1307e12), ("MI250X", 191.5e12)),
)
"""Dense 16-bit multiplications and additions per second, by a part of the device's name (data sheets)."""


def peak_of(device: torch.device) -> float | None:
    """Returns the floating-point operations per second of a device, from :data:`PEAKS`, or None if they are unknown."""
    name = accelerator.name(device) if device.type != "cpu" else ""
    return next((peak for part, peak in PEAKS if part in name), None)


def memory(device: torch.device) -> tuple[int, int]:
    """Returns the bytes that torch has allocated on a device, now and at most. For a CPU tower: those of its process.

    Zeros if the kind of device does not report them.
    """
    if device.type == "cpu":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        statm = pathlib.Path("/proc/self/statm")
        now = int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else peak
        return now, max(now, peak)
    if device.type not in ("cuda", "xpu"):
        return 0, 0
    return torch.accelerator.memory_allocated(), torch.accelerator.max_memory_allocated()


class Optimizers:
    """Follows the steps of optimizers: the learning rate, and on request the norm of their gradients.

    Args:
        counts: returns whether an optimizer belongs to the training and is not an inner optimizer.
        alone: whether there is one tower. Its phases do not include the optimizer, so ``enter`` is called for it.
        enter: called with a phase.
        measures: returns whether the gradients of the starting step are measured; None: never.
    """

    def __init__(
        self,
        health: Health,
        counts: Callable[[Optimizer], bool],
        alone: bool,
        enter: Callable[[str], object],
        measures: Callable[[], bool] | None,
    ) -> None:
        self._squares: list[Tensor] = []
        self._health = health
        self._counts: Callable[[Optimizer], bool] | None = counts
        self._alone = alone
        self._enter = enter
        self._measures = measures
        self._newest: weakref.ref[Optimizer] | None = None
        at_steps(self, Optimizers.before, Optimizers.after)

    @disable_dynamo
    def before(self, optimizer: Optimizer, *_: Any) -> None:
        """Handles an optimizer that is about to step, or whose step was refused."""
        if not self._steps_here(optimizer):
            return
        self._newest = weakref.ref(optimizer)
        if self._measures is not None and self._measures():
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
            self._squares.append(whole(get_total_norm([g.detach() for g in dense])).square())
        if self._alone:
            self._enter(OPTIMIZER)

    @disable_dynamo
    def after(self, optimizer: Optimizer, *_: Any) -> None:
        """Handles an optimizer that has stepped."""
        if self._alone and self._steps_here(optimizer):
            self._enter(AFTER_OPTIMIZER)

    def _steps_here(self, optimizer: Optimizer) -> bool:
        in_step = not self._alone or self._health.phase in (IN_STEP, OPTIMIZER)
        return in_step and self._counts is not None and self._counts(optimizer)

    def stop(self) -> None:
        """Stops following optimizers. The hooks stay, like those of the optimizers' guard."""
        self._counts = None

    def learning_rate(self) -> float | None:
        """Returns the learning rate of the first parameters of the optimizer that stepped last."""
        optimizer = self._newest() if self._newest is not None else None
        rate = optimizer.param_groups[0].get("lr") if optimizer is not None else None
        return None if rate is None else float(rate)

    def take_norm(self) -> float | None:
        """Returns the norm of the gradients of all steps that were measured since the last call."""
        squares, self._squares = self._squares, []
        return float(torch.stack(squares).sum().sqrt()) if squares else None


class Monitor:
    """Reports on the chief the speed of a training, how its steps spend their time, and which tower is slowest.

    All towers must create it, and call :meth:`step` after each training step. Used with ``with``, it is closed at the
    end. As an object of a ``CheckpointManager``, it continues its count of steps from the checkpoint.

    Args:
        strategy: the strategy of the training. It has one monitor at a time.
        every: the number of steps between reports.
        total: the number of steps of the whole training, for the progress bar.
        loss: how towers' losses form the global loss: "sum" for losses of ``compute_average_loss``; "mean" for those of
            ``strategy.backward``, others that are equal on all towers, or each tower's mean of equal shares.
        show: True shows a progress bar if standard error is a terminal and tqdm is installed, and plain lines
            otherwise. False shows nothing.
        jsonl: a file to which each report is appended, as one JSON object per line.
        writer: torch's ``SummaryWriter``, or the result of :meth:`mirrored.Strategy.summary_writer`.
        trackers: called as ``tracker(numbers, step=step)`` with numbers by name: ``wandb_run.log``,
            ``mlflow.log_metrics``.
        gradient_norm: whether the norm of the gradients of a report's last step is measured, before its optimizers
            step.
        flops: True counts the floating-point operations of the second step, which then takes longer. A number is the
            operations of one step of all towers.
        peak_flops: operations per second of one device, for the MFU. Default: the device's value in
            :data:`mirrored.monitor.monitor.PEAKS`, if any.

    Attributes:
        steps: the number of steps so far.
        report: the last report, on all towers; None before the first.

    Raises:
        TypeError: ``strategy`` is not a strategy whose towers train in step.
        ValueError: a number is not positive; or, on all towers, the chief cannot write ``jsonl``.
        RuntimeError: the strategy has a monitor that is not closed, or a trace is running.
        DisagreementError: on all towers: their settings differ.
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
        if writer is not None and not callable(getattr(writer, "add_scalar", None)):
            raise TypeError(f"writer is {writer!r:.60}, but must be a SummaryWriter, with a method add_scalar")
        if not isinstance(trackers, Sequence) or not all(map(callable, trackers)):
            raise TypeError(f"trackers is {trackers!r:.60}, but must be a list of functions, such as [wandb.log]")
        settings = {"every": every, "loss": loss, "gradient_norm": gradient_norm, "flops": flops}
        comm = strategy.communicator
        agree(comm, "mirrored.Monitor", settings)
        file = None
        if jsonl is not None:
            file = on_chief(comm, "opens jsonl= of mirrored.Monitor", lambda: json_lines(jsonl))
        self._strategy = strategy
        self._every = every
        self._averages = loss == "mean"
        self.steps = self._reported = self._examples = 0
        self.report: Report | None = None
        self._peak = peak_flops or peak_of(strategy.device)
        self._flops = 0.0 if isinstance(flops, bool) else float(flops) / comm.size  # per step of this tower
        self._counter = FlopCounterMode(display=False) if flops is True else None
        self._warm_up = 2 if flops is True else 1
        dtype = torch.float32 if strategy.device.type in ("mps", "tpu") else torch.float64
        self._loss, self._losses = torch.zeros((), dtype=dtype, device=strategy.device), 0  # the sum and the count
        self._timeline = timeline = Timeline(comm.health, strategy.events, strategy.device)
        self._detach = weakref.finalize(self, timeline.stop)
        due = (lambda: self.is_due) if gradient_norm else None
        self._optimizers = Optimizers(
            comm.health, lambda optimizer: _is_trained(strategy, optimizer), comm.size == 1, timeline.enter, due
        )
        self._screen = Screen(total) if show and strategy.is_chief else None
        self._outputs: list[Output] = [self._screen] if self._screen is not None else []
        if strategy.is_chief:
            self._outputs += [file] if file is not None else []
            self._outputs += [scalars(writer)] if writer is not None else []
            self._outputs += map(tracked, trackers)

    # -- steps -------------------------------------------------------------------------------------------

    def step(self, loss: Tensor | float | None = None, *, examples: int | None = None) -> Report | None:
        """Counts a training step. All towers must call it after the step, outside ``run``. A report is a collective.

        Args:
            loss: this tower's loss, a scalar (see ``loss`` of the class). None: no loss to report.
            examples: the number of examples of all towers in this step, if the batch is not from
                ``distribute_dataset``.

        Returns:
            The report if one is due, otherwise None.

        Raises:
            TypeError, ValueError: ``loss`` is not one number, or ``examples`` is negative.
            RuntimeError: inside ``run``, or after :meth:`close`.
            DisagreementError: on all towers, if some make another call.
        """
        refuse_inside_run("monitor.step()", "call it after run has returned")
        if not self._detach.alive:
            raise RuntimeError("monitor.step() was called after monitor.close()")
        if examples is not None and not examples >= 0:
            raise ValueError(f"examples is {examples!r}, but must be a number from 0")
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
        """Excludes the first step, which mirrors and compiles, from timing, and the second if its FLOPs are counted."""
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
        """Excludes time and batches inside the context from steps, for example an evaluation or pictures.

        Runs that evaluate are excluded automatically.
        """
        with self._timeline.away():
            yield

    @property
    def is_due(self) -> bool:
        """Whether the current step ends with a report."""
        return (self.steps + 1) % self._every == 0

    # -- reports -----------------------------------------------------------------------------------------

    def _make_report(self) -> Report:
        """Makes a report of the steps since the last one, on all towers. The chief passes it to its outputs."""
        with self._timeline.away():
            rows = self._timeline.take()
            norm = self._optimizers.take_norm()
            own = [float(self._loss), self._losses, *memory(self._strategy.device), self._flops]
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
        """Returns the report of the values that towers have sent, one row each."""
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
        """Reports the steps since the last report, and stops following the strategy. All towers must call it."""
        if not self._detach.alive:
            return
        if self.steps > self._reported:
            self._make_report()
        self.stop()

    def stop(self) -> None:
        """Stops following the strategy, without a report. A single tower may call it."""
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
        """Returns the number of steps."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues the count of steps from :meth:`state_dict`."""
        if self._screen is not None:
            self._screen.advance(state["steps"] - self.steps)
        self.steps = self._reported = state["steps"]


def _check(strategy: Any, loss: str, **positive: Any) -> None:
    """Checks a monitor's arguments, and raises the errors of :class:`Monitor`."""
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
    """Returns whether an optimizer belongs to a strategy's training and is not another optimizer's inner optimizer."""
    first = next((p for group in optimizer.param_groups for p in group["params"]), None)
    if first is None or strategy.engine.is_inner_optimizer(optimizer):
        return False
    return strategy.is_mirrored(first) or strategy.engine.is_sharded(first)
