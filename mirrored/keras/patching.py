"""Replaces functions of Keras by functions that call them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

Replacement = Callable[..., Any]


def around(owner: Any, name: str) -> Callable[[Replacement], Replacement]:
    """A decorator: the function stands in place of ``owner.name``, and gets the original as its first argument.

    Args:
        owner: a module or a class.

    Raises:
        AttributeError: there is no such name.
    """
    original = getattr(owner, name)

    def replace(function: Replacement) -> Replacement:
        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        # Keras looks at parameters, without following wrappers.
        replaced.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
        setattr(owner, name, replaced)
        return function

    return replace
