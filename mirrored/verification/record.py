"""Records what a script does on one tower, by the hooks of torch and the observer's."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from mirrored.context import current_frame, strategy_with_towers
from mirrored.stand_in import holds_stand_in, shares_at_hand
from mirrored.strategy.base import Strategy
from mirrored.verification.buffers import buffers_of
from mirrored.verification.cut import Cutter
from mirrored.verification.interventions import Repairs
from mirrored.verification.padding import form_of, pad, tensors_of
from mirrored.verification.randomness import Shapes
from mirrored.verification.rounding import Unrest
from mirrored.verification.trace import Draw, Loss, Result, Run, Sketch, Step, bits, has_values, rows, sketch
from mirrored.verification.watch import Watcher, generator_state, in_a_graph, other_generators, script_line
from towers.system import tree as trees
from towers.system.torch_private import pop_mode_temporarily

_RESULT_VALUES = 16


class Recorder(Cutter):
    """Notes the first ``limit`` steps of a script's optimizers, and the evaluation that follows them.

    Attributes:
        repairs: what is changed in this run.
        run: the call of ``strategy.run`` that is under way.
        tower: this tower's index.
        losses: of the backwards since the last step.
        batch_norms: layers that took statistics of this tower alone since the last step.
        pointers: name of the known parameter whose memory begins there.
        stepping: whether an optimizer's step is under way.
        shapes: of the random numbers that one tower has drawn, by run and draw; None on one tower.
        accumulated: whether the last backward was one of ``no_sync``, so that gradients are this tower's own.

    Args:
        unrest: whether the results of modules are moved by rounding.
    """

    def __init__(
        self, limit: int, folder: str, repairs: Repairs, shapes: Shapes | None = None, unrest: bool = False
    ) -> None:
        super().__init__(limit, folder, further=not repairs.rates)
        self.shapes = shapes
        self._unrest = Unrest() if unrest else None
        self.repairs = repairs
        self.run: Run | None = None
        self.tower = 0
        self.losses: list[Loss] = []
        self.batch_norms: dict[str, None] = {}
        self.pointers: dict[int, str] = {}
        self.stepping = False
        self.accumulated = False
        self.watcher = Watcher(self)
        self._optimizers: list[Optimizer] = []
        self._parameters: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}
        self._buffers: dict[str, Sketch] = {}
        self._roots: list[tuple[str, weakref.ref[nn.Module]]] = []
        self._modules: list[nn.Module] = []
        self._evaluates = False  # the run under way has called a module outside of training
        self._handles: list[RemovableHandle] = []
        self._watch_modules()

    def _watch_modules(self) -> None:
        self._handles = [
            register_module_forward_pre_hook(self._before_module),
            register_module_forward_hook(self._after_module, always_call=True),
        ]

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """Inside, nothing is recorded: compilers would compile it."""
        for handle in self._handles:
            handle.remove()
        try:
            with pop_mode_temporarily():
                yield
        finally:
            self._watch_modules()

    # -- the observer ------------------------------------------------------------------------------------

    def running(self, strategy: Strategy, fn: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            self.seen.towers, self.tower = strategy.num_replicas_in_sync, strategy.topology.index
            self.seen.virtual = strategy.virtual_towers is not None
            run = Run(len(self.seen.steps))
            frame = current_frame()
            shares = shares_at_hand(strategy, frame.replica if frame is not None else None)
            run.shares = [(share.local, share.total) for share in shares]
            if not shares or not all(share.stand_in for share in shares):
                known = strategy.known_shares
                tensors = [leaf for leaf in trees.leaves((args, kwargs)) if isinstance(leaf, Tensor)]
                run.given = rows([t for t in tensors if (share := known.get(t)) is None or not share.stand_in])
            run.forms = [form_of(tensor) for tensor in tensors_of((args, kwargs))]
            if self.repairs.padding:
                args, kwargs = pad((args, kwargs), len(self.seen.runs), self.repairs.padding, run.shares)
            if not self.seen.runs or self.seen.runs[-1].steps != run.steps:
                run.entered = self._digests()
            self.seen.runs.append(run)
            others = other_generators()
            self.run, self.watcher.drawn = run, generator_state(self.device())
            try:
                return fn(*args, **kwargs)
            finally:
                self.run = None
                self.evaluated |= self._evaluates and not run.trained and self.over()
                self._evaluates = False
                if generator_state(self.device()) != self.watcher.drawn and not self.seen.virtual:
                    run.draws.append(Draw("a function of torch that is not followed", None, self.watcher.drawn, 0))
                for by, state in other_generators().items():
                    if others[by] != state:
                        run.draws.append(Draw(by, None, str(state), 0))

        return recorded

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
                found = [v for v in flat[:_RESULT_VALUES].tolist() if isinstance(v, (bool, int, float))]
                values += found
                dtypes += [str(leaf.dtype).removeprefix("torch.")] * len(found)
                count += len(flat)
        numbers = tuple(map(float, values))
        self.seen.results.append(Result(call, script_line(), len(self.seen.steps), numbers, tuple(dtypes), count))

    # -- what the watcher asks ---------------------------------------------------------------------------

    def share(self) -> tuple[int, int]:
        """(own, all towers') examples of the step under way; (0, 0) where that is not known."""
        return self.run.shares[0] if self.run is not None and self.run.shares else (0, 0)

    def device(self) -> torch.device:
        """This tower's device."""
        frame = current_frame()
        return frame.strategy.device if frame is not None else torch.device("cpu")

    def module_name(self) -> str:
        """The innermost module that is being called, as messages call it."""
        module = self._modules[-1] if self._modules else None
        for name, root in self._living_roots():
            for path, candidate in root.named_modules():
                if candidate is module:
                    return f"{name}.{path}" if path else name
        return type(module).__name__ if module is not None else "a batch norm outside of modules"

    def hold_gradients(self, value: Any) -> bool:
        """Whether a tensor, or one of several, lies in the memory of the gradient of a module's parameter."""
        tensors = [
            t for t in trees.leaves(value) if isinstance(t, Tensor) and t.layout == torch.strided and has_values(t)
        ]
        gradients = {
            p.grad.untyped_storage().data_ptr()
            for _, root in self._living_roots()
            for p in root.parameters()
            if p.grad is not None and p.grad.layout == torch.strided
        }
        return any(t.layout == torch.strided and t.untyped_storage().data_ptr() in gradients for t in tensors)

    # -- modules -----------------------------------------------------------------------------------------

    def _before_module(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if in_a_graph():
            return
        self.watcher.before_module(module, inputs)
        self._modules.append(module)
        if len(self._modules) > 1:
            return
        if not any(root is module for _, root in self._living_roots()):
            name = type(module).__name__
            number = sum(root.split("[")[0] == name for root, _ in self._roots)
            self._roots.append((f"{name}[{number}]" if number else name, weakref.ref(module)))
        tensor = next((leaf for leaf in trees.leaves(inputs) if isinstance(leaf, Tensor)), None)
        strategy = strategy_with_towers()
        frame = current_frame()
        stands_in = strategy is not None and holds_stand_in(strategy, frame.replica if frame is not None else None)
        examples = rows([tensor]) if tensor is not None and not stands_in else []
        self.seen.autocast |= torch.is_autocast_enabled(self.device().type)
        if self.run is not None:
            self.run.fed += examples
        if not (module.training and torch.is_grad_enabled()):
            self._note_evaluation(module, examples)

    def _note_evaluation(self, module: nn.Module, examples: list[str]) -> None:
        steps = len(self.seen.steps)
        self.seen.evaluated.setdefault(steps, []).extend(examples)
        name = next(name for name, root in self._living_roots() if root is module)
        if (steps, name) not in self.seen.evaluated_models:
            held = {f"{name}.{path}": bits(p) for path, p in module.named_parameters() if has_values(p)}
            self.seen.evaluated_models[steps, name] = held
        if self.run is not None:
            self._evaluates = True
        else:
            self.evaluated |= self.over()

    def _after_module(self, module: nn.Module, inputs: object, output: Any) -> Any:
        if in_a_graph():
            return None
        while self._modules and self._modules.pop() is not module:
            pass
        return self._unrest.of(output) if self._unrest is not None else None

    def _living_roots(self) -> Iterator[tuple[str, nn.Module]]:
        for name, reference in self._roots:
            if (root := reference()) is not None:
                yield name, root

    # -- optimizers --------------------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer, compared: bool) -> None:
        self.stepping = True
        if not compared:
            self.losses, self.batch_norms = [], {}
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        strategy = strategy_with_towers()
        number = self._number_of(optimizer)
        self._name(parameters, number)
        at = len(self.seen.steps)
        rates = self.repairs.rates[at] if at < len(self.repairs.rates) else ()
        for group, rate in zip(optimizer.param_groups, rates, strict=False):
            group["lr"] = rate
        names = [self._names[id(p)] for p in parameters]
        foreign, unsynced = [], []
        if strategy is not None:
            held = strategy.engine.unsynced_gradients()
            for p, name in zip(parameters, names, strict=True):
                if p.grad is not None and not strategy.is_mirrored(p):
                    foreign.append(name)
                elif id(p) in held:
                    unsynced.append(name)
        step = Step(
            optimizer=(number, type(optimizer).__name__),
            line=script_line(),
            losses=self.losses,
            gradients={n: None if p.grad is None else sketch(p.grad) for n, p in zip(names, parameters, strict=True)},
            before={n: bits(p) for n, p in zip(names, parameters, strict=True)},
            rates=[float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
            schedules=_schedules(),
            foreign=foreign,
            unsynced=unsynced,
            batch_norms=list(self.batch_norms),
        )
        self.losses, self.batch_norms = [], {}
        self.seen.steps.append(step)

    def after_step(self, optimizer: Optimizer, compared: bool) -> None:
        self.stepping = False
        if not compared:
            return
        step = self.seen.steps[-1]
        self.pointers = {p.untyped_storage().data_ptr(): name for name, p in self._parameters.items()}
        step.after = {name: sketch(self._parameters[name]) for name in step.before}
        several = self.seen.towers > 1 and not self.seen.virtual
        step.buffers = {name: self._sketch(name, held) for name, held in buffers_of(self._living_roots(), several)}

    def _sketch(self, name: str, buffer: Tensor) -> Sketch:
        """The sketch of a buffer; most of the large ones (masks, tables) never change."""
        known = self._buffers.get(name)
        if known is None or known.digest != bits(buffer):
            self._buffers[name] = known = sketch(buffer)
        return known

    def _number_of(self, optimizer: Optimizer) -> int:
        for number, known in enumerate(self._optimizers):
            if known is optimizer:
                return number
        self._optimizers.append(optimizer)
        return len(self._optimizers) - 1

    def _name(self, parameters: list[Tensor], optimizer: int) -> None:
        """Give names to an optimizer's parameters: their paths, else their places in it."""
        if all(id(p) in self._names for p in parameters):
            return
        paths = {id(p): f"{name}.{path}" for name, root in self._living_roots() for path, p in root.named_parameters()}
        for i, p in enumerate(parameters):
            if id(p) not in self._names:
                name = paths.get(id(p), f"parameter {i} of optimizer {optimizer}")
                self._names[id(p)] = name
                self._parameters[name] = p

    def _digests(self) -> dict[str, str]:
        return {name: bits(p) for name, p in self._parameters.items()}


def _dtype_of(number: bool | int | float) -> str:
    """How exact a number is: as a float32 where it is one, as what ``item()`` of a tensor gives."""
    if not isinstance(number, float):
        return "int64"
    return "float32" if number == float(torch.tensor(number, dtype=torch.float32)) else "float64"


def _schedules() -> dict[str, int]:
    """How many steps each living scheduler has made; torch tells nobody when one steps."""
    found: dict[str, int] = {}
    numbers: Counter[str] = Counter()
    for candidate in gc.get_objects():
        if issubclass(type(candidate), LRScheduler):
            name = type(candidate).__name__
            found[f"{name}[{numbers[name]}]" if numbers[name] else name] = int(candidate.last_epoch)
            numbers[name] += 1
    return found
