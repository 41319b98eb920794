"""Local steps: towers step independently, and average parameters every few steps (docs/advanced/slow-networks.md).

[Note: the local gradient] A tower steps with its contribution to the average of a step: the gradient of
``towers * sum(own losses) / G`` from ``compute_average_loss``. G is the size of the global batch. With even shares,
that is the gradient of the tower's own mean. With uneven shares, a tower with more examples takes the larger step.
Every example then has the same weight in the mean of the parameters: with SGD and ``every=1``, it is the step of
every-step averaging. The mean over a tower's own examples would result in a mean of means.

[Note: runs are counted, not optimizer steps] All towers must synchronise at the same moment, but a ``GradScaler`` may
skip an optimizer's step on one tower only. Runs with a backward are therefore counted, and the towers synchronise when
the function has returned. A tower that skipped a step has not moved.

[Note: what is averaged] A parameter that no tower's optimizer has stepped since the last synchronisation is the same on
all towers, and is not sent. For this, towers exchange which parameters they have stepped. An anchor is copied just
before the first step of its parameter, so frozen parameters have none.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mirrored.events import Events
from mirrored.interceptor import interceptor
from towers.collectives.agreement import announce
from towers.collectives.communicator import Communicator, InStep
from towers.collectives.values import together
from towers.gradients.averager import GradientAverager, Hooks
from towers.gradients.reductions import average_flat
from towers.options import CommunicationOptions
from towers.system.autograd_hooks import GradientHook
from towers.system.messages import get_logger
from towers.system.profiling import range_
from towers.system.tensors import Named

log = get_logger("mirrored")
_BYTES = 64 << 20  # averaged at once

_REFUSED = {
    "central": "CentralStorageStrategy has one copy of the parameters: take MirroredStrategy",
    "shard_optimizer": "shard_optimizer=True shares out one step: leave one of the two out",
    "virtual_towers": "virtual_towers promise the same bits on any number of towers: leave one of the two out",
    "nonfinite_gradients": "nonfinite_gradients={!r} needs communication in every backward: omit it",
}


def nesterov(anchors: Iterable[nn.Parameter]) -> Optimizer:
    """Returns the outer optimizer of the DiLoCo paper (arXiv:2311.08105): SGD, lr 0.7, Nesterov momentum 0.9."""
    return torch.optim.SGD(anchors, lr=0.7, momentum=0.9, nesterov=True)


@dataclasses.dataclass(frozen=True)
class LocalSGD:
    """Replaces the parameters by their mean over the towers every ``every`` training steps (arXiv:1805.09767).

    Args:
        every: the number of steps between synchronisations, at least 1.

    Raises:
        ValueError: ``every`` is not a whole number above 0.
    """

    every: int

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"{type(self).__name__}: every is {self.every!r}, but must be a whole number of steps > 0")


@dataclasses.dataclass(frozen=True)
class DiLoCo(LocalSGD):
    """Steps an outer optimizer with the mean of the towers' changes every ``every`` training steps.

    The outer optimizer's parameters are *anchors*: copies of the model's parameters after the last synchronisation, at
    least in float32. Their gradient is the mean over the towers of anchor minus parameter. All towers continue from the
    new anchors.

    Args:
        every: the number of steps between synchronisations, at least 1.
        outer: creates the outer optimizer from a list of anchors; it must be the same on all towers. Parameters that
            are first trained after the first synchronisation are added by ``add_param_group``. Default: SGD with a
            learning rate of 0.7 and Nesterov momentum of 0.9.

    Raises:
        ValueError: ``every`` is not a whole number above 0.
        TypeError: ``outer`` is not a function; or, at the first synchronisation, it did not return an optimizer.
    """

    outer: Callable[[Iterable[nn.Parameter]], Optimizer] = dataclasses.field(default=nesterov, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.outer):
            raise TypeError(
                f"DiLoCo(outer={self.outer!r}): give a function that makes the outer optimizer of the parameters that "
                "it is given: outer=lambda parameters: torch.optim.SGD(parameters, lr=0.7)"
            )


def checked(training: Mapping[str, Any], communication: CommunicationOptions) -> LocalSGD | None:
    """Returns the value of ``synchronize`` among a strategy's options, or None if ``mirrored verify`` disables it.

    Raises:
        TypeError: ``synchronize`` is not one of the classes above.
        ValueError: it is combined with an option that averages gradients or shards the optimizer's step.
    """
    way = training["synchronize"]
    if not isinstance(way, LocalSGD):
        raise TypeError(
            f"synchronize is {way!r}, but has to be mirrored.LocalSGD(every=16), "
            "mirrored.DiLoCo(every=16), or None: gradients are averaged in every step"
        )
    for name, reason in _REFUSED.items():
        if training[name] not in (None, False, "ignore"):
            raise ValueError(f"with synchronize= every tower steps by itself, while {reason.format(training[name])}")
    if communication.wire_dtype != "same" and not isinstance(way, DiLoCo):
        raise ValueError(
            f"wire_dtype={communication.wire_dtype!r} would round the parameters that LocalSGD averages: omit "
            "it, or use DiLoCo, which sends the towers' changes"
        )
    chosen: LocalSGD | None = interceptor().averaging(way)
    return chosen


class LocalGradients(GradientAverager):
    """An averager without parameters: it averages nothing, and only records backward passes.

    It runs no collectives, so it does not need its own channel.

    Attributes:
        trained: whether a backward outside ``no_sync`` occurred since the owner set this to False.
    """

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm)
        self.trained = False
        self._notices: list[GradientHook] = []

    def _notice(self) -> None:
        self._channel.health.train()
        self.trained = self.trained or self._hooks is not Hooks.ACCUMULATE

    def add(self, parameters: Sequence[Named]) -> None:
        tensors = [named.tensor for named in parameters]
        trainable = [p for p in tensors if p.is_floating_point() or p.is_complex()]
        self._notices += [GradientHook(p, lambda parameter: self._notice()) for p in trainable]

    def contribute_nothing(self) -> None:
        self._notice()

    def break_off_backward(self, error: BaseException) -> None:
        self.trained = False

    def averaged_since(self, number: int, parameters: Iterable[Tensor]) -> bool:
        return True

    def note_averaged(self, parameters: Iterable[Tensor], *, replaced: bool) -> None:
        self._notice()


@dataclass(eq=False)
class _Parameter:
    """A mirrored parameter.

    Attributes:
        stepped: whether an optimizer has stepped it since the last synchronisation.
        anchor: its value after the last synchronisation, at least in float32, if an outer optimizer steps it.
    """

    reference: weakref.ref[Tensor]
    stepped: bool = False
    anchor: nn.Parameter | None = None

    def value(self) -> Tensor:
        """Returns its value in the dtype in which values are averaged."""
        parameter = self.reference()
        assert parameter is not None
        return parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32))


class LocalTraining:
    """Synchronises the parameters of towers that step independently.

    Args:
        comm: the towers, or a single one.
        how: how often and how towers synchronise.
        events: the events of the strategy.
        check_every: the number of local steps after which a synchronisation is followed by a mirror check; None for no
            checks.

    Attributes:
        gradients: leaves gradients to each tower.
        steps: the number of steps since the last synchronisation, the same on all towers.
    """

    def __init__(self, comm: Communicator, how: LocalSGD, events: Events, check_every: int | None) -> None:
        self.gradients = LocalGradients(comm)
        self.steps = 0
        self._comm = comm
        self._how = how
        self._events = events
        self._check_every = check_every
        self._unchecked: int | None = None  # steps; None before the first synchronisation
        self._parameters: list[_Parameter] = []
        self._of: dict[int, _Parameter] = {}
        self._outer: Optimizer | None = None
        self._groups: list[list[int]] = []  # indices of parameters, as they were given to the outer optimizer
        self._reminded = False
        events.mirrored.append(self._add)
        events.before_step.append(self._before_step)
        events.end_run.append(self._end_run)

    def apart(self) -> bool:
        """Returns whether towers may hold different parameters now."""
        return self.steps > 0 or any(parameter.stepped for parameter in self._parameters)

    def _add(self, parameters: Sequence[Named]) -> None:
        for named in parameters:
            self._parameters.append(_Parameter(weakref.ref(named.tensor)))
            self._of[id(named.tensor)] = self._parameters[-1]

    # -- local steps -------------------------------------------------------------------------------------

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                parameter = self._of.get(id(p))
                if parameter is None or parameter.stepped or not p.requires_grad or parameter.reference() is not p:
                    continue
                parameter.stepped = True
                self._anchor(parameter)

    def _anchor(self, parameter: _Parameter) -> None:
        if parameter.anchor is None and isinstance(self._how, DiLoCo):
            parameter.anchor = nn.Parameter(parameter.value().clone())

    def _end_run(self) -> None:
        trained, self.gradients.trained = self.gradients.trained, False
        if not trained:
            self._remind()
            return
        self.steps += 1
        if self.steps >= self._how.every:
            self.synchronize()

    def _remind(self) -> None:
        if self.apart() and not self._reminded and self._comm.size > 1:
            self._reminded = True
            if self._comm.index == 0:
                log.info(
                    "this run does not train, and takes place between two synchronisations, when the towers' "
                    "parameters differ: to evaluate one model, call strategy.synchronize() before"
                )

    # -- synchronisations --------------------------------------------------------------------------------

    @torch.no_grad()
    def synchronize(self) -> None:
        """Makes the parameters equal on all towers now. All towers must call it.

        Raises:
            DisagreementError: on all towers, if some make another call.
            MirrorError: on all towers, if the parameters are not equal after it.
        """
        steps, call = self.steps, f"a synchronisation after {self.steps} local steps"
        with range_("mirrored::synchronize"), self._comm.health.during("synchronizing parameters"):
            local = "".join("-" if p.reference() is None else "01"[p.stepped] for p in self._parameters)
            towers = announce(self._comm, call, local)
            chosen = [i for i, flags in enumerate(zip(*towers, strict=True)) if "1" in flags and "-" not in flags]
            with InStep(self._comm):
                for numbers in self._pieces(chosen):
                    self._average([self._parameters[i] for i in numbers])
                if isinstance(self._how, DiLoCo):
                    self._step_outer(self._how, chosen)
        for parameter in self._parameters:
            parameter.stepped = False
        self.steps = 0
        due = self._unchecked is None or self._unchecked + steps >= (self._check_every or 0)
        self._unchecked = 0 if due else (self._unchecked or 0) + steps
        if due and self._check_every is not None:
            self._events.check(call)

    def _pieces(self, numbers: Sequence[int]) -> list[list[int]]:
        """Returns indices of parameters, in groups of about :data:`_BYTES` that are averaged at once."""
        ends = itertools.accumulate(self._parameters[i].value().nbytes for i in numbers)
        pieces = itertools.groupby(zip(numbers, ends, strict=True), lambda entry: entry[1] // _BYTES)
        return [[i for i, _ in piece] for _, piece in pieces]

    def _average(self, parameters: Sequence[_Parameter]) -> None:
        """Averages parameters, or their changes, which become the gradients of their anchors."""
        for parameter in parameters:
            self._anchor(parameter)  # other towers may have stepped it, but not this one
        values = [p.value() if p.anchor is None else p.anchor - p.value() for p in parameters]
        if self._comm.size > 1:
            values = together(values, partial(average_flat, self._comm))
        for parameter, mean in zip(parameters, values, strict=True):
            if parameter.anchor is None:
                _write(parameter, mean)
            else:
                parameter.anchor.grad = mean

    def _step_outer(self, how: DiLoCo, numbers: Sequence[int]) -> None:
        known = {i for group in self._groups for i in group}
        if new := [i for i in numbers if i not in known]:
            self._give_outer(how, new)
        if self._outer is not None:
            self._outer.step()
        for parameter in (self._parameters[i] for i in numbers):
            assert parameter.anchor is not None
            parameter.anchor.grad = None
            _write(parameter, parameter.anchor)

    def _give_outer(self, how: DiLoCo, numbers: list[int]) -> None:
        """Adds the anchors of these parameters to the outer optimizer, which the first call creates."""
        anchors: list[Any] = [self._parameters[i].anchor for i in numbers]
        if self._outer is not None:
            self._outer.add_param_group({"params": anchors})
        elif not isinstance(made := how.outer(anchors), Optimizer):
            raise TypeError(f"DiLoCo(outer=…) has returned {made!r}, but has to return an optimizer of torch.optim")
        else:
            self._outer = made
        self._groups.append(numbers)

    # -- checkpoints -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the local steps since the last synchronisation, the anchors and the outer optimizer's state."""
        return {
            "kind": type(self._how).__name__,
            "steps": self.steps,
            "unchecked": self._unchecked,
            "stepped": [i for i, parameter in enumerate(self._parameters) if parameter.stepped],
            "anchors": {i: p.anchor.detach() for i, p in enumerate(self._parameters) if p.anchor is not None},
            "groups": [list(group) for group in self._groups],
            "outer": self._outer.state_dict() if self._outer is not None else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from the state of :meth:`state_dict`, with the same parameters.

        Raises:
            ValueError: the state is that of another class of ``synchronize``, or of other parameters.
        """
        if state["kind"] != type(self._how).__name__:
            raise ValueError(f"it was synchronised by {state['kind']}, and is by {type(self._how).__name__} here")
        for i, parameter in enumerate(self._parameters):
            anchor = state["anchors"].get(i)
            parameter.stepped = i in state["stepped"]
            parameter.anchor = None if anchor is None else nn.Parameter(anchor.to(parameter.value().device, copy=True))
        self.steps, self._unchecked = state["steps"], state["unchecked"]
        self._outer, self._groups = None, []
        if isinstance(self._how, DiLoCo):
            for group in state["groups"]:
                self._give_outer(self._how, list(group))
            if self._outer is not None:
                self._outer.load_state_dict(state["outer"])


def _write(parameter: _Parameter, value: Tensor) -> None:
    tensor = parameter.reference()
    assert tensor is not None
    tensor.copy_(value.detach())
