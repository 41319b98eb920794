"""A decorator that replaces functions of Keras by functions that call them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

Replacement = Callable[..., Any]


def around(owner: Any, *names: str) -> Callable[[Replacement], Replacement]:
    """Returns a decorator that replaces functions of ``owner``. The original is the first argument of the replacement.

    Args:
        owner: a module or a class.
        names: the names of the functions.

    Raises:
        AttributeError: a name does not exist.
    """

    def replace(function: Replacement) -> Replacement:
        for name in names:
            setattr(owner, name, _replaced(getattr(owner, name), function))
        return function

    return replace


def _replaced(original: Callable[..., Any], function: Replacement) -> Callable[..., Any]:
    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    # Keras reads the parameters without following wrappers.
    replaced.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return replaced
