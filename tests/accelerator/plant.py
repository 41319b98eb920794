"""Planting one fault in a module that is loaded already."""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any


def plant(module: str, right: str, wrong: str) -> None:
    """Let the functions of a module, and whoever holds them, do what they would do with another line in its source."""
    old = importlib.import_module(module)
    source = inspect.getsource(old)
    assert source.count(right) == 1, f"{module} has {source.count(right)} times: {right}"
    new = types.ModuleType(module)
    new.__dict__.update({"__file__": old.__file__, "__package__": old.__package__})
    exec(compile(source.replace(right, wrong), str(old.__file__), "exec"), new.__dict__)
    changed = dict(_functions(new))
    for name, function in _functions(old):
        function.__code__ = changed[name].__code__


def _functions(module: Any) -> Iterator[tuple[str, Any]]:
    for name, thing in vars(module).items():
        owners = vars(thing).items() if inspect.isclass(thing) else [(name, thing)]
        for inner, attribute in owners:
            function = inspect.unwrap(attribute) if callable(attribute) else attribute
            if inspect.isfunction(function) and function.__module__ == module.__name__:
                yield f"{name}.{inner}", function


def with_fault(fault: tuple[str, str, str], fn: Callable[..., Any], *args: Any) -> Any:
    """``fn(*args)`` after a fault was planted in this process."""
    plant(*fault)
    return fn(*args)
