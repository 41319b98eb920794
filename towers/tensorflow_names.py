"""Arguments by the names and places that TensorFlow gives them: an error that shows ours."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def instead_of(**ours: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """For a public function: arguments that it does not have, by TensorFlow's names, and what to write in their place.

    Given by name, or as one positional argument too many, they are a TypeError that says so; the function's signature
    stays what it is.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        places = [name for name, p in inspect.signature(function).parameters.items() if p.kind in kinds]
        most, foreign = len(places), frozenset(ours)

        @functools.wraps(function)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if len(args) > most or not foreign.isdisjoint(kwargs):
                raise TypeError(_advice(function, places, ours, len(args), kwargs))
            return function(*args, **kwargs)

        return checked

    return decorate


def _advice(
    function: Callable[..., Any], places: list[str], ours: dict[str, str], given: int, kwargs: dict[str, Any]
) -> str:
    name = function.__qualname__.removesuffix(".__init__")
    found = [foreign for foreign in ours if foreign in kwargs]
    if found:
        return "; ".join(f"{name}() has no argument {foreign}: {ours[foreign]}" for foreign in found)
    without_self = [place for place in places if place != "self"]
    instead = "; ".join(f"for TensorFlow's {foreign}: {advice}" for foreign, advice in ours.items())
    return (
        f"{name}() takes {len(without_self)} positional argument{'s' if len(without_self) != 1 else ''} "
        f"({', '.join(without_self)}), but was given {given - len(places) + len(without_self)}; {instead}"
    )
