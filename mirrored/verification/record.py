"""Records a script on one tower, through torch's hooks and as the interceptor of strategies and datasets.

[Note: recording from outside] The script runs unchanged, as ``__main__``. Torch's global hooks report optimizers and
modules. A ``TorchFunctionMode`` (:mod:`mirrored.verification.watch`) reports losses, BatchNorm layers, random numbers
and writes to parameters. Strategies and distributed datasets call the interceptor of the process
(:mod:`mirrored.interceptor`). Exporters run without recording, because they would compile it.

[Note: when a script ends] A loop whose steps are recorded is ended after the last one, and each further epoch after one
step, until an evaluation has run. Most scripts evaluate after each epoch, some after all epochs. A trace that ends
without an evaluation contains this fact.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import pathlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.export
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from mirrored.context import ReplicaContext, current_replica, strategy_with_towers
from mirrored.data.dataset import MapDataset
from mirrored.interceptor import Interceptor
from mirrored.shares import Batch
from mirrored.verification import draws, files
from mirrored.verification.interventions import Interventions, RoundingPerturbation, in_double, pad
from mirrored.verification.trace import (
    Draw,
    Evaluated,
    Event,
    Happened,
    Printed,
    Result,
    RunCall,
    Settings,
    Sketch,
    Step,
    Trace,
    digest_of,
    example_digests,
    form_of,
    has_values,
    sketch,
    tensors_of,
)
from mirrored.verification.watch import Watcher, in_a_graph, is_called_by_us, script_line
from towers.system import tree as trees
from towers.system.devices import Device
from towers.system.torch_private import pop_mode_temporarily
from towers.topology import DEVICES

_MOST_FURTHER_EPOCHS = 100
_RESULT_VALUES = 16
_LIBRARIES = ("keras", "lightning")


class StopRecording(BaseException):
    """Ends the script when the recording is complete."""


class StepLimit(Interceptor):
    """Ends a script after ``limit`` steps of each optimizer; see [Note: when a script ends].

    The loop over a distributed dataset in which an optimizer makes its last step ends as if the epoch were over. That
    step uses the epoch's last batch, whose shares are the most likely to be uneven. The next step of that optimizer
    ends the script with :class:`StopRecording`, unless no evaluation has run yet. In that case, up to a hundred further
    epochs end after one step each, so that an evaluation after all epochs is reached.

    Attributes:
        trace: the recording of the script.
        evaluated: whether a module was called outside of training after the last step.
        beyond: whether a further step was made on the current batch.
        watching: the context in which the script runs.

    Args:
        limit: the number of steps of each optimizer.
        folder: a folder for the script's checkpoints; empty at the start, the same for all towers.
        further: whether further epochs are allowed.
    """

    def __init__(self, limit: int, folder: str, *, further: bool = True) -> None:
        self.compares = True
        self.trace = Trace()
        self.evaluated = False
        self.beyond = False
        self._limit = limit
        self._folder = pathlib.Path(folder)
        self._steps: dict[Optimizer, int] = {}
        self._datasets: list[MapDataset] = []
        self._epochs_left = _MOST_FURTHER_EPOCHS if further else 0
        self._may_step = False
        self.watching: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        self._drawn_at_start = draws.states()
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    @property
    def refused(self) -> str | None:
        """The BatchNorm layer that could not normalise a share of one example."""
        return None

    def prints(self, text: str, file: str | None = None) -> None:
        """Is called when the script has printed a line, or written it into a file."""

    def before_step(self, optimizer: Optimizer, compared: bool) -> None:
        """Is called when an optimizer is about to make a step, which is ``compared`` or a further one."""

    def after_step(self, optimizer: Optimizer, compared: bool) -> None:
        """Is called when an optimizer has made a step."""

    def over(self, steps: int | None = None) -> bool:
        """Returns whether an optimizer has made this number of steps, by default all that are compared."""
        return any(made >= (self._limit if steps is None else steps) for made in self._steps.values())

    def devices(self, requested: Sequence[Device] | None) -> Sequence[Device] | None:
        """Returns the devices of this run, regardless of the script's. A strategy is about to be created."""
        sys.settrace(None)
        if draws.states() != self._drawn_at_start:
            self.trace.left_out.add("seeds")
        return os.environ[DEVICES].split(",")

    def asynchronous(self, strategy: str) -> None:
        """Ends the script, whose steps depend on chance."""
        self.trace.events.append(Event(Happened.SERVERS, strategy, script_line(), 0))
        raise StopRecording

    def averaging(self, requested: Any) -> None:
        """Makes strategies average all gradients exactly in every step."""
        if requested is not None:
            self.trace.left_out.add("averaging")

    def folder(self, requested: pathlib.Path) -> pathlib.Path:
        """Returns a separate folder for each folder of the script, so that both runs start without checkpoints.

        The script's own checkpoints remain.
        """
        return self._folder / hashlib.blake2b(os.path.abspath(requested).encode(), digest_size=8).hexdigest()

    def batches(self, dataset: object, load: Callable[[int], Iterator[Batch]], first: int) -> Iterator[Batch]:
        if isinstance(dataset, MapDataset) and dataset not in self._datasets:
            self._datasets.append(dataset)
            self.trace.datasets.append(dataset.examples)
        return self._batches(dataset, load, first)

    def _batches(self, dataset: object, load: Callable[[int], Iterator[Batch]], first: int) -> Iterator[Batch]:
        steps_before, over_before = sum(self._steps.values()), self.over()
        batches, at = load(first), first
        while (item := next(batches, None)) is not None:
            at += 1
            self._may_step = over_before and self._epochs_left > 0
            try:
                yield item
            finally:
                self.beyond = False
            stepped = sum(self._steps.values()) > steps_before
            if self.over() and (stepped or not over_before):
                self.trace.end.cut = True
                self._epochs_left -= over_before
                return
            if stepped and self.over(self._limit - 1) and isinstance(dataset, MapDataset) and at < len(dataset) - 1:
                at, self.trace.end.cut = len(dataset) - 1, True
                batches = load(at)

    def _before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if _does_nothing(optimizer):
            return
        compared = self._steps.setdefault(optimizer, 0) < self._limit
        if not compared:
            self.trace.end.cut = self.beyond = True
            if self.evaluated or not self._may_step:
                self.trace.end.unevaluated = not self.evaluated
                raise StopRecording
        self.before_step(optimizer, compared)

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if optimizer in self._steps and not _does_nothing(optimizer):
            self._steps[optimizer] += 1
            self.after_step(optimizer, self._steps[optimizer] <= self._limit)


