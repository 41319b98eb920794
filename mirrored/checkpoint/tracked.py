"""The kinds of objects whose state is saved."""

from __future__ import annotations

import collections
import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler

from mirrored.attached import metrics
from mirrored.checkpoint.codec import sharded_in
from mirrored.variables import variables_in
from towers.system.tensors import is_dtensor, own_part
from towers.system.torch_private import (
    inner_schedules,
    own_buffers,
    own_parameters,
    set_state_versions,
    state_versions,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_LIKE_THE_PARAMETER = {
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "momentum_buffer",
    "square_avg",
    "grad_avg",
    "acc_delta",
    "exp_inf",
    "sum",
    "prev",
    "ax",
}
"""The entries of torch optimizers' state that have the shape of their parameter."""

IsMirrored = Callable[[Tensor], bool]

Rollback = Callable[[], None]
"""Gives an object its earlier state, even after a load that failed partly."""

_VERSIONS, _METRICS, _CLASS = "mirrored.versions", "mirrored.metrics", "mirrored.class"
_VARIABLES = "mirrored.variables"
_BESIDE = (_VERSIONS, _METRICS, _CLASS, _VARIABLES)


class Tracked(ABC):
    """One named object that is saved.

    Attributes:
        name: the user's name for it.
        skip_code: whether functions in its state are left out.
    """

    skip_code = False

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def state(self) -> Any:
        """Returns the object's current state."""

    @abstractmethod
    def load(self, state: Any) -> None:
        """Loads a state. The object may keep parts of it."""

    @abstractmethod
    def rollback(self) -> Rollback:
        """Returns a function that restores the current state, even after a load that failed partly."""

    def problem(self, state: Any) -> str | None:
        """Returns why ``state`` does not fit, as far as this is known before loading, or None.

        The tensors of ``state`` may be "meta" tensors.
        """
        return None

    def is_equal_everywhere(self, value: Tensor) -> bool:
        """Returns whether a tensor of the object's state is known to be equal on all towers."""
        return False

    def places(self, state: Any) -> dict[str, DTensor]:
        """Returns this run's sharded tensors by their names in a checkpoint, whose parts this tower has to read.

        Args:
            state: the state in the checkpoint, with "meta" tensors.
        """
        with contextlib.suppress(Exception):  # this run may only read, and a state_dict may raise any exception
            return sharded_in(self.state(), self.name, skip_code=self.skip_code)
        return {}


class TrackedModule(Tracked):
    """A model. Its parameters are mirrored, and its buffers may differ between towers."""

    def __init__(self, name: str, module: nn.Module, is_mirrored: IsMirrored) -> None:
        super().__init__(name)
        self._module = module
        self._is_mirrored = is_mirrored
        self._mirrored: set[int] = set()

    def state(self) -> Any:
        self._mirrored = {p.data_ptr() for p in self._module.parameters() if not is_lazy(p) and self._is_mirrored(p)}
        state = self._module.state_dict()
        # torch stores versions as an attribute of the state. Modules need them to read states of older versions.
        extra = {_VERSIONS: state_versions(state)}
        if metric_states := metrics.states_of(self._module):
            extra[_METRICS] = metric_states
        if variables := variables_in(self._module):
            extra[_VARIABLES] = {path: variable.state_dict() for path, variable in variables.items()}
        return {**state, **extra}

    def is_equal_everywhere(self, value: Tensor) -> bool:
        return value.data_ptr() in self._mirrored

    def places(self, state: Any) -> dict[str, DTensor]:
        here = self._module.state_dict()  # its other tensors may have no values yet
        return sharded_in({key: value for key, value in here.items() if is_dtensor(value)}, self.name)

    def problem(self, state: Any) -> str | None:
        if not isinstance(state, Mapping):
            return f"it is saved as a {type(state).__name__}, not as a model"
        versions = state.get(_VERSIONS, {})
        if not isinstance(versions, dict) or not all(isinstance(value, dict) for value in versions.values()):
            return "its versions in the checkpoint are malformed"
        here, variables = self._module.state_dict(), state.get(_VARIABLES, {})
        if not isinstance(variables, dict) or not all(isinstance(value, dict) for value in variables.values()):
            return "its variables in the checkpoint are malformed"
        return (
            mismatch(here, _without_additions(state))
            or metrics.problem_of(self._module, state.get(_METRICS, {}))
            or mismatch(dict.fromkeys(variables_in(self._module)), dict.fromkeys(variables))
        )

    def load(self, state: Any) -> None:
        tensors = collections.OrderedDict(_without_additions(state))
        set_state_versions(tensors, state.get(_VERSIONS, {}))
        self._module.load_state_dict(tensors)
        metrics.set_states_of(self._module, state.get(_METRICS, {}))
        for path, variable in variables_in(self._module).items():
            variable.load_state_dict(state[_VARIABLES][path])

    def rollback(self) -> Rollback:
        # Values are copied to the CPU, because GPUs may not have enough memory for a second model.
        tensors = [*self._module.parameters(), *self._module.buffers()]
        values = [(t, t.detach().to("cpu", copy=True)) for t in map(own_part, tensors) if not is_lazy(t)]
        lazy = [(t, type(t)) for t in tensors if is_lazy(t)]
        layers = [layer for layer in self._module.modules() if not isinstance(layer, torch.jit.ScriptModule)]
        tables: list[tuple[Any, dict[str, Any]]] = []
        tables += [(table, dict(table)) for layer in layers for table in (own_parameters(layer), own_buffers(layer))]
        extra = [(layer, copy.deepcopy(layer.get_extra_state())) for layer in layers if _has_extra_state(layer)]
        counted = metrics.states_of(self._module)
        tables += [(vars(variable), dict(vars(variable))) for variable in variables_in(self._module).values()]

        def roll_back() -> None:
            try:
                for layer, state in extra:
                    layer.set_extra_state(state)
            finally:  # also if a layer raises
                metrics.set_states_of(self._module, counted)
                for table, before in tables:
                    table.update(before)
                with torch.no_grad():
                    for tensor, value in values:
                        tensor.copy_(value)
                for tensor, kind in lazy:
                    if not is_lazy(tensor):  # the load gave it a shape
                        tensor.data = tensor.new_empty(0)
                        tensor.__class__ = kind

        return roll_back


class TrackedOptimizer(Tracked):
    """An optimizer. Its state is equal on all towers if its parameters are."""

    def __init__(self, name: str, optimizer: torch.optim.Optimizer, is_mirrored: IsMirrored) -> None:
        super().__init__(name)
        self._optimizer = optimizer
        self._is_mirrored = is_mirrored
        self._mirrored = False

    def state(self) -> Any:
        self._mirrored = all(self._is_mirrored(p) for group in self._optimizer.param_groups for p in group["params"])
        return {**self._optimizer.state_dict(), _CLASS: type(self._optimizer).__name__}

    def is_equal_everywhere(self, value: Tensor) -> bool:
        return self._mirrored

    def places(self, state: Any) -> dict[str, DTensor]:
        # The optimizer may have no state yet.
        sharded = {n: p for n, p in _numbered(self._optimizer.param_groups) if is_dtensor(p)}
        like_parameters = {
            number: {
                name: parameter
                for name, value in state["state"].get(number, {}).items()
                if isinstance(value, Tensor) and value.shape == parameter.shape
            }
            for number, parameter in sharded.items()
        }
        return sharded_in({"state": like_parameters}, self.name)

    def problem(self, state: Any) -> str | None:
        groups = self._optimizer.param_groups
        if problem := _class_problem(self._optimizer, state):
            return problem
        try:
            saved = [len(group["params"]) for group in state["param_groups"]]
            numbers = [number for group in state["param_groups"] for number in group["params"]]
            moments = [
                (number, value)
                for number, entry in state["state"].items()
                for name, value in entry.items()
                if name in _LIKE_THE_PARAMETER and isinstance(value, Tensor)
            ]
        except (TypeError, KeyError, AttributeError, IndexError):
            return "it is not saved as an optimizer"
        here = [len(group["params"]) for group in groups]
        if saved != here:
            return f"its groups have {here} parameters here, and {saved} in the checkpoint"
        lacking = [name for name in self._optimizer.defaults if any(name not in g for g in state["param_groups"])]
        unknown = [name for name in state["param_groups"][0] if name not in groups[0]] if saved else []
        if lacking and unknown:
            kind = type(self._optimizer).__name__
            return f"it is a {kind} here; that in the checkpoint has {', '.join(unknown)}, but no {', '.join(lacking)}"
        parameters = _numbered(groups)
        if numbers != [number for number, _ in parameters]:
            return f"its parameters are not numbered in the order that they have here, but {str(numbers)[:60]}"
        by_number = dict(parameters)
        if strange := [number for number in state["state"] if isinstance(number, int) and number not in by_number]:
            return f"it has the state of a parameter {strange[0]}, and only {len(by_number)} parameters"
        for number, moment in moments:
            p = by_number.get(number)
            if p is not None and moment.shape != p.shape and not is_lazy(p):
                return f"parameter {number} has shape {_shape(p)} here, and {_shape(moment)} in the checkpoint"
        return None

    def load(self, state: Any) -> None:
        self._optimizer.load_state_dict(_without_additions(state))
        # torch converts floating-point state to its parameter's dtype, even if it was saved in another dtype.
        for number, parameter in dict(_numbered(self._optimizer.param_groups)).items():
            loaded = self._optimizer.state.get(parameter, {})
            for name, value in state["state"].get(number, {}).items():
                if isinstance(value, Tensor) and name in loaded and loaded[name].dtype != value.dtype:
                    loaded[name] = value.to(loaded[name].device)

    def rollback(self) -> Rollback:
        # No copy is needed: a load replaces state and groups, and leaves the old ones unchanged.
        state, groups = self._optimizer.state, self._optimizer.param_groups
        settings = [dict(group) for group in groups]

        def roll_back() -> None:
            self._optimizer.state, self._optimizer.param_groups = state, groups
            for group, before in zip(groups, settings, strict=True):
                group.clear()
                group.update(before)

        return roll_back


class TrackedContainer(Tracked):
    """A dict or list with the progress of the script. A load replaces its contents, not the object."""

    def __init__(self, name: str, container: dict[Any, Any] | list[Any]) -> None:
        super().__init__(name)
        self._container = container

    def state(self) -> Any:
        return dict(self._container) if isinstance(self._container, dict) else list(self._container)

    def problem(self, state: Any) -> str | None:
        if not isinstance(state, dict if isinstance(self._container, dict) else list):
            return f"it is a {type(self._container).__name__} here, and a {type(state).__name__} in the checkpoint"
        return None

    def load(self, state: Any) -> None:
        if isinstance(self._container, dict):
            self._container.clear()
            self._container.update(state)
        else:
            self._container[:] = state

    def rollback(self) -> Rollback:
        before = self.state()
        return lambda: self.load(before)


class TrackedObject(Tracked):
    """Any object with ``state_dict`` and ``load_state_dict``: a scaler, a dataset, a custom class."""

    def __init__(self, name: str, target: Any) -> None:
        super().__init__(name)
        self._object = target

    def state(self) -> Any:
        return self._object.state_dict()

    def load(self, state: Any) -> None:
        self._object.load_state_dict(state)

    def rollback(self) -> Rollback:
        # Attributes that are not part of the state are also restored, such as the position of a loop over the data.
        state = copy.deepcopy(self._object.state_dict())
        attributes = getattr(self._object, "__dict__", None)
        before = attributes.copy() if isinstance(attributes, dict) else {}

        def roll_back() -> None:
            try:
                self._object.load_state_dict(state)
            finally:
                if isinstance(attributes, dict):
                    attributes.update(before)
                    for name in attributes.keys() - before.keys():
                        del attributes[name]

        return roll_back


class TrackedSchedule(TrackedObject):
    """A learning-rate schedule. Its ``load_state_dict`` turns every entry of a state into an attribute."""

    skip_code = True

    def state(self) -> Any:
        return {**super().state(), _CLASS: type(self._object).__name__}

    def problem(self, state: Any) -> str | None:
        return _class_problem(self._object, state) or _schedule_problem(self._object, _without_additions(state))

    def load(self, state: Any) -> None:
        super().load(_without_additions(state))


def track_all(objects: Mapping[Any, Any], is_mirrored: IsMirrored) -> Iterator[Tracked]:
    """Yields the tracked objects of a script. Those in a dict or a list are called "name.key".

    Raises:
        ValueError, TypeError: see :func:`track`.
    """
    for name, target in objects.items():
        inner = dict(_inner(target))
        stateful = [part for part in inner.values() if _has_state(part) or any(_has_state(p) for _, p in _inner(part))]
        if not stateful:
            yield track(name, target, is_mirrored)
        elif len(stateful) < len(inner):
            raise TypeError(f"{name!r} has objects with a state and others: give the others another name")
        else:
            yield from track_all({f"{name}.{key}": part for key, part in inner.items()}, is_mirrored)


def _inner(target: Any) -> Iterable[tuple[Any, Any]]:
    """Returns the entries of a dict, list or tuple that has no state itself, by their keys."""
    if _has_state(target):
        return ()
    if isinstance(target, dict):
        return target.items()
    return enumerate(target) if isinstance(target, (list, tuple)) else ()


def _has_state(target: Any) -> bool:
    return callable(getattr(target, "state_dict", None)) and callable(getattr(target, "load_state_dict", None))


def track(name: object, target: Any, is_mirrored: IsMirrored) -> Tracked:
    """Returns a tracked object of the kind that fits ``target``.

    Raises:
        ValueError: the name is not a string, is empty, contains "/" or "@", or starts with "mirrored.".
        TypeError: ``target`` has no state that can be saved.
    """
    if not isinstance(name, str) or not name or set(name) & set("/@") or name.startswith("mirrored."):
        raise ValueError(
            f"{name!r} cannot be the name of a saved object: use a string without '/' and '@', such as 'model'"
        )
    if isinstance(target, nn.Module):
        return TrackedModule(name, target, is_mirrored)
    if isinstance(target, torch.optim.Optimizer):
        return TrackedOptimizer(name, target, is_mirrored)
    if isinstance(target, LRScheduler):
        return TrackedSchedule(name, target)
    if _has_state(target):
        return TrackedObject(name, target)
    if isinstance(target, (dict, list)):
        return TrackedContainer(name, target)
    raise TypeError(
        f"{name!r} is a {type(target).__name__}, which has no state_dict and load_state_dict; give models, optimizers, "
        "schedules, datasets, dicts, lists, or objects with these two methods"
    )


def mismatch(here: Mapping[str, Any], saved: Mapping[str, Any]) -> str | None:
    """Returns how a model's state and a saved state differ in names, shapes or dtypes, or None if they match."""
    problems = [f"{key} is missing in the checkpoint" for key in here if key not in saved]
    problems += [f"{key} is in the checkpoint only" for key in saved if key not in here]
    for key, value in here.items():
        other = saved.get(key, value)
        if isinstance(value, Tensor) is not isinstance(other, Tensor):
            problems.append(f"{key} is a {type(value).__name__} here, and a {type(other).__name__} in the checkpoint")
        elif isinstance(value, Tensor) and not is_lazy(value):
            if value.shape != other.shape:
                problems.append(f"{key} has shape {_shape(value)} here, and {_shape(other)} in the checkpoint")
            elif value.dtype != other.dtype:
                problems.append(f"{key} is {value.dtype} here, and {other.dtype} in the checkpoint")
    if not problems:
        return None
    more = f"; {len(problems) - 3} more" if len(problems) > 3 else ""
    return "; ".join(problems[:3]) + more


def _class_problem(target: object, state: Any) -> str | None:
    """Returns that a state is of an object of another class, if the checkpoint contains the class.

    Optimizers and schedules of other classes may have the same entries, but compute with them differently.
    """
    here = type(target).__name__
    saved = state.get(_CLASS, here) if isinstance(state, Mapping) else here
    return None if saved == here else f"it is of class {here} here, and of class {saved} in the checkpoint"


def _without_additions(state: Any) -> Any:
    """Returns a state as the object itself has saved it."""
    return {key: value for key, value in state.items() if key not in _BESIDE} if isinstance(state, Mapping) else state


def _schedule_problem(schedule: Any, state: Any) -> str | None:
    """Returns why a state does not fit: an entry would overwrite a method or the optimizer. Others may differ."""
    if not isinstance(state, Mapping):
        return f"it is saved as a {type(state).__name__}, not as a schedule"
    here = schedule.state_dict()
    for key in state.keys() - here.keys():
        if not isinstance(key, str) or key in vars(schedule) or callable(getattr(schedule, key, None)):
            return f"it has no state {key!r}"
    saved, inner = inner_schedules(state), inner_schedules(schedule)
    if not isinstance(saved, list) or len(saved) != len(inner):
        return f"it is made of {len(inner)} schedules here, and of others in the checkpoint"
    return next(filter(None, map(_schedule_problem, inner, saved)), None)


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


def _numbered(groups: Sequence[Mapping[str, Any]]) -> list[tuple[int, Tensor]]:
    """Returns the parameters of an optimizer, with their numbers in its ``state_dict()``. Duplicates share a number."""
    parameters = [p for group in groups for p in group["params"]]
    numbers: dict[int, int] = {}
    return [(numbers.setdefault(id(p), number), p) for number, p in enumerate(parameters)]


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state
