"""Tensors that a group for the CPU cannot take, and who can."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

_Method = TypeVar("_Method", bound=Callable[..., Any])


def of_any_device(method: _Method) -> _Method:
    """Calls with tensors that are not on the CPU go to the group for their device."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        device = _device(args)
        if device is None or device.type == "cpu":
            return method(self, *args, **kwargs)
        return getattr(self.beside(), method.__name__)(*args, **kwargs)

    return cast(_Method, call)


def _device(values: Any) -> torch.device | None:
    for value in values:
        if isinstance(value, Tensor):
            return value.device
        if isinstance(value, (list, tuple)):
            found = _device(value)
            if found is not None:
                return found
    return None