def _does_nothing(optimizer: Optimizer) -> bool:
    """Returns whether an optimizer has no parameters, or only wraps another one."""
    strategy = strategy_with_towers()
    parameters = any(group["params"] for group in optimizer.param_groups)
    return not parameters or (strategy is not None and strategy.engine.is_inner_optimizer(optimizer))


class TraceRecorder(StepLimit):
    """Records the steps that are compared, and the evaluation after them; see [Note: recording from outside].

    Args:
        limit: the number of compared steps of each optimizer.
        folder: a folder for the script's checkpoints.
        interventions: the changes of this run.
    """

    def __init__(self, limit: int, folder: str, interventions: Interventions) -> None:
        super().__init__(limit, folder, further=not interventions.settings)
        self.watching = self._watcher = Watcher(self.trace, interventions)
        self.trace.lines = self._watcher.modules.lines
        self._rounding = RoundingPerturbation() if interventions.rounding else None
        self._buffers: dict[str, Sketch] = {}
        self._trackers: set[str] = set()
        self._evaluates = False  # the running call has called a module outside of training
        self._handles: list[RemovableHandle] = []
        self._hook_modules()
        torch.export.export = self._unwatched()(torch.export.export)  # torch.onnx uses it, too
        ReduceLROnPlateau.step = self._watched(ReduceLROnPlateau.step)  # type: ignore[method-assign]
        ReplicaContext.all_gather = self._noted(ReplicaContext.all_gather)  # type: ignore[method-assign]

    def _hook_modules(self) -> None:
        self._handles = [
            register_module_forward_pre_hook(self._before_module),
            register_module_forward_hook(self._after_module, always_call=True),
        ]

    def _watched(self, step: Callable[..., None]) -> Callable[..., None]:
        """Returns the method of a schedule that records the metric that it is given."""

        def recorded(schedule: ReduceLROnPlateau, metrics: Any, *args: Any, **kwargs: Any) -> None:
            self.returned("ReduceLROnPlateau.step", float(metrics))
            step(schedule, metrics, *args, **kwargs)

        return recorded

    def _noted(self, all_gather: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a method that gathers examples in ``run``, and records its calls."""

        def recorded(replica: ReplicaContext, value: Any, *args: Any, **kwargs: Any) -> Any:
            floating = [tensor for tensor in tensors_of(value) if tensor.is_floating_point()]
            if floating and torch.is_grad_enabled() and not is_called_by_us():
                constant = not any(tensor.requires_grad for tensor in floating)
                kind = Happened.GATHER_OF_CONSTANTS if constant else Happened.GATHER
                self.trace.events.append(Event(kind, "all_gather", script_line(), len(self.trace.steps)))
            return all_gather(replica, value, *args, **kwargs)

        return recorded

    @contextlib.contextmanager
    def _unwatched(self) -> Iterator[None]:
        for handle in self._handles:
            handle.remove()
        try:
            with pop_mode_temporarily():
                yield
        finally:
            self._hook_modules()

    # -- strategies --------------------------------------------------------------------------------------

    def running(self, replica: ReplicaContext, fn: Callable[..., Any]) -> Callable[..., Any]:
        strategy = replica.strategy

        def recorded(*args: Any, **kwargs: Any) -> Any:
            watcher, trace = self._watcher, self.trace
            files.report_trackers(self.prints, self._trackers)
            trace.towers, watcher.tower = strategy.num_replicas_in_sync, strategy.topology.index
            trace.virtual = strategy.virtual_towers is not None
            trace.library = next((name for name in _LIBRARIES if f"mirrored.{name}" in sys.modules), "")
            call = RunCall(len(trace.steps))
            shares = strategy.known_shares.at_hand(replica.arguments)
            call.shares = [(share.local, share.total) for share in shares]
            tensors = list(tensors_of((args, kwargs)))
            if not shares or not all(share.stand_in for share in shares):
                known = strategy.known_shares
                call.examples = example_digests(
                    [t for t in tensors if (share := known.get(t)) is None or not share.stand_in]
                )
            call.forms = [form_of(tensor) for tensor in tensors]
            if watcher.interventions.padding:
                args, kwargs = pad((args, kwargs), len(trace.calls), watcher.interventions.padding, call.shares)
            if watcher.interventions.double:
                args, kwargs = trees.map_leaves(in_double, (args, kwargs))
            if not trace.calls or trace.calls[-1].steps != call.steps:
                call.parameters = {name: digest_of(p) for name, p in self._watcher.modules.parameters.items()}
            trace.calls.append(call)
            others = draws.other_generators()
            watcher.call, watcher.drawn = call, draws.generator_state(watcher.device)
            try:
                return fn(*args, **kwargs)
            finally:
                watcher.call = None
                for place, examples in call.over_examples.items() if call.trained else ():
                    trace.over_examples.setdefault(place, examples)
                self.evaluated |= self._evaluates and not call.trained and self.over()
                self._evaluates = False
                if draws.generator_state(watcher.device) != watcher.drawn and not trace.virtual:
                    call.draws.append(Draw("a function of torch that is not followed", None, watcher.drawn))
                for by, state in draws.other_generators().items():
                    if others[by] != state:
                        call.draws.append(Draw(by, None, str(state)))

        return recorded

    def normalises(self, layer: str) -> bool:
        if self._watcher.interventions.global_statistics:
            return True
        self._watcher.batch_norms[layer] = None
        return False

    def drops(self, dropout: str, value: Any) -> bool:
        return self._watcher.leave_out(dropout, value)

    def drew(self, by: str) -> None:
        if self._watcher.call is not None:
            self._watcher.call.draws.append(Draw(by, script_line(), ""))

    def returned(self, call: str, result: Any) -> None:
        if self.beyond:
            return
        values: list[bool | int | float] = []
        dtypes: list[str] = []
        count = 0
        for leaf in trees.leaves(result):
            if isinstance(leaf, (bool, int, float)):
                values.append(leaf)
                dtypes.append(_dtype_of(leaf))
                count += 1
            elif hasattr(leaf, "reshape") and not getattr(leaf, "is_sparse", False):
                flat = leaf.reshape(-1)
                numbers = [v for v in flat[:_RESULT_VALUES].tolist() if isinstance(v, (bool, int, float))]
                values += numbers
                dtypes += [str(leaf.dtype).removeprefix("torch.")] * len(numbers)
                count += len(flat)
        steps = len(self.trace.steps)
        self.trace.results.append(Result(call, script_line(), steps, tuple(map(float, values)), tuple(dtypes), count))

    @property
    def refused(self) -> str | None:
        return self._watcher.refused

    def prints(self, text: str, file: str | None = None) -> None:
        if not self.beyond:
            self.trace.printed.append(Printed(text, script_line(), len(self.trace.steps), file))

    # -- modules -----------------------------------------------------------------------------------------

    def _before_module(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if in_a_graph():
            return
        self._watcher.before_module(module, inputs)
        self._watcher.modules.calls.append(module)
        if len(self._watcher.modules.calls) > 1:
            return
        parameters = list(nn.Module.named_parameters(module))  # Keras' method creates some while a layer is built
        name = self._watcher.modules.root_name(module)
        tensor = next(tensors_of(inputs), None)
        strategy, replica = strategy_with_towers(), current_replica()
        at_hand = replica.arguments if replica is not None else None
        stands_in = strategy is not None and strategy.known_shares.holds_stand_in(at_hand)
        examples = example_digests([tensor]) if tensor is not None and not stands_in else []
        watcher = self._watcher
        self.trace.autocast |= torch.is_autocast_enabled(watcher.device.type) and not watcher.interventions.double
        if not parameters:  # a loss, for example
            return
        if watcher.call is not None:
            watcher.call.seen_by_model += examples
        if module.training and torch.is_grad_enabled():
            return
        steps = len(self.trace.steps)
        if (evaluated := self.trace.evaluated.get(steps)) is None:
            self.trace.evaluated[steps] = evaluated = Evaluated(script_line())
        evaluated.examples += examples
        if name not in evaluated.models:
            evaluated.models[name] = {f"{name}.{path}": digest_of(p) for path, p in parameters if has_values(p)}
        if watcher.call is not None:
            self._evaluates = True
        else:
            self.evaluated |= self.over()

    def _after_module(self, module: nn.Module, inputs: object, output: Any) -> Any:
        if in_a_graph():
            return None
        modules, call = self._watcher.modules, self._watcher.call
        modules.leave(module)
        if call is not None and not modules.calls and next(nn.Module.named_parameters(module), None) is not None:
            call.model_computes_loss |= any(t.dim() == 0 and t.requires_grad for t in tensors_of(output))
        return self._rounding.perturb(output) if self._rounding is not None else None

    # -- optimizers --------------------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer, compared: bool) -> None:
        watcher = self._watcher
        watcher.stepping = True
        losses, watcher.losses = watcher.losses, []
        batch_norms, watcher.batch_norms = list(watcher.batch_norms), {}
        if not compared:
            return
        number = list(self._steps).index(optimizer)
        at, settings = len(self.trace.steps), watcher.interventions.settings
        for group, others in zip(optimizer.param_groups, settings[at] if at < len(settings) else (), strict=False):
            group.update(others)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        named = list(zip(self._watcher.modules.name_parameters(parameters, number), parameters, strict=True))
        foreign, unsynced = [], []
        if (strategy := strategy_with_towers()) is not None:
            accumulated = strategy.engine.averager.unsynced()
            for name, p in named:
                is_known = strategy.is_mirrored(p) or strategy.engine.is_sharded(p)
                if p.grad is not None and not is_known:
                    foreign.append(name)
                elif id(p) in accumulated:
                    unsynced.append(name)
        step = Step(
            optimizer=(number, type(optimizer).__name__),
            line=script_line(),
            losses=losses,
            gradients={name: None if p.grad is None else sketch(p.grad) for name, p in named},
            averaged={name: watcher.averaged[id(p)] for name, p in named if id(p) in watcher.averaged},
            before={name: digest_of(p) for name, p in named},
            settings=[_numbers(group) for group in optimizer.param_groups],
            schedules=_schedules(),
            foreign=foreign,
            unsynced=unsynced,
            batch_norms=batch_norms,
        )
        self.trace.steps.append(step)

    def after_step(self, optimizer: Optimizer, compared: bool) -> None:
        self._watcher.stepping = False
        if not compared:
            return
        step = self.trace.steps[-1]
        self._watcher.modules.note_addresses()
        parameters = {name: self._watcher.modules.parameters[name] for name in step.before}
        step.after = {name: sketch(p) for name, p in parameters.items()}
        if losses := self._watcher.losses:  # of a closure
            step.losses, self._watcher.losses, step.closure = losses[:1], [], True
            step.gradients = {name: self._watcher.averaged.get(id(p)) for name, p in parameters.items()}
        several = self.trace.towers > 1 and not self.trace.virtual
        step.buffers = {name: self._sketch(name, buffer) for name, buffer in self._watcher.modules.buffers(several)}

    def _sketch(self, name: str, buffer: Tensor) -> Sketch:
        """Returns the sketch of a buffer. Most large buffers (masks, tables) never change."""
        known = self._buffers.get(name)
        if known is None or known.digest != digest_of(buffer):
            self._buffers[name] = known = sketch(buffer)
        return known


def _dtype_of(number: bool | int | float) -> str:
    """Returns the dtype of a number's precision: float32 if that represents it exactly, as after ``item()``."""
    if not isinstance(number, float):
        return "int64"
    return "float32" if number == float(torch.tensor(number, dtype=torch.float32)) else "float64"


def _numbers(group: Mapping[str, Any]) -> Settings:
    """Returns the settings of a parameter group that are numbers or tuples of numbers."""
    numbers: Settings = {}
    for name in sorted(group, key=lambda name: name != "lr"):
        values = group[name] if isinstance(group[name], tuple) else (group[name],)
        if all(v.numel() == 1 if isinstance(v, Tensor) else type(v) in (int, float) for v in values):
            floats = tuple(map(float, values))
            numbers[name] = floats if isinstance(group[name], tuple) else floats[0]
    return numbers


def _schedules() -> dict[str, int]:
    """Returns the number of steps of each existing scheduler. torch has no hook for schedulers."""
    steps: dict[str, int] = {}
    numbers: Counter[str] = Counter()
    for candidate in gc.get_objects():
        if issubclass(type(candidate), LRScheduler):
            name = type(candidate).__name__
            steps[f"{name}[{numbers[name]}]" if numbers[name] else name] = int(candidate.last_epoch)
            numbers[name] += 1
    return steps
