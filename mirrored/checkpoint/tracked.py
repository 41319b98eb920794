"""The things whose state is saved, each in its own way."""

from __future__ import annotations

import collections
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler

from mirrored.attached import metrics
from mirrored.checkpoint import way_back
from mirrored.checkpoint.way_back import WayBack
from towers.system.torch_private import inner_schedules, set_state_versions, state_versions

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
"""State of torch's optimizers that has the shape of its parameter."""

IsMirrored = Callable[[Tensor], bool]


_VERSIONS, _METRICS = "mirrored.versions", "mirrored.metrics"
_BESIDE = (_VERSIONS, _METRICS)


class Tracked(ABC):
    """One thing that is saved, by name.

    Attributes:
        name: how the user calls it.
        skip_code: whether functions in its state are left out.
    """

    skip_code = False

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def state(self) -> Any:
        """Its state now."""

    @abstractmethod
    def load(self, state: Any) -> None:
        """Take a state on. It may become part of what is tracked."""

    @abstractmethod
    def way_back(self) -> WayBack:
        """What gives it back the state that it has now, whatever a load has done to it."""

    def problem(self, state: Any) -> str | None:
        """Why ``state``, whose tensors may be without data, does not fit, as far as can be seen before."""
        return None

    def is_equal_everywhere(self, value: Tensor) -> bool:
        """Whether a tensor of its state is known to be the same on all towers."""
        return False


class TrackedModule(Tracked):
    """A model, whose parameters are mirrored; its buffers may be each tower's own."""

    def __init__(self, name: str, module: nn.Module, is_mirrored: IsMirrored) -> None:
        super().__init__(name)
        self._module = module
        self._is_mirrored = is_mirrored
        self._mirrored: set[int] = set()

    def state(self) -> Any:
        self._mirrored = {p.data_ptr() for p in self._module.parameters() if not is_lazy(p) and self._is_mirrored(p)}
        state = self._module.state_dict()
        # What torch keeps beside the state: versions, by which modules know how to read what older ones have saved.
        extra = {_VERSIONS: state_versions(state)}
        if found := metrics.states_of(self._module):
            extra[_METRICS] = found
        return {**state, **extra}

    def is_equal_everywhere(self, value: Tensor) -> bool:
        return value.data_ptr() in self._mirrored

    def problem(self, state: Any) -> str | None:
        if not isinstance(state, Mapping):
            return f"it is saved as a {type(state).__name__}, not as a model"
        versions = state.get(_VERSIONS, {})
        if not isinstance(versions, dict) or not all(isinstance(value, dict) for value in versions.values()):
            return "it is saved with versions that are none"
        here = self._module.state_dict()
        return mismatch(here, {key: value for key, value in state.items() if key not in _BESIDE}) or metrics.problem_of(
            self._module, state.get(_METRICS, {})
        )

    def load(self, state: Any) -> None:
        own = collections.OrderedDict((key, value) for key, value in state.items() if key not in _BESIDE)
        set_state_versions(own, state.get(_VERSIONS, {}))
        self._module.load_state_dict(own)
        metrics.set_states_of(self._module, state.get(_METRICS, {}))

    def way_back(self) -> WayBack:
        return way_back.of_module(self._module)


class TrackedOptimizer(Tracked):
    """An optimizer, whose state is the same on all towers where its parameters are."""

    def __init__(self, name: str, optimizer: torch.optim.Optimizer, is_mirrored: IsMirrored) -> None:
        super().__init__(name)
        self._optimizer = optimizer
        self._is_mirrored = is_mirrored
        self._mirrored = False

    def state(self) -> Any:
        self._mirrored = all(self._is_mirrored(p) for group in self._optimizer.param_groups for p in group["params"])
        return self._optimizer.state_dict()

    def is_equal_everywhere(self, value: Tensor) -> bool:
        return self._mirrored

    def problem(self, state: Any) -> str | None:
        groups = self._optimizer.param_groups
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
        self._optimizer.load_state_dict(state)
        # torch gives floating-point state the dtype of its parameter, also where it had another.
        for number, parameter in dict(_numbered(self._optimizer.param_groups)).items():
            kept = self._optimizer.state.get(parameter, {})
            for name, value in state["state"].get(number, {}).items():
                if isinstance(value, Tensor) and name in kept and kept[name].dtype != value.dtype:
                    kept[name] = value.to(kept[name].device)

    def way_back(self) -> WayBack:
        return way_back.of_optimizer(self._optimizer)


