"""Records what a script does on one tower, by the hooks of torch and the observer's."""

from __future__ import annotations

import gc
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from mirrored.context import current_frame, strategy_with_towers
from mirrored.data.dataset import DistributedDataset, MapDataset
from mirrored.data.transfer import Batch
from mirrored.observer import Observer
from mirrored.stand_in import holds_stand_in, shares_at_hand
from mirrored.strategy import Strategy
from mirrored.verification.randomness import Shapes
from mirrored.verification.repairs import Repairs
from mirrored.verification.rounding import Unrest
from mirrored.verification.seen import Draw, Loss, Result, Run, Seen, Step, bits, rows, sketch
from mirrored.verification.watch import Watcher, generator_state, other_generators, script_line
from towers import tree as trees
from towers.devices import Device
from towers.topology import DEVICES

_RESULT_VALUES = 16


class Enough(BaseException):
    """The script has shown what was to be seen; ends it."""


class Recorder(Observer):
    """Notes the first ``limit`` steps of a script's optimizers, and the evaluation that follows them.

    The loop over a distributed dataset in which an optimizer has made its last step ends as if the epoch were
    over; that step takes the epoch's last batch, whose shares are the likeliest to be uneven. The next step of
    that optimizer ends the script by :class:`Enough`.

    Attributes:
        seen: what was recorded.
        repairs: what is changed in this run.
        run: the call of ``strategy.run`` that is under way.
        tower: this tower's index.
        losses: of the backwards since the last step.
        batch_norms: layers that took statistics of this tower alone since the last step.
        pointers: name of the known parameter whose memory begins there.
        stepping: whether an optimizer's step is under way.
        shapes: of the random numbers that one tower has drawn, by run and draw; None on one tower.

    Args:
        unrest: whether the results of modules are moved by rounding.
    """

    def __init__(self, limit: int, repairs: Repairs, shapes: Shapes | None = None, unrest: bool = False) -> None:
        self.seen = Seen()
        self.shapes = shapes
        self._unrest = Unrest() if unrest else None
        self.repairs = repairs
        self.run: Run | None = None
        self.tower = 0
        self.losses: list[Loss] = []
        self.batch_norms: dict[str, None] = {}
        self.pointers: dict[int, str] = {}
        self.stepping = False
        self.watcher = Watcher(self)
        self._limit = limit
        self._counts: dict[int, int] = {}
        self._optimizers: list[Optimizer] = []
        self._datasets: list[DistributedDataset] = []
        self._parameters: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}
        self._roots: list[tuple[str, weakref.ref[nn.Module]]] = []
        self._modules: list[nn.Module] = []
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        register_module_forward_pre_hook(self._before_module)
        register_module_forward_hook(self._after_module, always_call=True)

    # -- the observer ------------------------------------------------------------------------------------

    def devices(self, requested: Sequence[Device] | None) -> Sequence[Device] | None:
        """The devices of this comparison, whatever the script names."""
        return os.environ[DEVICES].split(",")

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
            if not self.seen.runs or self.seen.runs[-1].steps != run.steps:
                run.entered = self._digests()
            self.seen.runs.append(run)
            others = other_generators()
            self.run, self.watcher.drawn = run, generator_state(self.device())
            try:
                return fn(*args, **kwargs)
            finally:
                self.run = None
                if generator_state(self.device()) != self.watcher.drawn and not self.seen.virtual:
                    run.draws.append(Draw("a function of torch that is not followed", None, self.watcher.drawn, 0))
                for by, state in other_generators().items():
                    if others[by] != state:
                        run.draws.append(Draw(by, None, str(state), 0))

        return recorded

    def batches(
        self, dataset: DistributedDataset, load: Callable[[int], Iterator[Batch]], first: int
    ) -> Iterator[Batch]:
        if isinstance(dataset, MapDataset) and dataset not in self._datasets:
            self._datasets.append(dataset)
            self.seen.datasets.append(dataset.examples)
        done_at_first = sum(self._counts.values())
        over_at_first = self._over(self._limit)
        batches, at = load(first), first
        while (item := next(batches, None)) is not None:
            at += 1
            yield item
            if self._over(self._limit) and not over_at_first:
                self.seen.cut = True
                return
            steps_here = sum(self._counts.values()) > done_at_first
            if steps_here and self._over(self._limit - 1) and isinstance(dataset, MapDataset) and at < len(dataset) - 1:
                at, self.seen.cut = len(dataset) - 1, True
                batches = load(at)

    def returned(self, call: str, result: Any) -> None:
        values: list[bool | int | float] = []
        count = 0
        for leaf in trees.leaves(result):
            if isinstance(leaf, (bool, int, float)):
                values.append(leaf)
                count += 1
            elif hasattr(leaf, "reshape") and not getattr(leaf, "is_sparse", False):
                flat = leaf.reshape(-1)
                values += [v for v in flat[:_RESULT_VALUES].tolist() if isinstance(v, (bool, int, float))]
                count += len(flat)
        integers = frozenset(i for i, value in enumerate(values) if not isinstance(value, float))
        numbers = tuple(map(float, values))
        self.seen.results.append(Result(call, script_line(), len(self.seen.steps), numbers, integers, count))

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

    # -- modules -----------------------------------------------------------------------------------------

    def _before_module(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
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
            self.seen.evaluated.setdefault(len(self.seen.steps), []).extend(examples)

    def _after_module(self, module: nn.Module, inputs: object, output: Any) -> Any:
        while self._modules and self._modules.pop() is not module:
            pass
        return self._unrest.of(output) if self._unrest is not None else None

    def _living_roots(self) -> Iterator[tuple[str, nn.Module]]:
        for name, reference in self._roots:
            if (root := reference()) is not None:
                yield name, root

    # -- optimizers --------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        strategy = strategy_with_towers()
        if not parameters or (strategy is not None and strategy.engine.is_twin(optimizer)):
            return
        if self._counts.get(id(optimizer), 0) >= self._limit:
            self.seen.cut = True
            raise Enough
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
        self.stepping = True

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if not self.stepping or not self._optimizers or all(optimizer is not known for known in self._optimizers):
            return
        self.stepping = False
        self._counts[id(optimizer)] = self._counts.get(id(optimizer), 0) + 1
        step = self.seen.steps[-1]
        self.pointers = {p.untyped_storage().data_ptr(): name for name, p in self._parameters.items()}
        step.after = {name: sketch(self._parameters[name]) for name in step.before}

    def _over(self, count: int) -> bool:
        return any(done >= count for done in self._counts.values())

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