class TrackedContainer(Tracked):
    """A dict or a list that the script keeps its progress in; its contents are replaced, it stays the same object."""

    def __init__(self, name: str, container: dict[Any, Any] | list[Any]) -> None:
        super().__init__(name)
        self._container = container

    def state(self) -> Any:
        return self._container

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

    def way_back(self) -> WayBack:
        before = self._container.copy()
        return lambda: self.load(before)


class TrackedObject(Tracked):
    """Anything with ``state_dict`` and ``load_state_dict``: a scaler, a dataset, one's own."""

    def __init__(self, name: str, thing: Any) -> None:
        super().__init__(name)
        self._thing = thing

    def state(self) -> Any:
        return self._thing.state_dict()

    def load(self, state: Any) -> None:
        self._thing.load_state_dict(state)

    def way_back(self) -> WayBack:
        return way_back.of_object(self._thing)


class TrackedSchedule(TrackedObject):
    """A learning-rate schedule, which makes whatever its state holds its attributes."""

    skip_code = True

    def problem(self, state: Any) -> str | None:
        return _what_schedules_lack(self._thing, state)


def track(name: object, thing: Any, is_mirrored: IsMirrored) -> Tracked:
    """How a thing of the user's is saved.

    Raises:
        ValueError: the name cannot be one.
        TypeError: it has no state that could be saved.
    """
    if not isinstance(name, str) or not name or set(name) & set("/@") or name.startswith("mirrored."):
        raise ValueError(f"{name!r} cannot name what is saved: give a text without '/' and '@', such as 'model'")
    if isinstance(thing, nn.Module):
        return TrackedModule(name, thing, is_mirrored)
    if isinstance(thing, torch.optim.Optimizer):
        return TrackedOptimizer(name, thing, is_mirrored)
    if isinstance(thing, LRScheduler):
        return TrackedSchedule(name, thing)
    if type(thing) in (dict, list):
        return TrackedContainer(name, thing)
    if callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None)):
        return TrackedObject(name, thing)
    raise TypeError(
        f"{name!r} is a {type(thing).__name__}, which has no state_dict and load_state_dict; give models, optimizers, "
        "schedules, datasets, dicts, lists, or objects with these two methods"
    )


def mismatch(here: Mapping[str, Any], saved: Mapping[str, Any]) -> str | None:
    """What of a model's state differs in names, shapes or dtypes, in one sentence; None where nothing does."""
    found = [f"{key} is missing in the checkpoint" for key in here if key not in saved]
    found += [f"{key} is in the checkpoint only" for key in saved if key not in here]
    for key, value in here.items():
        other = saved.get(key, value)
        if isinstance(value, Tensor) is not isinstance(other, Tensor):
            found.append(f"{key} is a {type(value).__name__} here, and a {type(other).__name__} in the checkpoint")
        elif isinstance(value, Tensor) and not is_lazy(value):
            if value.shape != other.shape:
                found.append(f"{key} has shape {_shape(value)} here, and {_shape(other)} in the checkpoint")
            elif value.dtype != other.dtype:
                found.append(f"{key} is {value.dtype} here, and {other.dtype} in the checkpoint")
    if not found:
        return None
    more = f"; {len(found) - 3} more" if len(found) > 3 else ""
    return "; ".join(found[:3]) + more


def _what_schedules_lack(schedule: Any, state: Any) -> str | None:
    """What in a state stands for something that is no state here: a method, or the optimizer. Versions may differ."""
    if not isinstance(state, Mapping):
        return f"it is saved as a {type(state).__name__}, not as a schedule"
    here = schedule.state_dict()
    for key in state.keys() - here.keys():
        if not isinstance(key, str) or key in vars(schedule) or callable(getattr(schedule, key, None)):
            return f"it has no state {key!r}"
    saved, inner = inner_schedules(state), inner_schedules(schedule)
    if not isinstance(saved, list) or len(saved) != len(inner):
        return f"it is made of {len(inner)} schedules here, and of others in the checkpoint"
    return next(filter(None, map(_what_schedules_lack, inner, saved)), None)


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


def _numbered(groups: Sequence[Mapping[str, Any]]) -> list[tuple[int, Tensor]]:
    """The parameters of an optimizer with the numbers that its ``state_dict()`` gives them; one in it twice has one."""
    parameters = [p for group in groups for p in group["params"]]
    numbers: dict[int, int] = {}
    return [(numbers.setdefault(id(p), number), p) for number, p in enumerate(parameters)]
